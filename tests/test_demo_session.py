"""The session's own judgement: what it takes for seen, and what it refuses."""

from __future__ import annotations

import json
from collections import Counter

import pytest

pytest.importorskip("openai")
pytest.importorskip("websockets")

from demo import phases
from demo.phases import Phase, Sending, SessionError, Traffic, slope
from demo.session import RESULTS_FOLDER, _accepted_at
from demo.session_report import summary
from demo.traffic import HOT_PREFIXES, PREFIX_TOKENS, TENANTS, Outcome
from prefixshield.top import Snapshot


def test_the_victims_prefixes_come_back_and_the_attackers_prompts_once() -> None:
    traffic = Traffic(7)
    first, second = traffic.rounds(2, attack=True), traffic.rounds(1, attack=True)
    assert len(first) == 2 * len(second) == 4 * HOT_PREFIXES
    victim, attacker = (
        [one.prompt for one in (*first, *second) if one.tenant == tenant] for tenant in TENANTS
    )
    assert len(set(victim)) == 3 * HOT_PREFIXES
    assert len({prompt[:PREFIX_TOKENS] for prompt in victim}) == HOT_PREFIXES
    assert attacker[::2] == attacker[1::2]
    assert len({prompt[:PREFIX_TOKENS] for prompt in attacker}) == len(attacker) / 2
    assert {one.tenant for one in traffic.rounds(1, attack=False)} == {"victim"}


def reading(time: float, **values: float) -> Snapshot:
    found = Snapshot(time)
    found.values["query_tokens"] = Counter({("victim",): int(values.get("queries", 0))})
    found.values["hit_tokens"] = Counter({("victim",): int(values.get("hits", 0))})
    outcomes = {"accepted": values.get("accepted", 0), "refused": values.get("refused", 0)}
    found.values["reloads"] = Counter({(name,): int(n) for name, n in outcomes.items()})
    return found


@pytest.mark.parametrize(
    ("answered", "error", "message"),
    [
        ((100, 60), None, None),
        ((100, 61), None, "/metrics counts .*60.*, the answers say .*61"),
        ((100, 60), "APITimeoutError: late", "a request failed: victim: APITimeoutError: late"),
    ],
)
def test_answers_and_metrics_must_agree(monkeypatch, answered, error, message) -> None:
    readings = iter([reading(0, queries=5, hits=5)])
    monkeypatch.setattr(
        phases, "fetch", lambda url: next(readings, reading(9, queries=105, hits=65))
    )
    monkeypatch.setattr(phases, "COUNTERS_WAIT_S", 0)

    async def send_all(plan, base_url, model, keys, on_outcome):
        outcome = Outcome(plan[0], *answered, error=error)
        on_outcome(outcome)
        return [outcome]

    monkeypatch.setattr(phases, "send_all", send_all)
    sending = Sending(Traffic(7).rounds(1, attack=False), "http://x", {}, lambda *_: None)
    if message is None:
        assert sending.finish().hit_ratio("victim") == 0.6
    else:
        with pytest.raises(SessionError, match=message):
            sending.finish()


def test_a_version_counts_only_when_it_is_accepted() -> None:
    def phase(*readings: Snapshot) -> Phase:
        return Phase([], readings)

    old, new = reading(0, accepted=3, refused=1), reading(2, accepted=4, refused=1)
    assert _accepted_at(phase(old, reading(1, accepted=3, refused=1), new, new)) == 2
    with pytest.raises(SessionError, match="0 accepted and 0 refused"):
        _accepted_at(phase(old, old))
    with pytest.raises(SessionError, match="0 accepted and 1 refused"):
        _accepted_at(phase(old, reading(1, accepted=3, refused=2)))


def test_a_slope_needs_three_readings() -> None:
    assert slope([(0, 100), (1, 92), (2, 84), (4, 68)]) == pytest.approx(-8)
    with pytest.raises(SessionError, match="found 2 readings"):
        slope([(0, 100), (1, 92)])


def test_the_page_that_is_checked_in_says_what_its_figures_say() -> None:
    found = json.loads((RESULTS_FOLDER / "summary.json").read_text(encoding="utf-8"))
    assert (RESULTS_FOLDER / "summary.md").read_text(encoding="utf-8") == summary(found)
    assert (RESULTS_FOLDER / "page.png").exists()
