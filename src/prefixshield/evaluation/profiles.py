"""Deployment profiles: how long a scheduler step takes on which machine with which model.

A step of a linear cost model reads the weights once and then pays per token. The paper gives no
step times. The L4 profile was chosen on two figures of the paper's LRU runs: 5.955 requests/s at
60% load, so C_prefill = 9.925 requests/s, and a P95 TTFT of 1,440 ms under one-touch pollution.
The A100 profiles follow from it by data-sheet ratios: dense BF16 throughput (312 / 121 TFLOP/s) for
prefill, memory bandwidth (1,555 / 300 GB/s) for reading weights and KV cache, and for the larger
model its parameters (7.62 / 1.54 billion) and KV bytes per token (twice as many).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class CostModel:
    """How long a scheduler step takes, and how much fits into it."""

    base_ms: float
    """Every step: the weights are read once."""
    prefill_ms_per_token: float
    decode_ms_per_sequence: float
    max_batched_tokens: int = 2048
    """vLLM's --max-num-batched-tokens: longer prompts are computed in chunks."""
    max_sequences: int = 256
    """vLLM's --max-num-seqs."""

    def step_ms(self, prefill_tokens: int, decoding: int) -> float:
        """Duration of a step that computes so many prompt tokens and decoding sequences."""
        return (
            self.base_ms
            + self.prefill_ms_per_token * prefill_tokens
            + self.decode_ms_per_sequence * decoding
        )


#: Distinct prompts, sent at once, from which C_prefill is calibrated (paper, section IV).
CAPACITY_REQUESTS = 32

_L4 = CostModel(base_ms=12.0, prefill_ms_per_token=0.05902, decode_ms_per_sequence=0.3)
_COMPUTE, _BANDWIDTH = 312 / 121, 1555 / 300
_PARAMETERS, _KV_BYTES = 7.62 / 1.54, 2.0

#: Every profile by its name.
PROFILES: Mapping[str, CostModel] = {
    "L4, 1.5B": _L4,
    "A100, 1.5B": CostModel(
        _L4.base_ms / _BANDWIDTH,
        _L4.prefill_ms_per_token / _COMPUTE,
        _L4.decode_ms_per_sequence / _BANDWIDTH,
    ),
    "A100, 7B": CostModel(
        _L4.base_ms * _PARAMETERS / _BANDWIDTH,
        _L4.prefill_ms_per_token * _PARAMETERS / _COMPUTE,
        _L4.decode_ms_per_sequence * _KV_BYTES / _BANDWIDTH,
    ),
}
