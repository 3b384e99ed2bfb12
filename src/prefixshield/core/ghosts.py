"""Ghosts: which blocks a group lost before they were ever reused (policy.md section 7).

A block that is materialised again while its ghost is remembered was reused after all, only too
late. Source: the ghost queue of S3-FIFO (Yang et al., SOSP 2023) and its size. Here it is shared
out: a group that floods it forgets its own ghosts, never those of a group that has fewer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

#: Ghosts per block of the pool, over all groups: as many as S3-FIFO keeps.
GHOSTS_PER_BLOCK = 0.9


class Ghosts:
    """The most recently lost unproven blocks of each group, bounded over all groups."""

    def __init__(self, capacity_blocks: int) -> None:
        self._limit = max(1, int(GHOSTS_PER_BLOCK * capacity_blocks))
        self._groups: dict[str, OrderedDict[Hashable, Hashable]] = {}
        self._count = 0

    def __len__(self) -> int:
        """Ghosts of all groups."""
        return self._count

    def remember(self, group: str, block_hash: Hashable, maker: Hashable) -> None:
        """A block that the request ``maker`` materialised was evicted unproven."""
        ghosts = self._groups.setdefault(group, OrderedDict())
        self._count += block_hash not in ghosts
        ghosts[block_hash] = maker
        ghosts.move_to_end(block_hash)
        if self._count > self._limit:
            if len(ghosts) * len(self._groups) <= self._limit:  # it has no more than its share
                ghosts = max(self._groups.values(), key=len)
            ghosts.popitem(last=False)
            self._count -= 1

    def recall(self, group: str, block_hash: Hashable) -> Hashable | None:
        """The maker of a block that was lost, whose ghost is laid to rest; None: no ghost."""
        ghosts = self._groups.get(group)
        maker = ghosts.pop(block_hash, None) if ghosts else None
        self._count -= maker is not None
        return maker

    def size(self, group: str) -> int:
        """Number of ghosts remembered for a group."""
        return len(self._groups.get(group, ()))
