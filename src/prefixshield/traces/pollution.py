"""The paper's attack, control and borrowing workloads, seeded (paper, section IV, Workloads).

A victim keeps visiting a few hot prefixes; an attacker brings prefixes that nobody has seen. All
sizes are in blocks, so a workload for other blocks has other tokens and the same pressure. What the
paper says is cited; what it leaves open (`Shape`) was chosen on the figures of LRU alone, see
docs/reproduction.md.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, cycle

from prefixshield.core.ledger import Contract
from prefixshield.traces.reader import TraceRequest
from prefixshield.traces.workload import Workload

#: Blocks of one shared prefix: 1,536 tokens in blocks of 16 (paper, section IV).
PREFIX_BLOCKS = 96

#: Hot prefixes of the victim in a pool of 512 blocks (paper, section IV).
HOT_PREFIXES = 4

VICTIM, ATTACKER, NEUTRAL = "victim", "attacker", "neutral"
BORROWER, IDLE = "borrower", "idle"

#: Hot prefixes of the borrower: as many as fit into 511 blocks with what a request adds to each.
BORROWED_PREFIXES = 5

#: The attacker's prefixes in the delayed replay: 193 blocks are eligible for promotion (Fig. 3b).
REPLAYED_BLOCKS = (97, 96)

#: Hot prefixes of the victim there, and blocks that have to be evicted for the neutral group.
DELAYED_VICTIM_PREFIXES = 2
NEUTRAL_EVICTIONS = 74

#: Seconds for which the pressure lasts, whatever the capacity. With it a best-effort attacker who
#: creates 2.14 and 4.23 times what it may has the mean debts that the paper reports (Fig. 2).
WINDOW_S = 40.0

#: Seconds of the slow attacks, which spread their pressure over more time.
SLOW_WINDOW_S = 120.0


@dataclass(frozen=True)
class Shape:
    """What the paper leaves open. Chosen on LRU's and the no-attack control's figures alone."""

    question_blocks: float = 0.78
    """The victim's own question behind a prefix, in blocks: less than one, so that a hit
    materialises nothing before it decodes. 12 of 16 tokens make the control's 99.2%."""
    output_blocks: float = 1.125
    """Generated tokens, in blocks."""
    victim_share: float = 0.3
    """Share of the victim among the arrivals of the one-touch pressure phase."""
    slow_share: float = 0.1
    """Share of the attacker among the arrivals of low-and-slow rotation."""
    replay_share: float = 0.13
    """Share of the attacker among the arrivals of two-pass replay."""
    lone_victim_rate: float = 1.2
    """Requests per second of the victim in the creation-pressure sweep."""
    warm_rounds: int = 3
    """Rounds over the hot prefixes, by the victim alone, before anything is measured."""

    def prompt_tokens(self, block_size: int) -> int:
        """Length of a request's prompt: a prefix and a question."""
        return PREFIX_BLOCKS * block_size + round(self.question_blocks * block_size)

    @property
    def extra_blocks(self) -> int:
        """Full blocks that question and output add to a request's prefix."""
        return int(self.question_blocks + self.output_blocks)


DEFAULT_SHAPE = Shape()


@dataclass(frozen=True)
class Load:
    """How fast requests come (paper, section IV, Cache and policy configuration)."""

    capacity: float
    """C_prefill: unique prefills per second."""
    alpha: float = 0.6
    """Nominal load factor."""

    @property
    def base_rate(self) -> float:
        """alpha · C_prefill, requests per second."""
        return self.alpha * self.capacity

    @property
    def pressure_rate(self) -> float:
        """min(0.75 · C_prefill, 1.15 · alpha · C_prefill), requests per second."""
        return min(0.75 * self.capacity, 1.15 * self.base_rate)


