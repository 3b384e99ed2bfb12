"""Other constants and missing parts of the default preset, for a moment: how much do they matter?

A variation assigns attributes of the policy's modules while a replay runs, in the process that
replays. Nothing but the evaluation uses this.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any

from prefixshield.core import ghosts, order, trial
from prefixshield.core.chains import Chains, Turned
from prefixshield.core.debtors import Collection
from prefixshield.errors import PrefixShieldError
from prefixshield.policies import adaptive

#: The policy as it is.
UNCHANGED = ""

#: What is assigned: owner, name of the attribute, value.
Assignments = Sequence[tuple[Any, str, Any]]


def _rules(shares: Iterable[float], calls: Iterable[bool] = (True, False)) -> Assignments:
    rules = tuple(order.Rule(share, called) for called, share in product(calls, shares))
    return [(trial, "RULES", rules)]


def _all_debtors_pay(*arguments: Any, floor: float, **more: Any) -> Collection:
    return Collection(*arguments, floor=0.0, **more)


def _no_discount(
    self: trial.Trial, keys: Sequence[trial.Key], accesses: int, t: float, discount: float
) -> None:
    _serve(self, keys, accesses, t, 0.0)


_serve = trial.Trial.serve


class _NoChains(Chains):
    """Nothing is ever an orphan."""

    def add(
        self,
        blocks: Sequence[int],
        group: str,
        keys: Sequence[Hashable],
        parents: Sequence[Hashable | None],
    ) -> Turned:
        return super().add(blocks, group, keys, [None] * len(blocks))


def _constant(owner: Any, name: str, *values: float) -> Mapping[str, Assignments]:
    return {f"{name} = {value:g}": [(owner, name, value)] for value in values}


def _shares(*values: tuple[float, ...]) -> Mapping[str, Assignments]:
    return {
        f"PROVEN_SHARES = {', '.join(f'{share:g}' for share in shares)}": _rules(shares)
        for shares in values
    }


#: Other values of every constant, by the constant; a variation's name is ``CONSTANT = value``.
CONSTANTS: Mapping[str, Mapping[str, Assignments]] = {
    "MINIATURE_BLOCKS": _constant(trial, "MINIATURE_BLOCKS", 128, 256, 1024),
    "MEMORY_PER_BLOCK": _constant(trial, "MEMORY_PER_BLOCK", 4, 8, 32, 64),
    "PROVEN_SHARES": _shares((0.9, 0.0), (0.8, 0.0, 0.4), (0.95, 0.0, 0.5), (0.0, 0.9, 0.5)),
    "MAX_CHANCES": _constant(order, "MAX_CHANCES", 0, 1, 2, 7),
    "FIRST_SHARE": _constant(order, "FIRST_SHARE", 0.0, 0.5, 0.8, 1.0),
    "AS_OLD": _constant(order, "AS_OLD", 0.0, 0.01, 0.1, 0.3),
    "GHOSTS_PER_BLOCK": _constant(ghosts, "GHOSTS_PER_BLOCK", 0.25, 0.5, 2.0, 4.0),
}

#: The preset without one of its parts, or with one that is fixed.
ABLATIONS: Mapping[str, Assignments] = {
    "debts always called in": _rules(trial.PROVEN_SHARES, (True,)),
    "debts never called in": _rules(trial.PROVEN_SHARES, (False,)),
    "every debtor pays": [(order, "Collection", _all_debtors_pay)],
    "no discount": [(trial.Trial, "serve", _no_discount)],
    "no orphans first": [(adaptive, "Chains", _NoChains)],
    **{f"proven share {share:g} alone": _rules((share,)) for share in trial.PROVEN_SHARES},
}


@contextmanager
def varied(name: str) -> Iterator[None]:
    """The policy as the variation has it; a policy has to be built inside.

    Raises PrefixShieldError for an unknown name.
    """
    known = {UNCHANGED: (), **ABLATIONS}
    for values in CONSTANTS.values():
        known |= values
    if name not in known:
        raise PrefixShieldError(
            f"variation: found {name!r}, expected one of: {', '.join(filter(None, known))}"
        )
    before = [(owner, attribute, getattr(owner, attribute)) for owner, attribute, _ in known[name]]
    try:
        for owner, attribute, value in known[name]:
            setattr(owner, attribute, value)
        yield
    finally:
        for owner, attribute, value in before:
            setattr(owner, attribute, value)
