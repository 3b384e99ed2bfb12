"""A ledger whose contracts change while it is in use, against balances in exact fractions."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixshield.core.debtors import Debtors
from prefixshield.core.ledger import EPSILON, Contract, Ledger

RATES = (0.5, 1.0, 16.0, 64.0)
BURSTS = (0.0, 4.0, 200.0)
NAMES = ("gold", "base", "poor")
GROUPS = ("a", "b", "c")

terms = st.builds(Contract, st.sampled_from(RATES), st.sampled_from(BURSTS))
tables = st.dictionaries(st.sampled_from(NAMES), terms, min_size=1)
charges = st.tuples(st.sampled_from(GROUPS), st.sampled_from(NAMES), st.integers(1, 400))
changes = st.tuples(tables, st.sets(st.sampled_from(GROUPS)))
scripts = st.lists(st.tuples(st.integers(0, 9_000), charges | changes), min_size=1, max_size=25)


class Reference:
    """Every balance as a number of blocks and the time at which it was that."""

    def __init__(self, contracts):
        self.contracts = dict(contracts)
        self.configured = set(contracts)
        self.stored = {}

    def balance(self, account, t):
        rate, burst = map(Fraction, self.contracts[account[1]])
        b, t0 = self.stored.get(account, (burst, t))
        return min(burst, b + rate * (t - t0))

    def charge(self, account, blocks, t):
        self.stored[account] = (self.balance(account, t) - blocks, t)

    def reconfigure(self, contracts, t, closed):
        kept = {a: self.balance(a, t) for a in self.stored if not closed(a, self.balance(a, t))}
        self.contracts.update(contracts)
        self.configured = set(contracts)
        self.stored = {
            a: (min(b, Fraction(self.contracts[a[1]].burst)), t) for a, b in kept.items()
        }

    def answers(self, t):
        """By group: raw debt, normalised debt, the heaviest weight in debt."""
        lowest = min(Fraction(self.contracts[c].refill_rate) for c in self.configured)
        found = {}
        for group in {group for group, _ in self.stored}:
            owed = {
                c: max(Fraction(0), -self.balance((g, c), t)) for g, c in self.stored if g == group
            }
            weight = {c: Fraction(self.contracts[c].refill_rate) / lowest for c in owed}
            found[group] = (
                float(sum(owed.values())),
                float(sum(debt / weight[c] for c, debt in owed.items())),
                float(max((weight[c] for c, debt in owed.items() if debt > EPSILON), default=1)),
            )
        return found


@given(tables.filter(lambda table: len(table) == len(NAMES)), scripts, st.integers(0, 30_000))
def test_after_new_contracts_every_answer_is_that_of_the_same_balances(contracts, script, rest_ms):
    ledger, reference = Ledger(contracts), Reference(contracts)
    debtors = Debtors(ledger, lambda group: (0, 0))
    exact = Fraction(0)
    for wait_ms, step in script:
        exact += Fraction(wait_ms, 1000)
        t = float(exact)
        if len(step) == 3:
            group, contract, blocks = step
            ledger.charge(ledger.account(group, contract), blocks, t)
            debtors.enter(group, t)
            reference.charge((group, contract), blocks, exact)
        else:
            new, groups = step
            ledger.reconfigure(new, groups, t)
            debtors.enter_all(t)

            def closed(account, balance, groups=groups):
                if abs(balance) <= EPSILON:  # a hair's breadth from owing: rounding decides
                    return account not in ledger._accounts
                return account[0] not in groups and balance > 0

            reference.reconfigure(new, exact, closed)
        agree(ledger, debtors, reference, exact)
    agree(ledger, debtors, reference, exact + Fraction(rest_ms, 1000))


def agree(ledger, debtors, reference, exact):
    t = float(exact)
    answers = reference.answers(exact)
    assert set(ledger.groups()) == set(answers)
    for group, (raw, normalised, weight) in answers.items():
        assert ledger.raw_debt(group, t) == pytest.approx(raw, abs=1e-5)
        assert ledger.normalised_debt(group, t) == pytest.approx(normalised, abs=1e-5)
        if abs(raw - EPSILON) > EPSILON / 2:
            assert ledger.heaviest_debt_weight(group, t) == weight
    for account in reference.stored:
        found = ledger.account(*account).balance(t)
        assert found == pytest.approx(float(reference.balance(account, exact)), abs=1e-5)
    debts = {group: debt for group, (_, debt, _) in answers.items()}
    mean = sum(debts.values()) / max(1, len(debts))
    assert ledger.mean_debt(t) == pytest.approx(mean, abs=1e-5)
    for group in debts:
        others = sum(debts.values()) - debts[group]
        expected = others / max(1, len(debts) - 1)
        assert ledger.mean_debt_of_others(group, t) == pytest.approx(expected, abs=1e-5)
    largest = debtors.largest(t)
    most = max(debts.values(), default=0.0)
    if largest is None:
        assert most <= 2 * EPSILON
    else:
        assert largest[1] == pytest.approx(most, abs=1e-5)
        assert debts[largest[0]] == pytest.approx(most, abs=1e-5)


def test_a_balance_is_capped_at_a_smaller_burst_and_not_topped_up_at_a_larger_one():
    ledger = Ledger({"x": Contract(2.0, 100.0)})
    account = ledger.account("g", "x")
    ledger.charge(account, 40, 0.0)
    ledger.reconfigure({"x": Contract(2.0, 200.0)}, "g", 0.0)
    assert (account.balance(0.0), account.balance(5.0), account.balance(99.0)) == (60, 70, 200)
    ledger.reconfigure({"x": Contract(4.0, 10.0)}, "g", 5.0)
    assert (account.balance(5.0), account.balance(6.0)) == (10, 10)


def test_the_debt_of_a_group_and_a_contract_that_are_gone_decays_as_before():
    ledger = Ledger({"x": Contract(2.0, 0.0), "y": Contract(1.0, 0.0)})
    ledger.charge(ledger.account("gone", "x"), 10, 0.0)
    ledger.charge(ledger.account("gone too", "y"), 0, 0.0)
    ledger.reconfigure({"y": Contract(1.0, 0.0)}, ["other"], 0.0)
    assert [ledger.raw_debt("gone", t) for t in (0.0, 4.0, 5.0)] == [10, 2, 0]
    assert list(ledger.groups()) == ["gone"], "it counts in the mean until it is clear"
    ledger.reconfigure({"y": Contract(1.0, 0.0)}, ["other"], 6.0)
    assert list(ledger.groups()) == []
    assert ledger.account("gone", "x").balance(6.0) == 0, "a request may still be on its way"
