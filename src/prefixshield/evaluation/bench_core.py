"""What PrefixShield costs inside vLLM's scheduler: block pool, scheduler steps, replay, memory.

Times are of the processor, not of the clock, but for the real servers. Everything that is compared
takes turns in every round of one run, so that a busy machine slows all of it alike; a ratio is the
median over rounds of the ratio inside a round. vLLM's own block pool, ``native``, is the measure.
"""

from __future__ import annotations

import gc
import json
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from prefixshield.config import Config, dump_config, paper_config
from prefixshield.core.ledger import Contract
from prefixshield.errors import PrefixShieldError, TraceError
from prefixshield.evaluation.bench_spikes import COLUMNS, run_bench_spikes
from prefixshield.evaluation.markdown import table
from prefixshield.evaluation.results import provenance, replace_files
from prefixshield.evaluation.statistics import percentile
from prefixshield.policies import PolicySetup, build_policy
from prefixshield.policies.base import Policy
from prefixshield.serving.control_plane import ControlPlane, cache_config, engine_config
from prefixshield.serving.driver import PolicyDriver
from prefixshield.serving.namespace import Identity
from prefixshield.serving.pool import Tag, tag, take_over
from prefixshield.sim.replay import Replay, replay_policy
from prefixshield.traces import read_trace

# isort: split
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import BlockHash, get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

NATIVE = "native"

#: What is compared: a policy, or one with its preset.
CONTESTANTS = (NATIVE, "lru", "s3fifo", "never-hit-first", "shield paper", "shield default")

#: (blocks of the pool, groups, groups in debt, blocks of a request).
CYCLES = (
    (512, 8, 0, 96),
    (512, 8, 1, 96),
    (512, 8, 8, 96),
    (4_096, 64, 1, 96),
    (4_096, 64, 64, 96),
    (4_096, 64, 64, 1),
    (65_536, 1_000, 1, 96),
    (65_536, 1_000, 1_000, 96),
    (1_048_576, 10_000, 10_000, 96),
)

ROUNDS = 60

#: Blocks that a contestant works through in its turn.
_BLOCKS_PER_TURN = 480

_BLOCK_SIZE = 32
_PHASES = ("get", "cache", "free", "hit")

#: Seconds from one request to the next: next to nothing is refilled, so debts only grow.
_TICK_S = 0.001

_CONTRACTS = {"rich": Contract(1.0, 1e12), "poor": Contract(1.0, 0.0)}

#: Requests that decode at once in a scheduler step.
RUNNING = (1, 16, 256)
_STEPS = 40


class _Load(NamedTuple):
    """A request, and who sends it."""

    request: Request
    identity: Identity


