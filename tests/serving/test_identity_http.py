"""The identity middleware on the real server: tenants are kept apart, whatever they send.

Seen from outside only: how many tokens of a prompt the prefix cache held. A prompt is 200 tokens
or a few more, of which 192 are whole blocks.
"""

from __future__ import annotations

import http.client
import itertools
import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from vllm_server import BLOCK_SIZE, START_TIMEOUT_S, Server

from prefixshield.config import load_config
from prefixshield.serving.hooks import installed_vllm, release_numbers
from prefixshield.serving.namespace import Identity, Namespaces
from prefixshield.serving.routes import ROUTES, Access, routes_of

httpx = pytest.importorskip("httpx")

pytestmark = pytest.mark.engine

CONFIG = """
policy: shield
contracts:
  standard: {refill_rate: 40, burst: 192}
  critical: {refill_rate: 64, burst: 256}
groups:
  alpha: {contract: standard, keys: [alpha-key, {value: alpha-critical-key, contract: critical}]}
  beta: {contract: standard, keys: [beta-key]}
default_group: beta
"""
KEYS = ("alpha-key", "alpha-critical-key", "beta-key")

PROMPT_TOKENS = 200
WHOLE_BLOCKS_TOKENS = PROMPT_TOKENS // BLOCK_SIZE * BLOCK_SIZE
PATIENCE_S = 180
ORIGIN = "https://a.example"

#: Paths and options that earlier releases of vLLM do not have, and the first one that does.
SINCE = {
    "/v1/messages/render": "0.29.0",
    "--enable-scale-out": "0.30.0",
    "/v1/systemone": "0.32.0",
    "/generative_scoring": "0.32.0",  # refused before: it carries no cache_salt
}

_fresh = itertools.count()


def exists(name: str) -> bool:
    """Whether the installed vLLM has a path or an option."""
    _, release = installed_vllm()
    return release_numbers(release) >= release_numbers(SINCE.get(name, "0"))


