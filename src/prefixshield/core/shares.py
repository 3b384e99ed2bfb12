"""Shares: how many blocks each group has of the equal part of the pool it may have.

Kept by a pool whose policy divides it (``Policy.share_blocks``). A block counts for the group it
was last handed out to, partly filled ones too, until it is handed out again or truly free. Groups
have no block in common, because no lookup leaves its namespace.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


class Shares:
    """Counts of blocks by group."""

    def __init__(self, capacity_blocks: int, share_blocks: int) -> None:
        self.share_blocks = share_blocks
        self.resident: Counter[str] = Counter()
        """Blocks that count for the group, held or cached."""
        self.held: Counter[str] = Counter()
        """Those of them that a request holds; the others are the group's candidates."""
        self._group: list[str | None] = [None] * capacity_blocks

    def room(self, group: str) -> int:
        """How many truly free blocks the group may still take."""
        return max(0, self.share_blocks - self.resident[group])

    def allocate(self, blocks: Iterable[int], group: str) -> None:
        """Free blocks, truly free ones or victims, are handed out to the group and held."""
        for block in blocks:
            self.empty([block])
            self._group[block] = group
            self.resident[group] += 1
            self.held[group] += 1

    def hold(self, blocks: Iterable[int]) -> None:
        """Candidates are held again."""
        for block in blocks:
            self.held[self._owner(block)] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Held blocks are held no more; cached ones stay resident."""
        for block in blocks:
            self.held[self._owner(block)] -= 1

    def empty(self, blocks: Iterable[int]) -> None:
        """Blocks that are not held become truly free, if they are not already."""
        for block in blocks:
            group = self._group[block]
            if group is not None:
                self._group[block] = None
                self.resident[group] -= 1

    def clear(self) -> None:
        """No block is held or cached."""
        self.resident.clear()
        self.held.clear()
        self._group = [None] * len(self._group)

    def _owner(self, block: int) -> str:
        group = self._group[block]
        assert group is not None, f"block {block} was not handed out"
        return group
