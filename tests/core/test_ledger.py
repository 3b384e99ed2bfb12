"""The ledger against section 2 written out in balances, and its clock."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixshield.core.ledger import EPSILON, Contract, Ledger

CONTRACTS = {"gold": Contract(64.0, 256.0), "base": Contract(16.0, 128.0), "none": Contract(0.5, 0)}


class Balances:
    """B and t0 stored as the paper has them, in exact fractions."""

    def __init__(self):
        self.stored = {}

    def balance(self, account, t):
        rate, burst = map(Fraction, CONTRACTS[account[1]])
        b, t0 = self.stored.get(account, (burst, t))
        return min(burst, b + rate * (t - t0))

    def charge(self, account, n, t):
        self.stored[account] = (self.balance(account, t) - n, t)


accounts = st.tuples(st.sampled_from("ab"), st.sampled_from(sorted(CONTRACTS)))
steps = st.lists(st.tuples(accounts, st.integers(1, 400), st.integers(0, 20_000)), max_size=40)


@given(steps, st.integers(0, 60_000))
def test_balances_and_debts_are_those_of_the_paper(script, rest_ms):
    ledger, reference = Ledger(CONTRACTS), Balances()
    t = Fraction(0)
    for (group, contract), blocks, wait_ms in script:
        t += Fraction(wait_ms, 1000)
        ledger.account(group, contract).charge(blocks, float(t))
        reference.charge((group, contract), blocks, t)
    t += Fraction(rest_ms, 1000)
    for group in "ab":
        debts = {}
        for contract in CONTRACTS:
            if (group, contract) in reference.stored:
                exact = reference.balance((group, contract), t)
                found = ledger.account(group, contract).balance(float(t))
                assert found == pytest.approx(float(exact), abs=1e-7)
                debts[contract] = max(Fraction(0), -exact)
        lowest = Fraction(1, 2)
        weights = {c: Fraction(CONTRACTS[c].refill_rate) / lowest for c in CONTRACTS}
        raw = sum(debts.values())
        normalised = sum(debt / weights[c] for c, debt in debts.items())
        heaviest = max((weights[c] for c, debt in debts.items() if debt > EPSILON), default=1)
        assert ledger.raw_debt(group, float(t)) == pytest.approx(float(raw), abs=1e-6)
        assert ledger.normalised_debt(group, float(t)) == pytest.approx(float(normalised), abs=1e-6)
        assert ledger.heaviest_debt_weight(group, float(t)) == heaviest
        rank = ledger.clearance_rank(group, float(t)) - float(t)
        assert rank * float(lowest) == pytest.approx(float(normalised), abs=1e-6)


@given(steps, st.lists(st.integers(0, 39), max_size=20), st.integers(0, 60_000))
def test_a_refund_undoes_a_charge_and_the_mean_debt_follows(script, refunds, rest_ms):
    ledger, reference = Ledger(CONTRACTS), Balances()
    t = 0.0
    for number, (account, blocks, wait_ms) in enumerate(script):
        t += wait_ms / 1000
        ledger.charge(ledger.account(*account), blocks, t)
        reference.charge(account, blocks, Fraction(t))
        if number in refunds:  # at once: as if it had not been charged
            before = reference.balance(account, Fraction(t)) + blocks
            ledger.refund(ledger.account(*account), blocks, t)
            reference.stored[account] = (before, Fraction(t))
    if refunds and script:  # later: at most up to a full bucket
        account, blocks, _ = script[refunds[0] % len(script)]
        t += 1.0
        ledger.refund(ledger.account(*account), blocks, t)
        balance = reference.balance(account, Fraction(t)) + blocks
        reference.stored[account] = (balance, Fraction(t))
    for after in (0.0, rest_ms / 1000):
        for group, contract in reference.stored:
            burst = CONTRACTS[contract].burst
            exact = min(burst, float(reference.balance((group, contract), Fraction(t + after))))
            found = ledger.account(group, contract).balance(t + after)
            assert found == pytest.approx(exact, abs=1e-6)
        groups = {group for group, _ in reference.stored}
        mean = sum(ledger.normalised_debt(g, t + after) for g in groups) / max(1, len(groups))
        assert ledger.mean_debt(t + after) == pytest.approx(mean, abs=1e-6)


@given(st.lists(st.floats(0, 100), min_size=1))
def test_accounting_time_never_runs_backwards(readings):
    ledger = Ledger(CONTRACTS)
    seen = [ledger.now(reading) for reading in readings]
    assert seen == [max(readings[: i + 1]) for i in range(len(readings))]


def test_a_clock_that_steps_back_neither_mints_nor_burns_credit():
    ledger = Ledger(CONTRACTS)
    account = ledger.account("a", "base")
    account.charge(200, ledger.now(100.0))
    assert account.balance(ledger.now(50.0)) == 128 - 200
    account.charge(10, ledger.now(50.0))
    assert account.balance(ledger.now(100.0)) == 128 - 210
    assert account.balance(ledger.now(101.0)) == 128 - 210 + 16


def test_an_unknown_contract_is_an_error():
    with pytest.raises(KeyError):
        Ledger(CONTRACTS).account("a", "platinum")
