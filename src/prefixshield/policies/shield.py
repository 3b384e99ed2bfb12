"""PrefixShield: debt decides who pays, the retention class decides with which block.

Source: "Preserving Admission Responsibility in Multi-Tenant Large Language Model Prefix Caches",
section III, algorithms 1 and 2. Deviations: the history is bounded per group, a block's own chained
hash is its prefix identifier unless the request names one, and indexed queues replace the scan
over candidates (same victims). This is preset ``paper``; ``policies.adaptive`` is the default.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import repeat

from prefixshield.core.debtors import Collection, Debtors
from prefixshield.core.history import AdmissionHistory
from prefixshield.core.ledger import EPSILON, Contract, Debt, Ledger
from prefixshield.core.queues import CandidateQueues, Queue
from prefixshield.core.retention import RetentionClass
from prefixshield.policies.base import DEBT, ORDER, Access, Origin, Policy, PolicySetup

#: The history remembers this many prefixes per block of the pool, over all groups.
HISTORY_PREFIXES_PER_BLOCK = 4


class Shield(Policy):
    """Admission debt per (group, contract), debt-gated promotion, two-stage reclamation."""

    name = "shield"

    def __init__(self, setup: PolicySetup) -> None:
        super().__init__(setup)
        self._history_prefixes = HISTORY_PREFIXES_PER_BLOCK * setup.usable_blocks
        self.ledger = Ledger(setup.contracts)
        self.history = AdmissionHistory(self._history_prefixes // max(1, len(setup.groups)))
        self._queues = CandidateQueues(setup.capacity_blocks)
        self._debtors = Debtors(self.ledger, self._queues.offer)
        # Per block: who made it, and the queue of its owner and class; None: not cached.
        self._origin: list[Origin | None] = [None] * setup.capacity_blocks
        self._queue: list[Queue | None] = [None] * setup.capacity_blocks
        self._taken: dict[int, Queue | None] = {}  # the queues of the latest victims

    def materialise(
        self,
        blocks: Sequence[int],
        hashes: Sequence[Hashable],
        access: Access,
        parents: Sequence[Hashable | None] | None = None,
    ) -> None:
        """Charge the blocks, then classify them (policy.md sections 3 and 4)."""
        t = self.ledger.now(access.time)
        account = self.ledger.account(access.group, access.contract)
        self.ledger.charge(account, len(blocks), t)
        if account.clears_at > t:
            self._debtors.enter(access.group, t)
        if access.prefix_id is None:
            prefixes: Iterable[Hashable] = hashes
        else:
            prefixes = repeat(("named", access.prefix_id), len(blocks))
        known = self.history.admit(access.group, prefixes, access.request_id)
        origin = Origin(account, access.request_id, access.prefix_id)
        probationary, normal, _ = self._classes(access.group)
        if account.in_debt(t):
            normal = probationary
        for block, again in zip(blocks, known, strict=True):
            if self._queue[block] is not None:  # its content was lost while it was held
                self._lose([block])
            self._origin[block] = origin
            self._queue[block] = queue = normal if again else probationary
            queue.cached += 1

    def hit(self, blocks: Sequence[int], access: Access) -> list[int]:
        """Promote what proven, debt-free reuse earns (policy.md section 5)."""
        t = self.ledger.now(access.time)
        account = self.ledger.account(access.group, access.contract)
        gated = self._is_gated(access.group, t)
        promoted = []
        _, _, reuse = self._classes(access.group)
        for block in blocks:
            origin = self._origin[block]
            if (
                self._queue[block] is not reuse
                and origin is not None
                and origin.account is account
                and origin.request_id != access.request_id
                and origin.prefix_id == access.prefix_id
            ):
                if gated:
                    self.promotions_denied += 1
                    continue
                self._queue_of(block).cached -= 1
                self._queue[block] = reuse
                reuse.cached += 1
                promoted.append(block)
        return promoted

    def evict(self, count: int, access: Access) -> list[int]:
        """Reclaim from the largest debtors first, then by class (policy.md section 6)."""
        self._require(count)
        t = self.ledger.now(access.time)
        victims: list[int] = []
        debts = Collection(self._debtors, self.ledger, t)
        while payer := debts.next(count - len(victims)):
            taken = self._queues.pop(*payer)
            victims += taken
            debts.paid(len(taken))
        debts.close()
        self.causes = ((DEBT, len(victims)), (ORDER, count - len(victims)))
        victims += self._queues.pop_lowest(count - len(victims))
        self._taken = dict(zip(victims, map(self._queue.__getitem__, victims), strict=True))
        self._lose(victims)
        return victims

    def hold(self, blocks: Sequence[int]) -> None:
        self._queues.remove(blocks, self._queue)

    def release(self, blocks: Sequence[int]) -> None:
        for group in self._queues.append(blocks, self._queue):
            self._debtors.enter(group, self.ledger.time)

    def forget(self, block: int) -> None:
        self.hold([block])
        self._lose([block])

    def refund(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            if (origin := self._origin[block]) is not None:
                self.ledger.refund(origin.account, 1, self.ledger.time)
            self._origin[block] = self._queue[block] = None

    def reset(self) -> None:
        self._queues.clear()
        self._taken = {}
        self._queue = [None] * len(self._queue)

    def reconfigure(
        self, contracts: Mapping[str, Contract], groups: Sequence[str], time: float
    ) -> None:
        self.ledger.reconfigure(contracts, groups, time)
        self.history.divide(groups, self._history_prefixes // max(1, len(groups)))
        self._debtors.enter_all(self.ledger.time)

    @property
    def candidate_count(self) -> int:
        return len(self._queues)

    def retention_class(self, block: int) -> RetentionClass | None:
        queue = self._queue[block] or self._taken.get(block)
        return None if queue is None else queue.retention

    def resident_blocks(self) -> Mapping[tuple[str, RetentionClass], int]:
        return self._queues.cached()

    def debts(self, time: float) -> Mapping[str, Debt]:
        return self.ledger.debts(time)

    def remembered(self) -> Mapping[str, int]:
        return self.history.sizes()

    def check(self) -> None:
        for block, queue in self._queues.check().items():
            assert self._queue[block] is queue, f"block {block} is in another queue"

    def _lose(self, blocks: Sequence[int]) -> None:
        """Blocks that are no candidates are cached no more."""
        for block in blocks:
            self._queue_of(block).cached -= 1
            self._queue[block] = None

    def _classes(self, group: str) -> tuple[Queue, Queue, Queue]:
        """The group's queues of probationary, normal and reuse blocks."""
        return self._queues.of_group(group)

    def _is_gated(self, group: str, t: float) -> bool:
        """Whether debt keeps the group's blocks from being promoted: D_g(t) > ε."""
        return self.ledger.raw_debt(group, t) > EPSILON

    def _queue_of(self, block: int) -> Queue:
        queue = self._queue[block]
        assert queue is not None, f"block {block} was never materialised"
        return queue


class NoSegmentation(Shield):
    """Ablation (paper, Fig. 3a): debt decides who pays, native order with which block."""

    name = "no-segmentation"

    def _classes(self, group: str) -> tuple[Queue, Queue, Queue]:
        only, _, _ = self._queues.of_group(group)
        return only, only, only


class NoDebtGate(Shield):
    """Ablation (paper, Fig. 3b): reuse is promoted whatever the group owes."""

    name = "no-debt-gate"

    def _is_gated(self, group: str, t: float) -> bool:
        return False
