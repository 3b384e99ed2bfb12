"""One contract for all policies, on the simulated pool: stateful, check() after every step."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from invariants import assert_bounded, expected_victims
from naive import NaiveS3Fifo

from prefixshield.core.ledger import EPSILON, Contract
from prefixshield.core.retention import RetentionClass
from prefixshield.policies import POLICIES, PolicySetup, build_policy
from prefixshield.policies.base import Access
from prefixshield.policies.shield import Shield
from prefixshield.sim.pool import SimBlockPool

GROUPS = ("a", "b", "c")
CONTRACTS = {"gold": Contract(8.0, 6.0), "base": Contract(1.0, 2.0), "poor": Contract(0.3, 0.0)}


def build(name, capacity):
    return build_policy(name, PolicySetup(capacity, CONTRACTS, GROUPS, "paper"))


class Life(RuleBasedStateMachine):
    """Requests overlap, hold shared blocks, and go in any order."""

    policy_name = "shield"
    capacity = 8

    def __init__(self):
        super().__init__()
        self.policy = build(self.policy_name, self.capacity)
        self.pool = SimBlockPool(self.policy)
        self.now = 0.0
        self.running = []
        self.names = 0
        self.native_order = []  # candidates, the one released first in front
        self.was_hit = set()
        self.s3fifo = NaiveS3Fifo(self.capacity)

    @rule(
        prefix=st.integers(0, 3),
        length=st.integers(1, 9),
        group=st.sampled_from(GROUPS),
        contract=st.sampled_from(sorted(CONTRACTS)),
    )
    def start(self, prefix, length, group, contract):
        self.names += 1
        access = Access(group, contract, self.names, self.now)
        hashes = [(prefix, i) for i in range(length)]
        hits = self.pool.lookup(group, hashes)
        self.pool.hold(hits)
        self.native_order = [b for b in self.native_order if b not in hits]
        before = {b: self.policy.retention_class(b) for b in hits}
        promoted = self.policy.hit(hits, access)
        self.promotions_are_earned(access, before, promoted)
        self.was_hit.update(hits)
        self.s3fifo.hit(hits)

        need = length - len(hits)
        if need > self.pool.available_blocks(group):
            self.give_back(hits)
            return
        victims = self.victims_of(need, access)
        blocks, evicted = self.pool.allocate(need, access)
        assert [b for b, _ in evicted] == victims
        assert len(set(blocks + hits)) == length, "a held block was handed out"
        self.native_order = [b for b in self.native_order if b not in victims]
        self.pool.cache(blocks, group, hashes[len(hits) :], access)
        self.was_hit.difference_update(blocks)
        self.s3fifo.materialise(blocks, [(group, block_hash) for block_hash in hashes[len(hits) :]])
        self.running.append(hits + blocks)

    def victims_of(self, need, access):
        """What the policy must choose, by its rule; truly free blocks come first (I4)."""
        candidates = self.native_order
        truly_free = len(self.pool._free)
        if self.policy_name == "static-quota":
            mine = [b for b in candidates if self.pool._content[b].owner == access.group]
            room = self.capacity // len(GROUPS) - self.resident(access.group)
            return mine[: max(0, need - min(truly_free, room))]
        count = max(0, need - truly_free)
        if self.policy_name == "lru":
            return candidates[:count]
        if self.policy_name == "never-hit-first":
            return sorted(candidates, key=self.was_hit.__contains__)[:count]
        if self.policy_name == "s3fifo":
            return self.s3fifo.evict(count, candidates)
        if isinstance(self.policy, Shield):
            t = self.policy.ledger.now(self.now)
            owner = {b: self.pool._content[b].owner for b in candidates}
            return expected_victims(self.policy, candidates, owner.__getitem__, count, t)
        raise AssertionError(f"no reference for {self.policy_name}: write one")

    def resident(self, group):
        return sum(c is not None and c.owner == group for c in self.pool._content)

    def promotions_are_earned(self, access, before, promoted):
        if not isinstance(self.policy, Shield) or self.policy_name == "no-segmentation":
            assert not promoted
            return
        t = self.policy.ledger.now(self.now)
        owes = self.policy.ledger.raw_debt(access.group, t) > EPSILON
        assert not (owes and promoted) or self.policy_name == "no-debt-gate"  # I2
        for block, earlier in before.items():
            now = self.policy.retention_class(block)
            assert (now is not earlier) == (block in promoted)
            assert block not in promoted or now is RetentionClass.REUSE

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 99))
    def finish(self, which):
        self.give_back(self.running.pop(which % len(self.running)))

    def give_back(self, blocks):
        tail_first = blocks[::-1]
        self.pool.release(tail_first)
        self.native_order += [b for b in tail_first if not self.pool._references[b]]

    @precondition(lambda self: self.native_order)
    @rule(which=st.integers(0, 99))
    def invalidate(self, which):
        block = self.native_order.pop(which % len(self.native_order))
        self.pool.invalidate(block)
        self.s3fifo.forget(block)

    @rule(seconds=st.sampled_from([0.1, 2.0, 30.0, -1.0]))
    def wait(self, seconds):
        self.now += seconds

    @rule(
        contract=st.sampled_from(sorted(CONTRACTS)),
        terms=st.builds(Contract, st.sampled_from([0.2, 1.0, 8.0]), st.sampled_from([0.0, 4.0])),
    )
    def reconfigure(self, contract, terms):
        self.policy.reconfigure({**CONTRACTS, contract: terms}, GROUPS, self.now)

    @precondition(lambda self: not self.running)
    @rule()
    def reset(self):
        self.pool.reset()
        self.native_order = []
        self.s3fifo = NaiveS3Fifo(self.capacity)

    @invariant()
    def sound(self):
        self.pool.check()
        assert self.policy.candidate_count == len(self.native_order)
        if isinstance(self.policy, Shield):
            assert_bounded(self.policy, GROUPS, list(CONTRACTS))
        if self.policy_name == "static-quota":
            share = self.capacity // len(GROUPS)
            assert all(self.resident(group) <= share for group in GROUPS)


@pytest.mark.parametrize("capacity", [1, 2, 3, 8, 12])
@pytest.mark.parametrize("name", sorted(POLICIES))
def test_contract(name, capacity):
    machine = type("Machine", (Life,), {"policy_name": name, "capacity": capacity})
    case = machine.TestCase
    case.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
    case().runTest()


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_asking_for_too_much_changes_nothing(name):
    policy = build(name, 4)
    access = Access("a", "base", 1, 0.0)
    policy.materialise([0, 1], ["x", "y"], access)
    policy.release([1, 0])
    for count in (3, -1):
        with pytest.raises(ValueError, match="candidates"):
            policy.evict(count, access)
    policy.check()
    assert sorted(policy.evict(2, access)) == [0, 1]


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_same_calls_same_victims(name):
    def run():
        pool = SimBlockPool(build(name, 18))  # the longest request is a third: it fits a share
        chosen = []
        for number in range(60):
            group = GROUPS[number % 3]
            access = Access(group, "base", number, number / 10)
            hashes = [(number * 7 % 5, i) for i in range(number % 6 + 1)]
            hits = pool.lookup(group, hashes)
            pool.hold(hits)
            pool.policy.hit(hits, access)
            blocks, evicted = pool.allocate(len(hashes) - len(hits), access)
            chosen.append([block for block, _ in evicted])
            pool.cache(blocks, group, hashes[len(hits) :], access)
            pool.release([*hits, *blocks][::-1])
        return chosen

    assert run() == run()


@pytest.mark.parametrize("count", range(1, 7))
def test_of_two_groups_alike_the_one_that_owes_more_pays_first(count):
    """I5, second half: the same blocks, classes and recency; only the debts differ."""
    policy = build("shield", 12)
    for block in range(6):
        for group, offset in (("a", 0), ("b", 6)):
            policy.materialise([block + offset], [block], Access(group, "base", block, 0.0))
    policy.ledger.account("b", "base").charge(100, 0.0)
    policy._debtors.enter("b", 0.0)
    for block in range(6):
        policy.release([block, block + 6])
    victims = policy.evict(count, Access("c", "base", 99, 0.0))
    assert victims == list(range(6, 6 + count))
    assert policy.causes == (("debt", count), ("order", 0))


def test_only_another_requests_hit_is_evidence():
    """A preempted request that comes back to its own blocks proves nothing (section 5)."""
    policy = build("shield", 4)
    policy.materialise([0], ["x"], Access("a", "gold", "first", 0.0))
    assert policy.hit([0], Access("a", "gold", "first", 1.0)) == []
    assert policy.retention_class(0) is RetentionClass.PROBATIONARY
    assert policy.hit([0], Access("a", "gold", "second", 2.0)) == [0]
    assert policy.retention_class(0) is RetentionClass.REUSE
