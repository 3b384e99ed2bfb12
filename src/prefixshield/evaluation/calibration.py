"""What this machine can do: the real server's throughput, and what its scheduler steps cost.

Medians throughout, for machines on which other things happen too.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from prefixshield.config import PAPER_CONTRACTS, Config, GroupSection
from prefixshield.errors import PrefixShieldError
from prefixshield.evaluation.client import Call, complete, make_call, make_client
from prefixshield.evaluation.profiles import CAPACITY_REQUESTS
from prefixshield.evaluation.real_time import VOCABULARY, ServerOptions, serving

if TYPE_CHECKING:
    import httpx

#: Prompt lengths whose TTFT is taken, as parts of the longest.
_LENGTHS = (1 / 8, 1 / 4, 1 / 2, 3 / 4, 1)

#: Sequences that decode at once.
_BATCHES = (1, 4, 8)

#: Tokens of an answer that is timed as a whole: the time of its first token alone would be wrong
#: whenever the client is not scheduled at that moment, which happens on few cores.
_ANSWER_TOKENS = 129

_GROUP = ("calibration", "standard")


@dataclass(frozen=True)
class MeasuredCosts:
    """A linear model of one scheduler step's duration, and the throughput beside it."""

    base_ms: float
    """Every step."""
    prefill_ms_per_token: float
    decode_ms_per_sequence: float
    overhead_ms: float
    """Of a request, outside all steps: HTTP and the way to the engine and back."""
    capacity_rps: float
    """C_prefill: requests per second of `CAPACITY_REQUESTS` distinct prompts sent at once, under
    LRU, each for one token; from the first sending to the last answer."""


@dataclass(frozen=True)
class Sample:
    """From sending requests, at once, to the last token; and what was computed meanwhile."""

    time_ms: float
    steps: int
    prefill_tokens: int
    decoded_tokens: int = 0
    """Those of all sequences that came of decoding: not the first of an answer."""


def measure_costs(
    prompt_length: int,
    *,
    block_size: int,
    capacity_blocks: int,
    log_folder: Path,
    repeats: int = 7,
    options: ServerOptions | None = None,
) -> MeasuredCosts:
    """The cost of steps on this machine, for prompts up to ``prompt_length`` tokens; and C_prefill.

    Prefill is timed by single prompts of several lengths, decoding by 1, 4 and 8 answers at once
    to one cached prompt of ``prompt_length`` tokens.
    """
    options = options or ServerOptions()
    with _bench(prompt_length, block_size, capacity_blocks, log_folder, options) as bench:
        samples = asyncio.run(
            bench.samples(prompt_length, repeats, block_size, options.max_num_batched_tokens)
        )
        capacity = asyncio.run(bench.capacity_rps(prompt_length, CAPACITY_REQUESTS, repeats=3))
    base, prefill, decode, overhead = fit(samples)
    return MeasuredCosts(base, prefill, decode, overhead, capacity)


def fit(samples: Sequence[Sample]) -> tuple[float, float, float, float]:
    """base_ms, prefill_ms_per_token, decode_ms_per_sequence and overhead_ms; none is negative.

    Least squares of relative errors: a long prompt's noise is not to drown a short step.
    """
    import numpy as np

    rows = [[s.steps, s.prefill_tokens, s.decoded_tokens, 1] for s in samples]
    scale = np.array([s.time_ms for s in samples])
    found, *_ = np.linalg.lstsq(np.array(rows) / scale[:, None], np.ones(len(rows)), rcond=None)
    base, prefill, decode, overhead = (max(0.0, float(value)) for value in found)
    return base, prefill, decode, overhead


@contextmanager
def _bench(
    prompt_length: int,
    block_size: int,
    capacity_blocks: int,
    log_folder: Path,
    options: ServerOptions,
) -> Iterator[_Bench]:
    group, contract = _GROUP
    config = Config(
        policy="lru",
        contracts=dict(PAPER_CONTRACTS),
        groups={group: GroupSection(contract=contract)},
        default_group=group,
    )
    with serving(
        config,
        [_GROUP],
        block_size=block_size,
        capacity_blocks=capacity_blocks,
        max_model_len=options.max_model_len or prompt_length + _ANSWER_TOKENS,
        log=log_folder / "calibration.log",
        options=options,
    ) as endpoint:
        yield _Bench(endpoint.server.base_url, endpoint.keys[_GROUP])


class _Bench:
    """A server to be timed."""

    def __init__(self, base_url: str, key: str) -> None:
        self._base_url = base_url
        self._key = key
        self._numbers = itertools.count()

    async def capacity_rps(self, prompt_length: int, count: int, repeats: int) -> float:
        """See `MeasuredCosts`; the median of so many measurements."""
        async with make_client(self._base_url) as client:
            await _time_ms(client, [self._unseen(prompt_length)])
            times = [
                await _time_ms(client, [self._unseen(prompt_length) for _ in range(count)])
                for _ in range(repeats)
            ]
        return count / median(times) * 1000

    async def samples(
        self, prompt_length: int, repeats: int, block_size: int, max_batched: int
    ) -> list[Sample]:
        """Medians over rounds of everything, so that what slows a while slows all alike."""
        lengths = sorted({max(1, int(part * prompt_length)) for part in _LENGTHS})
        prefill_ms: dict[int, list[float]] = {length: [] for length in lengths}
        decode_ms: dict[int, list[float]] = {batch: [] for batch in _BATCHES}
        answer = self._unseen(prompt_length, _ANSWER_TOKENS)
        async with make_client(self._base_url) as client:
            await _time_ms(client, [answer])  # the first is slower
            for _ in range(repeats):
                for length, times in prefill_ms.items():
                    times.append(await _time_ms(client, [self._unseen(length)]))
                await _time_ms(client, [answer])  # its prompt is cached from here on
                for batch, times in decode_ms.items():
                    times.append(await _time_ms(client, [answer] * batch))
        prefills = [
            Sample(median(times), steps=-(-length // max_batched), prefill_tokens=length)
            for length, times in prefill_ms.items()
        ]
        not_cached = (prompt_length - 1) % block_size + 1
        decodes = [
            Sample(
                median(times),
                steps=_ANSWER_TOKENS,
                prefill_tokens=batch * not_cached,
                decoded_tokens=batch * (_ANSWER_TOKENS - 1),
            )
            for batch, times in decode_ms.items()
        ]
        return prefills + decodes

    def _unseen(self, length: int, max_tokens: int = 1) -> Call:
        """A completion whose prompt no other begins with."""
        draw = random.Random(f"calibration {next(self._numbers)}")
        return make_call(self._key, draw.choices(VOCABULARY, k=length), max_tokens)


async def _time_ms(client: httpx.AsyncClient, calls: Sequence[Call]) -> float:
    """Send calls at once; the time from the first sending to the last token."""
    replies = await asyncio.gather(*(complete(client, call) for call in calls))
    ends = []
    for reply in replies:
        if reply.last_token_s is None or reply.error is not None:
            raise PrefixShieldError(f"calibration: a request failed: {reply.error}")
        ends.append(reply.last_token_s)
    return (max(ends) - min(reply.sent_s for reply in replies)) * 1000
