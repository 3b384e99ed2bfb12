"""A streaming client that times one completion: from sending it to its first and last token."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prefixshield.serving.child_server import MODEL_NAME

if TYPE_CHECKING:
    import httpx

#: Seconds without a byte after which a request has failed.
TIMEOUT_S = 600.0

#: Seconds an idle connection is kept; vLLM closes it after 5, and must not while we send on it.
_KEEP_ALIVE_S = 2.0


@dataclass(frozen=True, slots=True)
class Call:
    """One completion, ready to be sent: nothing is left to compute when its time has come."""

    key: str
    body: bytes


@dataclass(slots=True)
class Reply:
    """What the client saw of one completion. Times are those of ``time.perf_counter``."""

    sent_s: float
    first_token_s: float | None = None
    last_token_s: float | None = None
    cached_tokens: int = 0
    error: str | None = None
    """None: the stream ended as it should."""

    @property
    def ttft_ms(self) -> float | None:
        """Sending to first token; None: it failed."""
        if self.error is not None or self.first_token_s is None:
            return None
        return (self.first_token_s - self.sent_s) * 1000


def make_call(
    key: str, prompt: Sequence[int], max_tokens: int, xargs: dict[str, Any] | None = None
) -> Call:
    """A completion of exactly ``max_tokens`` tokens; ``xargs`` is vLLM's ``vllm_xargs``."""
    body = {
        "model": MODEL_NAME,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **({"vllm_xargs": xargs} if xargs else {}),
    }
    return Call(key, json.dumps(body).encode())


def make_client(base_url: str, timeout_s: float = TIMEOUT_S) -> httpx.AsyncClient:
    """A client for any number of requests at once."""
    import httpx

    limits = httpx.Limits(keepalive_expiry=_KEEP_ALIVE_S)  # and no bound on connections
    # trust_env: a proxy is not what stands between us and a server of our own.
    return httpx.AsyncClient(base_url=base_url, timeout=timeout_s, limits=limits, trust_env=False)


async def complete(client: httpx.AsyncClient, call: Call) -> Reply:
    """Send a completion and read its stream to the end; a failure is a reply, not raised."""
    import httpx

    headers = {"Authorization": f"Bearer {call.key}", "Content-Type": "application/json"}
    reply = Reply(time.perf_counter())
    usage: dict[str, Any] | None = None
    try:
        async with client.stream(
            "POST", "/v1/completions", content=call.body, headers=headers
        ) as response:
            if response.status_code != 200:
                text = (await response.aread()).decode(errors="replace")
                reply.error = f"HTTP {response.status_code}: {text[:200]}"
                return reply
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):  # a blank line, or the end
                    continue
                now = time.perf_counter()
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    reply.error = f"in the stream: {str(chunk['error'])[:200]}"
                    return reply
                if chunk["choices"]:
                    reply.first_token_s = reply.first_token_s or now
                    reply.last_token_s = now
                usage = chunk.get("usage") or usage
    except (httpx.HTTPError, ValueError) as error:
        reply.error = f"{type(error).__name__}: {error}"
        return reply
    if reply.first_token_s is None or usage is None:
        reply.error = "the stream ended without a token or without its usage"
    else:
        reply.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return reply
