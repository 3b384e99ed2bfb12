"""The trial: each miniature against its rule read aloud, and what the pool is told to follow."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from naive import NaiveOrder

from prefixshield.core.ghosts import Ghosts
from prefixshield.core.ledger import Contract, Ledger
from prefixshield.core.trial import MEMORY_PER_BLOCK, MINIATURE_BLOCKS, RULES, Trial

CONTRACTS = {"base": Contract(1.0, 2.0), "poor": Contract(0.5, 0.0)}
GROUPS = ("a", "b", "c")


class NaiveMiniature:
    """Serves whole requests under one rule; a block is one entry, however often it is made."""

    def __init__(self, capacity, rule):
        self.rule, self.capacity = rule, capacity
        self.order = NaiveOrder(capacity)
        self.ghosts = Ghosts(capacity)

    def serve(self, keys, debts, weights):
        """The classes of the blocks that hit."""
        order = self.order
        keys = keys[: self.capacity]
        resident = [key for key in keys if key in order.group]
        served = 0
        while served < len(keys) and keys[served] in order.group:
            served += 1
        hits = [order.retention[key] for key in keys[:served]]
        order.hold(resident)
        for key in keys[:served]:
            order.reuse(key, promote=False)
        missing = [key for key in keys if key not in order.group]
        excess = max(0, len(order.group) + len(missing) - self.capacity)
        for key, retention in order.take(excess, self.rule, debts, weights):
            if retention == 0:
                self.ghosts.remember(key[0], [key[1]], ["maker"])
        for key in missing:
            order.admit(key, key[0], self.ghosts.recall(key[0], [key[1]]) != [None])
        order.release(keys[::-1])
        return hits


requests = st.lists(
    st.tuples(
        st.sampled_from(GROUPS),
        st.sampled_from(sorted(CONTRACTS)),
        st.integers(0, 2),  # which prefix
        st.integers(1, 7),  # how much of it
        st.integers(0, 6),  # blocks charged
        st.sampled_from([0.0, 0.0, 1.0, 9.0]),  # seconds until the next
        st.sampled_from([0.0, 0.5, 1.0]),  # discount
    ),
    max_size=50,
)


@settings(max_examples=60, deadline=None)
@given(requests, st.sampled_from([1, 4, 8, 13]))
def test_on_a_pool_no_larger_than_a_miniature_each_is_a_replay_of_its_rule(script, capacity):
    ledger = Ledger(CONTRACTS)
    trial = Trial(capacity, ledger)
    naive = [NaiveMiniature(capacity, rule) for rule in RULES]
    value, served = dict.fromkeys(RULES, 0.0), dict.fromkeys(RULES, 0.0)
    t, known = 0.0, set()
    for group, contract, prefix, length, charged, wait, discount in script:
        ledger.charge(ledger.account(group, contract), charged, t)
        trial.charged(group, t)
        known.add(group)
        keys = [(group, (prefix, i)) for i in range(length)]
        assert all(trial.sampled([block_hash for _, block_hash in keys]))
        trial.serve(keys, length, t, discount)
        debts = {name: ledger.normalised_debt(name, t) for name in known}
        weights = {name: ledger.heaviest_debt_weight(name, t) for name in known}
        fade = 2.718281828459045 ** (-length / (MEMORY_PER_BLOCK * capacity))
        for mini, model in zip(trial._miniatures, naive, strict=True):
            rule = model.rule
            hits = model.serve(keys, debts, weights)
            proven = sum(retention > 0 for retention in hits)
            unproven = len(hits) - proven
            value[rule] = value[rule] * fade + proven + (1 - discount) * unproven
            served[rule] = served[rule] * fade + len(hits)
            mini.order.check()
            assert set(mini._block.values()) == mini.order.candidates()
            assert mini._block.keys() == set(model.order.waiting)
            assert mini.value / trial._gain == pytest.approx(value[rule])
            assert mini.served / trial._gain == pytest.approx(served[rule])
        t = ledger.now(t + wait)


def follow(trial, ledger, accesses, owing=None):
    """One-block requests (group, block); what the trial favours in the end."""
    for group, block in accesses:
        ledger.charge(ledger.account(group, "base"), 0, 0.0)
        if group == owing:
            ledger.charge(ledger.account(group, "base"), 10, 0.0)
        trial.charged(group, 0.0)
        trial.serve([(group, block)], 1, 0.0, 1.0 if group == owing else 0.0)
    return trial.rule


@pytest.fixture
def ledger():
    return Ledger(CONTRACTS)


def loop(size, laps):
    return [("a", block) for _ in range(laps) for block in range(size)]


def moving(capacity, length):
    """Every block is used twice, too far apart for a small segment of unproven blocks."""
    distance = capacity * 4 // 10
    return [("a", n - d) for n in range(length) for d in (0, distance) if n >= d]


def test_it_follows_lru_where_the_working_set_moves_and_protection_where_it_cycles(ledger):
    trial = Trial(60, ledger)
    assert trial.rule.proven_share == 0.9
    assert follow(trial, ledger, moving(60, 1500)).proven_share == 0
    assert follow(trial, ledger, loop(80, 60)).proven_share > 0


def reuse_under_a_flood(length):
    """One group goes round two thirds of a pool of 60, another one touches blocks once."""
    for n in range(length):
        yield "a", n % 40
        yield "b", n


def test_debts_are_called_in_only_while_that_is_of_more_value():
    for owing, calls in (("b", True), ("a", False)):
        ledger = Ledger(CONTRACTS)
        trial = Trial(60, ledger)
        assert trial.rule.calls_in_debts
        rule = follow(trial, ledger, reuse_under_a_flood(1500), owing)
        assert rule.calls_in_debts == calls
        best = {
            kind: max(m.value for m in trial._miniatures if m.order.rule.calls_in_debts == kind)
            for kind in (True, False)
        }
        assert best[calls] > best[not calls], "not merely what it began with"


def test_a_discount_is_of_unproven_hits_alone(ledger):
    trial = Trial(40, ledger)
    expected_value = expected_served = 0.0
    fade = 2.718281828459045 ** (-1 / (MEMORY_PER_BLOCK * 40))
    for value, served in ((0, 0), (0.25, 1), (1, 1)):  # a miss, an unproven hit, a proven one
        trial.serve([("a", "x")], 1, 0.0, 0.75)
        expected_value = expected_value * fade + value
        expected_served = expected_served * fade + served
        for mini in trial._miniatures:
            assert mini.value / trial._gain == pytest.approx(expected_value)
            assert mini.served / trial._gain == pytest.approx(expected_served)


@pytest.mark.parametrize("make", [int, str, lambda n: str(n).encode(), lambda n: ("p", n)])
def test_a_large_pool_is_sampled_in_proportion(ledger, make):
    trial = Trial(10 * MINIATURE_BLOCKS, ledger)
    sampled = sum(trial.sampled([make(n) for n in range(20_000)]))
    assert 1800 < sampled < 2200


def test_state_is_bounded_under_any_traffic(ledger):
    rng = random.Random(1)
    trial = Trial(4 * MINIATURE_BLOCKS, ledger)
    for n in range(3000):
        group = rng.choice(GROUPS)
        ledger.charge(ledger.account(group, "poor"), rng.randrange(9), 0.0)
        trial.charged(group, 0.0)
        trial.serve([(group, n * 7 + i) for i in range(rng.choice([1, 7]))], 7, 0.0, 0.5)
    trial.serve([("a", n) for n in range(3 * MINIATURE_BLOCKS)], 3 * MINIATURE_BLOCKS, 0.0, 0.0)
    for mini in trial._miniatures:
        mini.order.check()
        assert len(mini.order) == len(mini._block) == MINIATURE_BLOCKS - len(mini._free)
        assert len(mini.ghosts) <= MINIATURE_BLOCKS
        assert len(mini.order._debtors._heap) <= 2 * len(GROUPS) + 17
        assert sum(map(len, mini.order._queues._heads)) <= 3 * len(GROUPS)


def test_old_accesses_fade_without_overflow(ledger):
    trial = Trial(8, ledger)
    largest = 0.0
    for _ in range(9_000):
        trial.serve([("a", "x")], 8, 0.0, 0.0)
        largest = max(largest, trial._gain)
    assert largest > 1e99, "it never came near"
    total = 1 / (1 - 2.718281828459045 ** (-1 / MEMORY_PER_BLOCK))  # of the geometric series
    for mini in trial._miniatures:
        assert mini.served / trial._gain == pytest.approx(total)
