"""Every metric that PrefixShield exports, and which groups get a label of their own.

The one declaration behind the exporter, `docs/metrics.md`, `prefixshield top`, the live page, the
dashboard and the alerts. All but one carry the labels ``model_name`` and ``engine`` besides
their own. Loads nothing but the standard library.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

#: The most groups that get a label of their own: pairs of them are labels too.
MAX_GROUP_LABELS = 32

#: The label of all other groups together.
OTHER = "other"

#: Labels of every metric, in front of its own.
COMMON_LABELS = ("model_name", "engine")

#: The class of a resident block under a policy that has no classes.
NO_CLASS = "none"


class Metric(NamedTuple):
    """A metric as it stands on ``/metrics``."""

    name: str
    labels: tuple[str, ...]
    unit: str
    definition: str


#: By the name of the driver's count. All count since the server started.
COUNTERS: Mapping[str, Metric] = {
    "materialised": Metric(
        "prefixshield_materialised_blocks_total",
        ("group",),
        "blocks",
        "Blocks that became cached and were charged to the group.",
    ),
    "refunded": Metric(
        "prefixshield_refunded_blocks_total",
        ("group",),
        "blocks",
        "Charges taken back: blocks that a KV connector failed to fill, lost while they were held.",
    ),
    "evicted": Metric(
        "prefixshield_evicted_blocks_total",
        ("owner", "causer"),
        "blocks",
        "Cached blocks evicted, by the group that owned them and the group that needed space.",
    ),
    "lost": Metric(
        "prefixshield_lost_blocks_total",
        ("group", "cause"),
        "blocks",
        "Cached blocks that the group lost to eviction, by why they were taken: "
        "its debt was called in (debt), no lookup could reach them (orphan), or they were next in "
        "order (order).",
    ),
    "orphans": Metric(
        "prefixshield_evicted_orphans_total",
        (),
        "blocks",
        "Evicted blocks that no lookup could reach, because a block before them was gone; "
        "always 0 under a policy that does not look for them.",
    ),
    "promoted": Metric(
        "prefixshield_promoted_blocks_total",
        ("group",),
        "blocks",
        "Blocks promoted to the reuse class by a hit of another request of the group.",
    ),
    "denied": Metric(
        "prefixshield_denied_promotions_total",
        ("group",),
        "blocks",
        "Hits that would have promoted a block, had the group not been in debt.",
    ),
    "query_tokens": Metric(
        "prefixshield_query_tokens_total",
        ("group",),
        "tokens",
        "Tokens looked up in the prefix cache, as vLLM counts queries: "
        "once a request, not again after a preemption.",
    ),
    "hit_tokens": Metric(
        "prefixshield_hit_tokens_total",
        ("group",),
        "tokens",
        "Of them, tokens found in the prefix cache, as vLLM counts hits.",
    ),
    "refused": Metric(
        "prefixshield_refused_requests_total",
        ("group",),
        "requests",
        "Requests failed at once because they can never fit their group's share; "
        "always 0 under a policy without shares.",
    ),
    "reloads": Metric(
        "prefixshield_reloads_total",
        ("outcome",),
        "versions",
        "Versions of the configuration file read while running: accepted or refused.",
    ),
    "recorded": Metric(
        "prefixshield_recorded_requests_total",
        ("outcome",),
        "requests",
        "Requests of the recording: written, or lost because writing failed.",
    ),
    "fallbacks": Metric(
        "prefixshield_fallbacks_total",
        (),
        "allocations",
        "Allocations served in native order because the policy had failed.",
    ),
    "policy_failures": Metric(
        "prefixshield_policy_failures_total",
        (),
        "failures",
        "Failures of the policy: an exception, or an answer that does not fit.",
    ),
}

#: The values of the label ``outcome``, by the name of the driver's count.
OUTCOMES: Mapping[str, tuple[str, ...]] = {
    "reloads": ("accepted", "refused"),
    "recorded": ("written", "lost"),
}

#: By the name under which they are reported.
GAUGES: Mapping[str, Metric] = {
    "resident": Metric(
        "prefixshield_resident_blocks",
        ("group", "class"),
        "blocks",
        "Cached blocks that the group owns, held ones included, by retention class: "
        f"probationary, normal or reuse; {NO_CLASS} under a policy without classes.",
    ),
    "debt": Metric(
        "prefixshield_debt_blocks",
        ("group",),
        "blocks",
        "The group's raw debt: what its contracts' buckets are short of, summed; "
        "none under a policy without debts.",
    ),
    "normalised_debt": Metric(
        "prefixshield_normalised_debt_blocks",
        ("group",),
        "blocks",
        "The group's debt with each contract's part divided by the contract's weight, "
        "which is its refill rate over the smallest one.",
    ),
    "history": Metric(
        "prefixshield_history_entries",
        ("group",),
        "entries",
        "Prefixes or blocks that the policy remembers for the group though they may be cached "
        "no more; none under a policy without a memory.",
    ),
    "capacity": Metric(
        "prefixshield_capacity_blocks",
        (),
        "blocks",
        "Blocks of the pool that can hold content.",
    ),
    "native_order": Metric(
        "prefixshield_native_order",
        (),
        "0 or 1",
        "1 while the policy has failed and eviction is in native order, else 0.",
    ),
    "shadow": Metric(
        "prefixshield_shadow",
        (),
        "0 or 1",
        "1 in shadow mode: the policy accounts, and eviction is in native order; else 0.",
    ),
    "info": Metric(
        "prefixshield_info",
        ("version", "policy", "preset", "vllm_version"),
        "1",
        "Always 1: what runs.",
    ),
}

#: Counted by the API server's middleware, so without the common labels.
UNKNOWN_GROUPS = Metric(
    "prefixshield_unknown_groups_total",
    ("outcome",),
    "requests",
    "Requests of the gateway that named no known group: refused, or taken as the default. "
    "Of the API server, so without `model_name` and `engine`.",
)

#: The labels that hold a group's name.
GROUP_LABELS = frozenset({"group", "owner", "causer"})


class GroupLabels:
    """The label of each group: its name for the first ones configured, `OTHER` for all others.

    Bounded for ever, so names that a client makes up or that a configuration once had cannot
    grow the number of series.
    """

    def __init__(self, groups: Iterable[str]) -> None:
        self._own: dict[str, str] = {}
        self.admit(groups)

    def admit(self, groups: Iterable[str]) -> None:
        """Give groups a label of their own, in this order, while there is room."""
        for group in groups:
            if len(self._own) < MAX_GROUP_LABELS:
                self._own.setdefault(group, group)

    def __call__(self, group: str) -> str:
        """A group's label."""
        return self._own.get(group, OTHER)

    @property
    def own(self) -> tuple[str, ...]:
        """The groups that have a label of their own."""
        return tuple(self._own)
