"""vLLM's block pool and free queue with the choice of victims handed to a policy.

The live objects that vLLM has built are given these classes in place (``take_over``), so every
holder keeps its reference. Everything else, hashing, reference counts, block tables, stays vLLM's:
each method calls vLLM's own and tells the driver. Every override has a row in ``hooks.HOOKS``.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import compress
from typing import Any, NamedTuple, cast

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.kv_cache_utils import (
    BlockHashWithGroupId,
    FreeKVCacheBlockQueue,
    KVCacheBlock,
)
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.request import Request

from prefixshield.errors import IncompatibleEngineError
from prefixshield.policies.base import Access
from prefixshield.serving.driver import PolicyDriver
from prefixshield.serving.namespace import Identity


class ShieldQueue(FreeKVCacheBlockQueue):
    """All free blocks in native order, truly free ones in front; victims leave in policy order."""

    driver: PolicyDriver
    blocks: list[KVCacheBlock]
    """All blocks of the pool, by block id."""
    unhashed_at_the_end: set[int]
    """Free blocks without content that vLLM wants reused last (``BlockPool.unpin_blocks``)."""
    scattered: bool
    """Whether truly free blocks may stand behind others: they kept the places that they had."""

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        driver = self.driver
        blocks = [] if driver.native else self._chosen(n)
        if len(blocks) < n:
            rest = super().popleft_n(n - len(blocks))
            driver.evicted([block.block_id for block in rest if block._block_hash is not None])
            blocks += rest
        if self.unhashed_at_the_end:
            self.unhashed_at_the_end.difference_update(block.block_id for block in blocks)
        if driver.shares is not None:
            driver.allocated(driver.shares, [block.block_id for block in blocks])
        return blocks

    def _chosen(self, n: int) -> list[KVCacheBlock]:
        """Truly free blocks, then victims: all but what is left to be taken in native order."""
        driver = self.driver
        if self.scattered:
            self._gather()
        truly_free = self.num_free_blocks - driver.candidate_count - len(self.unhashed_at_the_end)
        from_free = min(n, truly_free)
        if driver.shares is not None:
            from_free = min(from_free, driver.room(driver.shares))
        blocks = super().popleft_n(from_free)
        if count := min(n - from_free, driver.candidate_count):
            victims = driver.choose(count)
            take = super().remove
            for block_id in victims:
                block = self.blocks[block_id]
                if block.prev_free_block is None or block._block_hash is None:  # not a candidate
                    driver.disbelieve(victims, count)
                    break
                take(block)
                blocks.append(block)
            driver.evicted(victims[: len(blocks) - from_free], driver.causes)
        return blocks

    def _gather(self) -> None:
        """Truly free blocks to the front."""
        empty = [
            block
            for block in self.get_all_free_blocks()
            if block.block_hash is None and block.block_id not in self.unhashed_at_the_end
        ]
        for block in empty:
            super().remove(block)
        super().prepend_n(empty)
        self.scattered = False

    def popleft(self) -> KVCacheBlock:
        if not self.num_free_blocks:
            raise ValueError("No free blocks available")
        return self.popleft_n(1)[0]

    def append(self, block: KVCacheBlock) -> None:
        self.append_n([block])

    def append_n(self, blocks: list[KVCacheBlock]) -> None:
        super().append_n(blocks)
        if not self.driver.follows_candidates:
            return
        hashed = [block.block_id for block in blocks if block._block_hash is not None]
        self.driver.released(hashed)
        if len(hashed) != len(blocks):
            unhashed = [block.block_id for block in blocks if block._block_hash is None]
            self.unhashed_at_the_end.update(unhashed)
            if self.driver.shares is not None:
                self.driver.emptied(self.driver.shares, unhashed)

    def prepend_n(self, blocks: list[KVCacheBlock]) -> None:
        super().prepend_n(blocks)
        if self.driver.shares is not None:
            self.driver.emptied(self.driver.shares, [block.block_id for block in blocks])


class ShieldBlockPool(BlockPool):
    """Tells the driver what is materialised, hit, invalidated and reset."""

    driver: PolicyDriver
    free_block_queue: ShieldQueue
    chained_groups: frozenset[int]
    """The KV-cache groups in which a block is reached through all blocks before it."""
    caches_parts: bool = False
    """Whether a block was ever cached before it was full."""

    def cache_full_blocks(
        self,
        request: Request,
        blocks: list[KVCacheBlock],
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
        block_mask: list[bool] | None = None,
    ) -> None:
        new = blocks[num_cached_blocks:num_full_blocks]
        if self.caches_parts:
            # A block that was cached before it was full is cached anew: it is charged once.
            self.driver.refunded([block.block_id for block in new if block.block_hash is not None])
        super().cache_full_blocks(
            request,
            blocks,
            num_cached_blocks,
            num_full_blocks,
            block_size,
            kv_cache_group_id,
            block_mask,
        )
        if block_mask is not None:
            new = list(compress(new, block_mask))
        if cached := [block for block in new if not block.is_null]:
            hashes: list[Hashable] = []
            parents: list[Hashable] | None = None
            if self.driver.told:
                hashes = [block._block_hash for block in cached]
                if kv_cache_group_id in self.chained_groups:
                    before = blocks[num_cached_blocks - 1].block_hash if num_cached_blocks else None
                    parents = [before, *hashes[:-1]]
            self.driver.materialised(
                [block.block_id for block in cached],
                hashes,
                _access(self.driver, request),
                parents,
            )

    def cache_partial_block(
        self, request: Request, block: KVCacheBlock, *args: Any, **kwargs: Any
    ) -> BlockHashWithGroupId | None:
        # With EAGLE, where KV-cache groups have blocks of several sizes: a prompt's last block.
        was_cached = block.block_hash is not None
        key = super().cache_partial_block(request, block, *args, **kwargs)
        if key is not None and not was_cached:
            self.caches_parts = True
            self.driver.materialised([block.block_id], [key], _access(self.driver, request))
        return key

    def touch(self, blocks: Sequence[KVCacheBlock]) -> None:
        queue, driver = self.free_block_queue, self.driver
        if not driver.follows_candidates:
            super().touch(blocks)
            return
        if queue.unhashed_at_the_end:
            queue.unhashed_at_the_end.difference_update(block.block_id for block in blocks)
        candidates = [
            block.block_id
            for block in blocks
            if block.ref_cnt == 0 and block._block_hash is not None
        ]
        super().touch(blocks)
        driver.held(candidates)
        if driver.told:
            driver.hit([block.block_id for block in blocks if not block.is_null])

    def evict_blocks(self, block_ids: set[int]) -> None:
        before = [block for block in map(self.blocks.__getitem__, block_ids) if block.block_hash]
        super().evict_blocks(block_ids)
        # vLLM takes the content of held blocks only when what was to be loaded into them failed.
        if held := [block.block_id for block in before if block.ref_cnt]:
            self.driver.refunded(held)
        for block in before:
            if block.ref_cnt:
                continue
            self.driver.invalidated(block.block_id)
            if self.driver.native:
                self.free_block_queue.scattered = True
            else:
                FreeKVCacheBlockQueue.remove(self.free_block_queue, block)
                FreeKVCacheBlockQueue.prepend_n(self.free_block_queue, [block])

    def reset_prefix_cache(self) -> bool:
        done = super().reset_prefix_cache()
        if done:
            self.driver.reset()
            self.free_block_queue.unhashed_at_the_end.clear()
            self.free_block_queue.scattered = False
        return done


class ShieldKVCacheManager(KVCacheManager):
    """Tells the driver for which request blocks are allocated, and what lookups found."""

    block_pool: ShieldBlockPool

    def allocate_slots(self, request: Request, *args: Any, **kwargs: Any) -> KVCacheBlocks | None:
        driver = self.block_pool.driver
        driver.allocate_for(lambda: _access(driver, request), request.num_preemptions == 0)
        try:
            return super().allocate_slots(request, *args, **kwargs)
        finally:
            driver.allocate_for(None)

    def record_prefix_cache_stats(self, request: Request, num_hits: int) -> None:
        super().record_prefix_cache_stats(request, num_hits)
        # As vLLM counts: one that skips the lookup or comes back from preemption is no query.
        if self.prefix_cache_lookup_enabled(request) and request.num_preemptions == 0:
            driver = self.block_pool.driver
            group = tag_of(driver, request).identity.group
            driver.count("query_tokens", group, request.num_tokens)
            driver.count("hit_tokens", group, num_hits)


class Tag(NamedTuple):
    """What the scheduler reads off a request when it arrives; kept on vLLM's request object."""

    identity: Identity
    prefix_id: str | None


