"""A workload: a trace together with what it takes to run it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from prefixshield.traces.reader import TraceRequest


@dataclass(frozen=True)
class Workload:
    """Requests in timestamp order, made for blocks of one size."""

    name: str
    block_size: int
    """Tokens per block."""
    groups: Mapping[str, str]
    """Every accounting group and its contract's name."""
    requests: tuple[TraceRequest, ...]
    """Their ``line`` counts from 1 and identifies them."""
