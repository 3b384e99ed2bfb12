"""PrefixShield's default preset: protection that harms nobody (policy.md section 7).

Charging and the promotion gate are the paper's (``policies.shield``). Reclamation is not: orphans
go first; then the groups that owe more than the average group pay, as long as a trial on miniatures
finds that this serves more than it costs; everything else goes in a neutral order, from LRU to one
that protects what was reused, whichever the trial finds to serve most.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping, Sequence

from prefixshield.core.chains import Chains
from prefixshield.core.ghosts import Ghosts
from prefixshield.core.ledger import EPSILON, Contract, Debt, Ledger
from prefixshield.core.order import Order
from prefixshield.core.retention import RetentionClass
from prefixshield.core.trial import Trial
from prefixshield.policies.base import DEBT, ORDER, ORPHAN, Access, Origin, Policy, PolicySetup

#: Where proven blocks have less than this much of what they have in the miniature that the pool
#: follows, what is admitted counts as proven: the pool has to become like it to fare like it.
CATCH_UP_BELOW = 0.9


class AdaptiveShield(Policy):
    """Debts called in where that serves more; a neutral order for the rest."""

    name = "shield"

    def __init__(self, setup: PolicySetup) -> None:
        super().__init__(setup)
        self.ledger = Ledger(setup.contracts)
        self.ghosts = Ghosts(setup.usable_blocks)
        self.trial = Trial(setup.usable_blocks, self.ledger)
        self.order = Order(
            setup.usable_blocks,
            self.ledger,
            self.trial.rule,
            unused_blocks=setup.reserved_blocks,
        )
        self._chains = Chains(setup.capacity_blocks)
        self._orphans: OrderedDict[int, None] = OrderedDict()  # candidates, the first to go first
        # Of every cached block: who made it, and whether the trial sees its accesses.
        self._origin: list[Origin | None] = [None] * setup.capacity_blocks
        self._sampled = bytearray(setup.capacity_blocks)
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
        if account.clears_at > t:
            self.order.charged(group, t)
            self.trial.charged(group, t)
        origin = Origin(account, request_id, access.prefix_id)
        makers = self.ghosts.recall(group, hashes)
        samples = self.trial.sampled(hashes)
        for block, sampled in zip(blocks, samples, strict=True):
            if self._origin[block] is not None:  # its content was lost while it was held
                self._lose([block])
            self._origin[block] = origin
            self._sampled[block] = sampled
        again = [maker is not None and maker != request_id for maker in makers]
        self.order.admit(blocks, group, again, self._proven_until())
        parents = parents or [None] * len(blocks)
        self._turn(*self._chains.add(blocks, group, hashes, parents))

    def hit(self, blocks: Sequence[int], access: Access) -> list[int]:
        """Record reuse always; promote what proven, debt-free reuse earns (policy.md section 5)."""
        t = self.ledger.now(access.time)
        account = self.ledger.account(access.group, access.contract)
        owes = self.ledger.raw_debt(access.group, t) > EPSILON
        earned: list[int] = []
        merely_reused: list[int] = []
        for block in blocks:
            origin = self._origin[block]
            if origin is None or origin.request_id == access.request_id:
                continue
            if origin.account is account and origin.prefix_id == access.prefix_id:
                earned.append(block)
            else:
                merely_reused.append(block)
        self.order.reuse(merely_reused, promote=False)
        if owes:
            highest = RetentionClass.REUSE
            self.promotions_denied += sum(self.order.retention(b) is not highest for b in earned)
        return self.order.reuse(earned, promote=not owes)

    def hold(self, blocks: Sequence[int]) -> None:
        if self._orphans:
            for block in blocks:
                if block in self._orphans:
                    del self._orphans[block]
                else:
                    self.order.hold([block])
        else:
            self.order.hold(blocks)

    def release(self, blocks: Sequence[int]) -> None:
        if self._chains.broken:
            orphans = dict.fromkeys(filter(self._chains.is_orphan, blocks))
            self._orphans.update(orphans)
            self.order.append(block for block in blocks if block not in orphans)
        else:
            self.order.append(blocks)
        self._try(blocks)

    def evict(self, count: int, access: Access) -> list[int]:
        """Orphans first, then by the order that the trial favours."""
        self._require(count)
        t = self.ledger.now(access.time)
        taken: dict[int, RetentionClass] = {}
        self._taken = taken
        while self._orphans and len(taken) < count:
            block, _ = self._orphans.popitem(last=False)
            taken[block] = retention = self.order.retention(block) or RetentionClass.PROBATIONARY
            if retention is RetentionClass.PROBATIONARY:
                self._become_ghosts([block])
            self.order.drop(block)
        orphans = len(taken)
        self.orphans_evicted += orphans
        for queue, blocks in self.order.take(count - orphans, t):
            taken.update(dict.fromkeys(blocks, queue.retention))
            if queue.retention is RetentionClass.PROBATIONARY:
                self._become_ghosts(blocks)
        called_in = self.order.called_in
        rest = count - orphans - called_in
        self.causes = ((ORPHAN, orphans), (DEBT, called_in), (ORDER, rest))
        victims = list(taken)
        self._lose(victims)
        return victims

    def forget(self, block: int) -> None:
        self.hold([block])
        self._lose([block])

    def evicted(self, blocks: Sequence[int]) -> None:
        self.order.mark_full()
        for block in blocks:
            self.orphans_evicted += block in self._orphans
            if self.order.retention(block) is RetentionClass.PROBATIONARY:
                self._become_ghosts([block])
        self.hold(blocks)
        self._lose(blocks)

    def reconfigure(
        self, contracts: Mapping[str, Contract], groups: Sequence[str], time: float
    ) -> None:
        self.ledger.reconfigure(contracts, groups, time)
        self.order.debts_changed(self.ledger.time)
        self.trial.debts_changed(self.ledger.time)

    def refund(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            if (origin := self._origin[block]) is not None:
                self.ledger.refund(origin.account, 1, self.ledger.time)
        self._lose(blocks)

    def reset(self) -> None:
        self.order.clear()
        self._chains.clear()
        self._orphans.clear()
        self._taken = {}
        self._origin = [None] * len(self._origin)

    @property
    def candidate_count(self) -> int:
        return len(self.order) + len(self._orphans)

    def retention_class(self, block: int) -> RetentionClass | None:
        cached = self.order.retention(block)
        return self._taken.get(block) if cached is None else cached

    def resident_blocks(self) -> Mapping[tuple[str, RetentionClass], int]:
        return self.order.cached()

    def debts(self, time: float) -> Mapping[str, Debt]:
        return self.ledger.debts(time)

    def remembered(self) -> Mapping[str, int]:
        return self.ghosts.sizes()

    def check(self) -> None:
        self.order.check()
        assert not self._orphans.keys() & self.order.candidates()
        candidates = self._orphans.keys() | self.order.candidates()
        for block, origin in enumerate(self._origin):
            if origin is not None:
                orphan = self._chains.is_orphan(block) and block in candidates
                assert (block in self._orphans) == orphan, f"block {block}: {orphan=}"

    def _proven_until(self) -> float:
        """Below how many proven blocks the pool has to become like the miniature it follows."""
        if self.order.rule.proven_share == 0:
            return 0.0
        return CATCH_UP_BELOW * self.trial.proven_part * self.order.capacity_blocks

    def _become_ghosts(self, blocks: Sequence[int]) -> None:
        """Unproven blocks of one group are evicted."""
        makers = [self._made(block) for block in blocks]
        hashes = map(self._chains.key, blocks)
        group = makers[0].account.group
        self.ghosts.remember(group, hashes, [maker.request_id for maker in makers])

    def _made(self, block: int) -> Origin:
        origin = self._origin[block]
        assert origin is not None, f"block {block} was never materialised"
        return origin

    def _lose(self, blocks: Sequence[int]) -> None:
        """Blocks that are no candidates are cached no more; what they leave behind is orphaned."""
        for block in blocks:
            self._origin[block] = None
            self.order.drop(block)
        self._turn(*self._chains.remove(blocks))

    def _turn(self, lost: Iterable[int], back: Iterable[int]) -> None:
        """Blocks became orphans, others can be reached again."""
        for orphan in lost:
            if self.order.is_candidate(orphan):
                self.order.hold([orphan])
                self._orphans[orphan] = None
        if found := [block for block in back if block in self._orphans]:
            for block in found:
                del self._orphans[block]
            self.order.append(found)

    def _try(self, blocks: Sequence[int]) -> None:
        """Tell the trial that a request has used these blocks, given tail first."""
        sampled = [block for block in reversed(blocks) if self._sampled[block]]
        if not sampled:
            return
        t = self.ledger.time
        group = self._made(sampled[0]).account.group
        debt = self.ledger.normalised_debt(group, t)
        excess = debt - self.ledger.mean_debt_of_others(group, t)
        discount = excess / max(debt, self.order.largest_debt(t)) if excess > EPSILON else 0.0
        keys = list(dict.fromkeys((group, self._chains.key(block)) for block in sampled))
        self.trial.serve(keys, len(blocks), t, discount)
        self.order.rule = self.trial.rule
