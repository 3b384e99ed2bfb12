"""The report against results made by hand: every expected number is worked out here."""

import json
import os
import subprocess
import sys

import pytest

from prefixshield.errors import PrefixShieldError
from prefixshield.evaluation.experiments import EXPERIMENTS
from prefixshield.evaluation.findings import read_findings
from prefixshield.evaluation.paper import PAPER, reported
from prefixshield.evaluation.report import write_report
from prefixshield.evaluation.results import ResultsFolder

DASH = "\N{EN DASH}"


def make_row(variant, policy, seed, hit_ratio, engine="virtual", **more):
    row = {
        "engine": engine,
        "variant": variant,
        "policy": policy,
        "seed": seed,
        "requests": 100,
        "measured": 50,
        "failed": 0,
        "hit_ratio": hit_ratio,
        "ttft_p50_ms": 10.0,
        "ttft_p95_ms": 100.0,
        "requests_per_s": 2.0,
        "preemptions": 0,
        "max_send_lag_ms": None,
        "materialised": {},
        "evicted": {},
        "promoted": {},
        "peak_blocks": {},
        "mean_debt_blocks": {},
    }
    return {**row, **more}


def make_rows(variant, ratios, engine="virtual", **more):
    """``ratios``: by policy, one for each seed from 1 on."""
    return [
        make_row(variant, policy, seed, ratio, engine, **more)
        for policy, by_seed in ratios.items()
        for seed, ratio in enumerate(by_seed, 1)
    ]


def write(results, folder, rows, **about):
    name = folder.removesuffix("-real").removesuffix("-calibrated")
    description = {
        "title": EXPERIMENTS[name].title,
        "command": f"prefixshield experiment {name}",
        "seeds": [1, 2, 3],
        "commit": "c0ffee",
        "machine": "Abacus, 1 CPU",
    }
    ResultsFolder(results / folder, {**description, **about}).complete(rows)


def report_on(tmp_path, results=None):
    files = write_report(results or tmp_path / "results", tmp_path / "out")
    assert files[0] == tmp_path / "out" / "report.md"
    assert all(file.stat().st_size for file in files)
    return files[0].read_text(encoding="utf-8")


def cells(report, *start):
    """The only line of a table that starts with these cells, as its cells."""
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in report.splitlines()
        if line.startswith("|")
    ]
    found = [line for line in lines if line[: len(start)] == list(start)]
    assert len(found) == 1, f"{len(found)} lines start with {start}"
    return found[0][len(start) :]


def cells_of_table(report, header, *start):
    """As ``cells``, in the table that has this text in its header."""
    tables = [part for part in report.split("\n\n") if header in part.splitlines()[0]]
    return cells("\n".join(tables), *start)


def test_hit_ratio_and_paired_gain_stand_next_to_the_papers(tmp_path):
    # The runs differ far more from each other than the policies do: only pairs show a clear gain.
    rows = make_rows("one-touch", {"lru": [0.1, 0.3, 0.5], "shield": [0.2, 0.4, 0.6]})
    write(tmp_path / "results", "table1", rows[::-1])
    report = report_on(tmp_path)
    paper, ours, paper_gain, gain, runs = cells_of_table(
        report, "gain over lru", "one-touch", "shield"
    )
    assert (paper, paper_gain, runs) == ("14.93", "+9.39 [+7.94, +10.96]", "3")
    assert gain == "+10.00 [+10.00, +10.00]"
    assert ours == "40.00 [20.00, 60.00]"
    wanted = ["5.54", "30.00 [10.00, 50.00]", DASH, DASH, "3"]
    assert cells_of_table(report, "gain over lru", "one-touch", "lru") == wanted


def test_only_runs_of_the_same_seed_are_paired(tmp_path):
    rows = make_rows("one-touch", {"lru": [0.1, 0.2, 0.3], "s3fifo": [0.15, 0.25]})
    rows += [make_row("one-touch", "s3fifo", 9, 1.0)]
    write(tmp_path / "results", "table1", rows)
    report = report_on(tmp_path)
    assert cells_of_table(report, "gain over lru", "one-touch", "s3fifo")[3] == (
        "+5.00 [+5.00, +5.00]"
    )


