"""The identity middleware around an application that records what reaches it."""

from __future__ import annotations

import asyncio
import base64
import json
import subprocess
import sys
from contextlib import nullcontext
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import REGISTRY

from prefixshield.config import Config, load_config
from prefixshield.errors import ConfigError, IncompatibleEngineError
from prefixshield.serving.bodies import MAX_NESTING, InvalidBody, request_tag, rewrite
from prefixshield.serving.identity import IdentityMiddleware, KeyRing, live_config
from prefixshield.serving.namespace import Identity, Namespaces
from prefixshield.serving.page import page
from prefixshield.serving.routes import (
    PAGE_PATH,
    ROUTES,
    Access,
    refusal_reason,
    route_path,
    routes_of,
)
from prefixshield.serving.wiring import CONFIG_KEY, SCHEDULER, config_path

CONFIG = """
contracts:
  standard: {refill_rate: 40, burst: 192}
  critical: {refill_rate: 64, burst: 256}
groups:
  alpha:
    contract: standard
    keys: [alpha-key, {value: alpha-critical-key, contract: critical}, {value: "ключ"}]
  beta: {contract: standard, keys: [beta-key]}
default_group: beta
namespace_secret: not a secret at all
max_body_bytes: 4096
"""

ALPHA = Identity("alpha", "standard")
BETA = Identity("beta", "standard")

#: No test may fail for being slow: the first example may import vLLM.
unhurried = settings(deadline=None)

REWRITTEN = sorted(path for (_, path), access in ROUTES.items() if access is Access.REWRITTEN)
CLEANED = sorted(path for (_, path), access in ROUTES.items() if access is Access.CLEANED)


class Recorder:
    """An ASGI application that notes what it is called with, and answers 200."""

    def __init__(self) -> None:
        self.scopes: list[dict[str, Any]] = []
        self.bodies: list[bytes] = []
        self.after_body: list[str] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.scopes.append(dict(scope))
        if scope["type"] == "lifespan":
            assert (await receive())["type"] == "lifespan.startup"
            await send({"type": "lifespan.startup.complete"})
            return
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        self.bodies.append(body)
        if scope.get("wait_for_disconnect"):
            self.after_body.append((await receive())["type"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"ok"})


class Client:
    """The middleware as a server would call it; every answer is (status, body)."""

    def __init__(self, config: Path, **state: Any) -> None:
        self.app = Recorder()
        self.middleware = IdentityMiddleware(self.app)
        self.started = asyncio.run(self._start(state_of(config, **state)))

    async def _start(self, state: Any) -> dict[str, Any]:
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            return {"type": "lifespan.startup"}

        scope = {"type": "lifespan", "app": SimpleNamespace(state=state)}
        await self.middleware(scope, receive, _collector(sent))
        return sent[0]

    def call(
        self,
        method: str,
        path: str,
        body: Any = b"",
        headers: list[tuple[str, str]] | None = None,
        chunks: list[bytes] | None = None,
        messages: list[dict[str, Any]] | None = None,
        **scope: Any,
    ) -> tuple[int | None, Any]:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        if messages is None:
            parts = chunks if chunks is not None else [raw]
            messages = [{"type": "http.request", "body": p, "more_body": True} for p in parts]
            messages[-1]["more_body"] = False
        queue = [*messages, {"type": "http.disconnect"}]
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            return queue.pop(0)

        default = [("authorization", "Bearer alpha-key"), ("content-type", "application/json")]
        raw_headers = [
            (name.lower().encode(), value.encode())
            for name, value in (default if headers is None else headers)
        ]
        full = {"type": "http", "method": method, "path": path, "headers": raw_headers, **scope}
        asyncio.run(self.middleware(full, receive, _collector(sent)))
        if not sent:
            return None, None
        text = b"".join(m.get("body", b"") for m in sent[1:])
        return sent[0]["status"], json.loads(text) if text.startswith(b"{") else text

    def post(self, path: str, body: Any, **kwargs: Any) -> tuple[int | None, Any]:
        return self.call("POST", path, body, **kwargs)

    @property
    def reached(self) -> dict[str, Any]:
        """The body that vLLM got last."""
        found: dict[str, Any] = json.loads(self.app.bodies[-1])
        return found

    @property
    def reached_headers(self) -> dict[bytes, bytes]:
        names = [name for name, _ in self.app.scopes[-1]["headers"]]
        assert len(names) == len(set(names))
        return dict(self.app.scopes[-1]["headers"])


def _collector(sent: list[dict[str, Any]]) -> Any:
    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    return send


