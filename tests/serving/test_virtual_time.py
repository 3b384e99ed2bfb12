"""Virtual time: the real scheduler by a clock of our own; by hand, against replay, and twice."""

import csv
import dataclasses

import pytest

from prefixshield.evaluation import runner
from prefixshield.evaluation.experiments import EXPERIMENTS
from prefixshield.evaluation.profiles import CostModel
from prefixshield.evaluation.run import SHIELD_DEFAULT, workload_config
from prefixshield.evaluation.serial import run_serial
from prefixshield.policies import POLICIES
from prefixshield.traces import TraceRequest, Workload, pollution
from prefixshield.traces.pollution import ATTACKER, VICTIM, Load

pytest.importorskip("vllm")

from prefixshield.evaluation.virtual_time import prefill_capacity, run_virtual_time
from prefixshield.serving.reload import LiveConfig

pytestmark = pytest.mark.engine

COSTS = CostModel(base_ms=10.0, prefill_ms_per_token=0.1, decode_ms_per_sequence=1.0)


def workload(*requests, groups=None):
    made = [
        TraceRequest(line, at_ms, length, output, ids, group, None, None)
        for line, (at_ms, length, output, ids, group) in enumerate(requests, start=1)
    ]
    return Workload("test", 16, groups or {"a": "standard", "b": "standard"}, tuple(made))


def test_times_add_up():
    """By hand, 16 tokens a block.

    The first prompt, 100 tokens: 10 + 100 x 0.1 = 20 ms to its token at 20; a decode step, 10 + 1,
    ends it at 31. The second comes at 25, waits for 31, hits 6 blocks and computes 4 tokens: 10.4,
    so its token is at 41.4, 16.4 after it came.
    """
    one = workload((0.0, 100, 2, tuple(range(6)), "a"), (25.0, 100, 1, tuple(range(6)), "a"))
    run = run_virtual_time(one, workload_config(one, "lru"), 63, COSTS)
    first, second = run.outcomes
    assert (first.cached_tokens, second.cached_tokens) == (0, 96)
    assert first.ttft_ms == pytest.approx(20.0)
    assert second.ttft_ms == pytest.approx(16.4)
    assert run.duration_s == pytest.approx(0.0414)
    assert run.materialised == {"a": 6}
    assert run.peak_blocks == {"a": 6}


def test_the_configuration_is_left_alone_once_the_run_has_begun(monkeypatch):
    """Its file is gone with the run, while the watcher may live as long as the scheduler."""
    kept = []
    watch = LiveConfig.watch
    monkeypatch.setattr(LiveConfig, "watch", lambda live: (kept.append(live), watch(live)))
    one = workload((0.0, 33, 1, (0, 1), "a"))
    run_virtual_time(one, workload_config(one, "shield"), 63, COSTS)
    (live,) = kept
    assert not live.path.exists()
    live.look(at_once=True)
    assert live.refused == 0


def test_namespaces_and_debts():
    """b hits nothing of a's; 300 blocks on a burst of 192 leave 108, and 40 a second clear it."""
    one = workload(
        (0.0, 300 * 16 + 1, 1, tuple(range(300)), "a"),
        (1.0, 33, 1, (0, 1), "b"),
        (5000.0, 33, 1, (0, 1), "b"),
    )
    run = run_virtual_time(one, workload_config(one, "shield"), 400, COSTS)
    assert [outcome.cached_tokens for outcome in run.outcomes] == [0, 0, 32]
    # In chunks of 2,048 tokens, at 0, 0.215 and 0.430 s (10 + 204.8 ms each), 300 blocks are charged;
    # the bucket is full at first and owes 91.4 at 0.430, cleared 2.28 s later. 64 at 0.215 s:
    # 192 - 128 = 64 left, + 8.6 = 72.6, - 128 = -55.4; 46.8 at 0.430, and then 44 more: 90.8.
    # Mean over the 5 s of arrivals: (51.1 x 0.215 + 90.8 x 2.27 / 2) / 5 = 22.8 blocks.
    assert run.mean_debt_blocks["a"] == pytest.approx(22.8, abs=0.5)
    assert run.mean_debt_blocks["b"] == 0


@pytest.mark.parametrize("policy", [*POLICIES, SHIELD_DEFAULT])
def test_far_apart_it_is_serial_replay(policy):
    """Without concurrency and partly filled blocks both engines hit and evict exactly the same."""
    made = pollution.two_pass_replay(5, Load(10.0))
    requests = tuple(
        dataclasses.replace(
            request, timestamp_ms=2000.0 * index, input_length=96 * 16, output_length=1
        )
        for index, request in enumerate(made.requests[:150])
    )
    slow = dataclasses.replace(made, requests=requests)
    config = workload_config(slow, policy)
    virtual = run_virtual_time(slow, config, 300, COSTS)
    serial = run_serial(slow, config, 300)
    assert [o.cached_tokens for o in virtual.outcomes] == [o.cached_tokens for o in serial.outcomes]
    assert virtual.evictions == serial.evictions


