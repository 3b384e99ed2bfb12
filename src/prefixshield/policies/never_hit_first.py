"""Never-hit-first: blocks that were never hit go first, then native order (policy.md section 9).

Source: what users of vLLM propose in public against scans (vllm issues 40268 and 23641). No
deviation: any request's hit counts, for as long as the block is cached.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence

from prefixshield.policies.base import Access, Policy, PolicySetup


class NeverHitFirst(Policy):
    """Two native orders: candidates never hit, and candidates hit at least once."""

    name = "never-hit-first"

    def __init__(self, setup: PolicySetup) -> None:
        super().__init__(setup)
        self._was_hit = bytearray(setup.capacity_blocks)
        self._orders: tuple[OrderedDict[int, None], ...] = (OrderedDict(), OrderedDict())

    def materialise(
        self,
        blocks: Sequence[int],
        hashes: Sequence[Hashable],
        access: Access,
        parents: Sequence[Hashable | None] | None = None,
    ) -> None:
        for block in blocks:
            self._was_hit[block] = 0

    def hit(self, blocks: Sequence[int], access: Access) -> Sequence[int]:
        for block in blocks:
            self._was_hit[block] = 1
        return ()

    def hold(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            del self._orders[self._was_hit[block]][block]

    def release(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._orders[self._was_hit[block]][block] = None

    def evict(self, count: int, access: Access) -> list[int]:
        self._require(count)
        never, once = self._orders
        return [(never or once).popitem(last=False)[0] for _ in range(count)]

    def forget(self, block: int) -> None:
        self.hold([block])

    def reset(self) -> None:
        for order in self._orders:
            order.clear()

    @property
    def candidate_count(self) -> int:
        return sum(map(len, self._orders))
