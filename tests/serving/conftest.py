"""Fixtures that start the real vLLM server on a tiny model, and end it with the session."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import vllm_server
from vllm_server import Server

from prefixshield.serving.tiny_model import write_tiny_model

StartServer = Callable[..., Server]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text generator, which also embeds."""
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def tiny_qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of a family that /v1/systemone knows."""
    return write_tiny_model(tmp_path_factory.mktemp("model") / "qwen3", family="Qwen3")


@pytest.fixture(scope="session")
def tiny_classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with two labels."""
    return write_tiny_model(tmp_path_factory.mktemp("model") / "classifier", pooling=True)


@pytest.fixture(scope="session")
def launch_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartServer]:
    """Start a server process without waiting for it; every one is killed at the end."""
    pytest.importorskip("vllm")
    started: list[Server] = []

    def launch(
        model: Path,
        config: Path | None = None,
        extra_args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        by_command: bool = False,
    ) -> Server:
        log_path = tmp_path_factory.mktemp("server") / "server.log"
        server = vllm_server.launch(model, log_path, config, extra_args, env, by_command)
        started.append(server)
        return server

    yield launch
    for server in started:
        vllm_server.stop(server.process)


@pytest.fixture(scope="session")
def start_server(launch_server: StartServer) -> StartServer:
    """Start a server as ``launch_server`` does and wait until it answers."""

    def start(*arguments: Any, **options: Any) -> Server:
        server = launch_server(*arguments, **options)
        vllm_server.wait_until_ready(server)
        return server

    return start