def state_of(config: Path, **overrides: Any) -> Any:
    """What vLLM leaves in app.state: its configuration and its arguments."""
    additional = overrides.pop("additional_config", {CONFIG_KEY: str(config)})
    scheduler = overrides.pop("scheduler_cls", SCHEDULER)
    return SimpleNamespace(
        vllm_config=SimpleNamespace(
            additional_config=additional,
            scheduler_config=SimpleNamespace(scheduler_cls=scheduler),
        ),
        args=SimpleNamespace(**{"api_key": None, "grpc": False, "grpc_port": None, **overrides}),
    )


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("identity") / "shield.yaml"
    path.write_text(CONFIG, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def client(config: Path) -> Client:
    return Client(config)


@pytest.fixture(scope="module")
def namespaces(config: Path) -> Namespaces:
    return Namespaces(load_config(config), b"not a secret at all")


def with_key(key: str, *more: tuple[str, str]) -> list[tuple[str, str]]:
    return [("Authorization", f"Bearer {key}"), ("Content-Type", "application/json"), *more]


# Who sends a request


@pytest.mark.parametrize("path", REWRITTEN)
def test_every_rewritten_endpoint_gets_the_tenants_token(
    client: Client, namespaces: Namespaces, path: str
) -> None:
    assert client.post(path, {"model": "m"}) == (200, b"ok")
    assert client.reached["cache_salt"] == namespaces.token(ALPHA)


def test_the_contract_of_a_key_overrides_its_groups(client: Client, namespaces: Namespaces) -> None:
    client.post("/v1/completions", {}, headers=with_key("alpha-critical-key"))
    identity, salt = namespaces.read(client.reached["cache_salt"])
    assert identity == ("alpha", "critical")
    assert salt == namespaces.token(ALPHA)


@pytest.mark.parametrize(
    "header",
    [
        ("x-api-key", "beta-key"),
        ("authorization", "bearer beta-key"),
        ("Authorization", "BEARER   beta-key "),
    ],
)
def test_forms_of_a_key(client: Client, namespaces: Namespaces, header: tuple[str, str]) -> None:
    headers = [header, ("content-type", "application/json; charset=utf-8")]
    assert client.post("/v1/messages", {}, headers=headers)[0] == 200
    assert client.reached["cache_salt"] == namespaces.token(BETA)
    # vLLM's own check, if it is on, reads only this form.
    assert client.reached_headers[b"authorization"] == b"Bearer beta-key"
    assert b"x-api-key" not in client.reached_headers


def test_the_key_ring_compares_digests() -> None:
    """Of two rings with the same keys, neither knows one by what the other knows it by."""
    keys = {"alpha-key": ("alpha", "standard"), "beta-key": ("beta", "standard")}
    one, other = KeyRing(keys, "gateway"), KeyRing(keys, "gateway")
    for ring in (one, other):
        assert ring.find(b"alpha-key") == ALPHA
        assert ring.find(b"alpha-kez") is ring.find(b"gateway") is None
        assert ring.is_gateway(b"gateway")
        assert not ring.is_gateway(b"alpha-key")
        assert not KeyRing(keys).is_gateway(b"")
    found = [set(ring._identities) for ring in (one, other)]
    assert all(len(digest) == 32 for digest in found[0] | found[1])
    assert not found[0] & found[1]


def test_a_key_that_is_not_ascii(client: Client) -> None:
    assert client.post("/v1/completions", {}, headers=with_key("ключ"))[0] == 200


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [("authorization", "")],
        [("authorization", "Bearer")],
        [("authorization", "Bearer ")],
        [("authorization", "Basic alpha-key")],
        [("authorization", "alpha-key")],
        [("authorization", "Bearer Alpha-key")],
        [("authorization", "Bearer alpha-key beta-key")],
        [("authorization", "Bearer alpha-key"), ("authorization", "Bearer beta-key")],
        [("authorization", "Bearer alpha-key"), ("authorization", "Bearer alpha-key")],
        [("authorization", "Bearer alpha-key"), ("x-api-key", "beta-key")],
        [("x-api-key", "alpha-key"), ("x-api-key", "alpha-key")],
        [("x-api-key", "")],
        [("api-key", "alpha-key")],
        [("cookie", "alpha-key")],
    ],
)
@pytest.mark.parametrize("route", [("POST", "/v1/completions"), ("GET", "/v1/models")])
def test_without_exactly_one_known_key_nothing_passes(
    client: Client, headers: list[tuple[str, str]], route: tuple[str, str]
) -> None:
    reached = len(client.app.scopes)
    status, body = client.call(
        *route, body=b"{}", headers=[*headers, ("content-type", "application/json")]
    )
    assert (status, body["error"]["type"]) == (401, "AuthenticationError")
    assert len(client.app.scopes) == reached
    assert "alpha-key" not in json.dumps(body)


def test_without_a_key_the_default_group_if_allowed(
    config: Path, namespaces: Namespaces, tmp_path: Path
) -> None:
    path = tmp_path / "anonymous.yaml"
    path.write_text(CONFIG + "allow_anonymous: true\n", encoding="utf-8")
    client = Client(path)
    headers = [("content-type", "application/json")]
    assert client.post("/v1/completions", {}, headers=headers)[0] == 200
    assert client.reached["cache_salt"] == namespaces.token(BETA)
    assert b"authorization" not in client.reached_headers
    # A wrong key is not the same as none.
    assert client.post("/v1/completions", {}, headers=with_key("wrong"))[0] == 401


# Where it goes


def test_open_endpoints_need_no_key(client: Client) -> None:
    for method, path in [key for key, access in ROUTES.items() if access is Access.OPEN]:
        assert client.call(method, path, headers=[])[0] == 200, path


METRICS = [path for (_, path), access in ROUTES.items() if access is Access.METRICS]


def test_without_an_operators_key_the_metrics_are_open_and_there_is_no_page(client: Client) -> None:
    for path in METRICS:
        assert client.call("GET", path, headers=[])[0] == 200
    for headers in ([], with_key("alpha-key")):
        status, answer = client.call("GET", PAGE_PATH, headers=headers)
        assert status == 403
        assert "no operator_key is configured" in answer["error"]["message"]


def basic(credentials: str) -> list[tuple[str, str]]:
    return [("Authorization", "Basic " + base64.b64encode(credentials.encode()).decode())]


