"""The paper's experiments: which workload, pool, profile and policies each of them runs.

An experiment is a list of cells; a cell is one seed of one variant under one policy on one engine.
Matched runs share the seed, so every policy gets the same requests.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from prefixshield.config import PAPER_CONTRACTS
from prefixshield.core.ledger import Contract
from prefixshield.errors import PrefixShieldError
from prefixshield.evaluation.run import SHIELD_DEFAULT
from prefixshield.policies import POLICIES
from prefixshield.sim.clairvoyant import Clairvoyant
from prefixshield.traces import Workload, pollution
from prefixshield.traces.conversations import bursty, conversations, sharegpt_like
from prefixshield.traces.mixtures import MIXTURES
from prefixshield.traces.pollution import DEFAULT_SHAPE, PREFIX_BLOCKS, Load

#: ``serial``: serial replay; ``virtual``: virtual time at a profile's costs; ``real``: the server
#: over HTTP; ``calibrated``: virtual time at the costs measured on the machine of ``real``.
EngineName = Literal["serial", "virtual", "real", "calibrated"]

DEFAULT_PROFILE = "L4, 1.5B"

#: Usable blocks of the paper's default pool: 512 configured, of which vLLM keeps one.
DEFAULT_BLOCKS = 511

#: C_prefill of the paper's default deployment: 5.955 requests/s at 60% load (section IV).
PAPER_CAPACITY = 5.955 / 0.6

BEST_EFFORT = Contract(
    PAPER_CONTRACTS["best-effort"].refill_rate, PAPER_CONTRACTS["best-effort"].burst
)

#: The clairvoyant bound for the victim alone, beside the overall one; both serial only.
VICTIM_BOUND = f"{Clairvoyant.name}-victim"


#: Conversations in a benign run: about 370 requests.
CONVERSATIONS = 120

_ALL = tuple(POLICIES)
_PAPERS = ("lru", "s3fifo", "static-quota", "shield")
_BASELINES = ("lru", "s3fifo", "never-hit-first", "shield")
_PRESETS = ("lru", "s3fifo", "shield", SHIELD_DEFAULT)


@dataclass(frozen=True)
class Variant:
    """One workload over one pool."""

    make: Callable[[int, Load, int], Workload]
    """From a seed, the load and the block size."""
    policies: Sequence[str]
    capacity_blocks: int = DEFAULT_BLOCKS
    profile: str = DEFAULT_PROFILE
    alpha: float = 0.6


@dataclass(frozen=True)
class Experiment:
    """One table or figure of the paper."""

    title: str
    variants: Mapping[str, Variant]
    engines: Sequence[EngineName] = ("virtual", "real", "calibrated")
    """Which engines it can run on; the first is the default."""
    real_policies: Sequence[str] = _PAPERS
    """Of its policies those that run on the real engine, where a run takes a minute or more: the
    paper's."""


class Cell(NamedTuple):
    """One run."""

    engine: str
    variant: str
    policy: str
    seed: int


def _attacks() -> dict[str, Variant]:
    return {
        "one-touch": Variant(_one_touch(pollution.HOT_PREFIXES), _ALL),
        "low-and-slow": Variant(_low_and_slow, _ALL),
        "two-pass replay": Variant(_two_pass_replay, _ALL),
        "low-and-slow, no attack": Variant(_low_and_slow_control, ("lru",)),
        "two-pass replay, no attack": Variant(_two_pass_control, ("lru",)),
    }


def _one_touch(hot_prefixes: int) -> Callable[[int, Load, int], Workload]:
    def make(seed: int, load: Load, block_size: int) -> Workload:
        return pollution.one_touch(seed, load, block_size=block_size, hot_prefixes=hot_prefixes)

    return make


def _low_and_slow(seed: int, load: Load, block_size: int) -> Workload:
    return pollution.low_and_slow(seed, load, block_size=block_size)


def _low_and_slow_control(seed: int, load: Load, block_size: int) -> Workload:
    return pollution.low_and_slow(seed, load, attacked=False, block_size=block_size)


def _two_pass_replay(seed: int, load: Load, block_size: int) -> Workload:
    return pollution.two_pass_replay(seed, load, block_size=block_size)


def _two_pass_control(seed: int, load: Load, block_size: int) -> Workload:
    return pollution.two_pass_replay(seed, load, attacked=False, block_size=block_size)


