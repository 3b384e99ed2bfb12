"""The course of the demo: run both servers, send both the same traffic, report."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from demo import figure, report
from demo.evictions import EventTap, EvictionLedger
from demo.server import FOLDER, MODEL_FOLDER, Policy, make_server
from demo.tenants import load_keys
from demo.traffic import (
    BLOCK_SIZE_TOKENS,
    Outcome,
    Request,
    Tenant,
    make_plan,
    send_all,
    tenant_of_token,
)
from prefixshield.errors import PrefixShieldError
from prefixshield.serving.child_server import ACTIVE_LINE, MODEL_NAME
from prefixshield.serving.tiny_model import write_tiny_model

REPORT_FILE = FOLDER / "report.json"
FIGURE_FILE = FOLDER / "report.png"
EVENTS_WAIT_S = 10.0


def run(policies: Sequence[Policy], seed: int) -> int:
    """Run the demo and return its exit status: 0 if nothing failed, else 1."""
    console = Console()
    try:
        return _run(console, policies, seed)
    except PrefixShieldError as error:
        console.print(f"demo: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 1


def _run(console: Console, policies: Sequence[Policy], seed: int) -> int:
    keys = load_keys()
    plan = make_plan(seed)
    runs: dict[Policy, report.PolicyRun] = {}
    problems: list[str] = []
    with _progress(console) as progress:
        lines = {policy: _Line(progress, policy, len(plan)) for policy in policies}
        lines[policies[0]].prepare()
        write_tiny_model(MODEL_FOLDER)
        for policy in policies:
            runs[policy], found = _run_policy(policy, plan, keys, lines[policy])
            problems += found
    command = f"python -m demo --seed {seed}"
    summary = report.summarise(runs, seed, command)
    report.write(summary, REPORT_FILE)
    figure.draw(summary, FIGURE_FILE)
    console.print(report.make_table(summary))
    names = [str(path.relative_to(FOLDER.parent)) for path in (REPORT_FILE, FIGURE_FILE)]
    console.print(f"Written: {', '.join(names)}")
    for problem in problems:
        console.print(
            f"demo: {problem}", style="red", markup=False, highlight=False, soft_wrap=True
        )
    return 1 if problems else 0


def _run_policy(
    policy: Policy, plan: Sequence[Request], keys: Mapping[Tenant, str], line: _Line
) -> tuple[report.PolicyRun, list[str]]:
    """Serve, send the plan, count; returns the run and what went wrong in it."""
    started = time.monotonic()
    ledger = EvictionLedger(tenant_of_token)
    with (
        EventTap() as tap,
        make_server(policy, list(keys.values()), events_endpoint=tap.endpoint) as server,
    ):
        line.start()
        server.wait_until_healthy()

        def on_outcome(outcome: Outcome) -> None:
            line.advance(outcome)
            if outcome.error is not None:
                server.check_alive()

        outcomes = asyncio.run(
            send_all(plan, f"{server.base_url}/v1", MODEL_NAME, keys, on_outcome)
        )
        complete = tap.read_into(ledger, _last_full_block(plan[-1]), EVENTS_WAIT_S)
        line.finish()
    problems = []
    failed = [outcome for outcome in outcomes if outcome.error is not None]
    if failed:
        problems.append(f"{policy}: {len(failed)} requests failed, the first: {failed[0].error}")
    if tap.missing_batches or not complete:
        problems.append(
            f"{policy}: {tap.missing_batches} batches of cache events are missing"
            f"{'' if complete else ', and the end'}: its evictions are undercounted"
        )
    if policy == "shield" and not ACTIVE_LINE.search(server.log_text()):
        problems.append("shield: the server's log does not say that PrefixShield was active")
    duration_s = time.monotonic() - started
    run = report.PolicyRun(
        outcomes, ledger.evicted_blocks, tap.missing_batches, complete, duration_s
    )
    return run, problems


def _last_full_block(request: Request) -> tuple[int, ...]:
    end = len(request.prompt) // BLOCK_SIZE_TOKENS * BLOCK_SIZE_TOKENS
    return request.prompt[end - BLOCK_SIZE_TOKENS : end]


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description:<12}"),
        TextColumn("{task.fields[phase]:<13}"),
        BarColumn(bar_width=14),
        MofNCompleteColumn(),
        TextColumn("victim hits {task.fields[hit_ratio]:>6}"),
        TimeElapsedColumn(),
        console=console,
    )


class _Line:
    """One server's line of progress: its phase, the requests done, the victim's hits so far."""

    def __init__(self, progress: Progress, policy: Policy, total: int) -> None:
        self._progress = progress
        self._task = progress.add_task(
            report.POLICY_TITLES[policy], total=total, start=False, phase="waiting", hit_ratio="-"
        )
        self._title = report.POLICY_TITLES[policy]
        self._phase = "waiting"
        self._prompt_tokens = 0
        self._cached_tokens = 0

    def prepare(self) -> None:
        """The model is being made."""
        self._progress.start_task(self._task)
        self._show("preparing")

    def start(self) -> None:
        """The server is being started."""
        self._progress.start_task(self._task)
        self._show("starting")

    def advance(self, outcome: Outcome) -> None:
        """A request is done."""
        measured = outcome.request.measured
        if measured and outcome.request.tenant == "victim":
            self._prompt_tokens += outcome.prompt_tokens
            self._cached_tokens += outcome.cached_tokens
        ratio = f"{self._cached_tokens / self._prompt_tokens:.1%}" if self._prompt_tokens else "-"
        self._progress.update(self._task, advance=1, hit_ratio=ratio)
        self._show("under attack" if measured else "warming up")

    def finish(self) -> None:
        """The last request is done and counted."""
        self._show("done")
        self._progress.stop_task(self._task)

    def _show(self, phase: str) -> None:
        if phase == self._phase:
            return
        self._phase = phase
        self._progress.update(self._task, phase=phase)
        if not self._progress.console.is_terminal:  # no live lines there: one line a phase
            self._progress.console.print(f"{self._title}: {phase}")
