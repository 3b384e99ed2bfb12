"""Measures the prototype of a compiled core beside the Python policy that it mirrors.

``make -C prototype`` builds it, checks that it chooses the same victims and writes
``results/prototype/summary.json`` and ``.md``. Times are the processor's; what is compared takes
turns in every round, and a ratio is the median over rounds of the ratio inside a round.
"""

from __future__ import annotations

import gc
import json
import random
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import chain, count, pairwise, product
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import shield_core  # type: ignore[import-not-found]

from prefixshield.config import paper_config
from prefixshield.core import trial
from prefixshield.core.ledger import Contract
from prefixshield.evaluation import bench_core
from prefixshield.evaluation.markdown import table
from prefixshield.evaluation.results import provenance, replace_files
from prefixshield.evaluation.statistics import percentile
from prefixshield.policies import PolicySetup, build_policy
from prefixshield.policies.base import Access, Policy
from prefixshield.sim.pool import SimBlockPool
from prefixshield.sim.replay import Replay, replay_policy
from prefixshield.traces import read_trace

TOP = Path(__file__).parents[1]
TRACE, TRACE_BLOCK_SIZE = TOP / "traces" / "mooncake_conversation_bs512.jsonl.gz", 512

NATIVE, PYTHON, COMPILED = "native", "shield default", "prototype"

#: Of the policy calls alone: blocks of the pool, groups.
POOLS, GROUPS = (4_096, 65_536, 1_048_576), (8, 1_000, 10_000)

ROUNDS = 40
_BATCH = 96

#: Seconds from one request to the next: next to nothing is refilled, so debts only grow.
_TICK_S = 1e-5
_CONTRACTS = {"rich": Contract(1.0, 1e12), "poor": Contract(1.0, 0.0)}
_CALLS = ("evict", "materialise", "release", "hold", "hit")

Row = tuple[Any, ...]


class Prototype(Policy):
    """The compiled core as a policy; reset, gauges and reload are left out."""

    name = "shield"

    def __init__(self, setup: PolicySetup) -> None:
        super().__init__(setup)
        self._contracts = setup.contracts
        lowest = min(terms.refill_rate for terms in setup.contracts.values())
        rules = [tuple(rule) for rule in trial.RULES]
        self._core = shield_core.Core(
            setup.capacity_blocks, setup.usable_blocks, lowest, rules, len(setup.groups)
        )
        # In the order of their names, which breaks the tie of two debts that are equal.
        self._groups = {group: number for number, group in enumerate(sorted(setup.groups))}
        self._accounts: dict[tuple[str, str], int] = {}

    def account(self, group: str, contract: str) -> int:
        """The core's number for (group, contract)."""
        number = self._accounts.get((group, contract))
        if number is None:
            of_group = self._groups.setdefault(group, len(self._groups))
            number = self._core.open(of_group, *self._contracts[contract])
            self._accounts[group, contract] = number
        return number

    def materialise(
        self,
        blocks: Sequence[int],
        hashes: Sequence[Hashable],
        access: Access,
        parents: Sequence[Hashable | None] | None = None,
    ) -> None:
        group, contract, request_id, now, prefix_id = access
        account = self.account(group, contract)
        self._core.materialise(blocks, hashes, parents, account, request_id, prefix_id, now)

    def hit(self, blocks: Sequence[int], access: Access) -> list[int]:
        group, contract, request_id, now, prefix_id = access
        account = self.account(group, contract)
        promoted: list[int] = self._core.hit(blocks, account, request_id, prefix_id, now)
        self.promotions_denied = self._core.promotions_denied
        return promoted

    def evict(self, count: int, access: Access) -> list[int]:
        victims: list[int] = self._core.evict(count, access.time)
        self.orphans_evicted = self._core.orphans_evicted
        return victims

    def hold(self, blocks: Sequence[int]) -> None:
        self._core.hold(blocks)

    def release(self, blocks: Sequence[int]) -> None:
        self._core.release(blocks)

    def forget(self, block: int) -> None:
        self._core.forget(block)

    def replay(self, requests: Sequence[Row]) -> tuple[int, int, int]:
        """Blocks queried, hit and evicted; see ``replay`` in ``shield_core.cpp``."""
        found: tuple[int, int, int] = self._core.replay(requests)
        return found

    def reset(self) -> None:
        raise NotImplementedError("the prototype cannot be reset")

    @property
    def candidate_count(self) -> int:
        count: int = self._core.candidate_count
        return count


