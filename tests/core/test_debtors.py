"""The ranking of debtors where time changes it, and its bounds."""

import pytest

from prefixshield.core.debtors import Debtors
from prefixshield.core.ledger import Contract, Ledger


def offer(group):
    return (0, 0)


@pytest.fixture
def ledger():
    return Ledger({"x": Contract(1.0, 0.0), "y": Contract(1.0, 0.0)})


def owe(ledger, group, **blocks):
    for contract, count in blocks.items():
        ledger.account(group, contract).charge(count, 0.0)


def test_debt_under_two_contracts_melts_twice_as_fast(ledger):
    debtors = Debtors(ledger, offer)
    owe(ledger, "two", x=3, y=3)  # 6 at t = 0, 2 at t = 2
    owe(ledger, "one", x=5)  # 5 at t = 0, 3 at t = 2
    for group in ("two", "one"):
        debtors.enter(group, 0.0)
    assert debtors.largest(0.0)[:2] == ("two", 6.0)
    assert debtors.largest(2.0)[:2] == ("one", 3.0)
    assert debtors.largest(4.0)[:2] == ("one", 1.0)
    assert debtors.largest(5.0) is None


def test_a_group_without_candidates_is_passed_over_until_it_enters_again(ledger):
    with_candidates = {"small"}
    debtors = Debtors(ledger, lambda group: (0, 0) if group in with_candidates else None)
    owe(ledger, "big", x=9)
    owe(ledger, "small", x=2)
    debtors.enter("big", 0.0)
    debtors.enter("small", 0.0)
    assert debtors.largest(0.0)[:2] == ("small", 2.0)
    with_candidates.add("big")
    debtors.enter("big", 0.0)
    assert debtors.largest(0.0)[:2] == ("big", 9.0)


def test_state_is_bounded_by_the_number_of_groups(ledger):
    debtors = Debtors(ledger, offer)
    for n in range(10_000):
        owe(ledger, "ab"[n % 2], x=1)
        debtors.enter("ab"[n % 2], 0.0)
    assert len(debtors._heap) <= 2 * 2 + 17
    assert debtors.largest(0.0)[:2] == ("a", 5000.0)
