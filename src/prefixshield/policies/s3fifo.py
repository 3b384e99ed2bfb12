"""S3-FIFO: quick demotion with three FIFO queues (policy.md section 9), a baseline.

Source: Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023: a small FIFO of
10% of the blocks, a main FIFO of the rest, a ghost FIFO of hashes as long as the main one, a
counter per block capped at 3. A block that leaves the small FIFO goes on to the main one if it was
hit at least twice, else out and into the ghost; one that is found in the ghost enters the main
FIFO at once. Deviations: a held block keeps its place and is passed over; a batch of victims is
chosen before any of the blocks that they make room for is inserted. It knows no groups, except
that a hash is known within its group.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from heapq import heappop, heappush

from prefixshield.policies.base import Access, Policy, PolicySetup

SMALL_SHARE = 0.1
MAX_HITS = 3
HITS_TO_MAIN = 2


class S3Fifo(Policy):
    """Small, main and ghost FIFO over the whole pool."""

    name = "s3fifo"

    def __init__(self, setup: PolicySetup) -> None:
        super().__init__(setup)
        self._small_capacity = int(setup.usable_blocks * SMALL_SHARE)
        self._main_capacity = setup.usable_blocks - self._small_capacity
        self._hits = bytearray(setup.capacity_blocks)
        self._held = bytearray(b"\x01" * setup.capacity_blocks)
        self._hash: list[Hashable] = [None] * setup.capacity_blocks
        self.reset()

    def reset(self) -> None:
        self._small, self._main = _Fifo(), _Fifo()
        self._ghost: OrderedDict[Hashable, None] = OrderedDict()
        self._candidates = 0
        self._has_evicted = False

    def materialise(
        self,
        blocks: Sequence[int],
        hashes: Sequence[Hashable],
        access: Access,
        parents: Sequence[Hashable | None] | None = None,
    ) -> None:
        for block, block_hash in zip(blocks, hashes, strict=True):
            # One whose content was lost while it was held still stands in its old queue.
            self._queue_of(block).discard(block)
            key = (access.group, block_hash)
            self._hash[block] = key
            self._hits[block] = 0
            self._held[block] = 1
            if key in self._ghost:
                del self._ghost[key]
                self._main.push(block)
            elif not self._has_evicted and len(self._small) >= self._small_capacity:
                self._main.push(block)  # while the pool fills up, the small FIFO is no larger
            else:
                self._small.push(block)

    def hit(self, blocks: Sequence[int], access: Access) -> Sequence[int]:
        for block in blocks:
            self._hits[block] = min(MAX_HITS, self._hits[block] + 1)
        return ()

    def hold(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._held[block] = 1
        self._candidates -= len(blocks)

    def release(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._held[block] = 0
            self._queue_of(block).come_back(block)
        self._candidates += len(blocks)

    def evict(self, count: int, access: Access) -> list[int]:
        self._require(count)
        self._candidates -= count
        self._has_evicted |= count > 0
        return [self._evict_one() for _ in range(count)]

    def _evict_one(self) -> int:
        while True:
            victim = None
            if len(self._main) <= self._main_capacity:
                victim = self._leave_small()
            if victim is None:
                victim = self._leave_main()
            if victim is None:  # all of the main FIFO is held
                victim = self._leave_small()
            if victim is not None:
                return victim

    def _leave_small(self) -> int | None:
        """The small FIFO's next victim; None: it has no candidate left."""
        while (block := self._small.pop(self._held)) is not None:
            if self._hits[block] < HITS_TO_MAIN:
                self._remember(self._hash[block])
                return block
            self._main.push(block)
        return None

    def _leave_main(self) -> int | None:
        """The main FIFO's next victim, the hit ones given another round; None: no candidate."""
        while (block := self._main.pop(self._held)) is not None:
            if self._hits[block] == 0:
                return block
            self._hits[block] -= 1
            self._main.push(block)
        return None

    def _remember(self, key: Hashable) -> None:
        self._ghost[key] = None
        self._ghost.move_to_end(key)
        if len(self._ghost) > self._main_capacity:
            self._ghost.popitem(last=False)

    def forget(self, block: int) -> None:
        self._queue_of(block).discard(block)
        self._candidates -= 1

    @property
    def candidate_count(self) -> int:
        return self._candidates

    def check(self) -> None:
        standing = self._small.standing() + self._main.standing()
        assert len(set(standing)) == len(standing), "a block stands in two places"
        assert sum(not self._held[block] for block in standing) == self._candidates
        assert len(self._ghost) <= self._main_capacity

    def _queue_of(self, block: int) -> _Fifo:
        return self._main if block in self._main else self._small


class _Fifo:
    """Blocks in first-in order. A held one that is met steps aside and keeps its precedence."""

    def __init__(self) -> None:
        self._next_sequence = 0
        self._line: OrderedDict[int, int] = OrderedDict()  # block → sequence number, ascending
        self._aside: dict[int, int] = {}  # all of them came before whoever is in line
        self._returned: list[tuple[int, int]] = []  # heap of (sequence, block): aside, released
        self._is_returned: set[int] = set()

    def __len__(self) -> int:
        return len(self._line) + len(self._aside)

    def __contains__(self, block: int) -> bool:
        return block in self._line or block in self._aside

    def push(self, block: int) -> None:
        """Add a block at the end."""
        self._line[block] = self._next_sequence
        self._next_sequence += 1

    def pop(self, held: bytearray) -> int | None:
        """Take out the first block that is not held; None: all are."""
        while self._returned:
            sequence, block = heappop(self._returned)
            if self._aside.get(block) == sequence:  # not discarded since
                self._is_returned.discard(block)
                if not held[block]:
                    del self._aside[block]
                    return block
        while self._line:
            block, sequence = self._line.popitem(last=False)
            if not held[block]:
                return block
            self._aside[block] = sequence
        return None

    def come_back(self, block: int) -> None:
        """A block of this queue is no longer held."""
        if block in self._aside and block not in self._is_returned:
            self._is_returned.add(block)
            heappush(self._returned, (self._aside[block], block))

    def discard(self, block: int) -> None:
        """Take a block out, wherever it stands, if it is here."""
        self._line.pop(block, None)
        self._aside.pop(block, None)
        self._is_returned.discard(block)

    def standing(self) -> list[int]:
        """All blocks."""
        return [*self._line, *self._aside]
