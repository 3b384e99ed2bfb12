"""What the tests build on vLLM's real scheduler and KV-cache manager: managers, requests, records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from prefixshield.serving.control_plane import ControlPlane as RealControlPlane
from prefixshield.serving.control_plane import cache_config, engine_config

# isort: split
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request, RequestStatus

from prefixshield.core.ledger import Contract
from prefixshield.policies import PolicySetup, build_policy
from prefixshield.serving.catalogue import GAUGES
from prefixshield.serving.driver import PolicyDriver
from prefixshield.serving.namespace import Identity
from prefixshield.serving.pool import Tag, tag, take_over
from prefixshield.serving.reporting import GAUGE_SCALE, take

__all__ = ["cache_config", "engine_config"]

BLOCK_SIZE = 32

init_none_hash(sha256)


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
    preset: str = "paper",
) -> PolicyDriver:
    """Take a native manager over, as the scheduler does."""
    setup = PolicySetup(manager.block_pool.num_gpu_blocks, contracts, groups, preset)
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


class ControlPlane(RealControlPlane):
    """Records what a step did."""

    def __init__(self, build, vllm_config, num_blocks: int, cache=None) -> None:
        super().__init__(build, vllm_config, num_blocks, BLOCK_SIZE, cache)
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
        scheduled = self.schedule()
        manager = self.scheduler.kv_cache_manager
        self.block_tables.append(
            {id_: manager.get_block_ids(id_) for id_ in scheduled.num_scheduled_tokens}
        )
        self.preemptions += len(scheduled.preempted_req_ids or ())
        for output in self.answer(scheduled, _token):
            self.outputs[output.request_id] += output.new_token_ids
            if output.prefill_stats is not None:
                self.cached_tokens[output.request_id] = output.prefill_stats.num_cached_tokens
            if output.finish_reason is not None:
                self.finished.append(output.request_id)
        return bool(scheduled.num_scheduled_tokens)

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


class Front:
    """Adds up what the steps of a scheduler report, as the metrics do; and keeps vLLM's events."""

    def __init__(self, scheduler) -> None:
        self.counts: Counter[tuple[str, ...]] = Counter()
        self.gauges: dict[tuple[str, ...], float] = {}
        self.events: list = []
        scheduler.kv_cache_manager.block_pool.enable_kv_cache_events = True
        scheduler.kv_event_publisher.publish = lambda batch: self.events.extend(batch.events)
        make_stats = scheduler.make_stats

        def recorded(*args, **kwargs):
            stats = make_stats(*args, **kwargs)
            for key, number in take(stats.waiting_lora_adapters).items():
                if key[0] in GAUGES:
                    self.gauges[key] = number / GAUGE_SCALE
                else:
                    self.counts[key] += number
            return stats

        scheduler.make_stats = recorded

    def total(self, name: str) -> int:
        """A count over all groups."""
        return sum(n for key, n in self.counts.items() if key[0] == name)


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
    hashed = [block_id for block_id in free if pool.blocks[block_id].block_hash is not None]
    if driver.follows_candidates:
        assert driver.candidate_count == len(hashed)
    if driver.told:
        assert driver.policy.candidate_count == len(hashed)
        driver.policy.check()
    if not driver.native:
        assert free[len(free) - len(hashed) :] == hashed, "truly free blocks stand in front"
    owners = {b.block_id: driver.owner[b.block_id] for b in pool.blocks if b.block_hash is not None}
    assert None not in owners.values()
    assert +driver.resident == Counter(owners.values())
    reported: Counter[str] = Counter()
    for (group, _), blocks in driver.resident_blocks().items():
        reported[group] += blocks
    # A policy counts a block that was emptied while held until it is cached again.
    assert reported >= Counter(owners.values())
