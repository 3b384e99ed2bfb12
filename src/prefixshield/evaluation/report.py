"""The report: every table and figure of the paper next to what the result files say.

Made from the files alone, so that it can be made again anywhere; the same files give the same
bytes. What was not run is left out or an en dash.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from prefixshield.errors import PrefixShieldError
from prefixshield.evaluation import markdown
from prefixshield.evaluation.findings import (
    FIG3B_COUNTS,
    NO_ATTACK,
    Findings,
    Measured,
    read_findings,
)
from prefixshield.evaluation.overhead import read_overhead
from prefixshield.evaluation.paper import reported
from prefixshield.evaluation.results import Row
from prefixshield.evaluation.run import SHIELD_DEFAULT

#: Above this, virtual time and the real engine disagree, in percentage points.
AGREEMENT_PP = 1.0

#: What the name of a folder ends with: for an experiment's default engine, the real one, and
#: virtual time at the real one's costs.
DEFAULT, REAL, CALIBRATED = _SUFFIXES = ("", "-real", "-calibrated")

#: Contract of the attacker in the creation-pressure sweep.
_ATTACKER_CONTRACT = "best-effort"

_INTRODUCTION = """\
Values are means over runs, in brackets their 95% bootstrap confidence intervals. Differences are
paired: over runs of the same requests, in percentage points (pp) of the hit ratio. A *tie* is a
difference whose interval holds zero; a single run has no interval. A hit ratio is the mean share of
a prompt that was found in the cache, over measured requests: the victim's under attack. P95 TTFT,
of the same requests, is the 95th percentile of the time to first token: in virtual time by a cost
model that was chosen on the paper's figures of LRU, on the real engine that machine's own as
measured. *Calibrated* is virtual time at the costs that were measured on the real engine. *Paper*
is what the paper states in its text; an en dash is what it does not state, or what was not run."""


def write_report(results: Path, output: Path) -> list[Path]:
    """Write ``report.md`` and its figures into ``output``; returns all files written.

    Raises PrefixShieldError when there are no results, or when a file cannot be read or written.
    """
    found = {name: _read(results, name) for name in _SECTIONS}
    if not any(found.values()):
        raise PrefixShieldError(
            f"{results}: found no finished experiment, expected folders such as "
            f"{results / 'table1'} with runs.csv; 'prefixshield experiment table1' makes one"
        )
    from prefixshield.evaluation.figures import FIGURES, draw

    path = output / "report.md"
    try:
        output.mkdir(parents=True, exist_ok=True)
        path.write_text(_report(results, found, set(FIGURES)), encoding="utf-8")
        drawn = [
            file
            for name in FIGURES
            if found[name]
            for file in draw(name, _shown(found[name]), output)
        ]
    except OSError as error:
        raise PrefixShieldError(f"{output}: cannot be written: {error.strerror}") from None
    return [path, *drawn]


def _read(results: Path, name: str) -> dict[str, Findings]:
    """An experiment's findings by the suffix of their folder, as far as they are finished."""
    folders = {suffix: read_findings(results, name, name + suffix) for suffix in _SUFFIXES}
    return {suffix: findings for suffix, findings in folders.items() if findings is not None}


def _shown(found: Mapping[str, Findings]) -> list[Findings]:
    """Engines that have columns in tables: calibrated time is there to check the real engine by."""
    shown = [findings for suffix, findings in found.items() if suffix != CALIBRATED]
    return shown or list(found.values())


def _report(results: Path, found: Mapping[str, Mapping[str, Findings]], figures: set[str]) -> str:
    parts = ["# Results next to the paper's", _INTRODUCTION, _coverage(results, found)]
    for name, section in _SECTIONS.items():
        if not found[name]:
            continue
        every, shown = list(found[name].values()), _shown(found[name])
        parts.append(f"## {every[0].description.get('title', name)}")
        parts.extend(_provenance(one.engine, one.description) for one in every)
        if name in figures:
            parts.append(f"![{name}]({name}.png)")
        parts.extend(section(shown))
        if failures := _failures(every):
            parts.append(failures)
        if real := found[name].get(REAL):
            for findings in every:
                if findings is not real:
                    parts.extend(_agreement(findings, real))
    parts.extend(_overhead(results, found))
    return "\n\n".join(parts) + "\n"


