"""Candidate queues: one per (group, retention class), each in native order (policy.md section 6).

Two questions are answered without looking at more than heads: the next victim inside one group,
and the next victim over all groups. Per class, a heap holds the head of every group's queue. Its
entries go stale when a head leaves and are put right when they surface: a head only ever moves
back in native order, so a stale entry surfaces too early, never too late.

A queue is a ring through two lists that all queues share: of every block, the one that stands
before it and the one after. Blocks are indices from 0 on; a ring begins and ends at an index of
its own beyond them.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from heapq import heappop, heappush, heapreplace

from prefixshield.core.retention import RetentionClass

#: What stands before and after a block that is no candidate.
_NOWHERE = -1


class Queue:
    """The candidates of one group and class, in native order."""

    __slots__ = ("after", "cached", "end", "group", "listed", "retention", "sequence", "size")

    def __init__(
        self,
        group: str,
        retention: RetentionClass,
        end: int,
        after: list[int],
        sequence: array[int],
    ) -> None:
        self.group = group
        self.retention = retention
        self.end = end
        """Where the ring begins and ends."""
        self.after = after
        self.sequence = sequence
        self.size = 0
        """Number of candidates."""
        self.cached = 0
        """Blocks of the group and class, held ones included; kept by the policy."""
        self.listed = False
        """Whether the heap of the class has an entry for this queue."""

    def first(self) -> int:
        """The first block; the queue is not empty."""
        return self.after[self.end]

    def head(self) -> int:
        """Sequence number of the first block; the queue is not empty."""
        return self.sequence[self.after[self.end]]


class CandidateQueues:
    """All candidates, by owner group and retention class."""

    def __init__(self, blocks: int) -> None:
        """``blocks``: candidates are among 0 .. blocks - 1."""
        self._blocks = blocks
        # By block, and beyond them by ring.
        self._after: list[int] = [_NOWHERE] * blocks
        self._before: list[int] = [_NOWHERE] * blocks
        self._sequence = array("q", bytes(8 * blocks))  # of a candidate, in native order
        self._groups: dict[str, tuple[Queue, Queue, Queue]] = {}
        self._heads: list[list[tuple[int, Queue]]] = [[] for _ in RetentionClass]
        self._next_sequence = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, block: int) -> bool:
        """Whether a block is a candidate."""
        return self._after[block] != _NOWHERE

    def of_group(self, group: str) -> tuple[Queue, Queue, Queue]:
        """The group's queues of probationary, normal and reuse blocks; empty ones at first."""
        queues = self._groups.get(group)
        if queues is None:
            lowest, middle, highest = (self._ring(group, retention) for retention in RetentionClass)
            queues = self._groups[group] = (lowest, middle, highest)
        return queues

    def _ring(self, group: str, retention: RetentionClass) -> Queue:
        end = len(self._after)
        self._after.append(end)
        self._before.append(end)
        return Queue(group, retention, end, self._after, self._sequence)

    def append(self, blocks: Iterable[int], queue_of: Sequence[Queue | None]) -> list[str]:
        """Add candidates at the end of the native order; returns the groups that own them.

        ``queue_of``: by block. A group may be returned more than once.
        """
        after, before, sequences = self._after, self._before, self._sequence
        sequence = self._next_sequence
        groups: list[str] = []
        queue: Queue | None = None
        last = joined = 0
        for block in blocks:
            own = queue_of[block]
            if own is not queue:
                if queue is not None:
                    after[last] = queue.end
                    before[queue.end] = last
                    queue.size += joined
                assert own is not None, f"block {block} was never materialised"
                queue, last, joined = own, before[own.end], 0
                groups.append(own.group)
                if not own.listed:
                    own.listed = True
                    heappush(self._heads[own.retention], (sequence, own))
            after[last] = block
            before[block] = last
            sequences[block] = sequence
            sequence += 1
            last = block
            joined += 1
        if queue is not None:
            after[last] = queue.end
            before[queue.end] = last
            queue.size += joined
        self._count += sequence - self._next_sequence
        self._next_sequence = sequence
        return groups

    def remove(self, blocks: Iterable[int], queue_of: Sequence[Queue | None]) -> None:
        """Take candidates out, wherever they stand."""
        after, before = self._after, self._before
        for block in blocks:
            left, right = before[block], after[block]
            queue = queue_of[block]
            assert queue is not None, f"block {block} is not cached"
            assert right != _NOWHERE, f"block {block} is no candidate"
            after[left] = right
            before[right] = left
            after[block] = before[block] = _NOWHERE
            queue.size -= 1
            self._count -= 1

    def take(
        self,
        queue: Queue,
        count: int,
        until: float,
        chances: bytearray | None = None,
        rounds: int = 0,
    ) -> tuple[list[int], int]:
        """Take out up to ``count`` first blocks of a queue, those with a lower sequence number.

        With ``chances``, a block that has one left goes to the end of the native order instead, at
        most ``rounds`` times. Returns the blocks, and how many of the rounds are left.
        """
        after, before, sequences = self._after, self._before, self._sequence
        taken: list[int] = []
        end, sequence = queue.end, self._next_sequence
        block, last = after[end], before[end]
        while block != end and len(taken) < count and sequences[block] < until:
            following = after[block]
            if rounds and chances and chances[block]:
                rounds -= 1
                chances[block] -= 1
                sequences[block] = sequence
                sequence += 1
                if block != last:
                    after[last], before[block], after[block] = block, last, end
                    last, block = block, following
            else:
                taken.append(block)
                after[block] = before[block] = _NOWHERE
                block = following
        after[end] = block
        before[block] = end
        if block != end:
            before[end] = last
        self._next_sequence = sequence
        queue.size -= len(taken)
        self._count -= len(taken)
        return taken, rounds

    def move_to_end(self, queue: Queue) -> None:
        """The first block of a queue, which is not empty, becomes the last in native order."""
        after, before, end = self._after, self._before, queue.end
        block = queue.first()
        right = after[block]
        after[end] = right
        before[right] = end
        last = before[end]
        after[last] = block
        before[block] = last
        after[block] = end
        before[end] = block
        self._sequence[block] = self._next_sequence
        self._next_sequence += 1

    def rival(self, queue: Queue) -> int:
        """A sequence number that no other queue of its class has a head before.

        The queue is the one that ``first`` has just returned for its class.
        """
        # No other head precedes this one before its children in the heap do.
        heap = self._heads[queue.retention]
        if len(heap) > 2:
            return min(heap[1][0], heap[2][0])
        return heap[1][0] if len(heap) > 1 else self._next_sequence

    def offer(self, group: str) -> tuple[int, int] | None:
        """What the group would lose next, as (class, native sequence number); None: nothing."""
        for queue in self._groups.get(group, ()):
            if queue.size:
                return queue.retention, self._sequence[self._after[queue.end]]
        return None

    def pop(self, group: str, count: int) -> list[int]:
        """Take up to ``count`` next victims of the group: lowest class, then native order."""
        victims: list[int] = []
        for queue in self._groups[group]:
            if queue.size and len(victims) < count:
                victims += self.take(queue, count - len(victims), math.inf)[0]
        return victims

    def pop_lowest(self, count: int) -> list[int]:
        """Take the next ``count`` victims over all groups: lowest class, then native order."""
        victims: list[int] = []
        for retention in RetentionClass:
            while len(victims) < count and (queue := self.first(retention)) is not None:
                victims += self.take(queue, count - len(victims), self.rival(queue))[0]
        return victims

    def first(self, retention: RetentionClass) -> Queue | None:
        """The queue whose head comes first in native order, of one class; None: all are empty."""
        heap = self._heads[retention]
        while heap:
            sequence, queue = heap[0]
            if not queue.size:
                queue.listed = False
                heappop(heap)
            elif (head := queue.head()) != sequence:
                heapreplace(heap, (head, queue))
            else:
                return queue
        return None

    def cached(self) -> dict[tuple[str, RetentionClass], int]:
        """Blocks by group and class, held ones included."""
        return {
            (group, queue.retention): queue.cached
            for group, queues in self._groups.items()
            for queue in queues
            if queue.cached
        }

    def clear(self) -> None:
        """Forget every block."""
        self._after[: self._blocks] = self._before[: self._blocks] = [_NOWHERE] * self._blocks
        for queues in self._groups.values():
            for queue in queues:
                self._after[queue.end] = self._before[queue.end] = queue.end
                queue.size = queue.cached = 0
        self._count = 0

    def check(self) -> Mapping[int, Queue]:
        """Assert that every queue is in native order and counted; returns where each block is."""
        found: dict[int, Queue] = {}
        for queues in self._groups.values():
            for queue in queues:
                blocks = [queue.end]
                while (block := self._after[blocks[-1]]) != queue.end:
                    assert block != _NOWHERE, f"{queue.group}: a ring is open"
                    assert self._before[block] == blocks[-1], f"{queue.group}: a ring is torn"
                    blocks.append(block)
                del blocks[0]
                sequences = [self._sequence[block] for block in blocks]
                assert sequences == sorted(sequences), f"{queue.group}: out of native order"
                assert queue.size == len(blocks), f"{queue.group}: miscounted"
                assert queue.listed or not blocks, f"{queue.group}: head not listed"
                found.update(dict.fromkeys(blocks, queue))
        assert self._count == len(found), f"counted {self._count}, queued {len(found)}"
        candidates = {block for block in range(self._blocks) if block in self}
        assert candidates == found.keys(), "a block stands in no queue"
        return found
