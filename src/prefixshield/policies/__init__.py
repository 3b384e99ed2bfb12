"""Eviction policies, chosen by name, behind one interface (``policies.base``)."""

from __future__ import annotations

from collections.abc import Mapping

from prefixshield.policies.adaptive import AdaptiveShield
from prefixshield.policies.base import Access, Policy, PolicySetup
from prefixshield.policies.lru import Lru
from prefixshield.policies.never_hit_first import NeverHitFirst
from prefixshield.policies.s3fifo import S3Fifo
from prefixshield.policies.shield import NoDebtGate, NoSegmentation, Shield
from prefixshield.policies.static_quota import StaticQuota

__all__ = ["POLICIES", "PRESETS", "Access", "Policy", "PolicySetup", "build_policy"]

#: Every policy by its name.
POLICIES: Mapping[str, type[Policy]] = {
    policy.name: policy
    for policy in (Lru, S3Fifo, NeverHitFirst, StaticQuota, Shield, NoSegmentation, NoDebtGate)
}

#: What a preset is for. Policies other than ``shield`` have no presets and ignore it.
PRESETS: Mapping[str, str] = {
    "default": "for serving",
    "paper": "the paper's policy, for reproduction",
}


def build_policy(name: str, setup: PolicySetup) -> Policy:
    """The policy of that name over a pool. Raises KeyError for an unknown name."""
    if name == Shield.name and setup.preset == "default":
        return AdaptiveShield(setup)
    return POLICIES[name](setup)
