"""``prefixshield calibrate``: contracts proposed from traffic, and what they would have done.

The traffic is a trace, a recording for example, two readings of a running server's metrics, or its
KV events. The proposal (``propose``) divides what the pool can absorb. A trace is then replayed
serially under LRU, under the present contracts and under the proposed ones; of metrics there is
nothing to replay, so each group's rate of creation is held against its refill rates; of events
what was created, and when, is charged to either contracts.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from prefixshield.config import Config, ContractSection, GroupSection
from prefixshield.core.ledger import Contract, Ledger
from prefixshield.errors import PrefixShieldError
from prefixshield.policies.lru import Lru
from prefixshield.policies.shield import Shield
from prefixshield.serving.catalogue import GroupLabels
from prefixshield.sim.replay import Replay, replay_policy
from prefixshield.traces import TraceRequest

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from prefixshield.evaluation.kv_events import Heard
    from prefixshield.top import Snapshot

#: The horizons that are tried without ``--horizon``, in times of what a block lives for under LRU.
#: Half of it is twice the budget: of all that is created then.
HORIZON_FACTORS = (1 / 8, 1 / 4, 1 / 2, 1.0, 2.0, 4.0, 8.0)

#: Who owes for more than this share of the time now, creates in excess.
IN_EXCESS_FROM = 0.5

#: A group whose hit ratio falls by this much has been harmed.
HARM_FROM = 0.01

TRY_ANOTHER = (
    "Try another --horizon: a longer one if a flood owes too little, a shorter one if all owe most "
    "of the time, or none, to have several tried"
)
NONE_IS_BETTER = (
    "No horizon that was tried is better for the worst-off group: keep the present contracts, or "
    "try a --horizon of your own"
)

#: Prompts up to this quantile are ordinary.
ORDINARY_QUANTILE = 0.99

#: The most groups that a picture shows: those that create most.
MAX_GROUPS_DRAWN = 30

#: The ways, in the order in which they are shown, and what they look like in a picture.
LRU, MEASURED, PRESENT, PROPOSED = "lru", "measured", "present", "proposed"
_COLOURS = {LRU: "#999999", MEASURED: "#999999", PRESENT: "#E69F00", PROPOSED: "#0072B2"}


@dataclass(frozen=True, slots=True)
class Effect:
    """What became of a group, or of all, in one way; None: not known, or there is no such thing."""

    hit_ratio: float | None = None
    """0-1; of a trace in blocks, of metrics in tokens."""
    created_per_s: float | None = None
    """Blocks created per second."""
    debt_ratio: float | None = None
    """Share of the time in which the group owed, 0-1."""
    lifetime_s: float | None = None
    """Median time for which a block stays cached, in seconds."""


@dataclass(frozen=True)
class Calibration:
    """A proposal and its effect."""

    horizon_s: float
    burst_horizon_s: float
    budget: float
    """Blocks per second that the pool absorbs, of one engine."""
    buckets: Mapping[str, int]
    """How many groups were active under each contract."""
    present: Config
    proposed: Config
    """The present configuration with the proposed contracts and all groups that were seen."""
    contract_of: Mapping[str, str]
    """The contract under which each group created most, in the order of the table."""
    effects: Mapping[str | None, Mapping[str, Effect]]
    """By group (None: all), then by way."""
    skipped: int = 0
    """Requests larger than the pool."""
    warnings: Sequence[str] = ()
    """What to know before the proposal is put in force."""
    losses: Mapping[float, float] | None = None
    """What the worst-off group loses, 0-1, by the horizon tried, in seconds; None: none was."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        contracts = {
            name: {
                "groups": self.buckets.get(name, 0),
                PRESENT: terms.model_dump(),
                PROPOSED: self.proposed.contracts[name].model_dump(),
            }
            for name, terms in self.present.contracts.items()
        }

        def ways(group: str | None) -> dict[str, Any]:
            return {way: asdict(effect) for way, effect in self.effects[group].items()}

        return {
            "horizon_s": self.horizon_s,
            "burst_horizon_s": self.burst_horizon_s,
            "budget": self.budget,
            "skipped": self.skipped,
            "warnings": list(self.warnings),
            "horizons_tried": [
                {"horizon_s": horizon, "worst_loss": loss}
                for horizon, loss in (self.losses or {}).items()
            ],
            "contracts": contracts,
            "groups": {
                group: {"contract": contract, **ways(group)}
                for group, contract in self.contract_of.items()
            },
            "all": ways(None),
        }