def _borrowing(seed: int, load: Load, block_size: int) -> Workload:
    return pollution.borrowing(seed, load, block_size=block_size)


def _conversations(
    *, burst: bool = False, count: int = CONVERSATIONS
) -> Callable[[int, Load, int], Workload]:
    """Conversations fitted to ShareGPT, of two groups on the same contract.

    Rate, think time and the length of generated answers are not in the paper: chosen so that LRU
    serves about as much from the cache as the paper's policies do, at about their P95 TTFT.
    """

    def make(seed: int, load: Load, block_size: int) -> Workload:
        scale = block_size // 16
        workload = conversations(
            seed,
            sharegpt_like(seed, count, max_tokens=1900),
            {"chat-a": "standard", "chat-b": "standard"},
            rate=0.2 * load.base_rate,
            think_s=2.0,
            service_s=0.5,
            service_token_s=0.005,
            scale=scale,
            name="sharegpt-like",
        )
        # A next turn holds the trace's answer, so what is generated here is never used again.
        longest = round(DEFAULT_SHAPE.output_blocks * block_size)
        requests = (
            replace(request, output_length=min(longest, request.output_length))
            for request in workload.requests
        )
        workload = replace(workload, requests=tuple(requests))
        return bursty(workload, period_s=10.0, duty_ratio=0.2) if burst else workload

    return make


def _creation_pressure(ratio: float, evenly: bool) -> Callable[[int, Load, int], Workload]:
    def make(seed: int, load: Load, block_size: int) -> Workload:
        return pollution.creation_pressure(
            seed,
            load,
            creation_ratio=ratio,
            refill_rate=BEST_EFFORT.refill_rate,
            evenly=evenly,
            block_size=block_size,
        )

    return make


def _delayed_replay(wait_ratio: float) -> Callable[[int, Load, int], Workload]:
    def make(seed: int, load: Load, block_size: int) -> Workload:
        return pollution.delayed_replay(
            seed,
            wait_ratio=wait_ratio,
            terms=BEST_EFFORT,
            capacity_blocks=DEFAULT_BLOCKS,
            block_size=block_size,
        )

    return make


def _hot_prefixes(usable_blocks: int) -> int:
    """As many as keep the victim's set at 76.6% of the pool (paper, Fig. 2a)."""
    created = PREFIX_BLOCKS + 2  # with its question and its output, both partly filled
    return round(0.766 * usable_blocks / created)


def _scale() -> Iterator[tuple[str, Variant]]:
    for configured in (512, 1024, 2048, 4096):
        make = _one_touch(_hot_prefixes(configured - 1))
        yield f"{configured} blocks", Variant(make, _BASELINES, configured - 1)
    for ratio, evenly in itertools.product((0.54, 1.02, 2.14, 4.23), (False, True)):
        # Without classes only debt protects, so what they add where nobody owes can be told.
        policies = (*_BASELINES, "no-segmentation")
        name = f"creation ratio {ratio}{', evenly' if evenly else ''}"
        yield name, Variant(_creation_pressure(ratio, evenly), policies)
    for percent in (40, 60, 80):
        make = _one_touch(pollution.HOT_PREFIXES)
        yield f"load {percent}%", Variant(make, _BASELINES, alpha=percent / 100)
    for profile in (DEFAULT_PROFILE, "A100, 1.5B", "A100, 7B"):
        yield profile, Variant(_one_touch(pollution.HOT_PREFIXES), _BASELINES, profile=profile)


def _short_answers(attack: Callable[..., Workload]) -> Callable[[int, Load, int], Workload]:
    """An attack whose requests generate one token: they hold their blocks for a prefill only."""

    def make(seed: int, load: Load, block_size: int) -> Workload:
        shape = replace(DEFAULT_SHAPE, output_blocks=1 / block_size)
        return attack(seed, load, block_size=block_size, shape=shape)

    return make


def _late(make: Callable[[int, Load, int], Workload]) -> Callable[[int, Load, int], Workload]:
    """The requests of seed 0, each up to `LATE_MS` late: the seed decides how late."""

    def late(seed: int, load: Load, block_size: int) -> Workload:
        workload = make(0, load, block_size)
        rng = random.Random(f"late {seed}")
        requests = [
            replace(request, timestamp_ms=round(request.timestamp_ms + rng.uniform(0, LATE_MS), 3))
            for request in workload.requests
        ]
        requests.sort(key=lambda request: request.timestamp_ms)
        return replace(workload, requests=tuple(requests))

    return late