def _coverage(results: Path, found: Mapping[str, Mapping[str, Findings]]) -> str:
    def state(name: str, suffix: str) -> str:
        if findings := found[name].get(suffix):
            return f"{findings.engine}, {len(findings.rows)} runs"
        partial = results / (name + suffix) / "partial.jsonl"
        return "unfinished" if partial.exists() else "not run"

    rows = [(name, *(state(name, suffix) for suffix in _SUFFIXES)) for name in _SECTIONS]
    return markdown.table(("Experiment", "default", "real", "calibrated"), rows, names=4)


def _provenance(engine: str, about: Mapping[str, Any]) -> str:
    """Which command made it, of what, where."""
    seeds = about.get("seeds") or []
    span = f"{seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else ", ".join(map(str, seeds))
    facts = {
        "seeds": span or None,
        "blocks of": f"{about['block_size']} tokens" if "block_size" in about else None,
        "commit": about.get("commit") or markdown.NOTHING,
        "vLLM": about.get("vllm"),
        "machine": about.get("machine") or markdown.NOTHING,
    }
    known = "; ".join(f"{name} {value}" for name, value in facts.items() if value)
    return f"*{engine}*: `{about.get('command', markdown.NOTHING)}`; {known}."


def _failures(found: Sequence[Findings]) -> str:
    failed = [
        f"{findings.engine}, {variant}, {policy}: {count} of {total}"
        for findings in found
        for variant, policy in _cells([findings])
        for runs in [findings.runs(variant, policy).values()]
        for count, total in [(sum(r["failed"] for r in runs), sum(r["requests"] for r in runs))]
        if count
    ]
    return f"Failed requests, counted as misses: {'; '.join(failed)}." if failed else ""


def _agreement(one: Findings, other: Findings) -> Iterator[str]:
    """The same variant and policy on both engines."""
    rows = []
    for variant, policy in _cells([one, other]):
        seeds = one.runs(variant, policy).keys() & other.runs(variant, policy).keys()
        difference = other.difference_to_pp(one, variant, policy)
        if difference is None:
            continue
        means = (
            markdown.mean(findings.hit_percent(variant, policy, seeds)) for findings in (one, other)
        )
        apart = abs(difference.estimate.mean) > AGREEMENT_PP
        flag = f"more than {AGREEMENT_PP:g} pp" if apart else ""
        rows.append(
            (variant, policy, *means, markdown.difference(difference), str(len(seeds)), flag)
        )
    yield f"### {one.engine} against {other.engine}"
    header = ["Workload", "Policy", f"{one.engine}, %", f"{other.engine}, %"]
    header += [f"{other.engine} minus {one.engine}, pp", "runs", "apart"]
    yield "Hit ratios over runs with the same seed."
    yield markdown.table(header, rows)


# Sections: from an experiment's findings, by engine, to Markdown.


def _table1(found: Sequence[Findings]) -> Iterator[str]:
    yield _hit_ratios("table1", found)
    yield _comparisons(
        "table1",
        found,
        [("shield", other) for other in ("s3fifo", "never-hit-first", "no-debt-gate")],
    )
    if lost := list(_losses(found)):
        header = ["Workload", *_sources("attacked minus no attack under lru, pp", found)]
        header += _sources("share that shield recovers, %", found)
        yield markdown.table(header, lost, names=1)
    yield _latencies("table1", found)


def _losses(found: Sequence[Findings]) -> Iterator[Sequence[str]]:
    """What an attack costs LRU, and how much of that shield gets back, as ratio of the means."""
    for variant in dict.fromkeys(variant for variant, _ in _cells(found)):
        control = variant + NO_ATTACK
        losses = [f.difference_pp(variant, "lru", "lru", control) for f in found]
        if not any(losses):
            continue
        gains = [f.difference_pp(variant, "shield", "lru") for f in found]
        share = reported("table1", variant, "shield", "recovered_ratio")
        yield (
            variant,
            markdown.reported_difference(reported("table1", variant, "lru", "minus_no_attack_pp")),
            *map(markdown.difference, losses),
            f"{100 * share.value:.1f}" if share else markdown.NOTHING,
            *map(_recovered, gains, losses),
        )