def test_a_difference_whose_interval_holds_zero_is_a_tie(tmp_path):
    rows = make_rows("ShareGPT-like", {"s3fifo": [0.4, 0.5, 0.6], "shield": [0.42, 0.49, 0.6]})
    rows += make_rows("bursty ShareGPT-like", {"s3fifo": [0.4], "shield": [0.4]})
    write(tmp_path / "results", "table2", rows)
    report = report_on(tmp_path)
    shown = cells(report, "ShareGPT-like", "shield minus s3fifo")[1]
    assert shown.startswith("+0.33 [-1.00, +2.00")
    assert shown.endswith(" tie")
    # One run has no noise to be inside of.
    assert cells(report, "bursty ShareGPT-like", "shield minus s3fifo")[1] == "+0.00"


def test_what_the_attack_costs_and_how_much_of_it_comes_back(tmp_path):
    rows = make_rows("low-and-slow", {"lru": [0.8, 0.6], "shield": [0.9, 0.9]})
    rows += make_rows("low-and-slow, no attack", {"lru": [1.0, 1.0]})
    write(tmp_path / "results", "table1", rows)
    paper, loss, paper_share, share = cells_of_table(
        report_on(tmp_path), "attacked minus no attack", "low-and-slow"
    )
    assert (paper, paper_share) == ("-6.56", "95.5")
    assert loss == "-30.00 [-40.00, -20.00]"
    assert share == "66.7"  # 20 of 30 pp


def test_engines_are_compared_and_flagged_when_they_disagree(tmp_path):
    results = tmp_path / "results"
    ratios = {"lru": [0.5, 0.6, 0.9], "shield": [0.7, 0.8, 0.9]}
    write(results, "table3", make_rows("borrowing", ratios))
    ratios = {"lru": [0.505, 0.605], "shield": [0.72, 0.82]}
    write(results, "table3-real", make_rows("borrowing", ratios, "real", ttft_p95_ms=3210.5))
    report = report_on(tmp_path)
    agreement = report.split("### virtual against real")[1]
    # The means are those of the seeds that both have.
    assert cells(agreement, "borrowing", "lru") == (
        ["55.00", "55.50", "+0.50 [+0.50, +0.50]", "2", ""]
    )
    assert cells(agreement, "borrowing", "shield") == (
        ["75.00", "77.00", "+2.00 [+2.00, +2.00]", "2", "more than 1 pp"]
    )
    assert cells_of_table(report, "P95 TTFT", "borrowing", "lru") == [DASH, "100.0", "3,210.5"]
    assert cells_of_table(report, "gain over lru", "borrowing", "lru")[-1] == "3 / 2"


def test_calibrated_time_is_compared_with_the_real_engine_and_nowhere_else(tmp_path):
    results = tmp_path / "results"
    for folder, engine, ratio in (
        ("table3", "virtual", 0.6),
        ("table3-calibrated", "calibrated", 0.51),
        ("table3-real", "real", 0.5),
    ):
        write(results, folder, make_rows("borrowing", {"lru": [ratio]}, engine))
    report = report_on(tmp_path)
    assert cells(report, "table3") == ["virtual, 1 runs", "real, 1 runs", "calibrated, 1 runs"]
    assert "calibrated: hit ratio" not in report
    agreement = report.split("### calibrated against real")[1]
    assert cells(agreement, "borrowing", "lru") == ["51.00", "50.00", "-1.00", "1", ""]


def test_peak_blocks_are_a_span_over_runs(tmp_path):
    rows = [
        make_row("borrowing", "static-quota", seed, 0.5, peak_blocks={"borrower": blocks})
        for seed, blocks in enumerate((255, 251, 253), 1)
    ]
    rows += [make_row("borrowing", "shield", 1, 0.5)]
    write(tmp_path / "results", "table3", rows)
    report = report_on(tmp_path)
    wanted = [f"254{DASH}255", f"251{DASH}255"]
    assert cells_of_table(report, "virtual: blocks", "borrowing", "static-quota") == wanted
    wanted = [f"509{DASH}510", DASH]  # the run does not say
    assert cells_of_table(report, "virtual: blocks", "borrowing", "shield") == wanted


def test_bounds_are_the_last_columns(tmp_path):
    policies = {"lru": 0.1, "shield": 0.2, "clairvoyant": 0.3, "clairvoyant-victim": 0.4}
    rows = [
        make_row("one-touch", policy, 1, ratio, "serial", ttft_p95_ms=None)
        for policy, ratio in policies.items()
    ]
    rows += [make_row("low-and-slow, no attack", "lru", 1, 0.99, "serial")]
    write(tmp_path / "results", "table1-bounds", rows)
    report = report_on(tmp_path)
    assert cells(report, "Workload") == list(policies)
    assert cells(report, "one-touch") == ["10.00", "20.00", "30.00", "40.00"]
    assert cells(report, "low-and-slow, no attack") == ["99.00", DASH, DASH, DASH]


