"""Policies side by side: serial replays of traces under every policy, pool size and refill rate.

LRU, S3-FIFO and the clairvoyant bound are part of every comparison. Each replay is one process's
work; results come in the order of the plan, whichever replay ended first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from rich.table import Table

from prefixshield.config import Config
from prefixshield.errors import PrefixShieldError
from prefixshield.evaluation.workers import in_parallel
from prefixshield.policies import POLICIES
from prefixshield.policies.lru import Lru
from prefixshield.policies.never_hit_first import NeverHitFirst
from prefixshield.policies.s3fifo import S3Fifo
from prefixshield.policies.static_quota import StaticQuota
from prefixshield.sim.clairvoyant import Clairvoyant
from prefixshield.sim.replay import Replay, ReplayResult, Tally, replay_policy
from prefixshield.traces import TraceRequest, read_trace

#: Distances are from the better of these.
BASELINES = (Lru.name, S3Fifo.name)

#: They read no contract, so that one run stands for every refill scale. A policy that is not
#: listed is run once per scale.
CONTRACT_FREE = frozenset(
    {Lru.name, S3Fifo.name, NeverHitFirst.name, StaticQuota.name, Clairvoyant.name}
)

#: A pool size in blocks; a fraction is a share of the trace's unique (group, block) pairs.
Size = int | Fraction


@dataclass(frozen=True, slots=True)
class Question:
    """What is compared. Sequences keep the order in which they are shown."""

    traces: Sequence[Path]
    block_size: int
    """Tokens per block, of all traces."""
    sizes: Sequence[Size]
    policies: Sequence[str]
    """With both baselines first and the bound last, see ``parse_policies``."""
    refill_scales: Sequence[float] = (1.0,)
    """Factors on the contracts' refill rates; bursts stay."""
    per_group: bool = False
    """Score every group too; the bound is then the group's own."""


@dataclass(frozen=True, slots=True)
class Score:
    """How one policy did on one pool."""

    blocks: int
    """Pool size."""
    refill_scale: float | None
    """None: the policy reads no contracts."""
    policy: str
    group: str | None
    """None: all groups together."""
    tally: Tally
    distance_pp: float
    """Hit ratio less that of the better baseline, in percentage points."""

    def as_dict(self) -> dict[str, Any]:
        return {
            "blocks": self.blocks,
            "refill_scale": self.refill_scale,
            "policy": self.policy,
            "group": self.group,
            **self.tally.as_dict(),
            "distance_pp": self.distance_pp,
        }


@dataclass(slots=True)
class TraceComparison:
    """One trace and all scores on it."""

    trace: Path
    requests: int
    unique_blocks: int
    """Distinct (group, block) pairs."""
    groups: Sequence[str]
    """In order of first appearance."""
    sizes: Mapping[int, str]
    """Every pool size in blocks, and how it was asked for."""
    scores: Sequence[Score] = ()
    """By pool size, then group (all groups first), then policy, then refill scale."""

    def as_dict(self) -> dict[str, Any]:
        return {
            "trace": str(self.trace),
            "requests": self.requests,
            "unique_blocks": self.unique_blocks,
            "groups": list(self.groups),
            "scores": [score.as_dict() for score in self.scores],
        }


@dataclass(frozen=True, slots=True)
class _Job:
    """One replay."""

    trace: Path
    block_size: int
    blocks: int
    policy: str
    refill_scale: float | None
    for_group: str | None = None