def _recovered(gain: Measured | None, loss: Measured | None) -> str:
    if gain is None or loss is None or loss.estimate.mean >= 0:
        return markdown.NOTHING
    return f"{-100 * gain.estimate.mean / loss.estimate.mean:.1f}"


def _bounds(found: Sequence[Findings]) -> Iterator[str]:
    yield (
        "Hit ratio in %, mean over seeds. *clairvoyant* knows the future and maximises the hits of "
        "all groups together, *clairvoyant-victim* those of the victim alone: what it could get at "
        "best."
    )
    for findings in found:
        policies = list(dict.fromkeys(policy for _, policy in _cells([findings])))
        rows = []
        for variant in findings.policies:
            ratios = (findings.hit_percent(variant, policy) for policy in policies)
            rows.append((variant, *map(markdown.mean, ratios)))
        yield markdown.table(["Workload", *policies], rows, names=1)


def _table2(found: Sequence[Findings]) -> Iterator[str]:
    yield _hit_ratios("table2", found)
    yield (
        "The paper calls the difference between shield and s3fifo statistically "
        "indistinguishable on both workloads, without a number."
    )
    yield _comparisons("table2", found, [("shield", "s3fifo"), ("shield", "lru")])
    yield _latencies("table2", found)


def _table3(found: Sequence[Findings]) -> Iterator[str]:
    yield _hit_ratios("table3", found)
    yield "Most blocks that the borrower had cached at any time, lowest to highest over runs:"
    rows = []
    for variant, policy in _cells(found):
        low = reported("table3", variant, policy, "peak_blocks_min")
        high = reported("table3", variant, policy, "peak_blocks_max")
        paper = markdown.span([low.value, high.value]) if low and high else markdown.NOTHING
        peaks = (
            markdown.span(
                [row["peak_blocks"].get("borrower") for row in f.runs(variant, policy).values()]
            )
            for f in found
        )
        rows.append((variant, policy, paper, *peaks))
    yield markdown.table(["Workload", "Policy", *_sources("blocks", found)], rows)
    yield _latencies("table3", found)


def _fig2(found: Sequence[Findings]) -> Iterator[str]:
    for findings in found:
        yield _gains(findings)
        yield from _pressure(findings)
        yield from _turnovers(findings)


def _gains(findings: Findings) -> str:
    """One line per variant: LRU, shield, and what every policy gains over LRU."""
    policies = dict.fromkeys(policy for _, policy in _cells([findings]))
    others = [policy for policy in policies if policy not in ("lru", "shield")]
    rows = []
    for variant in findings.policies:
        row = [variant]
        for policy in ("lru", "shield"):
            row.append(markdown.reported_percent("fig2", variant, policy))
            row.append(markdown.value(findings.hit_percent(variant, policy)))
        gain = reported("fig2", variant, "shield", "minus_lru_pp")
        row.append(markdown.reported_difference(gain))
        row += (
            markdown.difference(findings.difference_pp(variant, policy, "lru"))
            for policy in ("shield", *others)
        )
        rows.append([*row, str(len(findings.runs(variant, "shield")))])
    header = ["Workload"]
    header += [
        f"{source}: {policy}, %"
        for policy in ("lru", "shield")
        for source in ("paper", findings.engine)
    ]
    header += _sources("shield minus lru, pp", [findings])
    header += [f"{findings.engine}: {policy} minus lru, pp" for policy in others]
    return markdown.table([*header, "matched runs"], rows, names=1)


