"""A vLLM server as a child process: watched, with a log of its own, never left behind."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from prefixshield.errors import PrefixShieldError
from prefixshield.serving.tiny_model import tokenizer_of

#: The name under which `tiny_model_options` serves the model.
MODEL_NAME = "tiny"

#: What the engine's log says when PrefixShield is at work.
ACTIVE_LINE = re.compile(r"PrefixShield \S+ is active")

#: What a library prints at every exit of vLLM, hiding the reason for it.
EXIT_NOISE = re.compile(r"nanobind|- leaked (function|type|instance)|skipped remainder")

START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 5.0


class ServerError(PrefixShieldError):
    """The server could not be started, or died. The message is for the user, with the log's end."""


def prefixshield_serve(model: Path, config: Path) -> list[str]:
    """The command ``prefixshield serve`` of this environment, to be followed by vLLM's options."""
    script = Path(sys.executable).with_name("prefixshield")
    return [str(script), "serve", str(model), "--config", str(config)]


def tiny_model_options(
    model: Path,
    *,
    pool_blocks: int,
    block_size: int,
    max_model_len: int,
    max_num_batched_tokens: int,
) -> list[str]:
    """vLLM's options for the model that `tiny_model` wrote into a folder.

    ``pool_blocks`` are those that can hold content: the engine gets one more, its null block.
    ``block_size``, ``max_model_len`` and ``max_num_batched_tokens`` are tokens.
    """
    options = {
        "--tokenizer": tokenizer_of(model),
        "--served-model-name": MODEL_NAME,
        "--load-format": "dummy",
        "--dtype": "float32",
        "--seed": 0,
        "--max-model-len": max_model_len,
        "--max-num-batched-tokens": max_num_batched_tokens,
        "--block-size": block_size,
        "--num-gpu-blocks-override": pool_blocks + 1,
    }
    named = [text for name, value in options.items() for text in (name, str(value))]
    return [*named, "--enforce-eager", "--enable-prompt-tokens-details"]


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


class ChildServer:
    """One running server; use as a context manager, in the main thread.

    The child gets a session of its own: a Ctrl-C at the terminal reaches only us, and whatever
    the child has started goes when its process group goes.

    Args:
        command: what starts vLLM, without an address: that is chosen here.
        log: where its output goes; None for our own output. The folder is made if need be.
        port: TCP port; 0 picks a free one.
        environment: variables on top of our own and those that an offline server needs.

    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        log: Path | None,
        port: int = 0,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.port = free_port(port)
        self.base_url = f"http://127.0.0.1:{self.port}"
        self.log = log
        self._command = [*command, "--host", "127.0.0.1", "--port", str(self.port)]
        self._environment = dict(environment or {})
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> ChildServer:
        interrupt_by_signals()
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

    def processor_seconds(self) -> float:
        """Processor time that the server's processes have used so far."""
        import psutil  # one of vLLM's requirements

        assert self._process is not None
        process = psutil.Process(self._process.pid)
        used = [one.cpu_times() for one in (process, *process.children(recursive=True))]
        return float(sum(times.user + times.system for times in used))

    def pause(self) -> None:
        """Stop the server's processes where they are, until ``go_on``: idle ones use processors."""
        assert self._process is not None
        os.killpg(self._process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """Let the server's processes run on."""
        assert self._process is not None
        os.killpg(self._process.pid, signal.SIGCONT)

    def log_text(self) -> str:
        """What the server has written so far."""
        return self.log.read_text(encoding="utf-8", errors="replace") if self.log else ""

    def stop(self) -> None:
        """End the server and everything it started; more Ctrl-C do not stop this half way."""
        if self._process is None:
            return
        with interrupts_deferred():
            with suppress(ProcessLookupError):
                self.go_on()
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
        environment.update(self._environment)
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
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as file:
            yield file.fileno()

    def _log_end(self, lines: int = 15) -> str:
        if self.log is None:
            return "; its output is above"
        kept = [line for line in self.log_text().splitlines() if not EXIT_NOISE.search(line)]
        end = "\n".join(f"    {line}" for line in kept[-lines:])
        return f"; the end of {os.path.relpath(self.log)}:\n{end}"


#: What ends a command that has a server.
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def interrupt_by_signals() -> None:
    """From now on SIGINT, SIGTERM and SIGHUP raise KeyboardInterrupt: whoever has a server ends it.

    SIGINT does so even where a shell has started us with ``&``, and so with that signal ignored;
    ``nohup``'s SIGHUP stays ignored.
    """
    for number in _ENDING:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Hold back what ends us for the block, and deliver one afterwards if any came."""
    caught: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        caught.append(number)

    previous = {number: signal.signal(number, note) for number in _ENDING}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        if caught:
            signal.raise_signal(caught[0])
