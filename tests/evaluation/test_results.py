"""Results as files: resumable, replaced as a whole, typed when read back."""

import json
import subprocess

import pytest

from prefixshield.errors import PrefixShieldError
from prefixshield.evaluation.results import (
    COLUMNS,
    ResultsFolder,
    _commit,
    read_rows,
    summarise,
)
from prefixshield.evaluation.run import Outcome, Run
from prefixshield.evaluation.statistics import estimate, percentile
from prefixshield.traces import TraceRequest


def request(line, *, measured=True):
    return TraceRequest(line, 0.0, 100, 1, (), "a", None, None, measured)


def row(seed):
    run = Run([Outcome(request(1), 50 + seed, 12.5)], duration_s=2.0)
    return {"engine": "virtual", "variant": "v", "policy": "lru", "seed": seed, **summarise(run)}


def test_a_run_is_summarised_over_its_measured_requests():
    run = Run(
        [
            Outcome(request(1), 90, 10.0),
            Outcome(request(2), 30, 30.0),
            Outcome(request(3, measured=False), 0, 500.0),
            Outcome(request(4), error="too large"),
        ],
        duration_s=2.0,
    )
    found = summarise(run)
    assert found["requests"] == 4
    assert found["measured"] == 3
    assert found["failed"] == 1
    assert found["hit_ratio"] == 0.4  # (0.9 + 0.3 + 0) / 3: a failed request hit nothing
    assert found["ttft_p50_ms"] == 10.0
    assert found["ttft_p95_ms"] == 30.0
    assert found["requests_per_s"] == 1.5


def test_finished_rows_survive_an_interruption(tmp_path):
    first = ResultsFolder(tmp_path, {"seed": 1})
    assert first.finished_rows() == []
    first.add(row(0))
    with (tmp_path / "partial.jsonl").open("a") as file:
        file.write('{"engine": "virt')  # killed while writing
    second = ResultsFolder(tmp_path, {"seed": 1})
    assert second.finished_rows() == [row(0)]
    second.add(row(1))
    assert ResultsFolder(tmp_path, {"seed": 1}).finished_rows() == [row(0), row(1)]


def test_another_description_begins_anew(tmp_path):
    first = ResultsFolder(tmp_path, {"seed": 1})
    first.finished_rows()
    first.add(row(0))
    assert ResultsFolder(tmp_path, {"seed": 2}).finished_rows() == []


def test_complete_results_are_read_back_and_not_run_again(tmp_path):
    folder = ResultsFolder(tmp_path, {"seed": 1})
    folder.finished_rows()
    folder.complete([row(0), row(1)])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["experiment.json", "runs.csv"]
    assert read_rows(tmp_path) == [row(0), row(1)]
    assert ResultsFolder(tmp_path, {"seed": 1}).finished_rows() == [row(0), row(1)]
    assert json.loads((tmp_path / "experiment.json").read_text()) == {"seed": 1}


def test_the_commit_is_marked_when_what_decides_results_has_changed(tmp_path):
    def git(*arguments):
        who = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        done = ["git", "-C", tmp_path, *who, *arguments]
        return subprocess.run(done, check=True, capture_output=True, text=True).stdout.strip()

    source, trace = tmp_path / "src" / "package" / "results.py", tmp_path / "traces" / "one.jsonl"
    for path in (source, trace, tmp_path / "README.md"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("1")
    assert _commit(source) is None, "no repository"
    git("init")
    assert _commit(source) is None, "it is not in that repository: an environment below another's"
    git("add", ".")
    git("commit", "-m", "one")
    commit = git("rev-parse", "HEAD")
    assert _commit(source) == commit
    (tmp_path / "README.md").write_text("2")
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "runs.csv").write_text("2")
    assert _commit(source) == commit
    trace.write_text("2")
    assert _commit(source) == f"{commit} with changes"
    git("commit", "-am", "two")
    assert _commit(source) == git("rev-parse", "HEAD") != commit
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "new.py").write_text("2")
    assert _commit(source).endswith(" with changes")


def test_unreadable_results_are_named(tmp_path):
    with pytest.raises(PrefixShieldError, match=r"runs\.csv: cannot be read"):
        read_rows(tmp_path)
    (tmp_path / "runs.csv").write_text("a,b\n1,2\n")
    with pytest.raises(PrefixShieldError, match=f"found the columns a, b, expected {COLUMNS[0]}"):
        read_rows(tmp_path)


def test_percentiles_are_values_of_the_sample():
    assert percentile([3.0, 1.0, 2.0, 4.0], 0.5) == 2.0
    assert percentile([3.0, 1.0, 2.0, 4.0], 0.95) == 4.0
    assert percentile([5.0], 0.95) == 5.0


def test_an_estimate_is_the_mean_and_its_interval():
    found = estimate([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0])
    # Standard error of the mean 0.957 (n, as the bootstrap has it 0.908): about 5.5 -/+ 1.78.
    assert found.mean == 5.5
    assert found.low == pytest.approx(5.5 - 1.78, abs=0.25)
    assert found.high == pytest.approx(5.5 + 1.78, abs=0.25)
    assert not found.is_tie
    assert estimate([2.0, 2.0]) == (2.0, 2.0, 2.0)
    assert estimate([-1.0, 1.0, -2.0, 2.0]).is_tie
    assert estimate([1.0, 3.0]) == estimate([1.0, 3.0])
