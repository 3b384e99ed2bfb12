"""Admission history: bounds, and what one group cannot do to another."""

from prefixshield.core.history import AdmissionHistory


def test_a_flood_forgets_its_own_prefixes_only():
    history = AdmissionHistory(entries_per_group=3)
    history.admit("quiet", "kept", request_id=0)
    for number in range(100):
        assert not history.admit("flood", number, request_id=number)
    assert history.size("flood") == 3
    assert history.admit("quiet", "kept", request_id=200)
    assert not history.admit("flood", 0, request_id=201), "long forgotten"


def test_admission_again_is_admission_most_recently():
    history = AdmissionHistory(entries_per_group=2)
    history.admit("a", "x", 1)
    history.admit("a", "y", 2)
    assert history.admit("a", "x", 3)
    history.admit("a", "z", 4)  # forgets y
    assert history.admit("a", "x", 5)
    assert not history.admit("a", "y", 6)


def test_one_request_is_one_admission():
    history = AdmissionHistory(entries_per_group=8)
    assert [history.admit("a", "named", 1) for _ in range(3)] == [False] * 3
    assert [history.admit("a", "named", 2) for _ in range(3)] == [True] * 3
