"""The real vLLM server as a process of its own: started with few options, watched, and ended."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from prefixshield.serving.tiny_model import tokenizer_of
from prefixshield.serving.wiring import CONFIG_KEY, MIDDLEWARE, SCHEDULER

#: Seconds until a server that does not answer counts as hung; it takes about 20 on two cores.
START_TIMEOUT_S = 300

BLOCK_SIZE = 32

_OPTIONS = (
    *("--served-model-name", "tiny"),
    *("--load-format", "dummy"),
    *("--dtype", "float32"),
    *("--host", "127.0.0.1"),
    *("--max-model-len", "2048"),
    *("--block-size", str(BLOCK_SIZE)),
    *("--num-gpu-blocks-override", "512"),
    "--enforce-eager",
    "--enable-prompt-tokens-details",
    "--disable-uvicorn-access-log",  # it would bury what matters in the log
)

_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


@dataclass(frozen=True)
class Server:
    """A running vLLM server."""

    base_url: str
    log_path: Path
    process: subprocess.Popen[bytes]

    def log_tail(self, lines: int = 60) -> str:
        """The end of the server's log."""
        text = self.log_path.read_text(encoding="utf-8", errors="replace")
        return "\n".join(text.splitlines()[-lines:])


def shield_options(config: Path) -> list[str]:
    """The options that switch PrefixShield on."""
    return [
        *("--scheduler-cls", SCHEDULER),
        *("--middleware", MIDDLEWARE),
        *("--additional-config", json.dumps({CONFIG_KEY: str(config)})),
    ]


def launch(
    model: Path,
    log_path: Path,
    config: Path | None = None,
    extra_args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    by_command: bool = False,
) -> Server:
    """Start a server without waiting for it; with a config, PrefixShield is switched on.

    ``by_command``: by ``prefixshield serve`` instead of vLLM's own options.
    """
    port = _free_port()
    if by_command:
        script = Path(sys.executable).with_name("prefixshield")
        command = [str(script), "serve", str(model), "--config", str(config)]
    else:
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(model), *(shield_options(config) if config else ())]
    command += ["--tokenizer", str(tokenizer_of(model)), "--port", str(port)]
    command += [*_OPTIONS, *extra_args]
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **_ENVIRONMENT, **(env or {})},
            start_new_session=True,  # a process group of its own, for stop
        )
    return Server(f"http://127.0.0.1:{port}", log_path, process)


def wait_until_ready(server: Server) -> None:
    """Return once the server answers; fail the test when it ends or hangs instead."""
    httpx = pytest.importorskip("httpx")
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if (code := server.process.poll()) is not None:
            pytest.fail(f"the server exited with {code}:\n{server.log_tail()}")
        try:
            if httpx.get(f"{server.base_url}/health", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.25)
    pytest.fail(f"the server did not answer in {START_TIMEOUT_S} s:\n{server.log_tail()}")


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a server, which ends its engine; both are killed if that takes too long."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(timeout=30)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