def tag(request: Request, tag: Tag) -> None:
    """Attach a tag to a request."""
    request.prefixshield = tag  # type: ignore[attr-defined]


def tag_of(driver: PolicyDriver, request: Request) -> Tag:
    """A request's tag; that of the default group if it has none."""
    return getattr(request, "prefixshield", None) or Tag(driver.default, None)


def _access(driver: PolicyDriver, request: Request) -> Access:
    identity, prefix_id = tag_of(driver, request)
    return driver.access(identity, request.request_id, prefix_id)


def take_over(manager: KVCacheManager, driver: PolicyDriver) -> None:
    """Give the live manager, its pool and its free queue our classes; all or nothing.

    Raises:
        IncompatibleEngineError: one of them is not of vLLM's own plain class, or blocks are
            cached already.

    """
    pool = manager.block_pool
    queue = pool.free_block_queue
    for found, expected in (
        (manager, KVCacheManager),
        (pool, BlockPool),
        (queue, FreeKVCacheBlockQueue),
    ):
        if type(found) is not expected:
            raise IncompatibleEngineError(
                f"vLLM uses {type(found).__module__}.{type(found).__qualname__}, expected "
                f"{expected.__module__}.{expected.__qualname__}: this model or option needs a "
                "block pool of its own, which PrefixShield does not support"
            )
    if len(pool.cached_block_hash_to_block):
        raise IncompatibleEngineError("blocks are cached before the first request, expected none")
    queue.__class__, pool.__class__ = ShieldQueue, ShieldBlockPool
    manager.__class__ = ShieldKVCacheManager
    shield_pool = cast(ShieldBlockPool, pool)
    shield_pool.driver = driver
    shield_pool.chained_groups = frozenset(
        number
        for number, of_type in enumerate(manager.coordinator.single_type_managers)
        if type(of_type) is FullAttentionManager
    )
    shield_pool.free_block_queue.driver = driver
    shield_pool.free_block_queue.blocks = pool.blocks
    shield_pool.free_block_queue.unhashed_at_the_end = set()
    shield_pool.free_block_queue.scattered = False
