"""Conversations as a workload: drawn from a model or read by ``sharegpt``, with times and groups.

Everything drawn is drawn from a seed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace

from prefixshield.errors import PrefixShieldError
from prefixshield.traces.chat_model import SHAREGPT, ChatModel
from prefixshield.traces.reader import TraceRequest
from prefixshield.traces.workload import Workload


@dataclass(frozen=True, slots=True)
class Turn:
    """One question and its answer: a request without a time and a group."""

    input_length: int
    """Prompt in tokens: all that was said before, and the question."""
    output_length: int
    """Answer in tokens."""
    hash_ids: tuple[int, ...]
    """One id per full block of the prompt, each naming the whole prefix up to its block."""


@dataclass(frozen=True)
class ConversationSet:
    """Conversations, each of one turn or more; equal ids mean equal prefixes in all of them."""

    block_size: int
    """Tokens per block."""
    conversations: tuple[tuple[Turn, ...], ...]
    skipped: int = 0
    """Conversations of the source without a turn that could be used."""

    @property
    def turns(self) -> int:
        return sum(map(len, self.conversations))


def sharegpt_like(
    seed: int,
    count: int,
    *,
    model: ChatModel = SHAREGPT,
    block_size: int = 16,
    max_tokens: int | None = None,
) -> ConversationSet:
    """``count`` conversations drawn from a model; the same seed gives the same.

    Lengths do not depend on ``block_size``; `conversations` can scale them.
    ``max_tokens``: a bound on every prompt: it cuts first prompts and, like the model's own
    limit, ends a conversation before a later prompt that is longer.
    """
    rng = random.Random(f"sharegpt-like {seed}")
    longest = model.max_tokens if max_tokens is None else min(model.max_tokens, max_tokens)
    next_id = 0
    found = []
    for _ in range(count):
        ids: list[int] = []
        turns = []
        mean_root = rng.gauss(model.answer_mean_root, model.answer_sd_root_between)
        prompt = model.first.draw(rng)
        if max_tokens is not None:
            prompt = min(prompt, max_tokens)
        while True:
            new = prompt // block_size - len(ids)
            ids += range(next_id, next_id + new)
            next_id += new
            root = max(0.0, rng.gauss(mean_root, model.answer_sd_root_within))
            answer = max(1, round(root**2))
            turns.append(Turn(prompt, answer, tuple(ids)))
            prompt += answer + model.later.draw(rng)
            if rng.random() >= model.continue_ratio or prompt > longest:
                break
        found.append(tuple(turns))
    return ConversationSet(block_size, tuple(found))


def conversations(
    seed: int,
    source: ConversationSet,
    groups: Mapping[str, str],
    *,
    rate: float,
    shares: Mapping[str, float] | None = None,
    think_s: float = 20.0,
    service_s: float = 2.0,
    service_token_s: float = 0.025,
    scale: int = 1,
    name: str = "conversations",
) -> Workload:
    """Every conversation of ``source`` once, started by a Poisson process.

    Timestamps are fixed beforehand and wait for no engine: a turn comes an estimated service time
    and an exponential think time after the turn before it. So the rate rises while the first
    conversations unfold, and falls when no new ones start.

    Args:
        seed: The same seed and arguments give the same requests. Times, and which group a
            conversation belongs to, are drawn apart: other shares leave all times as they are.
        source: What is said. Conversations start in its order.
        groups: Every accounting group and its contract's name.
        rate: Requests per second, all groups together, while conversations start.
        shares: Relative share of the conversations by group; equal when not given. A conversation
            belongs to one group as a whole.
        think_s: Mean seconds between an answer and the next turn.
        service_s: Estimated seconds to answer, apart from the tokens generated.
        service_token_s: Estimated seconds per token generated.
        scale: Makes blocks and all lengths this many times longer: as many blocks everywhere,
            the same timestamps. 2 makes the workload for blocks of 32 tokens out of one for 16.
        name: Of the workload.

    Raises:
        PrefixShieldError: an argument is out of range.

    """
    _expect(bool(source.conversations), "source", "no conversations", "at least one")
    _expect(bool(groups), "groups", "none", "at least one")
    _expect(rate > 0, "rate", rate, "more than 0 requests/s")
    _expect(min(think_s, service_s, service_token_s) >= 0, "times", "one below 0", "at least 0 s")
    _expect(scale >= 1, "scale", scale, "a whole number of at least 1")
    weights = dict.fromkeys(groups, 1.0) if shares is None else shares
    _expect(set(weights) == set(groups), "shares", sorted(weights), f"those of {sorted(groups)}")
    positive = min(weights.values()) >= 0 and sum(weights.values()) > 0
    _expect(positive, "shares", dict(weights), "none below 0, not all 0")

    # Seeds as text: stable over Pythons. One generator each, so that neither disturbs the other.
    arrivals = random.Random(f"arrivals {seed}")
    owners = random.Random(f"owners {seed}")
    start_rate = rate * len(source.conversations) / source.turns
    names, shares_in_order = list(groups), [weights[group] for group in groups]
    requests = []
    start_s = 0.0
    for conversation in source.conversations:
        start_s += arrivals.expovariate(start_rate)
        (group,) = owners.choices(names, shares_in_order)
        now_s = start_s
        for turn in conversation:
            requests.append(
                TraceRequest(
                    line=0,  # known when all are in order of time
                    timestamp_ms=round(now_s * 1000, 3),
                    input_length=turn.input_length * scale,
                    output_length=turn.output_length * scale,
                    hash_ids=turn.hash_ids,
                    group=group,
                    contract=None,
                    prefix_id=None,
                    measured=True,
                )
            )
            now_s += service_s + service_token_s * turn.output_length
            now_s += arrivals.expovariate(1.0) * think_s
    requests.sort(key=lambda request: request.timestamp_ms)
    numbered = (replace(request, line=line) for line, request in enumerate(requests, start=1))
    return Workload(name, source.block_size * scale, dict(groups), tuple(numbered))


def bursty(workload: Workload, *, period_s: float, duty_ratio: float) -> Workload:
    """The same requests in the same order, in bursts: only timestamps differ.

    What arrives within a period arrives within the first ``duty_ratio`` (0-1) of it, so 1/duty
    times as fast, and then nothing until the next period. Within a burst a turn may come sooner
    than the answer before it takes.

    Raises:
        PrefixShieldError: an argument is out of range.

    """
    _expect(period_s > 0, "period_s", period_s, "more than 0 s")
    _expect(0 < duty_ratio <= 1, "duty_ratio", duty_ratio, "more than 0, at most 1")
    period_ms = period_s * 1000

    def moved(timestamp_ms: float) -> float:
        start_ms = math.floor(timestamp_ms / period_ms) * period_ms
        return round(start_ms + (timestamp_ms - start_ms) * duty_ratio, 3)

    requests = (
        replace(request, timestamp_ms=moved(request.timestamp_ms)) for request in workload.requests
    )
    return replace(workload, name=f"{workload.name}-bursty", requests=tuple(requests))


def _expect(holds: bool, argument: str, found: object, expected: str) -> None:
    if not holds:
        raise PrefixShieldError(f"{argument}: found {found}, expected {expected}")
