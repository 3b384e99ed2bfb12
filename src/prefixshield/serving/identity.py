"""The ASGI middleware that gives every request its tenant's identity, and refuses the rest.

``vllm serve --middleware prefixshield.serving.identity.IdentityMiddleware`` puts it around the
whole application, in front of vLLM's own authentication. A request's API key decides its group
and contract; these enter the body as a namespace token in ``cache_salt`` (`bodies`), and every
other way to name an identity is removed. Which endpoints are served is `routes`' business:
everything that is not listed is answered 403, WebSockets are closed. CORS preflights pass, as
vLLM answers them before it looks at the path. The metrics and the live page (`page`) are for
whoever has the operator's key; without one configured, the metrics are open, as vLLM has them, and
there is no page.

It knows vLLM only by what stands in ``app.state`` when the server starts, and imports nothing
of it. It fails closed: until it has read its configuration, all requests are answered 503.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import json
import logging
import os
import secrets
import signal
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from prefixshield.config import NOBODY, Config, encode_secret
from prefixshield.errors import ConfigError, IncompatibleEngineError, PrefixShieldError
from prefixshield.serving.bodies import InvalidBody, clean, request_tag, rewrite
from prefixshield.serving.catalogue import UNKNOWN_GROUPS
from prefixshield.serving.hooks import installed_vllm
from prefixshield.serving.namespace import Identity, Namespaces
from prefixshield.serving.page import serve_page
from prefixshield.serving.reload import LiveConfig, Tenants
from prefixshield.serving.routes import Access, refusal_reason, route_path, routes_of
from prefixshield.serving.wiring import SCHEDULER, config_path

if TYPE_CHECKING:
    from prometheus_client import Counter as PrometheusCounter

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
Application: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers: TypeAlias = list[tuple[bytes, bytes]]

#: Below vLLM's own logger, so that its handler and format apply.
_logger = logging.getLogger("vllm.prefixshield.identity")

#: Headers by which a client could name a session, a rank, a precedence or an identity ...
_REMOVED_HEADERS = frozenset({b"x-session-id", b"x-vllm-priority", b"x-data-parallel-rank"})
#: ... and beginnings of such: SageMaker's write into the body after us (adapter, session).
_REMOVED_PREFIXES = (b"x-amzn-", b"x-prefixshield")

_CREDENTIALS = frozenset({b"authorization", b"x-api-key"})

_OPERATOR_CHALLENGE = 'Basic realm="PrefixShield operator", charset="UTF-8"'

_POLICY_VIOLATION = 1008  # WebSocket close code, RFC 6455 section 7.4.1


class Refusal(Exception):  # noqa: N818 - an answer to the client, not an error of ours
    """A request that ends here, with its HTTP status and a message for the client."""

    def __init__(
        self, status: int, message: str, param: str | None = None, challenge: str = "Bearer"
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.challenge = challenge
        """How to answer a 401, as WWW-Authenticate says it."""


class KeyRing:
    """The API keys, by a keyed digest: how long a lookup takes shows nothing of a key."""

    def __init__(
        self,
        keys: Mapping[str, tuple[str, str]],
        gateway: str | None = None,
        operator: str | None = None,
    ) -> None:
        """``gateway``: what a gateway that names groups sends; ``operator``: the operator's."""
        self._pepper = secrets.token_bytes(32)
        self._gateway = None if gateway is None else self._digest(encode_secret(gateway))
        self._operator = None if operator is None else self._digest(encode_secret(operator))
        self.has_operator = operator is not None
        self._identities = {
            self._digest(encode_secret(key)): Identity(group, contract)
            for key, (group, contract) in keys.items()
        }

    def find(self, key: bytes) -> Identity | None:
        """The identity of a key; None when it is none of ours."""
        return self._identities.get(self._digest(key))

    def is_gateway(self, key: bytes) -> bool:
        """Whether a key is that of the gateway."""
        return self._gateway is not None and hmac.compare_digest(self._digest(key), self._gateway)

    def is_operator(self, key: bytes) -> bool:
        """Whether a key is the operator's."""
        return self._operator is not None and hmac.compare_digest(self._digest(key), self._operator)

    def _digest(self, key: bytes) -> bytes:
        return hashlib.blake2b(key, key=self._pepper, digest_size=32).digest()


