"""Debtors: the groups that owe and own a candidate, largest normalised debt first.

Groups are ranked by the time at which their debt would clear if they owed under one contract,
``t + D̃_g(t) / ρ_min``. At one moment that order is the order of normalised debts; as time passes
it stays the same for a group that owes under one contract, and only falls for one that owes under
several (policy.md section 2). Of equal ranks, the group whose next victim ranks lower comes first;
that one only moves back as long as nothing is added. So a heap of ranks and next victims, each true
when it was entered, holds what can only be too early: an entry is recomputed when it surfaces, and
none is touched because time has passed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush, heapreplace

from prefixshield.core.ledger import EPSILON, Ledger

#: What a group would lose next, as (class, native sequence number).
Offer = tuple[int, int]

#: (rank, the higher the lower; offer; group)
Entry = tuple[int, Offer, str]


class Debtors:
    """A lazily corrected heap over groups; O(log groups) amortised per call."""

    def __init__(self, ledger: Ledger, offer: Callable[[str], Offer | None]) -> None:
        """``offer``: what a group would lose next; None: nothing."""
        self._ledger = ledger
        self.offer = offer
        self._heap: list[Entry] = []
        self._entered: dict[str, Entry] = {}  # group → its one valid entry in the heap

    def enter(self, group: str, t: float) -> None:
        """Rank a group anew: its debt rose, or it has more candidates. It may owe nothing."""
        found = self._entry(group, t)
        if found is None:
            return
        entry, _ = found
        known = self._entered.get(group)
        if known is not None and known <= entry:
            return
        self._entered[group] = entry
        heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._entered) + 16:
            self._heap = list(self._entered.values())
            heapify(self._heap)

    def enter_all(self, t: float) -> None:
        """Rank every group anew: the ledger's contracts have changed. O(groups log groups)."""
        self._heap.clear()
        self._entered.clear()
        for group in self._ledger.groups():
            self.enter(group, t)

    def largest(self, t: float) -> tuple[str, float, Offer] | None:
        """The group with the largest normalised debt at ``t``, that debt and its offer.

        None: nobody owes that owns a candidate.
        """
        heap = self._heap
        while heap:
            entry = heap[0]
            group = entry[2]
            if self._entered.get(group) is not entry:  # superseded by a later entry
                heappop(heap)
                continue
            found = self._entry(group, t)
            if found is None:
                heappop(heap)
                del self._entered[group]
                continue
            if found[0] != entry:
                self._entered[group] = entry = found[0]
                heapreplace(heap, entry)
            if heap[0] is entry:
                return group, found[1], entry[1]
        return None

    def remove_largest(self) -> Entry:
        """Take off the group that ``largest`` has just returned; what ``restore`` puts back."""
        entry = heappop(self._heap)
        del self._entered[entry[2]]
        return entry

    def restore(self, entries: Iterable[Entry]) -> None:
        """Put back what was taken off, but for what was ranked anew since."""
        for entry in entries:
            group = entry[2]
            if group not in self._entered:
                self._entered[group] = entry
                heappush(self._heap, entry)

    def _entry(self, group: str, t: float) -> tuple[Entry, float] | None:
        """What stands for a group in the heap, and its debt; None: it owes or offers nothing."""
        rate = self._ledger.lowest_rate
        clearance = self._ledger.clearance_rank(group, t)
        debt = rate * (clearance - t)
        if not debt > EPSILON or (offer := self.offer(group)) is None:
            return None
        return (-round(rate * clearance / EPSILON), offer, group), debt


#: A group of the batch: -P in units of ε, offer, P in blocks, 1/W, group. The lowest pays next.
_Payer = tuple[int, Offer, float, float, str]


class Collection:
    """Debts called in for one allocation batch: which group pays for the next victims.

    The group with the largest P pays, P starts as its normalised debt and falls by 1/W with every
    victim; of equal debts, the one that pays is the one whose offer ranks lower. P lives in this
    batch only (paper, algorithm 2; policy.md section 6). A group is drawn from the debtors only
    when it is the next to pay.
    """

    def __init__(
        self,
        debtors: Debtors,
        ledger: Ledger,
        t: float,
        *,
        floor: float = 0.0,
        victims_per_block: float = 1.0,
    ) -> None:
        """``floor``: a group pays while P exceeds it by more than ε, blocks.
        ``victims_per_block``: how many victims one block of debt pays for.
        """
        self._debtors = debtors
        self._ledger = ledger
        self._t = t
        self._floor = floor + EPSILON
        self._scale = victims_per_block
        self._drawn: list[Entry] = []
        self._payers: list[_Payer] = []  # a heap: those drawn that can pay again
        self._paying: _Payer | None = None
        self._rival = self._look()

    def next(self, count: int) -> tuple[str, int] | None:
        """Who pays next, and for how many of ``count`` victims it does so alone.

        None: nobody owes, or ``count`` is 0. ``paid`` must be called before the next call.
        """
        payers = self._payers
        if not count or not (payers or self._rival):
            return None
        if self._rival and not (payers and payers[0] < self._rival):
            payer = self._rival
            self._drawn.append(self._debtors.remove_largest())
            self._rival = self._look()
        else:
            payer = heappop(payers)
        self._paying = payer
        _, _, p, step, group = payer
        # It pays alone while P - j/W stays above everybody else's debt by more than ε.
        others = self._floor - EPSILON
        if payers and payers[0][2] > others:
            others = payers[0][2]
        if self._rival and self._rival[2] > others:
            others = self._rival[2]
        return group, min(count, max(1, math.ceil((p - others - 2 * EPSILON) / step)))

    def paid(self, victims: int) -> None:
        """The group named last has lost so many; with 0 it is the next to pay as before."""
        assert self._paying is not None, "nobody was named"
        _, _, p, step, group = self._paying
        self._paying = None
        p -= victims * step
        if p > self._floor and (offer := self._debtors.offer(group)) is not None:
            heappush(self._payers, (-round(p / EPSILON), offer, p, step, group))

    def close(self) -> None:
        """The batch is over: whoever paid is a debtor as before."""
        self._debtors.restore(self._drawn)

    def _look(self) -> _Payer | None:
        """The next debtor that was not drawn; None: no other owes enough."""
        found = self._debtors.largest(self._t)
        if found is None:
            return None
        group, debt, offer = found
        if debt <= self._floor:
            return None
        weight = self._ledger.heaviest_debt_weight(group, self._t)
        return -round(debt / EPSILON), offer, debt, 1.0 / (weight * self._scale), group