def _pressure(findings: Findings) -> Iterator[str]:
    contracts = findings.description.get("contracts", {})
    refill_rate = contracts.get(_ATTACKER_CONTRACT, {}).get("refill_rate")

    def ratio(row: Row) -> float | None:
        if not refill_rate or not row["requests_per_s"]:
            return None
        duration_s = (row["requests"] - row["failed"]) / row["requests_per_s"]
        return float(row["materialised"].get("attacker", 0) / duration_s / refill_rate)

    rows = []
    for variant in findings.policies:
        if not variant.startswith("creation ratio"):
            continue
        debt = reported("fig2", variant, "shield", "mean_debt_blocks")
        debts = findings.mean(variant, "shield", _object("mean_debt_blocks", "attacker"))
        rows.append(
            (
                variant,
                markdown.value(findings.mean(variant, "shield", ratio)),
                f"{debt.value:.2f}" if debt else markdown.NOTHING,
                markdown.value(debts),
            )
        )
    if rows:
        yield (
            "Creation pressure under shield. The measured ratio is blocks that the attacker "
            f"created per second over the {_ATTACKER_CONTRACT} refill rate, over the whole run "
            "with its warm-up; the debt is the attacker's mean raw debt while victims arrive."
        )
        header = ("Workload", "measured ratio", "paper: mean debt, blocks")
        yield markdown.table((*header, f"{findings.engine}: mean debt, blocks"), rows, names=1)


def _turnovers(findings: Findings) -> Iterator[str]:
    """How often the pool was filled; the paper does not say under which policy."""
    rows = []
    for variant, about in findings.description.get("variants", {}).items():
        capacity = about.get("capacity_blocks")
        if not variant.endswith(" blocks") or variant not in findings.policies or not capacity:
            continue

        def turnovers(row: Row, capacity: int = capacity) -> float:
            return float(sum(row["materialised"].values()) / capacity)

        paper = reported("fig2", variant, "shield", "turnovers")
        ours = (findings.mean(variant, policy, turnovers) for policy in ("lru", "shield"))
        shown = f"{paper.value:.2f}" if paper else markdown.NOTHING
        rows.append((variant, shown, *map(markdown.value, ours)))
    if rows:
        yield "Full-cache turnovers: blocks materialised by all groups over blocks of the pool."
        yield markdown.table(
            ("Workload", "paper", f"{findings.engine}, lru", f"{findings.engine}, shield"),
            rows,
            names=1,
        )


def _fig3a(found: Sequence[Findings]) -> Iterator[str]:
    yield _comparisons("fig3a", found, [("shield", "no-segmentation")])
    yield _hit_ratios("fig3a", found)


def _fig3b(found: Sequence[Findings]) -> Iterator[str]:
    yield (
        "Blocks of the attacker promoted to the reuse class, and blocks that the neutral group "
        "then evicted, per run. lru has no classes."
    )
    rows: list[Sequence[str]] = []
    for variant, policy in _cells(found):
        papers = [reported("fig3b", variant, policy, quantity) for quantity in FIG3B_COUNTS]
        if any(papers):
            shown = (f"{paper.value:g}" if paper else markdown.NOTHING for paper in papers)
            rows.append((variant, policy, "paper", *shown, markdown.NOTHING))
        for findings in found:
            counts = (findings.mean(variant, policy, value) for value in FIG3B_COUNTS.values())
            hits = markdown.value(findings.hit_percent(variant, policy))
            rows.append((variant, policy, findings.engine, *map(markdown.count, counts), hits))
    header = ["Wait", "Policy", "Source", "promoted", "attacker's evicted by neutral"]
    header += ["victim's evicted by neutral", "victim's hit ratio, %"]
    yield markdown.table(header, rows, names=3)
    yield "At the full wait the paper says that the victim's hit ratios converge."
    yield _comparisons("fig3b", found, [("shield", "no-debt-gate")])


def _object(column: str, key: str) -> Callable[[Row], float | None]:
    """A value by group; None where the run has none at all, 0 where it has others."""
    return lambda row: row[column].get(key, 0) if row[column] else None


