"""Admission history: which prefixes a group has had admitted before (policy.md section 4)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable


class AdmissionHistory:
    """The most recently admitted prefix identifiers of each group, bounded per group.

    A group has a share of its own, so one that floods its history forgets its own prefixes and
    never another group's. An identifier remembers the request that first had it admitted: what
    that request materialises later (the next chunk, a recompute) is still its first admission.
    """

    def __init__(self, entries_per_group: int) -> None:
        self._limit = max(1, entries_per_group)
        self._groups: dict[str, OrderedDict[Hashable, Hashable]] = {}

    def admit(self, group: str, prefixes: Iterable[Hashable], request_id: Hashable) -> list[bool]:
        """Record admissions; returns which of them another request had had admitted before."""
        entries = self._groups.get(group)
        if entries is None:
            entries = self._groups[group] = OrderedDict()
        known = []
        for prefix in prefixes:
            first = entries.setdefault(prefix, request_id)
            entries.move_to_end(prefix)
            known.append(first != request_id)
            if len(entries) > self._limit:
                entries.popitem(last=False)
        return known

    def divide(self, groups: Iterable[str], entries_per_group: int) -> None:
        """Other groups and bounds: forgets what is over a bound, and groups that are gone."""
        self._limit = max(1, entries_per_group)
        self._groups = {name: self._groups[name] for name in groups if name in self._groups}
        for entries in self._groups.values():
            while len(entries) > self._limit:
                entries.popitem(last=False)

    def size(self, group: str) -> int:
        """Number of identifiers remembered for a group."""
        return len(self._groups.get(group, ()))

    def sizes(self) -> dict[str, int]:
        """Number of identifiers remembered, by group."""
        return {group: len(entries) for group, entries in self._groups.items()}