def propose(
    present: Mapping[str, ContractSection],
    capacity_blocks: float,
    buckets: Mapping[str, int],
    horizon_s: float,
    burst_horizon_s: float,
    least_burst: Mapping[str, float],
) -> dict[str, ContractSection]:
    """Contracts under which all active groups together create what the pool can absorb.

    With n_c groups active under contract c, and w_c its present refill rate as its weight::

        budget = capacity_blocks / horizon_s
        refill_rate_c = budget · w_c / Σ_c' n_c' · w_c'
        burst_c = max(refill_rate_c · burst_horizon_s, least_burst_c)

    So Σ_c n_c · refill_rate_c is the budget: at that rate a pool in order of age holds a block for
    the horizon. Proportions between contracts stay. Rates are rounded to three digits, bursts up
    to a block. ``least_burst``: blocks, of each contract; 0 where it has none.
    """
    budget = capacity_blocks / horizon_s
    shares = sum(number * present[name].refill_rate for name, number in buckets.items())
    proposed = {}
    for name, terms in present.items():
        rate = float(f"{budget * terms.refill_rate / shares:.3g}")
        burst = math.ceil(max(rate * burst_horizon_s, least_burst.get(name, 0)))
        proposed[name] = ContractSection(refill_rate=rate, burst=float(burst))
    return proposed


def from_trace(
    requests: Sequence[TraceRequest],
    config: Config,
    capacity_blocks: int,
    block_size: int,
    horizon_s: float | None,
    burst_horizon_s: float,
    progress: Callable[[int, int], None] = lambda _done, _of: None,
) -> Calibration:
    """Contracts for the traffic of a trace, and what a serial replay makes of them.

    ``horizon_s`` None: of `HORIZON_FACTORS` times what blocks live for under LRU, the one whose
    contracts cost the worst-off group least (`worst_loss`); of equals, the nearest to LRU's.
    ``least_burst`` is the largest ordinary prompt under the contract (`ORDINARY_QUANTILE`).
    ``progress`` is called with how many replays are done, of how many.

    Raises:
        PrefixShieldError: the trace has no duration, no request fits into the pool, or it names a
            contract that is not configured.

    """
    if not requests or requests[-1].timestamp_ms <= requests[0].timestamp_ms:
        raise PrefixShieldError("timestamp: found no time between requests, expected some")
    created: defaultdict[tuple[str, str], int] = defaultdict(int)
    prompts: defaultdict[str, list[int]] = defaultdict(list)
    for request in requests:
        group, contract = _payer(config, request)
        if contract not in config.contracts:
            known = ", ".join(config.contracts)
            raise PrefixShieldError(
                f"line {request.line}: contract: found {contract!r}, expected one of: {known}"
            )
        created[group, contract] += len(request.hash_ids)
        prompts[contract].append(len(request.hash_ids))
    buckets = Counter(contract for _, contract in created)
    least_burst = {name: _quantile(sizes, ORDINARY_QUANTILE) for name, sizes in prompts.items()}
    replays = 2 + (1 if horizon_s else len(HORIZON_FACTORS))
    done = itertools.count(1)

    def replayed(of_way: Config) -> tuple[dict[str | None, Effect], int]:
        found = _replayed(of_way, capacity_blocks, requests, block_size)
        progress(next(done), replays)
        return found

    def with_horizon(seconds: float) -> dict[str, ContractSection]:
        return propose(
            config.contracts, capacity_blocks, buckets, seconds, burst_horizon_s, least_burst
        )

    under_lru, skipped = replayed(config.model_copy(update={"policy": Lru.name}))
    rate = under_lru[None].created_per_s
    if not rate:
        raise PrefixShieldError(f"found no request that fits into {capacity_blocks} blocks")
    shielded = config.model_copy(update={"policy": Shield.name})
    now, _ = replayed(shielded)
    lifetime_s = capacity_blocks / rate
    horizons = [horizon_s] if horizon_s else [factor * lifetime_s for factor in HORIZON_FACTORS]
    tried = {
        horizon: replayed(shielded.model_copy(update={"contracts": with_horizon(horizon)}))[0]
        for horizon in horizons
    }
    losses = {
        horizon: worst_loss(then, [under_lru, now, *tried.values()])
        for horizon, then in tried.items()
    }
    chosen = min(losses, key=lambda horizon: (losses[horizon], abs(math.log(horizon / lifetime_s))))
    contracts = with_horizon(chosen)
    contract_of: dict[str, str] = {}
    for group, contract in sorted(created, key=lambda key: -created[key]):
        contract_of.setdefault(group, contract)
    shown = dict.fromkeys(_payer(config, request)[0] for request in requests)
    found = {LRU: under_lru, PRESENT: now, PROPOSED: tried[chosen]}
    effects: dict[str | None, dict[str, Effect]] = {
        group: {way: of_way[group] for way, of_way in found.items()} for group in (*shown, None)
    }
    return Calibration(
        chosen,
        burst_horizon_s,
        capacity_blocks / chosen,
        buckets,
        config,
        _with(config, contracts, contract_of),
        {group: contract_of[group] for group in shown},
        effects,
        skipped=skipped,
        warnings=_harmed(shown, effects, TRY_ANOTHER if horizon_s else NONE_IS_BETTER),
        losses=None if horizon_s else losses,
    )


