"""The default preset on the simulated pool: every choice, class and promotion read aloud."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from invariants import assert_default_bounded
from naive import REUSE, NaiveOrder

from prefixshield.core import chains
from prefixshield.core import order as order_module
from prefixshield.core.ghosts import Ghosts
from prefixshield.core.ledger import EPSILON, Contract
from prefixshield.core.order import Rule
from prefixshield.core.retention import RetentionClass
from prefixshield.policies import PolicySetup, adaptive, build_policy
from prefixshield.policies.adaptive import CATCH_UP_BELOW, AdaptiveShield
from prefixshield.policies.base import Access
from prefixshield.sim.pool import SimBlockPool

GROUPS = ("a", "b", "c")
AS_OLD = 0.25  # of a small pool, as many blocks as make a difference
CONTRACTS = {"gold": Contract(8.0, 6.0), "base": Contract(1.0, 2.0), "poor": Contract(0.3, 0.0)}


def build(capacity):
    policy = build_policy("shield", PolicySetup(capacity, CONTRACTS, GROUPS))
    assert isinstance(policy, AdaptiveShield)
    return policy


class Life(RuleBasedStateMachine):
    """Requests overlap, come back, hold shared blocks, double some, and go in any order."""

    capacity = 12

    def __init__(self):
        super().__init__()
        self.policy = build(self.capacity)
        self.pool = SimBlockPool(self.policy)
        self.ledger = self.policy.ledger
        self.now = 0.0
        self.running = []  # (access, blocks)
        self.names = 0
        self.naive = NaiveOrder(self.capacity, as_old=AS_OLD)
        self.ghosts = Ghosts(self.capacity)
        self.made = {}  # cached block → (access of its maker, hash)
        self.orphans = set()
        self.charged = {}

    # -- what the policy must do, by scanning ------------------------------------------------

    def candidates(self):
        return {block for block in self.made if not self.pool._references[block]}

    def lags(self):
        """Whether the pool has too few proven blocks to fare like the miniature it follows."""
        proven = sum(retention > 0 for retention in self.naive.retention.values())
        wanted = CATCH_UP_BELOW * self.policy.trial.proven_part
        return self.policy.order.rule.proven_share > 0 and proven / self.capacity < wanted

    def unreachable(self):
        cached = {(access.group, block_hash) for access, block_hash in self.made.values()}
        return {
            block
            for block, (access, (prefix, place)) in self.made.items()
            if any((access.group, (prefix, i)) not in cached for i in range(place))
        }

    def settle(self):
        """Candidates become orphans, or come back: in no order that matters, to the end."""
        orphans = self.unreachable() & self.candidates()
        self.naive.hold(orphans)
        queues = self.policy.order._queues
        place = {b: queues._sequence[b] for b in queues.check()}
        back = self.orphans & self.candidates() - orphans
        self.naive.release(sorted(back, key=place.__getitem__))
        self.orphans = orphans

    def check_hit(self, hits, access, promoted):
        t = self.ledger.now(access.time)
        owes = self.ledger.raw_debt(access.group, t) > EPSILON
        earned = []
        for block in hits:
            maker, _ = self.made[block]
            if maker.request_id == access.request_id:
                continue
            same = maker[:2] == access[:2] and maker.prefix_id == access.prefix_id
            before = self.naive.retention[block]
            self.naive.reuse(block, same and not owes)
            if self.naive.retention[block] == REUSE != before:
                earned.append(block)
        assert promoted == earned
        assert not (owes and promoted)  # I2

    def check_victims(self, count, access, victims):
        orphans = self.orphans
        first, rest = victims[: len(orphans)], victims[len(orphans) :]
        assert set(first) <= orphans, "no other candidate while an orphan is left"
        assert len(victims) == len(set(victims)) == count  # I4: all candidates
        lost = [(block, self.naive.retention[block]) for block in first]
        for block in first:
            self.naive.drop(block)
        t = self.ledger.time
        debts = {group: self.ledger.normalised_debt(group, t) for group in self.ledger._of_group}
        weights = {group: self.ledger.heaviest_debt_weight(group, t) for group in debts}
        expected = self.naive.take(len(rest), self.policy.order.rule, debts, weights)
        assert rest == [block for block, _ in expected]
        for block, retention in lost + expected:
            assert self.policy.retention_class(block) == retention, "what the log will say"
            if retention == RetentionClass.PROBATIONARY:
                maker, block_hash = self.made[block]
                self.ghosts.remember(maker.group, [block_hash], [maker.request_id])
            del self.made[block]
        self.settle()

    # -- traffic -----------------------------------------------------------------------------

    @rule(
        prefix=st.integers(0, 2),
        length=st.integers(1, 9),
        last_may_hit=st.booleans(),
        group=st.sampled_from(GROUPS),
        contract=st.sampled_from(sorted(CONTRACTS)),
        prefix_id=st.sampled_from([None, None, "p"]),
        again=st.sampled_from([0, 0, 0, 1]),
        stays=st.sampled_from([False, False, True]),
    )
    def start(self, prefix, length, last_may_hit, group, contract, prefix_id, again, stays):
        self.names += 1 - again
        access = Access(group, contract, self.names, self.now, prefix_id)
        hashes = [(prefix, i) for i in range(length)]
        hits = self.pool.lookup(group, hashes[: length - 1 + last_may_hit])
        assert all(self.made[block][0].group == group for block in hits)  # I7
        self.pool.hold(hits)
        self.naive.hold(hits)
        self.check_hit(hits, access, self.policy.hit(hits, access))
        need = length - len(hits)
        if need > self.pool.available_blocks(group):
            self.give_back(hits)
            return
        free = len(self.pool._free)
        blocks, evicted = self.pool.allocate(need, access)
        assert len(set(blocks + hits)) == length, "a held block was handed out"  # I4
        self.check_victims(max(0, need - free), access, [block for block, _ in evicted])
        self.cache(blocks, hashes[len(hits) :], access, hashes[len(hits) - 1] if hits else None)
        self.running.append((access, hits + blocks))
        if not stays:
            self.finish(-1)

    def cache(self, blocks, hashes, access, after):
        account = self.ledger.account(access.group, access.contract)
        before = account.balance(self.ledger.now(access.time))
        self.pool.cache(blocks, access.group, hashes, access, after)
        charged = before - account.balance(self.ledger.time)
        assert charged == pytest.approx(len(blocks), abs=1e-6)  # I1
        for block, block_hash in zip(blocks, hashes, strict=True):
            if block in self.made:  # its content was lost while it was held
                del self.made[block]
                self.naive.drop(block)
            (maker,) = self.ghosts.recall(access.group, [block_hash])
            again = maker not in (None, access.request_id)
            self.naive.admit(block, access.group, again or self.lags())
            self.made[block] = access, block_hash
        self.settle()

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 99))
    def finish(self, which):
        _, blocks = self.running.pop(which % len(self.running))
        self.give_back(blocks)

    def give_back(self, blocks):
        blocks = blocks[::-1]
        self.pool.release(blocks)
        idle = [b for b in blocks if not self.pool._references[b] and self.pool._content[b]]
        unreachable = self.unreachable()
        self.naive.release(block for block in idle if block not in unreachable)
        self.orphans |= {block for block in idle if block in unreachable}

    @precondition(lambda self: self.candidates())
    @rule(which=st.integers(0, 99))
    def invalidate(self, which):
        block = sorted(self.candidates())[which % len(self.candidates())]
        self.pool.invalidate(block)
        self.orphans.discard(block)
        self.naive.drop(block)
        del self.made[block]
        self.settle()

    @rule(which=st.integers(0, 5))
    def follow(self, which):
        """Whatever the trial favours, for as long as nothing serves more."""
        trial = self.policy.trial
        trial._best = trial._miniatures[which]
        self.policy.order.rule = trial.rule

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
        self.naive = NaiveOrder(self.capacity, as_old=AS_OLD)
        self.made, self.orphans = {}, set()

    @invariant()
    def sound(self):
        self.pool.check()
        assert_default_bounded(self.policy, GROUPS, list(CONTRACTS))
        assert self.policy.candidate_count == len(self.candidates())
        assert self.policy._orphans.keys() == self.orphans
        for block, retention in self.naive.retention.items():
            assert self.policy.retention_class(block) == retention


@pytest.mark.parametrize("capacity", [1, 3, 8, 12])
def test_it_does_what_it_says(capacity, monkeypatch):
    monkeypatch.setattr(order_module, "AS_OLD", AS_OLD)
    machine = type("Machine", (Life,), {"capacity": capacity})
    case = machine.TestCase
    case.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
    case().runTest()


def test_victims_that_somebody_else_chose_leave_the_same_traces():
    """As in shadow mode: the state is that of a policy that has chosen them itself."""
    policies = [build(12), build(12)]
    for number in range(6):
        access = Access("ab"[number % 2], "gold", number, number)
        hashes = [(number, 0), (number, 1)]
        for policy in policies:
            policy.materialise([2 * number, 2 * number + 1], hashes, access, [None, hashes[0]])
            policy.release([2 * number + 1, 2 * number])
    chosen = policies[0].evict(5, access)
    policies[1].evicted(chosen)
    for policy in policies:
        policy.check()
        again = Access("a", "gold", "again", 9.0)
        policy.materialise(chosen[:2], [(0, 0), (0, 1)], again, [None, (0, 0)])
        policy.release(chosen[1::-1])
    assert policies[0].remembered() == policies[1].remembered() != {}
    assert policies[0].candidate_count == policies[1].candidate_count
    classes = [
        [policy.retention_class(b) for b in range(12) if b not in chosen[2:]] for policy in policies
    ]
    assert classes[0] == classes[1]
    assert policies[0].evict(9, access) == policies[1].evict(9, access)


def two_alike(debts, rule, *, promoted=False):
    """Groups a and b with 6 blocks each, released in turns, a first; the debts in blocks."""
    policy = build(200)  # far from full: all blocks are unproven
    for block in range(6):
        for group, offset in (("a", 0), ("b", 6)):
            policy.materialise([block + offset], [block], Access(group, "gold", "maker", 0.0))
    if promoted:
        for group, offset in (("a", 0), ("b", 6)):
            blocks = range(offset, offset + 6)
            assert len(policy.hit(blocks, Access(group, "gold", "other", 0.0))) == 6
    for group, owed in debts.items():
        policy.ledger.charge(policy.ledger.account(group, "base"), owed + 2, 0.0)
        policy.order.charged(group, 0.0)
    for block in range(6):
        policy.release([block, block + 6])
    policy.order.rule = rule
    return policy


rules = st.sampled_from([0.0, 0.5, 0.9])


@given(rules, st.booleans(), st.integers(0, 50), st.integers(7, 50), st.integers(1, 6))
@settings(max_examples=60, deadline=None)
def test_of_two_groups_alike_the_one_that_owes_more_pays_first(share, promoted, owed, more, count):
    """I5, while debts are called in: down to the mean of both, a block of the contract each."""
    for a, b, first in ((owed, owed + more, "b"), (owed + more, owed, "a")):
        policy = two_alike({"a": a, "b": b}, Rule(share, True), promoted=promoted)
        victims = policy.evict(count, Access("c", "base", 99, 0.0))
        pays = min(count, more // 2 + more % 2)
        assert all((block >= 6) == (first == "b") for block in victims[:pays])
        assert policy.causes == (("orphan", 0), ("debt", pays), ("order", count - pays))
        policy.check()


@pytest.mark.parametrize("share", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("promoted", [False, True])
def test_where_debts_are_not_called_in_they_decide_between_blocks_about_as_old(share, promoted):
    """I5 then: of two blocks within 3% of the pool (6 of 200), the larger debtor's goes first."""
    native = [block + offset for block in range(6) for offset in (0, 6)]
    paying = {"a": [0, 1, 2, 3, 6, 4], "b": [6, 7, 8, 0, 9, 1]}
    for debts, expected in (
        ({"a": 90, "b": 90}, native[:6]),
        ({"a": 90, "b": 0}, paying["a"]),
        ({"a": 0, "b": 90}, paying["b"]),
    ):
        policy = two_alike(debts, Rule(share, False), promoted=promoted)
        assert policy.evict(6, Access("c", "base", 99, 0.0)) == expected
        policy.check()