@dataclass(frozen=True)
class Admission:
    """What a version of the configuration says: who may enter, and under which name."""

    config: Config
    keys: KeyRing
    namespaces: Namespaces

    @classmethod
    def of(cls, tenants: Tenants) -> Admission:
        """The same with every key as its digest."""
        keys = KeyRing(tenants.keys, tenants.gateway, tenants.operator)
        return cls(tenants.config, keys, tenants.namespaces)

    def identify(self, headers: Headers) -> tuple[Identity, bytes | None]:
        """Who sends a request, and the key that says so (None: nobody, which is allowed)."""
        given = [(name, value) for name, value in headers if name in _CREDENTIALS]
        if not given:
            if self.config.allow_anonymous:
                return self.namespaces.default, None
            raise Refusal(401, "An API key is needed: send 'Authorization: Bearer KEY'.")
        if len(given) > 1:
            raise Refusal(401, "Exactly one API key is needed, in one header.")
        key = _key(*given[0])
        if self.keys.is_gateway(key):
            return self._named_by_gateway(headers), key
        identity = self.keys.find(key)
        if identity is None:
            raise Refusal(401, "The API key is not known.")
        return identity, key

    def require_operator(self, headers: Headers) -> None:
        """Refuse whoever does not send the operator's key: as a bearer, or as Basic's password."""
        given = [value for name, value in headers if name in _CREDENTIALS]
        if len(given) != 1 or not self.keys.is_operator(_operator_password(given[0])):
            raise Refusal(401, "The operator's key is needed.", challenge=_OPERATOR_CHALLENGE)

    def _named_by_gateway(self, headers: Headers) -> Identity:
        """The group that the gateway names."""
        trusted = self.config.trusted_header
        assert trusted is not None
        named = [value for name, value in headers if name == trusted.name.encode()]
        group = named[0].strip().decode("latin-1") if named else None
        if len(named) < 2 and group in self.config.groups:
            return Identity(group, self.config.groups[group].contract)
        refused = len(named) > 1 or trusted.unknown_group == "refuse"
        _unknown_groups().labels("refused" if refused else "default").inc()
        if refused:
            raise Refusal(403, f"Exactly one known group is needed in the header {trusted.name}.")
        return self.namespaces.default

    @property
    def removed_headers(self) -> frozenset[bytes]:
        """Headers that never reach vLLM."""
        trusted = self.config.trusted_header
        return _REMOVED_HEADERS | ({trusted.name.encode()} if trusted else set())


@cache
def _unknown_groups() -> PrometheusCounter:
    """The one counter of the front end. vLLM decides where it lives before it starts us."""
    from prometheus_client import Counter

    return Counter(UNKNOWN_GROUPS.name, UNKNOWN_GROUPS.definition, UNKNOWN_GROUPS.labels)


class IdentityMiddleware:
    """The middleware; see the module. It must not be wrapped in one that keeps lifespan events."""

    def __init__(self, app: Application) -> None:
        self._app = app
        _, release = installed_vllm()
        self._routes = routes_of(release)
        self._live: LiveConfig | None = None
        self._in_force: tuple[Tenants, Admission] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        match scope["type"]:
            case "http":
                await self._http(scope, receive, send)
            case "lifespan":
                await self._lifespan(scope, receive, send)
            case _:  # WebSockets: their messages could not carry an identity
                await receive()
                await send({"type": "websocket.close", "code": _POLICY_VIOLATION})

    async def _lifespan(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._live = live_config(scope["app"].state, os.environ)
            self._live.watch()
            for outcome in ("refused", "default"):
                _unknown_groups().labels(outcome)  # 0 from the start
        except Exception as error:
            # To raise would not do: uvicorn takes that for a lack of lifespan support, and serves.
            if not isinstance(error, PrefixShieldError):
                _logger.exception("The identity middleware cannot start")
            await receive()
            message = f"PrefixShield does not start: {error}"
            await send({"type": "lifespan.startup.failed", "message": message})
            return
        with suppress(ValueError, RuntimeError, NotImplementedError):  # not in the main thread
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._live.look, True)
        await self._app(scope, receive, send)

    @property
    def _admission(self) -> Admission | None:
        """By the version of the configuration that is in force; None: before the start."""
        if self._live is None:
            return None
        tenants = self._live.current
        if self._in_force is None or self._in_force[0] is not tenants:
            self._in_force = tenants, Admission.of(tenants)
        return self._in_force[1]

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            application, scope, receive = await self._admit(scope, receive)
        except Refusal as refusal:
            await _answer(refusal, send)
        except ClientGone:
            pass  # nobody is left to answer
        else:
            await application(scope, receive, send)

    async def _admit(self, scope: Scope, receive: Receive) -> tuple[Application, Scope, Receive]:
        """Who answers, and the request to hand through instead of the client's.

        Raises:
            Refusal: it must not reach vLLM.
            ClientGone: the client left before its body was here.

        """
        admission = self._admission
        if admission is None:
            raise Refusal(503, "The server is not ready.")
        if _is_preflight(scope):
            return self._app, scope, receive
        path = route_path(scope)
        access = self._routes.get((scope["method"], path))
        if access is None:
            request = f"{scope['method']} {path}"
            raise Refusal(403, f"{request} is not served: {refusal_reason(path)}.")
        harmless = _harmless(scope["headers"], admission.removed_headers)
        if access is Access.OPEN:
            return self._app, {**scope, "headers": harmless}, receive
        if access in (Access.METRICS, Access.PAGE):
            if admission.keys.has_operator:
                admission.require_operator(scope["headers"])
            elif access is Access.PAGE:
                raise Refusal(403, "The live page is not served: no operator_key is configured.")
            harmless = [pair for pair in harmless if pair[0] not in _CREDENTIALS]
            application = serve_page if access is Access.PAGE else self._app
            return application, {**scope, "headers": harmless}, receive
        identity, key = admission.identify(scope["headers"])
        namespaces = admission.namespaces
        headers = _attributed(harmless, key, request_tag(identity, namespaces))
        if access is Access.KEYED:
            return self._app, {**scope, "headers": headers}, receive
        _require_json(headers)
        body = await _read(receive, headers, admission.config.max_body_bytes)
        try:
            if access is Access.REWRITTEN:
                body = rewrite(body, path, identity, namespaces)
            else:
                body = clean(body, identity, namespaces)
        except InvalidBody as error:
            raise Refusal(error.status, str(error), error.param) from None
        headers = _resized(headers, len(body))
        return self._app, {**scope, "headers": headers}, _replay(body, receive)


