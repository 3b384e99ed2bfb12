"""Chains: which cached blocks no lookup can reach (policy.md section 7).

A lookup follows a prefix from its first block and stops at the first one that is missing. A cached
block whose predecessor, or any block before that, has left the cache is an orphan: it occupies
memory and cannot be hit until its predecessors are materialised again.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence


class _Link:
    """A key: the blocks cached under it, and the keys that it precedes or that precede it."""

    __slots__ = ("block", "children", "copies", "key", "links", "parent", "reachable")

    def __init__(self, links: dict[Hashable, _Link], key: Hashable) -> None:
        self.links = links
        self.key = key
        self.block: int | None = None
        """The block cached first; None: no block is, but keys that the key precedes are known."""
        self.copies: dict[int, None] | None = None  # the other blocks, in order
        self.parent: _Link | None = None
        # Ordered: what becomes an orphan first does not depend on how a process hashes.
        self.children: dict[_Link, None] | None = None
        self.reachable = True


class Chains:
    """Cached blocks by group and key, and what precedes what.

    A key names a whole prefix up to its block. O(1) per block added or removed, and per block that
    becomes an orphan or is reachable again.
    """

    def __init__(self) -> None:
        self._groups: dict[str, dict[Hashable, _Link]] = {}
        self._of_block: dict[int, _Link] = {}
        self.broken = False
        """False: there has been no orphan since all was empty."""

    def is_orphan(self, block: int) -> bool:
        """Whether no lookup can reach a cached block."""
        link = self._of_block.get(block)
        return link is not None and not link.reachable

    def add(
        self,
        blocks: Sequence[int],
        group: str,
        keys: Sequence[Hashable],
        parents: Sequence[Hashable | None],
    ) -> list[int]:
        """Blocks are cached, each under a key; returns those that can be reached again thereby.

        ``parents``: the key that precedes each; None: it can be hit whatever else is cached.
        """
        links = self._groups.get(group)
        if links is None:
            links = self._groups[group] = {}
        back: list[int] = []
        link: _Link | None = None
        for block, key, parent in zip(blocks, keys, parents, strict=True):
            before = link  # the one just added, which mostly is the parent
            link = links.get(key)
            if link is None:
                link = links[key] = _Link(links, key)
            self._of_block[block] = link
            if link.block is not None:
                if link.copies is None:
                    link.copies = {}
                link.copies[block] = None
                continue
            link.block = block
            link.reachable = True
            if parent is not None:
                if before is None or before.key != parent:
                    before = links.get(parent)
                    if before is None:
                        before = links[parent] = _Link(links, parent)
                if before.children is None:
                    before.children = {}
                before.children[link] = None
                link.parent = before
                if before.block is None or not before.reachable:
                    link.reachable = False
                    self.broken = True
                    continue
            if link.children:
                back += self._turn(link.children, reachable=True)
        return back

    def remove(self, block: int) -> Sequence[int]:
        """A block is cached no more; returns the blocks that become orphans thereby."""
        link = self._of_block.pop(block)
        if link.copies:
            if link.block == block:
                link.block = next(iter(link.copies))
                del link.copies[link.block]
            else:
                del link.copies[block]
            return ()
        link.block = link.copies = None
        before = link.parent
        if before is not None:
            link.parent = None
            assert before.children is not None, "it precedes the key"
            del before.children[link]
            if before.block is None and not before.children:
                del before.links[before.key]
        if not link.children:
            del link.links[link.key]
            return ()
        self.broken = True
        return self._turn(link.children, reachable=False)

    def clear(self) -> None:
        """Nothing is cached."""
        self._groups.clear()
        self._of_block.clear()
        self.broken = False

    def _turn(self, links: Iterable[_Link], *, reachable: bool) -> list[int]:
        """Mark keys and all that follow them; returns the blocks of those that changed."""
        turned: list[int] = []
        todo = list(links)
        while todo:
            link = todo.pop()
            if link.reachable == reachable:
                continue
            link.reachable = reachable
            assert link.block is not None, "a key that another precedes is cached"
            turned.append(link.block)
            if link.copies:
                turned += link.copies
            if link.children:
                todo += link.children
        return turned
