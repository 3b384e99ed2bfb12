"""How a request's JSON body is made to carry its tenant's identity and no other.

vLLM gets exactly what was parsed and checked here, written anew: a name given twice, escapes
and odd encodings cannot mean one thing to us and another to vLLM.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from prefixshield.serving.namespace import Identity, Namespaces
from prefixshield.serving.wiring import PREFIX_ID_KEY

#: Fields that vLLM or a connector reads as an order of precedence or as another identity.
_REMOVED = frozenset(
    {
        "priority",
        "session_id",
        "kv_transfer_params",
        "ec_transfer_params",
        "requestType",  # opens and closes SageMaker sessions on /invocations
    }
)

#: Objects inside a body whose entries vLLM reads like top-level fields.
_CONTAINERS = (
    ("vllm_xargs",),
    ("extra_args",),
    ("sampling_params",),
    ("sampling_params", "extra_args"),
)

#: Fields that hold messages or media; a ``uuid`` in them names an item of vLLM's media cache.
_MEDIA_FIELDS = (
    "messages",
    "input",
    "content_parts",
    "query",
    "queries",
    "documents",
    "items",
    "data_1",
    "data_2",
    "text_1",
    "text_2",
)

#: Fields that would reach what another tenant left behind, by endpoint: (field, reason).
_REFUSED: Mapping[str, tuple[tuple[str, str], ...]] = {
    "/v1/responses": (
        ("previous_response_id", "stored responses are not divided by tenant; send the messages"),
        ("background", "background responses are stored, and those are not divided by tenant"),
    ),
    "/inference/v1/generate": (
        ("features", "media hashes name items of a cache that tenants share; use content_parts"),
    ),
}

#: Fields whose value is not the client's choice, by endpoint.
_FORCED: Mapping[str, Mapping[str, Any]] = {"/v1/responses": {"store": False}}

#: vLLM's own limits on a cache_salt (entrypoints/generate/base/protocol.py, 0.32.0).
_SALT_MAX_CHARACTERS = 128
_SALT_FORBIDDEN = frozenset("@/\\\x00")


#: Objects and lists inside each other, at most: far more than schemas of tools need, and fewer than
#: any parser behind us stumbles over.
MAX_NESTING = 100

#: A string, also one that does not end.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


class InvalidBody(Exception):  # noqa: N818 - an answer to the client, not an error of ours
    """A body that is refused; ``param`` is the field at fault, None for all of it."""

    def __init__(self, message: str, param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param = param
        self.status = status


def rewrite(body: bytes, path: str, identity: Identity, namespaces: Namespaces) -> bytes:
    """The body to send to vLLM instead of the client's, with its tenant's ``cache_salt``.

    Raises:
        InvalidBody: it is no JSON object, or asks for something that is not allowed.

    """
    fields = _parse(body)
    for field, reason in _REFUSED.get(path, ()):
        if fields.get(field):
            raise InvalidBody(f"{field!r} is not allowed: {reason}.", field)
    salt = _client_salt(fields.get("cache_salt"))
    _attribute(fields, identity, namespaces)
    fields.update(_FORCED.get(path, {}))
    fields["cache_salt"] = namespaces.token(identity, salt)
    return _serialise(fields)


def clean(body: bytes, identity: Identity, namespaces: Namespaces) -> bytes:
    """The same for an endpoint without engine requests: the client's ``cache_salt`` stays its own.

    The render endpoints give it back to the client, for a request that will be rewritten.
    """
    fields = _parse(body)
    _attribute(fields, identity, namespaces)
    return _serialise(fields)


def _attribute(fields: dict[str, Any], identity: Identity, namespaces: Namespaces) -> None:
    """Remove what names another identity; make what the client named its group's own."""
    _remove(fields, _REMOVED)
    for names in _CONTAINERS:
        _clean_container(_container(fields, names))
    _scope_media(fields, identity, namespaces)
    if isinstance(request_id := fields.get("request_id"), str):
        fields["request_id"] = f"{request_id}-{request_tag(identity, namespaces)}"


def _serialise(fields: dict[str, Any]) -> bytes:
    # Pure ASCII: escapes keep lone surrogates, which no encoding could.
    return json.dumps(fields, separators=(",", ":")).encode("ascii")


def request_tag(identity: Identity, namespaces: Namespaces) -> str:
    """What is appended to a request id that a client chose, the same for a whole group.

    vLLM aborts requests and finds cached late-interaction queries by such ids.
    """
    return _scoped("request id", identity, namespaces)


def _scoped(name: str, identity: Identity, namespaces: Namespaces) -> str:
    """A name that only the identity's group can produce: the tail of a namespace token."""
    return namespaces.token(identity, name).partition(".")[2]


def _parse(body: bytes) -> dict[str, Any]:
    if _is_deep(body):
        message = f"The body must not be nested more than {MAX_NESTING} levels deep."
        raise InvalidBody(message, status=413)
    try:
        fields = json.loads(body.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise InvalidBody("The body is not valid UTF-8.") from None
    except ValueError as error:  # malformed, or an integer of more than 4,300 digits
        raise InvalidBody(f"The body is not valid JSON: {error}.") from None
    if not isinstance(fields, dict):
        raise InvalidBody("The body must be a JSON object.")
    return fields


def _is_deep(body: bytes) -> bool:
    """Whether objects and lists stand inside each other beyond the limit; any bytes will do."""
    if body.count(b"[") + body.count(b"{") <= MAX_NESTING:
        return False
    depth = 0
    for bracket in _STRING.sub(b"", body).translate(None, _NOT_BRACKETS):
        depth += 1 if bracket in b"[{" else -1
        if depth > MAX_NESTING:
            return True
    return False


def _client_salt(salt: Any) -> str:
    """The client's own division of its namespace; none is the empty string."""
    if salt is None:
        return ""
    if not isinstance(salt, str) or not salt:
        raise InvalidBody("'cache_salt' must be a non-empty string or null.", "cache_salt")
    if len(salt) > _SALT_MAX_CHARACTERS or not _SALT_FORBIDDEN.isdisjoint(salt):
        raise InvalidBody(
            f"'cache_salt' must be at most {_SALT_MAX_CHARACTERS} characters and must not contain "
            "'@', '/', '\\' or NUL.",
            "cache_salt",
        )
    return salt


def _container(fields: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """The object at a path of names; an empty one when it is absent or null."""
    found: Any = fields
    for name in names:
        found = found.get(name)
        if found is None:
            return {}
        if not isinstance(found, dict):
            raise InvalidBody(f"'{'.'.join(names)}' must be an object or null.", names[0])
    return found  # type: ignore[no-any-return]


def _clean_container(container: dict[str, Any]) -> None:
    ours = {name for name in container if name.startswith("prefixshield")} - {PREFIX_ID_KEY}
    _remove(container, _REMOVED | {"cache_salt"} | ours)


def _remove(fields: dict[str, Any], names: frozenset[str]) -> None:
    for name in names:
        fields.pop(name, None)


def _scope_media(fields: dict[str, Any], identity: Identity, namespaces: Namespaces) -> None:
    """Give every name that a client gave to a medium to its group alone."""
    for field in _MEDIA_FIELDS:
        for item in _objects(fields.get(field)):
            if item.get("uuid") is not None:
                item["uuid"] = _scoped(str(item["uuid"]), identity, namespaces)


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    """Every object in nested lists, and in the ``content`` of such an object."""
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, list):
            pending.extend(item)
        elif isinstance(item, dict):
            yield item
            pending.append(item.get("content"))