# Starting


def live_config(state: Any, environ: Mapping[str, str]) -> LiveConfig:
    """Read the configuration, and check that the server is set up as the middleware needs.

    Raises:
        ConfigError: the configuration file is unusable.
        IncompatibleEngineError: an option of the server would leave a way around us.

    """
    vllm_config, args = state.vllm_config, state.args
    path = config_path(vllm_config)
    live = LiveConfig(path)
    config = live.current.config
    _check_scheduler(vllm_config.scheduler_config.scheduler_cls)
    check_server(live.current, path, args, environ)
    _logger.info(
        "PrefixShield: every request gets an identity (%s: %d groups, %d API keys, anonymous %s)",
        path,
        len(config.groups),
        len(live.current.keys),
        f"as {config.default_group}" if config.allow_anonymous else "refused",
    )
    return live


def check_server(tenants: Tenants, path: Path, args: Any, environ: Mapping[str, str]) -> None:
    """Refuse a server that lets requests pass beside the configuration, or nobody in.

    Raises:
        ConfigError: the configuration admits nobody.
        IncompatibleEngineError: an option or a variable of the environment contradicts it.

    """
    _check_front_ends(args, environ)
    if not tenants.config.admits_anybody:
        raise ConfigError(f"{path}: {NOBODY}")
    _check_own_authentication(tenants, path, args, environ)


def _check_scheduler(scheduler: Any) -> None:
    if not isinstance(scheduler, str) and scheduler is not None:
        scheduler = f"{scheduler.__module__}.{scheduler.__qualname__}"
    if scheduler != SCHEDULER:
        raise IncompatibleEngineError(
            f"--scheduler-cls: found {scheduler!r}, expected {SCHEDULER!r}: "
            "identities protect nothing without the scheduler that reads them"
        )


def _check_front_ends(args: Any, environ: Mapping[str, str]) -> None:
    """Refuse the front ends whose requests never pass an ASGI middleware."""
    front_ends = {
        "--grpc": bool(getattr(args, "grpc", False)),
        "--grpc-port": getattr(args, "grpc_port", None) is not None,
        "VLLM_USE_RUST_FRONTEND": environ.get("VLLM_USE_RUST_FRONTEND", "0") not in ("", "0"),
    }
    for option, used in front_ends.items():
        if used:
            raise IncompatibleEngineError(
                f"{option}: found in use, expected not: "
                "requests of that front end do not pass the identity middleware"
            )