def test_fig2_measures_pressure_debt_and_turnovers(tmp_path):
    pressure = {"requests": 101, "failed": 1, "materialised": {"attacker": 1600, "victim": 444}}
    rows = [
        make_row("creation ratio 2.14", "lru", 1, 0.1),
        # 100 requests at 2 a second take 50 s; 1600 blocks in 50 s are twice a refill of 16.
        make_row(
            "creation ratio 2.14", "shield", 1, 0.3, mean_debt_blocks={"attacker": 12.5}, **pressure
        ),
        make_row("4096 blocks", "lru", 1, 0.1, materialised={"attacker": 5000, "victim": 3190}),
        make_row("4096 blocks", "shield", 1, 0.9, materialised={"attacker": 4095}),
    ]
    about = {
        "contracts": {"best-effort": {"refill_rate": 16.0, "burst": 128}},
        "variants": {"4096 blocks": {"capacity_blocks": 4095}},
    }
    write(tmp_path / "results", "fig2", rows, **about)
    report = report_on(tmp_path)
    wanted = ["4.92", "10.00", "84.87", "90.00", "+79.95", "+80.00", "1"]
    assert cells_of_table(report, "minus lru", "4096 blocks") == wanted
    wanted = ["2.00", "260.90", "12.50"]
    assert cells_of_table(report, "measured ratio", "creation ratio 2.14") == wanted
    assert cells_of_table(report, "| paper |", "4096 blocks") == ["5.64", "2.00", "1.00"]
    assert (
        "Failed requests, counted as misses: virtual, creation ratio 2.14, shield: 1 of 101."
        in (report)
    )


def test_fig3b_counts_blocks_and_the_advantage(tmp_path):
    rows = [
        make_row("wait 0.5", "shield", 1, 0.9, evicted={"attacker by neutral": 74}),
        make_row(
            "wait 0.5",
            "no-debt-gate",
            1,
            0.5,
            promoted={"attacker": 190, "victim": 7},
            evicted={"attacker by neutral": 2, "victim by neutral": 71, "victim by victim": 5},
        ),
    ]
    write(tmp_path / "results", "fig3b", rows)
    report = report_on(tmp_path)
    assert cells(report, "wait 0.5", "no-debt-gate", "paper") == ["193", "2", "72", DASH]
    assert cells(report, "wait 0.5", "no-debt-gate", "virtual") == ["190", "2", "71", "50.00"]
    assert cells(report, "wait 0.5", "shield", "virtual") == ["0", "74", "0", "90.00"]
    assert cells(report, "wait 0.5", "shield minus no-debt-gate") == ["+35.16", "+40.00"]


def test_presets_stand_side_by_side_on_both_engines(tmp_path):
    results = tmp_path / "results"
    ratios = {"lru": [0.1, 0.2], "shield": [0.5, 0.6], "shield-default": [0.4, 0.7]}
    write(results, "preset", make_rows("one-touch", ratios, preemptions=3))
    ratios = {"lru": [0.1], "shield-default": [0.3]}
    rows = make_rows("one-touch", ratios, "real", ttft_p50_ms=7.25, preemptions=0)
    write(results, "preset-real", rows)
    report = report_on(tmp_path)
    wanted = ["55.00 [40.00, 70.00]", "30.00", "+40.00 [+30.00, +50.00]", "+20.00"]
    wanted += ["+0.00 [-10.00, +10.00] tie", DASH]
    assert cells_of_table(report, "minus lru", "one-touch", "shield-default") == wanted
    wanted = ["10.00", "100.00", "3.00", "7.25", "100.00", "0.00"]
    assert cells_of_table(report, "P50 TTFT", "one-touch", "shield-default") == wanted


