"""Debtors: the groups that owe and own a candidate, largest normalised debt first.

Groups are ranked by the time at which their debt would clear if they owed under one contract,
``t + D̃_g(t) / ρ_min``. At one moment that order is the order of normalised debts; as time passes
it stays the same for a group that owes under one contract, and only falls for one that owes under
several (policy.md section 2). So a heap of such times, each true when it was entered, holds upper
bounds: an entry is recomputed when it surfaces, and none is touched because time has passed.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush, heapreplace

from prefixshield.core.ledger import EPSILON, Ledger


class Debtors:
    """A lazily corrected max-heap over groups; O(log groups) amortised per call."""

    def __init__(self, ledger: Ledger, owns_candidate: Callable[[str], bool]) -> None:
        self._ledger = ledger
        self._owns_candidate = owns_candidate
        self._heap: list[tuple[float, str]] = []  # (-clearance time, group)
        self._entered: dict[str, float] = {}  # group → its one valid clearance time in the heap

    def enter(self, group: str, t: float) -> None:
        """Rank a group anew: its debt rose, or it has a candidate again. It may owe nothing."""
        clearance = self._ledger.clearance_rank(group, t)
        if self._debt(clearance, t) <= EPSILON or self._entered.get(group) == clearance:
            return
        self._entered[group] = clearance
        heappush(self._heap, (-clearance, group))
        if len(self._heap) > 2 * len(self._entered) + 16:
            self._heap = [(-time, name) for name, time in self._entered.items()]
            heapify(self._heap)

    def largest(self, t: float) -> tuple[str, float] | None:
        """The group with the largest normalised debt at ``t`` and that debt; None: nobody owes."""
        heap = self._heap
        while heap:
            key, group = heap[0]
            if self._entered.get(group) != -key:  # superseded by a later entry
                heappop(heap)
                continue
            clearance = self._ledger.clearance_rank(group, t)
            debt = self._debt(clearance, t)
            if debt <= EPSILON or not self._owns_candidate(group):
                heappop(heap)
                del self._entered[group]
            elif clearance < -key:
                self._entered[group] = clearance
                heapreplace(heap, (-clearance, group))
            else:
                return group, debt
        return None

    def remove_largest(self) -> None:
        """Take off the group that ``largest`` has just returned."""
        _, group = heappop(self._heap)
        del self._entered[group]

    def _debt(self, clearance: float, t: float) -> float:
        return self._ledger.lowest_rate * (clearance - t)
