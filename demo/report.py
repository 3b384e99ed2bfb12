"""The results of the demo: computed once from the outcomes, written as JSON, shown as a table.

A hit ratio is the sum of the cached tokens over the sum of the prompt tokens, over the measured
requests that succeeded. Both counts are the server's own, from each request's usage. TTFT is the
client's time from sending a request to its first streamed token, in milliseconds. Evictions are
those of the whole run, warm-up included.
"""

from __future__ import annotations

import json
import math
import os
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.table import Table

from demo.server import Policy, vllm_distribution
from demo.traffic import TENANTS, Outcome, Tenant

POLICY_TITLES: Mapping[Policy, str] = {"lru": "native vLLM", "shield": "PrefixShield"}


@dataclass(frozen=True)
class PolicyRun:
    """What one server did with the plan.

    ``missing_batches`` counts batches of events that never arrived; ``events_complete`` says
    whether the event of the last request did.
    """

    outcomes: Sequence[Outcome]
    evicted_blocks: Mapping[tuple[str, str], int]
    missing_batches: int
    events_complete: bool
    duration_s: float


def summarise(runs: Mapping[Policy, PolicyRun], seed: int, command: str) -> dict[str, Any]:
    """The whole report as plain data, ready for JSON. Ratios are 0-1."""
    names = (vllm_distribution(), "torch", "openai", "prefixshield")
    return {
        "policies": {policy: _policy(run) for policy, run in runs.items()},
        "seed": seed,
        "command": command,
        "versions": {name: version(name) for name in names} | {"python": platform.python_version()},
        "machine": {
            "cpu_count": os.cpu_count(),
            "platform": f"{platform.system()} {platform.machine()}",
        },
    }


def write(report: Mapping[str, Any], path: Path) -> None:
    """Write the report as JSON."""
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def make_table(report: Mapping[str, Any]) -> Table:
    """The report as one table: a row for each policy and tenant. Fits into 80 columns."""
    table = Table(title="The same requests, with and without PrefixShield")
    table.add_column("policy")
    table.add_column("tenant")
    table.add_column("requests\n/ failed", justify="right")
    table.add_column("hit\nratio", justify="right")
    table.add_column("TTFT ms\np50 / p95", justify="right")
    for causer in TENANTS:
        table.add_column(f"lost to\n{causer}", justify="right")
    for policy, data in report["policies"].items():
        evicted = {(row["owner"], row["causer"]): row["blocks"] for row in data["evictions"]}
        for tenant, group in data["groups"].items():
            table.add_row(
                POLICY_TITLES[policy],
                tenant,
                f"{group['requests']} / {group['failed']}",
                _shown(group["hit_ratio"], "{:.1%}"),
                " / ".join(_shown(group[f"ttft_{rank}_ms"], "{:.0f}") for rank in ("p50", "p95")),
                *(f"{evicted.get((tenant, causer), 0):,}" for causer in TENANTS),
                end_section=tenant == TENANTS[-1],
            )
    table.caption = "lost to: cached blocks of this tenant, evicted by requests of that one"
    return table


def percentile(values: Sequence[float], share: float) -> float | None:
    """The nearest-rank percentile of the values, None of none. ``share`` is 0-1."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def _policy(run: PolicyRun) -> dict[str, Any]:
    victim = [outcome for outcome in run.outcomes if outcome.request.tenant == "victim"]
    return {
        "groups": {tenant: _group(run.outcomes, tenant) for tenant in TENANTS},
        "evictions": [
            {"owner": owner, "causer": causer, "blocks": blocks}
            for (owner, causer), blocks in sorted(Counter(run.evicted_blocks).items())
        ],
        "events": {"missing_batches": run.missing_batches, "complete": run.events_complete},
        "duration_s": round(run.duration_s, 1),
        "victim_requests": [
            {
                "measured": outcome.request.measured,
                "hit_ratio": None if outcome.error else round(outcome.hit_ratio, 4),
            }
            for outcome in victim
        ],
    }


def _group(outcomes: Sequence[Outcome], tenant: Tenant) -> dict[str, Any]:
    of_tenant = [outcome for outcome in outcomes if outcome.request.tenant == tenant]
    measured = [outcome for outcome in of_tenant if outcome.request.measured]
    good = [outcome for outcome in measured if outcome.error is None]
    prompt_tokens = sum(outcome.prompt_tokens for outcome in good)
    cached_tokens = sum(outcome.cached_tokens for outcome in good)
    ttft_ms = [outcome.ttft_ms for outcome in good]
    return {
        "requests": len(measured),
        "warmup_requests": len(of_tenant) - len(measured),
        "failed": sum(outcome.error is not None for outcome in of_tenant),
        "prompt_tokens": prompt_tokens,
        "cached_tokens": cached_tokens,
        "hit_ratio": round(cached_tokens / prompt_tokens, 6) if prompt_tokens else None,
        "ttft_p50_ms": _rounded(percentile(ttft_ms, 0.50)),
        "ttft_p95_ms": _rounded(percentile(ttft_ms, 0.95)),
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 2)


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
