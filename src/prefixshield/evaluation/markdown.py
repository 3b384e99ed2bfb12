"""Markdown: tables, and how numbers of ours and of the paper look in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prefixshield.evaluation.findings import Measured
from prefixshield.evaluation.paper import Reported, reported

#: What is not there.
NOTHING = "\N{EN DASH}"


def value(measured: Measured | None) -> str:
    return _with_interval(measured, ".2f")


def mean(measured: Measured | None) -> str:
    return f"{measured.estimate.mean:.2f}" if measured else NOTHING


def difference(measured: Measured | None) -> str:
    shown = _with_interval(measured, "+.2f")
    return f"{shown} tie" if measured and measured.is_tie else shown


def count(measured: Measured | None) -> str:
    """A count per run; without an interval where all runs agree."""
    if measured is None:
        return NOTHING
    mean, low, high = measured.estimate
    return f"{mean:g}" if low == high else _with_interval(measured, ".1f")


def _with_interval(measured: Measured | None, form: str) -> str:
    if measured is None:
        return NOTHING
    mean, low, high = (_rounded(value, form) for value in measured.estimate)
    return f"{mean} [{low}, {high}]" if measured.has_interval else mean


def reported_percent(name: str, variant: str, policy: str) -> str:
    ratio = reported(name, variant, policy, "hit_ratio")
    return f"{100 * ratio.value:.2f}" if ratio else NOTHING


def reported_difference(paper: Reported | None) -> str:
    if paper is None:
        return NOTHING
    if paper.low is None or paper.high is None:
        return _rounded(paper.value, "+.2f")
    return f"{paper.value:+.2f} [{paper.low:+.2f}, {paper.high:+.2f}]"


def _rounded(value: float, form: str) -> str:
    return format(round(value, 2) + 0.0, form)  # + 0.0: no minus sign before zero


def span(values: Sequence[float | None]) -> str:
    known = sorted({value for value in values if value is not None})
    if not known:
        return NOTHING
    low, high = known[0], known[-1]
    return f"{low:g}" if low == high else f"{low:g}{NOTHING}{high:g}"


def table(header: Sequence[str], rows: Sequence[Sequence[Any]], names: int = 2) -> str:
    """Markdown; the first ``names`` columns are text, the others numbers."""
    rule = ["---"] * names + ["--:"] * (len(header) - names)
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in (header, rule, *rows))
