"""What the policies cost: processor time of a selection, and memory (paper, section IV, Overhead).

Of the machine at hand, so unlike the other experiments no two runs give the same figures.
Policies take turns in every round, so a busy machine slows all of them alike.
"""

from __future__ import annotations

import csv
import gc
import io
import json
import statistics
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prefixshield.config import paper_config
from prefixshield.errors import PrefixShieldError
from prefixshield.evaluation.results import provenance, replace_files
from prefixshield.evaluation.statistics import percentile
from prefixshield.policies import POLICIES, PolicySetup, build_policy
from prefixshield.policies.base import Access, Policy

#: (usable blocks, groups): the paper's two settings.
SETTINGS = ((511, 8), (4095, 32))

#: Victims of one selection: one block, and one of the paper's prefixes.
BATCHES = (1, 96)

ROUNDS = 400

COLUMNS = (
    *("policy", "capacity_blocks", "groups", "victims"),
    *("mean_us", "p50_us", "p95_us", "ratio_to_lru", "metadata_bytes"),
)


def run_overhead(results: Path, on_progress: Callable[[int, int], None]) -> Path:
    """Measure, write ``overhead.csv`` and ``experiment.json``, and return their folder."""
    made_on = provenance()
    rows: list[dict[str, Any]] = []
    on_progress(0, len(SETTINGS) * len(BATCHES))
    for capacity_blocks, groups in SETTINGS:
        metadata = {name: _metadata_bytes(name, capacity_blocks, groups) for name in POLICIES}
        for victims in BATCHES:
            times = _selection_us(capacity_blocks, groups, victims)
            for name, found in times.items():
                ratios = [a / b for a, b in zip(found, times["lru"], strict=True)]
                rows.append(
                    {
                        "policy": name,
                        "capacity_blocks": capacity_blocks,
                        "groups": groups,
                        "victims": victims,
                        "mean_us": round(statistics.fmean(found), 3),
                        "p50_us": round(percentile(found, 0.5), 3),
                        "p95_us": round(percentile(found, 0.95), 3),
                        "ratio_to_lru": round(statistics.median(ratios), 2),
                        "metadata_bytes": metadata[name],
                    }
                )
            on_progress(len(rows) // len(POLICIES), len(SETTINGS) * len(BATCHES))
    description = {
        "experiment": "overhead",
        "title": "Prototype overhead: selection and metadata",
        "command": "prefixshield experiment overhead",
        "rounds": ROUNDS,
        **made_on,
    }
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    folder = results / "overhead"
    replace_files(
        folder,
        {
            "overhead.csv": text.getvalue(),
            "experiment.json": json.dumps(description, indent=2) + "\n",
        },
    )
    return folder


def read_overhead(results: Path) -> tuple[dict[str, Any], list[dict[str, str]]] | None:
    """Description and rows of finished measurements; None: there are none.

    Raises PrefixShieldError when they cannot be read.
    """
    folder = results / "overhead"
    if not folder.exists():
        return None
    try:
        description = json.loads((folder / "experiment.json").read_text(encoding="utf-8"))
        with (folder / "overhead.csv").open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
    except (OSError, ValueError) as error:
        raise PrefixShieldError(f"{folder}: cannot be read: {error}") from None
    if not rows or tuple(rows[0]) != COLUMNS:
        raise PrefixShieldError(f"{folder / 'overhead.csv'}: expected the columns {COLUMNS}")
    return description, rows


def _filled(name: str, capacity_blocks: int, groups: int) -> tuple[Policy, list[str]]:
    """A policy whose pool is full of candidates, and the owner of every block.

    Every group has as many blocks as the others and owes for them, which is the dearest case.
    """
    config = paper_config()
    names = [f"g{number}" for number in range(groups)]
    setup = PolicySetup(capacity_blocks, config.contract_table(), names, "paper")
    policy = build_policy(name, setup)
    owners = [names[block % groups] for block in range(capacity_blocks)]
    for group in names:
        blocks = [block for block in range(capacity_blocks) if owners[block] == group]
        _admit(policy, blocks, group, "first")
        # More than any burst: the blocks that are there are charged again, as new ones would be.
        for again in range(1 + 512 // len(blocks)):
            policy.hold(blocks)
            _admit(policy, blocks, group, f"again {again}")
    return policy, owners


def _admit(policy: Policy, blocks: list[int], group: str, request_id: str) -> None:
    access = Access(group, "standard", request_id, 0.0)
    policy.materialise(blocks, [(request_id, block) for block in blocks], access)
    policy.release(blocks[::-1])


def _selection_us(capacity_blocks: int, groups: int, victims: int) -> dict[str, list[float]]:
    """Microseconds of each selection of so many victims, by policy.

    After a selection its victims' owners take the same number of blocks again.
    """
    pools = {name: _filled(name, capacity_blocks, groups) for name in POLICIES}
    # As vLLM's engine does: what lives as long as the process is not looked at again and again.
    gc.collect()
    gc.freeze()
    times: dict[str, list[float]] = {name: [] for name in POLICIES}
    for number in range(ROUNDS):
        for name, (policy, owners) in pools.items():
            access = Access(owners[number % capacity_blocks], "standard", f"r{number}", 0.0)
            own = owners.count(access.group)
            count = victims if policy.share_blocks is None else min(victims, own)
            started = time.thread_time_ns()
            chosen = policy.evict(count, access)
            times[name].append((time.thread_time_ns() - started) / 1000)
            for group in sorted({owners[block] for block in chosen}):
                blocks = [block for block in chosen if owners[block] == group]
                _admit(policy, blocks, group, f"{number}")
    gc.unfreeze()
    return times


def _metadata_bytes(name: str, capacity_blocks: int, groups: int) -> int:
    """Memory that a full policy holds, Python's own overhead included."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        policy, owners = _filled(name, capacity_blocks, groups)
        after = tracemalloc.get_traced_memory()[0]
        del policy, owners
    finally:
        tracemalloc.stop()
    return after - before