def fresh_prompt() -> str:
    """A prompt whose first block no other prompt of this module has."""
    number = next(_fresh)
    words = [number // 1000, number % 1000, *range(PROMPT_TOKENS - 2)]
    return " ".join(f"w{word}" for word in words)


@dataclass(frozen=True)
class Endpoint:
    """How an endpoint is asked about one prompt."""

    path: str
    body: Callable[[str], dict[str, Any]]
    name: str

    def __str__(self) -> str:
        return self.name


def _chat(prompt: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": prompt}]


def _ids(prompt: str) -> list[int]:
    return [int(word[1:]) + 9 for word in prompt.split()]


GENERATING = [
    Endpoint("/v1/completions", lambda p: {"prompt": p, "max_tokens": 2}, "completions"),
    Endpoint(
        "/v1/completions", lambda p: {"prompt": [_ids(p)], "max_tokens": 2}, "completions-tokens"
    ),
    Endpoint(
        "/v1/completions",
        lambda p: {"prompt": p, "max_tokens": 2, "n": 2, "use_beam_search": True, "temperature": 0},
        "completions-beam-search",
    ),
    Endpoint("/v1/chat/completions", lambda p: {"messages": _chat(p), "max_tokens": 2}, "chat"),
    Endpoint(
        "/v1/chat/completions",
        lambda p: {
            "messages": [{"role": "user", "content": [{"type": "text", "text": p}]}],
            "max_tokens": 2,
            "stream": True,
        },
        "chat-stream",
    ),
    Endpoint(
        "/v1/chat/completions/batch",
        lambda p: {"messages": [_chat(p)], "max_tokens": 2},
        "chat-batch",
    ),
    Endpoint("/v1/responses", lambda p: {"input": p, "max_output_tokens": 2}, "responses"),
    Endpoint("/v1/messages", lambda p: {"messages": _chat(p), "max_tokens": 2}, "messages"),
    Endpoint(
        "/inference/v1/generate",
        lambda p: {"token_ids": _ids(p), "sampling_params": {"max_tokens": 2}},
        "generate",
    ),
    Endpoint("/invocations", lambda p: {"messages": _chat(p), "max_tokens": 2}, "invocations-chat"),
    Endpoint("/invocations", lambda p: {"prompt": p, "max_tokens": 2}, "invocations-completion"),
    Endpoint(
        "/generative_scoring",
        lambda p: {"query": p, "items": ["w1"], "label_token_ids": [10, 11]},
        "generative-scoring",
    ),
    Endpoint(
        "/v1/systemone",
        lambda p: {"state": p, "questions": {"q": {"type": "noul", "instructions": "w1"}}},
        "systemone",
    ),
]

EMBEDDING = [
    Endpoint("/v1/embeddings", lambda p: {"input": p}, "embeddings"),
    Endpoint("/v1/embeddings", lambda p: {"messages": _chat(p)}, "embeddings-chat"),
    Endpoint("/v1/embeddings", lambda p: {"input": [_ids(p)]}, "embeddings-tokens"),
    Endpoint("/pooling", lambda p: {"input": p}, "pooling"),
    Endpoint("/score", lambda p: {"text_1": "w1", "text_2": p}, "score"),
    Endpoint("/v1/score", lambda p: {"queries": "w1", "documents": [p]}, "v1-score"),
    Endpoint("/rerank", lambda p: {"query": "w1", "documents": [p]}, "rerank"),
    Endpoint("/v1/rerank", lambda p: {"query": "w1", "documents": [p]}, "v1-rerank"),
    Endpoint("/v2/rerank", lambda p: {"query": "w1", "documents": [p]}, "v2-rerank"),
    Endpoint("/invocations", lambda p: {"input": p}, "invocations-embedding"),
]

CLASSIFYING = [
    Endpoint("/classify", lambda p: {"input": p}, "classify"),
    Endpoint("/invocations", lambda p: {"input": p}, "invocations-classification"),
]


class Tenants:
    """A server as its tenants see it, one request at a time."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self._http = httpx.Client(base_url=server.base_url, timeout=PATIENCE_S)

    def post(self, key: str, path: str, body: Any, headers: dict[str, str] | None = None) -> Any:
        raw = body if isinstance(body, bytes) else json.dumps({"model": "tiny", **body}).encode()
        all_headers = {
            "Authorization": f"Bearer {key}",
            "Content-Type": "application/json",
            **(headers or {}),
        }
        return self._http.post(path, content=raw, headers=all_headers)

    def get(self, path: str, key: str | None = None) -> Any:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return self._http.get(path, headers=headers)

    def ask(
        self,
        key: str,
        endpoint: Endpoint,
        prompt: str,
        headers: dict[str, str] | None = None,
        **fields: Any,
    ) -> int:
        """Send one prompt and return how many of its tokens the prefix cache held."""
        body = _merged(endpoint.body(prompt), fields)
        return self.hits_of(lambda: self.post(key, endpoint.path, body, headers))

    def hits_of(self, request: Callable[[], Any]) -> int:
        queries, hits = self._counters()
        response = request()
        assert response.status_code == 200, response.text
        # The counters are brought up to date by the engine's loop, not by the answer.
        after = self.wait_for(lambda: self._counters(), lambda c: c[0] >= queries + PROMPT_TOKENS)
        return int(after[1] - hits)

    def _counters(self) -> tuple[float, float]:
        return self.metric("vllm:prefix_cache_queries"), self.metric("vllm:prefix_cache_hits")

    def metric(self, name: str, labels: str = "") -> float:
        text = self.get("/metrics").text
        pattern = rf"^{name}(?:_total)?\{{[^}}]*{labels}[^}}]*\}} (\S+)$"
        return sum(float(value) for value in re.findall(pattern, text, re.MULTILINE))

    def wait_for(self, observe: Callable[[], Any], enough: Callable[[Any], bool]) -> Any:
        deadline = time.monotonic() + PATIENCE_S
        while not enough(seen := observe()):
            assert time.monotonic() < deadline, f"{seen}\n{self.server.log_tail()}"
            time.sleep(0.02)
        return seen


def _merged(body: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    merged = {**body, **fields}
    for name in body.keys() & fields.keys():
        if isinstance(body[name], dict) and isinstance(fields[name], dict):
            merged[name] = {**body[name], **fields[name]}
    return merged


@pytest.fixture(scope="session")
def identity_config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("identity") / "shield.yaml"
    path.write_text(CONFIG, encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def alpha_token(identity_config: Path) -> str:
    """What alpha's requests carry inside; assume that beta got to know it."""
    config = load_config(identity_config)
    return Namespaces.of(config, identity_config).token(Identity("alpha", "standard"))


@pytest.fixture(scope="module")
def generating(start_server: Any, tiny_qwen3: Path, identity_config: Path) -> Tenants:
    """With every endpoint switched on that could be a way around."""
    env = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ENABLE_RESPONSES_API_STORE": "1"}
    extra = ["--enable-tokenizer-info-endpoint", "--allowed-origins", json.dumps([ORIGIN])]
    if exists("--enable-scale-out"):
        extra.append("--enable-scale-out")
    return Tenants(start_server(tiny_qwen3, identity_config, extra, env))


@pytest.fixture(scope="module")
def embedding(start_server: Any, tiny_model: Path, identity_config: Path) -> Tenants:
    """Behind vLLM's own authentication, too."""
    extra = ["--runner", "pooling", "--convert", "embed", "--api-key", *KEYS]
    return Tenants(start_server(tiny_model, identity_config, extra))


@pytest.fixture(scope="module")
def classifying(start_server: Any, tiny_classifier: Path, identity_config: Path) -> Tenants:
    return Tenants(start_server(tiny_classifier, identity_config, ["--runner", "pooling"]))


ENDPOINTS = [
    *(
        pytest.param("generating", endpoint, id=str(endpoint))
        for endpoint in GENERATING
        if exists(endpoint.path)
    ),
    *(pytest.param("embedding", endpoint, id=str(endpoint)) for endpoint in EMBEDDING),
    *(pytest.param("classifying", endpoint, id=str(endpoint)) for endpoint in CLASSIFYING),
]


@pytest.fixture
def tenants(request: pytest.FixtureRequest, server: str) -> Tenants:
    found: Tenants = request.getfixturevalue(server)
    return found


@pytest.mark.parametrize(("server", "endpoint"), ENDPOINTS)
def test_tenants_do_not_share_blocks(tenants: Tenants, endpoint: Endpoint) -> None:
    prompt = fresh_prompt()
    cold = tenants.ask("alpha-key", endpoint, prompt)
    # Beam search and the like may hit within one request; what counts is what others left.
    assert tenants.ask("beta-key", endpoint, prompt) == cold
    warm = tenants.ask("alpha-key", endpoint, prompt)
    assert warm >= cold + WHOLE_BLOCKS_TOKENS
    assert tenants.ask("beta-key", endpoint, prompt) == warm
    # The contract decides who pays, not whose blocks they are.
    assert tenants.ask("alpha-critical-key", endpoint, prompt) == warm
    # A client's own salt divides its namespace, and reaches no other's.
    assert tenants.ask("alpha-key", endpoint, prompt, cache_salt="mine") == cold
    assert tenants.ask("alpha-key", endpoint, prompt, cache_salt="mine") == warm
    assert tenants.ask("beta-key", endpoint, prompt, cache_salt="mine") == cold


FORGED_HEADERS = {
    "X-Session-ID": "alpha",
    "X-Vllm-Priority": "-1",
    "X-data-parallel-rank": "0",
    "X-Request-Id": "alpha",
    "X-PrefixShield-Group": "alpha",
    "X-PrefixShield-Contract": "critical",
    "X-Amzn-SageMaker-Custom-Attributes": "cache_salt=alpha",
}


def forgeries(token: str) -> Iterator[tuple[str, dict[str, Any], dict[str, str]]]:
    """(what is forged, fields, headers) that all try to speak for the owner of the token."""
    named = {
        "cache_salt": token,
        "prefixshield_group": "alpha",
        "prefixshield_contract": "critical",
        "session_id": "alpha",
        "priority": -1,
    }
    yield "token", {"cache_salt": token}, {}
    yield "head", {"cache_salt": token.partition(".")[0]}, {}
    yield "group", {"cache_salt": "alpha"}, {}
    yield "xargs", {"vllm_xargs": dict(named)}, {}
    yield "extra_args", {"extra_args": dict(named)}, {}
    yield "sampling_params", {"sampling_params": {**named, "extra_args": dict(named)}}, {}
    yield "user", {"user": "alpha", "metadata": {"cache_salt": token}, "request_id": "alpha"}, {}
    yield "priority", {"priority": -1, "session_id": "alpha", "kv_transfer_params": {}}, {}
    yield "headers", {}, FORGED_HEADERS


@pytest.mark.parametrize(("server", "endpoint"), ENDPOINTS)
def test_no_field_or_header_reaches_another_tenants_blocks(
    tenants: Tenants, endpoint: Endpoint, alpha_token: str
) -> None:
    for name, fields, headers in forgeries(alpha_token):
        prompt = fresh_prompt()
        cold = tenants.ask("alpha-key", endpoint, prompt)
        warm = tenants.ask("alpha-key", endpoint, prompt)
        assert warm >= cold + WHOLE_BLOCKS_TOKENS
        assert tenants.ask("beta-key", endpoint, prompt, headers, **fields) == cold, name
        # The blocks went where beta's always go, and its like-named salts.
        salt = {"cache_salt": fields["cache_salt"]} if "cache_salt" in fields else {}
        assert tenants.ask("beta-key", endpoint, prompt, **salt) == warm, name


COMPLETIONS = GENERATING[0]


def raw_post(
    tenants: Tenants, path: str, body: bytes | None, headers: list[tuple[str, str]]
) -> http.client.HTTPResponse:
    """A request that no client library tidies up."""
    host = tenants.server.base_url.removeprefix("http://")
    connection = http.client.HTTPConnection(host, timeout=PATIENCE_S)
    connection.putrequest("POST", path)
    length = [] if body is None else [("Content-Length", str(len(body)))]
    for header in (*headers, *length):
        connection.putheader(*header)
    connection.endheaders(body)
    response = connection.getresponse()
    response.read()
    return response


JSON = ("Content-Type", "application/json")


@pytest.mark.parametrize(
    "path",
    [
        "//v1/completions",
        "/v1/completions/",
        "/v1/./completions",
        "/v1/../v1/completions",
        "/v1/%2e%2e/v1/completions",
        "/%2e/v1/completions",
        "/V1/completions",
        "/v1/completions%0A",
        "/v1/completions%00",
        "/v1%2Fcompletions",
        "/v1/%63ompletions",
        "/health/../v1/completions",
        "/metrics/../v1/completions",
        "/v1/completions?key=alpha-key",
        "/v1/completions;cache_salt=x",
        "http://127.0.0.1/v1/completions",
    ],
)
def test_tricks_with_the_path(generating: Tenants, path: str) -> None:
    """Refused, or served as what it is: beta's own request, and nobody's without a key."""
    prompt = fresh_prompt()
    generating.ask("alpha-key", COMPLETIONS, prompt)
    body = json.dumps({"model": "tiny", **COMPLETIONS.body(prompt)}).encode()
    assert raw_post(generating, path, body, [JSON]).status in (401, 403)
    hits = generating.metric("vllm:prefix_cache_hits")
    headers = [JSON, ("Authorization", "Bearer beta-key")]
    status = raw_post(generating, path, body, headers).status
    assert status in (200, 403)
    # Beta has the prompt now if it was served; either way alpha's blocks were not touched.
    again = generating.ask("beta-key", COMPLETIONS, prompt)
    assert again == (WHOLE_BLOCKS_TOKENS if status == 200 else 0)
    assert generating.metric("vllm:prefix_cache_hits") == hits + again


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [("Authorization", "Bearer nobody")],
        [("Authorization", "Bearer alpha-key"), ("Authorization", "Bearer beta-key")],
        [("Authorization", "Bearer beta-key"), ("x-api-key", "alpha-key")],
        [("authorization", "Bearer beta-key"), ("AUTHORIZATION", "Bearer beta-key")],
    ],
)
def test_credentials_on_the_wire(generating: Tenants, headers: list[tuple[str, str]]) -> None:
    body = b'{"model": "tiny", "prompt": "w1", "max_tokens": 1}'
    assert raw_post(generating, "/v1/completions", body, [JSON, *headers]).status == 401