def compare(
    question: Question,
    config: Config,
    processes: int = 1,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[TraceComparison]:
    """Replay every combination, on several processes when asked to.

    ``progress`` is told how many replays are done, of how many.

    Raises:
        PrefixShieldError: a trace cannot be used, or a process died.

    """
    _requests.cache_clear()  # the files may have changed since the last comparison
    comparisons = [_describe(trace, question, config) for trace in question.traces]
    plan = [job for one in comparisons for job in _jobs(one, question)]
    results = dict(
        zip(plan, in_parallel(partial(_replay, config), plan, processes, progress), strict=True)
    )
    for one in comparisons:
        one.scores = list(_scores(one, question, results))
    return comparisons


def parse_policies(text: str) -> tuple[str, ...]:
    """Names from ``a,b`` or ``all``, the baselines put first and the bound last."""
    names = list(POLICIES) if text == "all" else _parts(text)
    for name in names:
        if name not in POLICIES and name != Clairvoyant.name:
            known = ", ".join([*POLICIES, Clairvoyant.name])
            raise PrefixShieldError(
                f"--policies: found {name!r}, expected all, or some of: {known}"
            )
    first = dict.fromkeys([*BASELINES, *names])
    return (*(name for name in first if name != Clairvoyant.name), Clairvoyant.name)


def parse_sizes(text: str, most_blocks: int) -> tuple[Size, ...]:
    """Pool sizes from ``1000,5%``."""
    sizes: dict[Size, None] = {}
    for part in _parts(text):
        size: Size | None = None
        if re.fullmatch(r"[0-9]{1,18}", part):
            size = int(part)
        elif re.fullmatch(r"[0-9]{1,3}(\.[0-9]{1,9})?%", part):
            size = Fraction(part[:-1]) / 100
        if size is None or not 0 < size <= most_blocks:
            raise PrefixShieldError(
                f"--blocks: found {part!r}, expected blocks, from 1 to {most_blocks}, or a "
                "percentage of the trace's unique blocks, like 5%"
            )
        sizes[size] = None
    return tuple(sizes)


def parse_refill_scales(text: str) -> tuple[float, ...]:
    """Factors from ``0.25,1,4``."""
    scales: dict[float, None] = {}
    for part in _parts(text):
        if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", part) or not float(part):
            raise PrefixShieldError(
                f"--refill-scale: found {part!r}, expected a number greater than 0, like 0.25"
            )
        scales[float(part)] = None
    return tuple(scales)


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


def table(comparison: TraceComparison, question: Question, per_group: bool = False) -> Table:
    """One row per pool size, refill scale (where it matters) and, if asked for, group."""
    shown = {
        (score.blocks, score.refill_scale, score.policy, score.group): score
        for score in comparison.scores
    }
    scales = _scales_that_matter(question)
    groups = comparison.groups if per_group else [None]
    skips = any(score.tally.rejected for score in comparison.scores)

    result = Table()
    result.add_column("blocks", justify="right")
    if scales != [None]:
        result.add_column("refill scale", justify="right")
    if per_group:
        result.add_column("group")
    if skips:
        result.add_column("skipped", justify="right")
    for policy in question.policies:
        result.add_column(policy.replace("-", "-\n"), justify="right", min_width=7)

    uneven = False
    for blocks, size in comparison.sizes.items():
        for scale in scales:
            for group in groups:
                cells = [size] if scale is None else [size, f"{scale:g}"]
                skipped = shown[blocks, None, Lru.name, group].tally.rejected
                cells += [group] if group is not None else []
                cells += [str(skipped)] if skips else []
                for policy in question.policies:
                    of_policy = None if policy in CONTRACT_FREE else scale or 1.0
                    score = shown[blocks, of_policy, policy, group]
                    mark = "*" if score.tally.rejected != skipped else ""
                    uneven |= bool(mark)
                    distance_pp = round(score.distance_pp, 2) + 0.0  # never shown as -0.00
                    cells.append(f"{score.tally.hit_ratio:.4f}{mark}\n{distance_pp:+.2f}")
                result.add_row(*cells)
        result.add_section()
    result.caption = (
        "Hit ratio in blocks; below it the distance from the better of "
        f"{' and '.join(BASELINES)} in percentage points. {Clairvoyant.name}: the bound"
        + (", each group's own." if per_group else ".")
        + (" skipped: requests larger than the pool." if skips else "")
        + (" *: skipped other requests than lru did, so over other blocks." if uneven else "")
    )
    result.caption_justify = "left"
    return result


def _describe(trace: Path, question: Question, config: Config) -> TraceComparison:
    requests = _requests(trace, question.block_size)
    groups = [request.group or config.default_group for request in requests]
    pairs = zip(groups, requests, strict=True)
    unique = len({(group, block) for group, request in pairs for block in request.hash_ids})
    sizes: dict[int, str] = {}
    for size in question.sizes:
        blocks = size if isinstance(size, int) else max(1, round(size * unique))
        share = "" if isinstance(size, int) else f" ({float(size * 100):g}%)"
        sizes.setdefault(blocks, f"{blocks:,}{share}")
    return TraceComparison(trace, len(requests), unique, list(dict.fromkeys(groups)), sizes)


def _jobs(one: TraceComparison, question: Question) -> Iterator[_Job]:
    for blocks in one.sizes:
        for policy in question.policies:
            for scale in _scales_of(policy, question):
                yield _Job(one.trace, question.block_size, blocks, policy, scale)
        if question.per_group:
            for group in one.groups:
                yield _bound_of(group, one, question, blocks)


def _bound_of(group: str, one: TraceComparison, question: Question, blocks: int) -> _Job:
    return _Job(one.trace, question.block_size, blocks, Clairvoyant.name, None, group)


def _scales_of(policy: str, question: Question) -> Sequence[float | None]:
    return [None] if policy in CONTRACT_FREE else question.refill_scales


def _scales_that_matter(question: Question) -> Sequence[float | None]:
    """The scales that rows differ in; only None when there is nothing to tell apart."""
    if all(policy in CONTRACT_FREE for policy in question.policies):
        return [None]
    return [None] if list(question.refill_scales) == [1.0] else list(question.refill_scales)


def _scores(
    one: TraceComparison, question: Question, results: Mapping[_Job, ReplayResult]
) -> Iterator[Score]:
    groups = one.groups if question.per_group else ()

    def tally(blocks: int, policy: str, scale: float | None, group: str | None) -> Tally:
        job = _Job(one.trace, question.block_size, blocks, policy, scale)
        if group is None:
            return results[job].total
        if policy == Clairvoyant.name:
            job = _bound_of(group, one, question, blocks)
        return results[job].groups[group]

    for blocks in one.sizes:
        for group in (None, *groups):
            better = max(tally(blocks, name, None, group).hit_ratio for name in BASELINES)
            for policy in question.policies:
                for scale in _scales_of(policy, question):
                    counted = tally(blocks, policy, scale, group)
                    distance_pp = 100 * (counted.hit_ratio - better)
                    yield Score(blocks, scale, policy, group, counted, distance_pp)


def _replay(config: Config, job: _Job) -> ReplayResult:
    requests = _requests(job.trace, job.block_size)
    contracts = {
        name: terms.model_copy(update={"refill_rate": terms.refill_rate * (job.refill_scale or 1)})
        for name, terms in config.contracts.items()
    }
    settings = config.model_copy(update={"policy": job.policy, "contracts": contracts})
    try:
        policy = replay_policy(settings, job.blocks, requests, job.block_size, job.for_group)
        return Replay(settings, policy, job.block_size).run(requests)
    except PrefixShieldError as error:
        raise type(error)(f"{job.trace}: {error}") from None


@lru_cache(maxsize=1)
def _requests(trace: Path, block_size: int) -> Sequence[TraceRequest]:
    """The trace, read once by a process that replays it several times in a row."""
    return read_trace(trace, block_size)