@pytest.mark.parametrize("looks", [1, 3])
def test_what_is_bounded_per_call_leaves_the_state_sound(looks, monkeypatch):
    """Orphans are found late, and chances granted late: no block is lost, and all are found."""
    monkeypatch.setattr(chains, "LOOKS_PER_CALL", looks)
    monkeypatch.setattr(order_module, "ROUNDS", 2)
    policy = build(24)
    pool = SimBlockPool(policy)
    late = 0
    for number in range(60):
        access = Access("ab"[number % 2], "base", number, 0.1 * number)
        prefix = [(0, 0), (0, 1)] if number % 3 else [(number, 0)]
        hashes = prefix + [(number, place) for place in range(2, 5)]
        hits = pool.lookup(access.group, hashes)
        pool.hold(hits)
        policy.hit(hits, access)
        blocks, _ = pool.allocate(len(hashes) - len(hits), access)
        pool.cache(blocks, access.group, hashes[len(hits) :], access, [None, *hashes][len(hits)])
        pool.release([*hits, *blocks][::-1])
        for first in [block for block in range(24) if pool._content[block]][:1]:
            pool.invalidate(first)
        late += bool(policy._chains._doubtful)
        pool.check()
    assert late, "no call had too little to look with"
    while policy._chains._doubtful:
        policy._turn(*policy._chains.remove([]))
    pool.check()
    count = policy.candidate_count
    assert len(set(policy.evict(count, access))) == count


