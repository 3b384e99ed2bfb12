"""What PrefixShield costs a real server: requests per second, processor time, time to first token.

Servers of one tiny model run side by side, and take turns: in every round each gets the same
requests while the others are stopped: an idle vLLM does use the processor. A round's ratios are
to vLLM without PrefixShield in that round.
Processor time is that of all of a server's processes: other work on the machine does not count.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from prefixshield.config import ApiKey, Config, GroupSection, dump_config, paper_config
from prefixshield.evaluation.client import Call, complete, make_call, make_client
from prefixshield.evaluation.statistics import percentile
from prefixshield.serving.child_server import (
    ChildServer,
    ServerError,
    prefixshield_serve,
    tiny_model_options,
)
from prefixshield.serving.tiny_model import SPECIAL_TOKENS, WORDS, write_tiny_model

NATIVE = "native"

#: vLLM's own once more: what two servers that are alike differ by is what cannot be told apart.
AGAIN = "native, again"

#: Servers besides vLLM's own: policy, preset, number of groups.
SERVERS = {
    "installed, lru": ("lru", "default", 32),
    "shield, 1 group": ("shield", "default", 1),
    "shield, 32 groups": ("shield", "default", 32),
    "shield paper, 32 groups": ("shield", "paper", 32),
}

ROUNDS = 10
REQUESTS = 96
CONCURRENCY = 8

#: Blocks of the pool: the prefixes fit, what is new evicts what was new before. So every policy
#: hits the same, and what differs is what it costs: a hit is not free on this model, attention over
#: many cached blocks takes the processor longer than to compute a few tokens anew.
POOL_BLOCKS = 511
_BLOCK_SIZE = 32
_PREFIXES, _PREFIX_BLOCKS, _NEW_BLOCKS, _ANSWER_TOKENS = 32, 8, 3, 8
_WORDS = range(len(SPECIAL_TOKENS), len(SPECIAL_TOKENS) + len(WORDS))

COLUMNS = (
    *("server", "requests/s", "ratio", "p10", "p90"),
    *("processor ms/request", "processor ratio", "processor ratio p10", "p90"),
    *("TTFT p50, ms", "TTFT p95, ms", "TTFT p95 ratio", "TTFT p95 ratio p10", "p90"),
    "hit tokens",
)


def run_bench_server(progress: Callable[[str], None]) -> list[tuple[Any, ...]]:
    """One row per server; see ``COLUMNS``.

    Raises:
        ServerError: a server did not start or died, or a request failed.

    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="prefixshield-")))
        model = write_tiny_model(folder / "model")
        servers: dict[str, ChildServer] = {}
        keys: dict[str, list[str]] = {}
        for name in (NATIVE, AGAIN, *SERVERS):
            progress(f"starting {name}")
            command, keys[name] = _command(name, model, folder)
            log = folder / f"{name.replace(',', '').replace(' ', '-')}.log"
            server = ChildServer(command, log=log)
            servers[name] = stack.enter_context(server)
            server.wait_until_healthy()
            server.pause()
        return asyncio.run(_measure(servers, keys, progress))


def _command(name: str, model: Path, folder: Path) -> tuple[list[str], list[str]]:
    """What starts a server, and the keys that it takes."""
    options = tiny_model_options(
        model,
        pool_blocks=POOL_BLOCKS,
        block_size=_BLOCK_SIZE,
        max_model_len=2048,
        max_num_batched_tokens=2048,
    )
    options += ["--enable-prefix-caching", "--disable-uvicorn-access-log"]
    if name not in SERVERS:
        serve = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        return [*serve, *options, "--api-key", "sk-0"], ["sk-0"]
    policy, preset, groups = SERVERS[name]
    keys = [f"sk-{number}" for number in range(groups)]
    config = _config(policy, preset, keys)
    path = folder / f"{policy}-{preset}-{groups}.yaml"
    path.write_text(dump_config(config), encoding="utf-8")
    return [*prefixshield_serve(model, path), *options], keys


