"""What the paper reports, as data: by experiment, then (variant, policy, quantity).

Source: "Preserving Admission Responsibility in Multi-Tenant Large Language Model Prefix Caches",
section IV. Variants and policies have the names of ``experiments`` and ``policies``. Quantities are
named as the columns of ``results`` (``hit_ratio`` is 0-1) or with their unit last; ``minus_X_pp``
is the paired difference of hit ratios to policy X, in percentage points. What the paper shows only
as a picture, or says only in words, is not here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Reported(NamedTuple):
    """A number of the paper, with its 95% confidence interval where one is given."""

    value: float
    low: float | None = None
    high: float | None = None


_Values = Mapping[tuple[str, str, str], Reported]

#: Table I and the paragraphs about it.
_TABLE1: _Values = {
    # "One-touch pollution"
    ("one-touch", "lru", "hit_ratio"): Reported(0.0554),
    ("one-touch", "s3fifo", "hit_ratio"): Reported(0.0629),
    ("one-touch", "static-quota", "hit_ratio"): Reported(0.0194),
    ("one-touch", "shield", "hit_ratio"): Reported(0.1493),
    ("one-touch", "shield", "minus_lru_pp"): Reported(9.39, 7.94, 10.96),
    ("one-touch", "shield", "minus_s3fifo_pp"): Reported(8.64, 7.23, 9.43),
    ("one-touch", "lru", "ttft_p95_ms"): Reported(1440.0),
    ("one-touch", "shield", "ttft_p95_ms"): Reported(1428.2),
    # "Low-and-slow rotation"; the loss is what the attack costs LRU, recovered is shield's share
    ("low-and-slow, no attack", "lru", "hit_ratio"): Reported(0.9919),
    ("low-and-slow", "lru", "hit_ratio"): Reported(0.9264),
    ("low-and-slow", "s3fifo", "hit_ratio"): Reported(0.9864),
    ("low-and-slow", "static-quota", "hit_ratio"): Reported(0.0),
    ("low-and-slow", "shield", "hit_ratio"): Reported(0.9890),
    ("low-and-slow", "lru", "minus_no_attack_pp"): Reported(-6.56),
    ("low-and-slow", "shield", "minus_lru_pp"): Reported(6.26),
    ("low-and-slow", "shield", "recovered_ratio"): Reported(0.955),
    ("low-and-slow", "shield", "minus_s3fifo_pp"): Reported(0.25, 0.06, 0.51),
    # "Two-pass replay"
    ("two-pass replay, no attack", "lru", "hit_ratio"): Reported(0.9919),
    ("two-pass replay", "lru", "hit_ratio"): Reported(0.9287),
    ("two-pass replay", "s3fifo", "hit_ratio"): Reported(0.9396),
    ("two-pass replay", "shield", "hit_ratio"): Reported(0.9597),
    ("two-pass replay", "shield", "minus_lru_pp"): Reported(3.10),
    ("two-pass replay", "shield", "minus_s3fifo_pp"): Reported(2.00, 0.93, 3.23),
    ("two-pass replay", "s3fifo", "ttft_p95_ms"): Reported(141.3),
    ("two-pass replay", "shield", "ttft_p95_ms"): Reported(104.8),
}

#: Table II and the paragraph about it.
_TABLE2: _Values = {
    ("ShareGPT-like", "s3fifo", "hit_ratio"): Reported(0.3885),
    ("ShareGPT-like", "shield", "hit_ratio"): Reported(0.3892),
    ("ShareGPT-like", "s3fifo", "ttft_p95_ms"): Reported(96.5),
    ("ShareGPT-like", "shield", "ttft_p95_ms"): Reported(97.4),
    ("bursty ShareGPT-like", "s3fifo", "hit_ratio"): Reported(0.3872),
    ("bursty ShareGPT-like", "shield", "hit_ratio"): Reported(0.3810),
    ("bursty ShareGPT-like", "s3fifo", "ttft_p95_ms"): Reported(185.5),
    ("bursty ShareGPT-like", "shield", "ttft_p95_ms"): Reported(168.1),
}

#: Table III and the paragraph about it; of LRU the paper does not know the borrower's blocks.
_TABLE3: _Values = {
    ("borrowing", "lru", "hit_ratio"): Reported(0.9933),
    ("borrowing", "shield", "hit_ratio"): Reported(0.9933),
    ("borrowing", "static-quota", "peak_blocks_min"): Reported(254),
    ("borrowing", "static-quota", "peak_blocks_max"): Reported(255),
    ("borrowing", "s3fifo", "peak_blocks_min"): Reported(509),
    ("borrowing", "s3fifo", "peak_blocks_max"): Reported(510),
    ("borrowing", "shield", "peak_blocks_min"): Reported(509),
    ("borrowing", "shield", "peak_blocks_max"): Reported(510),
}

#: Fig. 2 and "Scale and operating boundary".
_FIG2: _Values = {
    # (a) capacity; at 512 blocks it is Table I's one-touch pollution
    ("512 blocks", "lru", "hit_ratio"): Reported(0.0554),
    ("512 blocks", "shield", "hit_ratio"): Reported(0.1493),
    ("512 blocks", "shield", "minus_lru_pp"): Reported(9.39),
    ("1024 blocks", "shield", "minus_lru_pp"): Reported(12.01),
    ("2048 blocks", "shield", "minus_lru_pp"): Reported(39.71),
    ("4096 blocks", "lru", "hit_ratio"): Reported(0.0492),
    ("4096 blocks", "shield", "hit_ratio"): Reported(0.8487),
    ("4096 blocks", "shield", "minus_lru_pp"): Reported(79.95),
    ("4096 blocks", "shield", "turnovers"): Reported(5.64),
    # (b) creation pressure
    ("creation ratio 0.54", "shield", "minus_lru_pp"): Reported(0.0),
    ("creation ratio 1.02", "shield", "minus_lru_pp"): Reported(5.11),
    ("creation ratio 2.14", "shield", "minus_lru_pp"): Reported(24.38),
    ("creation ratio 4.23", "shield", "minus_lru_pp"): Reported(59.07),
    ("creation ratio 0.54", "shield", "mean_debt_blocks"): Reported(0.0),
    ("creation ratio 1.02", "shield", "mean_debt_blocks"): Reported(5.69),
    ("creation ratio 2.14", "shield", "mean_debt_blocks"): Reported(260.90),
    ("creation ratio 4.23", "shield", "mean_debt_blocks"): Reported(901.91),
    # (c) load; 60% is the default
    ("load 40%", "shield", "minus_lru_pp"): Reported(20.06),
    ("load 60%", "shield", "minus_lru_pp"): Reported(9.39),
    ("load 80%", "shield", "minus_lru_pp"): Reported(8.47),
    # (d) hardware and model
    ("L4, 1.5B", "shield", "minus_lru_pp"): Reported(9.39),
    ("A100, 1.5B", "shield", "minus_lru_pp"): Reported(4.99),
    ("A100, 7B", "shield", "minus_lru_pp"): Reported(8.28),
}

#: Fig. 3(a), "Reuse-segmented eviction".
_FIG3A: _Values = {
    ("one-touch", "shield", "minus_no-segmentation_pp"): Reported(3.38, 2.99, 3.76),
    ("low-and-slow", "shield", "minus_no-segmentation_pp"): Reported(1.84, 1.21, 2.34),
    ("ShareGPT-like", "shield", "minus_no-segmentation_pp"): Reported(2.31, 0.43, 4.54),
    ("borrowing", "shield", "minus_no-segmentation_pp"): Reported(0.0),
}

#: Fig. 3(b), "Debt-gated promotion"; evictions are those that the neutral group caused. At the full
#: wait the paper says of the hit ratios that they converge, and of evictions nothing.
_FIG3B: _Values = {
    **{
        (wait, *what): Reported(value)
        for wait in ("wait 0.0", "wait 0.5")
        for what, value in {
            ("shield", "promoted_blocks"): 0,
            ("no-debt-gate", "promoted_blocks"): 193,
            ("shield", "evicted_attacker_blocks"): 74,
            ("shield", "evicted_victim_blocks"): 0,
            ("no-debt-gate", "evicted_attacker_blocks"): 2,
            ("no-debt-gate", "evicted_victim_blocks"): 72,
            ("shield", "minus_no-debt-gate_pp"): 35.16,
        }.items()
    },
    ("wait 1.0", "shield", "promoted_blocks"): Reported(193),
    ("wait 1.0", "no-debt-gate", "promoted_blocks"): Reported(193),
}

#: "Prototype overhead": served at 60% load; selecting victims; metadata, Python objects included.
_OVERHEAD: _Values = {
    ("load 60%", "lru", "requests_per_s"): Reported(5.955),
    ("load 60%", "shield", "requests_per_s"): Reported(5.956),
    ("512 blocks, 8 groups", "shield", "selection_mean_ms"): Reported(0.483),
    ("512 blocks, 8 groups", "shield", "selection_p95_ms"): Reported(0.511),
    ("512 blocks, 8 groups", "shield", "metadata_kib"): Reported(218.2),
    ("4096 blocks, 32 groups", "shield", "selection_mean_ms"): Reported(3.080),
    ("4096 blocks, 32 groups", "shield", "selection_p95_ms"): Reported(3.149),
    ("4096 blocks, 32 groups", "shield", "metadata_kib"): Reported(1.57 * 1024),
}

PAPER: Mapping[str, _Values] = {
    "table1": _TABLE1,
    "table2": _TABLE2,
    "table3": _TABLE3,
    "fig2": _FIG2,
    "fig3a": _FIG3A,
    "fig3b": _FIG3B,
    "overhead": _OVERHEAD,
}


def reported(experiment: str, variant: str, policy: str, quantity: str) -> Reported | None:
    """A number of the paper; None: it does not give it."""
    return PAPER.get(experiment, {}).get((variant, policy, quantity))