def test_the_operators_key_opens_the_metrics_and_the_page_and_nothing_else(tmp_path: Path) -> None:
    client = Client(write(tmp_path / "c.yaml", CONFIG + "operator_key: {value: 'op:key'}\n"))
    good = [
        with_key("op:key"),
        basic(":op:key"),
        basic("anybody:op:key"),
        [("authorization", "bearer  op:key ")],
    ]
    bad = [
        [],
        with_key("alpha-key"),
        with_key(""),
        basic("op:key"),
        basic("op:key:"),
        basic("x:alpha-key"),
        [("Authorization", "Basic op:key")],
        [("Authorization", "op:key")],
        [("x-api-key", "op:key")],
        with_key("op:key", ("x-api-key", "op:key")),
        [*with_key("op:key"), *with_key("op:key")],
    ]
    for headers in good:
        for path in METRICS:
            assert client.call("GET", path, headers=headers) == (200, b"ok")
        assert not {b"authorization"} & {name for name, _ in client.app.scopes[-1]["headers"]}
        reached = len(client.app.scopes)
        assert client.call("GET", PAGE_PATH, headers=headers) == (200, page())
        assert len(client.app.scopes) == reached, "the page is ours"
    for headers in bad:
        for path in (*METRICS, PAGE_PATH):
            assert client.call("GET", path, headers=headers)[0] == 401, headers
    assert client.call("GET", "/v1/models", headers=with_key("op:key"))[0] == 401
    assert client.post("/v1/completions", {"prompt": "x"}, headers=with_key("op:key"))[0] == 401
    assert client.call("POST", PAGE_PATH, headers=with_key("op:key"))[0] == 403
    assert client.call("GET", PAGE_PATH + "/", headers=with_key("op:key"))[0] == 403


def test_an_operators_key_is_no_tenants_key(tmp_path: Path) -> None:
    client = Client(write(tmp_path / "c.yaml", CONFIG + "operator_key: alpha-key\n"))
    assert client.started["type"] == "lifespan.startup.failed"
    assert "operator_key: found an API key of a group" in client.started["message"]
    assert "alpha-key" not in client.started["message"]


@pytest.mark.parametrize("path", CLEANED)
def test_cleaned_endpoints_keep_the_clients_own_salt(client: Client, path: str) -> None:
    """/render gives it back to the client, for a request that is rewritten in its turn."""
    body = {"prompt": "x", "cache_salt": "mine", "priority": 1, "vllm_xargs": {"session_id": "s"}}
    assert client.post(path, body) == (200, b"ok")
    assert client.reached == {"prompt": "x", "cache_salt": "mine", "vllm_xargs": {}}
    assert client.post(path, {"prompt": "x"})[0] == 200
    assert client.reached == {"prompt": "x"}
    assert client.post(path, b"[]")[0] == 400
    assert client.post(path, {}, headers=[("content-type", "application/json")])[0] == 401


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "//v1/completions"),
        ("POST", "/v1/completions/"),
        ("POST", "/v1//completions"),
        ("POST", "/V1/completions"),
        ("POST", "/v1/Completions"),
        ("POST", "/v1/%63ompletions"),
        ("POST", "/v1/../v1/completions"),
        ("POST", "/health/../v1/completions"),
        ("POST", "/v1/%2e%2e/v1/completions"),
        ("POST", "/v1/completions\n"),
        ("POST", "/v1/completions;x"),
        ("POST", "/v1/completions?x"),
        ("POST", "v1/completions"),
        ("POST", ""),
        ("post", "/v1/completions"),
        ("PUT", "/v1/completions"),
        ("GET", "/v1/completions"),
        ("HEAD", "/v1/models"),
        ("OPTIONS", "/v1/completions"),
        ("GET", "/metrics/x"),
        ("GET", "/metricsx"),
        ("GET", "/docs"),
        ("GET", "/openapi.json"),
        ("GET", "/kv_event_sources"),
        ("GET", "/v1/responses/resp_1"),
        ("POST", "/v1/responses/resp_1/cancel"),
        ("POST", "/v1/responses/render"),
        ("POST", "/inference/v1/abort_requests"),
        ("POST", "/abort_requests"),
        ("POST", "/cohere/v2/chat"),
        ("POST", "/v2/embed"),
        ("POST", "/v1/audio/transcriptions"),
        ("POST", "/v1/audio/translations"),
        ("POST", "/v1/load_lora_adapter"),
        ("POST", "/adapters"),
        ("POST", "/reset_prefix_cache"),
        ("POST", "/collective_rpc"),
        ("POST", "/sleep"),
        ("POST", "/scale_elastic_ep"),
        ("POST", "/start_profile"),
        ("GET", "/server_info"),
    ],
)
@pytest.mark.parametrize("key", ["alpha-key", None])
def test_what_is_not_listed_is_refused(
    client: Client, method: str, path: str, key: str | None
) -> None:
    reached = len(client.app.scopes)
    headers = with_key(key) if key else [("content-type", "application/json")]
    status, body = client.call(method, path, b"{}", headers=headers)
    assert (status, body["error"]["code"]) == (403, 403)
    assert refusal_reason(path) in body["error"]["message"]
    assert len(client.app.scopes) == reached


def test_refusals_say_why() -> None:
    assert "cache_salt" in refusal_reason("/v2/embed")
    assert "cache_salt" in refusal_reason("/generative_scoring")
    assert "cache_salt" in refusal_reason("/v1/audio/transcriptions")
    assert "stored responses" in refusal_reason("/v1/responses/resp_1/cancel")
    assert "aborts" in refusal_reason("/inference/v1/abort_requests")
    assert "administers" in refusal_reason("/reset_prefix_cache")
    assert "list of endpoints" in refusal_reason("/v3/embed")


