"""Candidate queues: one per (group, retention class), each in native order (policy.md section 6).

Two questions are answered without looking at more than heads: the next victim inside one group,
and the next victim over all groups. Per class, a heap holds the head of every group's queue. Its
entries go stale when a head leaves and are put right when they surface: a head only ever moves
back in native order, so a stale entry surfaces too early, never too late.
"""

from __future__ import annotations

from collections import OrderedDict
from heapq import heappop, heappush, heapreplace

from prefixshield.core.retention import RetentionClass


class _Queue:
    """Blocks of one group and class: block → native sequence number, ascending."""

    __slots__ = ("blocks", "listed")

    def __init__(self) -> None:
        self.blocks: OrderedDict[int, int] = OrderedDict()
        self.listed = False

    def head(self) -> int:
        """Sequence number of the first block; the queue is not empty."""
        return next(iter(self.blocks.values()))


class CandidateQueues:
    """All candidates, by owner group and retention class."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget every candidate."""
        self._groups: dict[str, tuple[_Queue, ...]] = {}
        self._heads: list[list[tuple[int, _Queue]]] = [[] for _ in RetentionClass]
        self._next_sequence = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def holds_any_of(self, group: str) -> bool:
        """Whether the group owns a candidate."""
        return any(queue.blocks for queue in self._groups.get(group, ()))

    def append(self, block: int, group: str, retention: RetentionClass) -> None:
        """Add a candidate at the end of the native order."""
        queues = self._groups.get(group)
        if queues is None:
            queues = self._groups[group] = tuple(_Queue() for _ in RetentionClass)
        queue = queues[retention]
        sequence = self._next_sequence
        self._next_sequence = sequence + 1
        queue.blocks[block] = sequence
        if not queue.listed:
            queue.listed = True
            heappush(self._heads[retention], (sequence, queue))
        self._count += 1

    def remove(self, block: int, group: str, retention: RetentionClass) -> None:
        """Take a candidate out, wherever it stands."""
        del self._groups[group][retention].blocks[block]
        self._count -= 1

    def offer(self, group: str) -> tuple[int, int]:
        """What the group would lose next, as (class, native sequence number); it has candidates."""
        for retention, queue in enumerate(self._groups[group]):
            if queue.blocks:
                return retention, queue.head()
        raise KeyError(group)

    def pop(self, group: str) -> int:
        """Take the group's next victim: lowest class, then native order."""
        for queue in self._groups[group]:
            if queue.blocks:
                self._count -= 1
                return queue.blocks.popitem(last=False)[0]
        raise KeyError(group)

    def pop_lowest(self, count: int) -> list[int]:
        """Take the next ``count`` victims over all groups: lowest class, then native order."""
        victims: list[int] = []
        for heap in self._heads:
            while heap and len(victims) < count:
                sequence, queue = heap[0]
                if not queue.blocks:
                    queue.listed = False
                    heappop(heap)
                elif queue.head() != sequence:
                    heapreplace(heap, (queue.head(), queue))
                else:
                    # No other head precedes this one before its children in the heap do.
                    rival = min((entry[0] for entry in heap[1:3]), default=self._next_sequence)
                    while queue.blocks and len(victims) < count and queue.head() < rival:
                        victims.append(queue.blocks.popitem(last=False)[0])
        self._count -= len(victims)
        return victims

    def check(self) -> dict[int, tuple[str, RetentionClass]]:
        """Assert that every queue is in native order and counted; returns where each block is."""
        found: dict[int, tuple[str, RetentionClass]] = {}
        for group, queues in self._groups.items():
            for retention, queue in zip(RetentionClass, queues, strict=True):
                sequences = list(queue.blocks.values())
                assert sequences == sorted(sequences), f"{group}/{retention.label}: out of order"
                assert queue.listed or not queue.blocks, f"{group}/{retention.label}: not listed"
                found.update(dict.fromkeys(queue.blocks, (group, retention)))
        assert self._count == len(found), f"counted {self._count}, queued {len(found)}"
        return found
