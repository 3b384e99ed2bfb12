"""docs/reproduction.md says nothing that the report, made from the result files, does not say."""

import re
from pathlib import Path

from prefixshield.evaluation.report import write_report

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"

#: A number that was measured or reported: it has two or three decimals, or thousands.
FIGURE = re.compile(r"(?<![\w.,])[+-]?\d[\d,]*\.\d{1,3}(?![\w.%])")

#: Decimals that are settings, versions or section numbers, not figures.
SETTINGS = {
    "0.32.0",
    "0.78",
    "1.125",
    "0.059",
    "0.3",
    "1.2",
    "99.2",
    "0.54",
    "1.02",
    "2.14",
    "4.23",
}


def figures_of(text):
    return {found.lstrip("+-") for found in FIGURE.findall(text)} - SETTINGS


def test_the_report_in_the_repository_is_what_the_results_give(tmp_path):
    write_report(RESULTS, tmp_path)
    made = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert made == (RESULTS / "report" / "report.md").read_text(encoding="utf-8")


def test_every_figure_of_the_document_is_in_the_report():
    document = (ROOT / "docs" / "reproduction.md").read_text(encoding="utf-8")
    report = (RESULTS / "report" / "report.md").read_text(encoding="utf-8")
    missing = figures_of(document) - figures_of(report)
    assert not missing, sorted(missing)
