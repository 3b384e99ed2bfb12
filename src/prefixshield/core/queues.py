"""Candidate queues: one per (group, retention class), each in native order (policy.md section 6).

Two questions are answered without looking at more than heads: the next victim inside one group,
and the next victim over all groups. Per class, a heap holds the head of every group's queue. Its
entries go stale when a head leaves and are put right when they surface: a head only ever moves
back in native order, so a stale entry surfaces too early, never too late.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping
from heapq import heappop, heappush, heapreplace
from typing import Generic, TypeVar

from prefixshield.core.retention import RetentionClass

#: A block: its index, or whatever else names it.
B = TypeVar("B", bound=Hashable)


class Queue(Generic[B]):
    """The candidates of one group and class: block → native sequence number, ascending."""

    __slots__ = ("blocks", "group", "listed", "retention")

    def __init__(self, group: str, retention: RetentionClass) -> None:
        self.group = group
        self.retention = retention
        self.blocks: OrderedDict[B, int] = OrderedDict()
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

    def append(self, placed: Iterable[tuple[B, Queue[B]]]) -> None:
        """Add candidates, each to its queue, at the end of the native order."""
        first = sequence = self._next_sequence
        for block, queue in placed:
            queue.blocks[block] = sequence
            if not queue.listed:
                queue.listed = True
                heappush(self._heads[queue.retention], (sequence, queue))
            sequence += 1
        self._next_sequence = sequence
        self._count += sequence - first

    def remove(self, block: B, queue: Queue[B]) -> None:
        """Take a candidate out, wherever it stands."""
        del queue.blocks[block]
        self._count -= 1

    def take(self, queue: Queue[B]) -> B:
        """Take out the first block of a queue, which is not empty."""
        self._count -= 1
        return queue.blocks.popitem(last=False)[0]

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
            blocks = queue.blocks
            while blocks and len(victims) < count:
                victims.append(blocks.popitem(last=False)[0])
        self._count -= len(victims)
        return victims

    def pop_lowest(self, count: int) -> list[B]:
        """Take the next ``count`` victims over all groups: lowest class, then native order."""
        victims: list[B] = []
        for retention in RetentionClass:
            heap = self._heads[retention]
            while len(victims) < count and (queue := self.first(retention)) is not None:
                # No other head precedes this one before its children in the heap do.
                rival = min((entry[0] for entry in heap[1:3]), default=self._next_sequence)
                blocks = queue.blocks
                while blocks and len(victims) < count and queue.head() < rival:
                    victims.append(blocks.popitem(last=False)[0])
        self._count -= len(victims)
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

    def clear(self) -> None:
        """Forget every candidate."""
        for queues in self._groups.values():
            for queue in queues:
                queue.blocks.clear()
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
