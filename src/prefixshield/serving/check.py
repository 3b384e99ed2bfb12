"""What ``prefixshield check`` finds out about a configuration and an installation.

It starts nothing. Every check stands alone, so that one problem does not hide another. vLLM is
imported only where its functions are compared with the hooks, and need not be installed.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

from prefixshield.config import Config, load_config
from prefixshield.errors import PrefixShieldError
from prefixshield.serving import hooks
from prefixshield.serving.child_server import free_port
from prefixshield.serving.identity import check_server
from prefixshield.serving.launch import command, vllm_options
from prefixshield.serving.reload import LiveConfig

#: The name of our plug-ins in vLLM's groups of entry points.
PLUGIN = "prefixshield"

#: vLLM's groups of entry points in which we have a plug-in.
PLUGIN_GROUPS = ("vllm.stat_logger_plugins",)


class Kind(StrEnum):
    """What a finding means."""

    OK = "ok"
    NOTE = "note"
    PROBLEM = "problem"


class Finding(NamedTuple):
    """One line of the answer."""

    kind: Kind
    text: str


def check(
    path: Path,
    model: str,
    port: int | None = None,
    options: Sequence[str] = (),
    environ: Mapping[str, str] = os.environ,
) -> Iterator[Finding]:
    """Everything that is known before a start; ``options`` are vLLM's own.

    ``port``: TCP port of the server to be; None: not checked.
    """
    config = None
    try:
        config = load_config(path)
    except PrefixShieldError as error:
        yield from _problems(error)
    if config is not None:
        yield from _configuration(config, path, environ)
    yield from _engine()
    yield from _plugins(environ)
    if port is not None:
        try:
            yield Finding(Kind.OK, f"port {free_port(port)} is free")
        except PrefixShieldError as error:
            yield from _problems(error)
    yield from _command(model, path, options)


def _configuration(config: Config, path: Path, environ: Mapping[str, str]) -> Iterator[Finding]:
    preset = f", preset {config.preset}" if config.policy == "shield" else ""
    yield Finding(Kind.OK, f"{path}: policy {config.policy}{preset}, mode {config.mode}")
    for name, contract in config.contracts.items():
        terms = f"{contract.refill_rate:g} blocks/s, burst {contract.burst:g} blocks"
        yield Finding(Kind.OK, f"contract {name}: {terms}")
    for name, group in config.groups.items():
        default = ", the default group" if name == config.default_group else ""
        keys = f"{len(group.keys)} API key{'' if len(group.keys) == 1 else 's'}"
        yield Finding(Kind.OK, f"group {name}: contract {group.contract}, {keys}{default}")
        if not group.keys and not default and config.trusted_header is None:
            yield Finding(Kind.NOTE, f"group {name} has no API key: no request can belong to it")
    try:
        check_server(LiveConfig(path).current, path, SimpleNamespace(), environ)
    except PrefixShieldError as error:
        yield from _problems(error)
    if (header := config.trusted_header) is not None:
        unknown = {"refuse": "is refused", "default": f"is group {config.default_group}"}
        yield Finding(
            Kind.OK,
            f"a gateway with its secret names the group in the header {header.name}; "
            f"an unknown one {unknown[header.unknown_group]}",
        )
    if config.operator_key is None:
        yield Finding(
            Kind.NOTE, "operator_key is not set: /metrics are open, no live page is served"
        )
    if config.allow_anonymous:
        yield Finding(Kind.NOTE, f"requests without a key belong to group {config.default_group}")
    if config.record is not None:
        recorded = f"requests are recorded in {config.record.path} without their content"
        if Path(config.record.path).exists():
            recorded = f"no requests are recorded: {config.record.path} is there already"
        yield Finding(Kind.NOTE, recorded)
    if config.namespace_secret is None:
        yield Finding(
            Kind.NOTE,
            "namespace_secret is not set: it follows from the API keys, so servers with other "
            "keys share no cached blocks, and the keys must not change while a server starts",
        )


def _engine() -> Iterator[Finding]:
    try:
        name, version = hooks.installed_vllm()
        hooks.verify()
    except PrefixShieldError as error:
        yield from _problems(error)
    except Exception as error:  # whatever the import of an installation in disorder raises
        yield Finding(Kind.PROBLEM, f"vLLM cannot be imported: {type(error).__name__}: {error}")
    else:
        yield Finding(Kind.OK, f"{name} {version}: all {len(hooks.HOOKS)} hooks fit")


def _plugins(environ: Mapping[str, str]) -> Iterator[Finding]:
    for group in PLUGIN_GROUPS:
        if any(found.name == PLUGIN for found in entry_points(group=group)):
            yield Finding(Kind.OK, f"vLLM finds the plug-in {PLUGIN} ({group})")
        else:
            yield Finding(
                Kind.PROBLEM,
                f"{group}: found no entry point {PLUGIN!r}, expected one: install the package "
                "into the environment that vLLM runs in",
            )
    named = environ.get("VLLM_PLUGINS")
    if named is not None and PLUGIN not in named.split(","):
        yield Finding(
            Kind.PROBLEM,
            f"VLLM_PLUGINS: found {named!r}, expected {PLUGIN!r} among the names: "
            "vLLM loads no other plug-ins, so the metrics would be missing",
        )


def _command(model: str, path: Path, options: Sequence[str]) -> Iterator[Finding]:
    try:
        wiring = vllm_options(path, options)
    except PrefixShieldError as error:
        yield from _problems(error)
        return
    try:
        words = command(model, wiring)
    except PrefixShieldError:  # not installed: `_engine` says so
        words = ["vllm", "serve", model, *wiring]
    yield Finding(Kind.OK, f"would run: {shlex.join(words)}")


def _problems(error: PrefixShieldError) -> Iterator[Finding]:
    for line in str(error).splitlines():
        yield Finding(Kind.PROBLEM, line)