@pytest.mark.parametrize(
    ("root_path", "path", "status"),
    [
        ("/api", "/api/v1/completions", 200),
        ("/api", "/v1/completions", 200),  # the router serves it beside the root path, too
        ("/api", "/api//v1/completions", 403),
        ("/api", "/apiv1/completions", 403),
        ("/api", "/api", 403),
        ("/api/", "/api/v1/completions", 403),
        ("/", "/v1/completions", 200),
        ("/v1", "/v1/v1/completions", 200),
        ("/v1", "/v1/completions", 403),
    ],
)
def test_the_root_path_is_removed_as_the_router_removes_it(
    client: Client, root_path: str, path: str, status: int
) -> None:
    pytest.importorskip("starlette")
    from starlette.routing import Match, Route

    assert client.post(path, {}, root_path=root_path)[0] == status
    route = Route("/v1/completions", lambda request: None, methods=["POST"])
    scope = {"type": "http", "method": "POST", "path": path, "root_path": root_path}
    assert (route.matches(scope)[0] is Match.FULL) == (status == 200)


@unhurried
@given(
    start=st.sampled_from(["", "/", "/api", "/v1", "/api/"]),
    rest=st.sampled_from(["", "/", "/v1/completions"]) | st.text(max_size=30),
    root_path=st.sampled_from(["", "/", "/api", "/v1", "/api/"]),
)
def test_every_path_is_read_as_the_router_reads_it(start: str, rest: str, root_path: str) -> None:
    scope = {"path": start + rest, "root_path": root_path}
    starlette = pytest.importorskip("starlette._utils")
    assert route_path(scope) == starlette.get_route_path(scope)


def test_preflights_pass_and_other_options_do_not(client: Client) -> None:
    headers = [("origin", "https://a.example"), ("access-control-request-method", "POST")]
    assert client.call("OPTIONS", "/v1/completions", headers=headers)[0] == 200
    assert client.call("OPTIONS", "/v1/completions", headers=headers[:1])[0] == 403
    assert client.call("OPTIONS", "/v1/completions", headers=headers[1:])[0] == 403


def test_websockets_are_closed_before_they_open(client: Client) -> None:
    sent: list[dict[str, Any]] = []
    reached = len(client.app.scopes)

    async def receive() -> dict[str, Any]:
        return {"type": "websocket.connect"}

    headers = [(b"authorization", b"Bearer alpha-key")]
    scope = {"type": "websocket", "path": "/v1/realtime", "headers": headers}
    asyncio.run(client.middleware(scope, receive, _collector(sent)))
    assert sent == [{"type": "websocket.close", "code": 1008}]
    assert len(client.app.scopes) == reached


def test_nothing_passes_before_the_configuration_is_read() -> None:
    app = Recorder()
    sent: list[dict[str, Any]] = []
    scope = {"type": "http", "method": "GET", "path": "/health", "headers": []}
    asyncio.run(IdentityMiddleware(app)(scope, None, _collector(sent)))  # type: ignore[arg-type]
    assert sent[0]["status"] == 503
    assert app.scopes == []


# What a body may say

FORGERIES = {
    "priority": -5,
    "session_id": "s",
    "kv_transfer_params": {"do_remote_prefill": True, "prompt_token_ids": [1]},
    "ec_transfer_params": {"x": 1},
}


def test_other_names_for_an_identity_are_removed(client: Client) -> None:
    nested = {
        **FORGERIES,
        "cache_salt": "x",
        "prefixshield_group": "beta",
        "prefixshield_prefix_id": "p",
    }
    client.post(
        "/v1/completions",
        {
            **FORGERIES,
            "requestType": "NEW_SESSION",
            "vllm_xargs": {**nested, "top": 1},
            "extra_args": dict(nested),
            "sampling_params": {**nested, "n": 1, "extra_args": dict(nested)},
        },
    )
    reached = client.reached
    reached.pop("cache_salt")
    kept = {"prefixshield_prefix_id": "p"}
    assert reached == {
        "vllm_xargs": {**kept, "top": 1},
        "extra_args": kept,
        "sampling_params": {**kept, "n": 1, "extra_args": kept},
    }


@pytest.mark.parametrize("name", ["vllm_xargs", "extra_args", "sampling_params"])
def test_containers_are_objects(client: Client, name: str) -> None:
    assert client.post("/v1/completions", {name: None})[0] == 200
    for value in ([["priority", 1]], "priority", 1, True):
        status, body = client.post("/v1/completions", {name: value})
        assert (status, body["error"]["param"]) == (400, name)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)
field_names = st.sampled_from(
    ["cache_salt", "priority", "session_id", "vllm_xargs", "sampling_params", "messages", "model"]
) | st.text(max_size=8)


@unhurried
@given(body=st.dictionaries(field_names, json_values, max_size=6))
def test_no_body_reaches_another_namespace(body: dict[str, Any]) -> None:
    """Whatever alpha sends, it is refused, or arrives as alpha's, otherwise unchanged."""
    spaces = _namespaces()
    try:
        fields = json.loads(rewrite(json.dumps(body).encode(), "/v1/completions", ALPHA, spaces))
    except InvalidBody:
        return
    identity, salt = spaces.read(fields["cache_salt"])
    assert identity == ALPHA
    assert salt == spaces.token(ALPHA, body.get("cache_salt") or "")
    assert not FORGERIES.keys() & fields.keys()
    touched = {*FORGERIES, "cache_salt", "vllm_xargs", "sampling_params", "requestType"}
    for name in body.keys() - touched - {"messages", "request_id", "extra_args"}:
        assert fields[name] == body[name]


salts = st.text(min_size=1, max_size=128).filter(lambda s: not set(s) & set("@/\\\x00"))


