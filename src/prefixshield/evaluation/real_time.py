"""The real-time engine: a workload played over HTTP against a real vLLM server.

Open loop: every request is sent at its time, whatever became of those before it. Every run has a
server of its own, since debts outlive a reset of the prefix cache. The model is the tiny one with
dummy weights: hits, evictions and waiting are real, tokens are fast.
"""

from __future__ import annotations

import asyncio
import re
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from prefixshield.config import ApiKey, Config, dump_config
from prefixshield.errors import PrefixShieldError, TraceError
from prefixshield.evaluation.client import Call, Reply, complete, make_call, make_client
from prefixshield.evaluation.run import Outcome, Run
from prefixshield.serving.child_server import (
    ACTIVE_LINE,
    ChildServer,
    ServerError,
    prefixshield_serve,
    tiny_model_options,
)
from prefixshield.serving.tiny_model import (
    CONTEXT_LENGTH,
    SPECIAL_TOKENS,
    WORDS,
    write_tiny_model,
)
from prefixshield.serving.wiring import PREFIX_ID_KEY
from prefixshield.traces.reader import TraceRequest
from prefixshield.traces.tokens import prompt_tokens
from prefixshield.traces.workload import Workload

if TYPE_CHECKING:
    import httpx

#: Token ids of prompts: all that the tiny model has a word for.
VOCABULARY = range(len(SPECIAL_TOKENS), len(SPECIAL_TOKENS) + len(WORDS))

#: Layers of the model: one makes the prefix cache's work the most of it, and runs short.
_LAYERS = 1

#: Sizes of blocks that vLLM's CPU attention takes are multiples of this, in tokens.
BLOCK_SIZE_UNIT = 32

#: Seconds between two readings of the server's counters.
POLL_INTERVAL_S = 0.5

#: Seconds between two looks at whether the client is scheduled in time.
_BEAT_S = 0.02

#: More tokens than any answer has: a stream brings its first token at once and the others with
#: its end, so that nobody's processor time goes into chunks whose time is not taken.
_STREAM_INTERVAL = CONTEXT_LENGTH

#: (group, contract) of a request.
_Identity = tuple[str, str]


@dataclass(frozen=True)
class ServerOptions:
    """What a server is started with, besides its configuration and its pool."""

    max_model_len: int | None = None
    """Tokens of the longest prompt and answer; None: of the workload's longest request."""
    max_num_batched_tokens: int = 2048
    """Tokens a step computes at most; longer prompts are cut into chunks. vLLM's own default."""
    max_num_seqs: int = 256
    """Requests that run at once at most."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables on top of our own."""


@dataclass(frozen=True)
class Endpoint:
    """A server that answers."""

    server: ChildServer
    keys: Mapping[_Identity, str]
    """An API key of every (group, contract)."""


def run_real_time(
    workload: Workload,
    config: Config,
    capacity_blocks: int,
    *,
    log_folder: Path,
    speed: float = 1.0,
    options: ServerOptions | None = None,
) -> Run:
    """Play a workload against a fresh server, in the main thread.

    Args:
        workload: what is sent.
        config: what it is served under; its API keys are replaced.
        capacity_blocks: usable blocks; vLLM's null block comes on top.
        log_folder: where the server's log goes, named after workload, policy and preset.
        speed: how many times faster than its timestamps say the workload is played; the
            configuration's refill rates are to have risen with it (`workload_config`).
        options: further options of the server.

    Raises:
        PrefixShieldError: the workload does not fit the server; the server did not start or
            died; or the policy failed, so that the run would not be the policy's.

    """
    options = options or ServerOptions()
    longest = _longest_tokens(workload.requests)
    _check_lengths(workload, capacity_blocks, options.max_model_len or longest)
    identities = [_identity(config, request) for request in workload.requests]
    with serving(
        config,
        identities,
        block_size=workload.block_size,
        capacity_blocks=capacity_blocks,
        max_model_len=options.max_model_len or longest,
        log=log_folder / _log_name(workload, config),
        options=options,
    ) as endpoint:
        calls = [
            _call(endpoint.keys[identity], request, workload.block_size)
            for identity, request in zip(identities, workload.requests, strict=True)
        ]
        replies, watch, lag_s = asyncio.run(_play(endpoint, workload, calls, speed))
    if watch.counts.policy_failures:
        raise PrefixShieldError(
            f"{workload.name}: policy {config.policy} failed and evicted in native order; "
            f"{endpoint.server.log} says why"
        )
    ends = [reply.last_token_s for reply in replies if reply.last_token_s is not None]
    return Run(
        outcomes=[
            Outcome(request, reply.cached_tokens, reply.ttft_ms, reply.error)
            for request, reply in zip(workload.requests, replies, strict=True)
        ],
        evictions=watch.counts.evictions,
        materialised=watch.counts.materialised,
        promoted=watch.counts.promoted,
        peak_blocks=dict(watch.peak_blocks),
        preemptions=watch.counts.preemptions,
        duration_s=max(ends) - min(reply.sent_s for reply in replies) if ends else None,
        max_send_lag_ms=lag_s * 1000,
    )