def test_a_group_below_the_mean_is_not_called_upon():
    """One that owes a lot and has nothing left to lose pays for nobody, and lifts the mean."""
    policy = two_alike({"a": 5, "b": 9, "c": 100}, Rule(0.9, True))
    assert policy.evict(3, Access("c", "base", 99, 0.0)) == [0, 6, 1]


def test_a_lone_debtor_fills_the_pool_and_is_never_refused():
    """I3."""
    policy = build(12)
    pool = SimBlockPool(policy)
    for number in range(20):
        access = Access("a", "poor", number, 0.0)
        length = 12 if number == 19 else 5
        assert pool.available_blocks("a") == 12
        blocks, _ = pool.allocate(length, access)
        pool.cache(blocks, "a", [(number, i) for i in range(length)], access)
        pool.release(blocks[::-1])
        pool.check()
    assert all(content is not None and content.owner == "a" for content in pool._content)


def test_a_debtors_unproven_block_that_is_hit_is_proven_and_not_promoted():
    policy = build(200)
    policy.materialise([0, 1], ["x", "y"], Access("a", "poor", "first", 0.0))
    assert policy.hit([0], Access("a", "poor", "second", 0.0)) == []
    classes = [policy.retention_class(block) for block in (0, 1)]
    assert classes == [RetentionClass.NORMAL, RetentionClass.PROBATIONARY]
    assert policy.hit([0], Access("a", "poor", "third", 1e3)) == [0], "the debt has cleared"