@unhurried
@given(first=salts, second=salts)
def test_a_clients_salts_divide_its_own_namespace(first: str, second: str) -> None:
    spaces = _namespaces()

    def token(identity: Identity, salt: str | None) -> str:
        body = json.dumps({"cache_salt": salt}).encode()
        found: str = json.loads(rewrite(body, "/v1/completions", identity, spaces))["cache_salt"]
        return found

    assert (token(ALPHA, first) == token(ALPHA, second)) == (first == second)
    # Another's salt, and another's very token, stay within the sender's group.
    stolen = token(ALPHA, first)
    assert token(BETA, first) != stolen
    assert token(BETA, stolen) != stolen
    assert spaces.read(token(BETA, stolen))[0] == BETA
    assert token(ALPHA, None) not in (stolen, token(ALPHA, stolen))


def test_a_salt_may_hold_a_lone_surrogate() -> None:
    spaces = _namespaces()
    body = b'{"cache_salt": "\\ud800", "prompt": "\\udfff"}'
    fields = json.loads(rewrite(body, "/v1/completions", ALPHA, spaces))
    assert fields["cache_salt"] == spaces.token(ALPHA, "\ud800")
    assert fields["prompt"] == "\udfff"


@pytest.mark.parametrize(
    "salt", ["", 1, True, [], {}, ["x"], "a@b", "a/b", "a\\b", "a\x00b", "x" * 129]
)
def test_salts_that_vllm_would_refuse(client: Client, salt: Any) -> None:
    status, body = client.post("/v1/completions", {"cache_salt": salt})
    assert (status, body["error"]["param"]) == (400, "cache_salt")


@unhurried
@given(salt=st.text(max_size=140) | st.none() | st.integers() | st.lists(st.text(), max_size=1))
def test_the_limits_on_salts_are_vllms_own(salt: Any) -> None:
    protocol = pytest.importorskip("vllm.entrypoints.generate.base.protocol")
    from vllm.exceptions import VLLMValidationError

    def accepted(check: Any) -> bool:
        try:
            check()
        except (VLLMValidationError, InvalidBody):
            return False
        return True

    body = json.dumps({"cache_salt": salt}).encode()
    assert accepted(lambda: protocol.validate_cache_salt(salt)) == accepted(
        lambda: rewrite(body, "/v1/completions", ALPHA, _namespaces())
    )


def test_tokens_satisfy_vllms_limits() -> None:
    protocol = pytest.importorskip("vllm.entrypoints.generate.base.protocol")
    protocol.validate_cache_salt(_namespaces().token(ALPHA, "x" * 128))


@pytest.mark.parametrize(
    "body",
    [
        b'{"cache_salt": "mine", "cache_salt": "a"}',
        b'{"cache_salt": "a", "cache\\u005fsalt": "mine", "\\u0063ache_salt": "a"}',
        b'\xef\xbb\xbf{"priority": 1, "pr\\u0069ority": 2, "cache_salt": "a"}',
    ],
)
def test_a_name_given_twice_or_escaped_is_one_name(
    client: Client, namespaces: Namespaces, body: bytes
) -> None:
    assert client.post("/v1/completions", body)[0] == 200
    pairs = json.loads(client.app.bodies[-1], object_pairs_hook=list)
    assert pairs == [("cache_salt", namespaces.token(ALPHA, "a"))]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"x"',
        b"null",
        b"1",
        b'{"a": 1}{"b": 2}',
        b"{'a': 1}",
        b'{"a": "\xff"}',
        '{"a": 1}'.encode("utf-16"),
        b'{"a": ' + b"9" * 4000 + b"0" * 4000 + b"}",
        b"\x1f\x8b\x08\x00",
    ],
    ids=repr,
)
def test_bodies_that_are_not_json_objects(config: Path, body: bytes, tmp_path: Path) -> None:
    path = tmp_path / "large.yaml"
    path.write_text(CONFIG.replace("4096", "1000000"), encoding="utf-8")
    client = Client(path)
    status, answer = client.post("/v1/completions", body)
    assert (status, answer["error"]["type"]) == (400, "BadRequestError")


def nested(depth: int, inside: str = "1", opening: str = "[", closing: str = "]") -> bytes:
    """An object with lists in it, ``depth`` levels in all."""
    count = depth - 1
    return f'{{"a": {opening * count}{inside}{closing * count}}}'.encode()


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (nested(MAX_NESTING), 200),
        (nested(MAX_NESTING, opening='{"b": ', closing="}"), 200),
        (nested(3, inside=json.dumps("[{" * 300 + '\\"' + "[" * 300)), 200),
        (nested(3, inside=json.dumps([[]] * 300)), 200),
        (nested(MAX_NESTING + 1), 413),
        (nested(MAX_NESTING + 1, opening='{"b": ', closing="}"), 413),
        (nested(MAX_NESTING + 1, opening='["\\"]]]", ', closing="]"), 413),
        (b'{"a": ' + b"[" * 200_000, 413),
        (b'{"a": "' + b'\\"' * 200_000 + b"[" * 101, 400),
    ],
)
def test_nesting_has_a_limit(config: Path, tmp_path: Path, body: bytes, status: int) -> None:
    path = write(tmp_path / "large.yaml", CONFIG.replace("4096", "1000000"))
    found, answer = Client(path).post("/v1/completions", body)
    assert found == status
    if status == 413:
        assert answer["error"]["type"] == "RequestTooLargeError"
        assert "nested" in answer["error"]["message"]


@unhurried
@given(
    st.recursive(
        st.none() | st.text(alphabet='[]{}"\\a'),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text('"[a'), inner, max_size=3)
        ),
    ),
    st.integers(0, 110),
)
def test_the_depth_is_that_of_the_parsed_body(value: Any, levels: int) -> None:
    def depth(value: Any) -> int:
        inside = value.values() if isinstance(value, dict) else value
        return 1 + max(map(depth, inside), default=0) if isinstance(value, dict | list) else 0

    for _ in range(levels):
        value = [value, "]"]
    fields = {"a": value}
    refused = pytest.raises(InvalidBody, match="nested more than")
    with refused if depth(fields) > MAX_NESTING else nullcontext():
        rewrite(json.dumps(fields).encode(), "/v1/completions", ALPHA, _namespaces())


