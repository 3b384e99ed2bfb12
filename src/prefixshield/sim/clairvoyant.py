"""The clairvoyant bound: evicts the candidate whose next use lies farthest ahead.

Source: Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems
Journal 1966. Deviations: held blocks are excepted, and it looks at blocks, not at prefixes, so a
block may be kept whose predecessor is gone; it is what block-wise policies are measured against,
not a proven optimum. Told of one group's uses only, it bounds what that group can get: the blocks
of the others are never used again and go first. It knows the whole trace, so it exists in serial
replay only.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from heapq import heapify, heappop, heappush

from prefixshield.policies.base import Access, Policy, PolicySetup

#: A block of one request: (group, block hash).
Use = tuple[str, Hashable]


class Future:
    """When every block is used next, for requests that are served in the order given."""

    def __init__(self, requests: Iterable[tuple[Hashable, Iterable[Use]]]) -> None:
        """``requests``: the id of each, and the blocks that it can hit."""
        self._position: dict[Hashable, int] = {}
        self._positions: dict[Use, deque[int]] = {}
        self._now = -1
        for position, (request_id, uses) in enumerate(requests):
            self._position[request_id] = position
            for use in uses:
                self._positions.setdefault(use, deque()).append(position)

    def serve(self, request_id: Hashable) -> None:
        """From now on this request, and what came before it, is no future."""
        self._now = self._position[request_id]

    def next_use(self, use: Use) -> float:
        """Position of the request that uses a block next; infinite when none does."""
        positions = self._positions.get(use, deque())
        while positions and positions[0] <= self._now:
            positions.popleft()
        return positions[0] if positions else math.inf


class Clairvoyant(Policy):
    """A heap of candidates, the one used last in front; of those never used again, native order."""

    name = "clairvoyant"

    def __init__(self, setup: PolicySetup, future: Future) -> None:
        super().__init__(setup)
        self._future = future
        self._use: list[Use] = [("", None)] * setup.capacity_blocks
        self._release_number = 0
        self.reset()

    def reset(self) -> None:
        self._candidates: dict[int, int] = {}  # block → number of its release
        self._heap: list[tuple[float, int, int]] = []  # (-next use, release number, block)

    def materialise(
        self,
        blocks: Sequence[int],
        hashes: Sequence[Hashable],
        access: Access,
        parents: Sequence[Hashable | None] | None = None,
    ) -> None:
        for block, block_hash in zip(blocks, hashes, strict=True):
            self._use[block] = (access.group, block_hash)

    def hit(self, blocks: Sequence[int], access: Access) -> Sequence[int]:
        self._future.serve(access.request_id)
        return ()

    def hold(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            del self._candidates[block]

    def release(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._release_number += 1
            self._candidates[block] = self._release_number
            entry = (-self._future.next_use(self._use[block]), self._release_number, block)
            heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._candidates) + 16:
            self._heap = [entry for entry in self._heap if self._is_current(entry)]
            heapify(self._heap)

    def evict(self, count: int, access: Access) -> list[int]:
        self._require(count)
        victims: list[int] = []
        while len(victims) < count:
            entry = heappop(self._heap)
            if self._is_current(entry):
                del self._candidates[entry[2]]
                victims.append(entry[2])
        return victims

    def forget(self, block: int) -> None:
        del self._candidates[block]

    @property
    def candidate_count(self) -> int:
        return len(self._candidates)

    def check(self) -> None:
        current = {entry[2] for entry in self._heap if self._is_current(entry)}
        assert current == set(self._candidates), "a candidate has no entry in the heap"

    def _is_current(self, entry: tuple[float, int, int]) -> bool:
        _, release_number, block = entry
        return self._candidates.get(block) == release_number