def test_what_never_fits_a_share_is_an_outcome():
    one = workload((0.0, 40 * 16, 1, tuple(range(40)), "a"), (1.0, 33, 1, (0, 1), "b"))
    run = run_virtual_time(one, workload_config(one, "static-quota"), 63, COSTS)
    large, small = run.outcomes
    assert large.error is not None
    assert small.error is None


def test_capacity_is_what_the_costs_say():
    """32 prompts of 1,600 tokens: 51,200 tokens in 25 steps of 2,048: 25 x 10 + 5,120 = 5,370 ms."""
    assert prefill_capacity(COSTS, 1600) == pytest.approx(32 / 5.37, rel=0.01)


def test_an_experiment_run_twice_gives_the_same_bytes(tmp_path, monkeypatch):
    """Also in two processes, and resumed half way."""
    short = {
        name: dataclasses.replace(variant, policies=("lru", "shield"))
        for name, variant in list(EXPERIMENTS["fig3b"].variants.items())[:2]
    }
    monkeypatch.setitem(
        EXPERIMENTS, "fig3b", dataclasses.replace(EXPERIMENTS["fig3b"], variants=short)
    )
    done = []

    def run(results, stop_after=None):
        def on_progress(count, total):
            done.append((count, total))
            if count == stop_after:
                raise KeyboardInterrupt

        folder = runner.run_experiment("fig3b", "virtual", range(2), results, 1, on_progress)
        return [(folder / name).read_bytes() for name in ("runs.csv", "experiment.json")]

    first = run(tmp_path / "a")
    assert done == [(n, 8) for n in range(9)]
    assert run(tmp_path / "a") == first
    with pytest.raises(KeyboardInterrupt):  # with all runs done and the files not yet there
        run(tmp_path / "c", stop_after=8)
    assert run(tmp_path / "c") == first
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "b", stop_after=3)
    done.clear()
    assert run(tmp_path / "b") == first
    assert done[0] == (3, 8)
    with (tmp_path / "a" / "fig3b" / "runs.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == 8


def test_the_gate_promotes_nothing_until_the_debt_is_cleared():
    """Fig. 3b: 0 of 193 eligible blocks at a wait of 0 and half, all at the whole clearance."""
    promoted = {}
    for variant in EXPERIMENTS["fig3b"].variants:
        for policy in ("shield", "no-debt-gate"):
            cell = runner.Cell("virtual", variant, policy, 0)
            row = runner.run_cell("fig3b", {}, None, cell)
            promoted[variant, policy] = row["promoted"].get(ATTACKER, 0)
    assert promoted == {
        ("wait 0.0", "shield"): 0,
        ("wait 0.5", "shield"): 0,
        ("wait 1.0", "shield"): 193,
        **{(f"wait {wait}", "no-debt-gate"): 193 for wait in (0.0, 0.5, 1.0)},
    }


def test_the_borrower_is_capped_by_a_quota_and_by_nothing_else():
    """Table III: one share is 255 of 511 blocks."""
    peaks = {}
    for policy in ("lru", "s3fifo", "shield", "static-quota"):
        row = runner.run_cell("table3", {}, None, runner.Cell("virtual", "borrowing", policy, 0))
        peaks[policy] = row["peak_blocks"]["borrower"]
    quota = peaks.pop("static-quota")
    assert 250 <= quota <= 255
    assert all(509 <= peak <= 511 for peak in peaks.values()), peaks


def test_protection_has_the_papers_signs():
    """One run of each attack: shield above LRU; nothing owed, nothing gained at a ratio of 0.54."""
    hits = {}
    for variant in ("one-touch", "low-and-slow", "two-pass replay"):
        for policy in ("lru", "shield"):
            row = runner.run_cell("table1", {}, None, runner.Cell("virtual", variant, policy, 0))
            hits[variant, policy] = row["hit_ratio"]
        assert hits[variant, "shield"] > hits[variant, "lru"]
    assert VICTIM in row["materialised"]


def test_the_default_preset_costs_conversations_nothing():
    """Against LRU, which the paper's preset is far below; both keep debts."""
    rows = {}
    for policy in ("lru", "shield", SHIELD_DEFAULT):
        cell = runner.Cell("virtual", "benign, 80 conversations", policy, 0)
        rows[policy] = runner.run_cell("preset", {}, None, cell)
    hits = {policy: row["hit_ratio"] for policy, row in rows.items()}
    assert hits["shield"] < hits["lru"] - 0.1
    assert abs(hits[SHIELD_DEFAULT] - hits["lru"]) < 0.02
    assert [bool(row["mean_debt_blocks"]) for row in rows.values()] == [False, True, True]
