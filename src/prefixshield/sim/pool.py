"""The simulated block pool: contents, reference counts, lookup and free blocks.

It behaves as vLLM's does where a policy can tell: a block cached twice under one hash is two
blocks, of which lookup returns the one cached first; released blocks become candidates in the
order given; truly free blocks are used before any cached one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from prefixshield.core.shares import Shares
from prefixshield.policies.base import Access, Policy


class Content(NamedTuple):
    """What a cached block holds, and who pays for it."""

    owner: str
    """Group whose request materialised it."""
    namespace: str
    block_hash: Hashable


class SimBlockPool:
    """Blocks 0 .. capacity_blocks - 1 under one policy."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.capacity_blocks = policy.capacity_blocks
        self._free = deque(range(self.capacity_blocks))
        self._references = [0] * self.capacity_blocks
        self._content: list[Content | None] = [None] * self.capacity_blocks
        # (namespace, hash) → its blocks, the one cached first in front.
        self._cached: dict[tuple[str, Hashable], dict[int, None]] = {}
        share = policy.share_blocks
        self.shares = None if share is None else Shares(self.capacity_blocks, share)
        """The count of every group's blocks; None: the policy divides nothing."""

    @property
    def largest_request(self) -> int:
        """How many blocks a request can get at most, when no other runs."""
        share = self.policy.share_blocks
        return self.capacity_blocks if share is None else share

    def available_blocks(self, group: str) -> int:
        """How many blocks an allocation for the group could get now."""
        if self.shares is not None:
            return self.shares.share_blocks - self.shares.held[group]
        return len(self._free) + self.policy.candidate_count

    def lookup(self, namespace: str, hashes: Sequence[Hashable]) -> list[int]:
        """The cached blocks of the longest resident prefix of ``hashes``."""
        blocks: list[int] = []
        for block_hash in hashes:
            cached = self._cached.get((namespace, block_hash))
            if cached is None:
                break
            blocks.append(next(iter(cached)))
        return blocks

    def hold(self, blocks: Sequence[int]) -> None:
        """A request takes a reference to cached blocks."""
        candidates = [block for block in blocks if not self._references[block]]
        self.policy.hold(candidates)
        if self.shares is not None:
            self.shares.hold(candidates)
        for block in blocks:
            self._references[block] += 1

    def allocate(self, count: int, access: Access) -> tuple[list[int], list[tuple[int, Content]]]:
        """Blocks for a request, held once, and what had to be evicted for them, in victim order.

        ``count`` is at most ``available_blocks`` of the group.
        """
        from_free = min(count, len(self._free))
        if self.shares is not None:
            from_free = min(from_free, self.shares.room(access.group))
        victims = self.policy.evict(count - from_free, access)
        blocks = [self._free.popleft() for _ in range(from_free)] + victims
        evicted = [(block, self._drop_content(block)) for block in victims]
        for block in blocks:
            assert self._references[block] == 0, f"block {block} is held"
            self._references[block] = 1
        if self.shares is not None:
            self.shares.allocate(blocks, access.group)
        return blocks, evicted

    def cache(
        self,
        blocks: Sequence[int],
        namespace: str,
        hashes: Sequence[Hashable],
        access: Access,
        after: Hashable | None = None,
    ) -> None:
        """Held blocks without content become cached: materialised by ``access``.

        ``hashes`` follow each other in one prefix; ``after``: the hash before them, if any.
        """
        for block, block_hash in zip(blocks, hashes, strict=True):
            assert self._content[block] is None, f"block {block} is cached already"
            self._content[block] = Content(access.group, namespace, block_hash)
            self._cached.setdefault((namespace, block_hash), {})[block] = None
        self.policy.materialise(blocks, hashes, access, [after, *hashes][: len(hashes)])

    def release(self, blocks: Sequence[int]) -> None:
        """Give references back; blocks in the order in which they should be evicted."""
        candidates: list[int] = []
        emptied: list[int] = []
        for block in blocks:
            self._references[block] -= 1
            if self._references[block] == 0:
                (emptied if self._content[block] is None else candidates).append(block)
        self._free.extendleft(emptied)
        self.policy.release(candidates)
        if self.shares is not None:
            self.shares.release([*candidates, *emptied])
            self.shares.empty(emptied)

    def invalidate(self, block: int) -> None:
        """A cached block loses its content without being evicted."""
        self._drop_content(block)
        if self._references[block] == 0:
            self.policy.forget(block)
            self._free.appendleft(block)
            if self.shares is not None:
                self.shares.empty([block])

    def reset(self) -> None:
        """Empty the cache. Nothing may be held."""
        assert not any(self._references), "blocks are held"
        self.policy.reset()
        self._cached.clear()
        self._content = [None] * self.capacity_blocks
        self._free = deque(range(self.capacity_blocks))
        if self.shares is not None:
            self.shares.clear()

    def check(self) -> None:
        """Assert that every block is exactly one of held, candidate or truly free."""
        self.policy.check()
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        candidates = 0
        for block, (references, content) in enumerate(
            zip(self._references, self._content, strict=True)
        ):
            assert references >= 0
            idle = references == 0
            assert (block in free) == (idle and content is None), f"block {block}: free list"
            candidates += idle and content is not None
        assert candidates == self.policy.candidate_count, "candidates differ"
        cached = sum(len(blocks) for blocks in self._cached.values())
        assert cached == sum(content is not None for content in self._content)

    def _drop_content(self, block: int) -> Content:
        content = self._content[block]
        assert content is not None, f"block {block} is not cached"
        key = (content.namespace, content.block_hash)
        del self._cached[key][block]
        if not self._cached[key]:
            del self._cached[key]
        self._content[block] = None
        return content