@pytest.mark.parametrize(
    "content_type",
    [
        None,
        "",
        "text/plain",
        "application/jsonx",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "text/plain; application/json",
    ],
)
def test_only_json_is_read(client: Client, content_type: str | None) -> None:
    headers = [("authorization", "Bearer alpha-key")]
    if content_type is not None:
        headers.append(("content-type", content_type))
    assert client.post("/v1/completions", {}, headers=headers)[0] == 415


def test_two_content_types_are_none(client: Client) -> None:
    headers = with_key("alpha-key", ("content-type", "text/plain"))
    assert client.post("/v1/completions", {}, headers=headers)[0] == 415


@pytest.mark.parametrize("content_type", ["Application/JSON", "application/json;charset=utf-8"])
def test_forms_of_the_content_type(client: Client, content_type: str) -> None:
    headers = [("authorization", "Bearer alpha-key"), ("content-type", content_type)]
    assert client.post("/v1/completions", {}, headers=headers)[0] == 200


# How a body travels


@unhurried
@given(cuts=st.lists(st.integers(0, 60), max_size=8))
def test_a_body_may_come_in_any_pieces(client: Client, cuts: list[int]) -> None:
    body = json.dumps({"prompt": "wörter", "cache_salt": "mine", "n": 3}).encode()
    edges = [0, *sorted(cuts), len(body)]
    chunks = [body[a:b] for a, b in pairwise(edges)]
    assert client.post("/v1/completions", b"", chunks=chunks)[0] == 200
    assert client.reached["prompt"] == "wörter"


def test_the_framing_fits_the_new_body(client: Client) -> None:
    headers = with_key("alpha-key", ("transfer-encoding", "chunked"), ("content-length", "2"))
    client.post("/v1/completions", {}, headers=headers)
    assert client.reached_headers[b"content-length"] == str(len(client.app.bodies[-1])).encode()
    assert b"transfer-encoding" not in client.reached_headers


def test_bodies_have_a_limit(client: Client) -> None:
    reached = len(client.app.scopes)
    fits = b'{"a":"' + b"x" * (4096 - 8) + b'"}'
    assert client.post("/v1/completions", fits)[0] == 200
    assert client.post("/v1/completions", fits + b" ")[0] == 413
    assert client.post("/v1/completions", b"", chunks=[fits, b"", b" "])[0] == 413
    assert len(client.app.scopes) == reached + 1


def test_a_declared_length_over_the_limit_is_refused_unread(client: Client) -> None:
    for length in ("4097", "9" * 5000):
        headers = with_key("alpha-key", ("content-length", length))
        assert client.call("POST", "/v1/completions", headers=headers, messages=[])[0] == 413


def test_a_client_that_leaves_while_sending_reaches_nothing(client: Client) -> None:
    reached = len(client.app.scopes)
    first = {"type": "http.request", "body": b'{"a"', "more_body": True}
    assert client.call("POST", "/v1/completions", messages=[first]) == (None, None)
    assert len(client.app.scopes) == reached


def test_vllm_sees_a_client_that_leaves_later(client: Client) -> None:
    client.post("/v1/completions", {}, wait_for_disconnect=True)
    assert client.app.after_body == ["http.disconnect"]


# Headers


def test_headers_that_name_an_identity_are_removed(client: Client) -> None:
    forged = [
        ("X-Session-ID", "s"),
        ("X-Vllm-Priority", "-1"),
        ("X-data-parallel-rank", "0"),
        ("X-Amzn-SageMaker-Adapter-Identifier", "other"),
        ("X-Amzn-SageMaker-Session-Id", "other"),
        ("X-Amzn-SageMaker-Custom-Attributes", "x"),
        ("X-PrefixShield-Group", "beta"),
        ("X-PrefixShieldContract", "critical"),
    ]
    kept = [("traceparent", "00-1-1-01"), ("user-agent", "x"), ("accept", "*/*")]
    client.post("/v1/completions", {}, headers=with_key("alpha-key", *forged, *kept))
    assert set(client.reached_headers) == {
        b"authorization",
        b"content-type",
        b"content-length",
        b"traceparent",
        b"user-agent",
        b"accept",
    }
    for method, path in [("GET", "/v1/models"), ("POST", "/ping"), ("POST", "/tokenize")]:
        client.call(method, path, headers=with_key("alpha-key", *forged))
        assert set(client.reached_headers) <= {b"authorization", b"content-type"}


def test_request_ids_belong_to_a_group(client: Client, namespaces: Namespaces) -> None:
    """vLLM aborts by request id, and keeps late-interaction queries under it."""
    seen = set()
    for key in ("alpha-key", "beta-key"):
        headers = with_key(key, ("X-Request-Id", "r1"))
        client.post("/score", {"request_id": "r1"}, headers=headers)
        assert client.reached["request_id"].startswith("r1-")
        in_header = client.reached_headers[b"x-request-id"].decode()
        assert in_header == client.reached["request_id"]
        seen.add(in_header)
    assert len(seen) == 2
    assert request_tag(ALPHA, namespaces) == request_tag(Identity("alpha", "critical"), namespaces)


# What other tenants left behind


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        ("/v1/responses", "previous_response_id", "resp_1"),
        ("/v1/responses", "background", True),
        ("/inference/v1/generate", "features", {"mm_hashes": {"image": ["h"]}}),
    ],
)
def test_what_reaches_into_shared_stores_is_refused(
    client: Client, path: str, field: str, value: Any
) -> None:
    status, body = client.post(path, {field: value})
    assert (status, body["error"]["param"]) == (400, field)
    assert client.post(path, {field: None})[0] == 200


