"""LRU: vLLM's own order (policy.md section 9), the baseline.

Source: vLLM's free-block queue; blocks released earlier go first, inside a request the tail
first. No deviation: on vLLM's pool it evicts what the unmodified engine evicts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from prefixshield.policies.base import Access, Policy, PolicySetup


class Lru(Policy):
    """Candidates in native order, groups ignored."""

    name = "lru"
    native_order = True

    def __init__(self, setup: PolicySetup) -> None:
        super().__init__(setup)
        self._order: OrderedDict[int, None] = OrderedDict()

    def hold(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            del self._order[block]

    def release(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._order[block] = None

    def evict(self, count: int, access: Access) -> list[int]:
        self._require(count)
        return [self._order.popitem(last=False)[0] for _ in range(count)]

    def forget(self, block: int) -> None:
        del self._order[block]

    def reset(self) -> None:
        self._order.clear()

    @property
    def candidate_count(self) -> int:
        return len(self._order)
