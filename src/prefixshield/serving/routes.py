"""The allow-list of vLLM's HTTP endpoints, and what is said of those that are not on it.

An endpoint is listed when reading vLLM 0.32.0 showed that a top-level ``cache_salt`` reaches
every engine request it makes (`Access.REWRITTEN`), or that it makes none and shows nothing of
other tenants (`Access.CLEANED`, `Access.KEYED`); what earlier releases do was tested. Whatever is
not listed is refused with 403, endpoints that later versions add included. Method and path must
match exactly, as the router sees them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum, auto
from typing import Any

from prefixshield.serving.hooks import release_numbers


class Access(Enum):
    """What a request needs before it may reach vLLM."""

    OPEN = auto()  # nothing: health checks
    METRICS = auto()  # the operator's key, if one is configured
    PAGE = auto()  # the operator's key; answered by us, never by vLLM
    KEYED = auto()  # an API key
    CLEANED = auto()  # an API key, and a JSON body that names nothing of other tenants
    REWRITTEN = auto()  # an API key, and a JSON body that gets the tenant's cache_salt


_OPEN = (
    ("GET", "/health"),
    ("GET", "/ping"),
    ("POST", "/ping"),
    ("GET", "/version"),
    ("GET", "/load"),
)

_METRICS = (("GET", "/metrics"), ("GET", "/metrics/"))  # vLLM mounts Prometheus under both

#: The live page; it finds the metrics beside itself.
PAGE_PATH = "/prefixshield"

_KEYED = (("GET", "/v1/models"),)

# Chat template and tokenizer only. They do read vLLM's media caches, by names that clients give.
_CLEANED = (
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("POST", "/v1/messages/count_tokens"),
    ("POST", "/v1/chat/completions/render"),
    ("POST", "/v1/completions/render"),
    ("POST", "/v1/messages/render"),
)

_REWRITTEN = (
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/chat/completions/batch"),
    ("POST", "/v1/responses"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/systemone"),
    ("POST", "/inference/v1/generate"),
    ("POST", "/invocations"),  # each of its request types is one of the others here
    ("POST", "/generative_scoring"),
    ("POST", "/v1/embeddings"),
    ("POST", "/pooling"),
    ("POST", "/classify"),
    ("POST", "/score"),
    ("POST", "/v1/score"),
    ("POST", "/rerank"),
    ("POST", "/v1/rerank"),
    ("POST", "/v2/rerank"),
)

ROUTES: Mapping[tuple[str, str], Access] = {
    **dict.fromkeys(_OPEN, Access.OPEN),
    **dict.fromkeys(_METRICS, Access.METRICS),
    ("GET", PAGE_PATH): Access.PAGE,
    **dict.fromkeys(_KEYED, Access.KEYED),
    **dict.fromkeys(_CLEANED, Access.CLEANED),
    **dict.fromkeys(_REWRITTEN, Access.REWRITTEN),
}

#: Endpoints that carry no ``cache_salt`` to the engine before this release of vLLM.
_SALTED_SINCE = {"/generative_scoring": "0.32.0"}


def routes_of(release: str) -> Mapping[tuple[str, str], Access]:
    """The allow-list for a release of vLLM."""
    numbers = release_numbers(release)
    return {
        (method, path): access
        for (method, path), access in ROUTES.items()
        if numbers >= release_numbers(_SALTED_SINCE.get(path, "0"))
    }


_NO_SALT = "it has no cache_salt, so it cannot carry a tenant's identity to the cache"
_STORED = "stored responses are not divided by tenant: one could read another's"
_ADMINISTRATION = "it administers the server: reach vLLM without the middleware for that"

#: Why a path is refused: the first pattern that matches its beginning.
_REASONS = tuple(
    (re.compile(pattern), reason)
    for pattern, reason in (
        (r"/cohere/|/v2/embed\b|/generative_scoring\b", _NO_SALT),
        (r"/v1/audio/|/v1/realtime\b", _NO_SALT),
        (r"/v1/responses/render\b", _STORED),  # it accepts previous_response_id
        (r"/v1/responses/", _STORED),
        (r"(/inference/v1)?/abort_requests\b", "it aborts requests of any tenant by their id"),
        (
            r"/v1/(un)?load_lora_adapter\b|/adapters\b|/\w+_profile\b|/\w*elastic_ep\b",
            _ADMINISTRATION,
        ),
        (
            r"/(reset|init|start|shutdown|update|finish)_\w+|/(pause|resume|sleep|wake_up)\b",
            _ADMINISTRATION,
        ),
        (
            r"/collective_rpc\b|/server_info\b|/kv_event_sources\b|/fault_tolerance/",
            _ADMINISTRATION,
        ),
    )
)


def route_path(scope: Mapping[str, Any]) -> str:
    """The path that the router will match, without the server's root path.

    The rule of ``starlette._utils.get_route_path``: a path outside the root path is matched
    as it is, so ``/v1/models`` is served both below ``--root-path`` and beside it.
    """
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    rest = path.removeprefix(root)
    return rest if rest == "" or rest.startswith("/") else path


def refusal_reason(path: str) -> str:
    """Why a path that is not listed is refused, as a sentence's second half."""
    for pattern, reason in _REASONS:
        if pattern.match(path):
            return reason
    return "it is not on PrefixShield's list of endpoints that keep tenants apart"
