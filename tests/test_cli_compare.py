"""``prefixshield compare`` and the bound for one group, as users run them."""

import csv
import json
import subprocess
import sys

import pytest


def run(*arguments):
    return subprocess.run(
        [sys.executable, "-c", "from prefixshield.cli import main; main()", *map(str, arguments)],
        capture_output=True,
        text=True,
    )


def write(path, groups):
    rows = [
        {"timestamp": 10 * i, "input_length": 9, "hash_ids": [i % 3, 100 + i % 3], "group": group}
        for i, group in enumerate(groups)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.fixture
def trace(tmp_path):
    return write(tmp_path / "trace.jsonl", "abaabbaaab")


def compare(trace, *more):
    return run("compare", trace, "--block-size", 4, "--blocks", "4,50%", "--jobs", 1, *more)


def test_it_prints_a_table_per_trace_and_one_by_group(trace, tmp_path):
    other = write(tmp_path / "other.jsonl", "aaaaaa")
    done = compare(trace, other, "--per-group")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert f"{trace}: 10 requests, 12 unique blocks" in lines
    assert f"{other}: 6 requests, 6 unique blocks" in lines
    assert done.stdout.count("clairvoyant ┃") == 4
    assert done.stdout.count("┃ group ┃") == 2
    assert done.stdout.count("6 (50%) │") == 1 + 2  # the first trace's, all groups and each
    assert done.stdout.count("3 (50%) │") == 1 + 1


def test_it_is_the_same_every_time_on_any_number_of_processes(trace):
    one, two = compare(trace, "--policies", "all"), compare(trace, "--policies", "all", "--jobs", 2)
    assert one.returncode == 0, one.stderr
    assert one.stdout == two.stdout


def test_json_agrees_with_replay_and_csv_with_json(trace, tmp_path):
    out = tmp_path / "scores.csv"
    done = compare(trace, "--refill-scale", "0.5,2", "--per-group", "--json", "--csv", out)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert (answer["block_size"], answer["preset"]) == (4, "default")
    (one,) = answer["traces"]
    assert one["groups"] == ["a", "b"]
    (lru,) = (
        score
        for score in one["scores"]
        if (score["policy"], score["blocks"], score["group"]) == ("lru", 4, "b")
    )
    alone = run("replay", trace, "--blocks", 4, "--block-size", 4, "--policy", "lru", "--json")
    expected = json.loads(alone.stdout)["groups"]["b"]
    assert {key: lru[key] for key in expected} == expected

    with out.open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == len(one["scores"])
    for line, score in zip(lines, one["scores"], strict=True):
        whole = {"trace": one["trace"], "unique_blocks": one["unique_blocks"], **score}
        assert line == {key: "" if value is None else str(value) for key, value in whole.items()}


def test_too_many_groups_for_a_table_are_said_so(tmp_path):
    done = compare(write(tmp_path / "many.jsonl", "abcdefghijk"), "--per-group")
    assert done.returncode == 0
    assert done.stdout.count("┃ clairvoyant ┃") == 1
    assert "11 groups are too many for a table, which takes 10" in done.stderr


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--policies", "arc"], "--policies: found 'arc', expected all, or some of: lru, "),
        (["--blocks", "many"], "--blocks: found 'many', expected blocks, from 1 to "),
        (["--blocks", 10**12], "--blocks: found '1000000000000', expected blocks"),
        (["--refill-scale", "-1"], "--refill-scale: found '-1', expected a number greater than 0"),
        (["--config", "gone.yaml"], "gone.yaml: cannot be read: No such file or directory"),
        (["gone.jsonl"], "gone.jsonl: cannot be read: No such file or directory"),
        (["--csv", "no/such/folder/s.csv"], "cannot be written: No such file or directory"),
        (["--block-size", 16], "is --block-size that of the trace?"),
    ],
)
def test_a_mistake_is_one_message_and_leaves_nothing(trace, tmp_path, change, message):
    done = compare(trace, "--csv", tmp_path / "scores.csv", *change)
    assert done.returncode == 1
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""
    assert sorted(tmp_path.iterdir()) == [trace]


def test_replay_for_one_group(trace):
    def hits(*more):
        done = run("replay", trace, "--blocks", 4, "--block-size", 4, "--json", *more)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    for_b = hits("--policy", "clairvoyant", "--for-group", "b")
    assert for_b["for_group"] == "b"
    for_all = hits("--policy", "clairvoyant")
    assert for_b["groups"]["b"]["blocks_hit"] > for_all["groups"]["b"]["blocks_hit"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--policy", "lru", "--for-group", "b"], "--for-group: found the policy 'lru', expected "),
        (
            ["--policy", "clairvoyant", "--for-group", "z"],
            "--for-group: found 'z', expected a group of the trace: a, b",
        ),
    ],
)
def test_replay_for_one_group_needs_the_clairvoyant_and_the_group(trace, more, message):
    done = run("replay", trace, "--blocks", 4, "--block-size", 4, *more)
    assert done.returncode == 1
    assert done.stderr.startswith(message)
