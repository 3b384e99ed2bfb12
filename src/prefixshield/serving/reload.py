"""The configuration file while the server runs: read again when it changes.

The scheduler and the middleware, each in its own process, watch the same file. What they make of a
version of it depends on its content and on what they started with alone, not on the versions
in between, so they come to the same decision. A version that cannot be used is refused with one
message in the log, and what was in force stays in force.

A thread looks, because an idle engine does nothing by itself and would miss versions, and because
a long file takes longer to read than a step of the engine takes.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from prefixshield.config import (
    NOBODY,
    Config,
    gateway_secret,
    namespace_secret,
    operator_key,
    parse_config,
    read_config,
    resolve_keys,
)
from prefixshield.errors import ConfigError
from prefixshield.policies.static_quota import StaticQuota
from prefixshield.serving.namespace import Namespaces

# Below "vllm", whose logging configuration shows it.
_log = logging.getLogger("vllm.prefixshield")

#: Seconds between two looks at the file.
INTERVAL_S = 1.0

#: Seconds for which a file has been left alone when it is read: its writer may not be done before.
SETTLED_S = 1.0

#: A line in the log names so many contracts or groups.
MAX_NAMES = 10

#: What the pool, the policy and the namespaces were built from.
_FIXED = ("policy", "preset", "namespace_secret")


class Tenants(NamedTuple):
    """What a version of the file says."""

    config: Config
    keys: Mapping[str, tuple[str, str]]
    """API key → (group, contract)."""
    gateway: str | None
    """What a gateway that names groups sends as its key."""
    operator: str | None
    """The operator's key."""
    namespaces: Namespaces


class LiveConfig:
    """The version of the file that is in force."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError when the file cannot be used."""
        self.path = path
        self._stamp = self._stamp_now()
        content = read_config(path)
        config = parse_config(content, path)
        self._first = config
        self._secret = namespace_secret(config, path)
        self._digest = _digest(content)
        self._refused_digest = b""
        self._lock = threading.Lock()
        self.current = self._tenants(config)
        """Replaced as a whole, at any time."""
        self.accepted = 0
        """Versions accepted since the start."""
        self.refused = 0
        """Versions refused since the start."""
        self._stopped = threading.Event()

    def watch(self) -> None:
        """Look at the file from time to time while this object lives, or until ``stop``."""
        arguments = weakref.ref(self), self._stopped
        watcher = threading.Thread(
            target=_watch, args=arguments, name="prefixshield-reload", daemon=True
        )
        watcher.start()

    def stop(self) -> None:
        """What is in force stays in force, whatever becomes of the file."""
        with self._lock:
            self._stopped.set()

    def look(self, at_once: bool = False) -> None:
        """Put the file in force if it is another version; ``at_once``: even if just written."""
        with self._lock:
            if self._stopped.is_set():
                return
            stamp = self._stamp_now()
            if stamp == self._stamp:
                return
            if stamp is not None and not at_once and abs(time.time() - stamp[0] / 1e9) < SETTLED_S:
                return
            self._stamp = stamp
            self._read()

    def _stamp_now(self) -> tuple[int, int, int] | None:
        try:
            found = self.path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_ino, found.st_size

    def _read(self) -> None:
        digest = b""
        try:
            content = read_config(self.path)
            digest = _digest(content)
            if digest == self._refused_digest:
                return
            self._refused_digest = b""
            if digest == self._digest:
                return
            config = parse_config(content, self.path)
            self._check(config)
            now = self._tenants(config)
        except ConfigError as error:
            self._refused_digest = digest
            self.refused += 1
            _log.error("PrefixShield: what was in force stays in force: %s", error)
            return
        was, self.current = self.current, now
        self._digest = digest
        self.accepted += 1
        _log.info("PrefixShield: %s was read again: %s", self.path, _changes(was, now))

    def _tenants(self, config: Config) -> Tenants:
        keys, gateway = resolve_keys(config, self.path), gateway_secret(config, self.path)
        operator = operator_key(config, self.path)
        return Tenants(config, keys, gateway, operator, Namespaces(config, self._secret))

    def _check(self, config: Config) -> None:
        """Refuse what cannot change while the server runs."""
        problems = [
            f"{name}: has changed, expected as at the start: restart the server to change it"
            for name in _FIXED
            if getattr(config, name) != getattr(self._first, name)
        ]
        if config.policy == StaticQuota.name and set(config.groups) != set(self._first.groups):
            problems.append(
                f"groups: have changed, expected as at the start: the policy {config.policy} has "
                "divided the pool among them; restart the server to change them"
            )
        if self._first.admits_anybody and not config.admits_anybody:
            problems.append(NOBODY)
        if problems:
            raise ConfigError("\n".join(f"{self.path}: {line}" for line in problems))


def _watch(reference: weakref.ref[LiveConfig], stopped: threading.Event) -> None:
    while not stopped.wait(INTERVAL_S) and (live := reference()) is not None:
        try:
            live.look()
        except Exception:  # the next version may do better
            _log.exception("PrefixShield: %s cannot be read again", live.path)
        del live


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


def _changes(was: Tenants, now: Tenants) -> str:
    """What differs, by name; of keys only how many."""
    old, new = was.config, now.config
    said = [
        *_difference("contracts", old.contracts, new.contracts),
        *_difference("groups", _contracts_of(old), _contracts_of(new)),
    ]
    added, removed = now.keys.keys() - was.keys.keys(), was.keys.keys() - now.keys.keys()
    if added or removed:
        said.append(f"API keys: {len(added)} added, {len(removed)} removed")
    said += [
        f"{name} changed"
        for name in type(new).model_fields
        if name not in ("contracts", "groups") and getattr(old, name) != getattr(new, name)
    ]
    return "; ".join(said) or "nothing changed"


def _contracts_of(config: Config) -> dict[str, str]:
    return {name: group.contract for name, group in config.groups.items()}


def _difference(what: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    names = {
        "added": [name for name in new if name not in old],
        "removed": [name for name in old if name not in new],
        "changed": [name for name in new if name in old and new[name] != old[name]],
    }
    return [f"{what} {how}: {_first(named)}" for how, named in names.items() if named]


def _first(names: list[str]) -> str:
    more = len(names) - MAX_NAMES
    return ", ".join(names[:MAX_NAMES]) + (f" and {more} more" if more > 0 else "")
