"""Candidate queues: one per (group, retention class), each in native order (policy.md section 6).

Two questions are answered without looking at more than heads: the next victim inside one group,
and the next victim over all groups. Per class, a heap holds the head of every group's queue. Its
entries go stale when a head leaves and are put right when they surface: a head only ever moves
back in native order, so a stale entry surfaces too early, never too late.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping
from heapq import heappop, heappush, heapreplace
from typing import Generic, TypeVar

from prefixshield.core.retention import RetentionClass

#: A block: its index, or whatever else names it.
B = TypeVar("B", bound=Hashable)


class Queue(Generic[B]):
    """The candidates of one group and class: block → native sequence number, ascending."""

    __slots__ = ("blocks", "cached", "group", "listed", "retention")

    def __init__(self, group: str, retention: RetentionClass) -> None:
        self.group = group
        self.retention = retention
        self.blocks: OrderedDict[B, int] = OrderedDict()
        self.cached = 0
        """Blocks of the group and class, held ones included; kept by the policy."""
        self.listed = False
        """Whether the heap of the class has an entry for this queue."""

    def first(self) -> B:
        """The first block; the queue is not empty."""
        return next(iter(self.blocks))

    def head(self) -> int:
        """Sequence number of the first block; the queue is not empty."""
        return next(iter(self.blocks.values()))


class CandidateQueues(Generic[B]):
    """All candidates, by owner group and retention class."""

    def __init__(self) -> None:
        self._groups: dict[str, tuple[Queue[B], Queue[B], Queue[B]]] = {}
        self._heads: list[list[tuple[int, Queue[B]]]] = [[] for _ in RetentionClass]
        self._next_sequence = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def of_group(self, group: str) -> tuple[Queue[B], Queue[B], Queue[B]]:
        """The group's queues of probationary, normal and reuse blocks; empty ones at first."""
        queues = self._groups.get(group)
        if queues is None:
            lowest, middle, highest = (Queue[B](group, retention) for retention in RetentionClass)
            queues = self._groups[group] = (lowest, middle, highest)
        return queues

    def holds_any_of(self, group: str) -> bool:
        """Whether the group owns a candidate."""
        return any(queue.blocks for queue in self._groups.get(group, ()))

    def append(self, blocks: Iterable[B], queue_of: Callable[[B], Queue[B]]) -> set[str]:
        """Add candidates at the end of the native order; returns the groups that own them."""
        first = sequence = self._next_sequence
        groups: set[str] = set()
        before: Queue[B] | None = None
        for block in blocks:
            queue = queue_of(block)
            queue.blocks[block] = sequence
            if queue is not before:
                before = queue
                groups.add(queue.group)
                if not queue.listed:
                    queue.listed = True
                    heappush(self._heads[queue.retention], (sequence, queue))
            sequence += 1
        self._next_sequence = sequence
        self._count += sequence - first
        return groups

    def remove(self, block: B, queue: Queue[B]) -> None:
        """Take a candidate out, wherever it stands."""
        del queue.blocks[block]
        self._count -= 1

    def take(
        self, queue: Queue[B], count: int, before: float, chances: dict[B, int] | None = None
    ) -> list[B]:
        """Take out up to ``count`` first blocks of a queue, those with a lower sequence number.

        With ``chances``, a block that has one left goes to the end of the native order instead.
        """
        taken: list[B] = []
        blocks = queue.blocks
        while blocks and len(taken) < count:
            block, sequence = blocks.popitem(last=False)
            if sequence >= before:
                blocks[block] = sequence
                blocks.move_to_end(block, last=False)
                break
            if chances and (left := chances.get(block)):
                chances[block] = left - 1
                blocks[block] = self._next_sequence
                self._next_sequence += 1
            else:
                taken.append(block)
        self._count -= len(taken)
        return taken

    def move_to_end(self, queue: Queue[B]) -> None:
        """The first block of a queue, which is not empty, becomes the last in native order."""
        block, _ = queue.blocks.popitem(last=False)
        queue.blocks[block] = self._next_sequence
        self._next_sequence += 1

    def rival(self, queue: Queue[B]) -> int:
        """A sequence number that no other queue of its class has a head before.

        The queue is the one that ``first`` has just returned for its class.
        """
        # No other head precedes this one before its children in the heap do.
        heap = self._heads[queue.retention]
        return min((entry[0] for entry in heap[1:3]), default=self._next_sequence)

    def offer(self, group: str) -> tuple[int, int] | None:
        """What the group would lose next, as (class, native sequence number); None: nothing."""
        for queue in self._groups.get(group, ()):
            if queue.blocks:
                return queue.retention, queue.head()
        return None

    def pop(self, group: str, count: int) -> list[B]:
        """Take up to ``count`` next victims of the group: lowest class, then native order."""
        victims: list[B] = []
        for queue in self._groups[group]:
            if queue.blocks and len(victims) < count:
                victims += self.take(queue, count - len(victims), math.inf)
        return victims

    def pop_lowest(self, count: int) -> list[B]:
        """Take the next ``count`` victims over all groups: lowest class, then native order."""
        victims: list[B] = []
        for retention in RetentionClass:
            while len(victims) < count and (queue := self.first(retention)) is not None:
                victims += self.take(queue, count - len(victims), self.rival(queue))
        return victims

    def first(self, retention: RetentionClass) -> Queue[B] | None:
        """The queue whose head comes first in native order, of one class; None: all are empty."""
        heap = self._heads[retention]
        while heap:
            sequence, queue = heap[0]
            if not queue.blocks:
                queue.listed = False
                heappop(heap)
            elif queue.head() != sequence:
                heapreplace(heap, (queue.head(), queue))
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
        for queues in self._groups.values():
            for queue in queues:
                queue.blocks.clear()
                queue.cached = 0
        self._count = 0

    def check(self) -> Mapping[B, Queue[B]]:
        """Assert that every queue is in native order and counted; returns where each block is."""
        found: dict[B, Queue[B]] = {}
        for queues in self._groups.values():
            for queue in queues:
                sequences = list(queue.blocks.values())
                assert sequences == sorted(sequences), f"{queue.group}: out of native order"
                assert queue.listed or not queue.blocks, f"{queue.group}: head not listed"
                found.update(dict.fromkeys(queue.blocks, queue))
        assert self._count == len(found), f"counted {self._count}, queued {len(found)}"
        return found
