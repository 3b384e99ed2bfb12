"""Recording a running server's requests as a trace, without anything of their content.

A line is written when a request ends: when it arrived, how long its prompt and its answer were, its
group and contract, and a number for each full block of its prompt. The numbers are keyed digests
of vLLM's chained block hashes. The key is drawn for each recording and kept in memory alone, so
that equal prefixes of one recording have equal numbers and nobody can test a guess against them.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections import Counter
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

from prefixshield.config import RecordSection
from prefixshield.traces.reader import TraceRequest
from prefixshield.traces.writer import trace_line

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from prefixshield.serving.pool import Tag

# Below "vllm", whose logging configuration shows it.
_log = logging.getLogger("vllm.prefixshield")

#: Bits of a block's number: what every reader of JSON keeps exactly.
ID_BITS = 53


class Recorder:
    """One recording of one engine. No failure of it reaches the engine."""

    def __init__(
        self,
        settings: RecordSection,
        engine: int,
        block_size: int,
        start: float,
        counts: Counter[tuple[str, ...]],
    ) -> None:
        """``engine``: number of the data-parallel engine, from 0; ``block_size``: tokens of a block
        hash; ``start``: seconds of the clock that tells arrivals; ``counts``: the driver's."""
        self.path = recording_path(Path(settings.path), engine)
        self._block_size = block_size
        self._start = start
        self._counts = counts
        self._key = secrets.token_bytes(32)
        self._most_bytes = settings.max_megabytes * 1_000_000
        self._bytes = 0
        self._requests = 0
        self._arrivals: dict[str, float] = {}
        """Of the requests under way, in seconds since the start."""
        self._ended = self._failed = False
        self._file: int | None = None
        try:  # never over a file that is there
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
            self._file = os.open(self.path, flags, 0o600)
        except OSError as error:
            self._fail(error)
        else:
            _log.info(
                "PrefixShield: requests are recorded in %s without their content, up to %d MB; "
                "replay them with --block-size %d",
                self.path,
                settings.max_megabytes,
                block_size,
            )

    def arrived(self, request: Request, now: float) -> None:
        """A request was handed to the scheduler."""
        if not self._ended:
            self._arrivals.setdefault(request.request_id, max(0.0, now - self._start))

    def ended(self, request: Request, tag: Tag) -> None:
        """A request has finished or was aborted; one that never ran, or that arrived before the
        recording began, is left out."""
        arrival = self._arrivals.pop(request.request_id, None)
        if arrival is None or not (request.num_computed_tokens or request.num_preemptions):
            return
        try:
            self._append(self._line(request, tag, arrival))
        except Exception as error:
            self._fail(error)
            self._counts["recorded", "lost"] += 1

    def close(self) -> None:
        """End the recording."""
        self._ended = True
        self._arrivals.clear()
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _line(self, request: Request, tag: Tag, arrival: float) -> bytes:
        hashes = request.block_hashes[: request.num_prompt_tokens // self._block_size]
        prefix = tag.prefix_id
        return trace_line(
            TraceRequest(
                line=0,
                timestamp_ms=round(1000 * arrival, 3),
                input_length=request.num_prompt_tokens,
                output_length=request.num_output_tokens,
                hash_ids=tuple(self._number(block_hash) for block_hash in hashes),
                group=tag.identity.group,
                contract=tag.identity.contract,
                prefix_id=None if prefix is None else f"{self._number(prefix.encode()):x}",
            )
        )

    def _number(self, content: bytes) -> int:
        digest = blake2b(content, key=self._key, digest_size=8).digest()
        return int.from_bytes(digest, "big") >> (64 - ID_BITS)

    def _append(self, line: bytes) -> None:
        """Write a line to the operating system, whole or not at all."""
        if self._bytes + len(line) > self._most_bytes:
            _log.warning(
                "PrefixShield: the recording %s is as large as it may be: it has %d requests, and "
                "nothing more is recorded",
                self.path,
                self._requests,
            )
            self.close()
            return
        if self._file is None:
            raise OSError("it could not be opened")
        if os.write(self._file, line) != len(line):
            os.ftruncate(self._file, self._bytes)
            raise OSError("the disk is full")
        self._bytes += len(line)
        self._requests += 1
        self._counts["recorded", "written"] += 1

    def _fail(self, error: Exception) -> None:
        if not self._failed:
            self._failed = True
            reason = (error.strerror if isinstance(error, OSError) else None) or error
            _log.error(
                "PrefixShield: %s: cannot be recorded to: %s; serving goes on, requests that are "
                "missing in the recording are counted",
                self.path,
                reason,
            )


def recording_path(path: Path, engine: int) -> Path:
    """The file of a data-parallel engine: ``path`` itself of the first, ``NAME-1.jsonl`` ..."""
    return path.with_stem(f"{path.stem}-{engine}") if engine else path
