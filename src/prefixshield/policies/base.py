"""The policy interface: who owns what, and the calls a pool makes.

The pool (simulated or vLLM's) owns blocks, reference counts, content hashes and all counting. The
policy owns the order of candidates and the choice of victims. Blocks are the pool's indices,
0 .. capacity_blocks - 1. A policy is single-threaded and holds no clock, randomness, log or I/O.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from prefixshield.core.ledger import Account, Contract, Debt
from prefixshield.core.retention import RetentionClass


class Access(NamedTuple):
    """Who asks, and when."""

    group: str
    contract: str
    request_id: Hashable
    time: float
    """Seconds of the accounting clock."""
    prefix_id: str | None = None
    """The logical prefix that the request names; None: each block's own hash identifies it."""


class Origin(NamedTuple):
    """Who materialised a block; shared by all blocks of one batch."""

    account: Account
    """The owner."""
    request_id: Hashable
    prefix_id: str | None


@dataclass(frozen=True, slots=True)
class PolicySetup:
    """What a policy is built from."""

    capacity_blocks: int
    contracts: Mapping[str, Contract]
    groups: Sequence[str] = field(default=())
    """The groups expected, which share bounded state; others are accepted by a policy that does
    not divide the pool."""
    preset: str = "default"
    reserved_blocks: int = 0
    """Blocks of the capacity that never hold content: vLLM's null block."""

    @property
    def usable_blocks(self) -> int:
        """Blocks that can hold content."""
        return self.capacity_blocks - self.reserved_blocks


#: Why a block is evicted: no lookup reached it, its owner's debt was called in, or it was next in
#: the policy's order.
ORPHAN, DEBT, ORDER = CAUSES = ("orphan", "debt", "order")


class Policy(ABC):
    """An eviction policy over one pool.

    Life of a block: ``materialise`` (held) → ``release`` (candidate) ⇄ ``hold`` → ``evict`` or
    ``forget``. Sequences are in prefix order unless said otherwise.
    """

    name: ClassVar[str]

    #: Whether its order is the native one, so that vLLM's own pool need not ask it.
    native_order: ClassVar[bool] = False

    #: How many blocks a group may have, held or cached; None: as many as the pool has. With a
    #: share the pool counts, takes truly free blocks only while the group is below it, and asks
    #: ``evict`` for the rest.
    share_blocks: int | None = None

    def __init__(self, setup: PolicySetup) -> None:
        self.capacity_blocks = setup.capacity_blocks
        self.orphans_evicted = 0
        """Victims that no lookup could reach, whoever chose them, since start; 0: the policy does
        not look for them."""
        self.causes: Sequence[tuple[str, int]] = ()
        """Why the latest victims were taken: (cause, how many), in their order; see ``CAUSES``.
        Empty: all by the policy's order."""
        self.promotions_denied = 0
        """Hits that would have promoted a block, had the group not been in debt; since start."""

    def materialise(  # noqa: B027 - a policy may not care
        self,
        blocks: Sequence[int],
        hashes: Sequence[Hashable],
        access: Access,
        parents: Sequence[Hashable | None] | None = None,
    ) -> None:
        """Held blocks became cached under ``hashes``, caused by ``access``; charges them.

        ``parents``: the hash that precedes each in its prefix, without which it cannot be hit;
        None: there is none.
        """

    def hit(self, blocks: Sequence[int], access: Access) -> Sequence[int]:
        """A request reuses held, cached blocks; returns those that were promoted by it."""
        return ()

    @abstractmethod
    def hold(self, blocks: Sequence[int]) -> None:
        """Candidates stop being candidates: a request holds them."""

    @abstractmethod
    def release(self, blocks: Sequence[int]) -> None:
        """Cached blocks become candidates, in the order in which native vLLM would evict them."""

    @abstractmethod
    def evict(self, count: int, access: Access) -> list[int]:
        """Choose ``count`` distinct candidates, in victim order; they cease to be candidates.

        Asked for more than it may give for this access, it raises ValueError and changes nothing.
        It may give all candidates; a policy with a share, all of the group's own.
        """

    @abstractmethod
    def forget(self, block: int) -> None:
        """A candidate lost its content without being chosen; it ceases to be a candidate."""

    def refund(self, blocks: Sequence[int]) -> None:  # noqa: B027 - a policy may charge nothing
        """Held cached blocks lost their content: what was to fill them failed. Undoes charges."""

    @abstractmethod
    def reset(self) -> None:
        """The cache was emptied: no block is cached. Debts stay."""

    def evicted(self, blocks: Sequence[int]) -> None:
        """Candidates were evicted by somebody else's choice, the first one first."""
        for block in blocks:
            self.forget(block)

    def reconfigure(  # noqa: B027 - a policy may not care
        self, contracts: Mapping[str, Contract], groups: Sequence[str], time: float
    ) -> None:
        """Contracts and groups are others from ``time`` on. Balances, blocks and classes stay.

        Requests of a group or under a contract that is gone may still come, and are served as
        before. The groups of a policy that divides the pool never change.
        """

    @property
    @abstractmethod
    def candidate_count(self) -> int:
        """How many candidates there are, in blocks, of all groups."""

    def retention_class(self, block: int) -> RetentionClass | None:
        """The class of a cached block, or of one just evicted; None: the policy has no classes."""
        return None

    def resident_blocks(self) -> Mapping[tuple[str, RetentionClass], int]:
        """Cached blocks by (owner, class), held ones included; empty: the policy has no classes."""
        return {}

    def debts(self, time: float) -> Mapping[str, Debt]:
        """What every group owes that has ever been charged, at a time of the accounting clock."""
        return {}

    def remembered(self) -> Mapping[str, int]:
        """Blocks or prefixes that are no longer cached but remembered, by group."""
        return {}

    def check(self) -> None:  # noqa: B027 - a policy may have nothing to check
        """Assert that the policy's own state is consistent. For tests: may scan everything."""

    def _require(self, count: int) -> None:
        if not 0 <= count <= self.candidate_count:
            raise ValueError(f"asked for {count} victims of {self.candidate_count} candidates")