@contextmanager
def serving(
    config: Config,
    identities: Iterable[_Identity],
    *,
    block_size: int,
    capacity_blocks: int,
    max_model_len: int,
    log: Path,
    options: ServerOptions,
) -> Iterator[Endpoint]:
    """A server for as long as the block lasts, warmed up, its prefix cache empty.

    ``identities`` are those that get a key, each once however often it is named.
    """
    if block_size % BLOCK_SIZE_UNIT:
        raise PrefixShieldError(
            f"block size: found {block_size} tokens, expected a multiple of {BLOCK_SIZE_UNIT}: "
            "vLLM's CPU attention takes no other"
        )
    if max_model_len > CONTEXT_LENGTH:
        raise PrefixShieldError(
            f"max_model_len: found {max_model_len} tokens, expected at most {CONTEXT_LENGTH}: "
            "the tiny model's context is no longer"
        )
    keys = {identity: f"sk-{i}" for i, identity in enumerate(dict.fromkeys(identities))}
    with tempfile.TemporaryDirectory(prefix="prefixshield-") as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(dump_config(_with_keys(config, keys)), encoding="utf-8")
        model = write_tiny_model(Path(folder) / "model", layers=_LAYERS)
        command = prefixshield_serve(model, path)
        command += tiny_model_options(
            model,
            pool_blocks=capacity_blocks,
            block_size=block_size,
            max_model_len=max_model_len,
            max_num_batched_tokens=options.max_num_batched_tokens,
        )
        command += ["--max-num-seqs", str(options.max_num_seqs)]
        command += ["--stream-interval", str(_STREAM_INTERVAL)]
        command += ["--enable-prefix-caching", "--disable-uvicorn-access-log"]
        with ChildServer(command, log=log, environment=options.environment) as server:
            server.wait_until_healthy()
            if not ACTIVE_LINE.search(server.log_text()):
                raise ServerError(f"{log}: does not say that PrefixShield is active")
            endpoint = Endpoint(server, keys)
            asyncio.run(_warm_up(endpoint, block_size))
            yield endpoint


