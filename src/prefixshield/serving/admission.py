"""Admission under a policy that divides the pool: who may start, who waits, who never can.

A running request must never lack a block, or vLLM would preempt somebody else's. So a request
reserves its whole footprint when it is admitted: what its group holds, plus what its running
requests may still take, plus what the new one would take, stays within the share. A group that
runs nothing can always start what fits its share at all, so nothing waits for ever. Within a group
requests start in vLLM's order; another group's never wait behind them.
"""

from __future__ import annotations

from vllm.v1.core.kv_cache_coordinator import UnitaryKVCacheCoordinator
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec
from vllm.v1.request import Request

from prefixshield.core.shares import Shares
from prefixshield.errors import IncompatibleEngineError
from prefixshield.serving.driver import PolicyDriver
from prefixshield.serving.pool import tag_of


class Admission:
    """Decides for one scheduler, by its running requests and its pool's counts."""

    def __init__(self, scheduler: Scheduler, driver: PolicyDriver, shares: Shares) -> None:
        """Raises IncompatibleEngineError if footprints cannot be exact or shares are empty.

        Also under a vLLM that cannot let one waiting request be passed over.
        """
        if not hasattr(Scheduler, "_handle_blocked_waiting_request"):
            raise IncompatibleEngineError(
                f"the policy {driver.policy.name} needs vLLM 0.31.0 or later: in earlier releases "
                "a request that waits for its group's share would hold up everybody behind it"
            )
        _require_exact_footprints(scheduler, driver.policy.name)
        if shares.share_blocks < 1:
            raise IncompatibleEngineError(
                f"the policy {driver.policy.name} gives every group a share of 0 blocks, "
                "expected at least 1: the pool has fewer blocks than there are groups"
            )
        self._scheduler = scheduler
        self._driver = driver
        self._shares = shares
        self._waits_since: dict[str, int] = {}  # group → scheduler step in which one had to wait

    def refusal(self, request: Request) -> str | None:
        """Why a request can never be served; None: it can."""
        if request.resumable:
            return "input that is streamed in parts cannot be reserved for in advance"
        footprint = self._footprint(request)
        if footprint <= self._shares.share_blocks:
            return None
        return (
            f"its prompt of {request.num_prompt_tokens} tokens with max_tokens="
            f"{request.max_tokens} needs {footprint} blocks of {self._scheduler.block_size} "
            f"tokens, expected at most {self._shares.share_blocks}, the share of each group: "
            "shorten the prompt or lower max_tokens"
        )

    def may_start(self, request: Request) -> bool:
        """Whether a waiting request fits its group's share now; asked in vLLM's order."""
        if self.refusal(request) is not None:
            return False  # about to be finished
        group = tag_of(self._driver, request).identity.group
        step = self._scheduler.current_step
        if self._waits_since.get(group) == step:
            return False  # or a small one would overtake a large one for ever
        free = self._shares.share_blocks - self._shares.held[group] - self._outstanding(group)
        needed = self._footprint(request)
        if needed > free:
            needed -= self._held_hits(request)
        if needed > free:
            self._waits_since[group] = step
            return False
        return True

    def _footprint(self, request: Request) -> int:
        """Blocks of the request's longest possible life; the last token is never computed."""
        outputs = max(0, request.max_tokens - 1)  # none for pooling, where max_tokens is 1
        tokens = min(request.num_prompt_tokens + outputs, self._scheduler.max_model_len)
        return -(-tokens // self._scheduler.block_size)

    def _outstanding(self, group: str) -> int:
        """Blocks that the group's running requests may still take."""
        blocks_of = self._scheduler.kv_cache_manager.coordinator.get_blocks
        total = 0
        for request in self._scheduler.running:
            if tag_of(self._driver, request).identity.group == group:
                (blocks,) = blocks_of(request.request_id)
                total += max(0, self._footprint(request) - len(blocks))
        return total

    def _held_hits(self, request: Request) -> int:
        """Blocks that the request would hit and that another one holds already."""
        hits, _, _ = self._scheduler.kv_cache_manager.get_computed_blocks(request)
        (blocks,) = hits.blocks
        return sum(block.ref_cnt > 0 for block in blocks)


def _require_exact_footprints(scheduler: Scheduler, policy: str) -> None:
    groups = scheduler.kv_cache_config.kv_cache_groups
    manager = scheduler.kv_cache_manager
    parallel = scheduler.vllm_config.parallel_config
    one_full_attention_group = (
        type(manager.coordinator) is UnitaryKVCacheCoordinator
        and [type(group.kv_cache_spec) for group in groups]
        in ([FullAttentionSpec], [MLAAttentionSpec])
        and scheduler.hash_block_size == scheduler.block_size
    )
    for found, is_found in (
        ("a model with other than one group of full attention", not one_full_attention_group),
        ("an encoder-decoder model", scheduler.is_encoder_decoder),
        ("a KV connector", scheduler.connector is not None),
        ("speculative decoding", scheduler.vllm_config.speculative_config is not None),
        ("pipeline parallelism", parallel.pipeline_parallel_size > 1),
        ("a watermark of free blocks", manager.watermark_blocks > 0),
    ):
        if is_found:
            raise IncompatibleEngineError(
                f"found {found}, with which the policy {policy} cannot tell in advance how many "
                "blocks a request takes, expected none: choose another policy or switch it off"
            )
