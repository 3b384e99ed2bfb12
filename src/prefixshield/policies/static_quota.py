"""StaticQuota: every group has an equal, fixed part of the pool (policy.md section 9), a baseline.

Source: hard cache partitioning, the usual answer to noisy neighbours. A group's share is
floor(usable blocks / groups), over held and cached blocks alike; nothing is borrowed. At its share
a group reclaims its own blocks, in native order. The pool counts the blocks; requests that must
wait or can never fit are the business of whoever admits them. It keeps its bounds only for the
groups it was set up with: with more of them the shares exceed the pool.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence

from prefixshield.policies.base import Access, Policy, PolicySetup


class StaticQuota(Policy):
    """One native order per group; a group's requests choose from its own."""

    name = "static-quota"

    def __init__(self, setup: PolicySetup) -> None:
        super().__init__(setup)
        self.share_blocks = setup.usable_blocks // max(1, len(setup.groups))
        self._owner: list[str | None] = [None] * setup.capacity_blocks
        self._orders: dict[str, OrderedDict[int, None]] = {}
        self._candidates = 0

    def materialise(
        self,
        blocks: Sequence[int],
        hashes: Sequence[Hashable],
        access: Access,
        parents: Sequence[Hashable | None] | None = None,
    ) -> None:
        for block in blocks:
            self._owner[block] = access.group

    def hold(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            del self._order_of(block)[block]
        self._candidates -= len(blocks)

    def release(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._order_of(block)[block] = None
        self._candidates += len(blocks)

    def evict(self, count: int, access: Access) -> list[int]:
        """The group's own candidates, in native order."""
        own = self._order(access.group)
        if not 0 <= count <= len(own):
            raise ValueError(
                f"asked for {count} victims of {len(own)} candidates of group {access.group!r}"
            )
        self._candidates -= count
        return [own.popitem(last=False)[0] for _ in range(count)]

    def forget(self, block: int) -> None:
        self.hold([block])

    def reset(self) -> None:
        self._orders.clear()
        self._candidates = 0

    @property
    def candidate_count(self) -> int:
        return self._candidates

    def check(self) -> None:
        assert sum(map(len, self._orders.values())) == self._candidates
        for group, order in self._orders.items():
            assert all(self._owner[block] == group for block in order), "in another group's order"

    def _order(self, group: str) -> OrderedDict[int, None]:
        return self._orders.setdefault(group, OrderedDict())

    def _order_of(self, block: int) -> OrderedDict[int, None]:
        owner = self._owner[block]
        assert owner is not None, f"block {block} was never materialised"
        return self._order(owner)
