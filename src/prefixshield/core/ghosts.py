"""Ghosts: which blocks a group lost before they were ever reused (policy.md section 7).

A block that is materialised again while its ghost is remembered was reused after all, only too
late. Source: the ghost queue of S3-FIFO (Yang et al., SOSP 2023) and its size. Here it is shared
out: a group that floods it forgets its own ghosts, never those of a group that has fewer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from heapq import heapify, heappop, heappush, heapreplace

#: Ghosts per block of the pool, over all groups: as many as S3-FIFO keeps.
GHOSTS_PER_BLOCK = 0.9

#: A group is ranked anew when it has grown by so many ghosts.
_SLACK = 8


class _Group:
    """The ghosts of one group: hash → who made the block, the latest last."""

    __slots__ = ("bound", "ghosts", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.ghosts: OrderedDict[Hashable, Hashable] = OrderedDict()
        self.bound = 0
        """At least as many as there are ghosts, as the heap has it."""


class Ghosts:
    """The most recently lost unproven blocks of each group, bounded over all groups."""

    def __init__(self, capacity_blocks: int) -> None:
        self._limit = max(1, int(GHOSTS_PER_BLOCK * capacity_blocks))
        self._groups: dict[str, _Group] = {}
        self._numbered: list[_Group] = []
        self._heap: list[tuple[int, int]] = []  # (-bound, number), superseded ones included
        self._count = 0

    def __len__(self) -> int:
        """Ghosts of all groups."""
        return self._count

    def remember(self, group: str, hashes: Iterable[Hashable], makers: Iterable[Hashable]) -> None:
        """Blocks were evicted unproven; the requests that materialised them. O(log groups) each."""
        own = self._groups.get(group)
        if own is None:
            own = self._groups[group] = _Group(len(self._numbered))
            self._numbered.append(own)
        ghosts = own.ghosts
        share = self._limit // len(self._groups)
        for block_hash, maker in zip(hashes, makers, strict=True):
            before = len(ghosts)
            ghosts[block_hash] = maker
            if len(ghosts) == before:
                ghosts.move_to_end(block_hash)
                continue
            if before >= own.bound:
                self._rank(own)
            if self._count < self._limit:
                self._count += 1
            elif before >= share:
                ghosts.popitem(last=False)
            else:  # with this one it has no more than its share
                self._largest().ghosts.popitem(last=False)

    def recall(self, group: str, hashes: Iterable[Hashable]) -> list[Hashable | None]:
        """The makers of blocks that were lost, whose ghosts are laid to rest; None: no ghost."""
        own = self._groups.get(group)
        if own is None or not own.ghosts:
            return [None for _ in hashes]
        before = len(own.ghosts)
        makers = [own.ghosts.pop(block_hash, None) for block_hash in hashes]
        self._count -= before - len(own.ghosts)
        return makers

    def size(self, group: str) -> int:
        """Number of ghosts remembered for a group."""
        own = self._groups.get(group)
        return len(own.ghosts) if own else 0

    def sizes(self) -> dict[str, int]:
        """Number of ghosts remembered, by group."""
        return {name: len(group.ghosts) for name, group in self._groups.items()}

    def _rank(self, group: _Group) -> None:
        """A group has more ghosts than the heap has it with."""
        group.bound = len(group.ghosts) + _SLACK
        heappush(self._heap, (-group.bound, group.number))
        if len(self._heap) > 2 * len(self._groups) + 16:
            self._heap = [(-one.bound, one.number) for one in self._numbered]
            heapify(self._heap)

    def _largest(self) -> _Group:
        """The group with the most ghosts, of several the one seen first."""
        heap = self._heap
        while True:
            bound, number = heap[0]
            group = self._numbered[number]
            size = len(group.ghosts)
            if group.bound != -bound:
                heappop(heap)
            elif size < group.bound:
                group.bound = size
                heapreplace(heap, (-size, number))
            else:
                return group