def test_responses_are_not_stored(client: Client) -> None:
    client.post("/v1/responses", {"store": True})
    assert client.reached["store"] is False


def test_media_names_belong_to_a_group(client: Client) -> None:
    """A medium without content is taken from a cache by its name, whoever put it there."""
    part = {"type": "image_url", "image_url": None, "uuid": "u1"}
    message = {"role": "user", "content": [part, {"type": "text", "text": "uuid"}]}
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", {"messages": [message]}),
        ("/v1/chat/completions/batch", {"messages": [[message], [message]]}),
        ("/v1/embeddings", {"input": [message]}),
        ("/v1/score", {"text_1": {"content": [part]}, "documents": [{"content": [part]}]}),
        ("/inference/v1/generate", {"content_parts": [part]}),
        ("/v1/messages", {"messages": [{"content": [{"type": "x", "content": [part]}]}]}),
        ("/tokenize", {"messages": [message]}),
        ("/v1/chat/completions/render", {"messages": [message]}),
    ]
    for path, body in bodies:
        found = {}
        for key in ("alpha-key", "beta-key"):
            assert client.post(path, body, headers=with_key(key))[0] == 200
            found[key] = client.app.bodies[-1].decode()
            assert '"uuid":"u1"' not in found[key]
        for key, text in found.items():  # the same name again is the same item again
            client.post(path, body, headers=with_key(key))
            assert client.app.bodies[-1].decode() == text
        reached = [json.loads(text) for text in found.values()]
        assert len({json.dumps({**r, "cache_salt": ""}) for r in reached}) == 2


def test_arguments_of_tools_are_not_media(client: Client) -> None:
    call = {"function": {"name": "f", "arguments": {"uuid": "u1"}}}
    tools = [{"function": {"parameters": {"properties": {"uuid": {"type": "string"}}}}}]
    body = {"messages": [{"role": "assistant", "tool_calls": [call]}], "tools": tools}
    client.post("/v1/chat/completions", body)
    reached = client.reached
    reached.pop("cache_salt")
    assert reached == body


# A gateway that names the group


GATEWAY = CONFIG + "trusted_header: {name: X-Tenant, secret: gateway-secret}\n"


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Client:
    return Client(write(tmp_path_factory.mktemp("gateway") / "shield.yaml", GATEWAY))


def group_of(client: Client, namespaces: Namespaces, headers: list[tuple[str, str]]) -> Any:
    """The status of a request, and its group if it got through."""
    status, _ = client.post("/v1/completions", {}, headers=headers)
    if status != 200:
        return status
    assert b"x-tenant" not in client.reached_headers
    return namespaces.read(client.reached["cache_salt"])[0].group


@pytest.mark.parametrize(
    ("headers", "group"),
    [
        (with_key("gateway-secret", ("X-Tenant", "alpha")), "alpha"),
        (with_key("gateway-secret", ("x-tenant", " beta ")), "beta"),
        (with_key("gateway-secret", ("X-Tenant", "gamma")), 403),
        (with_key("gateway-secret", ("X-Tenant", "")), 403),
        (with_key("gateway-secret", ("X-Tenant", "\u0430lpha")), 403),
        (with_key("gateway-secret", ("X-Tenant", "alpha, beta")), 403),
        (with_key("gateway-secret", ("X-Tenant", "alpha"), ("X-Tenant", "beta")), 403),
        (with_key("gateway-secret", ("X-Tenant", "alpha"), ("X-Tenant", "alpha")), 403),
        (with_key("gateway-secret"), 403),
        (with_key("gateway-secret", ("X-Tenant", "alpha"), ("x-api-key", "beta-key")), 401),
        (with_key("gateway-secre", ("X-Tenant", "alpha")), 401),
        (with_key("", ("X-Tenant", "alpha")), 401),
        ([("content-type", "application/json"), ("X-Tenant", "alpha")], 401),
        (with_key("beta-key", ("X-Tenant", "alpha")), "beta"),
    ],
)
def test_only_the_gateway_names_the_group(
    gateway: Client, namespaces: Namespaces, headers: list[tuple[str, str]], group: Any
) -> None:
    assert group_of(gateway, namespaces, headers) == group


def test_an_unknown_group_may_be_the_default_and_is_counted(
    tmp_path: Path, namespaces: Namespaces
) -> None:
    lenient = GATEWAY.replace(
        "secret: gateway-secret", "secret: gateway-secret, unknown_group: default"
    )
    client = Client(write(tmp_path / "shield.yaml", lenient))

    def count(outcome: str) -> float:
        labels = {"outcome": outcome}
        return REGISTRY.get_sample_value("prefixshield_unknown_groups_total", labels) or 0.0

    default, refused = count("default"), count("refused")
    for name in ("gamma", "delta"):
        headers = with_key("gateway-secret", ("X-Tenant", name))
        assert group_of(client, namespaces, headers) == "beta"
    assert group_of(client, namespaces, with_key("gateway-secret")) == "beta"
    twice = with_key("gateway-secret", ("X-Tenant", "gamma"), ("X-Tenant", "delta"))
    assert group_of(client, namespaces, twice) == 403
    assert (count("default"), count("refused")) == (default + 3, refused + 1)


def test_the_header_is_stripped_wherever_it_has_no_meaning(client: Client, gateway: Client) -> None:
    assert gateway.call("GET", "/health", headers=[("X-Tenant", "alpha")])[0] == 200
    assert b"x-tenant" not in gateway.reached_headers
    assert client.call("GET", "/health", headers=[("X-Tenant", "alpha")])[0] == 200
    assert b"x-tenant" in client.reached_headers, "somebody else's header, if it is not ours"


