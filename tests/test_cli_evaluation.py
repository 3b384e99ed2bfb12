"""The commands of the evaluation as a user runs them; the engines themselves: tests/serving."""

import json

import pytest

from prefixshield.cli import main
from prefixshield.evaluation.experiments import EXPERIMENTS
from prefixshield.traces import read_trace


def run(monkeypatch, capsys, *arguments):
    """Exit status, output and errors of ``prefixshield ARGUMENTS``."""
    monkeypatch.setattr("sys.argv", ["prefixshield", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    found = capsys.readouterr()
    return ended.value.code or 0, found.out, found.err


def test_without_a_name_the_experiments_are_listed(monkeypatch, capsys):
    status, out, _ = run(monkeypatch, capsys, "experiment")
    assert status == 0
    assert all(name in out for name in (*EXPERIMENTS, "overhead"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["table9"], "experiment: found 'table9', expected one of: table1, "),
        (
            ["table1-bounds", "--engine", "real"],
            "--engine: found 'real', expected one that table1-bounds runs on: serial",
        ),
    ],
)
def test_what_cannot_be_run_is_one_message(monkeypatch, capsys, arguments, message):
    status, _, err = run(monkeypatch, capsys, "experiment", *arguments)
    assert status == 1
    assert err.startswith(message)
    assert err.count("\n") == 1


def test_a_serial_experiment_and_its_report(monkeypatch, capsys, tmp_path):
    """Bounds are above every policy, and no policy above the victim's own bound."""
    results = tmp_path / "results"
    status, out, _ = run(
        monkeypatch,
        capsys,
        *("experiment", "table1-bounds", "--runs", "1", "--jobs", "1", "--results", results),
    )
    assert (status, out.strip()) == (0, str(results / "table1-bounds"))
    description = json.loads((results / "table1-bounds" / "experiment.json").read_text())
    assert description["command"] == (
        "prefixshield experiment table1-bounds --engine serial --runs 1 --seed 0"
    )
    status, out, _ = run(monkeypatch, capsys, "report", "--results", results)
    assert (status, out.splitlines()[0]) == (0, str(results / "report" / "report.md"))
    report = (results / "report" / "report.md").read_text()
    row = next(line for line in report.splitlines() if line.startswith("| two-pass replay |"))
    *policies, _, victim_bound = [float(cell) for cell in row.split("|")[2:-1]]
    assert max(policies) <= victim_bound


def test_a_report_of_nothing_says_what_to_run(monkeypatch, capsys, tmp_path):
    status, _, err = run(monkeypatch, capsys, "report", "--results", tmp_path)
    assert status == 1
    assert "prefixshield experiment" in err


def test_a_workload_is_a_trace(monkeypatch, capsys, tmp_path):
    path = tmp_path / "one-touch.jsonl.gz"
    status, _, err = run(monkeypatch, capsys, "workload", "one-touch", "--output", path)
    assert (status, err) == (0, "")
    assert {request.group for request in read_trace(path, 16)} == {"victim", "attacker"}
    status, _, err = run(monkeypatch, capsys, "workload", "none", "--output", path)
    assert status == 1
    assert err.startswith("workload: found 'none', expected one of: one-touch, ")
    away = tmp_path / "nowhere" / "t.jsonl"
    status, _, err = run(monkeypatch, capsys, "workload", "one-touch", "--output", away)
    assert (status, err) == (1, f"{away}: cannot be written: No such file or directory\n")


def test_conversations_become_a_trace(monkeypatch, capsys, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"w": 0, "?": 1}, unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    turn = [{"from": "human", "value": "w " * 40}, {"from": "gpt", "value": "w " * 10}]
    chats = [{"id": "a", "conversations": turn * 2}, {"id": "b", "conversations": turn[1:]}]
    (tmp_path / "chats.json").write_text(json.dumps(chats))
    output = tmp_path / "trace.jsonl"
    status, out, _ = run(
        monkeypatch,
        capsys,
        *("conversations", tmp_path / "chats.json", "--tokenizer", tmp_path / "tokenizer.json"),
        *("--rate", "1", "--output", output),
    )
    assert status == 0
    assert out == (
        f"{output}: 2 requests of 1 conversations; 1 without a usable turn were skipped\n"
    )
    first, second = read_trace(output, 16)
    assert first.hash_ids == second.hash_ids[: len(first.hash_ids)]
    assert second.input_length > 2 * 40


@pytest.mark.parametrize(
    ("module", "extra"), [("scipy", "evaluation"), ("vllm.v1", "vllm"), ("libcachesim", "test")]
)
def test_a_missing_extra_is_one_message(monkeypatch, capsys, tmp_path, module, extra):
    def fail(*_):
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    monkeypatch.setattr("prefixshield.evaluation.report.write_report", fail)
    status, _, err = run(monkeypatch, capsys, "report", "--results", tmp_path)
    assert (status, err) == (
        1,
        f"{module.partition('.')[0]} is not installed: pip install 'prefixshield[{extra}]'\n",
    )
