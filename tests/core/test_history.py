"""Admission history: bounds, and what one group cannot do to another."""

from prefixshield.core.history import AdmissionHistory


def admit(history, group, prefix, request_id):
    (known,) = history.admit(group, [prefix], request_id)
    return known


def test_a_flood_forgets_its_own_prefixes_only():
    history = AdmissionHistory(entries_per_group=3)
    admit(history, "quiet", "kept", 0)
    for number in range(100):
        assert not admit(history, "flood", number, number)
    assert history.size("flood") == 3
    assert admit(history, "quiet", "kept", 200)
    assert not admit(history, "flood", 0, 201), "long forgotten"


def test_admission_again_is_admission_most_recently():
    history = AdmissionHistory(entries_per_group=2)
    admit(history, "a", "x", 1)
    admit(history, "a", "y", 2)
    assert admit(history, "a", "x", 3)
    admit(history, "a", "z", 4)  # forgets y
    assert admit(history, "a", "x", 5)
    assert not admit(history, "a", "y", 6)


def test_one_request_is_one_admission():
    history = AdmissionHistory(entries_per_group=8)
    assert [admit(history, "a", "named", 1) for _ in range(3)] == [False] * 3
    assert [admit(history, "a", "named", 2) for _ in range(3)] == [True] * 3
