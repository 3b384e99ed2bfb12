"""StaticQuota on the simulated pool and in serial replay: nobody ever has more than its share."""

import json

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from typer.testing import CliRunner

from prefixshield.cli import app
from prefixshield.config import Config, ContractSection, GroupSection, paper_config
from prefixshield.core.ledger import Contract
from prefixshield.policies import PolicySetup, build_policy
from prefixshield.policies.base import Access
from prefixshield.sim.pool import SimBlockPool
from prefixshield.sim.replay import Replay, replay_policy
from prefixshield.traces import TraceRequest

GROUPS = ("a", "b", "c")
CONTRACTS = {"std": Contract(1.0, 1.0)}


def build(capacity, groups=GROUPS, reserved=0):
    setup = PolicySetup(capacity, CONTRACTS, groups, reserved_blocks=reserved)
    return build_policy("static-quota", setup)


@pytest.mark.parametrize(
    ("capacity", "reserved", "groups", "share"),
    [(512, 1, "ab", 255), (513, 1, "ab", 256), (10, 0, "abc", 3), (2, 0, "abc", 0), (7, 0, "", 7)],
)
def test_a_share_is_an_equal_part_of_what_is_usable(capacity, reserved, groups, share):
    assert build(capacity, tuple(groups), reserved).share_blocks == share


class Traffic(RuleBasedStateMachine):
    """Requests with partly filled blocks overlap, grow, end and lose content; a model counts."""

    capacity = 11  # a share of 3, and 2 blocks that nobody may have

    def __init__(self):
        super().__init__()
        self.policy = build(self.capacity)
        self.pool = SimBlockPool(self.policy)
        self.share = self.capacity // len(GROUPS)
        self.running = []  # (access, blocks, hashes of those without content yet)
        self.names = 0
        self.group_of = {}  # block → group, of all that are held or cached

    @rule(prefix=st.integers(0, 3), length=st.integers(1, 4), group=st.sampled_from(GROUPS))
    def start(self, prefix, length, group):
        self.names += 1
        access = Access(group, "std", self.names, 0.0)
        hashes = [(prefix, i) for i in range(length)]
        hits = self.pool.lookup(group, hashes)
        assert all(self.group_of[block] == group for block in hits)
        self.pool.hold(hits)
        need = length - len(hits)
        held = {b for other, blocks, _ in self.running if other.group == group for b in blocks}
        fits = len(held | set(hits)) + need <= self.share
        assert fits == (need <= self.pool.available_blocks(group))
        if not fits:
            self.pool.release(hits[::-1])
            return
        blocks, evicted = self.pool.allocate(need, access)
        for block, content in evicted:
            assert content.owner == self.group_of[block] == group, "it took another group's block"
        self.group_of.update(dict.fromkeys(blocks, group))
        self.running.append((access, hits + blocks, hashes[len(hits) :]))

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 99), filled=st.integers(0, 4))
    def fill(self, which, filled):
        """Some of a request's blocks become full, in order."""
        access, blocks, left = self.running[which % len(self.running)]
        now = left[:filled]
        first = len(blocks) - len(left)
        self.pool.cache(blocks[first : first + len(now)], access.group, now, access)
        del left[: len(now)]

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 99))
    def finish(self, which):
        _, blocks, _ = self.running.pop(which % len(self.running))
        self.pool.release(blocks[::-1])
        self.drop_empty()

    @rule(block=st.integers(0, capacity - 1))
    def invalidate(self, block):
        if self.pool._content[block] is not None:
            self.pool.invalidate(block)
            for number, (access, blocks, _) in enumerate(self.running):
                if block in blocks:  # its further blocks stay without content
                    self.running[number] = (access, blocks, [])
            self.drop_empty()

    @precondition(lambda self: not self.running)
    @rule()
    def reset(self):
        self.pool.reset()
        self.group_of.clear()

    def drop_empty(self):
        """Forget the group of every block that is truly free."""
        held = {block for _, blocks, _ in self.running for block in blocks}
        for block in list(self.group_of):
            if block not in held and self.pool._content[block] is None:
                del self.group_of[block]

    @invariant()
    def within_shares(self):
        self.pool.check()
        resident = list(self.group_of.values())
        for group in GROUPS:
            held = {b for a, blocks, _ in self.running if a.group == group for b in blocks}
            assert self.pool.shares.resident[group] == resident.count(group) <= self.share
            assert self.pool.shares.held[group] == len(held)


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)


