"""The default preset's order against the rule read aloud, in any order of calls."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from naive import NaiveOrder

from prefixshield.core import order as order_module
from prefixshield.core.ledger import Contract, Ledger
from prefixshield.core.order import Order, Rule
from prefixshield.core.retention import RetentionClass

GROUPS = ("a", "b", "c")
CONTRACTS = {"gold": Contract(8.0, 6.0), "base": Contract(1.0, 2.0), "poor": Contract(0.5, 0.0)}
P, N, R = RetentionClass


def each(runs):
    """The victims one by one, with their classes."""
    return [(block, queue.retention) for queue, blocks in runs for block in blocks]


class Life(RuleBasedStateMachine):
    """Blocks are cached, hit, released, held, lost and taken; debts come and go."""

    capacity = 12
    scale = 1.0
    rounds = 8192
    as_old = 0.25  # as many blocks as a small pool needs for a difference

    def __init__(self):
        super().__init__()
        self.now = 0.0
        self.ledger = Ledger(CONTRACTS)
        self.ledger.now(self.now)
        self.order = Order(self.capacity, self.ledger, Rule(0.9, True), self.scale)
        self.naive = NaiveOrder(self.capacity, self.scale, self.as_old, self.rounds)
        self.held = []

    @rule(group=st.sampled_from(GROUPS), count=st.integers(1, 5), proven=st.booleans())
    def cache(self, group, count, proven):
        excess = len(self.naive.group) + count - self.capacity
        if excess > 0:
            self.take(min(excess, len(self.naive.waiting)))
        for _ in range(min(count, self.capacity - len(self.naive.group))):
            block = next(block for block in range(self.capacity) if block not in self.naive.group)
            self.order.admit([block], group, [proven])
            self.naive.admit(block, group, proven)
            self.held.append(block)

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 99), promote=st.booleans())
    def reuse(self, which, promote):
        block = self.held[which % len(self.held)]
        before = self.naive.retention[block]
        self.naive.reuse(block, promote)
        promoted = self.order.reuse([block], promote=promote)
        assert promoted == [block] * (self.naive.retention[block] == R != before)

    @precondition(lambda self: self.held)
    @rule(first=st.integers(0, 99), count=st.integers(1, 9))
    def release(self, first, count):
        first %= len(self.held)
        blocks = self.held[first : first + count]
        del self.held[first : first + count]
        self.order.append(blocks)
        self.naive.release(blocks)

    @precondition(lambda self: self.naive.waiting)
    @rule(which=st.integers(0, 99), lose=st.booleans())
    def hold(self, which, lose):
        block = self.naive.waiting[which % len(self.naive.waiting)]
        self.naive.hold([block])
        self.order.hold([block])
        if lose:
            self.order.drop(block)
            self.naive.drop(block)
        else:
            self.held.append(block)

    @rule(
        group=st.sampled_from(GROUPS),
        contract=st.sampled_from(sorted(CONTRACTS)),
        blocks=st.integers(1, 20),
    )
    def charge(self, group, contract, blocks):
        self.ledger.charge(self.ledger.account(group, contract), blocks, self.now)
        self.order.charged(group, self.now)

    @rule(seconds=st.sampled_from([0.5, 2.0, 10.0]))
    def wait(self, seconds):
        self.now = self.ledger.now(self.now + seconds)

    @rule(share=st.sampled_from([0.9, 0.5, 0.25, 0.0]), calls=st.booleans())
    def follow(self, share, calls):
        self.order.rule = Rule(share, calls)

    @precondition(lambda self: self.naive.waiting)
    @rule(count=st.integers(0, 6))
    def evict(self, count):
        self.take(min(count, len(self.naive.waiting)))

    def take(self, count):
        known = {group for group, _ in self.ledger._accounts}
        debts = {group: self.ledger.normalised_debt(group, self.now) for group in known}
        weights = {group: self.ledger.heaviest_debt_weight(group, self.now) for group in known}
        expected = self.naive.take(count, self.order.rule, debts, weights)
        assert list(each(self.order.take(count, self.now))) == expected

    @invariant()
    def agree(self):
        self.order.check()
        assert len(self.order) == len(self.naive.waiting)
        assert self.order.candidates() == set(self.naive.waiting)
        for block in range(self.capacity):
            assert self.order.retention(block) == self.naive.retention.get(block)
            assert self.order.is_candidate(block) == (block in self.naive.place)
            assert (block in self.order) == (block in self.naive.group)
        assert len(self.order._debtors._heap) <= 2 * len(GROUPS) + 17


@pytest.mark.parametrize(
    ("capacity", "scale", "rounds"),
    [(1, 1.0, 8192), (4, 1.0, 8192), (12, 1.0, 8192), (12, 0.5, 8192), (12, 1.0, 2)],
)
def test_victims_are_those_of_the_rule_read_aloud(capacity, scale, rounds, monkeypatch):
    monkeypatch.setattr(order_module, "AS_OLD", Life.as_old)
    monkeypatch.setattr(order_module, "ROUNDS", rounds)
    of = {"capacity": capacity, "scale": scale, "rounds": rounds}
    machine = type("Machine", (Life,), of)
    case = machine.TestCase
    case.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
    case().runTest()


def order_of(capacity, rule, *blocks):
    """An order with (name, group, class) as candidates, numbered, in native order; its ledger."""
    ledger = Ledger(CONTRACTS)
    order = Order(capacity, ledger, rule)
    order._was_full = True
    for block, (_, group, retention) in enumerate(blocks):
        order.admit([block], group, [retention is not P])
        if retention is R:
            order.reuse([block], promote=True)
            order._chances[block] = 0
    order.append(range(len(blocks)))
    return order, ledger


def owe(order, ledger, **blocks):
    for group, count in blocks.items():
        account = ledger.account(group, "base")
        ledger.charge(account, count + 2, 0.0)  # the burst of 2 first
        order.charged(group, 0.0)


def lost(order, count, names):
    """The names of the next victims."""
    return "".join(names[block] for block, _ in each(order.take(count, 0.0)))


@pytest.mark.parametrize(
    ("share", "expected"),
    [
        (0.0, "uvwxyz"),  # native order
        (0.9, "uwyvxz"),  # 3 of 6 proven: below 5.4, so the unproven ones first
        (0.5, "uwyvxz"),
        (0.4, "vuwyxz"),  # 3 > 2.4: a proven one, then 2 are within their share
        (0.1, "vxzuwy"),  # even one proven block is more than 0.6
    ],
)
def test_the_share_decides_which_segment_loses(share, expected):
    blocks = [("u", "a", P), ("v", "b", N), ("w", "a", P), ("x", "c", R), ("y", "b", P)]
    order, _ = order_of(6, Rule(share, False), *blocks, ("z", "a", N))
    assert lost(order, 6, "uvwxyz") == expected


def test_a_proven_block_leaves_after_as_many_chances_as_it_was_hit():
    order, _ = order_of(4, Rule(0.5, False), ("x", "a", N), ("y", "a", N), ("z", "a", N))
    order.hold([0])
    for _ in range(2):
        order.reuse([0], promote=False)
    order.append([0])
    order.hold([1])
    order.append([1])
    assert lost(order, 3, "xyz") == "zyx"


def test_an_allocation_does_not_go_round_a_pool_where_all_was_hit(monkeypatch):
    """Four chances to grant, of 30: the first victims are those behind them, then all as usual."""
    monkeypatch.setattr(order_module, "ROUNDS", 4)
    order, _ = order_of(10, Rule(0.5, False), *((name, "a", N) for name in "abcdefghij"))
    order.hold(range(10))
    for _ in range(3):
        order.reuse(range(10), promote=False)
    order.append(range(10))
    assert lost(order, 2, "abcdefghij") == "ef"
    assert sum(order._chances) == 8 * 3 - 4
    assert lost(order, 1, "abcdefghij") == "a", "four more: g, h, i and j"


def test_debts_above_the_mean_are_paid_first_by_the_largest():
    blocks = [(group, group, P) for _ in range(6) for group in "abc"]
    order, ledger = order_of(18, Rule(0.9, True), *blocks)
    # Contract base weighs 2: it owes 4, 5.5 and 1 normalised, the mean is 3.5, a block pays 0.5.
    owe(order, ledger, a=8.0, b=11.0, c=2.0)
    assert (
        lost(order, 9, "abc" * 6) == "bbb" + "ab" + "caca"
    )  # down to a's 4; both to the mean; native order


def test_of_its_own_a_debtor_loses_what_was_not_promoted_first():
    blocks = [("p", "b", R), ("q", "a", R), ("r", "a", N), ("s", "a", R), ("t", "a", N)]
    order, ledger = order_of(5, Rule(0.9, True), *blocks)
    owe(order, ledger, a=50.0, b=1.0)
    assert lost(order, 4, "pqrst") == "rtqs"
    order, ledger = order_of(5, Rule(0.9, False), *blocks)
    owe(order, ledger, a=50.0, b=1.0)
    assert lost(order, 4, "pqrst") == "pqrs", "no others are as old"


def test_not_called_in_a_debtor_pays_with_what_is_about_as_old_until_it_has_paid():
    """3 of 100 places are about as old; b owes 2 against a mean of 1, and a block pays 0.5."""
    rule = Rule(0.9, False)
    for layout, expected in (("ababababab", "1302"), ("aaaaabbb", "0152")):
        blocks = [(str(n), group, P) for n, group in enumerate(layout)]
        order, ledger = order_of(100, rule, *blocks)
        owe(order, ledger, a=0.0, b=4.0)
        assert lost(order, 4, "01234567") == expected


def test_not_called_in_a_debtors_block_with_a_chance_left_is_spared():
    for hit, expected in ((False, "yx"), (True, "xy")):
        order, ledger = order_of(100, Rule(0.9, False), ("x", "a", N), ("y", "b", N))
        if hit:
            order.hold([1])
            order.reuse([1], promote=False)
            order.append([1])
        owe(order, ledger, b=50.0, a=0.0)
        assert lost(order, 2, "xy") == expected