def test_a_group_proves_nothing_for_another_one(monkeypatch):
    """I7: neither hits nor ghosts nor predecessors cross groups, whatever the hashes."""
    monkeypatch.setattr(adaptive, "CATCH_UP_BELOW", 0)  # what is proven is so by itself
    policy = build(3)
    pool = SimBlockPool(policy)

    def serve(group, hashes, name):
        access = Access(group, "gold", name, 0.0)
        hits = pool.lookup(group, hashes)
        pool.hold(hits)
        policy.hit(hits, access)
        blocks, _ = pool.allocate(len(hashes) - len(hits), access)
        after = hashes[len(hits) - 1] if hits else None
        pool.cache(blocks, group, hashes[len(hits) :], access, after)
        classes = [policy.retention_class(block) for block in blocks]
        pool.release([*hits, *blocks][::-1])
        pool.check()
        return len(hits), classes

    policy.order._was_full = True
    low, normal = RetentionClass.PROBATIONARY, RetentionClass.NORMAL
    assert serve("a", ["x", "y", "z"], 1) == (0, [low] * 3)
    assert serve("b", ["x", "y", "z"], 2) == (0, [low] * 3)
    assert serve("c", ["x", "y", "z"], 3) == (0, [low] * 3)
    assert serve("c", ["x", "y", "z"], 4) == (3, [])
    assert policy.ghosts.size("a") + policy.ghosts.size("b") > 0
    assert serve("b", ["x"], 5)[0] == 0
    assert policy.ghosts.size("a") <= 2
    assert normal not in serve("a", ["q"], 6)[1]


def test_a_request_that_comes_back_to_its_own_blocks_proves_nothing():
    """Neither while they are cached nor after they were lost; another request does."""
    policy = build(200)
    first, second = (Access("a", "gold", name, 0.0) for name in ("first", "second"))
    policy.materialise([0], ["x"], first)
    assert policy.hit([0], first) == []
    for access, expected in (
        (first, RetentionClass.PROBATIONARY),
        (second, RetentionClass.NORMAL),
    ):
        assert policy.retention_class(0) is RetentionClass.PROBATIONARY
        policy.release([0])
        assert policy.evict(1, access) == [0]
        policy.materialise([0], ["x"], access)
        assert policy.retention_class(0) is expected


def test_a_pool_becomes_like_the_miniature_it_follows():
    """Its proven blocks are gone, the miniature's are not: what it admits catches up."""
    policy = build(10)
    pool = SimBlockPool(policy)

    def serve(number, hashes):
        access = Access("a", "gold", number, 0.0)
        blocks, _ = pool.allocate(len(hashes), access)
        pool.cache(blocks, "a", hashes, access)
        pool.release(blocks[::-1])
        return blocks

    first = serve(1, [f"x{i}" for i in range(10)])
    assert policy.trial.proven_part == 0.9
    for block in first:
        pool.invalidate(block)
    policy.order._was_full = True
    assert policy.order.proven_part == 0
    assert policy.order.rule.proven_share == 0.9
    (block,) = serve(2, ["y"])
    assert policy.retention_class(block) is RetentionClass.NORMAL
    for number in range(3, 12):
        serve(number, [f"z{number}"])
    assert policy.order.proven_part >= CATCH_UP_BELOW * policy.trial.proven_part
    assert policy.order.proven_part <= 0.9
