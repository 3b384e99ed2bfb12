"""What `prefixshield harmless` says is what replays by hand give."""

import csv
import random
from dataclasses import replace

import pytest

from prefixshield.cli import main
from prefixshield.config import paper_config
from prefixshield.core import ghosts, order, trial
from prefixshield.errors import PrefixShieldError
from prefixshield.evaluation import harmless
from prefixshield.evaluation.harmless import DEFAULT, LRU, PAPER, S3FIFO, Job, Score, Source
from prefixshield.evaluation.harmless_report import distances, margins, summary, write_report
from prefixshield.evaluation.variations import ABLATIONS, CONSTANTS, UNCHANGED, varied
from prefixshield.policies import adaptive
from prefixshield.sim.replay import Replay, replay_policy
from prefixshield.traces import TraceRequest, read_trace, write_trace

VARIATIONS = [*ABLATIONS, *(name for values in CONSTANTS.values() for name in values)]


@pytest.fixture
def source(tmp_path):
    """A small trace, every fifth request of it not measured, as the input ``small``."""
    rng = random.Random(1)
    rows = []
    for line in range(1, 501):
        group = rng.choice("aab")
        first = 1000 * rng.randrange(12 if group == "a" else 60)
        ids = tuple(range(first, first + rng.randint(1, 6)))
        contract = {"a": "critical", "b": "best-effort"}[group]
        rows.append(
            TraceRequest(
                line, 20.0 * line, len(ids) * 4 + 1, 0, ids, group, contract, None, line % 5 > 0
            )
        )
    write_trace(tmp_path / "small_bs4.jsonl.gz", rows)
    return Source("trace", "small", 0, tmp_path / "small_bs4.jsonl.gz", 4)


def score(policy, hit, *, scale=None, section="benign", name="one", seed=0, variation=UNCHANGED):
    """A score at one place, whose hit ratio is ``hit`` percent."""
    return Score(
        section,
        "mixture",
        name,
        seed,
        10,
        50,
        policy,
        scale,
        variation,
        9,
        0,
        1000,
        round(10 * hit),
    )


@pytest.mark.parametrize("policy", [LRU, S3FIFO, PAPER, DEFAULT])
def test_a_score_counts_the_measured_requests_of_one_replay(source, policy):
    requests = read_trace(source.path, 4)
    unique = len({(one.group, block) for one in requests for block in one.hash_ids})
    scale = 0.25 if policy in (PAPER, DEFAULT) else None
    config = paper_config()
    if scale:
        contracts = {
            name: terms.model_copy(update={"refill_rate": terms.refill_rate / 4})
            for name, terms in config.contracts.items()
        }
        config = config.model_copy(update={"preset": policy, "contracts": contracts})
    else:
        config = config.model_copy(update={"policy": policy})
    events = []
    replay = Replay(config, replay_policy(config, round(unique / 4), requests, 4), 4)
    replay.run(requests, events.append)

    found = harmless.measure(Job("benign", source, 25, policy, scale))

    # What was not admitted was hit; a request happens at a time of its own.
    admitted = [one["t"] for one in events if one["event"] == "admit"]
    measured = [one for one in requests if one.measured]
    blocks = sum(len(one.hash_ids) for one in measured)
    times = {one.timestamp_ms / 1000 for one in measured}
    assert found.blocks == round(unique / 4)
    assert (found.requests, found.rejected, found.blocks_queried) == (len(measured), 0, blocks)
    assert found.blocks_hit == blocks - sum(t in times for t in admitted)
    assert 0 < found.blocks_hit < blocks


def test_one_group_sends_everything_when_alone(source):
    alone = harmless.load(replace(source, alone=True))
    assert {(one.group, one.contract) for one in alone} == {("alone", "standard")}
    assert [one.hash_ids for one in alone] == [one.hash_ids for one in harmless.load(source)]


def test_requests_name_the_contracts_of_their_workload():
    requests = harmless.load(Source("paper", "low-and-slow"))
    assert {(one.group, one.contract) for one in requests} == {
        ("victim", "critical"),
        ("attacker", "best-effort"),
    }


def test_a_variation_changes_the_policy_and_leaves_nothing_behind(source):
    owners = (trial, order, ghosts, adaptive, trial.Trial)
    before = [dict(vars(owner)) for owner in owners]
    for name in VARIATIONS:
        with varied(name):
            changed = [dict(vars(owner)) for owner in owners]
        assert changed != before, name
        assert [dict(vars(owner)) for owner in owners] == before, name
    with pytest.raises(PrefixShieldError, match="variation: found 'debts'"), varied("debts"):
        pass


def test_variations_are_what_they_say():
    calls = {name: {rule.calls_in_debts for rule in rules()} for name, rules in _rules().items()}
    assert calls["debts always called in"] == {True}
    assert calls["debts never called in"] == {False}
    for share in trial.PROVEN_SHARES:
        with varied(f"proven share {share:g} alone"):
            assert {rule.proven_share for rule in trial.RULES} == {share}
    with varied("MAX_CHANCES = 7"):
        assert order.MAX_CHANCES == 7


