"""Chains: which cached blocks no lookup can reach (policy.md section 7).

A lookup follows a prefix from its first block and stops at the first one that is missing. A cached
block whose predecessor, or any block before that, has left the cache is an orphan: it occupies
memory and cannot be hit until its predecessors are materialised again.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable


class Chains:
    """Cached blocks by key, and what precedes what. A key names a whole prefix up to its block.

    O(1) per block added or removed, and per block that becomes an orphan or is reachable again.
    """

    def __init__(self) -> None:
        self._key: dict[int, Hashable] = {}
        # Ordered: what becomes an orphan first does not depend on how a process hashes.
        self._copies: dict[Hashable, dict[int, None]] = {}
        self._parent: dict[Hashable, Hashable | None] = {}
        self._children: dict[Hashable, dict[Hashable, None]] = {}
        self._unreachable: set[Hashable] = set()

    def is_orphan(self, block: int) -> bool:
        """Whether no lookup can reach a cached block."""
        return self._key.get(block) in self._unreachable

    def add(self, block: int, key: Hashable, parent: Hashable | None) -> list[int]:
        """A block is cached under a key; returns the blocks that can be reached again thereby.

        ``parent``: the key that precedes it; None: it can be hit whatever else is cached.
        """
        self._key[block] = key
        copies = self._copies.setdefault(key, {})
        copies[block] = None
        if len(copies) > 1:
            return []
        self._parent[key] = parent
        if parent is not None:
            self._children.setdefault(parent, {})[key] = None
            if parent not in self._copies or parent in self._unreachable:
                self._unreachable.add(key)
                return []
        return self._turn(self._children.get(key, ()), unreachable=False)

    def remove(self, block: int) -> list[int]:
        """A block is cached no more; returns the blocks that become orphans thereby."""
        key = self._key.pop(block)
        copies = self._copies[key]
        del copies[block]
        if copies:
            return []
        del self._copies[key]
        parent = self._parent.pop(key)
        if parent is not None:
            siblings = self._children[parent]
            del siblings[key]
            if not siblings:
                del self._children[parent]
        self._unreachable.discard(key)
        return self._turn(self._children.get(key, ()), unreachable=True)

    def clear(self) -> None:
        """Nothing is cached."""
        for state in (self._key, self._copies, self._parent, self._children, self._unreachable):
            state.clear()

    def _turn(self, keys: Iterable[Hashable], *, unreachable: bool) -> list[int]:
        """Mark keys and all that follow them; returns the blocks of those that changed."""
        turned: list[int] = []
        todo = list(keys)
        while todo:
            key = todo.pop()
            if (key in self._unreachable) == unreachable:
                continue
            (self._unreachable.add if unreachable else self._unreachable.remove)(key)
            turned += self._copies[key]
            todo += self._children.get(key, ())
        return turned
