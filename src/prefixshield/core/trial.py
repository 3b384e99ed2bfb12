"""The trial: six rules side by side on miniatures of the pool; the pool follows the best.

Each miniature serves a sample of the block accesses, chosen by hash, in proportion fewer blocks
(Waldspurger et al., "Cache modeling and optimization using miniature simulations", USENIX ATC
2017), under one rule: a proven share, with debts called in or not. What the pool then does follows
from two questions (policy.md section 7): would calling in debts have served more, and which proven
share would have served most?
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from itertools import product, repeat
from zlib import crc32

from prefixshield.core.ghosts import Ghosts
from prefixshield.core.ledger import Ledger
from prefixshield.core.order import Order, Rule
from prefixshield.core.retention import RetentionClass

#: Blocks of a miniature; a pool that is no larger has a copy of itself.
MINIATURE_BLOCKS = 512

#: What a miniature remembers fades over this many times as many accesses as the pool has blocks.
MEMORY_PER_BLOCK = 16

#: The proven shares on trial; the first is the one that a pool begins with.
PROVEN_SHARES = (0.9, 0.0, 0.5)

RULES = tuple(Rule(share, calls) for calls, share in product((True, False), PROVEN_SHARES))

#: Who makes blocks in a miniature, where no request comes back to its own.
_SOMEBODY = "somebody"

#: A block of a group.
Key = tuple[str, Hashable]


class Miniature:
    """One rule over a small pool that holds sampled blocks."""

    def __init__(self, capacity: int, ledger: Ledger, rule: Rule, rate: float) -> None:
        self.order = Order(capacity, ledger, rule, rate)
        self.ghosts = Ghosts(capacity)
        self._capacity = capacity
        self._block: dict[Key, int] = {}  # where each key is cached
        self._hash: list[Hashable] = [None] * capacity  # of each block
        self._free = list(range(capacity))
        self.value = 0.0
        """Blocks served, as they count for debts; faded."""
        self.served = 0.0
        """Blocks served; faded."""

    def serve(self, keys: Sequence[Key], t: float) -> tuple[int, int]:
        """Serve the blocks of one request; how many hit, of unproven and of proven blocks."""
        order = self.order
        keys = keys[: self._capacity]
        missing: list[Key] = []
        cached: list[int] = []
        reached = 0
        for key in keys:
            block = self._block.get(key)
            if block is None:
                missing.append(key)
                continue
            cached.append(block)
            reached += not missing  # or else no lookup reaches it
        order.hold(cached)
        hits = cached[:reached]
        proven = sum(order.retention(block) is not RetentionClass.PROBATIONARY for block in hits)
        order.reuse(hits, promote=False)
        if missing:
            self._make_room(len(missing), t)
            group = missing[0][0]
            makers = self.ghosts.recall(group, [block_hash for _, block_hash in missing])
            new = [self._free.pop() for _ in missing]
            for key, block in zip(missing, new, strict=True):
                self._block[key] = block
                self._hash[block] = key[1]
            order.admit(new, group, [maker is not None for maker in makers])
        order.append([self._block[key] for key in reversed(keys)])
        return reached - proven, proven

    def _make_room(self, count: int, t: float) -> None:
        """Lose blocks until so many are free."""
        for queue, blocks in self.order.take(max(0, count - len(self._free)), t):
            hashes = [self._hash[block] for block in blocks]
            for block_hash in hashes:
                del self._block[queue.group, block_hash]
            if queue.retention is RetentionClass.PROBATIONARY:
                self.ghosts.remember(queue.group, hashes, repeat(_SOMEBODY, len(hashes)))
            self._free += blocks


class Trial:
    """Serves samples of the accesses under all rules and says which one the pool should follow."""

    def __init__(self, capacity_blocks: int, ledger: Ledger) -> None:
        size = min(capacity_blocks, MINIATURE_BLOCKS)
        rate = size / max(1, capacity_blocks)
        self._ledger = ledger
        self._memory = MEMORY_PER_BLOCK * capacity_blocks
        self._sampled_below = rate * 2**32
        self._miniatures = [Miniature(size, ledger, rule, rate) for rule in RULES]
        self._best = self._miniatures[0]
        self._gain = 1.0  # of the accesses to come over the first ones: what makes these fade

    @property
    def rule(self) -> Rule:
        """The rule to follow."""
        return self._best.order.rule

    @property
    def proven_part(self) -> float:
        """Part of the pool that proven blocks would have, had it always followed the rule."""
        return self._best.order.proven_part

    def sampled(self, hashes: Sequence[Hashable]) -> Sequence[bool]:
        """Whether the miniatures see accesses to each of the blocks."""
        limit = self._sampled_below
        if limit >= 2**32:
            return [True] * len(hashes)
        return [
            crc32(name if isinstance(name, bytes) else repr(name).encode()) < limit
            for name in hashes
        ]

    def charged(self, group: str, t: float) -> None:
        """A group's debt may have grown."""
        for miniature in self._miniatures:
            if miniature.order.rule.calls_in_debts:
                miniature.order.charged(group, t)

    def debts_changed(self, t: float) -> None:
        """The ledger's contracts are others."""
        for miniature in self._miniatures:
            miniature.order.debts_changed(t)

    def serve(self, keys: Sequence[Key], accesses: int, t: float, discount: float) -> None:
        """A request has used blocks of one group, all in prefix order.

        ``keys``: those that are sampled. ``accesses``: how many there were. ``discount``: 0-1, by
        how much a hit on an unproven block counts less, because the group owes.
        """
        self._gain *= math.exp(accesses / self._memory)
        for miniature in self._miniatures:
            unproven, proven = miniature.serve(keys, t)
            miniature.value += self._gain * ((1 - discount) * unproven + proven)
            miniature.served += self._gain * (unproven + proven)
        self._decide()
        if self._gain > 1e100:
            for miniature in self._miniatures:
                miniature.value /= self._gain
                miniature.served /= self._gain
            self._gain = 1.0

    def _decide(self) -> None:
        """Debts are called in where that is of more value; then the share that serves most counts.

        What is followed already goes on while nothing is better.
        """
        best = {True: 0.0, False: 0.0}
        for miniature in self._miniatures:
            calls = miniature.order.rule.calls_in_debts
            best[calls] = max(best[calls], miniature.value)
        calls = self.rule.calls_in_debts
        if best[not calls] > best[calls]:
            calls = not calls
        rivals = [one for one in self._miniatures if one.order.rule.calls_in_debts == calls]
        most = max(rivals, key=lambda one: one.served)
        if self._best not in rivals or most.served > self._best.served:
            self._best = most
