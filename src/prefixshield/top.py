"""``prefixshield top``: a running server's metrics as tables in the terminal.

Reads ``/metrics`` over HTTP and nothing else; all engines of a server are added up.
"""

from __future__ import annotations

import os
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import Counter
from dataclasses import dataclass, field
from http.client import HTTPException

from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from prefixshield.errors import PrefixShieldError
from prefixshield.serving.catalogue import COUNTERS, GAUGES, GROUP_LABELS, OTHER
from prefixshield.serving.wiring import OPERATOR_KEY_VARIABLE

TIMEOUT_S = 10.0

_NAMES = {metric.name: key for key, metric in {**COUNTERS, **GAUGES}.items()}


@dataclass
class Snapshot:
    """One reading of the metrics."""

    time: float
    """Seconds of the reader's clock."""
    values: dict[str, Counter[tuple[str, ...]]] = field(default_factory=dict)
    """Sums over engines by the catalogue's name, then by its label values."""
    info: dict[str, str] = field(default_factory=dict)
    """The labels of the info metric."""

    def by(self, name: str, place: int = 0) -> Counter[str]:
        """Sums by one label, the first or another."""
        found: Counter[str] = Counter()
        for labels, value in self.values.get(name, {}).items():
            found[labels[place]] += value
        return found

    def total(self, name: str) -> float:
        """The sum of all series of a metric."""
        return sum(self.values.get(name, {}).values())

    @property
    def groups(self) -> list[str]:
        """All groups with a label, `OTHER` last."""
        names = {
            value
            for key, metric in {**COUNTERS, **GAUGES}.items()
            for labels in self.values.get(key, ())
            for label, value in zip(metric.labels, labels, strict=True)
            if label in GROUP_LABELS
        }
        return sorted(names, key=lambda name: (name == OTHER, name))


def parse(text: str, at: float) -> Snapshot:
    """Read the text of ``/metrics``.

    Raises ValueError when it is not in Prometheus' format.
    """
    snapshot = Snapshot(at)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = _NAMES.get(sample.name)
            if key is None:
                continue
            metric = COUNTERS.get(key) or GAUGES[key]
            labels = tuple(sample.labels.get(label, "") for label in metric.labels)
            snapshot.values.setdefault(key, Counter())[labels] += sample.value  # type: ignore[assignment]
            if key == "info":
                snapshot.info = dict(sample.labels)
    return snapshot


