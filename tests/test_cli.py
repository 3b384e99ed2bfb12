"""The command as users run it, in a process of its own."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest

TRACES = Path(__file__).parent.parent / "traces"

CONFIG = """
contracts: {std: {refill_rate: 1, burst: 2}}
groups: {a: {contract: std, keys: [{env: NOT_SET_ANYWHERE}]}, b: {contract: std}}
default_group: a
"""


def run(*arguments, cwd=None):
    return subprocess.run(
        [sys.executable, "-c", "from prefixshield.cli import main; main()", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=cwd,
    )


@pytest.fixture
def files(tmp_path):
    """A configuration and a gzipped trace: the first golden case of serial replay, in ms."""
    rows = [
        {"timestamp": 0, "input_length": 8, "hash_ids": [1, 2], "group": "a"},
        {"timestamp": 0, "input_length": 12, "hash_ids": [11, 12, 13], "group": "b"},
        {"timestamp": 0, "input_length": 8, "hash_ids": [1, 2]},
        {"timestamp": 0, "input_length": 20, "hash_ids": [21, 22, 23, 24, 25], "group": "c"},
    ]
    trace = tmp_path / "trace.jsonl.gz"
    trace.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    config = tmp_path / "tenants.yaml"
    config.write_text(CONFIG)
    return trace, config


def replay(files, *more):
    trace, config = files
    return run("replay", trace, "--blocks", 4, "--block-size", 4, "--config", config, *more)


def test_replay_prints_one_json_object_and_writes_the_event_log(files, tmp_path):
    events = tmp_path / "events.jsonl"
    done = replay(files, "--policy", "shield", "--preset", "paper", "--events", events, "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert {k: result[k] for k in ("policy", "preset", "blocks", "block_size")} == {
        "policy": "shield",
        "preset": "paper",
        "blocks": 4,
        "block_size": 4,
    }
    counts = {"requests": 4, "rejected": 1, "blocks_queried": 7, "blocks_hit": 1}
    assert {k: result[k] for k in counts} == counts
    assert result["hit_ratio"] == 1 / 7
    assert result["groups"]["a"] == {
        "requests": 2,
        "rejected": 0,
        "blocks_queried": 4,
        "blocks_hit": 1,
        "hit_ratio": 0.25,
    }
    assert result["groups"]["c"]["rejected"] == 1
    assert result["evictions"] == [
        {"owner": "a", "causer": "b", "blocks": 1},
        {"owner": "b", "causer": "a", "blocks": 1},
    ]
    assert (
        "1 requests are larger than the pool of 4 blocks and were skipped (lines 4)" in done.stderr
    )
    log = [json.loads(line) for line in events.read_text().splitlines()]
    assert log[-3:] == [
        {"t": 0.0, "event": "promote", "group": "a", "block": 1, "class": "reuse", "by": "a"},
        {"t": 0.0, "event": "evict", "group": "b", "block": 13, "class": "probationary", "by": "a"},
        {"t": 0.0, "event": "admit", "group": "a", "block": 2, "class": "probationary", "by": "a"},
    ]


def test_replay_prints_tables(files):
    done = replay(files, "--policy", "lru")
    assert done.returncode == 0, done.stderr
    for word in (
        "lru",
        "requests",
        "hits",
        "misses",
        "evicted as owner",
        "evicted as causer",
        "all",
    ):
        assert word in done.stdout


def test_replay_is_the_same_every_time(files):
    assert replay(files, "--json").stdout == replay(files, "--json").stdout


def test_replay_needs_no_configuration(files):
    trace, _ = files
    done = run("replay", trace, "--blocks", 4, "--block-size", 4, "--json")
    assert done.returncode == 0, done.stderr
    assert set(json.loads(done.stdout)["groups"]) == {"a", "b", "default", "c"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--blocks", 0], "Invalid value for '--blocks'"),
        (["--blocks", 10**12], "Invalid value for '--blocks'"),
        (["--policy", "arc"], "'arc' is not one of"),
        (["--config", "gone.yaml"], "gone.yaml: cannot be read: No such file or directory"),
        (["--events", "no/such/folder/e.jsonl"], "cannot be written: No such file or directory"),
        (["--block-size", 16], "is --block-size that of the trace?"),
    ],
)
def test_a_mistake_is_one_message_and_leaves_nothing(files, tmp_path, change, message):
    before = sorted(tmp_path.iterdir())
    done = replay(files, *change)
    assert done.returncode in (1, 2)
    assert message in " ".join(done.stderr.replace("│", " ").split())
    assert "Traceback" not in done.stderr
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["replay", "t.gz", "--events", "t.gz"], "--events: found t.gz, which is read"),
        (["replay", "t.gz", "--events", "sub/../link"], "--events: found sub/../link, which is"),
        (["replay", "t.gz", "--config", "c", "--events", "c"], "--events: found c, which is read"),
        (["compare", "link", "t.gz", "--csv", "t.gz"], "--csv: found t.gz, which is read"),
        (["compare", "t.gz", "--config", "c", "--csv", "c"], "--csv: found c, which is read"),
        (["calibrate", "t.gz", "--output", "link"], "--output: found link, which is read"),
        (
            ["calibrate", "t.gz", "--output", "new", "--picture", "sub/../new"],
            "--picture: found sub/../new, which is written by --output",
        ),
        (["mix", "t.gz", "a.csv", "--output", "a.csv"], "--output: found a.csv, which is read"),
        (["mix", "t.gz", "a.csv", "--output", "link"], "--output: found link, which is read"),
        (
            ["conversations", "c", "--tokenizer", "a.csv", "--rate", 1, "--output", "a.csv"],
            "--output: found a.csv, which is read",
        ),
        (
            ["bench-core", "--results", "results", "--trace", "results/bench-core/t.gz"],
            "--results: found results/bench-core, which is read",
        ),
        (
            ["harmless", "--results", "results", "--traces", "results/harmless"],
            "--results: found results/harmless, which is read",
        ),
    ],
)
def test_what_is_read_is_not_written_over(files, tmp_path, command, message):
    trace, config = files
    (tmp_path / "sub").mkdir()
    for folder in ("bench-core", "harmless"):
        (tmp_path / "results" / folder).mkdir(parents=True)
        (tmp_path / "results" / folder / "t.gz").write_bytes(trace.read_bytes())
    trace.rename(tmp_path / "t.gz")
    config.rename(tmp_path / "c")
    (tmp_path / "link").symlink_to("t.gz")
    (tmp_path / "a.csv").write_text("kept")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    sizes = ["--blocks", 4, "--block-size", 4]
    needed = sizes if command[0] in ("replay", "compare", "calibrate") else []
    done = run(*command, *needed, cwd=tmp_path)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(message)
    assert line.endswith("expected another path")
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    "command",
    [
        "experiment table1-bounds --results",
        "report --output",
        "harmless --results",
        "bench-core --results",
        "worst-case --output",
    ],
)
def test_a_folder_that_cannot_be_is_one_message_before_anything_runs(tmp_path, command):
    (tmp_path / "file").touch()
    done = run(*command.split(), "file", cwd=tmp_path)
    assert done.returncode == 2
    assert "'file' is a file" in done.stderr
    (tmp_path / "traces").symlink_to(TRACES)
    if not command.startswith("report"):  # of which there is nothing to report before
        done = run(*command.split(), "file/below", cwd=tmp_path)
        assert done.returncode == 1
        assert done.stderr.endswith("cannot be written: Not a directory\n")
        assert done.stderr.count("\n") == 1


def test_an_unknown_contract_in_a_trace_names_file_and_line(files, tmp_path):
    _, config = files
    trace = tmp_path / "bad.jsonl"
    row = {"timestamp": 0, "input_length": 8, "hash_ids": [1, 2], "contract": "gold"}
    trace.write_text(json.dumps(row))
    events = tmp_path / "events.jsonl"
    events.write_text("kept")
    done = replay((trace, config), "--events", events)
    assert done.returncode == 1
    assert done.stderr.strip() == (f"{trace}: line 1: contract: found 'gold', expected one of: std")
    assert events.read_text() == "kept"


def test_events_may_go_to_a_pipe_and_through_a_link(files, tmp_path):
    done = replay(files, "--events", "/dev/stderr", "--json")
    assert done.returncode == 0
    assert '{"t": 0.0, "event": "admit", "group": "a", "block": 1' in done.stderr
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert replay(files, "--events", tmp_path / "link").returncode == 0
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text().count("\n") > 5


def test_an_empty_trace_has_no_requests(files, tmp_path):
    trace = tmp_path / "empty.jsonl"
    trace.write_text("")
    done = replay((trace, files[1]), "--json")
    assert json.loads(done.stdout)["requests"] == 0
    assert json.loads(done.stdout)["hit_ratio"] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config", "gone.yaml"], "gone.yaml: cannot be read: No such file or directory"),
        (
            ["--config", "tenants.yaml"],
            "groups.a.keys.0.env: found 'NOT_SET_ANYWHERE', which is not set",
        ),
        (
            ["--config", "ok.yaml", "--api-key", "x"],
            "--api-key: not with prefixshield serve: API keys belong in",
        ),
        (
            ["--config", "ok.yaml", "--scheduler_cls=x"],
            "--scheduler-cls: not with prefixshield serve",
        ),
        (["--config", "ok.yaml", "--grpc"], "--grpc: not with prefixshield serve: gRPC bypasses"),
        (
            ["--config", "ok.yaml", "--additional-config", "[1]"],
            "--additional-config: found '[1]', expected a JSON object",
        ),
    ],
)
def test_serve_refuses_before_it_starts_anything(files, tmp_path, arguments, message):
    (tmp_path / "ok.yaml").write_text(CONFIG.replace("{env: NOT_SET_ANYWHERE}", "sk-a"))
    done = run("serve", "some/model", *arguments, cwd=tmp_path)
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_version():
    from prefixshield import __version__

    assert run("--version").stdout.strip() == f"prefixshield {__version__}"
