"""Results as files: ``NAME/runs.csv``, a row per run, and ``NAME/experiment.json``, how they came.

While an experiment runs, finished rows are in ``NAME/partial.jsonl`` behind a first line that
describes it; a run with the same description goes on where that one stopped. The two files appear
when all rows are there. In virtual time the same code and seed give the same bytes.
"""

from __future__ import annotations

import csv
import io
import json
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from prefixshield.errors import PrefixShieldError
from prefixshield.evaluation.run import Run
from prefixshield.evaluation.statistics import percentile

#: A run as a row. Ratios are 0-1; an empty cell: the engine does not know it.
Row = dict[str, Any]

#: Columns that identify a row.
KEYS = ("engine", "variant", "policy", "seed")

#: Columns that hold a JSON object by group, or by "owner by causer".
_OBJECTS = ("materialised", "evicted", "promoted", "peak_blocks", "mean_debt_blocks")

#: What decides results, at the top of the repository; documents, tests and results do not.
_DECIDES = (
    *("src", "demo", "prototype", "scripts", "traces", "requirements"),
    *("pyproject.toml", "Makefile"),
)

COLUMNS = (
    *KEYS,
    *("requests", "measured", "failed", "hit_ratio", "ttft_p50_ms", "ttft_p95_ms"),
    *("requests_per_s", "preemptions", "max_send_lag_ms"),
    *_OBJECTS,
)


def summarise(run: Run) -> Row:
    """A run's figures over its measured requests.

    ``hit_ratio`` is the mean of the requests' cache-hit fractions, in which a failed request counts
    as 0; the TTFT percentiles are over those that were served.
    """
    measured = [outcome for outcome in run.outcomes if outcome.request.measured]
    ttft_ms = [outcome.ttft_ms for outcome in measured if outcome.ttft_ms is not None]
    served = sum(outcome.error is None for outcome in run.outcomes)
    return {
        "requests": len(run.outcomes),
        "measured": len(measured),
        "failed": len(run.outcomes) - served,
        "hit_ratio": round(sum(outcome.hit_ratio for outcome in measured) / len(measured), 6),
        "ttft_p50_ms": round(percentile(ttft_ms, 0.5), 3) if ttft_ms else None,
        "ttft_p95_ms": round(percentile(ttft_ms, 0.95), 3) if ttft_ms else None,
        "requests_per_s": round(served / run.duration_s, 4) if run.duration_s else None,
        "preemptions": run.preemptions,
        "max_send_lag_ms": None if run.max_send_lag_ms is None else round(run.max_send_lag_ms, 3),
        "materialised": dict(sorted(run.materialised.items())),
        "evicted": {f"{owner} by {by}": n for (owner, by), n in sorted(run.evictions.items())},
        "promoted": dict(sorted(run.promoted.items())),
        "peak_blocks": dict(sorted(run.peak_blocks.items())),
        "mean_debt_blocks": {g: round(d, 3) for g, d in sorted(run.mean_debt_blocks.items())},
    }


def provenance() -> dict[str, Any]:
    """On what the results were made: commit, versions, machine."""
    return {
        "commit": _commit(),
        "prefixshield": version("prefixshield"),
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs, {_cpu()}",
    }


def replace_files(folder: Path, files: Mapping[str, str]) -> None:
    """Put files, by name, in place of what was there; none is ever half written."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        new = folder / f".{name}"
        new.write_text(content, encoding="utf-8")
        os.replace(new, folder / name)


class ResultsFolder:
    """The files of one experiment."""

    def __init__(self, folder: Path, description: Mapping[str, Any]) -> None:
        """``description``: everything that decides what the rows are; it goes into the JSON."""
        self.folder = folder
        self._description = json.loads(json.dumps(description))
        self._partial = folder / "partial.jsonl"

    def finished_rows(self) -> list[Row]:
        """Rows of an earlier run with the same description, complete or not."""
        if self._is_complete():
            return read_rows(self.folder)
        try:
            lines = self._partial.read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            lines = []
        if not lines or _parse(lines[0]) != self._description:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._partial.write_text(json.dumps(self._description) + "\n", encoding="utf-8")
            return []
        # The last line may have been cut off by the end of the process.
        rows = [row for line in lines[1:] if (row := _parse(line)) is not None]
        kept = [json.dumps(line) + "\n" for line in (self._description, *rows)]
        self._partial.write_text("".join(kept), encoding="utf-8")
        return rows

    def add(self, row: Row) -> None:
        """Keep a row at once."""
        with self._partial.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def complete(self, rows: Iterable[Row]) -> None:
        """Put the two files in place of what was there; ``rows`` in the order of the file."""
        text = io.StringIO()
        writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for row in rows:
            objects = {key: json.dumps(row[key]) if row[key] else "" for key in _OBJECTS}
            writer.writerow({**row, **objects})
        description = json.dumps(self._description, indent=2) + "\n"
        replace_files(self.folder, {"runs.csv": text.getvalue(), "experiment.json": description})
        self._partial.unlink(missing_ok=True)

    def _is_complete(self) -> bool:
        try:
            found = json.loads((self.folder / "experiment.json").read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return False
        return bool(found == self._description) and (self.folder / "runs.csv").exists()


def read_rows(folder: Path) -> list[Row]:
    """The rows of a finished experiment. Raises PrefixShieldError when they cannot be read."""
    path = folder / "runs.csv"
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return [_typed(path, row) for row in csv.DictReader(file)]
    except OSError as error:
        raise PrefixShieldError(f"{path}: cannot be read: {error.strerror}") from None


def _typed(path: Path, row: Mapping[str, str]) -> Row:
    if tuple(row) != COLUMNS:
        raise PrefixShieldError(
            f"{path}: found the columns {', '.join(row)}, expected {', '.join(COLUMNS)}"
        )
    typed: Row = {}
    for key, text in row.items():
        if key in ("engine", "variant", "policy"):
            typed[key] = text
        elif key in _OBJECTS:
            typed[key] = json.loads(text) if text else {}
        else:
            typed[key] = json.loads(text) if text else None
    return typed


def _parse(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None


def _commit(source: Path = Path(__file__)) -> str | None:
    """The commit, marked when what decides results differs from it.

    None: not in a repository, or in one that is not the source file's own.
    """

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(source.parent), *arguments],
                capture_output=True,
                text=True,
                check=True,
            )
        except (OSError, subprocess.CalledProcessError):
            return None
        return done.stdout.strip()

    if git("ls-files", "--error-unmatch", str(source)) is None:
        return None
    commit = git("rev-parse", "HEAD")
    changed = git("status", "--porcelain", "--", *(f":(top){name}" for name in _DECIDES))
    return commit if changed == "" else f"{commit} with changes"


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