class _Pool:
    """A pool full of candidates, vLLM's own or with a policy, that serves one request at a time."""

    def __init__(self, contestant: str, blocks: int, groups: int, debtors: int, batch: int) -> None:
        self._batch = batch
        self._now = 0.0
        self.manager = KVCacheManager(
            cache_config(blocks, _BLOCK_SIZE),
            max_model_len=blocks * _BLOCK_SIZE,
            scheduler_block_size=_BLOCK_SIZE,
            hash_block_size=_BLOCK_SIZE,
        )
        self._pool = self.manager.block_pool
        self.driver: PolicyDriver | None = None
        self._identities = [
            Identity(f"g{number}", "poor" if number < debtors else "rich")
            for number in range(groups)
        ]
        if contestant != NATIVE:
            policy = make_policy(contestant, blocks, [one.group for one in self._identities])
            self.driver = PolicyDriver(policy, self._identities[0], lambda: self._now)
            take_over(self.manager, self.driver)
        self._numbers = count()
        for _ in range(blocks // batch + 2):
            self.serve(self.load())

    def load(self) -> _Load:
        """The next request: blocks that nobody had before, of the next group."""
        number = next(self._numbers)
        hashes = [b"%032d" % (number * self._batch + block) for block in range(self._batch)]
        identity = self._identities[number % len(self._identities)]
        request = Request(f"r{number}", [0], SamplingParams(max_tokens=1), None)
        request.block_hashes = [BlockHash(block_hash) for block_hash in hashes]
        tag(request, Tag(identity, None))
        return _Load(request, identity)

    def serve(self, load: _Load) -> list[int]:
        """Get, cache and free a request's blocks, then hit and free them; ns of each phase."""
        pool, driver = self._pool, self.driver
        batch = self._batch
        self._now += _TICK_S
        clock = time.thread_time_ns  # of the processor: others may be busy, too
        request, identity = load
        if driver is not None:
            driver.allocate_for(lambda: driver.access(identity, request.request_id), True)
        t0 = clock()
        blocks = pool.get_new_blocks(batch)
        t1 = clock()
        pool.cache_full_blocks(request, blocks, 0, batch, _BLOCK_SIZE, 0)
        t2 = clock()
        pool.free_blocks(reversed(blocks))
        t3 = clock()
        if driver is not None:
            again = f"{request.request_id} again"
            driver.allocate_for(lambda: driver.access(identity, again), True)
        t4 = clock()
        pool.touch(blocks)
        pool.free_blocks(reversed(blocks))
        t5 = clock()
        if driver is not None:
            driver.allocate_for(None)
        return [t1 - t0, t2 - t1, t3 - t2, t5 - t4]


def make_policy(contestant: str, blocks: int, groups: Sequence[str]) -> Policy:
    """The policy of a contestant."""
    name, _, preset = contestant.partition(" ")
    setup = PolicySetup(blocks, _CONTRACTS, groups, preset or "default", reserved_blocks=1)
    return build_policy(name, setup)


@dataclass(frozen=True)
class Section:
    """One table of results."""

    name: str
    title: str
    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]


Progress = Callable[[str], None]


