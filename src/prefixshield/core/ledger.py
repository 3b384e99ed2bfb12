"""The ledger: one token bucket per (group, contract), denominated in blocks (policy.md section 2).

A bucket is stored as one number, ``full_at``: the accounting time in seconds at which it will be
full again (the "theoretical arrival time" of the generic cell rate algorithm, ITU-T I.371).
Charging ``n`` blocks moves it ``n / refill_rate`` into the future, so refill needs no timer, a
balance has no lower bound, and a bucket seen for the first time is full.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from heapq import heapify, heappop, heappush
from typing import NamedTuple

#: Debts up to this many blocks count as cleared, and debts closer than this count as equal:
#: far above the rounding of double-precision clocks, far below one block (the paper's epsilon).
EPSILON = 1e-6


class Contract(NamedTuple):
    """A creation entitlement: what a group may materialise without going into debt."""

    refill_rate: float
    """Sustained entitlement in blocks per second, greater than 0."""
    burst: float
    """Short-term credit in blocks, at least 0."""


class Debt(NamedTuple):
    """What a group owes, in blocks (policy.md section 2)."""

    raw: float
    """D_g: gates promotion."""
    normalised: float
    """D̃_g: ranks reclamation."""


class Account:
    """The bucket of one (group, contract)."""

    __slots__ = (
        "burst",
        "clears_at",
        "contract",
        "full_at",
        "group",
        "refill_rate",
        "weight",
    )

    def __init__(self, group: str, contract: str, terms: Contract, weight: float) -> None:
        self.group = group
        self.contract = contract
        self.refill_rate = terms.refill_rate
        self.burst = terms.burst
        self.weight = weight
        self.full_at = -math.inf
        self.clears_at = -math.inf
        """Accounting time at which the balance is back at zero; in the past when not in debt."""

    def charge(self, blocks: int, t: float) -> None:
        """Charge newly materialised blocks: B(t) = B̂(t) - n. Called by the ledger."""
        self.full_at = max(self.full_at, t) + blocks / self.refill_rate
        self.clears_at = self.full_at - self.burst / self.refill_rate

    def change(self, terms: Contract, weight: float, t: float) -> None:
        """Go on under other terms from ``t``: B(t) stays, capped at the burst. By the ledger."""
        missing = terms.burst - min(self.balance(t), terms.burst)
        self.refill_rate, self.burst, self.weight = terms.refill_rate, terms.burst, weight
        self.full_at = t + missing / terms.refill_rate if missing else -math.inf
        self.clears_at = self.full_at - terms.burst / terms.refill_rate

    def balance(self, t: float) -> float:
        """Effective balance in blocks at accounting time ``t``; negative when in debt."""
        if self.full_at <= t:
            return self.burst
        return self.burst - self.refill_rate * (self.full_at - t)

    def in_debt(self, t: float) -> bool:
        """Whether B̂(t) < -ε."""
        return self.refill_rate * (self.clears_at - t) > EPSILON


class Ledger:
    """All accounts. Times are seconds of one monotonic accounting clock owned by the caller.

    The ledger's own time never runs backwards: a clock that steps back is held at the latest
    time seen, so that it neither mints nor burns credit.
    """

    def __init__(self, contracts: Mapping[str, Contract]) -> None:
        self._contracts = dict(contracts)
        self.lowest_rate = min(terms.refill_rate for terms in contracts.values())
        """ρ_min in blocks per second, of the contracts that are configured."""
        self._accounts: dict[tuple[str, str], Account] = {}
        self._of_group: dict[str, list[Account]] = {}
        # The accounts in debt, as a heap of (clearance or earlier, group, contract), and
        # the sum of their clearances.
        self._owing: list[tuple[float, str, str]] = []
        self._clearances = 0.0
        self.time = -math.inf
        """The latest accounting time seen."""

    def reconfigure(
        self, contracts: Mapping[str, Contract], groups: Iterable[str], t: float
    ) -> None:
        """Other terms from ``t`` on: balances stay, capped at the new burst.

        A contract that is gone keeps its terms for those who are still under it; a group that is
        gone keeps its accounts that owe. Clearance times change: whoever has ranked groups by them
        must do so anew. O(accounts).
        """
        t = self.now(t)
        expected = set(groups)
        kept = {
            key: account
            for key, account in self._accounts.items()
            if account.group in expected or account.clears_at > t
        }
        self._accounts = kept
        self._of_group = {}
        for account in kept.values():
            self._of_group.setdefault(account.group, []).append(account)
        self._contracts.update(contracts)
        self.lowest_rate = min(terms.refill_rate for terms in contracts.values())
        for account in kept.values():
            terms = self._contracts[account.contract]
            account.change(terms, terms.refill_rate / self.lowest_rate, t)
        owing = [account for account in kept.values() if account.clears_at > t]
        self._owing = [(account.clears_at, account.group, account.contract) for account in owing]
        heapify(self._owing)
        self._clearances = sum(account.clears_at for account in owing)

    def groups(self) -> Iterable[str]:
        """The groups that have an account."""
        return self._of_group.keys()

    def now(self, t: float) -> float:
        """The accounting time for a caller's clock reading ``t``."""
        if t > self.time:
            self.time = t
        return self.time

    def account(self, group: str, contract: str) -> Account:
        """The account of (group, contract), opened full at first sight.

        Raises KeyError for a contract that is not configured.
        """
        account = self._accounts.get((group, contract))
        if account is None:
            terms = self._contracts[contract]
            account = Account(group, contract, terms, terms.refill_rate / self.lowest_rate)
            self._accounts[group, contract] = account
            self._of_group.setdefault(group, []).append(account)
        return account

    def charge(self, account: Account, blocks: int, t: float) -> None:
        """Charge an account newly materialised blocks."""
        self._settle(t)
        if owed := account.clears_at > t:
            self._clearances -= account.clears_at
        account.charge(blocks, t)
        if account.clears_at > t:
            self._clearances += account.clears_at
            if not owed:
                heappush(self._owing, (account.clears_at, account.group, account.contract))

    def refund(self, account: Account, blocks: int, t: float) -> None:
        """Take a charge back; a full bucket stays full. Looks at all accounts in debt."""
        self.charge(account, -blocks, t)
        owing = (self._accounts[entry[1:]] for entry in self._owing)
        self._owing = [(a.clears_at, a.group, a.contract) for a in owing if a.clears_at > t]
        heapify(self._owing)

    def mean_debt(self, t: float) -> float:
        """Mean of D̃_g(t) over all groups with an account, in blocks; O(1) amortised."""
        self._settle(t)
        if not self._owing:
            return 0.0
        total = self.lowest_rate * (self._clearances - len(self._owing) * t)
        return total / len(self._of_group)

    def mean_debt_of_others(self, group: str, t: float) -> float:
        """The same over all groups but one; 0 when there is no other."""
        others = len(self._of_group) - (group in self._of_group)
        if not others:
            return 0.0
        total = self.mean_debt(t) * len(self._of_group)
        return max(0.0, total - self.normalised_debt(group, t)) / others

    def _settle(self, t: float) -> None:
        """Strike off the accounts whose debts have cleared."""
        while self._owing and self._owing[0][0] <= t:
            _, group, contract = heappop(self._owing)
            account = self._accounts[group, contract]
            if account.clears_at > t:  # it was charged more since
                heappush(self._owing, (account.clears_at, group, contract))
            else:
                self._clearances -= account.clears_at
        if not self._owing:
            self._clearances = 0.0  # what rounding left

    def raw_debt(self, group: str, t: float) -> float:
        """D_g(t) in blocks, summed over the group's contracts: gates promotion."""
        return sum(
            account.refill_rate * (account.clears_at - t)
            for account in self._of_group.get(group, ())
            if account.clears_at > t
        )

    def normalised_debt(self, group: str, t: float) -> float:
        """D̃_g(t) in blocks of the smallest contract: ranks reclamation."""
        return self.lowest_rate * (self.clearance_rank(group, t) - t)

    def clearance_rank(self, group: str, t: float) -> float:
        """t + D̃_g(t) / ρ_min, in seconds: orders groups at ``t`` as their normalised debts do.

        It does not change with ``t`` while the group owes under one contract, and falls while it
        owes under several.
        """
        rank = t
        for account in self._of_group.get(group, ()):
            if account.clears_at > t:
                rank = account.clears_at if rank == t else rank + account.clears_at - t
        return rank

    def debts(self, t: float) -> dict[str, Debt]:
        """What every group owes that has an account."""
        raw = dict.fromkeys(self._of_group, 0.0)
        seconds = raw.copy()
        for account in self._accounts.values():
            if (until_clear := account.clears_at - t) > 0:
                raw[account.group] += account.refill_rate * until_clear
                seconds[account.group] += until_clear
        return {group: Debt(raw[group], self.lowest_rate * seconds[group]) for group in raw}

    def heaviest_debt_weight(self, group: str, t: float) -> float:
        """W_g(t): the largest weight among the group's contracts in debt; 1 when none is."""
        accounts = self._of_group.get(group, ())
        if len(accounts) == 1:
            return accounts[0].weight if accounts[0].in_debt(t) else 1.0
        return max((a.weight for a in accounts if a.in_debt(t)), default=1.0)