def test_what_was_not_run_is_left_out_and_said(tmp_path):
    results = tmp_path / "results"
    write(results, "fig3a", make_rows("one-touch", {"shield": [0.5], "no-segmentation": [0.4]}))
    (results / "fig2").mkdir()
    (results / "fig2" / "partial.jsonl").write_text("{}\n")
    report = report_on(tmp_path)
    assert [line for line in report.splitlines() if line.startswith("## ")] == [
        f"## {EXPERIMENTS['fig3a'].title}"
    ]
    assert cells(report, "fig3a") == ["virtual, 2 runs", "not run", "not run"]
    assert cells(report, "fig2") == ["unfinished", "not run", "not run"]
    assert cells(report, "table1") == ["not run"] * 3
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == (
        ["fig3a.png", "fig3a.svg", "report.md"]
    )
    assert "![fig3a](fig3a.png)" in report


def test_a_section_says_how_its_numbers_came(tmp_path):
    rows = make_rows("borrowing", {"lru": [0.5, 0.5, 0.5]})
    write(tmp_path / "results", "table3", rows, seeds=[4, 5, 6], block_size=16)
    report = report_on(tmp_path)
    assert (
        "*virtual*: `prefixshield experiment table3`; seeds 4 to 6; blocks of 16 tokens; commit "
        "c0ffee; machine Abacus, 1 CPU."
    ) in report


@pytest.fixture
def every_figure(tmp_path):
    """Results of all experiments with a figure."""
    results = tmp_path / "results"
    for name in ("table1", "fig2", "fig3a", "fig3b"):
        rows = []
        for number, (variant, about) in enumerate(EXPERIMENTS[name].variants.items()):
            for index, policy in enumerate(about.policies):
                ratios = {policy: [(10 * index + number + i * i) / 100 for i in range(3)]}
                rows += make_rows(variant, ratios)
        write(results, name, rows)
    return results


REPORT = """
import sys
from pathlib import Path
from prefixshield.evaluation.report import write_report
assert "matplotlib" not in sys.modules
write_report(Path(sys.argv[1]), Path(sys.argv[2]))
print(sorted({"vllm", "torch"} & set(sys.modules)))
"""