def worst_loss(
    then: Mapping[str | None, Effect], ways: Iterable[Mapping[str | None, Effect]]
) -> float:
    """What the worst-off group loses: its hit ratio then, against the best of its in all ways.

    Rounded to a thousandth: what is less is a tie.
    """

    def ratio(of_way: Mapping[str | None, Effect], group: str | None) -> float:
        return of_way[group].hit_ratio or 0.0

    ways = list(ways)
    groups = (group for group in then if group is not None)
    return round(max(max(ratio(way, g) for way in ways) - ratio(then, g) for g in groups), 3)


def _harmed(
    groups: Iterable[str], effects: Mapping[str | None, Mapping[str, Effect]], advice: str
) -> list[str]:
    """A warning if groups that are not in excess hit less under the proposal than now."""
    harmed = []
    for group in groups:
        now, then = effects[group][PRESENT], effects[group][PROPOSED]
        if (now.debt_ratio or 0.0) > IN_EXCESS_FROM:
            continue
        before, after = now.hit_ratio or 0.0, then.hit_ratio or 0.0
        if before - after >= HARM_FROM:
            harmed.append(f"{group} {after:.1%} instead of {before:.1%}")
    if not harmed:
        return []
    return [
        "under the proposal, groups that are not in excess would hit less than now: "
        f"{', '.join(harmed)}. {advice}"
    ]


def from_metrics(
    before: Snapshot,
    after: Snapshot,
    config: Config,
    capacity_blocks: int | None,
    horizon_s: float | None,
    burst_horizon_s: float,
) -> Calibration:
    """Contracts for what a running server created between two readings of its metrics.

    Per engine, as contracts count: totals are divided by the number of engines. Every group counts
    under its own contract. ``capacity_blocks`` None: that of the server. ``horizon_s`` None: what
    blocks live for now, capacity over creation. ``least_burst`` is the present burst, since metrics
    know no prompts. A group owes all the time if it creates more than its refill rate, else never.

    Raises:
        PrefixShieldError: the server restarted, created nothing, or has groups that the
            configuration lacks.

    """
    growth = {name: after.by(name) for name in ("materialised", "hit_tokens", "query_tokens")}
    for name, grown in growth.items():
        grown.subtract(before.by(name))
    if min((number for grown in growth.values() for number in grown.values()), default=0) < 0:
        raise PrefixShieldError("found counters that fell: the server restarted meanwhile")
    seconds = after.time - before.time
    engines = max(1, round(after.total("info")))
    created = {
        label: blocks / engines / seconds
        for label, blocks in growth["materialised"].items()
        if blocks > 0
    }
    if not created:
        raise PrefixShieldError(f"found no block created within {seconds:.0f} s, expected traffic")
    if capacity_blocks is None:
        capacity_blocks = round(after.total("capacity") / engines)
    label_of = GroupLabels(config.groups)
    active = [group for group in config.groups if label_of(group) in created]
    if unknown := created.keys() - {label_of(group) for group in active}:
        raise PrefixShieldError(
            f"found the group {min(unknown)}, expected the groups of --config: "
            f"{', '.join(config.groups)}"
        )
    members: defaultdict[str, list[str]] = defaultdict(list)
    for group in active:
        members[label_of(group)].append(config.default_contract(group))

    def measured(hits: float, queries: float, rate: float) -> Effect:
        return Effect(hits / queries if queries else None, rate)

    def owed(of: Config) -> dict[str, float]:
        return {
            label: float(created[label] > sum(of.contracts[name].refill_rate for name in names))
            for label, names in members.items()
        }

    hits, queries = growth["hit_tokens"], growth["query_tokens"]
    return _of_a_server(
        config,
        capacity_blocks,
        horizon_s,
        burst_horizon_s,
        Counter(config.default_contract(group) for group in active),
        {label: ", ".join(dict.fromkeys(names)) for label, names in members.items()},
        {label: measured(hits[label], queries[label], created[label]) for label in members},
        measured(hits.total(), queries.total(), sum(created.values())),
        owed,
    )