def _late(found: Sequence[Findings]) -> Iterator[str]:
    yield (
        "The same requests in every run, each at random up to 100 ms of the trace's time late. "
        "Runs differ in nothing else, so lowest and highest say what order alone does."
    )
    rows = []
    for findings in found:
        for variant, policy in _cells([findings]):
            hits = [100 * row["hit_ratio"] for row in findings.runs(variant, policy).values()]
            mean = markdown.mean(findings.hit_percent(variant, policy))
            rows.append((variant, policy, f"{min(hits):.2f}", mean, f"{max(hits):.2f}", len(hits)))
    header = ("Workload", "Policy", "lowest, %", "mean, %", "highest, %", "runs")
    yield markdown.table(header, rows)


def _reasons(found: Sequence[Findings]) -> Iterator[str]:
    yield _hit_ratios("reasons", found)
    yield _latencies("reasons", found)


def _preset(found: Sequence[Findings]) -> Iterator[str]:
    yield (
        f"*{SHIELD_DEFAULT}* is policy shield under the default preset, *shield* under the "
        "paper's; contracts are the paper's. Measured are the victim's requests under attack, all "
        "requests where nobody attacks."
    )
    header = ["Workload", "Policy"]
    header += [
        f"{f.engine}: {what}"
        for what in ("hit ratio, %", "minus lru, pp", "minus shield, pp")
        for f in found
    ]
    rows = []
    for variant, policy in _cells(found):
        row = [variant, policy, *(markdown.value(f.hit_percent(variant, policy)) for f in found)]
        for other in ("lru", "shield"):
            differences = (f.difference_pp(variant, policy, other) for f in found)
            row += (
                markdown.NOTHING if policy == other else markdown.difference(d) for d in differences
            )
        rows.append(row)
    yield markdown.table(header, rows)
    columns = {
        "P50 TTFT, ms": "ttft_p50_ms",
        "P95 TTFT, ms": "ttft_p95_ms",
        "preemptions": "preemptions",
    }
    header = ["Workload", "Policy", *(f"{f.engine}: {what}" for f in found for what in columns)]
    rows = [
        [
            variant,
            policy,
            *(
                markdown.mean(f.mean(variant, policy, itemgetter(key)))
                for f in found
                for key in columns.values()
            ),
        ]
        for variant, policy in _cells(found)
    ]
    yield markdown.table(header, rows)


def _overhead(results: Path, found: Mapping[str, Mapping[str, Findings]]) -> Iterator[str]:
    """What policies cost, where it was measured, and requests served under attack at 60% load."""
    overhead = read_overhead(results)
    if overhead:
        yield "## Overhead: selection and metadata"
        yield _provenance("processor time", overhead[0])
        yield (
            "Time of one selection of so many victims from a full pool in which every group owes, "
            "and memory of the full policy, Python's objects included. *ratio*: median over rounds "
            "of the time over lru's in the same round. The paper scans its candidates, ours keep "
            "queues."
        )
        rows: list[tuple[str, ...]] = []
        for row in overhead[1]:
            setting = f"{int(row['capacity_blocks']) + 1} blocks, {row['groups']} groups"
            paper = [
                reported("overhead", setting, row["policy"], quantity)
                for quantity in ("selection_mean_ms", "selection_p95_ms", "metadata_kib")
            ]
            mean, p95, size = paper
            known = [markdown.NOTHING if one is None else f"{one.value:.3f}" for one in (mean, p95)]
            known.append(markdown.NOTHING if size is None else f"{size.value:,.1f}")
            rows.append(
                (
                    *(setting, row["policy"], row["victims"]),
                    *(known[0], f"{float(row['mean_us']) / 1000:.3f}"),
                    *(known[1], f"{float(row['p95_us']) / 1000:.3f}"),
                    *(row["ratio_to_lru"], known[2], f"{int(row['metadata_bytes']) / 1024:,.1f}"),
                )
            )
        columns = (
            *("Setting", "Policy", "victims", "paper: mean, ms", "mean, ms"),
            *("paper: P95, ms", "P95, ms", "ratio", "paper: KiB", "KiB"),
        )
        yield markdown.table(columns, rows, names=2)
    rows = [
        (
            findings.engine,
            *(markdown.value(findings.mean("one-touch", p, _rate)) for p in ("lru", "shield")),
        )
        for findings in found["table1"].values()
        if findings.mean("one-touch", "lru", _rate)
    ]
    if rows:
        paper = [reported("overhead", "load 60%", p, "requests_per_s") for p in ("lru", "shield")]
        given = [f"{value.value:.3f}" if value else markdown.NOTHING for value in paper]
        yield "### Requests per second, one-touch pollution at 60% load"
        yield (
            "Arrivals set the pace, so a policy can only lose here by being slow. Virtual time "
            "knows no cost of policies; the real engine does."
        )
        table = [("paper", *given), *rows]
        yield markdown.table(("Engine", "lru", "shield"), table)


