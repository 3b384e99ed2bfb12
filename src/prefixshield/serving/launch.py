"""Starting ``vllm serve`` with the plug-in wired in. Imports neither vLLM nor torch."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from prefixshield.config import load_config, namespace_secret, operator_key, resolve_keys
from prefixshield.errors import IncompatibleEngineError, PrefixShieldError
from prefixshield.serving import hooks
from prefixshield.serving.wiring import CONFIG_KEY, MIDDLEWARE, SCHEDULER

#: vLLM options that would undo the wiring, and what to do instead.
_REFUSED = {
    "--scheduler-cls": "the scheduler is PrefixShield's",
    "--api-key": "API keys belong in the configuration file",
    "--grpc": "gRPC bypasses the middleware that identifies tenants",
    "--grpc-port": "gRPC bypasses the middleware that identifies tenants",
    "--no-enable-prefix-caching": "without a prefix cache there is nothing to protect",
}
_ADDITIONAL_CONFIG = "--additional-config"


def vllm_options(config: Path, options: Sequence[str]) -> list[str]:
    """The options that wire PrefixShield in, with further vLLM options appended.

    Raises:
        IncompatibleEngineError: an option contradicts the wiring.
        PrefixShieldError: ``--additional-config`` is no JSON object.

    """
    options, additional = _split_additional_config(options)
    for option in options:
        name = option.partition("=")[0].replace("_", "-")
        if name in _REFUSED:
            raise IncompatibleEngineError(f"{name}: not with prefixshield serve: {_REFUSED[name]}")
    # Not through links: a mounted configuration is replaced by pointing a link elsewhere.
    additional[CONFIG_KEY] = str(config.absolute())
    return [
        f"--scheduler-cls={SCHEDULER}",
        f"--middleware={MIDDLEWARE}",
        f"{_ADDITIONAL_CONFIG}={json.dumps(additional)}",
        *options,
    ]


def serve_command(model: str, config: Path, options: Sequence[str]) -> list[str]:
    """The command that serves ``model`` with vLLM under ``config``, further vLLM options appended.

    Raises:
        ConfigError: the configuration is wrong, or a secret's environment variable is not set.
        IncompatibleEngineError: vLLM is not installed, or an option contradicts the wiring.

    """
    loaded = load_config(config)
    resolve_keys(loaded, config)
    namespace_secret(loaded, config)
    operator_key(loaded, config)
    return command(model, vllm_options(config, options))


def command(model: str, options: Sequence[str]) -> list[str]:
    """The command that starts the installed vLLM's server with these options.

    Raises IncompatibleEngineError when vLLM or its command is not installed.
    """
    distribution, _ = hooks.installed_vllm()
    if distribution == "vllm":
        return [_vllm_script(), "serve", model, *options]
    module = "prefixshield.serving.vllm_command"
    return [sys.executable, "-m", module, "serve", model, *options]


def serve(model: str, config: Path, options: Sequence[str]) -> None:
    """Replace this process with vLLM's server; returns only by raising.

    SIGHUP is ignored from here on, in whatever process does not handle it: the one that watches
    over several front ends would die of it and leave all others running.
    """
    words = serve_command(model, config, options)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    os.execv(words[0], words)


def _vllm_script() -> str:
    beside = Path(sys.executable).with_name("vllm")
    found = str(beside) if beside.exists() else shutil.which("vllm")
    if found is None:
        raise IncompatibleEngineError("the vllm command was not found on the PATH")
    return found


def _split_additional_config(options: Sequence[str]) -> tuple[list[str], dict[str, object]]:
    """The options without ``--additional-config``, and its value."""
    rest: list[str] = []
    text = "{}"
    remaining = iter(options)
    for option in remaining:
        name, equals, value = option.partition("=")
        if name.replace("_", "-") != _ADDITIONAL_CONFIG:
            rest.append(option)
        else:
            text = value if equals else next(remaining, "")
    try:
        parsed = json.loads(text)
    except ValueError:
        parsed = None
    if not isinstance(parsed, dict):
        raise PrefixShieldError(f"{_ADDITIONAL_CONFIG}: found {text!r}, expected a JSON object")
    return rest, parsed
