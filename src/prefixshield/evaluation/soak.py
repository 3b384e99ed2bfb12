"""Soak: a long run of vLLM's real scheduler under a policy, looked at for leaks and drift.

Random traffic of many groups in virtual time, without a model: hot prefixes and unseen prompts,
duplicates, aborts, storms of long requests, resets and idle hours. Every so many steps the pool and
the policy are checked; memory and the size of all accounting state are sampled and must stay flat.
"""

from __future__ import annotations

import gc
import json
import os
import random
import sys
import tempfile
import time
import types
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from prefixshield.config import PAPER_CONTRACTS, Config, GroupSection, dump_config
from prefixshield.evaluation.results import provenance, replace_files
from prefixshield.serving.control_plane import ControlPlane, engine_config

# isort: split
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request, RequestStatus

from prefixshield.serving.driver import PolicyDriver
from prefixshield.serving.namespace import Identity, Namespaces
from prefixshield.serving.tiny_model import write_tiny_model

BLOCK_SIZE = 16

#: Usable blocks of the pool.
BLOCKS = 512

#: Seconds of the accounting clock per step.
STEP_S = 0.02

#: No request arrives while so many are unfinished.
MOST_UNFINISHED = 64

#: Steps between two storms: long requests at once, which preempt each other.
STORM_EVERY, STORM_REQUESTS = 10_000, 24

#: Samples of memory in a run; the first fifth of them is warm-up.
SAMPLES = 50

#: How much more the second half of the samples may take at most than the first: part, bytes.
GROWTH, SLACK_BYTES = 0.02, 2**20
#: ... and objects: what runs when a sample is taken; a leak of one in ten requests is more.
SLACK_OBJECTS = 500

#: What is run: (policy, preset).
SUBJECTS = (("shield", "default"), ("shield", "paper"), ("lru", "default"))


class Sample(NamedTuple):
    """Memory after so many steps."""

    step: int
    rss_bytes: int
    """Of the whole process."""
    accounting_bytes: int
    """Of everything that driver and policy hold."""
    objects: int
    """That Python's garbage collector tracks, those from before the run left out."""


