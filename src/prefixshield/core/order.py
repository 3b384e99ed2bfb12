"""The default preset's order of reclamation (policy.md section 7), for pools and miniatures.

Two segments, unproven and proven blocks, each in native order (segmented LRU: Karedla, Love and
Wherry, "Caching strategies to improve disk system performance", IEEE Computer 1994), with the
second chances of S3-FIFO in the proven one (Yang et al., SOSP 2023). Which segment loses next is
decided by the proven share; whose block of it, by the debts that are called in.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence, Set
from typing import NamedTuple

from prefixshield.core.debtors import Collection, Debtors
from prefixshield.core.ledger import Ledger
from prefixshield.core.queues import CandidateQueues, Queue
from prefixshield.core.retention import RetentionClass

#: A proven block gets as many second chances as it was hit, at most this many (S3-FIFO's counter).
MAX_CHANCES = 3

#: An allocation grants at most this many second chances; then blocks go that have some left. So
#: what it costs does not grow with the pool where every block was hit.
ROUNDS = 8192

#: Until it is first full, a pool takes what this share leaves as unproven and the rest as proven.
FIRST_SHARE = 0.9

#: A block is about as old as another if it was released at most this share of the pool's blocks
#: later. Of two such blocks, that of the group that owes more goes first, called in or not.
AS_OLD = 0.03


class Rule(NamedTuple):
    """How victims are chosen."""

    proven_share: float
    """Share of the pool that proven blocks may have before one of them goes first; 0: all blocks
    are in native order, proven or not."""
    calls_in_debts: bool
    """Whether groups that owe more than the average group lose blocks before anybody else, or only
    before others who would lose one that is about as old."""


#: Victims one after the other that stood in one queue, which names their owner and class.
Run = tuple[Queue, list[int]]


class Order:
    """All cached blocks with their class, and the candidates among them in order.

    PROBATIONARY: unproven; NORMAL: proven by another request; REUSE: proven and promoted.
    """

    def __init__(
        self,
        capacity_blocks: int,
        ledger: Ledger,
        rule: Rule,
        victims_per_block: float = 1.0,
        unused_blocks: int = 0,
    ) -> None:
        """What an order needs.

        Args:
            capacity_blocks: how many blocks can be cached.
            ledger: who owes what.
            rule: how victims are chosen at first.
            victims_per_block: victims that a block of debt pays for; below 1 in a miniature.
            unused_blocks: block indices are below ``capacity_blocks`` plus this.

        """
        indices = capacity_blocks + unused_blocks
        self.rule = rule
        self.capacity_blocks = capacity_blocks
        self.proven = 0
        """Proven blocks, held ones included."""
        self.called_in = 0
        """How many of the latest victims, the first ones, debts were called in for."""
        self._ledger = ledger
        self._victims_per_block = victims_per_block
        self._queues = CandidateQueues(indices)
        self._debtors = Debtors(ledger, self._queues.offer)
        self._queue: list[Queue | None] = [None] * indices  # of every cached block, held or not
        self._chances = bytearray(indices)
        self._rounds = 0  # second chances that this allocation may still grant
        self.clear()

    def __len__(self) -> int:
        """Number of candidates."""
        return len(self._queues)

    def __contains__(self, block: int) -> bool:
        """Whether a block is cached."""
        return self._queue[block] is not None

    def candidates(self) -> Set[int]:
        """All candidates. For tests: scans them."""
        return self._queues.check().keys()

    def is_candidate(self, block: int) -> bool:
        """Whether a block is a candidate."""
        return block in self._queues

    def retention(self, block: int) -> RetentionClass | None:
        """The class of a cached block."""
        queue = self._queue[block]
        return None if queue is None else queue.retention

    @property
    def proven_part(self) -> float:
        """Part of the capacity that proven blocks have, held ones included."""
        return self.proven / self.capacity_blocks

    def admit(
        self, blocks: Sequence[int], group: str, proven: Sequence[bool], proven_until: float = 0.0
    ) -> None:
        """Blocks are cached, and held; what they were before is forgotten.

        ``proven``: whether each is. ``proven_until``: all are while proven blocks are fewer.
        """
        unproven_queue, proven_queue, _ = self._queues.of_group(group)
        for block, is_proven in zip(blocks, proven, strict=True):
            if self._queue[block] is not None:
                self.drop(block)
            is_proven |= self.proven < proven_until
            if not is_proven and not self._was_full:
                self._unproven_until_full -= 1
                is_proven = self._unproven_until_full < 0
            queue = proven_queue if is_proven else unproven_queue
            self._queue[block] = queue
            queue.cached += 1
            self.proven += is_proven

    def reuse(self, blocks: Iterable[int], *, promote: bool) -> list[int]:
        """Held blocks were hit by another request than they were made by; those now promoted."""
        queues, chances = self._queue, self._chances
        promoted: list[int] = []
        for block in blocks:
            if chances[block] < MAX_CHANCES:
                chances[block] += 1
            queue = queues[block]
            assert queue is not None, f"block {block} is not cached"
            retention = queue.retention
            if promote and retention is not RetentionClass.REUSE:
                promoted.append(block)
            elif retention is not RetentionClass.PROBATIONARY:
                continue
            self.proven += retention is RetentionClass.PROBATIONARY
            better = self._queues.of_group(queue.group)[2 if promote else 1]
            queue.cached -= 1
            better.cached += 1
            queues[block] = better
        return promoted

    def append(self, blocks: Iterable[int]) -> None:
        """Held blocks become candidates, in native order."""
        t = self._ledger.time
        for group in self._queues.append(blocks, self._queue):
            self._debtors.enter(group, t)

    def hold(self, blocks: Iterable[int]) -> None:
        """Candidates are held."""
        self._queues.remove(blocks, self._queue)

    def drop(self, block: int) -> None:
        """A block is cached no more, and no candidate."""
        queue = self._queue[block]
        if queue is not None:
            self._queue[block] = None
            queue.cached -= 1
            self.proven -= queue.retention is not RetentionClass.PROBATIONARY
            self._chances[block] = 0

    def cached(self) -> dict[tuple[str, RetentionClass], int]:
        """Cached blocks by group and class, held ones included."""
        return self._queues.cached()

    def clear(self) -> None:
        """Nothing is cached."""
        self._queues.clear()
        self._queue[:] = [None] * len(self._queue)
        self._chances[:] = bytes(len(self._chances))
        self.proven = 0
        self._unproven_until_full = self.capacity_blocks - round(FIRST_SHARE * self.capacity_blocks)
        self._was_full = False

    def charged(self, group: str, t: float) -> None:
        """A group's debt may have grown."""
        self._debtors.enter(group, t)

    def debts_changed(self, t: float) -> None:
        """The ledger's contracts are others: every group's debt is ranked anew."""
        self._debtors.enter_all(t)

    def mark_full(self) -> None:
        """The pool has been full."""
        self._was_full = True

    def largest_debt(self, t: float) -> float:
        """The largest normalised debt of a group that has a candidate, in blocks."""
        largest = self._debtors.largest(t)
        return largest[1] if largest else 0.0

    def take(self, count: int, t: float) -> list[Run]:
        """The next ``count`` victims; they are cached no more."""
        self.called_in = 0
        if not count:
            return []
        self._was_full = True
        self._rounds = ROUNDS
        victims: list[Run] = []
        left = count
        if self._debtors.largest(t) is not None:
            left -= self._call_in(count, t, victims)
            if self.rule.calls_in_debts:
                self.called_in = count - left
        self._lose(None, left, victims)
        return victims

    def _call_in(self, count: int, t: float, victims: list[Run]) -> int:
        """Add what those lose who owe more than the average, up to ``count``; how many."""
        debts = Collection(
            self._debtors,
            self._ledger,
            t,
            floor=self._ledger.mean_debt(t),
            victims_per_block=self._victims_per_block,
        )
        left = count
        while payer := debts.next(left):
            group, alone = payer
            if self.rule.calls_in_debts:
                lost = self._lose(group, alone, victims)
                debts.paid(lost)
                left -= lost
            else:
                paid, lost = self._let_tie(group, left, victims)
                debts.paid(paid)
                left -= lost
        debts.close()
        return count - left

    def _let_tie(self, group: str, count: int, victims: list[Run]) -> tuple[int, int]:
        """Add what is next of all, or the group's block that is about as old.

        How many the group paid, 0 or 1, and how many there are in all, up to ``count``.
        """
        queue, most, before = self._turn(None, count)
        while queue is not None and self._spares(queue):
            self._rounds -= 1
            self._chances[queue.first()] -= 1
            self._queues.move_to_end(queue)
            queue, most, before = self._turn(None, count)
        assert queue is not None, "there are as many candidates"
        unproven, proven = self._heads(group)
        own = unproven if queue.retention is RetentionClass.PROBATIONARY else proven
        before = min(before, self._rival(queue))
        if own is not None and not self._spares(own):
            as_old = own.head() - AS_OLD * self.capacity_blocks
            if queue.head() >= as_old:
                return 1, self._take(own, 1, math.inf, victims)
            before = min(before, as_old)
        return 0, self._take(queue, most, before, victims)

    def _lose(self, group: str | None, count: int, victims: list[Run]) -> int:
        """Add up to ``count`` victims, of one group or for None of all; how many."""
        left = count
        while left:
            queue, most, before = self._turn(group, left)
            if queue is None:
                break
            if group is None:
                before = min(before, self._rival(queue))
            left -= self._take(queue, most, before, victims)
        return count - left

    def _take(self, queue: Queue, count: int, before: float, victims: list[Run]) -> int:
        """Add a queue's first blocks, those with a lower sequence number; how many."""
        proven = queue.retention is not RetentionClass.PROBATIONARY
        chances = self._chances if proven and self.rule.proven_share else None
        taken, self._rounds = self._queues.take(queue, count, before, chances, self._rounds)
        for block in taken:
            self._queue[block] = None
        queue.cached -= len(taken)
        if proven:
            self.proven -= len(taken)
            for block in taken:
                self._chances[block] = 0
        if taken:
            victims.append((queue, taken))
        return len(taken)

    def _turn(self, group: str | None, count: int) -> tuple[Queue | None, int, float]:
        """Whose turn it is to lose up to ``count`` blocks, of one group or for None of all.

        The queue (None: there is no block), how many it loses in a row, and the sequence number
        before which, other queues of the segment left aside. From the segment that is over its
        share, what was released first.
        """
        share = self.rule.proven_share
        before = math.inf
        unproven, proven = self._heads(group)
        queue: Queue | None
        if unproven is None or proven is None:
            queue = unproven or proven
        elif share == 0:
            queue, other = unproven, proven
            if other.head() < queue.head():
                queue, other = other, queue
            before = other.head()
        elif self.proven > share * self.capacity_blocks:
            queue = proven
            count = min(count, self.proven - math.floor(share * self.capacity_blocks))
        else:
            queue = unproven
        return queue, count, before

    def _rival(self, queue: Queue) -> int:
        """A sequence number that no other queue of its segment has a head before."""
        rival = self._queues.rival(queue)
        if queue.retention is not RetentionClass.PROBATIONARY:
            normal = queue.retention is RetentionClass.NORMAL
            other = self._queues.first(RetentionClass.REUSE if normal else RetentionClass.NORMAL)
            if other is not None:
                rival = min(rival, other.head())
        return rival

    def _spares(self, queue: Queue) -> bool:
        """Whether a queue's first block has a chance left, and goes to the end instead."""
        if queue.retention is RetentionClass.PROBATIONARY or not self.rule.proven_share:
            return False
        return self._rounds > 0 and self._chances[queue.first()] > 0

    def _heads(self, group: str | None) -> tuple[Queue | None, Queue | None]:
        """The queues that the next unproven and the next proven victim stand in front of.

        All groups' proven blocks are in one native order; of its own, a group pays with those that
        were not promoted first.
        """
        if group is not None:
            unproven, normal, reuse = self._queues.of_group(group)
            proven = normal if normal.size else reuse
            return unproven if unproven.size else None, proven if proven.size else None
        first = self._queues.first
        normals, reuses = first(RetentionClass.NORMAL), first(RetentionClass.REUSE)
        if normals is None or (reuses is not None and reuses.head() < normals.head()):
            normals = reuses
        return first(RetentionClass.PROBATIONARY), normals

    def check(self) -> None:
        """Assert that the state is consistent. For tests: scans everything."""
        for block, queue in self._queues.check().items():
            assert self._queue[block] is queue, f"block {block} is in another queue"
        lowest = RetentionClass.PROBATIONARY
        cached = [queue for queue in self._queue if queue is not None]
        proven = sum(queue.retention is not lowest for queue in cached)
        assert proven == self.proven, f"counted {self.proven} proven blocks, found {proven}"
        found = Counter((queue.group, queue.retention) for queue in cached)
        assert self.cached() == found, f"counted {self.cached()}, found {found}"
        chances = [block for block, left in enumerate(self._chances) if left]
        assert all(block in self for block in chances), "chances of a block that is not cached"
