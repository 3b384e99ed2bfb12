"""PrefixShield: debt decides who pays, the retention class decides with which block.

Source: "Preserving Admission Responsibility in Multi-Tenant Large Language Model Prefix Caches",
section III, algorithms 1 and 2. Deviations: the history is bounded per group, a block's own chained
hash is its prefix identifier unless the request names one, and indexed queues replace the scan
over candidates (same victims). Preset ``default`` is the same policy as ``paper`` for now.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from heapq import heappop, heappush

from prefixshield.core.debtors import Debtors
from prefixshield.core.history import AdmissionHistory
from prefixshield.core.ledger import EPSILON, Account, Ledger
from prefixshield.core.queues import CandidateQueues
from prefixshield.core.retention import RetentionClass
from prefixshield.policies.base import Access, Policy, PolicySetup

#: The history remembers this many prefixes per block of the pool, over all groups.
HISTORY_PREFIXES_PER_BLOCK = 4

_PROBATIONARY, _NORMAL, _REUSE = RetentionClass


class Shield(Policy):
    """Admission debt per (group, contract), debt-gated promotion, two-stage reclamation."""

    name = "shield"

    def __init__(self, setup: PolicySetup) -> None:
        super().__init__(setup)
        shares = max(1, len(setup.groups))
        self.ledger = Ledger(setup.contracts)
        self.history = AdmissionHistory(
            HISTORY_PREFIXES_PER_BLOCK * setup.capacity_blocks // shares
        )
        self._queues = CandidateQueues()
        self._debtors = Debtors(self.ledger, self._queues.holds_any_of)
        # Per block, by index; None: not cached. Owner and maker are fixed for its cached life.
        self._owner: list[Account | None] = [None] * setup.capacity_blocks
        self._maker: list[Hashable] = [None] * setup.capacity_blocks
        self._prefix_id: list[str | None] = [None] * setup.capacity_blocks
        self._class: list[RetentionClass] = [_PROBATIONARY] * setup.capacity_blocks

    def materialise(
        self, blocks: Sequence[int], hashes: Sequence[Hashable], access: Access
    ) -> None:
        """Charge the blocks, then classify them (policy.md sections 3 and 4)."""
        t = self.ledger.now(access.time)
        account = self.ledger.account(access.group, access.contract)
        self.ledger.charge(account, len(blocks), t)
        self._debtors.enter(access.group, t)
        funded = not account.in_debt(t)
        for block, block_hash in zip(blocks, hashes, strict=True):
            prefix = block_hash if access.prefix_id is None else ("named", access.prefix_id)
            known = self.history.admit(access.group, prefix, access.request_id)
            self._class[block] = _NORMAL if known and funded else _PROBATIONARY
            self._owner[block] = account
            self._maker[block] = access.request_id
            self._prefix_id[block] = access.prefix_id

    def hit(self, blocks: Sequence[int], access: Access) -> list[int]:
        """Promote what proven, debt-free reuse earns (policy.md section 5)."""
        t = self.ledger.now(access.time)
        account = self.ledger.account(access.group, access.contract)
        if self.ledger.raw_debt(access.group, t) > EPSILON:
            return []
        promoted = [
            block
            for block in blocks
            if self._class[block] is not _REUSE
            and self._owner[block] is account
            and self._maker[block] != access.request_id
            and self._prefix_id[block] == access.prefix_id
        ]
        for block in promoted:
            self._class[block] = _REUSE
        return promoted

    def evict(self, count: int, access: Access) -> list[int]:
        """Reclaim from the largest debtors first, then by class (policy.md section 6)."""
        self._require(count)
        t = self.ledger.now(access.time)
        victims: list[int] = []
        drawn: set[str] = set()
        # G⁺ as a heap of (-P in units of ε, class on offer, its native number, P, 1/W, group):
        # equal debts rank by the candidate they offer. P lives in this batch only.
        debtors: list[tuple[int, int, int, float, float, str]] = []

        def rank(group: str, p: float, step: float) -> None:
            if p > EPSILON and self._queues.holds_any_of(group):
                offer = self._queues.offer(group)
                heappush(debtors, (-round(p / EPSILON), *offer, p, step, group))

        while len(victims) < count:
            # Draw every group whose debt is at least that of the best one drawn so far.
            while (largest := self._debtors.largest(t)) is not None:
                group, debt = largest
                if debtors and round(debt / EPSILON) < -debtors[0][0]:
                    break
                self._debtors.remove_largest()
                drawn.add(group)
                rank(group, debt, 1.0 / self.ledger.heaviest_debt_weight(group, t))
            if not debtors:
                break
            _, _, _, p, step, group = heappop(debtors)
            victims.append(self._queues.pop(group))
            rank(group, p - step, step)
        for group in drawn:
            self._debtors.enter(group, t)
        return victims + self._queues.pop_lowest(count - len(victims))

    def hold(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._queues.remove(block, self._owner_of(block).group, self._class[block])

    def release(self, blocks: Sequence[int]) -> None:
        groups = set()
        for block in blocks:
            group = self._owner_of(block).group
            self._queues.append(block, group, self._class[block])
            groups.add(group)
        for group in groups:
            self._debtors.enter(group, self.ledger.time)

    def forget(self, block: int) -> None:
        self.hold([block])

    def reset(self) -> None:
        self._queues.clear()

    @property
    def candidate_count(self) -> int:
        return len(self._queues)

    def retention_class(self, block: int) -> RetentionClass:
        return self._class[block]

    def check(self) -> None:
        for block, place in self._queues.check().items():
            assert place == (self._owner_of(block).group, self._class[block]), f"block {block}"

    def _owner_of(self, block: int) -> Account:
        owner = self._owner[block]
        assert owner is not None, f"block {block} was never materialised"
        return owner