def from_events(
    heard: Heard,
    config: Config,
    capacity_blocks: int,
    horizon_s: float | None,
    burst_horizon_s: float,
) -> Calibration:
    """Contracts for what engines created while their KV events were listened to.

    Per engine, as contracts count: rates and debts are means over the engines. ``capacity_blocks``:
    of one engine. ``horizon_s`` None: what blocks live for in a full pool now, capacity over
    creation. ``least_burst`` is the present burst, since a prompt may be stored in pieces. Debts
    are those of the events' own blocks and times, each balance being full at first; events know no
    hits.

    Raises:
        PrefixShieldError: nothing was created, or nothing by a group of the configuration.

    """
    created: Counter[tuple[str, str]] = Counter()
    for creation in itertools.chain(*heard.engines):
        created[creation.group, creation.contract] += creation.blocks
    if not created and heard.strangers:
        raise PrefixShieldError(
            f"found {heard.strangers} blocks created by nobody whom --config names, expected its "
            "groups: it must be what the server runs with, with the same namespace_secret or keys"
        )
    if not created:
        raise PrefixShieldError(
            f"found no block created within {heard.seconds:g} s, expected a server with "
            "--kv-events-config that publishes there, and traffic"
        )
    seconds = heard.seconds * len(heard.engines)  # of all
    contract_of: dict[str, str] = {}
    for (group, contract), _ in created.most_common():
        contract_of.setdefault(group, contract)

    def owed(of: Config) -> dict[str, float]:
        found = dict.fromkeys(contract_of, 0.0)
        for creations in heard.engines:
            times = _DebtTimes(of.contract_table())
            for creation in creations:
                times.charge(creation.group, creation.contract, creation.blocks, creation.time)
            for group in contract_of:
                found[group] += times.until(group, heard.seconds) / seconds
        return found

    blocks = Counter[str]()
    for (group, _), number in created.items():
        blocks[group] += number
    warnings = []
    if heard.strangers:
        warnings.append(f"{heard.strangers} more blocks were created by nobody whom --config names")
    if heard.missing_batches:
        warnings.append(
            f"{heard.missing_batches} batches of events are missing: more was created than shown"
        )
    return _of_a_server(
        config,
        capacity_blocks,
        horizon_s,
        burst_horizon_s,
        Counter(contract for _, contract in created),
        contract_of,
        {
            group: Effect(
                created_per_s=blocks[group] / seconds, lifetime_s=heard.lifetimes_s.get(group)
            )
            for group in contract_of
        },
        Effect(created_per_s=blocks.total() / seconds),
        owed,
        warnings,
    )


def _of_a_server(
    config: Config,
    capacity_blocks: int,
    horizon_s: float | None,
    burst_horizon_s: float,
    buckets: Mapping[str, int],
    contract_of: Mapping[str, str],
    measured: Mapping[str, Effect],
    total: Effect,
    owed: Callable[[Config], Mapping[str, float]],
    warnings: Sequence[str] = (),
) -> Calibration:
    """What is proposed for traffic that was watched, of which there is nothing to replay.

    ``measured``, ``total``: by group, and of all. ``owed``: shares of the time in debt by group, if
    a configuration's contracts were in force.
    """
    if horizon_s is None:
        assert total.created_per_s
        horizon_s = capacity_blocks / total.created_per_s
    least_burst = {name: terms.burst for name, terms in config.contracts.items()}
    contracts = propose(
        config.contracts, capacity_blocks, buckets, horizon_s, burst_horizon_s, least_burst
    )
    proposed = _with(config, contracts, {})
    debts = {PRESENT: owed(config), PROPOSED: owed(proposed)}
    effects: dict[str | None, dict[str, Effect]] = {
        group: {
            MEASURED: effect,
            **{way: Effect(debt_ratio=of_way[group]) for way, of_way in debts.items()},
        }
        for group, effect in measured.items()
    }
    effects[None] = {MEASURED: total, PRESENT: Effect(), PROPOSED: Effect()}
    return Calibration(
        horizon_s,
        burst_horizon_s,
        capacity_blocks / horizon_s,
        buckets,
        config,
        proposed,
        contract_of,
        effects,
        warnings=warnings,
    )


