"""The rules of reclamation by brute force, for properties over any pool (policy.md sections 6, 8)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from prefixshield.core.ledger import EPSILON
from prefixshield.policies.shield import Shield


def expected_victims(
    policy: Shield,
    candidates: Sequence[int],
    owner: Callable[[int], str],
    count: int,
    t: float,
) -> list[int]:
    """Section 6 by scanning: ``candidates`` in native order.

    It trusts the ledger and the classes, which have references of their own.
    """
    rest = list(candidates)
    p = {group: policy.ledger.normalised_debt(group, t) for group in {owner(b) for b in rest}}
    step = {group: 1 / policy.ledger.heaviest_debt_weight(group, t) for group in p}
    chosen = []
    for _ in range(count):
        owing = [b for b in rest if p[owner(b)] > EPSILON]
        most = max((p[owner(b)] for b in owing), default=0)
        pool = [b for b in owing if p[owner(b)] > most - EPSILON] or rest
        victim = min(pool, key=lambda b: (policy.retention_class(b), rest.index(b)))
        chosen.append(victim)
        if owing:
            p[owner(victim)] -= step[owner(victim)]
        rest.remove(victim)
    return chosen


def assert_bounded(policy: Shield, groups: Sequence[str], contracts: Sequence[str]) -> None:
    """I6: no state grows beyond what the configuration bounds."""
    limit = 4 * policy.capacity_blocks // len(groups)
    assert all(policy.history.size(group) <= limit for group in groups)
    assert len(policy.ledger._accounts) <= len(groups) * len(contracts)
    assert len(policy._debtors._heap) <= 2 * len(groups) + 17
    assert sum(map(len, policy._queues._heads)) <= 3 * len(groups)