class Soak:
    """One run under one policy."""

    def __init__(self, folder: Path, policy: str, preset: str, groups: int, seed: int) -> None:
        contracts = list(PAPER_CONTRACTS)
        names = [f"g{number}" for number in range(groups)]
        config = Config(
            policy=policy,
            preset=preset,
            contracts=dict(PAPER_CONTRACTS),
            groups={
                name: GroupSection(contract=contracts[number % len(contracts)])
                for number, name in enumerate(names)
            },
            default_group=names[0],
        )
        path = folder / f"{policy}-{preset}.yaml"
        path.write_text(dump_config(config), encoding="utf-8")
        vllm_config = engine_config(
            write_tiny_model(folder / "model"), BLOCKS + 1, str(path), BLOCK_SIZE, max_num_seqs=16
        )
        # Imported here: it must find the configuration of vLLM made.
        from prefixshield.serving.scheduler import build_scheduler

        plane = ControlPlane(build_scheduler, vllm_config, BLOCKS + 1, BLOCK_SIZE)
        self._plane = plane
        self._scheduler = plane.scheduler
        self._pool = plane.scheduler.kv_cache_manager.block_pool
        plane.scheduler.keep_configuration()  # type: ignore[attr-defined]
        self._driver: PolicyDriver = plane.scheduler.driver  # type: ignore[attr-defined]
        self._now = 0.0
        self._driver.clock = lambda: self._now
        space = Namespaces.of(config, path)
        self._salts = [space.token(Identity(n, config.default_contract(n))) for n in names]
        self._random = random.Random(seed)
        self._hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
        self._started = 0
        self.seen: Counter[str] = Counter()
        """What happened, by kind."""

    def run(self, steps: int, check_every: int, progress: Callable[[int], None]) -> list[Sample]:
        """Make the steps, then let everything finish; AssertionError: an invariant is broken."""
        samples = []
        sample_every = max(1, steps // SAMPLES)
        for step in range(1, steps + 1):
            self._traffic(step)
            self._step()
            if step % check_every == 0:
                self.check()
            if step % sample_every == 0:
                samples.append(self._sample(step))
                progress(step)
        while self._scheduler.has_unfinished_requests():
            self._step()
        self.check()
        assert self._pool.get_num_free_blocks() == BLOCKS, "blocks leaked"
        return samples

    def _traffic(self, step: int) -> None:
        r = self._random
        if step % STORM_EVERY == 0:
            for _ in range(STORM_REQUESTS):
                self._add(prompt_blocks=r.randrange(8, 24), output=r.randrange(400, 900))
            self.seen["storms"] += 1
        elif r.random() < 0.25 and len(self._scheduler.requests) < MOST_UNFINISHED:
            self._add(prompt_blocks=r.randrange(1, 20), output=r.randrange(1, 40))
        chance = r.random()
        if chance < 0.005 and self._scheduler.requests:
            name = r.choice(list(self._scheduler.requests))
            self._scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
            self.seen["aborted"] += 1
        elif chance > 1 - 2e-5:
            assert self._scheduler.reset_prefix_cache(reset_running_requests=True)
            self.seen["resets"] += 1
        self._now += 3600.0 if r.random() < 1e-5 else STEP_S

    def _add(self, prompt_blocks: int, output: int) -> None:
        """Half of the prompts begin with one of their group's three hot prefixes."""
        r = self._random
        group = int(len(self._salts) * r.random() ** 2)
        self._started += 1
        tokens = [self._started] * (prompt_blocks * BLOCK_SIZE + r.randrange(BLOCK_SIZE))
        if r.random() < 0.5:
            hot = min(len(tokens), BLOCK_SIZE * r.randrange(1, 12))
            tokens[:hot] = [-1 - r.randrange(3)] * hot
        request = Request(
            request_id=str(self._started),
            prompt_token_ids=tokens,
            sampling_params=SamplingParams(max_tokens=output, ignore_eos=True),
            pooling_params=None,
            arrival_time=self._now,
            cache_salt=self._salts[group],
            block_hasher=self._hasher,
        )
        self._scheduler.add_request(request)
        self.seen["requests"] += 1

    def _step(self) -> None:
        scheduled = self._plane.schedule()
        self.seen["preempted"] += len(scheduled.preempted_req_ids or ())
        self.seen["tokens"] += scheduled.total_num_scheduled_tokens
        self._plane.answer(scheduled)

    def check(self) -> None:
        """Assert that pool, policy and driver are consistent. Scans everything."""
        pool, policy = self._pool, self._driver.policy
        assert not self._driver.failed, "the policy failed"
        policy.check()
        free = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
        idle = {b.block_id for b in pool.blocks if b.ref_cnt == 0 and not b.is_null}
        assert len(free) == len(idle) == pool.get_num_free_blocks(), "a block is free twice or lost"
        assert set(free) == idle, "a held block is free"
        for block in pool.blocks:
            assert block.is_null or block.ref_cnt >= 0
            if block.block_hash is not None:
                found = pool.cached_block_hash_to_block
                assert found.contain(block.block_hash, block.block_id), "a hash without a block"
        hashed = sum(pool.blocks[block_id].block_hash is not None for block_id in free)
        if self._driver.told:
            assert self._driver.candidate_count == hashed, "candidates are miscounted"
            assert policy.candidate_count == hashed, "the policy miscounts"
        self.seen["checks"] += 1

    def _sample(self, step: int) -> Sample:
        gc.collect()
        held = [value for name, value in vars(self._driver).items() if name != "clock"]
        return Sample(step, _rss_bytes(), _deep_bytes(held), len(gc.get_objects()))


def growth(values: Sequence[float]) -> float:
    """By what part the highest of the second half is above the highest of the first.

    The first fifth, in which pool, history and counters fill, does not count.
    """
    values = values[len(values) // 5 :]
    half = len(values) // 2
    return max(values[half:]) / max(values[:half]) - 1


def assert_flat(samples: Sequence[Sample]) -> None:
    """Assert that nothing grew between the halves of a run, but for allocator noise."""
    for field in ("rss_bytes", "accounting_bytes", "objects"):
        values = [getattr(sample, field) for sample in samples]
        slack = (SLACK_OBJECTS if field == "objects" else SLACK_BYTES) / max(values)
        rise = growth(values)
        assert rise <= GROWTH + slack, f"{field} grew by {rise:.1%} between the halves of the run"


def _rss_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _deep_bytes(roots: list[Any]) -> int:
    """Memory of objects and of everything they refer to, code left out."""
    code = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)
    seen: set[int] = set()
    total = 0
    todo = list(roots)
    while todo:
        found = todo.pop()
        if id(found) in seen or isinstance(found, code):
            continue
        seen.add(id(found))
        total += sys.getsizeof(found)
        todo += gc.get_referents(found)
    return total


def main(
    steps: Annotated[int, typer.Option(min=100, help="Scheduler steps per policy.")] = 1_000_000,
    groups: Annotated[int, typer.Option(min=1, help="Groups that send requests.")] = 64,
    check_every: Annotated[int, typer.Option(min=1, help="Steps between two checks.")] = 100,
    seed: Annotated[int, typer.Option(min=0, help="Of the traffic.")] = 0,
    output: Annotated[Path, typer.Option(file_okay=False, help="Folder to write into.")] = Path(
        "results/soak"
    ),
) -> None:
    """Run every policy for so many steps and write what was seen; fails at the first fault."""
    init_none_hash(sha256)
    made_on = provenance()
    runs = []
    for policy, preset in SUBJECTS:
        with tempfile.TemporaryDirectory() as folder:
            runs.append(_one(Path(folder), policy, preset, steps, groups, check_every, seed))
        summary = {
            "title": "Soak: the real scheduler in virtual time",
            "command": f"make soak STEPS={steps} GROUPS={groups} CHECK_EVERY={check_every}",
            "seed": seed,
            "blocks": BLOCKS,
            "groups": groups,
            "runs": runs,
            **made_on,
        }
        replace_files(output, {"summary.json": json.dumps(summary, indent=2) + "\n"})
        typer.echo(f"{output / 'summary.json'}: {policy}, preset {preset}, {steps} steps")


def _one(
    folder: Path, policy: str, preset: str, steps: int, groups: int, check_every: int, seed: int
) -> dict[str, Any]:
    soak = Soak(folder, policy, preset, groups, seed)
    gc.freeze()  # what is there now is not looked at again
    began = time.monotonic()

    def progress(step: int) -> None:
        done = f"{policy}, {preset}: {step} of {steps} steps, {time.monotonic() - began:.0f} s"
        print(done, end="\r", file=sys.stderr, flush=True)

    samples = soak.run(steps, check_every, progress)
    assert_flat(samples)
    counted: Counter[str] = Counter()
    for (name, *_), count in soak._driver.counts.items():
        counted[name] += count
    return {
        "policy": policy,
        "preset": preset,
        "steps": steps,
        "seconds": round(time.monotonic() - began, 1),
        "seen": dict(sorted(soak.seen.items())),
        "counts": dict(sorted(counted.items())),
        "growth": {
            field: round(growth([getattr(sample, field) for sample in samples]), 5)
            for field in ("rss_bytes", "accounting_bytes", "objects")
        },
        "samples": [sample._asdict() for sample in samples[:: max(1, len(samples) // 20)]],
    }


if __name__ == "__main__":
    typer.run(main)
