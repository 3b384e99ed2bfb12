"""The demo's traffic: a seeded plan of requests, and the client that sends it to a server.

The victim has four hot prefixes of 48 blocks and asks them round robin, each time with a short
question of its own. The attacker sends as many requests, as long, but never the same twice: its
blocks are worthless to everybody, and fresher than the victim's.

Between two visits to a prefix the victim touches its other prefixes (144 blocks) and the attacker
materialises four prompts (192 blocks). Together with the prefix itself that is more than the pool
of 256 blocks, so least-recently-used order always evicts a prefix before it is needed again.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from openai import AsyncOpenAI, OpenAIError

Tenant = Literal["victim", "attacker"]
TENANTS: tuple[Tenant, ...] = ("victim", "attacker")

BLOCK_SIZE_TOKENS = 32
HOT_PREFIXES = 4
PREFIX_TOKENS = 48 * BLOCK_SIZE_TOKENS
#: One full block, so that every request stores at least one, and a quarter of another.
QUESTION_TOKENS = BLOCK_SIZE_TOKENS + 8
#: The attacker's whole prompt: 48 full blocks, and a quarter of another.
POLLUTION_TOKENS = PREFIX_TOKENS + 8
#: Fits into the block begun by the prompt: decoding allocates and stores nothing.
OUTPUT_TOKENS = 8

WARMUP_ROUNDS = 2
MEASURED_ROUNDS = 20
#: Seconds from a request of the victim to its next, and likewise of the attacker, half way between.
PERIOD_S = 0.4

#: Token ids of each tenant's prompts; disjoint, so that a block's content names its tenant.
VOCABULARY: Mapping[Tenant, range] = {"victim": range(16, 1000), "attacker": range(1000, 1984)}


@dataclass(frozen=True)
class Request:
    """One request of the plan. ``at_s`` is seconds after the start of the run."""

    tenant: Tenant
    at_s: float
    prompt: tuple[int, ...]
    measured: bool


@dataclass(frozen=True)
class Outcome:
    """What the client saw of one request. ``ttft_ms`` runs to the first streamed token."""

    request: Request
    prompt_tokens: int = 0
    cached_tokens: int = 0
    ttft_ms: float = 0.0
    error: str | None = None

    @property
    def hit_ratio(self) -> float:
        """The share of the prompt's tokens that came out of the prefix cache, 0-1."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


def make_plan(seed: int) -> list[Request]:
    """The requests in the order they are sent; the same seed gives the same list."""
    rng = random.Random(seed)

    def tokens(tenant: Tenant, count: int) -> tuple[int, ...]:
        return tuple(rng.choices(VOCABULARY[tenant], k=count))

    prefixes = [tokens("victim", PREFIX_TOKENS) for _ in range(HOT_PREFIXES)]
    plan = []
    rounds = WARMUP_ROUNDS + MEASURED_ROUNDS
    for number in range(rounds * HOT_PREFIXES):
        at_s = number * PERIOD_S
        measured = number >= WARMUP_ROUNDS * HOT_PREFIXES
        question = tokens("victim", QUESTION_TOKENS)
        plan.append(Request("victim", at_s, prefixes[number % HOT_PREFIXES] + question, measured))
        # While warming up, the attacker sends short prompts, and those only twice.
        if measured or number >= WARMUP_ROUNDS * HOT_PREFIXES - 2:
            length = POLLUTION_TOKENS if measured else QUESTION_TOKENS
            prompt = tokens("attacker", length)
            plan.append(Request("attacker", at_s + PERIOD_S / 2, prompt, measured))
    return plan


def tenant_of_token(token: int) -> Tenant:
    """The tenant whose prompts contain this token id."""
    return next(tenant for tenant in TENANTS if token in VOCABULARY[tenant])


async def send_all(
    plan: Sequence[Request],
    base_url: str,
    model: str,
    keys: Mapping[Tenant, str],
    on_outcome: Callable[[Outcome], None],
) -> list[Outcome]:
    """Send the plan in its order, each request at its time, and return the outcomes in that order.

    A tenant has one request at a time in flight: on a machine too slow for the plan's pace, the
    order stays and the pace suffers. ``on_outcome`` is called as requests finish, and may raise.
    """
    clients = {
        tenant: AsyncOpenAI(base_url=base_url, api_key=key, max_retries=0, timeout=60)
        for tenant, key in keys.items()
    }
    last: dict[Tenant, asyncio.Task[Outcome]] = {}

    async def send(request: Request) -> Outcome:
        outcome = await _send(clients[request.tenant], model, request)
        on_outcome(outcome)
        return outcome

    tasks = []
    started = time.monotonic()
    try:
        async with asyncio.TaskGroup() as group:
            for request in plan:
                await asyncio.sleep(max(0.0, started + request.at_s - time.monotonic()))
                if request.tenant in last:
                    await asyncio.wait([last[request.tenant]])
                last[request.tenant] = group.create_task(send(request))
                tasks.append(last[request.tenant])
    except ExceptionGroup as group_error:  # of on_outcome; one is enough
        raise group_error.exceptions[0] from None
    finally:
        for client in clients.values():
            await client.close()
    return [task.result() for task in tasks]


async def _send(client: AsyncOpenAI, model: str, request: Request) -> Outcome:
    """Send one request and read its stream to the end; a failure is an outcome, not raised."""
    started = time.perf_counter()
    ttft_ms: float | None = None
    usage = None
    try:
        stream = await client.completions.create(
            model=model,
            prompt=list(request.prompt),
            max_tokens=OUTPUT_TOKENS,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        async for chunk in stream:
            if chunk.choices and ttft_ms is None:
                ttft_ms = (time.perf_counter() - started) * 1000
            usage = chunk.usage or usage
    except OpenAIError as error:
        return Outcome(request, error=f"{type(error).__name__}: {error}")
    if ttft_ms is None or usage is None or usage.prompt_tokens_details is None:
        return Outcome(request, error="the stream ended without a token or without its usage")
    cached = usage.prompt_tokens_details.cached_tokens or 0
    return Outcome(request, usage.prompt_tokens, cached, ttft_ms)
