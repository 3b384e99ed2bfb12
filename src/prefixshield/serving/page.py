"""The live page: one HTML file that reads ``/metrics`` in the browser, and nothing else."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Awaitable, Callable, MutableMapping
from functools import cache
from importlib.resources import files
from typing import Any

_SCRIPT = re.compile(r"<script>(.*?)</script>", re.DOTALL)


@cache
def page() -> bytes:
    """The file."""
    return files("prefixshield.serving").joinpath("page.html").read_bytes()


@cache
def _headers() -> list[tuple[bytes, bytes]]:
    """What the page may do: run its own script, and ask this server."""
    script = _SCRIPT.search(page().decode())
    assert script is not None
    digest = base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return [
        (b"content-type", b"text/html; charset=utf-8"),
        (b"content-length", str(len(page())).encode()),
        (b"content-security-policy", policy.encode()),
        (b"cache-control", b"no-store"),
        (b"referrer-policy", b"no-referrer"),
        (b"x-content-type-options", b"nosniff"),
    ]


async def serve_page(
    scope: MutableMapping[str, Any],
    receive: Callable[[], Awaitable[MutableMapping[str, Any]]],
    send: Callable[[MutableMapping[str, Any]], Awaitable[None]],
) -> None:
    """An ASGI application that answers with the page."""
    await send({"type": "http.response.start", "status": 200, "headers": _headers()})
    await send({"type": "http.response.body", "body": page()})