#: Milliseconds of the trace's time, as a client and a server that share two cores are late.
LATE_MS = 100.0

#: Every experiment by its name.
EXPERIMENTS: Mapping[str, Experiment] = {
    "table1": Experiment("Table I: protection of the victim under three attacks", _attacks()),
    "table1-bounds": Experiment(
        "Table I in serial replay, with the clairvoyant bounds",
        {
            name: Variant(variant.make, (*variant.policies, Clairvoyant.name, VICTIM_BOUND))
            for name, variant in _attacks().items()
        },
        ("serial",),
    ),
    "table2": Experiment(
        "Table II: benign conversations",
        {
            "ShareGPT-like": Variant(_conversations(burst=False), _ALL),
            "bursty ShareGPT-like": Variant(_conversations(burst=True), _ALL),
            # Not in the paper: does a pool that holds the working set close the gaps?
            "ShareGPT-like, 2048 blocks": Variant(_conversations(burst=False), _BASELINES, 2047),
        },
    ),
    "table3": Experiment(
        "Table III: borrowing idle capacity", {"borrowing": Variant(_borrowing, _ALL)}
    ),
    "fig2": Experiment(
        "Fig. 2: scale, creation pressure, load and deployment", dict(_scale()), ("virtual",)
    ),
    "fig3a": Experiment(
        "Fig. 3a: reuse-segmented eviction",
        {
            "one-touch": Variant(_one_touch(pollution.HOT_PREFIXES), ("shield", "no-segmentation")),
            "low-and-slow": Variant(_low_and_slow, ("shield", "no-segmentation")),
            "ShareGPT-like": Variant(_conversations(burst=False), ("shield", "no-segmentation")),
            "borrowing": Variant(_borrowing, ("shield", "no-segmentation")),
        },
        ("virtual",),
    ),
    "fig3b": Experiment(
        "Fig. 3b: debt-gated promotion under delayed replay",
        {
            f"wait {wait}": Variant(_delayed_replay(wait), ("lru", "shield", "no-debt-gate"))
            for wait in (0.0, 0.5, 1.0)
        },
        real_policies=("shield", "no-debt-gate"),
    ),
    "late": Experiment(
        "Not in the paper: how far a little lateness of arrivals moves a hit ratio",
        {
            "one-touch, late": Variant(_late(_one_touch(pollution.HOT_PREFIXES)), _PAPERS),
            "low-and-slow, late": Variant(_late(_low_and_slow), _PAPERS),
            "borrowing, late": Variant(_late(_borrowing), _PAPERS),
        },
        ("calibrated",),
    ),
    "reasons": Experiment(
        "Not in the paper: attacks whose requests generate one token",
        {
            "one-touch, one token": Variant(_short_answers(pollution.one_touch), _BASELINES),
            "low-and-slow, one token": Variant(_short_answers(pollution.low_and_slow), _BASELINES),
            "two-pass replay, one token": Variant(
                _short_answers(pollution.two_pass_replay), _BASELINES
            ),
        },
        ("virtual",),
    ),
    "preset": Experiment(
        "Not in the paper: the default preset against LRU and the paper's preset",
        {
            "one-touch": Variant(_one_touch(pollution.HOT_PREFIXES), _PRESETS),
            "low-and-slow": Variant(_low_and_slow, _PRESETS),
            "two-pass replay": Variant(_two_pass_replay, _PRESETS),
            "benign, 80 conversations": Variant(_conversations(count=80), _PRESETS),
        },
        real_policies=("lru", "shield", SHIELD_DEFAULT),
    ),
}


def make_workload(name: str, seed: int, block_size: int = 16) -> Workload:
    """By name: the workload of an experiment's variant, at the paper's load, or a mixture.

    Raises PrefixShieldError for an unknown name.
    """
    if name in MIXTURES:
        return MIXTURES[name](seed, block_size)
    variants = {
        key: variant for found in EXPERIMENTS.values() for key, variant in found.variants.items()
    }
    if name not in variants:
        known = ", ".join([*variants, *MIXTURES])
        raise PrefixShieldError(f"workload: found {name!r}, expected one of: {known}")
    variant = variants[name]
    return variant.make(seed, Load(PAPER_CAPACITY, variant.alpha), block_size)
