"""Reading traces: JSON lines, plain or gzip, a superset of the Mooncake format (FAST'25)."""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefixshield.errors import TraceError


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace."""

    line: int
    """Line number in the file, from 1."""
    timestamp_ms: float
    input_length: int
    """Prompt length in tokens, at least 1."""
    output_length: int
    """Generated tokens; serial replay ignores them."""
    hash_ids: tuple[int, ...]
    """One id per block in prefix order, each naming the whole prefix up to its block."""
    group: str | None
    """None: the default group."""
    contract: str | None
    """None: the group's own contract."""
    prefix_id: str | None
    """The logical prefix that the request names, if any."""
    measured: bool = True
    """Whether experiments count it; False for warm-up and for traffic that only presses."""


def read_trace(path: Path | str, block_size: int) -> list[TraceRequest]:
    """All requests of a trace in timestamp order; equal timestamps keep the order of the file.

    Every full block has an id; a last, partly filled block may have one too (as Mooncake's traces
    do) and is then a block like the others, except that the last token never hits.

    Raises:
        TraceError: the file cannot be read, or a line breaks the format.

    """
    requests = [_parse(path, number, line, block_size) for number, line in lines(path)]
    requests.sort(key=lambda request: request.timestamp_ms)
    return requests


def lines(path: Path | str) -> Iterator[tuple[int, bytes]]:
    """Non-empty lines with their numbers."""
    try:
        with open(path, "rb") as probe:
            packed = probe.read(2) == b"\x1f\x8b"
        with gzip.open(path) if packed else open(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, line
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (EOFError, zlib.error) as error:
        raise TraceError(f"{path}: damaged gzip file: {error}") from None


def _parse(path: Path | str, number: int, line: bytes, block_size: int) -> TraceRequest:
    def fail(key: str, found: Any, expected: str) -> TraceError:
        text = repr(found)
        text = text if len(text) <= 60 else text[:57] + "..."
        return TraceError(f"{path}: line {number}: {key}: found {text}, expected {expected}")

    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{path}: line {number}: not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise fail("line", data, "a JSON object")

    missing = object()

    def text(key: str) -> str | None:
        value = data.get(key)
        if value is not None and (not isinstance(value, str) or not value):
            raise fail(key, value, "a non-empty string, or no such key")
        return value

    def whole(key: str, least: int, default: Any = missing) -> int:
        value = data.get(key, default)
        if value is missing:
            raise TraceError(f"{path}: line {number}: {key}: missing, expected a whole number")
        if type(value) is not int or value < least:
            raise fail(key, value, f"a whole number of at least {least} (tokens)")
        return value

    timestamp = data.get("timestamp", missing)
    if timestamp is missing:
        raise TraceError(f"{path}: line {number}: timestamp: missing, expected milliseconds")
    if type(timestamp) not in (int, float) or not 0 <= timestamp < math.inf:
        raise fail("timestamp", timestamp, "a number of at least 0 (milliseconds)")
    input_length = whole("input_length", 1)
    ids = data.get("hash_ids", missing)
    if ids is missing:
        raise TraceError(f"{path}: line {number}: hash_ids: missing, expected a list of numbers")
    if not isinstance(ids, list) or any(type(i) is not int for i in ids):
        raise fail("hash_ids", ids, "a list of whole numbers")
    full = input_length // block_size
    if not full <= len(ids) <= -(-input_length // block_size):
        raise fail(
            "hash_ids",
            f"{len(ids)} ids",
            f"{full} ids, one per full block of {block_size} tokens of input_length "
            f"{input_length} (is --block-size that of the trace?)",
        )
    measured = data.get("measured", True)
    if type(measured) is not bool:
        raise fail("measured", measured, "true or false, or no such key")
    if len(set(ids)) != len(ids):
        raise fail("hash_ids", ids, "every id once: an id names the whole prefix up to its block")
    return TraceRequest(
        line=number,
        timestamp_ms=float(timestamp),
        input_length=input_length,
        output_length=whole("output_length", 0, default=0),
        hash_ids=tuple(ids),
        group=text("group"),
        contract=text("contract"),
        prefix_id=text("prefix_id"),
        measured=measured,
    )