def agreement() -> bench_core.Section:
    """The same random traffic through both: victims and promotions that are the same."""
    rows: list[Row] = []
    trials = [(rule,) for rule in trial.RULES] + [trial.RULES]
    for rules, capacity in product(trials, (48, 512, 2_048)):
        what = str(rules[0]) if len(rules) == 1 else "chosen by the trial"
        found = [0] * 8
        for seed in range(3):
            with patch.object(trial, "RULES", rules):  # the policies choose between these
                found = [a + b for a, b in zip(found, _compared(capacity, seed), strict=True)]
        rows.append((what, capacity, *found))
    return bench_core.Section(
        "agreement",
        "Random traffic through both, requests overlapping: what is the same, of how much",
        ("rule", "blocks", *chain(*((what, "same") for what in _COMPARED))),
        rows,
    )


_COMPARED = ("victims", "promotions", "orphans evicted", "promotions denied")


def _compared(capacity: int, seed: int) -> list[int]:
    """How many of each of ``_COMPARED``, and how many that are the same."""
    rng = random.Random(seed)
    contracts = {"a": Contract(2.0, 20.0), "b": Contract(7.0, 90.0), "c": Contract(500.0, 1e4)}
    groups = [f"g{number:02}" for number in range(10)]
    setup = PolicySetup(capacity, contracts, groups)
    pools = [SimBlockPool(build_policy("shield", setup)), SimBlockPool(Prototype(setup))]
    running: deque[list[list[int]]] = deque()
    victims: list[list[int]] = [[], []]
    promotions: list[list[int]] = [[], []]
    longest = max(2, min(40, capacity // 8))
    returning: tuple[str, list[bytes]] | None = None
    now, asked, unique = 0.0, 0, 0
    while len(victims[0]) < 8 * capacity:
        asked += 1
        now += rng.expovariate(2.0)
        group = rng.choice(groups[: rng.choice((2, 5, 10))])
        contract = rng.choice("ab") if group < "g04" else "c"
        length = rng.randint(1, longest)
        document = int(rng.paretovariate(0.4)) % (capacity // 2)
        shared = rng.randint(0, length)
        hashes = [b"%016d%016d" % (document, place) for place in range(shared)]
        if group == "g01" or rng.random() < 0.7:  # a tail that nobody has again
            unique += 1
            hashes += [b"unique%09d%016d" % (unique, place) for place in range(shared, length)]
        if returning:
            (group, hashes), returning = returning, None
        if not hashes:
            continue
        again = 0 if rng.random() < 0.9 else rng.randint(1, 9)  # as after a preemption
        access = Access(group, contract, asked - again, now, rng.choice((None, None, "named")))
        while running and (
            len(running) > 4 or pools[0].available_blocks(group) < len(hashes) + longest
        ):
            for pool, blocks in zip(pools, running.popleft(), strict=True):
                pool.release(blocks[::-1])
        both = []
        for pool, chosen, promoted in zip(pools, victims, promotions, strict=True):
            hits = pool.lookup(group, hashes)
            pool.hold(hits)
            promoted += pool.policy.hit(hits, access)
            blocks, evicted = pool.allocate(len(hashes) - len(hits), access)
            chosen += [block for block, _ in evicted]
            before = hashes[len(hits) - 1] if hits else None
            if blocks:
                pool.cache(blocks, group, hashes[len(hits) :], access, before)
            both.append([*hits, *blocks])
        running.append(both)
        # Content is lost, held or not, and a part of what it led to returns.
        if rng.random() < 0.05:
            if rng.random() < 0.5:
                while running:
                    for pool, blocks in zip(pools, running.popleft(), strict=True):
                        pool.release(blocks[::-1])
            lost = rng.randrange(len(hashes))
            for pool, blocks in zip(pools, both, strict=True):
                pool.invalidate(blocks[lost])
            returning = group, hashes[: rng.randint(lost + 1, len(hashes))]
        if victims[0] != victims[1] and len(victims[0]) > 3 * capacity:
            break
    ours, theirs = (pool.policy for pool in pools)
    return [
        *_same(*victims),
        *_same(*promotions),
        *(ours.orphans_evicted, min(ours.orphans_evicted, theirs.orphans_evicted)),
        *(ours.promotions_denied, min(ours.promotions_denied, theirs.promotions_denied)),
    ]


def _same(ours: Sequence[int], theirs: Sequence[int]) -> tuple[int, int]:
    return len(ours), sum(a == b for a, b in zip(ours, theirs, strict=False))


class _Load(NamedTuple):
    """What a request brings, and one that hits all of it."""

    hashes: list[bytes]
    access: Access
    again: Access


class _Calls:
    """A pool full of candidates under a policy, with nothing around it."""

    def __init__(self, kind: str, blocks: int, groups: int, debtors: int, batch: int) -> None:
        self._senders = [(f"g{n:05}", "poor" if n < debtors else "rich") for n in range(groups)]
        setup = PolicySetup(blocks, _CONTRACTS, [group for group, _ in self._senders])
        self.policy = Prototype(setup) if kind == COMPILED else build_policy("shield", setup)
        self._batch = batch
        self._numbers = count()
        for start in range(0, blocks, batch):
            self.serve(self.load(), list(range(start, min(start + batch, blocks))))

    def load(self) -> _Load:
        """The next request, as vLLM would hand it over."""
        number = next(self._numbers)
        hashes = [b"%036d" % (number * self._batch + block) for block in range(self._batch)]
        for block_hash in hashes:
            hash(block_hash)  # vLLM has looked it up
        group, contract = self._senders[number % len(self._senders)]
        now = number * _TICK_S
        first = Access(group, contract, f"r{number}", now)
        return _Load(hashes, first, Access(group, contract, f"r{number} again", now))

    def serve(self, load: _Load, free: list[int] | None = None) -> list[int]:
        """ns of each of ``_CALLS``, those of the clock included; with ``free``, none is evicted."""
        policy, clock = self.policy, time.thread_time_ns
        t0 = clock()
        blocks = free or policy.evict(self._batch, load.access)
        t1 = clock()
        hashes = load.hashes[: len(blocks)]
        parents = [None, *hashes[:-1]]
        back = blocks[::-1]
        t2 = clock()
        policy.materialise(blocks, hashes, load.access, parents)
        t3 = clock()
        policy.release(back)
        t4 = clock()
        policy.hold(blocks)
        t5 = clock()
        policy.hit(blocks, load.again)
        t6 = clock()
        policy.release(back)
        return [t1 - t0, t3 - t2, t4 - t3, t5 - t4, t6 - t5]


def _clock_ns() -> float:
    """What reading the clock costs."""
    readings = [time.thread_time_ns() for _ in range(10_001)]
    return statistics.median(b - a for a, b in pairwise(readings))


def calls() -> bench_core.Section:
    """ns per block of the policy's calls alone."""
    rows: list[Row] = []
    settings = [
        (blocks, groups, debtors, _BATCH)
        for blocks, groups in product(POOLS, GROUPS)
        for debtors in (1, groups)
    ]
    for setting in [*settings, (65_536, 1_000, 1, 1), (65_536, 1_000, 1_000, 1)]:
        _progress(f"calls: {setting}")
        pools = {kind: _Calls(kind, *setting) for kind in (PYTHON, COMPILED)}
        batch = setting[-1]
        requests = 480 // batch
        clock = _clock_ns()
        gc.collect()
        gc.freeze()
        times: dict[str, list[list[float]]] = {kind: [] for kind in pools}
        for number in range(ROUNDS):
            turns = [*pools.items()][:: 1 if number % 2 else -1]
            for kind, pool in turns:
                loads = [pool.load() for _ in range(requests)]
                spent = [pool.serve(load) for load in loads]
                means = [statistics.fmean(ns) for ns in zip(*spent, strict=True)]
                times[kind].append([(mean - clock) / batch for mean in means])
        gc.unfreeze()
        python = [sum(ns) for ns in times[PYTHON]]
        for kind, found in times.items():
            whole = [sum(ns) for ns in found]
            each = [round(statistics.median(ns)) for ns in zip(*found, strict=True)]
            ratios = [a / b for a, b in zip(python, whole, strict=True)]
            rows.append((*setting, kind, *each, round(statistics.median(whole)), *_spread(ratios)))
    return bench_core.Section(
        "calls",
        "The policy's calls alone, in ns per block, and how many times faster than Python",
        (
            *("blocks", "groups", "in debt", "at a time", "policy", *_CALLS, "sum"),
            *("times", "p10", "p90"),
        ),
        rows,
    )


def _spread(ratios: Sequence[float]) -> tuple[float, float, float]:
    tenth, last = percentile(ratios, 0.1), percentile(ratios, 0.9)
    return round(statistics.median(ratios), 2), round(tenth, 2), round(last, 2)


def _taking_part(
    section: Callable[[bench_core.Progress], bench_core.Section],
) -> bench_core.Section:
    """A section of bench-core in which the prototype takes part."""
    build = bench_core.make_policy

    def make_policy(contestant: str, blocks: int, groups: Sequence[str]) -> Policy:
        if contestant != COMPILED:
            return build(contestant, blocks, groups)
        return Prototype(PolicySetup(blocks, _CONTRACTS, groups, reserved_blocks=1))

    contestants = (NATIVE, "lru", PYTHON, COMPILED)
    with (
        patch.object(bench_core, "CONTESTANTS", contestants),
        patch.object(bench_core, "make_policy", make_policy),
    ):
        return section(_progress)


def cycles() -> bench_core.Section:
    """bench-core's cycle of vLLM's own block pool, with the prototype behind ours."""
    return _taking_part(bench_core.cycles)


def memory() -> bench_core.Section:
    """bench-core's memory; the row of LRU is the driver's own."""
    return _taking_part(bench_core.memory)


def replays() -> bench_core.Section:
    """Block accesses per second of a serial replay."""
    requests = read_trace(TRACE, TRACE_BLOCK_SIZE)
    accesses = sum(len(request.hash_ids) for request in requests)
    capacity = len({(one.group, block) for one in requests for block in one.hash_ids}) // 10
    config = paper_config()

    def loop(policy: Policy) -> Callable[[], int]:
        replay = Replay(config, policy, TRACE_BLOCK_SIZE)
        return lambda: replay.run(requests).total.blocks_hit

    def python() -> Callable[[], int]:
        return loop(replay_policy(config, capacity, requests, TRACE_BLOCK_SIZE))

    def prototype() -> Prototype:
        groups = sorted({one.group or config.default_group for one in requests})
        return Prototype(PolicySetup(capacity, config.contract_table(), groups))

    def compiled() -> Callable[[], int]:
        policy = prototype()
        rows = []
        for one in requests:
            group = one.group or config.default_group
            account = policy.account(group, one.contract or config.default_contract(group))
            reusable = (one.input_length - 1) // TRACE_BLOCK_SIZE
            rows.append((account, one.line, one.timestamp_ms / 1000, reusable, one.hash_ids))
        return lambda: policy.replay(rows)[1]

    runs = {
        PYTHON: python,
        f"{COMPILED}, loop in Python": lambda: loop(prototype()),
        f"{COMPILED}, loop in C++": compiled,
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    hits: dict[str, int] = {}
    for number in range(5):
        _progress(f"replay, round {number + 1}")
        for name, prepare in runs.items():
            run = prepare()
            gc.collect()
            started = time.thread_time()
            hits[name] = run()
            times[name].append(time.thread_time() - started)
    rows = []
    for name, found in times.items():
        ratios = [a / b for a, b in zip(times[PYTHON], found, strict=True)]
        rate = accesses / statistics.median(found)
        rows.append((name, hits[name], round(rate / 1000), *_spread(ratios)))
    return bench_core.Section(
        "replays",
        f"Serial replay of {TRACE.name} ({accesses} block accesses, pool of {capacity} blocks)",
        ("policy", "blocks hit", "thousand accesses/s", "times", "p10", "p90"),
        rows,
    )


SECTIONS: Mapping[str, Callable[[], bench_core.Section]] = {
    "agreement": agreement,
    "calls": calls,
    "cycles": cycles,
    "memory": memory,
    "replays": replays,
}


def _progress(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def main(names: Sequence[str]) -> None:
    """Measure all sections, or those named and keep the others' results."""
    folder = TOP / "results" / "prototype"
    path = folder / "summary.json"
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for name in names or SECTIONS:
        made_on = provenance()
        section = SECTIONS[name]()
        found[name] = {
            "title": section.title,
            "command": f"make -C prototype SECTIONS={name}",
            **made_on,
            "columns": section.columns,
            "rows": section.rows,
        }
        print(f"{section.title}\n\n{table(section.columns, section.rows)}", flush=True)
        kept = {name: found[name] for name in SECTIONS if name in found}
        parts = ["# The prototype of a compiled core, measured\n"]
        parts += [
            f"## {one['title']}\n\n`{one['command']}`, commit {one['commit']}, "
            f"{one['machine']}.\n\n{table(one['columns'], one['rows'])}"
            for one in kept.values()
        ]
        files = {"summary.json": json.dumps(kept, indent=1) + "\n", "summary.md": "\n".join(parts)}
        replace_files(folder, files)


if __name__ == "__main__":
    main(sys.argv[1:])