async def _warm_up(endpoint: Endpoint, block_size: int) -> None:
    """Requests that leave no trace: they fill no block, so none is cached, charged or evicted."""
    key = next(iter(endpoint.keys.values()))
    call = make_call(key, VOCABULARY[: block_size // 2], block_size // 4)
    async with make_client(endpoint.server.base_url) as client:
        for _ in range(3):
            for reply in await asyncio.gather(*(complete(client, call) for _ in range(4))):
                if reply.error is not None:
                    endpoint.server.check_alive()
                    raise ServerError(f"the first request failed: {reply.error}")


async def _play(
    endpoint: Endpoint, workload: Workload, calls: Sequence[Call], speed: float
) -> tuple[list[Reply], _Watch, float]:
    """All replies in the workload's order, the counters, and the client's longest delay."""
    lag_s = 0.0

    async def beat() -> None:
        """Wake up all the time: a client that sleeps on would also see first tokens late."""
        nonlocal lag_s
        while True:
            due_s = time.perf_counter() + _BEAT_S
            await asyncio.sleep(_BEAT_S)
            lag_s = max(lag_s, time.perf_counter() - due_s)

    async def send(call: Call, due_s: float) -> Reply:
        nonlocal lag_s
        reply = await complete(client, call)
        lag_s = max(lag_s, reply.sent_s - due_s)
        if reply.error is not None:
            endpoint.server.check_alive()
        return reply

    async with make_client(endpoint.server.base_url) as client:
        watch = _Watch(client)
        try:
            async with asyncio.TaskGroup() as group:
                background = [group.create_task(watch.run()), group.create_task(beat())]
                tasks = []
                start_s = time.perf_counter()
                for request, call in zip(workload.requests, calls, strict=True):
                    after_ms = request.timestamp_ms - workload.requests[0].timestamp_ms
                    due_s = start_s + after_ms / 1000 / speed
                    await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
                    tasks.append(group.create_task(send(call, due_s)))
                replies = [await task for task in tasks]
                for background_task in background:
                    background_task.cancel()
        except ExceptionGroup as errors:  # a dead server; one is enough
            raise errors.exceptions[0] from None
        await watch.finish()
    return replies, watch, lag_s


@dataclass(slots=True)
class Counts:
    """A server's counters since its start."""

    materialised: Counter[str] = field(default_factory=Counter)
    promoted: Counter[str] = field(default_factory=Counter)
    evictions: Counter[tuple[str, str]] = field(default_factory=Counter)
    preemptions: int = 0
    policy_failures: int = 0


def parse_counts(text: str) -> Counts:
    """The counters in the text of ``/metrics``."""
    counts = Counts()
    for line in text.splitlines():
        match = re.fullmatch(r"((?:prefixshield_|vllm:num_pre)\w+_total)\{(.*)\} (\S+)", line)
        if match is None:
            continue
        labels = dict(re.findall(r'(\w+)="([^"]*)"', match[2]))
        value = int(float(match[3]))
        if not value:  # exported before anything happens
            continue
        match match[1]:
            case "prefixshield_materialised_blocks_total":
                counts.materialised[labels["group"]] += value
            case "prefixshield_promoted_blocks_total":
                counts.promoted[labels["group"]] += value
            case "prefixshield_evicted_blocks_total":
                counts.evictions[labels["owner"], labels["causer"]] += value
            case "prefixshield_policy_failures_total":
                counts.policy_failures += value
            case "vllm:num_preemptions_total":
                counts.preemptions += value
    return counts


class _Watch:
    """Reads a server's counters again and again."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client
        self.counts = Counts()
        self.peak_blocks: Counter[str] = Counter()

    async def run(self) -> None:
        """Read until cancelled."""
        import httpx

        while True:
            with suppress(httpx.HTTPError):  # a reading less; requests find out if it is dead
                await self._read()
            await asyncio.sleep(POLL_INTERVAL_S)

    async def finish(self) -> None:
        """Read until the counters stand still: they are a moment behind the last token."""
        before = None
        while self.counts != before:
            before = self.counts
            await asyncio.sleep(POLL_INTERVAL_S / 2)
            await self._read()

    async def _read(self) -> None:
        response = await self._client.get("/metrics")
        response.raise_for_status()
        self.counts = parse_counts(response.text)
        resident = Counter(self.counts.materialised)
        for (owner, _), blocks in self.counts.evictions.items():
            resident[owner] -= blocks
        self.peak_blocks |= resident


def _call(key: str, request: TraceRequest, block_size: int) -> Call:
    xargs = {PREFIX_ID_KEY: request.prefix_id} if request.prefix_id else None
    prompt = prompt_tokens(request, block_size, VOCABULARY)
    return make_call(key, prompt, _answer_tokens(request), xargs)


def _answer_tokens(request: TraceRequest) -> int:
    return max(1, request.output_length)  # vLLM generates at least one


def _longest_tokens(requests: Sequence[TraceRequest]) -> int:
    return max((r.input_length + _answer_tokens(r) for r in requests), default=1)


def _check_lengths(workload: Workload, capacity_blocks: int, max_model_len: int) -> None:
    if not workload.requests:
        raise TraceError(f"{workload.name}: found no requests, expected at least one")
    for request in workload.requests:
        tokens = request.input_length + _answer_tokens(request)
        found = (
            f"{workload.name}: request {request.line}: found {tokens} tokens of prompt and answer"
        )
        most = min(max_model_len, CONTEXT_LENGTH)
        if tokens > most:
            raise TraceError(f"{found}, expected at most {most}: the model's length")
        if tokens > capacity_blocks * workload.block_size:
            raise TraceError(
                f"{found}, expected at most {capacity_blocks * workload.block_size}: "
                f"the pool's {capacity_blocks} blocks"
            )


def _identity(config: Config, request: TraceRequest) -> _Identity:
    group = request.group or config.default_group
    contract = request.contract or config.default_contract(group)
    for key, name, known in (
        ("group", group, config.groups),
        ("contract", contract, config.contracts),
    ):
        if name not in known:
            raise TraceError(
                f"request {request.line}: {key}: found {name!r}, "
                f"expected one of: {', '.join(known)}"
            )
    return group, contract


def _with_keys(config: Config, keys: Mapping[_Identity, str]) -> Config:
    groups = {
        name: section.model_copy(
            update={
                "keys": tuple(
                    ApiKey(value=key, contract=contract)
                    for (group, contract), key in keys.items()
                    if group == name
                )
            }
        )
        for name, section in config.groups.items()
    }
    return config.model_copy(update={"groups": groups})


def _log_name(workload: Workload, config: Config) -> str:
    name = f"{workload.name}-{config.policy}-{config.preset}"
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", name) + ".log"
