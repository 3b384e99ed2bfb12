"""Findings: the result files of one experiment, read back and paired.

Runs are matched by variant and seed. Percentages are 0-100 and differences percentage points, as
the paper gives them. Nothing here runs an engine.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from prefixshield.errors import PrefixShieldError
from prefixshield.evaluation.results import KEYS, Row, read_rows
from prefixshield.evaluation.statistics import Estimate, estimate

#: What the name of an attack's control ends with.
NO_ATTACK = ", no attack"

#: What the name of a variant ends with whose attacker keeps an even pace.
EVENLY = ", evenly"


class Measured(NamedTuple):
    """A mean over runs, with its 95% confidence interval."""

    estimate: Estimate
    runs: int

    @property
    def has_interval(self) -> bool:
        """One run says nothing about its noise."""
        return self.runs > 1

    @property
    def is_tie(self) -> bool:
        """Whether a difference is inside the noise."""
        return self.has_interval and self.estimate.is_tie


class Findings:
    """One experiment on one engine: its runs, and how they came."""

    def __init__(self, name: str, description: Mapping[str, Any], rows: Sequence[Row]) -> None:
        self.name = name
        self.description = description
        self.rows = rows
        self.engine: str = rows[0]["engine"]
        #: Variants with their policies, in the order of the file.
        self.policies: dict[str, list[str]] = {}
        self._runs: dict[tuple[str, str], dict[int, Row]] = {}
        for row in rows:
            key = (row["variant"], row["policy"])
            if key not in self._runs:
                self.policies.setdefault(row["variant"], []).append(row["policy"])
            self._runs.setdefault(key, {})[row["seed"]] = row

    def runs(self, variant: str, policy: str) -> Mapping[int, Row]:
        """By seed; empty: there are none."""
        return self._runs.get((variant, policy), {})

    def mean(
        self, variant: str, policy: str, value: Callable[[Row], float | None]
    ) -> Measured | None:
        """The mean of a value over the runs that have it; None: no run has."""
        return _measured(value(row) for row in self.runs(variant, policy).values())

    def hit_percent(
        self, variant: str, policy: str, seeds: Collection[int] | None = None
    ) -> Measured | None:
        """The mean hit ratio, over the runs of these seeds only if there are any given."""
        runs = self.runs(variant, policy).items()
        return _measured(_hit_percent(r) for seed, r in runs if seeds is None or seed in seeds)

    def difference_pp(
        self, variant: str, policy: str, other: str, other_variant: str | None = None
    ) -> Measured | None:
        """Hit ratio of a policy minus another's over matched runs; None: there are none."""
        others = self.runs(other_variant or variant, other)
        return _difference(self.runs(variant, policy), others)

    def difference_to_pp(self, engine: Findings, variant: str, policy: str) -> Measured | None:
        """Hit ratio here minus that on another engine, over matched runs; None: there are none."""
        return _difference(self.runs(variant, policy), engine.runs(variant, policy))


def read_findings(results: Path, name: str, folder: str) -> Findings | None:
    """What is in a folder of results; None: it has no runs, or not all of them yet.

    Raises PrefixShieldError when its files cannot be read.
    """
    path = results / folder
    if not (path / "runs.csv").exists():
        return None
    try:
        rows = read_rows(path)
    except (ValueError, TypeError, csv.Error) as error:
        raise PrefixShieldError(
            f"{path / 'runs.csv'}: not the runs of an experiment: {error}"
        ) from None
    _check(path / "runs.csv", rows)
    return Findings(name, _read_description(path / "experiment.json"), rows)


def _check(path: Path, rows: Sequence[Row]) -> None:
    if not rows:
        raise PrefixShieldError(f"{path}: found no runs, expected a line for each run")
    seen: dict[tuple[Any, ...], int] = {}
    for number, row in enumerate(rows, 1):
        where = f"{path}, run {number}"
        for column, value in row.items():
            if not _fits(column, value):
                expected = _EXPECTED.get(column, "a number")
                raise PrefixShieldError(f"{where}: found {column} {value!r}, expected {expected}")
        key = tuple(row[column] for column in KEYS)
        if key in seen:
            raise PrefixShieldError(f"{where}: a second one of {key}, which run {seen[key]} is")
        seen[key] = number


#: What columns that are no mere numbers hold.
_EXPECTED = {
    **dict.fromkeys(("engine", "variant", "policy"), "a name"),
    **dict.fromkeys(
        ("materialised", "evicted", "promoted", "peak_blocks", "mean_debt_blocks"),
        "a JSON object of numbers",
    ),
    "seed": "a whole number",
    "requests": "a whole number",
    "failed": "a whole number",
    "hit_ratio": "a number from 0 to 1",
}


def _fits(column: str, value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    match _EXPECTED.get(column):
        case "a name":
            return bool(value)
        case "a JSON object of numbers":
            return isinstance(value, dict) and all(
                isinstance(number, int | float) for number in value.values()
            )
        case "a whole number":
            return is_number and isinstance(value, int)
        case "a number from 0 to 1":
            return is_number and 0 <= value <= 1
        case _:
            return value is None or is_number


def _read_description(path: Path) -> Mapping[str, Any]:
    try:
        description = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PrefixShieldError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise PrefixShieldError(f"{path}: not JSON: {error}") from None
    if not isinstance(description, dict):
        raise PrefixShieldError(f"{path}: found {description!r}, expected an object")
    return description


def _hit_percent(row: Row) -> float:
    return 100 * float(row["hit_ratio"])


def _difference(runs: Mapping[int, Row], others: Mapping[int, Row]) -> Measured | None:
    matched = sorted(runs.keys() & others.keys())
    # Rounded to the file's digits, so that equal runs differ by zero exactly.
    return _measured(
        round(_hit_percent(runs[seed]) - _hit_percent(others[seed]), 6) for seed in matched
    )


def _measured(values: Iterable[float | None]) -> Measured | None:
    known = [value for value in values if value is not None]
    return Measured(estimate(known), len(known)) if known else None


def _blocks(column: str, key: str) -> Callable[[Row], float | None]:
    """How many blocks a column counts under a key; what was never counted is zero."""
    return lambda row: row[column].get(key, 0)


#: Counts of Fig. 3b, as ``paper`` names them, and where a row has them.
FIG3B_COUNTS: Mapping[str, Callable[[Row], float | None]] = {
    "promoted_blocks": _blocks("promoted", "attacker"),
    "evicted_attacker_blocks": _blocks("evicted", "attacker by neutral"),
    "evicted_victim_blocks": _blocks("evicted", "victim by neutral"),
}
