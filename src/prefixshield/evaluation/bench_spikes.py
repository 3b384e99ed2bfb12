"""The costliest single calls: what a scheduler step may have to wait for at once, however rarely.

Situations that make one call do what many calls before it have put off. Through the policy
interface, in processor time; a call made when it is over shows that it is one.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from prefixshield.policies.base import Access, Policy
from prefixshield.serving.catalogue import GroupLabels
from prefixshield.serving.driver import PolicyDriver
from prefixshield.serving.namespace import Identity
from prefixshield.serving.reporting import Reporter

#: Builds a policy by its name, for so many blocks and these groups.
Build = Callable[[str, int, Sequence[str]], Policy]

#: (blocks of the pool, groups).
POOLS = ((512, 8), (65_536, 1_000), (1_048_576, 10_000))

#: Policies that do more than pass on an order.
POLICIES = ("s3fifo", "shield paper", "shield default")

#: Blocks of a request.
BATCH = 96

_ROUNDS = 3
_CONTRACT = "rich"
COLUMNS = ("call", "blocks", "groups", "policy", "ms, median", "ms, worst", "ms, the next call")


def run_bench_spikes(build: Build, progress: Callable[[str], None]) -> list[tuple[Any, ...]]:
    """One row per situation, pool and policy; see ``COLUMNS``."""
    rows: list[tuple[Any, ...]] = []
    for blocks, groups in POOLS:
        for name in POLICIES:
            progress(f"spikes: {name}, {blocks} blocks, {groups} groups")
            rows += [
                (what, blocks, groups, name, *_spent(prepare, build, name, blocks, groups))
                for what, prepare in SITUATIONS.items()
            ]
    return rows


def _spent(
    prepare: Callable[..., Callable[[], object]], build: Build, name: str, blocks: int, groups: int
) -> tuple[float, float, float]:
    """ms of the call, in the median and at worst, and of the same call once more."""
    first: list[float] = []
    second: list[float] = []
    for _ in range(_ROUNDS):
        call = prepare(build(name, blocks, [f"g{number}" for number in range(groups)]), groups)
        gc.collect()
        gc.freeze()  # as vLLM's engine does
        for times in (first, second):
            started = time.thread_time()
            call()
            times.append((time.thread_time() - started) * 1_000)
        gc.unfreeze()
    return (
        round(statistics.median(first), 2),
        round(max(first), 2),
        round(statistics.median(second), 2),
    )


def fill(policy: Policy, groups: int) -> list[tuple[Access, list[int]]]:
    """Requests of all groups in turn, each with blocks of its own, until the pool is full."""
    served = []
    for number, first in enumerate(range(0, policy.capacity_blocks - BATCH, BATCH)):
        blocks = list(range(first, first + BATCH))
        hashes = [b"%032d" % block for block in blocks]
        access = Access(f"g{number % groups}", _CONTRACT, f"r{number}", 0.0)
        policy.materialise(blocks, hashes, access, [None, *hashes[:-1]])
        policy.release(blocks[::-1])
        served.append((access, blocks))
    return served


def all_hit(policy: Policy, groups: int) -> Callable[[], object]:
    """Every block was hit more often than counts; then space is needed."""
    served = fill(policy, groups)
    for again in range(4):
        for access, blocks in served:
            policy.hold(blocks)
            policy.hit(blocks, access._replace(request_id=f"{access.request_id} {again}"))
            policy.release(blocks[::-1])
    return lambda: policy.evict(BATCH, served[0][0])


def first_lost(policy: Policy, groups: int) -> Callable[[], object]:
    """One prefix, and everything else in the pool continues it; then its first block is lost."""
    access = Access("g0", _CONTRACT, "first", 0.0)
    policy.materialise([0], [b"first"], access, [None])
    for number, first in enumerate(range(1, policy.capacity_blocks - BATCH, BATCH)):
        blocks = list(range(first, first + BATCH))
        hashes = [b"%032d" % block for block in blocks]
        own = access._replace(request_id=f"r{number}")
        policy.materialise(blocks, hashes, own, [b"first", *hashes[:-1]])
        policy.release(blocks[::-1])
    policy.release([0])
    lost = iter((0, 1))
    return lambda: policy.forget(next(lost))


def reported(policy: Policy, groups: int) -> Callable[[], object]:
    """Every group has blocks and owes; then the metrics are reported, as once a second."""
    labels = GroupLabels(f"g{number}" for number in range(groups))
    driver = PolicyDriver(policy, Identity("g0", _CONTRACT), lambda: 0.0, labels)
    for number in range(groups):
        access = Access(f"g{number}", "poor", f"r{number}", 0.0)
        if number < policy.capacity_blocks:
            driver.materialised([number], [b"%032d" % number], access, [None])
    now = iter(range(9))
    reporter = Reporter(driver, labels, policy.capacity_blocks, lambda: next(now))
    return lambda: reporter.report(idle=False)


#: What each prepares with a policy and returns is the call that is timed.
SITUATIONS: dict[str, Callable[[Policy, int], Callable[[], object]]] = {
    f"evict {BATCH}, every block was hit": all_hit,
    "lose the first block of all prefixes": first_lost,
    "report the metrics, all owe": reported,
}