def test_a_key_in_the_header_of_anthropics_clients(generating: Tenants, embedding: Tenants) -> None:
    body = b'{"model": "tiny", "messages": [{"role": "user", "content": "w1"}], "max_tokens": 1}'
    headers = [JSON, ("x-api-key", "alpha-key")]
    assert raw_post(generating, "/v1/messages", body, headers).status == 200
    # vLLM's own check reads only Authorization.
    body = b'{"model": "tiny", "input": "w1"}'
    assert raw_post(embedding, "/v1/embeddings", body, headers).status == 200


def test_duplicate_and_escaped_names(generating: Tenants, alpha_token: str) -> None:
    for name in ("cache_salt", "cache\\u005fsalt", "\\u0063ache_salt"):
        prompt = fresh_prompt()
        generating.ask("alpha-key", COMPLETIONS, prompt)
        text = json.dumps({"model": "tiny", **COMPLETIONS.body(prompt)})
        twice = f'{{"cache_salt": "x", "{name}": "{alpha_token}", {text[1:]}'.encode()
        assert (
            generating.hits_of(lambda b=twice: generating.post("beta-key", COMPLETIONS.path, b))
            == 0
        )


def test_a_chunked_upload(generating: Tenants) -> None:
    prompt = fresh_prompt()
    generating.ask("alpha-key", COMPLETIONS, prompt)
    body = json.dumps({"model": "tiny", **COMPLETIONS.body(prompt)}).encode()

    def pieces() -> Iterator[bytes]:
        for start in range(0, len(body), 100):
            yield body[start : start + 100]

    def send() -> Any:
        headers = {"Authorization": "Bearer beta-key", "Content-Type": "application/json"}
        url = generating.server.base_url + COMPLETIONS.path
        return httpx.post(url, content=pieces(), headers=headers, timeout=PATIENCE_S)

    assert generating.hits_of(send) == 0
    assert generating.hits_of(send) == WHOLE_BLOCKS_TOKENS


