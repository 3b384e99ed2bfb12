"""Debtors: the groups that owe and own a candidate, largest normalised debt first.

Groups are ranked by the time at which their debt would clear if they owed under one contract,
``t + D̃_g(t) / ρ_min``. At one moment that order is the order of normalised debts; as time passes
it stays the same for a group that owes under one contract, and only falls for one that owes under
several (policy.md section 2). So a heap of such times, each true when it was entered, holds upper
bounds: an entry is recomputed when it surfaces, and none is touched because time has passed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
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

    def enter_all(self, t: float) -> None:
        """Rank every group anew: the ledger's contracts have changed. O(groups log groups)."""
        self._heap.clear()
        self._entered.clear()
        for group in self._ledger.groups():
            self.enter(group, t)

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

    def remove_largest(self) -> tuple[float, str]:
        """Take off the group that ``largest`` has just returned; what ``restore`` puts back."""
        entry = heappop(self._heap)
        del self._entered[entry[1]]
        return entry

    def restore(self, entries: Iterable[tuple[float, str]]) -> None:
        """Put back what was taken off, but for what was ranked anew since."""
        for entry in entries:
            key, group = entry
            if group not in self._entered:
                self._entered[group] = -key
                heappush(self._heap, entry)

    def _debt(self, clearance: float, t: float) -> float:
        return self._ledger.lowest_rate * (clearance - t)


class Collection:
    """Debts called in for one allocation batch: which group pays for the next victims.

    The group with the largest P pays, P starts as its normalised debt and falls by 1/W with every
    victim; of equal debts, the one that pays is the one whose offer ranks lower. P lives in this
    batch only (paper, algorithm 2; policy.md section 6). A group is drawn from the debtors only
    when its debt is at least that of the best one drawn so far.
    """

    def __init__(
        self,
        debtors: Debtors,
        offer: Callable[[str], tuple[int, int] | None],
        ledger: Ledger,
        t: float,
        *,
        floor: float = 0.0,
        victims_per_block: float = 1.0,
    ) -> None:
        """``offer``: what a group would lose next, in the order of ties; None: nothing.
        ``floor``: a group pays while P exceeds it by more than ε, blocks.
        ``victims_per_block``: how many victims one block of debt pays for.
        """
        self._debtors = debtors
        self._offer = offer
        self._ledger = ledger
        self._t = t
        self._floor = floor + EPSILON
        self._scale = victims_per_block
        self._drawn: list[tuple[float, str]] = []
        # G⁺ as a heap of (-P in units of ε, offer, P, 1/W, group).
        self._heap: list[tuple[int, tuple[int, int], float, float, str]] = []
        self._paying: tuple[str, float, float] | None = None
        self._rival = debtors.largest(t)

    def next(self, count: int) -> tuple[str, int] | None:
        """Who pays next, and for how many of ``count`` victims it does so alone.

        None: nobody owes, or ``count`` is 0. ``paid`` must be called before the next call.
        """
        if not count:
            return None
        while self._rival and not (
            self._heap and round(self._rival[1] / EPSILON) < -self._heap[0][0]
        ):
            group, debt = self._rival
            if debt <= self._floor:
                self._rival = None
                break
            self._drawn.append(self._debtors.remove_largest())
            weight = self._ledger.heaviest_debt_weight(group, self._t)
            self._rank(group, debt, 1.0 / (weight * self._scale))
            self._rival = self._debtors.largest(self._t)
        if not self._heap:
            return None
        *_, p, step, group = heappop(self._heap)
        # It pays alone while P - j/W stays above everybody else's debt by more than ε.
        others = max(
            self._heap[0][2] if self._heap else 0.0, self._rival[1] if self._rival else 0.0
        )
        others = max(others, self._floor - EPSILON)
        alone = min(count, max(1, math.ceil((p - others - 2 * EPSILON) / step)))
        self._paying = (group, p, step)
        return group, alone

    def paid(self, victims: int) -> None:
        """The group named last has lost so many; with 0 it is the next to pay as before."""
        assert self._paying is not None, "nobody was named"
        group, p, step = self._paying
        self._paying = None
        self._rank(group, p - victims * step, step)

    def close(self) -> None:
        """The batch is over: whoever paid is a debtor as before."""
        self._debtors.restore(self._drawn)

    def _rank(self, group: str, p: float, step: float) -> None:
        if p > self._floor and (offer := self._offer(group)) is not None:
            heappush(self._heap, (-round(p / EPSILON), offer, p, step, group))
