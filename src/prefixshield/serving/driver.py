"""The driver: feeds one policy from vLLM's pool, counts, and is where a policy's failure ends.

vLLM's own free queue stays in charge of which blocks are free and keeps them in native order; the
policy only reorders the choice of victims. So whatever a policy does, no block can be leaked,
freed twice or handed out while held: an answer that does not fit, or an exception, switches
eviction to native order until the prefix cache is next reset, and is counted. A policy whose order
is the native one is not asked at all.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

from prefixshield.core.ledger import Contract, Debt
from prefixshield.core.shares import Shares
from prefixshield.policies.base import ORDER, Access, Policy
from prefixshield.serving.catalogue import NO_CLASS
from prefixshield.serving.namespace import Identity

# Below "vllm", whose logging configuration shows it.
_log = logging.getLogger("vllm.prefixshield")

_T = TypeVar("_T")


class PolicyDriver:
    """One policy over one vLLM block pool. Single-threaded, as vLLM's scheduler is."""

    def __init__(
        self,
        policy: Policy,
        default: Identity,
        clock: Callable[[], float] | None = None,
        label: Callable[[str], str] = str,
    ) -> None:
        """What the driver needs.

        Args:
            policy: over all blocks of the pool.
            default: who pays for what no request is known to have caused.
            clock: seconds, monotonic; by default those since now, small enough to be exact.
            label: under which name a group is counted, to bound how many counts there are.

        """
        started = time.monotonic()
        self.policy = policy
        self.clock = clock or (lambda: time.monotonic() - started)
        self.default = default
        self._label = label
        self.failed = False
        """Whether the policy has failed."""
        self.told = not policy.native_order
        """Whether the policy is told what happens; not once it has failed, and not one whose order
        is the native one."""
        self.shadow = False
        """Whether the policy only accounts: it is told, and victims leave in native order."""
        self._current: Access | None = None
        self._make_current: Callable[[], Access] | None = None
        self.proves_reuse = False
        """Whether the current request's hits are evidence: not when it was preempted before."""
        self.counts: Counter[tuple[str, ...]] = Counter()
        """Since start, by (name, label values...); see ``serving.metrics``."""
        self.owner: list[str | None] = [None] * policy.capacity_blocks
        """By block: the group that last materialised it; None: nobody, or it was invalidated."""
        self.resident: Counter[str] = Counter()
        """Cached blocks by owner, held ones included."""
        self.candidate_count = 0
        """Free blocks with content, the policy's candidates; counted while it is told of them."""
        self.causes: Sequence[tuple[str, int]] = ()
        """Why the latest victims were chosen, as ``Policy.causes``."""
        self._orphans_counted = 0
        self._denied_counted = 0
        share = policy.share_blocks
        self.shares = None if share is None else Shares(policy.capacity_blocks, share)
        """The count of every group's blocks; None: the policy divides nothing. Right whether or
        not the policy has failed."""

    @property
    def native(self) -> bool:
        """Whether victims leave in native order."""
        return self.shadow or not self.told

    @property
    def follows_candidates(self) -> bool:
        """Whether it matters which blocks become free and are held again."""
        return self.told or self.shares is not None

    @property
    def current(self) -> Access | None:
        """The request that vLLM is allocating for; None outside an allocation."""
        if self._current is None and self._make_current is not None:
            self._current = self._make_current()
        return self._current

    def allocate_for(self, access: Callable[[], Access] | None, proves_reuse: bool = False) -> None:
        """An allocation begins, or with None is over.

        ``access`` is asked when the allocation needs it: most steps of a request that decodes do
        not. ``proves_reuse``: as the attribute.
        """
        self._current, self._make_current, self.proves_reuse = None, access, proves_reuse

    def count(self, name: str, group: str, number: int) -> None:
        """Count something of a group."""
        self.counts[name, self._label(group)] += number

    def access(
        self, identity: Identity, request_id: str = "", prefix_id: str | None = None
    ) -> Access:
        """An access at this moment."""
        return Access(identity.group, identity.contract, request_id, self.clock(), prefix_id)

    def materialised(
        self,
        blocks: Sequence[int],
        hashes: Sequence[Hashable],
        access: Access,
        parents: Sequence[Hashable | None] | None = None,
    ) -> None:
        """Held blocks became cached: full, each exactly once; see ``Policy.materialise``."""
        owner, group = self.owner, access.group
        for block in blocks:
            owner[block] = group
        self.count("materialised", group, len(blocks))
        self.resident[group] += len(blocks)
        self._guarded(self.policy.materialise, blocks, hashes, access, parents)

    def hit(self, blocks: Sequence[int]) -> None:
        """The current request reuses held, cached blocks; a touch by anyone else is no reuse."""
        if not self.proves_reuse or (current := self.current) is None:
            return
        promoted = self._guarded(self._promotions, blocks, current)
        if promoted:
            self.count("promoted", current.group, promoted)
        if denied := self.policy.promotions_denied - self._denied_counted:
            self.count("denied", current.group, denied)
            self._denied_counted += denied

    def held(self, blocks: Sequence[int]) -> None:
        """Candidates are held."""
        if blocks:
            self.candidate_count -= len(blocks)
            if self.shares is not None:
                self.shares.hold(blocks)
            self._guarded(self.policy.hold, blocks)

    def released(self, blocks: Sequence[int]) -> None:
        """Cached blocks became free, in native order."""
        if blocks:
            self.candidate_count += len(blocks)
            if self.shares is not None:
                self.shares.release(blocks)
            self._guarded(self.policy.release, blocks)

    def invalidated(self, block: int) -> None:
        """A candidate lost its content without being chosen."""
        self._disown([block])
        self.candidate_count -= 1
        if self.shares is not None:
            self.shares.empty([block])
        self._guarded(self.policy.forget, block)

    def refunded(self, blocks: Sequence[int]) -> None:
        """Held cached blocks lost their content; whoever was charged for them gets it back."""
        for owner, lost in self._disown(blocks).items():
            self.count("refunded", owner, lost)
        self._guarded(self.policy.refund, blocks)

    def _disown(self, blocks: Sequence[int]) -> Counter[str]:
        """Cached blocks have no owner any more; how many each group had of them."""
        lost: Counter[str] = Counter()
        for block in blocks:
            if (owner := self.owner[block]) is not None:
                lost[owner] += 1
            self.owner[block] = None
        self.resident.subtract(lost)
        return lost

    def room(self, shares: Shares) -> int:
        """How many truly free blocks the request that vLLM is allocating for may take."""
        return shares.room(self._allocating_group())

    def allocated(self, shares: Shares, blocks: Sequence[int]) -> None:
        """Free blocks are handed out."""
        shares.allocate(blocks, self._allocating_group())

    def emptied(self, shares: Shares, blocks: Sequence[int]) -> None:
        """Held blocks without content became free."""
        shares.release(blocks)
        shares.empty(blocks)

    def choose(self, count: int) -> Sequence[int]:
        """``count`` victims, in order; none if the policy fails.

        The pool takes each that is a candidate, and calls ``disbelieve`` when one is not.
        """
        access = self.current or self.access(self.default)
        victims = self._guarded(self._victims, count, access) or ()
        self._count_orphans()
        return victims

    def disbelieve(self, victims: Sequence[int], count: int) -> None:
        """The policy's answer makes no sense."""
        self._fail(f"chose {victims!r} when asked for {count} victims")

    def evicted(self, blocks: Sequence[int], causes: Sequence[tuple[str, int]] = ()) -> None:
        """Cached blocks are handed out, whoever chose them; counts who lost, to whom and why.

        ``causes``: as ``Policy.causes``; nothing: they were next in native order.
        """
        if not blocks:
            return
        self.candidate_count -= len(blocks)
        causer = self._label(self._allocating_group())
        first = 0
        for cause, count in causes or ((ORDER, len(blocks)),):
            if not count:
                continue
            owners = map(self.owner.__getitem__, blocks[first : first + count])
            first += count
            for owner, lost in Counter(owners).items():
                owner = owner or self.default.group
                label = self._label(owner)
                self.counts["evicted", label, causer] += lost
                self.counts["lost", label, cause] += lost
                self.resident[owner] -= lost
        if self.shadow:
            self._guarded(self.policy.evicted, blocks)
            self._count_orphans()
        self.counts["fallbacks",] += self.failed

    def reset(self) -> None:
        """The prefix cache was emptied. A policy that has failed gets another chance."""
        self.owner = [None] * len(self.owner)
        self.resident.clear()
        self.candidate_count = 0
        self.failed = False
        self.told = not self.policy.native_order
        if self.shares is not None:
            self.shares.clear()
        self._guarded(self.policy.reset)

    def reconfigure(
        self, contracts: Mapping[str, Contract], groups: Sequence[str], default: Identity
    ) -> None:
        """The configuration has changed; a policy that has failed is told as well."""
        self.default = default
        told, self.told = self.told, True
        self._guarded(self.policy.reconfigure, contracts, groups, self.clock())
        self.told &= told

    def resident_blocks(self) -> Mapping[tuple[str, str], int]:
        """Cached blocks by (owner, class label), held ones included."""
        by_class = self._guarded(self.policy.resident_blocks)
        if by_class:
            return {(group, of.label): blocks for (group, of), blocks in by_class.items()}
        return {(group, NO_CLASS): blocks for group, blocks in self.resident.items()}

    def debts(self) -> Mapping[str, Debt]:
        """What every group owes now; empty when the policy has no debts or has failed."""
        return self._guarded(self.policy.debts, self.clock()) or {}

    def remembered(self) -> Mapping[str, int]:
        """How much the policy remembers, by group; empty when it does not or has failed."""
        return self._guarded(self.policy.remembered) or {}

    def _count_orphans(self) -> None:
        if orphans := self.policy.orphans_evicted - self._orphans_counted:
            self.counts["orphans",] += orphans
            self._orphans_counted += orphans

    def _allocating_group(self) -> str:
        current = self.current
        return current.group if current else self.default.group

    def _guarded(self, call: Callable[..., _T], *arguments: object) -> _T | None:
        """Call the policy; an exception ends in native order, never in the engine."""
        if not self.told:
            return None
        try:
            return call(*arguments)
        except Exception:
            self._fail(f"raised in {call.__name__}", with_traceback=True)
            return None

    def _fail(self, what: str, with_traceback: bool = False) -> None:
        self.failed, self.told = True, False
        self.counts["policy_failures",] += 1
        _log.error(
            "PrefixShield: policy %s %s; eviction is in native order until the prefix cache is "
            "reset. Serving goes on unprotected; please report this.",
            self.policy.name,
            what,
            exc_info=with_traceback,
        )

    def _victims(self, count: int, access: Access) -> Sequence[int]:
        victims = self.policy.evict(count, access)
        if len(victims) != count or not 0 <= min(victims) <= max(victims) < len(self.owner):
            self.disbelieve(victims, count)
            return ()
        self.causes = tuple(self.policy.causes) or ((ORDER, count),)
        if sum(of for _, of in self.causes) != count:
            self._fail(f"named {self.causes!r} as the causes of {count} victims")
            return ()
        return array("q", victims)  # numbers, or else a TypeError

    def _promotions(self, blocks: Sequence[int], access: Access) -> int:
        return len(self.policy.hit(blocks, access))