def test_it_gives_a_groups_own_blocks_and_refuses_more():
    policy = build(6)
    for group, blocks in (("a", [0, 1]), ("b", [2, 3])):
        access = Access(group, "std", group, 0.0)
        policy.materialise(blocks, blocks, access)
        policy.release(blocks[::-1])
    assert policy.candidate_count == 4
    with pytest.raises(ValueError, match="3 victims of 2 candidates of group 'a'"):
        policy.evict(3, Access("a", "std", 9, 0.0))
    policy.check()
    assert policy.evict(2, Access("a", "std", 9, 0.0)) == [1, 0]
    assert policy.evict(0, Access("c", "std", 9, 0.0)) == []
    with pytest.raises(ValueError, match="1 victims of 0 candidates of group 'c'"):
        policy.evict(1, Access("c", "std", 9, 0.0))
    assert policy.candidate_count == 2


def row(line, group, *ids):
    size = 4 * len(ids)
    return TraceRequest(line, line * 1000.0, size, 0, ids, group, None, None)


def replay(blocks, requests):
    config = Config(
        policy="static-quota",
        contracts={"std": ContractSection(refill_rate=1, burst=1)},
        groups={name: GroupSection(contract="std") for name in "ab"},
        default_group="a",
    )
    run = Replay(config, replay_policy(config, blocks, requests, 4), 4)
    events = []
    result = run.run(requests, lambda e: events.append((e["event"], e["group"], e["block"])))
    run.pool.check()
    return events, result


def test_a_borrower_is_capped_though_the_pool_is_empty():
    """Pool of 8, share of 4: worked out by hand."""
    events, result = replay(
        8,
        [
            row(1, "a", 1, 2, 3),
            row(2, "a", 4, 5),  # one below the share, so one of a's own: native order is 3, 2, 1
            row(3, "b", 11, 12, 13, 14),  # all of b's share is still free
            row(4, "a", 1, 2, 6),  # 1, 2 hit; a's own order is 5, 4
            row(5, "b", 11, 15, 16, 17),  # 11 hits, three of b's own go
        ],
    )
    assert [e for e in events if e[0] == "evict"] == [
        ("evict", "a", 3),
        ("evict", "a", 5),
        ("evict", "b", 14),
        ("evict", "b", 13),
        ("evict", "b", 12),
    ]
    assert result.total.blocks_hit == 3
    assert set(result.evictions) == {("a", "a"), ("b", "b")}


def test_a_request_larger_than_the_share_is_skipped_and_the_next_ones_are_served():
    _, result = replay(8, [row(1, "a", *range(4)), row(2, "a", *range(5)), row(3, "b", 1, 2)])
    assert result.rejected_lines == [2]
    assert (result.total.requests, result.total.blocks_queried) == (3, 6)


def test_groups_that_only_the_trace_names_divide_the_pool_too():
    _, result = replay(8, [row(1, "new", 1, 2), row(2, "new", 1, 2, 3), row(3, "b", 1, 2)])
    assert result.rejected_lines == [2]  # a, b and new: shares of 2


def test_without_declared_groups_those_of_the_trace_divide_the_pool():
    config = paper_config().model_copy(update={"policy": "static-quota"})
    named = [row(1, "x", 1), row(2, "y", 2)]
    assert replay_policy(config, 8, named, 4).share_blocks == 4
    assert replay_policy(config, 9, [*named, row(3, None, 3)], 4).share_blocks == 3


def test_the_command_names_the_share(tmp_path):
    trace = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": n, "input_length": 4 * n, "hash_ids": list(range(n)), "group": group}
        for n, group in ((1, "a"), (3, "b"))
    ]
    trace.write_text("\n".join(map(json.dumps, rows)))
    config = tmp_path / "tenants.yaml"
    config.write_text(
        "policy: static-quota\ncontracts: {std: {refill_rate: 1, burst: 2}}\n"
        "groups: {a: {contract: std}, b: {contract: std}}\ndefault_group: a\n"
    )
    arguments = ["replay", trace, "--blocks", 5, "--block-size", 4, "--config", config]
    done = CliRunner().invoke(app, list(map(str, arguments)))
    assert done.exit_code == 0
    assert "1 requests are larger than their group's share of 2 blocks and were" in done.output
