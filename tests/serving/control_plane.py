"""vLLM's real scheduler, KV-cache manager and block pool in process, without a model.

``ControlPlane`` makes the steps that an engine makes and answers them with made-up tokens, so
whole traffic runs in microseconds on the code that serves.
"""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

import torch
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from prefixshield.core.ledger import Contract
from prefixshield.policies import PolicySetup, build_policy
from prefixshield.serving.driver import PolicyDriver
from prefixshield.serving.namespace import Identity
from prefixshield.serving.pool import Tag, tag, take_over

BLOCK_SIZE = 32

init_none_hash(sha256)


def cache_config(num_blocks: int, block_size: int, sliding_window: int | None = None):
    """A full-attention cache; with ``sliding_window``, a hybrid one with a second group."""
    shape = {"block_size": block_size, "num_kv_heads": 1, "head_size": 32, "dtype": torch.float32}
    groups = [KVCacheGroupSpec(["full"], FullAttentionSpec(**shape))]
    if sliding_window is not None:
        spec = SlidingWindowSpec(**shape, sliding_window=sliding_window)
        groups.append(KVCacheGroupSpec(["window"], spec))
    return KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)


def make_manager(
    num_blocks: int, block_size: int = 4, sliding_window: int | None = None
) -> KVCacheManager:
    """A native KV-cache manager; block 0 is the null block."""
    return KVCacheManager(
        cache_config(num_blocks, block_size, sliding_window),
        max_model_len=10_000,
        scheduler_block_size=block_size,
        hash_block_size=block_size,
        log_stats=True,
        enable_kv_cache_events=True,
    )


def shield_manager(
    manager: KVCacheManager,
    policy: str,
    contracts: dict[str, Contract],
    groups: Sequence[str],
    clock,
) -> PolicyDriver:
    """Take a native manager over, as the scheduler does."""
    setup = PolicySetup(manager.block_pool.num_gpu_blocks, contracts, groups, "paper")
    default = Identity(groups[0], next(iter(contracts)))
    driver = PolicyDriver(build_policy(policy, setup), default, clock)
    take_over(manager, driver)
    return driver


def make_request(
    request_id: str,
    tokens: Sequence[int],
    *,
    block_size: int = 4,
    identity: Identity | None = None,
    prefix_id: str | None = None,
    salt: str | None = None,
    max_tokens: int = 4,
    **sampling,
) -> Request:
    """A request as EngineCore builds it, tagged as the scheduler tags it."""
    request = Request(
        request_id=request_id,
        prompt_token_ids=list(tokens),
        sampling_params=SamplingParams(max_tokens=max_tokens, ignore_eos=True, **sampling),
        pooling_params=None,
        cache_salt=salt,
        block_hasher=get_request_block_hasher(block_size, sha256),
    )
    if identity is not None:
        tag(request, Tag(identity, prefix_id))
    return request


@functools.cache
def engine_config(model: Path, num_blocks: int, additional: str, **options):
    """vLLM's own configuration for a tiny model; ``additional``: path of our configuration."""
    config = EngineArgs(
        model=str(model),
        load_format="dummy",
        dtype="float32",
        block_size=BLOCK_SIZE,
        num_gpu_blocks_override=num_blocks,
        enforce_eager=True,
        max_model_len=2048,
        skip_tokenizer_init=True,
        additional_config={"prefixshield": additional} if additional else {},
        **options,
    ).create_engine_config()
    config.cache_config.num_gpu_blocks = num_blocks
    return config


class ControlPlane:
    """A scheduler that is fed, stepped and answered like the engine's."""

    def __init__(self, build, vllm_config, num_blocks: int) -> None:
        self.scheduler: Scheduler = build(
            vllm_config=vllm_config,
            kv_cache_config=cache_config(num_blocks, BLOCK_SIZE),
            structured_output_manager=StructuredOutputManager(vllm_config),
            block_size=BLOCK_SIZE,
            hash_block_size=BLOCK_SIZE,
            log_stats=True,
        )
        self.outputs: dict[str, list[int]] = {}
        self.block_tables: list[dict[str, tuple[list[int], ...]]] = []
        self.cached_tokens: dict[str, int] = {}
        self.finished: list[str] = []
        self.preemptions = 0

    @property
    def pool(self):
        return self.scheduler.kv_cache_manager.block_pool

    def add(self, request: Request) -> None:
        self.outputs[request.request_id] = []
        self.scheduler.add_request(request)

    def abort(self, request_id: str) -> None:
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def step(self) -> bool:
        """One engine step; returns whether anything was scheduled."""
        scheduled = self.scheduler.schedule()
        ids = list(scheduled.num_scheduled_tokens)
        manager = self.scheduler.kv_cache_manager
        self.block_tables.append(
            {request_id: manager.get_block_ids(request_id) for request_id in ids}
        )
        self.preemptions += len(scheduled.preempted_req_ids or ())
        sampled = []
        for request_id in ids:
            request = self.scheduler.requests[request_id]
            done = request.num_computed_tokens >= request.num_tokens
            sampled.append([_token(request)] if done else [])
            self.outputs[request_id] += sampled[-1]
        answer = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
            sampled_token_ids=sampled,
        )
        for outputs in self.scheduler.update_from_output(scheduled, answer).values():
            for output in outputs.outputs:
                if output.prefill_stats is not None:
                    self.cached_tokens[output.request_id] = output.prefill_stats.num_cached_tokens
                if output.finish_reason is not None:
                    self.finished.append(output.request_id)
        return bool(ids)

    def run(self, limit: int = 10_000) -> None:
        """Step until nothing is left to do."""
        for _ in range(limit):
            if not self.scheduler.has_unfinished_requests():
                return
            self.step()
        raise AssertionError(f"not finished after {limit} steps")


def _token(request: Request) -> int:
    """A made-up next token that depends on everything before it, as a model's would."""
    return hash((request.num_tokens, tuple(request.all_token_ids[-3:]))) % 1000


def count_events(events) -> tuple[Counter, list]:
    """Blocks stored, counted by salt of their chain's first block; and removed hashes in order."""
    stored: Counter = Counter()
    removed: list = []
    for event in events:
        if isinstance(event, BlockStored):
            stored[event.group_idx] += len(event.block_hashes)
        elif isinstance(event, BlockRemoved):
            removed += event.block_hashes
    return stored, removed


def assert_pool_is_sound(manager: KVCacheManager) -> None:
    """Every block is exactly one of null, held, candidate or truly free; queue and policy agree."""
    pool = manager.block_pool
    driver: PolicyDriver = pool.driver
    free = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
    assert len(free) == len(set(free)) == pool.get_num_free_blocks()
    assert set(free) == {b.block_id for b in pool.blocks if b.ref_cnt == 0 and not b.is_null}
    candidates = [block_id for block_id in free if driver.is_candidate[block_id]]
    assert sum(driver.is_candidate) == driver.candidate_count == len(candidates)
    if not driver.failed:
        assert driver.policy.candidate_count == len(candidates)
        driver.policy.check()
    hashed = [block_id for block_id in free if pool.blocks[block_id].block_hash is not None]
    if driver.policy.keeps_invalidated:
        assert set(hashed) <= set(candidates)
    else:
        assert hashed == candidates
        # Truly free blocks stand in front.
        assert not any(driver.is_candidate[block_id] for block_id in free[: -len(hashed) or None])
    for block in pool.blocks:
        if block.block_hash is not None:
            assert driver.owner[block.block_id] is not None
