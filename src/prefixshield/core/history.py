"""Admission history: which prefixes a group has had admitted before (policy.md section 4)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable


class AdmissionHistory:
    """The most recently admitted prefix identifiers of each group, bounded per group.

    A group has a share of its own, so one that floods its history forgets its own prefixes and
    never another group's. An identifier remembers the request that first had it admitted: what
    that request materialises later (the next chunk, a recompute) is still its first admission.
    """

    def __init__(self, entries_per_group: int) -> None:
        self._limit = max(1, entries_per_group)
        self._groups: dict[str, OrderedDict[Hashable, Hashable]] = {}

    def admit(self, group: str, prefix: Hashable, request_id: Hashable) -> bool:
        """Record an admission; returns whether another request had the prefix admitted before."""
        entries = self._groups.get(group)
        if entries is None:
            entries = self._groups[group] = OrderedDict()
        if prefix in entries:
            entries.move_to_end(prefix)
            return entries[prefix] != request_id
        entries[prefix] = request_id
        if len(entries) > self._limit:
            entries.popitem(last=False)
        return False

    def size(self, group: str) -> int:
        """Number of identifiers remembered for a group."""
        return len(self._groups.get(group, ()))