def cycles(progress: Progress) -> Section:
    """ns per block of one cycle, and its ratio to native."""
    rows: list[tuple[Any, ...]] = []
    for setting in CYCLES:
        blocks, groups, debtors, batch = setting
        progress(f"pool of {blocks} blocks, {groups} groups, {debtors} in debt, {batch} at a time")
        pools = {name: _Pool(name, *setting) for name in CONTESTANTS}
        gc.collect()
        gc.freeze()  # as vLLM's engine does with what lives as long as the process
        times: dict[str, list[list[float]]] = {name: [] for name in CONTESTANTS}
        requests = max(1, _BLOCKS_PER_TURN // batch)
        for number in range(ROUNDS):
            first = number % len(pools)
            turns = [*pools.items()][first:] + [*pools.items()][:first]
            for name, pool in turns:
                loads = [pool.load() for _ in range(requests)]
                spent = [pool.serve(load) for load in loads]
                times[name].append(
                    [sum(phase) / (requests * batch) for phase in zip(*spent, strict=True)]
                )
        gc.unfreeze()
        del pools
        gc.collect()
        native = [sum(phases[:3]) for phases in times[NATIVE]]
        for name, found in times.items():
            whole = [sum(phases[:3]) for phases in found]
            ratios = [a / b for a, b in zip(whole, native, strict=True)]
            phases = [round(statistics.median(phase)) for phase in zip(*found, strict=True)]
            rows.append(
                (*setting, name, *phases, round(statistics.median(whole)), *_spread(ratios))
            )
    return Section(
        "cycles",
        "Block pool: get (evicting), cache and free, in ns per block; then hit and free again",
        (
            *("blocks", "groups", "in debt", "at a time", "policy", *_PHASES, "cycle"),
            *("ratio", "p10", "p90"),
        ),
        rows,
    )


def _spread(ratios: Sequence[float]) -> tuple[float, float, float]:
    return (
        round(statistics.median(ratios), 2),
        round(percentile(ratios, 0.1), 2),
        round(percentile(ratios, 0.9), 2),
    )


def memory(progress: Progress) -> Section:
    """Bytes that the driver and its policy keep, per block and per group."""
    progress("memory")
    few, many = 4_096, 16_384
    rows: list[tuple[Any, ...]] = []
    for name in CONTESTANTS[1:]:
        small, large = _bytes(name, few, 8), _bytes(name, many, 8)
        groups = _bytes(name, many, 1_032)
        per_block = (large - small) / (many - few)
        rows.append((name, round(per_block), round((groups - large) / 1_024)))
    return Section(
        "memory",
        "Memory beside vLLM's own, in bytes",
        ("policy", "per block", "per group"),
        rows,
    )


def _bytes(name: str, blocks: int, groups: int) -> int:
    """Of a full pool whose blocks' hashes and requests vLLM keeps anyway."""
    native = _traced(NATIVE, blocks, groups)
    return _traced(name, blocks, groups) - native


def _traced(name: str, blocks: int, groups: int) -> int:
    gc.collect()
    tracemalloc.start()
    try:
        pool = _Pool(name, blocks, groups, groups, 16)
        gc.collect()
        found = tracemalloc.get_traced_memory()[0]
        del pool
    finally:
        tracemalloc.stop()
    return found


def steps(progress: Progress) -> Section:
    """Microseconds of a scheduler step in which so many requests decode."""
    rows: list[tuple[Any, ...]] = []
    with tempfile.TemporaryDirectory(prefix="prefixshield-") as folder:
        for running in RUNNING:
            progress(f"scheduler steps, {running} running")
            planes = {name: _decoding(name, Path(folder), running) for name in CONTESTANTS}
            times: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
            gc.collect()
            gc.freeze()
            for _ in range(_STEPS):
                for name, plane in planes.items():
                    started = time.thread_time_ns()
                    plane.answer(plane.schedule())
                    times[name].append((time.thread_time_ns() - started) / 1000)
            gc.unfreeze()
            for name, found in times.items():
                ratios = [a / b for a, b in zip(found, times[NATIVE], strict=True)]
                rows.append((running, name, round(statistics.median(found), 1), *_spread(ratios)))
    return Section(
        "steps",
        "Scheduler: a step in which every request decodes one token, in us",
        ("running", "policy", "step", "ratio", "p10", "p90"),
        rows,
    )


def _decoding(name: str, folder: Path, running: int) -> ControlPlane:
    """A control plane whose requests have been prefilled and decode on."""
    from prefixshield.serving.scheduler import build_scheduler
    from prefixshield.serving.tiny_model import write_tiny_model

    model = folder / "model"
    if not model.exists():
        write_tiny_model(model)
    init_none_hash(sha256)
    blocks = running * 12 + 64
    additional = ""
    if name != NATIVE:
        policy, _, preset = name.partition(" ")
        config = paper_config().model_copy(update={"policy": policy, "preset": preset or "default"})
        path = folder / f"{name.replace(' ', '-')}.yaml"
        path.write_text(dump_config(config), encoding="utf-8")
        additional = str(path)
    plane = ControlPlane(
        Scheduler if name == NATIVE else build_scheduler,
        engine_config(model, blocks, additional, max_num_seqs=256),
        blocks,
    )
    for number in range(running):
        prompt = [number % 1000 + token % 7 for token in range(3 * _BLOCK_SIZE)]
        plane.scheduler.add_request(
            Request(
                request_id=f"r{number}",
                prompt_token_ids=prompt,
                sampling_params=SamplingParams(max_tokens=8 * _BLOCK_SIZE, ignore_eos=True),
                pooling_params=None,
                block_hasher=get_request_block_hasher(_BLOCK_SIZE, sha256),
            )
        )
    for _ in range(2 + 3 * _BLOCK_SIZE * running // 2048):
        plane.answer(plane.schedule())
    return plane


def server(progress: Progress) -> Section:
    """Requests per second and time to first token of real servers."""
    from prefixshield.evaluation.bench_server import COLUMNS, run_bench_server

    title = "Real server: requests per second and TTFT, ratios to vLLM without PrefixShield"
    return Section("server", title, COLUMNS, run_bench_server(progress))


def spikes(progress: Progress) -> Section:
    """Milliseconds of the costliest single calls."""
    title = "The costliest single calls, in ms"
    return Section("spikes", title, COLUMNS, run_bench_spikes(make_policy, progress))


def replays(progress: Progress, trace: Path, block_size: int) -> Section:
    """Block accesses per second of a serial replay, next to libCacheSim's Python binding."""
    import libcachesim

    requests = read_trace(trace, block_size)
    accesses = sum(len(request.hash_ids) for request in requests)
    unique = len({(request.group, block) for request in requests for block in request.hash_ids})
    capacity = unique // 10
    if capacity < 10:  # libCacheSim's small queue is a tenth of it, at least one block
        raise TraceError(f"{trace}: found {unique} unique blocks, expected at least 100")

    def library(kind: str) -> Callable[[], None]:
        def run() -> None:
            cache = getattr(libcachesim, kind)(cache_size=capacity)
            one = libcachesim.Request()
            one.obj_size = 1
            for request in requests:
                for block in request.hash_ids:
                    one.obj_id = block
                    cache.get(one)

        return run

    def ours(config: Config) -> Callable[[], None]:
        def run() -> None:
            policy = replay_policy(config, capacity, requests, block_size)
            Replay(config, policy, block_size).run(requests)

        return run

    runs: dict[str, Callable[[], None]] = {
        "libCacheSim LRU": library("LRU"),
        "libCacheSim S3FIFO": library("S3FIFO"),
    }
    for name in CONTESTANTS[1:]:
        policy, _, preset = name.partition(" ")
        update = {"policy": policy, "preset": preset or "default"}
        runs[name] = ours(paper_config().model_copy(update=update))
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(3):
        progress(f"replay, round {number + 1}")
        for name, run in runs.items():
            started = time.thread_time()
            run()
            times[name].append(time.thread_time() - started)
    rows = []
    for name, found in times.items():
        ratios = [a / b for a, b in zip(times["libCacheSim LRU"], found, strict=True)]
        rate = accesses / statistics.median(found)
        rows.append((name, round(rate / 1000), *_spread(ratios)))
    return Section(
        "replays",
        f"Serial replay of {trace.name} ({accesses} block accesses, pool of {capacity} blocks): "
        "thousand block accesses per second, as a ratio to libCacheSim's LRU",
        ("policy", "kaccesses/s", "ratio", "min", "max"),
        rows,
    )


#: Every section by its name; replays need a trace and come last.
SECTIONS: dict[str, Callable[[Progress], Section]] = {
    "cycles": cycles,
    "memory": memory,
    "steps": steps,
    "spikes": spikes,
    "server": server,
}


def run_bench_core(
    results: Path, trace: Path, block_size: int, names: Sequence[str], progress: Progress
) -> Iterator[Section]:
    """Measure, section by section, and put each into ``bench-core/summary.json`` and ``.md``.

    Raises PrefixShieldError for a section that there is none of.
    """

    def of_the_trace(told: Progress) -> Section:
        return replays(told, trace, block_size)

    known = {**SECTIONS, "replays": of_the_trace}
    for name in names:
        if name not in known:
            raise PrefixShieldError(
                f"--section: found {name!r}, expected one of: {', '.join(known)}"
            )
    folder = results / "bench-core"
    path = folder / "summary.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except (OSError, ValueError) as error:
        raise PrefixShieldError(f"{path}: cannot be read: {error}") from None
    for name in names or known:
        made_on = provenance()  # the code that runs, whatever is changed meanwhile
        section = known[name](progress)
        found[name] = {
            "title": section.title,
            "command": f"prefixshield bench-core --section {name}",
            **made_on,
            "rounds": ROUNDS,
            "columns": section.columns,
            "rows": section.rows,
        }
        kept = {name: found[name] for name in known if name in found}
        replace_files(
            folder,
            {"summary.json": json.dumps(kept, indent=1) + "\n", "summary.md": _document(kept)},
        )
        yield section


def _document(found: Mapping[str, Any]) -> str:
    parts = ["# What PrefixShield costs\n"]
    for section in found.values():
        parts.append(
            f"## {section['title']}\n\n`{section['command']}`, commit {section['commit']}, "
            f"{section['machine']}.\n\n{table(section['columns'], section['rows'])}"
        )
    return "\n".join(parts)