def test_the_gateways_secret_must_also_be_in_vllms_own_list(tmp_path: Path) -> None:
    path = write(tmp_path / "shield.yaml", GATEWAY)
    keys = ["alpha-key", "alpha-critical-key", "ключ", "beta-key"]
    with pytest.raises(IncompatibleEngineError, match="1 of 5 are missing"):
        live_config(state_of(path, api_key=keys), {})
    live_config(state_of(path, api_key=[*keys, "gateway-secret"]), {})


def test_a_gateway_alone_is_enough_and_its_secret_makes_the_namespaces(tmp_path: Path) -> None:
    def token(secret: str) -> str:
        text = GATEWAY.replace("gateway-secret", secret).replace(
            "namespace_secret: not a secret at all", ""
        )
        for keys in (
            '[alpha-key, {value: alpha-critical-key, contract: critical}, {value: "ключ"}]',
            "[beta-key]",
        ):
            text = text.replace(keys, "[]")
        live = live_config(state_of(write(tmp_path / f"{secret}.yaml", text)), {})
        assert live.current.keys == {}
        return live.current.namespaces.token(ALPHA)

    assert token("one") != token("another")


# Starting


def test_a_good_configuration_starts(client: Client) -> None:
    assert client.started == {"type": "lifespan.startup.complete"}


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"additional_config": {}}, "--additional-config"),
        ({"additional_config": None}, "--additional-config"),
        ({"additional_config": {CONFIG_KEY: {"path": "x"}}}, "--additional-config"),
        ({"additional_config": {CONFIG_KEY: "/nowhere/shield.yaml"}}, "/nowhere/shield.yaml"),
        ({"scheduler_cls": None}, "--scheduler-cls"),
        ({"scheduler_cls": "vllm.v1.core.sched.scheduler.Scheduler"}, "--scheduler-cls"),
        ({"scheduler_cls": dict}, "builtins.dict"),
        ({"grpc": True}, "--grpc"),
        ({"grpc_port": 0}, "--grpc-port"),
        ({"api_key": ["alpha-key", "beta-key"]}, "2 of 4 are missing"),
        ({"api_key": ["other"]}, "4 of 4 are missing"),
    ],
)
def test_what_is_refused_at_the_start(
    config: Path, overrides: dict[str, Any], message: str
) -> None:
    client = Client(config, **overrides)
    assert client.started["type"] == "lifespan.startup.failed"
    assert message in client.started["message"]
    assert "alpha-key" not in client.started["message"]
    assert client.call("GET", "/health", headers=[])[0] == 503
    assert client.app.scopes == []


def test_the_rust_front_end_is_refused(config: Path) -> None:
    with pytest.raises(IncompatibleEngineError, match="VLLM_USE_RUST_FRONTEND"):
        live_config(state_of(config), {"VLLM_USE_RUST_FRONTEND": "1"})
    live_config(state_of(config), {"VLLM_USE_RUST_FRONTEND": "0"})


def test_keys_must_also_be_in_vllms_own_list(config: Path) -> None:
    keys = ["alpha-key", "alpha-critical-key", "ключ", "beta-key"]
    live_config(state_of(config, api_key=[*keys, "unused"]), {"VLLM_API_KEY": "ignored"})
    live_config(state_of(config, api_key=[""]), {"VLLM_API_KEY": "also dropped by vLLM"})
    with pytest.raises(IncompatibleEngineError, match="3 of 4 are missing"):
        live_config(state_of(config), {"VLLM_API_KEY": "alpha-key"})


def test_vllms_own_list_contradicts_anonymous_requests(config: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "shield.yaml", CONFIG + "allow_anonymous: true\n")
    keys = ["alpha-key", "alpha-critical-key", "ключ", "beta-key"]
    with pytest.raises(IncompatibleEngineError, match="allow_anonymous"):
        live_config(state_of(path, api_key=keys), {})


def test_a_configuration_that_lets_nobody_in(tmp_path: Path) -> None:
    path = write(
        tmp_path / "shield.yaml",
        "contracts: {s: {refill_rate: 1, burst: 1}}\ngroups: {g: {contract: s}}\n"
        "default_group: g\n",
    )
    with pytest.raises(ConfigError, match="no API key"):
        live_config(state_of(path), {})


def test_an_application_without_vllms_state_fails_closed() -> None:
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "lifespan.startup"}

    app = Recorder()
    asyncio.run(IdentityMiddleware(app)({"type": "lifespan"}, receive, _collector(sent)))
    assert sent[0]["type"] == "lifespan.startup.failed"
    assert app.scopes == []


def test_config_path() -> None:
    found = config_path(SimpleNamespace(additional_config={CONFIG_KEY: "a/b.yaml"}))
    assert found == Path("a/b.yaml")


def test_the_middleware_does_not_import_vllm() -> None:
    code = (
        "import sys, prefixshield.serving.identity\n"
        "print([m for m in ('vllm', 'torch', 'starlette') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@cache
def _namespaces() -> Namespaces:
    """Namespaces without a file."""
    config = Config.model_validate(
        {
            "contracts": {"standard": {"refill_rate": 1.0, "burst": 1.0}},
            "groups": {"alpha": {"contract": "standard"}, "beta": {"contract": "standard"}},
            "default_group": "beta",
        }
    )
    return Namespaces(config, b"secret")


def test_an_endpoint_is_served_from_the_release_on_that_hands_the_salt_on():
    scoring = ("POST", "/generative_scoring")
    assert routes_of("0.32.0+cpu") == ROUTES
    assert ROUTES.keys() - routes_of("0.31.0").keys() == {scoring}