class _Maker:
    """Builds requests in order of time; ids and line numbers count from 1."""

    def __init__(self, name: str, seed: int, block_size: int, shape: Shape) -> None:
        # A string seed: stable over Pythons, and every workload draws its own numbers.
        self.rng = random.Random(f"{name} {seed}")
        self.now_s = 0.0
        self._name = name
        self._block_size = block_size
        self._shape = shape
        self._ids = count(1)
        self._requests: list[TraceRequest] = []

    def prefix(self, blocks: int = PREFIX_BLOCKS) -> tuple[int, ...]:
        """A prefix that nobody has seen."""
        return tuple(next(self._ids) for _ in range(blocks))

    def wait(self, rate: float) -> float:
        """Go on to the next arrival of a Poisson process, ``rate`` per second; returns when."""
        self.now_s += self.rng.expovariate(rate)
        return self.now_s

    def warm(self, load: Load, prefixes: int, group: str = VICTIM) -> Iterator[tuple[int, ...]]:
        """One group alone at the base rate; returns its endless round over its hot prefixes."""
        hot = cycle([self.prefix() for _ in range(prefixes)])
        for _ in range(prefixes * self._shape.warm_rounds):
            self.wait(load.base_rate)
            self.add(group, next(hot))
        return hot

    def add(self, group: str, prefix: tuple[int, ...], measured: bool = False) -> None:
        """A request for a prefix and a question of its own, now."""
        self._requests.append(
            TraceRequest(
                line=len(self._requests) + 1,
                timestamp_ms=round(self.now_s * 1000, 3),
                input_length=len(prefix) * self._block_size
                + round(self._shape.question_blocks * self._block_size),
                output_length=max(1, round(self._shape.output_blocks * self._block_size)),
                hash_ids=prefix,
                group=group,
                contract=None,
                prefix_id=None,
                measured=measured,
            )
        )

    def workload(self, groups: Mapping[str, str]) -> Workload:
        return Workload(self._name, self._block_size, groups, tuple(self._requests))


#: Contracts: the paper's sweep of creation pressure fits an attacker on best-effort.
_CONTRACTS = {VICTIM: "critical", ATTACKER: "best-effort", NEUTRAL: "standard"}
_PAIR = {group: _CONTRACTS[group] for group in (VICTIM, ATTACKER)}


def one_touch(
    seed: int,
    load: Load,
    *,
    block_size: int = 16,
    hot_prefixes: int = HOT_PREFIXES,
    shape: Shape = DEFAULT_SHAPE,
) -> Workload:
    """One-touch pollution: the attacker continuously introduces unseen prefixes."""
    maker = _Maker("one-touch", seed, block_size, shape)
    hot = maker.warm(load, hot_prefixes)
    end_s = maker.now_s + WINDOW_S
    while maker.wait(load.pressure_rate) < end_s:
        if maker.rng.random() < shape.victim_share:
            maker.add(VICTIM, next(hot), measured=True)
        else:
            maker.add(ATTACKER, maker.prefix())
    return maker.workload(_PAIR)


def creation_pressure(
    seed: int,
    load: Load,
    *,
    creation_ratio: float,
    refill_rate: float,
    evenly: bool = False,
    block_size: int = 16,
    shape: Shape = DEFAULT_SHAPE,
) -> Workload:
    """One-touch pollution at a given pressure (paper, Fig. 2, creation-pressure sweep).

    ``creation_ratio``: blocks per second that the attacker creates over its ``refill_rate``.
    ``evenly``: its requests are equally far apart, instead of a Poisson process with its clumps.
    The victim keeps a pace of its own, the same at every ratio.
    """
    maker = _Maker("creation-pressure", seed, block_size, shape)
    hot = maker.warm(load, HOT_PREFIXES)
    attack_rate = creation_ratio * refill_rate / (PREFIX_BLOCKS + shape.extra_blocks)
    start_s = maker.now_s
    visits = list(_arrivals(maker.rng, start_s, shape.lone_victim_rate))
    if evenly:
        phase_s = maker.rng.random() / attack_rate
        attacks = [start_s + phase_s + n / attack_rate for n in range(int(WINDOW_S * attack_rate))]
    else:
        attacks = list(_arrivals(maker.rng, start_s, attack_rate))
    for at_s, group in sorted([(t, VICTIM) for t in visits] + [(t, ATTACKER) for t in attacks]):
        maker.now_s = at_s
        if group == VICTIM:
            maker.add(VICTIM, next(hot), measured=True)
        else:
            maker.add(ATTACKER, maker.prefix())
    return maker.workload(_PAIR)


def _arrivals(rng: random.Random, start_s: float, rate: float) -> Iterator[float]:
    """The times of a Poisson process of so many a second, as long as the pressure lasts."""
    now_s = start_s
    while (now_s := now_s + rng.expovariate(rate)) < start_s + WINDOW_S:
        yield now_s


def low_and_slow(
    seed: int,
    load: Load,
    *,
    attacked: bool = True,
    block_size: int = 16,
    shape: Shape = DEFAULT_SHAPE,
) -> Workload:
    """Low-and-slow rotation: unseen prefixes, few among the victim's requests at the base rate.

    ``attacked=False`` is the no-attack control: the same requests without the attacker's.
    """
    maker = _Maker("low-and-slow", seed, block_size, shape)
    hot = maker.warm(load, HOT_PREFIXES)
    end_s = maker.now_s + SLOW_WINDOW_S
    while maker.wait(load.base_rate) < end_s:
        if maker.rng.random() >= shape.slow_share:
            maker.add(VICTIM, next(hot), measured=True)
        elif attacked:
            maker.add(ATTACKER, maker.prefix())
    return maker.workload(_PAIR)