def _rules():
    def of(name):
        def rules():
            with varied(name):
                return trial.RULES

        return rules

    return {name: of(name) for name in ("debts always called in", "debts never called in")}


def test_every_variation_can_be_replayed(source):
    unchanged = harmless.measure(Job("ablations", source, 10, DEFAULT, 0.25)).blocks_hit
    hits = {
        name: harmless.measure(Job("ablations", source, 10, DEFAULT, 0.25, name)).blocks_hit
        for name in ABLATIONS
    }
    assert len({unchanged, *hits.values()}) > 3, hits
    assert harmless.measure(Job("ablations", source, 10, DEFAULT, 0.25)).blocks_hit == unchanged


def test_distances_and_margins_are_to_scores_of_the_same_place():
    scores = [
        score(LRU, 50.0),
        score(S3FIFO, 60.0),
        score(PAPER, 40.0, scale=1.0),
        score(DEFAULT, 58.5, scale=1.0),
        score(LRU, 10.0, seed=1),
        score(S3FIFO, 5.0, seed=1),
        score(DEFAULT, 12.0, scale=4.0, seed=1),
        score(LRU, 30.0, section="attacks"),
        score(PAPER, 40.0, section="attacks", scale=1.0),
        score(PAPER, 45.0, section="attacks", scale=4.0),
        score(DEFAULT, 39.6, section="attacks", scale=1.0),
        score(DEFAULT, 44.4, section="attacks", scale=4.0),
    ]
    assert [one.points for one in distances(scores, "benign")] == [-20.0, -1.5, 2.0]
    assert [one.broken for one in margins(scores, "attacks")] == [False, True]
    text = summary(scores, {})
    assert "| default, all scales | 2 | 1 | -1.50 | +0.25 | 35.25 | 30.00 | 32.50 |" in text
    assert "1 of 2 rows break a bound." in text
    assert "| one, seed 0 | 10% | 4 | 30.00 | 45.00 | 44.40 | -0.60 | +14.40 |" in text


def test_sections_are_replaced_one_by_one_and_bytes_are_the_same(source, tmp_path, monkeypatch):
    def small(section, sources):
        yield from harmless._against_baselines(section, source, (1.0,), sizes=(10,))

    monkeypatch.setattr(harmless, "SECTIONS", {"benign": small, "alone": small})
    output = tmp_path / "harmless"
    harmless.run("alone", [source], output)
    harmless.run("benign", [source], output, processes=2)
    with (output / "scores.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["section"] for row in rows] == ["benign"] * 4 + ["alone"] * 4
    assert rows[0] == {**rows[4], "section": "benign"}
    written = write_report(output)
    assert [path.name for path in written] == ["summary.md", "harm.png"]
    first = {path.name: path.read_bytes() for path in output.iterdir()}
    harmless.run("benign", [source], output)
    write_report(output)
    assert {path.name: path.read_bytes() for path in output.iterdir()} == first


def test_the_command_runs_the_sections_asked_for(source, tmp_path, monkeypatch, capsys):
    def small(section, sources):
        assert [one.name for one in sources if one.kind == "trace"] == ["small"]
        yield from harmless._against_baselines(section, source, (1.0,), sizes=(10,))

    monkeypatch.setattr(harmless, "SECTIONS", {"benign": small, "alone": small})
    options = f"--section alone --traces {tmp_path} --results {tmp_path} --jobs 1"
    monkeypatch.setattr("sys.argv", ["prefixshield", "harmless", *options.split()])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    assert capsys.readouterr().out.split() == [str(tmp_path / "harmless" / "summary.md")]
    manifest = harmless.read_manifest(tmp_path / "harmless")
    assert {name: how["replays"] for name, how in manifest.items()} == {"alone": 4}


def test_inputs_come_from_the_folder_and_from_the_command_line(tmp_path):
    requests = [TraceRequest(1, 0.0, 5, 0, (1,), "a", None, None)]
    write_trace(tmp_path / "b_bs4.jsonl.gz", requests)
    (tmp_path / "vtc_arena_arrivals.csv").write_text("client,arrival_s\nx,1\n")
    extra = [harmless.parse_trace(f"{tmp_path}/c.d/e_bs16.jsonl.gz:16")]
    with pytest.raises(PrefixShieldError, match=r"e_bs16\.jsonl\.gz', expected a file"):
        harmless.benign_sources(tmp_path, extra)
    (tmp_path / "c.d").mkdir()
    write_trace(extra[0][0], requests)
    found = harmless.benign_sources(tmp_path, extra)
    assert [one.name for one in found if one.path] == ["b", "e", "b by vtc_arena"]
    assert {one.name for one in found if one.kind == "mixture"} == set(harmless.BENIGN)
    assert len(harmless.load(found[2])) == 1
    with pytest.raises(PrefixShieldError, match="expected PATH:BLOCK_SIZE"):
        harmless.parse_trace("trace.jsonl")
    with pytest.raises(PrefixShieldError, match="--section: found 'x'"):
        harmless.chosen(["x"])