def test_a_client_that_leaves_mid_stream_ends_its_request(generating: Tenants) -> None:
    """On a busy machine the engine may be through before the server notices: it may try again."""
    assert any(leaves_early(generating) for _ in range(20))


def leaves_early(generating: Tenants) -> bool:
    """Whether a request ended before its time when its client had left."""
    generated = generating.metric("vllm:generation_tokens")
    body = {"model": "tiny", "prompt": "w1", "max_tokens": 2000, "ignore_eos": True}
    url = generating.server.base_url + "/v1/completions"
    headers = {"Authorization": "Bearer alpha-key"}
    with httpx.stream("POST", url, json={**body, "stream": True}, headers=headers) as response:
        next(response.iter_lines())
    # The gauge changes only when something runs: have a short request run as well.
    short = {"prompt": "w2", "max_tokens": 1}

    def running() -> float:
        assert generating.post("alpha-key", "/v1/completions", short).status_code == 200
        return generating.metric("vllm:num_requests_running")

    generating.wait_for(running, lambda number: number == 0)
    return generating.metric("vllm:generation_tokens") < generated + body["max_tokens"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "w1 w2"}),
        ("/tokenize", {"messages": _chat("w1 w2")}),
        ("/detokenize", {"tokens": [10, 11]}),
        ("/v1/messages/count_tokens", {"messages": _chat("w1 w2")}),
        ("/v1/chat/completions/render", {"messages": _chat("w1 w2"), "cache_salt": "mine"}),
        ("/v1/completions/render", {"prompt": "w1 w2", "cache_salt": "mine"}),
        ("/v1/messages/render", {"messages": _chat("w1"), "max_tokens": 1, "cache_salt": "mine"}),
    ],
)
def test_endpoints_without_engine_requests(
    generating: Tenants, alpha_token: str, path: str, body: dict[str, Any]
) -> None:
    if not exists(path):
        pytest.skip(f"{path} is of a later vLLM")
    queries = generating.metric("vllm:prefix_cache_queries")
    response = generating.post("alpha-key", path, body)
    assert response.status_code == 200, response.text
    assert generating.metric("vllm:prefix_cache_queries") == queries
    assert alpha_token.partition(".")[0] not in response.text
    if "cache_salt" in body:
        assert '"cache_salt":"mine"' in response.text


