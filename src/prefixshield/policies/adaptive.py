"""PrefixShield's default preset: protection that harms nobody (policy.md section 7).

Charging and the promotion gate are the paper's (``policies.shield``). Reclamation is not: orphans
go first; then the groups that owe more than the average group pay, as long as a trial on miniatures
finds that this serves more than it costs; everything else goes in a neutral order, from LRU to one
that protects what was reused, whichever the trial finds to serve most.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

from prefixshield.core.chains import Chains
from prefixshield.core.ghosts import Ghosts
from prefixshield.core.ledger import EPSILON, Account, Contract, Ledger
from prefixshield.core.order import Order
from prefixshield.core.retention import RetentionClass
from prefixshield.core.trial import Key, Trial
from prefixshield.policies.base import Access, Policy, PolicySetup

#: Where proven blocks have less than this much of what they have in the miniature that the pool
#: follows, what is admitted counts as proven: the pool has to become like it to fare like it.
CATCH_UP_BELOW = 0.9


class _Origin(NamedTuple):
    """Who materialised a block, and under which hash."""

    account: Account
    request_id: Hashable
    prefix_id: str | None
    key: Key
    sampled: bool
    """Whether the trial sees its accesses."""


class AdaptiveShield(Policy):
    """Debts called in where that serves more; a neutral order for the rest."""

    name = "shield"

    def __init__(self, setup: PolicySetup) -> None:
        super().__init__(setup)
        self.ledger = Ledger(setup.contracts)
        self.ghosts = Ghosts(setup.usable_blocks)
        self.trial = Trial(setup.usable_blocks, self.ledger)
        self.order: Order[int] = Order(setup.usable_blocks, self.ledger, self.trial.rule)
        self._chains = Chains()
        self._orphans: OrderedDict[int, None] = OrderedDict()  # candidates, the first to go first
        self._candidates: set[int] = set()
        self._origin: dict[int, _Origin] = {}  # of every cached block
        self._taken: dict[int, RetentionClass] = {}  # the latest victims

    def materialise(
        self,
        blocks: Sequence[int],
        hashes: Sequence[Hashable],
        access: Access,
        parents: Sequence[Hashable | None] | None = None,
    ) -> None:
        """Charge the blocks; proven is what another request has had before, as a ghost tells."""
        t = self.ledger.now(access.time)
        group, request_id = access.group, access.request_id
        account = self.ledger.account(group, access.contract)
        self.ledger.charge(account, len(blocks), t)
        self.order.charged(group, t)
        self.trial.charged(group, t)
        for place, (block, block_hash) in enumerate(zip(blocks, hashes, strict=True)):
            self._lose([block])  # one whose content was lost while it was held
            key = (group, block_hash)
            sampled = self.trial.samples(block_hash)
            self._origin[block] = _Origin(account, request_id, access.prefix_id, key, sampled)
            maker = self.ghosts.recall(group, block_hash)
            again = maker is not None and maker != request_id
            self.order.admit(block, group, proven=again or self._lags())
            parent = None if parents is None or parents[place] is None else (group, parents[place])
            self._come_back(self._chains.add(block, key, parent))

    def hit(self, blocks: Sequence[int], access: Access) -> list[int]:
        """Record reuse always; promote what proven, debt-free reuse earns (policy.md section 5)."""
        t = self.ledger.now(access.time)
        account = self.ledger.account(access.group, access.contract)
        owes = self.ledger.raw_debt(access.group, t) > EPSILON
        promoted = []
        for block in blocks:
            origin = self._origin.get(block)
            if origin is None or origin.request_id == access.request_id:
                continue
            earned = origin.account is account and origin.prefix_id == access.prefix_id
            if self.order.reuse(block, promote=earned and not owes):
                promoted.append(block)
        return promoted

    def hold(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._candidates.remove(block)
            if block in self._orphans:
                del self._orphans[block]
            else:
                self.order.remove(block)

    def release(self, blocks: Sequence[int]) -> None:
        self._candidates.update(blocks)
        orphans = [block for block in blocks if self._chains.is_orphan(block)]
        self._orphans.update(dict.fromkeys(orphans))
        self.order.append(block for block in blocks if block not in self._orphans)
        self._try(blocks)

    def evict(self, count: int, access: Access) -> list[int]:
        """Orphans first, then by the order that the trial favours."""
        self._require(count)
        t = self.ledger.now(access.time)
        self._taken = {}
        while self._orphans and len(self._taken) < count:
            block, _ = self._orphans.popitem(last=False)
            self._taken[block] = self.order.retention(block) or RetentionClass.PROBATIONARY
            self.order.drop(block)
        self.orphans_evicted += len(self._taken)
        self._taken.update(self.order.take(count - len(self._taken), t))
        victims = list(self._taken)
        self._candidates.difference_update(victims)
        for block, retention in self._taken.items():
            if retention is RetentionClass.PROBATIONARY:
                origin = self._origin[block]
                self.ghosts.remember(*origin.key, origin.request_id)
        self._lose(victims)
        return victims

    def forget(self, block: int) -> None:
        self.hold([block])
        self._lose([block])

    def evicted(self, blocks: Sequence[int]) -> None:
        self.order.mark_full()
        for block in blocks:
            if self.order.retention(block) is RetentionClass.PROBATIONARY:
                origin = self._origin[block]
                self.ghosts.remember(*origin.key, origin.request_id)
            self.forget(block)

    def reconfigure(
        self, contracts: Mapping[str, Contract], groups: Sequence[str], time: float
    ) -> None:
        self.ledger.reconfigure(contracts, groups, time)
        self.order.debts_changed(self.ledger.time)
        self.trial.debts_changed(self.ledger.time)

    def reset(self) -> None:
        self.order.clear()
        self._chains.clear()
        for state in (self._orphans, self._candidates, self._origin, self._taken):
            state.clear()

    @property
    def candidate_count(self) -> int:
        return len(self._candidates)

    def retention_class(self, block: int) -> RetentionClass | None:
        cached = self.order.retention(block)
        return self._taken.get(block) if cached is None else cached

    def check(self) -> None:
        self.order.check()
        assert self._candidates == self._orphans.keys() | self.order.candidates()
        assert not self._orphans.keys() & self.order.candidates()
        for block in self._origin:
            orphan = self._chains.is_orphan(block) and block in self._candidates
            assert (block in self._orphans) == orphan, f"block {block}: {orphan=}"

    def _lags(self) -> bool:
        """Whether the pool still has to become like the miniature that it follows."""
        wanted = CATCH_UP_BELOW * self.trial.proven_part
        return self.order.rule.proven_share > 0 and self.order.proven_part < wanted

    def _lose(self, blocks: Sequence[int]) -> None:
        """Blocks that are no candidates are cached no more; what they leave behind is orphaned."""
        for block in blocks:
            if block in self._origin:
                del self._origin[block]
                self.order.drop(block)
                for orphan in self._chains.remove(block):
                    if orphan in self._candidates:
                        self.order.remove(orphan)
                        self._orphans[orphan] = None

    def _come_back(self, blocks: Iterable[int]) -> None:
        """Blocks can be reached again."""
        found = [block for block in blocks if block in self._orphans]
        for block in found:
            del self._orphans[block]
        self.order.append(found)

    def _try(self, blocks: Sequence[int]) -> None:
        """Tell the trial that a request has used these blocks, given tail first."""
        origins = [origin for block in reversed(blocks) if (origin := self._origin[block]).sampled]
        if not origins:
            return
        t = self.ledger.time
        group = origins[0].account.group
        debt = self.ledger.normalised_debt(group, t)
        excess = debt - self.ledger.mean_debt_of_others(group, t)
        discount = excess / max(debt, self.order.largest_debt(t)) if excess > EPSILON else 0.0
        keys = list(dict.fromkeys(origin.key for origin in origins))
        self.trial.serve(keys, len(blocks), t, discount)
        self.order.rule = self.trial.rule
