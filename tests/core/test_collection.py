"""Who pays, against a scan over all groups at every victim; and the mean that is the floor."""

from hypothesis import given, settings
from hypothesis import strategies as st

from prefixshield.core.debtors import Collection, Debtors
from prefixshield.core.ledger import EPSILON, Contract, Ledger

GROUPS = ("a", "b", "c", "d")
CONTRACTS = {"gold": Contract(8.0, 6.0), "base": Contract(1.0, 2.0), "poor": Contract(0.5, 0.0)}

charges = st.lists(
    st.tuples(
        st.sampled_from(GROUPS),
        st.sampled_from(sorted(CONTRACTS)),
        st.integers(0, 25),
        st.sampled_from([0.0, 0.25, 3.0, 20.0]),
    ),
    max_size=40,
)


def in_step(script):
    """(ledger, debtors, accounting time) after every charge of a script and the wait after it."""
    ledger = Ledger(CONTRACTS)
    debtors = Debtors(ledger, lambda group: (0, 0))
    t = 100.0
    for group, contract, blocks, wait in script:
        ledger.charge(ledger.account(group, contract), blocks, t)
        debtors.enter(group, t)
        t += wait
        yield ledger, debtors, t


@settings(max_examples=100, deadline=None)
@given(charges)
def test_the_mean_debt_is_that_of_a_scan_and_its_heap_is_bounded(script):
    seen = set()
    for (group, *_), (ledger, _, t) in zip(script, in_step(script), strict=True):
        seen.add(group)
        mean = sum(ledger.normalised_debt(name, t) for name in seen) / len(seen)
        assert abs(ledger.mean_debt(t) - mean) < EPSILON / 10
        assert len(ledger._owing) <= len(seen) * len(CONTRACTS)


def test_the_mean_stays_exact_and_its_heap_small_over_many_charges():
    ledger = Ledger(CONTRACTS)
    assert ledger.mean_debt(0.0) == 0
    t = 0.0
    for number in range(20_000):
        group, contract = GROUPS[number % 4], ("gold", "base", "poor")[number % 3]
        ledger.charge(ledger.account(group, contract), number % 7, t)
        t += 0.31
        assert len(ledger._owing) <= 12
        if number % 500 == 499:
            mean = sum(ledger.normalised_debt(name, t) for name in GROUPS) / 4
            assert abs(ledger.mean_debt(t) - mean) < EPSILON / 10
    assert ledger.mean_debt(t) > 100
    t += 1e9
    assert ledger.mean_debt(t) == 0
    assert not ledger._owing


@settings(max_examples=200, deadline=None)
@given(
    charges,
    st.dictionaries(st.sampled_from(GROUPS), st.integers(1, 12)),
    st.sampled_from(["none", "mean", "two"]),
    st.sampled_from([1.0, 0.25]),
    st.integers(1, 20),
    st.lists(st.integers(0, 2), min_size=4, max_size=4),
    st.sampled_from([1, 2, 20]),
)
def test_payers_are_those_of_a_scan(script, owned, kind, scale, count, classes, most):
    ledger, debtors, t = list(in_step([*script, ("a", "base", 0, 0.0)]))[-1]
    floor = {"none": 0.0, "mean": ledger.mean_debt(t), "two": 2.0}[kind]
    left = dict(owned)
    order = {group: (classes[place], place) for place, group in enumerate(GROUPS)}

    def scan():
        p = {group: ledger.normalised_debt(group, t) for group in GROUPS}
        rest = dict(owned)
        for _ in range(count):
            owing = [g for g in GROUPS if rest.get(g) and p[g] > floor + EPSILON]
            if not owing:
                return
            most = max(p[g] for g in owing)
            payer = min((g for g in owing if p[g] > most - EPSILON), key=order.__getitem__)
            p[payer] -= 1 / (ledger.heaviest_debt_weight(payer, t) * scale)
            rest[payer] -= 1
            yield payer

    paid = []
    debtors.offer = lambda group: order[group] if left.get(group) else None
    collection = Collection(
        debtors,
        ledger,
        t,
        floor=floor,
        victims_per_block=scale,
    )
    while payer := collection.next(count - len(paid)):
        group, alone = payer
        assert 1 <= alone <= count - len(paid)
        lost = min(alone, left[group], most)
        left[group] -= lost
        paid += [group] * lost
        collection.paid(lost)
    collection.close()
    assert paid == list(scan())

    debtors.offer = lambda group: order[group] if owned.get(group) else None
    largest = max(owned, key=lambda g: ledger.normalised_debt(g, t), default=None)
    found = debtors.largest(t)
    if largest is None or ledger.normalised_debt(largest, t) <= EPSILON:
        assert found is None
    else:
        assert found is not None, "whoever paid is a debtor as before"
        assert abs(found[1] - ledger.normalised_debt(largest, t)) < EPSILON
