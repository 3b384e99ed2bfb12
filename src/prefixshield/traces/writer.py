"""Writing traces in the format that ``reader`` reads."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from prefixshield.traces.reader import TraceRequest


def write_trace(path: Path, requests: Iterable[TraceRequest]) -> None:
    """Write requests in the order given, as gzip when the name ends in ``.gz``.

    The same requests give the same bytes.
    """
    data = b"".join(map(trace_line, requests))
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)


def trace_line(request: TraceRequest) -> bytes:
    """One line of a trace, its end included."""
    data: dict[str, Any] = {
        "timestamp": request.timestamp_ms,
        "input_length": request.input_length,
        "output_length": request.output_length,
        "hash_ids": request.hash_ids,
    }
    for key in ("group", "contract", "prefix_id"):
        if (value := getattr(request, key)) is not None:
            data[key] = value
    if not request.measured:
        data["measured"] = False
    return json.dumps(data).encode("utf-8") + b"\n"