def test_same_results_same_bytes_without_an_engine(tmp_path, every_figure):
    def make(folder, hash_seed):
        done = subprocess.run(
            [sys.executable, "-c", REPORT, every_figure, tmp_path / folder],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout == "[]\n"
        return {path.name: path.read_bytes() for path in (tmp_path / folder).iterdir()}

    files = make("one", "1")
    assert len(files) == 9
    assert files == make("two", "2")
    for name, content in files.items():
        assert b"<dc:date>" not in content, name
        assert b"Software" not in content or not name.endswith(".png"), name


def test_figures_show_every_variant_and_the_paper_once(every_figure):
    from prefixshield.evaluation.figures import FIGURES

    def figure(name):
        return FIGURES[name]([read_findings(every_figure, name, name)])

    def places(axes):
        return [label.get_text() for label in axes.get_xticklabels()]

    fig2 = figure("fig2")
    assert [places(axes) for axes in fig2.axes] == [
        ["512", "1024", "2048", "4096"],
        ["0.54", "1.02", "2.14", "4.23"],
        ["40%", "60%", "80%"],
        ["L4, 1.5B", "A100, 1.5B", "A100, 7B"],
    ]
    (legend,) = fig2.legends
    assert [text.get_text() for text in legend.get_texts()] == (
        ["shield minus lru", "the same, evenly paced", "paper"]
    )
    assert places(figure("fig3a").axes[0]) == list(EXPERIMENTS["fig3a"].variants)
    assert [places(axes) for axes in figure("fig3b").axes] == [["0.0", "0.5", "1.0"]] * 4
    table1 = figure("table1")
    assert places(table1.axes[0]) == ["one-touch", "low-and-slow", "two-pass replay"]
    (legend,) = table1.legends
    labels = [text.get_text() for text in legend.get_texts()]
    assert labels[-1] == "paper"
    assert sorted(labels[:-1]) == sorted(
        [*EXPERIMENTS["table1"].variants["one-touch"].policies, "lru, no attack"]
    )


def test_no_results_name_the_command_that_makes_some(tmp_path):
    with pytest.raises(PrefixShieldError, match=r"no finished experiment.*prefixshield experiment"):
        write_report(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def replaced(path, old, new):
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


BROKEN = {
    "header": (lambda f: replaced(f / "runs.csv", "hit_ratio", "hits"), "found the columns"),
    "ratio": (lambda f: replaced(f / "runs.csv", ",0.5,", ",1.5,"), "run 1: found hit_ratio 1.5"),
    "no ratio": (lambda f: replaced(f / "runs.csv", ",0.5,", ",,"), "found hit_ratio None"),
    "not a number": (lambda f: replaced(f / "runs.csv", ",100.0,", ",fast,"), "not the runs of"),
    "text": (lambda f: replaced(f / "runs.csv", ",100.0,", ',"""fast""",'), "ttft_p95_ms 'fast'"),
    "longer line": (lambda f: replaced(f / "runs.csv", ",2.0,", ",2.0,1,"), "runs.csv"),
    "cut off": (lambda f: replaced(f / "runs.csv", ",lru,1,", "\nvirtual"), "runs.csv, run 1"),
    "object": (
        lambda f: replaced(f / "runs.csv", ",0,,,,,,", ",0,,[],,,,"),
        "expected a JSON object",
    ),
    "no runs": (
        lambda f: (f / "runs.csv").write_text(
            (f / "runs.csv").read_text(encoding="utf-8").splitlines()[0]
        ),
        "found no runs",
    ),
    "twice": (lambda f: replaced(f / "runs.csv", ",lru,2,", ",lru,1,"), "run 2: a second one"),
    "not UTF-8": (lambda f: (f / "runs.csv").write_bytes(b"\xff\xfe"), "not the runs of"),
    "json": (lambda f: replaced(f / "experiment.json", "{", "["), "experiment.json: not JSON"),
    "list": (lambda f: (f / "experiment.json").write_text("[]"), "expected an object"),
    "no json": (lambda f: (f / "experiment.json").unlink(), "experiment.json: cannot be read"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_file_that_cannot_be_used_is_one_clear_error(tmp_path, case):
    break_it, message = BROKEN[case]
    results = tmp_path / "results"
    write(results, "table3", make_rows("borrowing", {"lru": [0.5, 0.6]}))
    assert "## Table III" in report_on(tmp_path)
    break_it(results / "table3")
    with pytest.raises(PrefixShieldError, match=message) as error:
        write_report(results, tmp_path / "out")
    assert str(results / "table3") in str(error.value)
    assert "\n" not in str(error.value)


def test_output_that_cannot_be_written_is_an_error(tmp_path):
    write(tmp_path / "results", "table3", make_rows("borrowing", {"lru": [0.5]}))
    (tmp_path / "out").write_text("a file")
    with pytest.raises(PrefixShieldError, match="out: cannot be written"):
        write_report(tmp_path / "results", tmp_path / "out")


def test_the_papers_values_have_the_experiments_names():
    for name, values in PAPER.items():
        if name == "overhead":  # no experiment on requests
            continue
        for variant, policy, quantity in values:
            assert policy in EXPERIMENTS[name].variants[variant].policies, (name, variant, policy)
            if quantity.startswith("minus_") and quantity != "minus_no_attack_pp":
                other = quantity.removeprefix("minus_").removesuffix("_pp")
                assert other in EXPERIMENTS[name].variants[variant].policies, quantity


def test_the_papers_gains_are_differences_of_its_hit_ratios():
    checked = 0
    for name, values in PAPER.items():
        for (variant, policy, quantity), gain in values.items():
            if not quantity.startswith("minus_"):
                continue
            other = quantity.removeprefix("minus_").removesuffix("_pp")
            ratio = reported(name, variant, policy, "hit_ratio")
            base = reported(name, variant, other, "hit_ratio")
            if other == "no_attack":
                base = reported(name, f"{variant}, no attack", policy, "hit_ratio")
            if ratio and base:
                # Each of the three is rounded to 0.01 pp.
                assert 100 * (ratio.value - base.value) == pytest.approx(gain.value, abs=0.0151)
                checked += 1
            assert gain.low is None or gain.low <= gain.value <= gain.high
    assert checked == 9


def test_descriptions_may_lack_what_older_runs_did_not_write(tmp_path):
    results = tmp_path / "results"
    rows = make_rows("512 blocks", {"lru": [0.5], "shield": [0.6]})
    rows += make_rows("creation ratio 0.54", {"lru": [0.5], "shield": [0.6]})
    write(results, "fig2", rows)
    (results / "fig2" / "experiment.json").write_text(json.dumps({}))
    report = report_on(tmp_path)
    assert "## fig2" in report
    wanted = [DASH, "0.00", DASH]
    assert cells_of_table(report, "measured ratio", "creation ratio 0.54") == wanted