def two_pass_replay(
    seed: int,
    load: Load,
    *,
    attacked: bool = True,
    block_size: int = 16,
    shape: Shape = DEFAULT_SHAPE,
) -> Workload:
    """Two-pass replay: every unseen prefix comes a second time at the attacker's next turn.

    So its blocks are mostly still resident: the attacker manufactures reuse while it still owes.
    """
    maker = _Maker("two-pass-replay", seed, block_size, shape)
    hot = maker.warm(load, HOT_PREFIXES)
    end_s = maker.now_s + SLOW_WINDOW_S
    first_pass: tuple[int, ...] | None = None
    while maker.wait(load.base_rate) < end_s:
        if maker.rng.random() >= shape.replay_share:
            maker.add(VICTIM, next(hot), measured=True)
        elif attacked:
            prefix = first_pass or maker.prefix()
            maker.add(ATTACKER, prefix)
            first_pass = None if first_pass else prefix
    return maker.workload(_PAIR)


def borrowing(
    seed: int, load: Load, *, block_size: int = 16, shape: Shape = DEFAULT_SHAPE
) -> Workload:
    """Controlled borrowing: one group is idle, the other's hot set is nearly the whole pool."""
    maker = _Maker("borrowing", seed, block_size, shape)
    hot = maker.warm(load, BORROWED_PREFIXES, BORROWER)
    end_s = maker.now_s + WINDOW_S
    while maker.wait(load.base_rate) < end_s:
        maker.add(BORROWER, next(hot), measured=True)
    return maker.workload({BORROWER: "standard", IDLE: "standard"})


def delayed_replay(
    seed: int,
    *,
    wait_ratio: float,
    terms: Contract,
    capacity_blocks: int,
    block_size: int = 16,
    shape: Shape = DEFAULT_SHAPE,
) -> Workload:
    """Delayed replay (paper, Fig. 3b): does replay launder what its group still owes?

    The attacker creates `REPLAYED_BLOCKS` and replays them after ``wait_ratio`` (0-1) of the time
    in which its debt clears under its contract ``terms``. Then the victim's prefixes come in, a
    neutral group needs `NEUTRAL_EVICTIONS` blocks more than are free, and the victim, measured,
    asks its prefixes again. The neutral pressure comes when nobody owes, so the class decides.
    """
    maker = _Maker("delayed-replay", seed, block_size, shape)
    replayed = [maker.prefix(blocks) for blocks in REPLAYED_BLOCKS]
    created = sum(REPLAYED_BLOCKS) + len(REPLAYED_BLOCKS) * shape.extra_blocks
    clearance_s = (created - terms.burst) / terms.refill_rate
    assert clearance_s > 0, "the attacker never owes"

    def play(group: str, prefixes: Sequence[tuple[int, ...]], at_s: float, **more: bool) -> None:
        """One after the other, each long finished before the next, at slightly random times."""
        for number, prefix in enumerate(prefixes):
            maker.now_s = at_s + number + maker.rng.uniform(0.0, 0.5)
            maker.add(group, prefix, **more)

    # All of it is created within a second, so that what the clearance takes is known.
    for prefix in replayed:
        maker.add(ATTACKER, prefix)
        maker.wait(10.0)
    created_s = maker.now_s
    maker.now_s += 0.5 + wait_ratio * clearance_s
    for prefix in replayed:
        maker.add(ATTACKER, prefix)
        maker.wait(10.0)
    later_s = created_s + 2 * clearance_s + 5.0
    hot = [maker.prefix() for _ in range(DELAYED_VICTIM_PREFIXES)]
    play(VICTIM, hot, later_s)
    per_request = PREFIX_BLOCKS + shape.extra_blocks
    used = created + len(replayed) * shape.extra_blocks + len(hot) * per_request
    neutral = capacity_blocks - used + NEUTRAL_EVICTIONS
    requests = -(-neutral // per_request)
    sizes = [neutral // requests + (i < neutral % requests) for i in range(requests)]
    later_s += 10.0
    play(NEUTRAL, [maker.prefix(size - shape.extra_blocks) for size in sizes], later_s)
    # Newest first: what a miss of the probe evicts is not asked for any more.
    play(VICTIM, hot[::-1], later_s + 10.0, measured=True)
    return maker.workload(_CONTRACTS)