def fetch(url: str) -> Snapshot:
    """Read a server's metrics.

    Raises:
        PrefixShieldError: it does not answer, refuses, or has no metrics of ours.

    """
    address = _metrics_address(url)
    request = urllib.request.Request(address)
    if key := os.environ.get(OPERATOR_KEY_VARIABLE):
        request.add_header("Authorization", f"Bearer {key}")
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            snapshot = parse(response.read().decode("utf-8"), time.monotonic())
    except urllib.error.HTTPError as error:
        hint = (
            f": {OPERATOR_KEY_VARIABLE} must hold the operator's key" if error.code == 401 else ""
        )
        raise PrefixShieldError(f"{address}: answers {error.code}{hint}") from None
    except (OSError, ValueError, HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise PrefixShieldError(f"{address}: cannot be read: {str(reason).strip()}") from None
    if not snapshot.values:
        raise PrefixShieldError(f"{address}: found no metrics of PrefixShield, expected some")
    return snapshot


def show(url: str, once: bool, interval: float, console: Console) -> None:
    """Print the tables once, or keep them up to date until Ctrl-C; ``interval``: seconds.

    Raises PrefixShieldError when the first reading fails; later ones are tried again.
    """
    first = fetch(url)
    if once:
        console.print(render(None, first))
        return
    readings = [first]
    problem = ""
    with Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
        try:
            while True:
                body = render(readings[0], readings[-1])
                live.update(Group(body, Text(problem, style="red")), refresh=True)
                time.sleep(interval)
                try:
                    readings.append(fetch(url))
                    problem = ""
                except PrefixShieldError as error:
                    problem = str(error)
                del readings[:-6]  # rates are over the last five readings
        except KeyboardInterrupt:
            return


def render(before: Snapshot | None, now: Snapshot) -> Group:
    """The head, a table of groups and a table of who evicted whom; rates if there is a before."""
    if before is not None and _restarted(before, now):
        before = None
    return Group(_head(now), _groups(before, now), *_blame(now))


def _head(now: Snapshot) -> Text:
    info = now.info
    head = Text()
    if info:
        head.append(
            f"{info['model_name']}: policy {info['policy']}, preset {info['preset']}, "
            f"PrefixShield {info['version']}, vLLM {info['vllm_version']}\n"
        )
    resident = now.by("resident", place=1)
    classes = ", ".join(f"{name} {blocks:.0f}" for name, blocks in resident.items() if blocks)
    head.append(f"{resident.total():.0f} of {now.total('capacity'):.0f} blocks cached")
    head.append(f" ({classes})" if classes else "")
    head.append(f", fallbacks {now.total('fallbacks'):.0f}")
    head.append(f", policy failures {now.total('policy_failures'):.0f}")
    if now.total("native_order"):
        head.append("\nThe policy has failed: eviction is in native order", style="bold red")
    if now.total("shadow"):
        head.append("\nShadow mode: the policy accounts, eviction is in native order", style="bold")
    return head


def _groups(before: Snapshot | None, now: Snapshot) -> Table:
    table = Table("group", title_justify="left")
    for name in ("cached", "hit ratio", "debt", "normalised", "since start"):
        table.add_column(name, justify="right")
    for name in ("created/s", "lost/s", "evicted/s"):
        table.add_column(name, justify="right")
    resident, debt, normalised = (now.by(n) for n in ("resident", "debt", "normalised_debt"))
    recent_hits, recent_queries = (_growth(before, now, n) for n in ("hit_tokens", "query_tokens"))
    hits, queries = now.by("hit_tokens"), now.by("query_tokens")
    rates = [
        _growth(before, now, name, place)
        for name, place in (("materialised", 0), ("evicted", 0), ("evicted", 1))
    ]
    seconds = now.time - before.time if before is not None else 0.0
    for group in now.groups:
        owes = f"{debt[group]:.1f}" if group in debt else "-"
        table.add_row(
            group,
            f"{resident[group]:.0f}",
            _ratio(recent_hits[group], recent_queries[group]),
            Text(owes, style="red" if debt[group] > 0 else ""),
            f"{normalised[group]:.1f}" if group in normalised else "-",
            _ratio(hits[group], queries[group]),
            *(f"{rate[group] / seconds:.1f}" if seconds else "-" for rate in rates),
        )
    return table


def _blame(now: Snapshot) -> list[Table | Text]:
    pairs = now.values.get("evicted", Counter())
    if not pairs:
        return [Text("Nothing was evicted yet.")]
    causers = [group for group in now.groups if any(pair[1] == group for pair in pairs)]
    table = Table("lost by, for")
    for causer in causers:
        table.add_column(causer, justify="right")
    for owner in now.groups:
        if any(pair[0] == owner for pair in pairs):
            table.add_row(owner, *(f"{pairs[owner, causer]:.0f}" for causer in causers))
    return [Text("Evicted since the server started, blocks"), table]


def _growth(before: Snapshot | None, now: Snapshot, name: str, place: int = 0) -> Counter[str]:
    """What a counter grew since the reading before; nothing without one."""
    if before is None:
        return Counter()
    grown = now.by(name, place)
    grown.subtract(before.by(name, place))
    return grown


def _restarted(before: Snapshot, now: Snapshot) -> bool:
    queries, earlier = now.by("query_tokens"), before.by("query_tokens")
    return any(queries[group] < tokens for group, tokens in earlier.items())


def _ratio(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def _metrics_address(url: str) -> str:
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise PrefixShieldError(f"found {url!r}, expected a URL such as http://localhost:8000")
    path = parts.path.rstrip("/")
    if not path.endswith("/metrics"):
        path += "/metrics"
    return urllib.parse.urlunsplit((parts.scheme, parts.netloc, path, "", ""))