def _rate(row: Row) -> float | None:
    rate: float | None = row["requests_per_s"]
    return rate


_SECTIONS: Mapping[str, Callable[[Sequence[Findings]], Iterator[str]]] = {
    "table1": _table1,
    "table1-bounds": _bounds,
    "table2": _table2,
    "table3": _table3,
    "fig2": _fig2,
    "fig3a": _fig3a,
    "fig3b": _fig3b,
    "late": _late,
    "reasons": _reasons,
    "preset": _preset,
}

# Tables that several sections have.


def _hit_ratios(name: str, found: Sequence[Findings]) -> str:
    """Hit ratio and paired gain over LRU, by workload and policy."""
    rows = []
    has_gains = any("lru" in f.policies[variant] for f in found for variant in f.policies)
    for variant, policy in _cells(found):
        measured = [f.hit_percent(variant, policy) for f in found]
        row = [variant, policy, markdown.reported_percent(name, variant, policy)]
        row += map(markdown.value, measured)
        if has_gains:
            gain = reported(name, variant, policy, "minus_lru_pp")
            row.append(markdown.reported_difference(gain))
            row += (
                markdown.NOTHING
                if policy == "lru"
                else markdown.difference(f.difference_pp(variant, policy, "lru"))
                for f in found
            )
        row.append(" / ".join(str(m.runs) if m else markdown.NOTHING for m in measured))
        rows.append(row)
    header = ["Workload", "Policy", *_sources("hit ratio, %", found)]
    header += _sources("gain over lru, pp", found) if has_gains else []
    return markdown.table([*header, "matched runs"], rows)


def _comparisons(name: str, found: Sequence[Findings], pairs: Sequence[tuple[str, str]]) -> str:
    """Paired differences between two policies."""
    rows = []
    for variant in dict.fromkeys(variant for variant, _ in _cells(found)):
        for policy, other in pairs:
            differences = [f.difference_pp(variant, policy, other) for f in found]
            if any(differences):
                paper = reported(name, variant, policy, f"minus_{other}_pp")
                row = (variant, f"{policy} minus {other}", markdown.reported_difference(paper))
                rows.append((*row, *map(markdown.difference, differences)))
    return markdown.table(["Workload", "Difference", *_sources("pp", found)], rows)


def _latencies(name: str, found: Sequence[Findings]) -> str:
    """P95 of the time to first token, mean over runs."""
    rows = []
    for variant, policy in _cells(found):
        paper = reported(name, variant, policy, "ttft_p95_ms")
        measured = (f.mean(variant, policy, lambda row: row["ttft_p95_ms"]) for f in found)
        shown = (f"{m.estimate.mean:,.1f}" if m else markdown.NOTHING for m in measured)
        rows.append((variant, policy, f"{paper.value:,.1f}" if paper else markdown.NOTHING, *shown))
    return markdown.table(["Workload", "Policy", *_sources("P95 TTFT, ms", found)], rows)


def _cells(found: Sequence[Findings]) -> list[tuple[str, str]]:
    """All (variant, policy) of an experiment, in the order of the files."""
    policies: dict[str, dict[str, None]] = {}
    for findings in found:
        for variant, names in findings.policies.items():
            policies.setdefault(variant, {}).update(dict.fromkeys(names))
    return [(variant, policy) for variant, names in policies.items() for policy in names]


def _sources(what: str, found: Sequence[Findings]) -> list[str]:
    """Headers: the paper's column, then one per engine."""
    return [f"{source}: {what}" for source in ("paper", *(f.engine for f in found))]
