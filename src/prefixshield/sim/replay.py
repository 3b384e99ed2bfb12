"""Serial replay: a trace through one pool, each request handled whole before the next.

The interface that makes policies comparable (policy.md section 10): lookup in the request's own
namespace, hits, allocation with eviction, charge and classification, release in reverse order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from prefixshield.config import Config, paper_config
from prefixshield.errors import PrefixShieldError, TraceError
from prefixshield.policies import PolicySetup, build_policy
from prefixshield.policies.base import Access, Policy
from prefixshield.policies.static_quota import StaticQuota
from prefixshield.sim.clairvoyant import Clairvoyant, Future, Use
from prefixshield.sim.pool import SimBlockPool
from prefixshield.traces import TraceRequest

#: One line of an event log; see ``Replay.run``.
Event = dict[str, Any]


@dataclass(slots=True)
class Tally:
    """Counts over a set of requests."""

    requests: int = 0
    """All requests, those rejected included."""
    rejected: int = 0
    """Requests larger than the pool or than a group's share of it, which are skipped."""
    blocks_queried: int = 0
    """Blocks of the prompts of requests that were not rejected."""
    blocks_hit: int = 0
    """Blocks of them that were served from the cache."""

    @property
    def hit_ratio(self) -> float:
        """Blocks hit over blocks queried, 0-1; 0 when nothing was queried."""
        return self.blocks_hit / self.blocks_queried if self.blocks_queried else 0.0

    def as_dict(self) -> dict[str, int | float]:
        return {
            "requests": self.requests,
            "rejected": self.rejected,
            "blocks_queried": self.blocks_queried,
            "blocks_hit": self.blocks_hit,
            "hit_ratio": self.hit_ratio,
        }


@dataclass(slots=True)
class ReplayResult:
    """What a replay counted."""

    total: Tally = field(default_factory=Tally)
    groups: dict[str, Tally] = field(default_factory=dict)
    """By group, in order of first appearance."""
    evictions: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Evicted blocks by (owner, causer)."""
    orphans_evicted: int = 0
    """Evicted blocks that no lookup could reach, of the policies that look for them."""
    rejected_lines: list[int] = field(default_factory=list)
    """Trace lines of the requests that were rejected."""

    def as_dict(self) -> dict[str, Any]:
        evictions = [
            {"owner": owner, "causer": causer, "blocks": blocks}
            for (owner, causer), blocks in sorted(self.evictions.items())
        ]
        groups = {name: tally.as_dict() for name, tally in self.groups.items()}
        orphans = {"orphans_evicted": self.orphans_evicted}
        return {**self.total.as_dict(), **orphans, "groups": groups, "evictions": evictions}


class Replay:
    """One policy over one simulated pool, fed with requests."""

    def __init__(self, config: Config, policy: Policy, block_size: int) -> None:
        self._config = config
        self._block_size = block_size
        self.policy = policy
        self.pool = SimBlockPool(policy)
        self.result = ReplayResult()

    def run(
        self, requests: Iterable[TraceRequest], log: Callable[[Event], None] | None = None
    ) -> ReplayResult:
        """Replay requests in the order given; ``log`` receives every event in order.

        Events of one request: promotions in prefix order, evictions in victim order, admissions
        in prefix order.
        """
        for request in requests:
            self._serve(request, log)
        self.result.orphans_evicted = self.policy.orphans_evicted
        return self.result

    def _serve(self, request: TraceRequest, log: Callable[[Event], None] | None) -> None:
        access = self._access(request)
        tallies = (self.result.total, self.result.groups.setdefault(access.group, Tally()))
        for tally in tallies:
            tally.requests += 1
        hashes = request.hash_ids
        if len(hashes) > self.pool.largest_request:
            self.result.rejected_lines.append(request.line)
            for tally in tallies:
                tally.rejected += 1
            return

        hits = self.pool.lookup(access.group, _reusable(request, self._block_size))
        self.pool.hold(hits)
        promoted = self.policy.hit(hits, access)
        new_hashes = hashes[len(hits) :]
        blocks, evicted = self.pool.allocate(len(new_hashes), access)
        for _, content in evicted:
            self.result.evictions[content.owner, access.group] += 1
        if log is not None:
            evicted_events = [
                (content.owner, content.block_hash, self._label(block))
                for block, content in evicted
            ]
        if blocks:
            after = hashes[len(hits) - 1] if hits else None
            self.pool.cache(blocks, access.group, new_hashes, access, after)
        self.pool.release([*hits, *blocks][::-1])
        for tally in tallies:
            tally.blocks_queried += len(hashes)
            tally.blocks_hit += len(hits)

        if log is not None:

            def emit(event: str, owner: str, block_hash: Any, label: str | None) -> None:
                log(
                    {
                        "t": access.time,
                        "event": event,
                        "group": owner,
                        "block": block_hash,
                        "class": label,
                        "by": access.group,
                    }
                )

            hash_of = dict(zip(hits, hashes, strict=False))
            for block in promoted:
                emit("promote", access.group, hash_of[block], self._label(block))
            for owner, block_hash, label in evicted_events:
                emit("evict", owner, block_hash, label)
            for block, block_hash in zip(blocks, new_hashes, strict=True):
                emit("admit", access.group, block_hash, self._label(block))

    def _access(self, request: TraceRequest) -> Access:
        group = _group(self._config, request)
        contract = request.contract or self._config.default_contract(group)
        if contract not in self._config.contracts:
            raise TraceError(
                f"line {request.line}: contract: found {contract!r}, "
                f"expected one of: {', '.join(self._config.contracts)}"
            )
        return Access(group, contract, request.line, request.timestamp_ms / 1000, request.prefix_id)

    def _label(self, block: int) -> str | None:
        retention = self.policy.retention_class(block)
        return None if retention is None else retention.label


def replay_policy(
    config: Config,
    capacity_blocks: int,
    requests: Sequence[TraceRequest],
    block_size: int,
    for_group: str | None = None,
) -> Policy:
    """The configured policy over a pool, for these requests in this order.

    Bounded state, or the pool itself, is shared by the configured groups and those that only the
    requests name.
    ``for_group``: the clairvoyant works for this group alone, all other uses count as never.
    """
    present = dict.fromkeys(_group(config, request) for request in requests)
    groups = dict.fromkeys([*config.groups, *present])
    if config.policy == StaticQuota.name and config.groups == paper_config().groups:
        groups = present  # nobody declared a group: an empty placeholder has no share
    setup = PolicySetup(capacity_blocks, config.contract_table(), list(groups), config.preset)
    if config.policy != Clairvoyant.name:
        if for_group is not None:
            raise PrefixShieldError(
                f"--for-group: found the policy {config.policy!r}, expected {Clairvoyant.name!r}, "
                "the only one that can work for one group"
            )
        return build_policy(config.policy, setup)
    if for_group is not None and for_group not in present:
        raise PrefixShieldError(
            f"--for-group: found {for_group!r}, expected a group of the trace: {', '.join(present)}"
        )

    def uses(request: TraceRequest) -> list[Use]:
        group = _group(config, request)
        if for_group not in (None, group):
            return []
        return [(group, key) for key in _reusable(request, block_size)]

    future = Future(
        (request.line, uses(request))
        for request in requests
        if len(request.hash_ids) <= capacity_blocks
    )
    return Clairvoyant(setup, future)


def _group(config: Config, request: TraceRequest) -> str:
    return request.group or config.default_group


def _reusable(request: TraceRequest, block_size: int) -> tuple[int, ...]:
    """The blocks that can be hit: the last token is always computed, so its block never is."""
    return request.hash_ids[: (request.input_length - 1) // block_size]
