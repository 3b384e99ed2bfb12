"""The rules of reclamation by brute force, for properties over any pool (policy.md sections 6, 8)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from prefixshield.core.ledger import EPSILON
from prefixshield.policies.adaptive import AdaptiveShield
from prefixshield.policies.shield import Shield


def expected_victims(
    policy: Shield,
    candidates: Sequence[int],
    owner: Callable[[int], str],
    count: int,
    t: float,
) -> list[int]:
    """Section 6 by scanning: ``candidates`` in native order.

    It trusts the ledger and the classes, which have references of their own.
    """
    rest = list(candidates)
    p = {group: policy.ledger.normalised_debt(group, t) for group in {owner(b) for b in rest}}
    step = {group: 1 / policy.ledger.heaviest_debt_weight(group, t) for group in p}
    chosen = []
    for _ in range(count):
        owing = [b for b in rest if p[owner(b)] > EPSILON]
        most = max((p[owner(b)] for b in owing), default=0)
        pool = [b for b in owing if p[owner(b)] > most - EPSILON] or rest
        victim = min(pool, key=lambda b: (policy.retention_class(b), rest.index(b)))
        chosen.append(victim)
        if owing:
            p[owner(victim)] -= step[owner(victim)]
        rest.remove(victim)
    return chosen


def assert_bounded(policy: Shield, groups: Sequence[str], contracts: Sequence[str]) -> None:
    """I6: no state grows beyond what the configuration bounds."""
    limit = 4 * policy.capacity_blocks // len(groups)
    assert all(policy.history.size(group) <= limit for group in groups)
    assert len(policy.ledger._accounts) <= len(groups) * len(contracts)
    assert len(policy._debtors._heap) <= 2 * len(groups) + 17
    assert sum(map(len, policy._queues._heads)) <= 3 * len(groups)


def assert_default_bounded(
    policy: AdaptiveShield, groups: Sequence[str], contracts: Sequence[str]
) -> None:
    """I6 for the default preset: blocks, ghosts, accounts and heaps, of the pool and the trial."""
    accounts = len(groups) * len(contracts)
    assert len(policy.ledger._accounts) <= accounts
    assert len(policy.ledger._owing) <= accounts
    blocks = policy.capacity_blocks
    assert len(policy._origin) == len(policy._sampled) == blocks
    assert len(policy._taken) <= blocks
    assert len(policy._chains._key) <= 2 * blocks
    assert len(policy._chains._groups) <= len(groups)
    assert sum(map(len, policy._chains._groups.values())) <= 2 * blocks
    miniatures = policy.trial._miniatures
    for ghosts in (policy.ghosts, *(one.ghosts for one in miniatures)):
        assert len(ghosts) <= max(1, blocks)
        assert len(ghosts._groups) <= len(groups)
        assert len(ghosts._heap) <= 2 * len(groups) + 17
    for order in (policy.order, *(one.order for one in miniatures)):
        assert len(order._queue) <= blocks
        assert len(order._debtors._heap) <= 2 * len(groups) + 17
        assert sum(map(len, order._queues._heads)) <= 3 * len(groups)