def test_a_body_over_the_limit_is_refused_by_its_length_alone(generating: Tenants) -> None:
    headers = [JSON, ("Authorization", "Bearer alpha-key"), ("Content-Length", "1000000000")]
    assert raw_post(generating, "/v1/completions", None, headers).status == 413


def test_stored_responses_cannot_be_read(generating: Tenants) -> None:
    """The server stores them (VLLM_ENABLE_RESPONSES_API_STORE), but not through us."""
    body = {"input": "w1", "max_output_tokens": 1, "store": True, "request_id": "resp_known"}
    created = generating.post("alpha-key", "/v1/responses", body).json()
    for key in ("alpha-key", "beta-key"):
        assert generating.get(f"/v1/responses/{created['id']}", key).status_code == 403
        continued = {"input": "w1", "previous_response_id": created["id"]}
        assert generating.post(key, "/v1/responses", continued).status_code == 400
    background = {"input": "w1", "background": True}
    assert generating.post("alpha-key", "/v1/responses", background).status_code == 400


def served_routes(server: Server) -> set[tuple[str, str]]:
    """What the server itself says it serves, in its log."""
    text = server.log_path.read_text(encoding="utf-8", errors="replace")
    routes = re.findall(r"Route: (\S+), Methods: (.+)$", text, re.MULTILINE)
    return {(method, path) for path, methods in routes for method in methods.split(", ")}