def _config(policy: str, preset: str, keys: Sequence[str]) -> Config:
    groups: dict[str, GroupSection] = {
        f"g{number}": GroupSection(contract="standard", keys=(ApiKey(value=key),))
        for number, key in enumerate(keys)
    }
    update = {"policy": policy, "preset": preset, "groups": groups, "default_group": "g0"}
    return paper_config().model_copy(update=update)


async def _measure(
    servers: Mapping[str, ChildServer],
    keys: Mapping[str, Sequence[str]],
    progress: Callable[[str], None],
) -> list[tuple[Any, ...]]:
    rates: dict[str, list[float]] = {name: [] for name in servers}
    spent: dict[str, list[float]] = {name: [] for name in servers}
    ttfts: dict[str, list[list[float]]] = {name: [] for name in servers}
    hits = dict.fromkeys(servers, 0)
    for number in range(-1, ROUNDS):  # the first one fills the pools
        progress(f"round {number + 1} of {ROUNDS}")
        names = [*servers]
        for name in names[number % len(names) :] + names[: number % len(names)]:
            calls = _calls(number, keys[name])
            servers[name].go_on()
            await _send(servers[name], calls[-1:])
            before = servers[name].processor_seconds()
            started = time.perf_counter()
            found = await _send(servers[name], calls)
            seconds = time.perf_counter() - started
            used = servers[name].processor_seconds() - before
            servers[name].pause()
            if number >= 0:
                spent[name].append(1000 * used / len(calls))
                rates[name].append(len(calls) / seconds)
                ttfts[name].append([ttft for ttft, _ in found])
                hits[name] += sum(cached for _, cached in found)
    rows = []
    for name in servers:
        p95 = [percentile(found, 0.95) for found in ttfts[name]]
        native = [percentile(found, 0.95) for found in ttfts[NATIVE]]
        everything = [one for found in ttfts[name] for one in found]
        rows.append(
            (
                name,
                round(statistics.median(rates[name]), 1),
                *_ratios(rates[name], rates[NATIVE]),
                round(statistics.median(spent[name]), 1),
                *_ratios(spent[name], spent[NATIVE]),
                round(statistics.median(everything), 1),
                round(statistics.median(p95), 1),
                *_ratios(p95, native),
                hits[name],
            )
        )
    return rows


def _ratios(found: Sequence[float], native: Sequence[float]) -> tuple[float, float, float]:
    ratios = [a / b for a, b in zip(found, native, strict=True)]
    return (
        round(statistics.median(ratios), 3),
        round(percentile(ratios, 0.1), 3),
        round(percentile(ratios, 0.9), 3),
    )


def _calls(number: int, keys: Sequence[str]) -> list[Call]:
    """A round's requests: a prefix, all in turn, and something new."""
    draw = random.Random(number)
    calls = []
    for turn in range(REQUESTS):
        prefix = turn % _PREFIXES
        words = random.Random(-1 - prefix)
        prompt = words.choices(_WORDS, k=_PREFIX_BLOCKS * _BLOCK_SIZE)
        prompt += draw.choices(_WORDS, k=_NEW_BLOCKS * _BLOCK_SIZE)
        calls.append(make_call(keys[prefix % len(keys)], prompt, _ANSWER_TOKENS))
    return calls


async def _send(server: ChildServer, calls: Sequence[Call]) -> list[tuple[float, int]]:
    """Milliseconds to the first token, and cached tokens, of each; so many at once."""
    waiting = list(calls)[::-1]
    found: list[tuple[float, int]] = []

    async def work() -> None:
        while waiting:
            reply = await complete(client, waiting.pop())
            if reply.error is not None or reply.ttft_ms is None:
                server.check_alive()
                raise ServerError(f"a request failed: {reply.error}")
            found.append((reply.ttft_ms, reply.cached_tokens))

    async with make_client(server.base_url) as client:
        await asyncio.gather(*(work() for _ in range(CONCURRENCY)))
    return found
