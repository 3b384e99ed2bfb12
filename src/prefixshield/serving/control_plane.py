"""vLLM's real scheduler, KV-cache manager and block pool in process, without a model.

``ControlPlane`` makes the steps that an engine makes and answers them with made-up tokens, so
whole traffic runs in microseconds on the code that serves.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Before vLLM is imported: no model is fetched, and no memory set aside for blocks.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

import torch
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from prefixshield.serving.wiring import CONFIG_KEY


def cache_config(
    num_blocks: int, block_size: int, sliding_window: int | None = None
) -> KVCacheConfig:
    """A full-attention cache; with ``sliding_window``, a hybrid one with a second group."""
    shape: dict[str, Any] = {
        "block_size": block_size,
        "num_kv_heads": 1,
        "head_size": 32,
        "dtype": torch.float32,
    }
    groups = [KVCacheGroupSpec(["full"], FullAttentionSpec(**shape))]
    if sliding_window is not None:
        spec = SlidingWindowSpec(**shape, sliding_window=sliding_window)
        groups.append(KVCacheGroupSpec(["window"], spec))
    return KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)


@functools.cache
def engine_config(
    model: Path, num_blocks: int, additional: str, block_size: int = 32, **options: Any
) -> VllmConfig:
    """vLLM's own configuration for a tiny model.

    ``additional``: path of our configuration; empty for none. ``options``: as vLLM's engine takes
    them; by default as the tests' servers.
    """
    defaults: dict[str, Any] = {"max_model_len": 2048, "enforce_eager": True, "dtype": "float32"}
    config = EngineArgs(
        model=str(model),
        load_format="dummy",
        block_size=block_size,
        num_gpu_blocks_override=num_blocks,
        skip_tokenizer_init=True,
        additional_config={CONFIG_KEY: additional} if additional else {},
        **(defaults | options),
    ).create_engine_config()
    config.cache_config.num_gpu_blocks = num_blocks
    return config


class ControlPlane:
    """A scheduler that is fed, stepped and answered like the engine's."""

    def __init__(
        self,
        build: Callable[..., Scheduler],
        vllm_config: VllmConfig,
        num_blocks: int,
        block_size: int = 32,
        cache: KVCacheConfig | None = None,
    ) -> None:
        """``build``: a scheduler class or factory; ``num_blocks``: the null block included.

        ``cache``: its KV-cache groups; by default one of full attention.
        """
        cache = cache or cache_config(num_blocks, block_size)
        sizes = [group.kv_cache_spec.block_size for group in cache.kv_cache_groups]
        self.scheduler = build(
            vllm_config=vllm_config,
            kv_cache_config=cache,
            structured_output_manager=StructuredOutputManager(vllm_config),
            block_size=math.lcm(*sizes),
            hash_block_size=math.gcd(*sizes),
            log_stats=True,
        )

    def schedule(self) -> SchedulerOutput:
        """What the next step computes."""
        return self.scheduler.schedule()

    def answer(
        self, scheduled: SchedulerOutput, token: Callable[[Request], int] = lambda _: 0
    ) -> list[EngineCoreOutput]:
        """Answer a step with one made-up ``token`` for every request whose prompt is computed."""
        ids = list(scheduled.num_scheduled_tokens)
        sampled: list[list[int]] = []
        for request_id in ids:
            request = self.scheduler.requests[request_id]
            done = request.num_computed_tokens >= request.num_tokens
            sampled.append([token(request)] if done else [])
        answer = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
            sampled_token_ids=sampled,
        )
        by_client = self.scheduler.update_from_output(scheduled, answer)
        return [output for outputs in by_client.values() for output in outputs.outputs]