@pytest.mark.parametrize("server", ["generating", "embedding", "classifying"])
def test_no_route_of_the_server_is_open_by_oversight(tenants: Tenants) -> None:
    routes = served_routes(tenants.server)
    assert ("POST", "/invocations") in routes
    for method, path in sorted(routes):
        path = re.sub(r"\{.*?\}", "x", path)
        url = tenants.server.base_url + path
        access = routes_of(installed_vllm()[1]).get((method, path))
        expected = {None: {403}, Access.OPEN: {200}, Access.METRICS: {200}}.get(access, {401})
        assert httpx.request(method, url).status_code in expected, (method, path)
        if access is None:
            headers = {"Authorization": "Bearer alpha-key"}
            response = httpx.request(method, url, headers=headers, json={})
            assert response.status_code == 403, (method, path)


def test_listed_routes_exist() -> None:
    """A renamed endpoint is noticed: vLLM has all the paths that we list, in some set-up."""
    pytest.importorskip("vllm")
    import vllm.entrypoints

    root = Path(vllm.entrypoints.__path__[0])
    text = "\n".join(path.read_text(encoding="utf-8") for path in root.rglob("*.py"))
    listed = {path for (_, path), access in ROUTES.items() if access is not Access.PAGE}
    for path in filter(exists, listed):
        assert f'"{path.rstrip("/")}"' in text, path


@pytest.mark.parametrize("path", ["/v1/realtime", "/v1/completions", "/health"])
def test_websockets_are_refused(generating: Tenants, path: str) -> None:
    headers = {
        "Authorization": "Bearer alpha-key",
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
    }
    assert httpx.get(generating.server.base_url + path, headers=headers).status_code == 403


def test_preflights_are_answered(generating: Tenants) -> None:
    headers = {"Origin": ORIGIN, "Access-Control-Request-Method": "POST"}
    url = generating.server.base_url + "/v1/completions"
    response = httpx.options(url, headers=headers)
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == ORIGIN


def test_without_our_scheduler_the_server_does_not_start(
    launch_server: Any, tiny_model: Path, identity_config: Path
) -> None:
    """Half a hook would promise what it does not keep."""
    native = ["--scheduler-cls", "vllm.v1.core.sched.scheduler.Scheduler"]
    server: Server = launch_server(tiny_model, identity_config, native)
    code = server.process.wait(timeout=START_TIMEOUT_S)
    log = server.log_path.read_text(encoding="utf-8", errors="replace")
    assert code != 0, log
    assert log.count("PrefixShield does not start: --scheduler-cls: found") == 1
    assert "Application startup complete" not in log