def contracts_table(found: Calibration) -> Table:
    """What is proposed."""
    table = Table("contract")
    for name in ("groups", "refill rate", "proposed", "burst", "proposed"):
        table.add_column(name, justify="right")
    for name, now in found.present.contracts.items():
        then = found.proposed.contracts[name]
        table.add_row(
            name,
            str(found.buckets.get(name, 0)),
            *(f"{value:g}" for value in (now.refill_rate, then.refill_rate)),
            *(f"{value:g}" for value in (now.burst, then.burst)),
        )
    table.caption = (
        f"The pool absorbs {found.budget:.3g} blocks/s if a block is to live for "
        f"{found.horizon_s:.3g} s. Refill rates in blocks/s, bursts in blocks."
    )
    if found.losses:
        table.caption += (
            f" Of {len(found.losses)} horizons from {min(found.losses):.3g} s to "
            f"{max(found.losses):.3g} s this costs the worst-off group least: "
            f"{100 * found.losses[found.horizon_s]:.1f} points below its best."
        )
    table.caption_justify = "left"
    return table


def effects_table(found: Calibration) -> Table:
    """What it would have done, one row per group."""
    columns = list(_columns(found))
    table = Table("group", "contract")
    for head, way, _ in columns:
        table.add_column(f"{head}\n{way}", justify="right")
    for group, contract in found.contract_of.items():
        table.add_row(group, contract, *_cells(found, group, columns))
    table.add_section()
    table.add_row("all", "", *_cells(found, None, columns))
    if LRU in found.effects[None]:
        table.caption = (
            "Serial replay. Hit ratio in blocks; in debt: share of the time; created: blocks/s. "
            "Generated text counts only where a later prompt contains it."
        )
    elif found.effects[None][MEASURED].hit_ratio is None:
        table.caption = (
            "Per engine, from KV events, which tell no hits. In debt: share of the time, had the "
            "same been created and nothing been owed before; created: blocks/s; lifetime: seconds "
            "in the cache, median (-: longer than it was watched)."
        )
    else:
        table.caption = (
            "Per engine. Hit ratio in tokens; created: blocks/s; in debt: if it went on like this."
        )
    table.caption_justify = "left"
    return table


def draw(found: Calibration, path: Path) -> None:
    """The table as a picture, PNG. Raises OSError when it cannot be written."""
    from prefixshield.evaluation.figures import _style

    with _style():
        _figure(found).savefig(path, format="png", dpi=120, metadata={"Software": None})


def _figure(found: Calibration) -> Figure:
    from matplotlib.figure import Figure

    def rate(group: str) -> float:
        return max(effect.created_per_s or 0 for effect in found.effects[group].values())

    groups = sorted(found.contract_of, key=rate, reverse=True)[:MAX_GROUPS_DRAWN]
    heads = list(dict.fromkeys(head for head, _, _ in _columns(found)))
    figure = Figure(figsize=(4 * len(heads) + 1, 0.6 * len(groups) + 1.8), layout="constrained")
    panels = list(figure.subplots(1, len(heads), sharey=True, squeeze=False).flat)
    for axes, head in zip(panels, heads, strict=True):
        _bars(axes, found, groups, head)
    panels[0].set_yticks(range(len(groups)), groups)
    panels[0].invert_yaxis()
    named: dict[str, Any] = {}
    for axes in panels:
        named |= {str(bars.get_label()): bars for bars in axes.containers}
    figure.legend(
        named.values(), named.keys(), loc="outside upper center", ncols=len(named), frameon=False
    )
    return figure


def _bars(axes: Axes, found: Calibration, groups: Sequence[str], head: str) -> None:
    shown = [(way, field) for of_head, way, field in _columns(found) if of_head == head]
    height = 0.8 / len(shown)
    for number, (way, field) in enumerate(shown):
        values = [getattr(found.effects[group][way], field) or 0 for group in groups]
        places = [place + (number - (len(shown) - 1) / 2) * height for place in range(len(groups))]
        axes.barh(places, values, height, color=_COLOURS[way], label=way)
    if all(field.endswith("_ratio") for _, field in shown):
        axes.set_xlim(0, 1)
    axes.set_title(_TITLES[head], fontsize=10)
    axes.set_axisbelow(True)
    axes.grid(axis="x", linewidth=0.3)


