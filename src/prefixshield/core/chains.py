"""Chains: which cached blocks no lookup can reach (policy.md section 7).

A lookup follows a prefix from its first block and stops at the first one that is missing. A cached
block whose predecessor, or any block before that, has left the cache is an orphan: it occupies
memory and cannot be hit until its predecessors are materialised again.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

#: No block, no link.
_NONE = -1

#: One call looks at most at this many links for those that became orphans or can be reached again;
#: the calls that follow look at the others. So a call costs no more when much hangs on a prefix.
LOOKS_PER_CALL = 4096


class Turned(NamedTuple):
    """Blocks that are found to have turned, one by one."""

    lost: list[int]
    """They became orphans."""
    back: list[int]
    """They can be reached again."""


class Chains:
    """Cached blocks by group and key, and what precedes what.

    A key names a whole prefix up to its block. O(1) per block added or removed, and per block that
    becomes an orphan or is reachable again: of many, a call finds some (``LOOKS_PER_CALL``). Every
    key that is cached, or that precedes one, has a link: a number, under which the lists below say
    what is known of it.
    """

    def __init__(self, blocks: int) -> None:
        """``blocks``: those that are cached are among 0 .. blocks - 1."""
        self._blocks = blocks
        self.clear()

    def clear(self) -> None:
        """Nothing is cached."""
        self.broken = False
        """False: there has been no orphan since all was empty."""
        self._groups: dict[str, dict[Hashable, int]] = {}  # the link of each key
        self._link = array("i", [_NONE]) * self._blocks  # of each block
        self._unused: list[int] = []  # links
        self._doubtful: list[int] = []  # links after one that turned: they may have to turn, too
        # Of each link: its key and its group's links; the block that was cached first (none: only
        # keys that it precedes are known); the others, in order; the link that precedes it; the
        # one that it precedes or, in order, the several; whether it can be reached.
        self._key: list[Hashable] = []
        self._links: list[dict[Hashable, int] | None] = []
        self._block = array("i")
        self._copies: dict[int, dict[int, None]] = {}
        self._parent = array("i")
        self._child = array("i")
        self._children: dict[int, dict[int, None]] = {}
        self._reachable = bytearray()

    def is_orphan(self, block: int) -> bool:
        """Whether no lookup can reach a cached block, as far as found."""
        link = self._link[block]
        return link != _NONE and not self._reachable[link]

    def key(self, block: int) -> Hashable:
        """The key of a cached block."""
        return self._key[self._link[block]]

    def add(
        self,
        blocks: Sequence[int],
        group: str,
        keys: Sequence[Hashable],
        parents: Sequence[Hashable | None],
    ) -> Turned:
        """Blocks are cached, each under a key; returns those that turned, of any.

        ``parents``: the key that precedes each; None: it can be hit whatever else is cached.
        """
        links = self._groups.get(group)
        if links is None:
            links = self._groups[group] = {}
        turned = Turned([], [])
        looks = LOOKS_PER_CALL
        link, last = _NONE, None  # just added: mostly the parent of what follows
        for block, key, parent in zip(blocks, keys, parents, strict=True):
            before = link if parent == last else links.get(parent, _NONE)
            link, last = links.get(key, _NONE), key
            if link == _NONE:
                link = self._new(key, links)
            self._link[block] = link
            if self._block[link] != _NONE:
                self._copies.setdefault(link, {})[block] = None
                continue
            self._block[link] = block
            reachable = True
            if parent is not None:
                if before == _NONE:
                    before = self._new(parent, links)
                self._follow(before, link)
                reachable = self._block[before] != _NONE and bool(self._reachable[before])
            self._reachable[link] = reachable
            if not reachable:
                self.broken = True
            elif self._child[link] != _NONE:
                looks = self._turn(self._following(link), looks, turned)
        self._turn((), looks, turned)
        return turned

    def remove(self, blocks: Iterable[int]) -> Turned:
        """Blocks are cached no more; returns those that are found to have turned.

        Among them are blocks that were removed after the one that orphaned them.
        """
        link_of, parents, children = self._link, self._parent, self._child
        turned = Turned([], [])
        looks = LOOKS_PER_CALL
        for block in blocks:
            link = link_of[block]
            link_of[block] = _NONE
            if self._copies and link in self._copies:
                self._remove_copy(link, block)
                continue
            self._block[link] = _NONE
            before = parents[link]
            if before != _NONE:
                parents[link] = _NONE
                self._follow_no_more(before, link)
                if self._block[before] == _NONE and children[before] == _NONE:
                    self._forget(before)
            if children[link] == _NONE:
                self._forget(link)
            else:
                self.broken = True
                looks = self._turn(self._following(link), looks, turned)
        self._turn((), looks, turned)
        return turned

    def _remove_copy(self, link: int, block: int) -> None:
        """One of several blocks under a key is cached no more."""
        copies = self._copies[link]
        if self._block[link] == block:
            self._block[link] = block = next(iter(copies))
        del copies[block]
        if not copies:
            del self._copies[link]

    def _new(self, key: Hashable, links: dict[Hashable, int]) -> int:
        """A link for a key under which no block is cached yet."""
        if self._unused:
            link = self._unused.pop()
            self._key[link], self._links[link] = key, links
        else:
            link = len(self._key)
            self._key.append(key)
            self._links.append(links)
            for column in (self._block, self._parent, self._child):
                column.append(_NONE)
            self._reachable.append(True)
        links[key] = link
        return link

    def _forget(self, link: int) -> None:
        """Nothing is cached under a key, nor under one that it precedes."""
        links = self._links[link]
        assert links is not None, "it is in use"
        del links[self._key[link]]
        self._key[link] = self._links[link] = None
        self._unused.append(link)

    def _follow(self, before: int, link: int) -> None:
        """A link is preceded by another."""
        self._parent[link] = before
        if before in self._children:
            self._children[before][link] = None
        elif self._child[before] == _NONE:
            self._child[before] = link
        else:  # ordered: what becomes an orphan first does not depend on how a process hashes
            self._children[before] = {self._child[before]: None, link: None}

    def _follow_no_more(self, before: int, link: int) -> None:
        """A link is preceded by another no more."""
        children = self._children.get(before)
        if children is None:
            self._child[before] = _NONE
            return
        del children[link]
        self._child[before] = next(iter(children))
        if len(children) == 1:
            del self._children[before]

    def _following(self, link: int) -> Iterable[int]:
        """The links that a link precedes; there is one at least."""
        return self._children.get(link) or (self._child[link],)

    def _turn(self, links: Iterable[int], looks: int, turned: Turned) -> int:
        """Turn links, and all that follow those, where need be; returns the looks that are left.

        What there are no looks left for stays in doubt.
        """
        blocks, parents, reachable = self._block, self._parent, self._reachable
        doubtful = self._doubtful
        doubtful += links
        while doubtful and looks:
            looks -= 1
            link = doubtful.pop()
            before = parents[link]
            can_be = before == _NONE or (blocks[before] != _NONE and bool(reachable[before]))
            if blocks[link] == _NONE or reachable[link] == can_be:
                continue
            reachable[link] = can_be
            found = turned.back if can_be else turned.lost
            found.append(blocks[link])
            if link in self._copies:
                found += self._copies[link]
            if self._child[link] != _NONE:
                doubtful += self._following(link)
        if len(doubtful) > 2 * len(self._key):
            doubtful[:] = dict.fromkeys(doubtful)
        return looks