def _check_own_authentication(
    tenants: Tenants, path: Path, args: Any, environ: Mapping[str, str]
) -> None:
    """Refuse an ``--api-key`` that would turn away whom the configuration lets in."""
    given = getattr(args, "api_key", None) or [environ.get("VLLM_API_KEY")]
    accepted = {key for key in given if key}
    if not accepted:
        return
    advice = f"--api-key or VLLM_API_KEY: drop it ({path} decides who may enter), or "
    keys = {*tenants.keys, *([tenants.gateway] if tenants.gateway else [])}
    if missing := len(keys - accepted):
        raise IncompatibleEngineError(
            f"{advice}list every key there too: {missing} of {len(keys)} are missing"
        )
    if tenants.config.allow_anonymous:
        raise IncompatibleEngineError(
            f"{advice}set allow_anonymous: false: vLLM would ask for a key"
        )


# Credentials and headers


def _key(name: bytes, value: bytes) -> bytes:
    """The key in a credential header."""
    if name == b"x-api-key":  # what Anthropic's clients send
        return value.strip()
    scheme, _, key = value.strip().partition(b" ")
    if scheme.lower() != b"bearer":
        raise Refusal(401, "The Authorization header must be 'Bearer KEY'.")
    return key.strip()


def _operator_password(value: bytes) -> bytes:
    """The key in an Authorization header, which a browser sends as Basic; empty: there is none."""
    scheme, _, credentials = value.strip().partition(b" ")
    if scheme.lower() == b"bearer":
        return credentials.strip()
    if scheme.lower() != b"basic":
        return b""
    try:
        return base64.b64decode(credentials.strip(), validate=True).partition(b":")[2]
    except binascii.Error:
        return b""


def _harmless(headers: Headers, removed: frozenset[bytes]) -> Headers:
    return [
        (name, value)
        for name, value in headers
        if name not in removed and not name.startswith(_REMOVED_PREFIXES)
    ]


def _attributed(headers: Headers, key: bytes | None, tag: str) -> Headers:
    """Harmless headers under one credential, in the form that vLLM's own check reads.

    A request id that the client chose becomes its group's own: see `request_tag`.
    """
    kept: Headers = []
    for name, value in headers:
        if name == b"x-request-id":
            value = value + b"-" + tag.encode()
        if name not in _CREDENTIALS:
            kept.append((name, value))
    if key is not None:
        kept.append((b"authorization", b"Bearer " + key))
    return kept


def _resized(headers: Headers, length: int) -> Headers:
    framing = {b"content-length", b"transfer-encoding"}
    kept = [(name, value) for name, value in headers if name not in framing]
    return [*kept, (b"content-length", str(length).encode())]


def _is_preflight(scope: Scope) -> bool:
    names = {name for name, _ in scope["headers"]}
    return scope["method"] == "OPTIONS" and {b"origin", b"access-control-request-method"} <= names


# Bodies


class ClientGone(Exception):  # noqa: N818 - an event, not an error
    """The client disconnected before its request was complete."""


def _require_json(headers: Headers) -> None:
    types = [value for name, value in headers if name == b"content-type"]
    media_type = types[0].partition(b";")[0].strip().lower() if len(types) == 1 else b""
    if media_type != b"application/json":
        raise Refusal(415, "The Content-Type must be application/json.")


async def _read(receive: Receive, headers: Headers, limit: int) -> bytes:
    """The whole body, however it is cut into messages; at most ``limit`` bytes."""
    too_large = Refusal(413, f"The body must be at most {limit} bytes.")
    for name, value in headers:
        declared = int(value[:20]) if name == b"content-length" and value.isdigit() else 0
        if declared > limit:
            raise too_large
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        body += message.get("body", b"")
        if len(body) > limit:
            raise too_large
        if not message.get("more_body", False):
            return bytes(body)


def _replay(body: bytes, receive: Receive) -> Receive:
    """A receive that gives the body once, then whatever really happens: the client leaving."""
    pending = [body]

    async def replayed() -> Message:
        if pending:
            return {"type": "http.request", "body": pending.pop(), "more_body": False}
        return await receive()

    return replayed


_ERROR_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    413: "RequestTooLargeError",
    415: "UnsupportedMediaTypeError",
    503: "ServiceUnavailableError",
}


async def _answer(refusal: Refusal, send: Send) -> None:
    """Answer with an error body of OpenAI's form, as vLLM's own errors have it."""
    error = {
        "message": str(refusal),
        "type": _ERROR_TYPES[refusal.status],
        "param": refusal.param,
        "code": refusal.status,
    }
    body = json.dumps({"error": error}).encode("ascii")
    headers: Headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
    ]
    if refusal.status == 401:
        headers.append((b"www-authenticate", refusal.challenge.encode()))
    start = {"type": "http.response.start", "status": refusal.status, "headers": headers}
    await send(start)
    await send({"type": "http.response.body", "body": body})