_HEADS = {
    "hit_ratio": "hit ratio",
    "debt_ratio": "in debt",
    "created_per_s": "created/s",
    "lifetime_s": "lifetime",
}

_FORMS = {
    "hit_ratio": ".4f",
    "debt_ratio": ".1%",
    "created_per_s": ".2f",
    "lifetime_s": ".1f",
}

_TITLES = {
    "hit ratio": "hit ratio",
    "in debt": "in debt (share of time)",
    "created/s": "created (blocks per second)",
    "lifetime": "lifetime of a block (s)",
}


def _columns(found: Calibration) -> Iterator[tuple[str, str, str]]:
    """(head, way, field) of what is known of any group."""
    ways = found.effects[None]
    for field, head in _HEADS.items():
        for way in ways:
            if any(getattr(of_way[way], field) is not None for of_way in found.effects.values()):
                yield head, way, field


def _cells(
    found: Calibration, group: str | None, columns: Sequence[tuple[str, str, str]]
) -> Iterator[str]:
    for _, way, field in columns:
        value = getattr(found.effects[group][way], field)
        if value is None:
            yield "-"
        else:
            yield format(value, _FORMS[field])


def _payer(config: Config, request: TraceRequest) -> tuple[str, str]:
    group = request.group or config.default_group
    return group, request.contract or config.default_contract(group)


def _quantile(values: Iterable[float], quantile: float) -> float:
    """The smallest value that is not exceeded by this share of them (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(quantile * len(ordered)) - 1)]


def _replayed(
    config: Config, capacity_blocks: int, requests: Sequence[TraceRequest], block_size: int
) -> tuple[dict[str | None, Effect], int]:
    """Effects by group (None: all), and how many requests were skipped."""
    run = Replay(config, replay_policy(config, capacity_blocks, requests, block_size), block_size)
    debts = None if config.policy == Lru.name else _DebtTimes(config.contract_table())
    total = run.result.total
    for request in requests:
        created = total.blocks_queried - total.blocks_hit
        run.run([request])
        created = total.blocks_queried - total.blocks_hit - created
        if debts is not None and created:
            group, contract = _payer(config, request)
            debts.charge(group, contract, created, request.timestamp_ms / 1000)
    end = requests[-1].timestamp_ms / 1000
    seconds = end - requests[0].timestamp_ms / 1000
    effects: dict[str | None, Effect] = {}
    for key, tally in (*run.result.groups.items(), (None, total)):
        owed = None
        if debts is not None and key is not None:
            owed = debts.until(key, end) / seconds
        rate = (tally.blocks_queried - tally.blocks_hit) / seconds
        effects[key] = Effect(tally.hit_ratio, rate, owed)
    return effects, total.rejected


class _DebtTimes:
    """For how long each group has owed, by the policy's own ledger. Times in seconds."""

    def __init__(self, contracts: Mapping[str, Contract]) -> None:
        self._ledger = Ledger(contracts)
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._since: dict[str, float] = {}
        self._clears_at: dict[str, float] = {}
        """When the last of the group's debts will have cleared."""

    def charge(self, group: str, contract: str, blocks: int, t: float) -> None:
        """The group creates blocks."""
        self.until(group, t)
        account = self._ledger.account(group, contract)
        self._ledger.charge(account, blocks, t)
        self._since[group] = t
        self._clears_at[group] = max(self._clears_at.get(group, t), account.clears_at)

    def until(self, group: str, t: float) -> float:
        """Seconds in debt up to now."""
        if group in self._since:
            since = self._since[group]
            self._seconds[group] += max(0.0, min(t, self._clears_at[group]) - since)
            self._since[group] = t
        return self._seconds[group]


def _with(
    config: Config, contracts: Mapping[str, ContractSection], groups: Mapping[str, str]
) -> Config:
    """The configuration with other contracts, and with the groups that it did not name."""
    named = dict(config.groups)
    for group, contract in groups.items():
        named.setdefault(group, GroupSection(contract=contract))
    return config.model_copy(update={"contracts": dict(contracts), "groups": named})
