"""The ``prefixshield`` command."""

from __future__ import annotations

import csv
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, TextIO

import typer
from rich.console import Console
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from prefixshield import __version__
from prefixshield.config import Config, dump_config, load_config, paper_config, parse_config
from prefixshield.errors import PrefixShieldError
from prefixshield.evaluation import compare as comparing
from prefixshield.policies import POLICIES, PRESETS
from prefixshield.sim.clairvoyant import Clairvoyant
from prefixshield.sim.replay import Event, Replay, ReplayResult, Tally, replay_policy
from prefixshield.traces import read_trace, write_trace

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Multi-tenant KV-cache protection for vLLM: whoever fills the prefix cache pays for it.",
)

#: The largest pool that replay takes, in blocks: far above any real one, so that a digit too many
#: ends in a message and not in the machine's memory.
MAX_BLOCKS = 2**24

#: Modules that not every command imports, and the extra that brings each.
_EXTRAS = {
    **dict.fromkeys(
        ("httpx", "matplotlib", "msgspec", "numpy", "scipy", "tokenizers", "zmq"), "evaluation"
    ),
    **dict.fromkeys(("torch", "vllm"), "vllm"),
    "libcachesim": "test",
}

#: The most groups that ``compare`` shows in a table.
MAX_GROUPS_SHOWN = 10

PolicyName = StrEnum("PolicyName", {name: name for name in (*POLICIES, Clairvoyant.name)})  # type: ignore[misc]
PresetName = StrEnum("PresetName", {name: name for name in PRESETS})  # type: ignore[misc]

ResultsOption = Annotated[Path, typer.Option(file_okay=False, help="Folder of results.")]


@app.callback(invoke_without_command=True)
def _options(
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    if version:
        typer.echo(f"prefixshield {__version__}")
        raise typer.Exit


@app.command()
def replay(
    trace: Annotated[Path, typer.Argument(help="JSON lines, plain or gzip.")],
    blocks: Annotated[int, typer.Option(min=1, max=MAX_BLOCKS, help="Pool size in blocks.")],
    block_size: Annotated[int, typer.Option(min=1, help="Tokens per block, as in the trace.")],
    policy: Annotated[
        PolicyName | None, typer.Option(help="Overrides the configuration's policy.")
    ] = None,
    preset: Annotated[
        PresetName | None, typer.Option(help="Overrides the configuration's preset.")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="Configuration file. Without one: the paper's three contracts."),
    ] = None,
    for_group: Annotated[
        str | None,
        typer.Option(help="With clairvoyant: the bound for the hits of this group alone."),
    ] = None,
    events: Annotated[
        Path | None, typer.Option(help="Write the event log (JSON lines) to this file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Replay a trace serially against a simulated pool and count hits and evictions."""
    _spare({"--events": events}, trace, config)
    settings = paper_config() if config is None else load_config(config)
    update = {"policy": policy, "preset": preset}
    settings = settings.model_copy(update={k: str(v) for k, v in update.items() if v})
    requests = read_trace(trace, block_size)
    chosen = replay_policy(settings, blocks, requests, block_size, for_group)
    run = Replay(settings, chosen, block_size)
    with _event_log(events) as log:
        try:
            result = run.run(requests, log)
        except PrefixShieldError as error:
            raise type(error)(f"{trace}: {error}") from None
    if as_json:
        head = {"policy": settings.policy, "preset": settings.preset, "blocks": blocks}
        head |= {"for_group": for_group} if for_group else {}
        typer.echo(json.dumps({**head, "block_size": block_size, **result.as_dict()}))
    else:
        _print(Console(markup=False, highlight=False), settings, result)
    if result.rejected_lines:
        shown = ", ".join(map(str, result.rejected_lines[:5]))
        more = ", ..." if len(result.rejected_lines) > 5 else ""
        share = run.policy.share_blocks
        limit = f"the pool of {blocks}" if share is None else f"their group's share of {share}"
        typer.echo(
            f"{trace}: {len(result.rejected_lines)} requests are larger than {limit} blocks and "
            f"were skipped (lines {shown}{more})",
            err=True,
        )


@app.command()
def compare(
    traces: Annotated[list[Path], typer.Argument(help="JSON lines, plain or gzip.")],
    blocks: Annotated[
        str,
        typer.Option(help="Pool sizes: blocks, or shares of the trace's unique blocks: 1000,5%."),
    ],
    block_size: Annotated[int, typer.Option(min=1, help="Tokens per block, as in the traces.")],
    policies: Annotated[
        str, typer.Option(help="Names, or all. lru, s3fifo and the bound are always there.")
    ] = "shield",
    refill_scale: Annotated[
        str, typer.Option(help="Factors on the contracts' refill rates: 0.25,1,4.")
    ] = "1",
    per_group: Annotated[
        bool,
        typer.Option(
            "--per-group", help=f"A table by group too, for at most {MAX_GROUPS_SHOWN} groups."
        ),
    ] = False,
    preset: Annotated[
        PresetName | None, typer.Option(help="Overrides the configuration's preset.")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="Configuration file. Without one: the paper's three contracts."),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Processes. Without it: one per CPU.")
    ] = None,
    csv_file: Annotated[
        Path | None, typer.Option("--csv", help="Write all scores to this file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Replay traces under several policies and pool sizes and show hit ratios side by side."""
    _spare({"--csv": csv_file}, *traces, config)
    question = comparing.Question(
        traces=list(dict.fromkeys(traces)),
        block_size=block_size,
        sizes=comparing.parse_sizes(blocks, MAX_BLOCKS),
        policies=comparing.parse_policies(policies),
        refill_scales=comparing.parse_refill_scales(refill_scale),
        per_group=per_group,
    )
    settings = paper_config() if config is None else load_config(config)
    if preset:
        settings = settings.model_copy(update={"preset": str(preset)})
    with _file_in_place(csv_file) as file, _progress_bar() as progress:
        comparisons = comparing.compare(question, settings, jobs or os.cpu_count() or 1, progress)
        if file is not None:
            _write_csv(file, comparisons)
    if as_json:
        head = {"block_size": block_size, "preset": settings.preset}
        typer.echo(json.dumps({**head, "traces": [one.as_dict() for one in comparisons]}))
        return
    console = Console(markup=False, highlight=False)
    for one in comparisons:
        typer.echo(f"{one.trace}: {one.requests:,} requests, {one.unique_blocks:,} unique blocks")
        _print_whole(console, comparing.table(one, question))
        if per_group and len(one.groups) <= MAX_GROUPS_SHOWN:
            _print_whole(console, comparing.table(one, question, per_group=True))
        elif per_group:
            typer.echo(
                f"{one.trace}: {len(one.groups)} groups are too many for a table, which takes "
                f"{MAX_GROUPS_SHOWN}; --csv and --json have them all",
                err=True,
            )


@app.command()
def calibrate(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE...",
            help="A trace, a server's URL (http://HOST:PORT), or where its engines publish their "
            "KV events (tcp://HOST:PORT, one for each engine).",
        ),
    ],
    blocks: Annotated[
        int | None,
        typer.Option(
            min=1, max=MAX_BLOCKS, help="Pool size in blocks, of one engine. A URL tells its own."
        ),
    ] = None,
    block_size: Annotated[
        int | None, typer.Option(min=1, help="Of a trace: tokens per block.")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="Present contracts. Without it, of a trace: the paper's three."),
    ] = None,
    horizon: Annotated[
        float | None,
        typer.Option(
            help="Seconds for which a block is to live. Without it: as long as blocks live on the "
            "server now; of a trace, the one of several that harms the worst-off group least."
        ),
    ] = None,
    burst_horizon: Annotated[
        float, typer.Option(help="Seconds of its refill that a group may create at once.")
    ] = 10.0,
    interval: Annotated[
        float,
        typer.Option(help="Seconds between the two readings of a server, or of listening to it."),
    ] = 60.0,
    picture: Annotated[Path | None, typer.Option(help="Draw the table into this PNG.")] = None,
    output: Annotated[
        Path | None,
        typer.Option(help="Write the configuration with these contracts to this file."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Propose contracts for a trace's or a server's traffic, and show what they would do.

    The key for a server's metrics, if it has one, is taken from PREFIXSHIELD_OPERATOR_KEY.
    """
    from prefixshield.evaluation import entitlements

    given = {"--horizon": horizon, "--burst-horizon": burst_horizon, "--interval": interval}
    for name, seconds in given.items():
        if seconds is not None and not 0 < seconds < float("inf"):
            raise PrefixShieldError(f"{name}: found {seconds}, expected more than 0 seconds")
    source = sources[0]
    live = source.startswith(("http://", "https://"))
    published = all(one.startswith(("tcp://", "ipc://")) for one in sources)
    if len(sources) > 1 and not published:
        raise PrefixShieldError(
            f"SOURCE: found {' '.join(sources)}, expected one, or several of KV events alone: "
            "tcp://HOST:PORT or ipc://PATH of each engine"
        )
    if not (live or published or Path(source).exists()):
        raise PrefixShieldError(
            f"SOURCE: found {source!r}, expected the path of a trace, http://HOST:PORT or "
            "https://HOST:PORT of a server, or tcp://HOST:PORT or ipc://PATH of KV events"
        )
    _spare({"--output": output, "--picture": picture}, config, Path(source))
    if live:
        from prefixshield.top import fetch

        if config is None:
            raise PrefixShieldError("--config: missing, expected the server's configuration")
        before = fetch(source)
        typer.echo(f"reading {source} again in {interval:g} s ...", err=True)
        time.sleep(interval)
        readings = before, fetch(source)
        with _named(source):
            found = entitlements.from_metrics(
                *readings, load_config(config), blocks, horizon, burst_horizon
            )
    elif published:
        from prefixshield.evaluation.kv_events import listen
        from prefixshield.serving.namespace import Namespaces

        if config is None:
            raise PrefixShieldError("--config: missing, expected the server's configuration")
        if blocks is None:
            raise PrefixShieldError(
                "--blocks: missing, expected the blocks of one engine: KV events tell none"
            )
        settings = load_config(config)
        source = " ".join(sources)
        typer.echo(f"listening to {source} for {interval:g} s ...", err=True)
        heard = listen(sources, interval, Namespaces.of(settings, config))
        with _named(source):
            found = entitlements.from_events(heard, settings, blocks, horizon, burst_horizon)
    else:
        for name, number in {"--blocks": blocks, "--block-size": block_size}.items():
            if number is None:
                raise PrefixShieldError(f"{name}: missing, expected a number: a trace tells none")
        assert blocks is not None
        assert block_size is not None
        settings = paper_config() if config is None else load_config(config)
        requests = read_trace(source, block_size)
        with _named(source), _progress_bar() as progress:
            found = entitlements.from_trace(
                requests, settings, blocks, block_size, horizon, burst_horizon, progress
            )
    text = dump_config(found.proposed)
    parse_config(text.encode(), output or source)  # a trace may name groups as no file can
    with _file_in_place(output, mode=0o600) as file:  # with the keys of the present one
        if file is not None:
            file.write(text)
    if picture is not None:
        with _written(picture):
            entitlements.draw(found, picture)
    if as_json:
        typer.echo(json.dumps(found.as_dict()))
        return
    console = Console(markup=False, highlight=False)
    _print_whole(console, entitlements.contracts_table(found))
    _print_whole(console, entitlements.effects_table(found))
    for warning in found.warnings:
        typer.echo(f"Warning: {warning}")
    if found.skipped:
        typer.echo(
            f"{source}: {found.skipped} requests are larger than the pool of {blocks} blocks and "
            "were skipped",
            err=True,
        )


@app.command()
def experiment(
    name: Annotated[
        str | None, typer.Argument(help="Which one, or all. Without it: a list.")
    ] = None,
    engine: Annotated[str | None, typer.Option(help="Without it: the experiment's first.")] = None,
    runs: Annotated[int, typer.Option(min=1, help="Matched runs.")] = 10,
    seed: Annotated[int, typer.Option(min=0, help="Of the first run; the next has the next.")] = 0,
    results: ResultsOption = Path("results"),
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Processes, in virtual time. By default one per CPU.")
    ] = None,
) -> None:
    """Run one of the paper's experiments, or go on with one that was interrupted."""
    from prefixshield.evaluation import runner

    if name is None:
        table = Table("name", "engines", "runs", "what")
        for key, engines, cells, title in runner.catalogue():
            table.add_row(key, engines, cells, title)
        _print_whole(Console(markup=False, highlight=False), table)
        return
    chosen = runner.chosen(name, engine)
    _make(results)
    for key, on in chosen:
        with _progress_bar(f"runs of {key}, {on}") as progress:
            seeds = range(seed, seed + runs)
            folder = runner.run(key, on, seeds, results, jobs or os.cpu_count() or 1, progress)
        typer.echo(f"{folder}")


@app.command()
def worst_case(
    evaluations: Annotated[int, typer.Option(min=1, help="Workloads to evaluate.")] = 256,
    seed: Annotated[int, typer.Option(min=0, help="Of the search.")] = 0,
    output: Annotated[Path, typer.Option(file_okay=False, help="Folder to write into.")] = Path(
        "results/worst-case"
    ),
    accesses: Annotated[int, typer.Option(min=100, help="Block accesses of a workload.")] = 15_000,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Processes. Without it: one per CPU.")
    ] = None,
) -> None:
    """Search for benign traffic on which the default preset loses most hit ratio to LRU."""
    from prefixshield.evaluation import worst_case as searching

    _make(output)
    with _progress_bar("evaluations") as progress:
        found = searching.search(evaluations, seed, accesses, jobs or os.cpu_count() or 1, progress)
    with _written(output):
        paths = searching.write(found, output)
    for path in paths:
        typer.echo(f"{path}")


@app.command()
def report(
    results: ResultsOption = Path("results"),
    output: Annotated[
        Path | None,
        typer.Option(file_okay=False, help="Where to write. By default: report in that folder."),
    ] = None,
) -> None:
    """Make the paper's tables and figures from the results alone, its values next to ours."""
    from prefixshield.evaluation.report import write_report

    for path in write_report(results, output or results / "report"):
        typer.echo(f"{path}")


@app.command()
def harmless(
    section: Annotated[
        list[str] | None,
        typer.Option(help="Only this: benign, attacks, held-out, alone, ablations or sensitivity."),
    ] = None,
    trace: Annotated[
        list[str] | None, typer.Option(help="A further benign trace: PATH:BLOCK_SIZE.")
    ] = None,
    traces: Annotated[Path, typer.Option(help="Folder of traces.")] = Path("traces"),
    results: ResultsOption = Path("results"),
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Processes. Without it: one per CPU.")
    ] = None,
) -> None:
    """Measure whether the default preset harms ordinary traffic, and whom it protects."""
    from prefixshield.evaluation import harmless as measuring
    from prefixshield.evaluation.harmless_report import write_report

    further = [measuring.parse_trace(text) for text in trace or []]
    output = results / "harmless"
    _spare({"--results": output}, traces, *(path for path, _ in further))
    sources = measuring.benign_sources(traces, further)
    names = measuring.chosen(section or [])
    _make(output)
    for name in names:
        with _progress_bar(f"replays of {name}") as progress:
            measuring.run(name, sources, output, jobs or os.cpu_count() or 1, progress)
    for path in write_report(output):
        typer.echo(f"{path}")


@app.command("bench-core")
def bench_core(
    section: Annotated[
        list[str] | None,
        typer.Option(help="Only this: cycles, memory, steps, spikes, server or replays."),
    ] = None,
    trace: Annotated[Path, typer.Option(help="What is replayed.")] = Path(
        "traces/mooncake_conversation_bs512.jsonl.gz"
    ),
    block_size: Annotated[int, typer.Option(min=1, help="Tokens per block of it.")] = 512,
    results: ResultsOption = Path("results"),
) -> None:
    """Measure what the policies cost inside vLLM's scheduler, next to vLLM's own block pool."""
    output = results / "bench-core"
    _spare({"--results": output}, trace)
    _make(output)
    from prefixshield.evaluation.bench_core import run_bench_core

    def progress(what: str) -> None:
        typer.echo(f"{what} ...", err=True)

    console = Console()
    for found in run_bench_core(results, trace, block_size, section or [], progress):
        shown = Table(*found.columns, title=found.title, title_justify="left")
        for row in found.rows:
            shown.add_row(*map(str, row))
        _print_whole(console, shown)


@app.command()
def workload(
    name: Annotated[str, typer.Argument(help="A workload of the experiments, or a mixture.")],
    output: Annotated[Path, typer.Option(help="JSON lines, gzip if it ends in .gz.")],
    seed: Annotated[int, typer.Option(min=0)] = 0,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens per block.")] = 16,
) -> None:
    """Write a workload of the paper's experiments, or a mixture, as a trace."""
    from prefixshield.evaluation.experiments import make_workload

    made = make_workload(name, seed, block_size)
    with _written(output):
        write_trace(output, made.requests)


@app.command()
def mix(
    content: Annotated[Path, typer.Argument(help="Prefixes: a trace, JSON lines, plain or gzip.")],
    arrivals: Annotated[
        Path, typer.Argument(help="CSV, plain or gzip: recorded arrivals or rates of clients.")
    ],
    output: Annotated[Path, typer.Option(help="JSON lines, gzip if it ends in .gz.")],
    requests: Annotated[int | None, typer.Option(min=1, help="At most so many.")] = None,
    rate: Annotated[
        float | None, typer.Option(help="Requests per second: stretches the times evenly.")
    ] = None,
    pool: Annotated[str | None, typer.Option(help="Which pool of clients, of rates.")] = None,
    clients: Annotated[int | None, typer.Option(min=1, help="Only the busiest, so many.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of arrivals and of who gets what.")] = 0,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens per block, as in the trace.")] = 16,
) -> None:
    """Put a trace's requests under the arrivals and the skew of real clients."""
    from prefixshield.traces.arrivals import mix as mixed
    from prefixshield.traces.arrivals import read_arrivals

    if rate is not None and not 0 < rate < float("inf"):
        raise PrefixShieldError(f"--rate: found {rate}, expected more than 0 requests/s")
    _spare({"--output": output}, content, arrivals)
    found = read_trace(content, block_size)
    most = len(found) if requests is None else min(requests, len(found))
    times = read_arrivals(arrivals, most, seed=seed, pool=pool, clients=clients)
    made = mixed(found, times, block_size, seed=seed, rate=rate)
    with _written(output):
        write_trace(output, made.requests)
    who = f"{len(made.requests)} requests of {len(made.groups)} clients"
    typer.echo(f"{output}: {who} in {made.requests[-1].timestamp_ms / 1000:.0f} s")


@app.command()
def conversations(
    sharegpt: Annotated[Path, typer.Argument(help="ShareGPT-format JSON.")],
    tokenizer: Annotated[Path, typer.Option(help="A Hugging Face tokenizer.json.")],
    output: Annotated[Path, typer.Option(help="JSON lines, gzip if it ends in .gz.")],
    rate: Annotated[float, typer.Option(help="Requests per second while conversations start.")],
    groups: Annotated[int, typer.Option(min=1, help="Groups that share them equally.")] = 2,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens per block.")] = 16,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Longest prompt.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Conversations to take.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of arrival times and groups.")] = 0,
) -> None:
    """Turn ShareGPT-format conversations into a trace."""
    from prefixshield.traces import conversations as chats
    from prefixshield.traces.sharegpt import load_tokenizer, read_sharegpt

    _spare({"--output": output}, sharegpt, tokenizer)
    source = read_sharegpt(
        sharegpt,
        load_tokenizer(tokenizer),
        block_size=block_size,
        max_tokens=max_tokens,
        limit=limit,
    )
    names = {f"g{number}": "standard" for number in range(groups)}
    made = chats.conversations(seed, source, names, rate=rate)
    with _written(output):
        write_trace(output, made.requests)
    typer.echo(
        f"{output}: {len(made.requests)} requests of {len(source.conversations)} conversations; "
        f"{source.skipped} without a usable turn were skipped"
    )


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    epilog="All other options are passed on to vLLM.",
)
def serve(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="Model name or path, as vLLM takes it.")],
    config: Annotated[Path, typer.Option(help="Configuration file.")],
) -> None:
    """Start vLLM's OpenAI-compatible server with PrefixShield wired in."""
    from prefixshield.serving import launch

    launch.serve(model, config, context.args)


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    epilog="All other options are those that serve would pass on to vLLM.",
)
def check(
    context: typer.Context,
    config: Annotated[Path, typer.Argument(help="Configuration file.")],
    model: Annotated[str, typer.Option(help="Model name or path, as for serve.")] = "MODEL",
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Is this TCP port free?")
    ] = None,
) -> None:
    """Say what serve would do with a configuration, and what stands in its way; starts nothing."""
    from prefixshield.serving import check as checking

    problems = 0
    for kind, text in checking.check(config, model, port, context.args):
        problems += kind is checking.Kind.PROBLEM
        typer.echo(f"{kind.value:8}{text}")
    if problems:
        raise PrefixShieldError(f"{config}: {problems} problem{'s' if problems > 1 else ''} found")


@app.command()
def top(
    url: Annotated[str, typer.Argument(help="The server, such as http://localhost:8000.")],
    once: Annotated[
        bool, typer.Option("--once", help="Print once, since start, and exit.")
    ] = False,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two readings.")] = 2.0,
) -> None:
    """Show who holds, creates, owes and loses blocks on a running server, until Ctrl-C.

    The operator's key, if the server has one, is taken from PREFIXSHIELD_OPERATOR_KEY.
    """
    from prefixshield.top import show

    console = Console(markup=False, highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, 120)
    show(url, once, interval, console)


def main() -> None:
    """Entry point: every error of ours is one message and exit status 1."""
    try:
        app()
    except PrefixShieldError as error:
        typer.echo(str(error), err=True)
        sys.exit(1)
    except ModuleNotFoundError as error:
        name = str(error.name).partition(".")[0]
        if name not in _EXTRAS:
            raise
        extra = _EXTRAS[name]
        typer.echo(f"{name} is not installed: pip install 'prefixshield[{extra}]'", err=True)
        sys.exit(1)
    except BrokenPipeError:  # the reader of our output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def _spare(written: Mapping[str, Path | None], *read: Path | None) -> None:
    """Refuse to write over what the same command reads, or writes by another option.

    ``written``: paths by option; a folder stands for all that is in it. Links are followed.
    """
    taken = {os.path.realpath(path): "read" for path in read if path}
    for option, path in written.items():
        if path is None:
            continue
        place = os.path.realpath(path)
        for other, how in taken.items():
            if Path(other).is_relative_to(place):
                raise PrefixShieldError(
                    f"{option}: found {path}, which is {how}, expected another path"
                )
        taken[place] = f"written by {option}"


def _make(folder: Path) -> None:
    """Make a folder for results that take long."""
    with _written(folder):
        folder.mkdir(parents=True, exist_ok=True)


@contextmanager
def _event_log(path: Path | None) -> Iterator[Callable[[Event], None] | None]:
    """A writer of events."""
    with _file_in_place(path) as file:
        yield None if file is None else lambda event: print(json.dumps(event), file=file)


@contextmanager
def _file_in_place(path: Path | None, mode: int = 0o644) -> Iterator[TextIO | None]:
    """A file that is put in place only when everything went well; none for no path."""
    if path is None:
        yield None
        return
    if path.exists() and not path.is_file():  # a pipe or a terminal: nothing to put in place
        with _written(path), path.open("w", encoding="utf-8") as file:
            yield file
        return
    path = path.resolve()  # through a link, to the file itself
    with _written(path):
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with open(handle, "w", encoding="utf-8") as file:
                yield file
            os.chmod(name, mode)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise


@contextmanager
def _named(source: str) -> Iterator[None]:
    """Name the source in an error."""
    try:
        yield
    except PrefixShieldError as error:
        raise type(error)(f"{source}: {error}") from None


@contextmanager
def _written(path: Path) -> Iterator[None]:
    """Tell a failure to write as one message."""
    try:
        yield
    except OSError as error:
        raise PrefixShieldError(f"{path}: cannot be written: {error.strerror}") from None


def _print(console: Console, settings: Config, result: ReplayResult) -> None:
    table = Table(title=f"{settings.policy} ({settings.preset})", title_justify="left")
    table.add_column("group")
    counts = ("requests", "rejected", "hits", "misses", "hit ratio")
    for name in (*counts, "evicted as owner", "evicted as causer"):
        table.add_column(name, justify="right")
    by_owner: Counter[str] = Counter()
    by_causer: Counter[str] = Counter()
    for (owner, causer), blocks in result.evictions.items():
        by_owner[owner] += blocks
        by_causer[causer] += blocks

    def row(name: str, tally: Tally, evicted_of: int, evicted_by: int) -> None:
        misses = tally.blocks_queried - tally.blocks_hit
        numbers = map(str, (tally.requests, tally.rejected, tally.blocks_hit, misses))
        ratio = f"{tally.hit_ratio:.4f}"
        table.add_row(name, *numbers, ratio, str(evicted_of), str(evicted_by))

    for name, tally in result.groups.items():
        row(name, tally, by_owner[name], by_causer[name])
    table.add_section()
    row("all", result.total, by_owner.total(), by_causer.total())
    table.caption = "hits, misses and evictions in blocks"
    _print_whole(console, table)


@contextmanager
def _progress_bar(what: str = "replays") -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr, if that is a terminal; takes how many are done, of how many."""
    console = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn(what), TimeElapsedColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _write_csv(file: TextIO, comparisons: list[comparing.TraceComparison]) -> None:
    """One line per score, under a line of names."""
    rows = [
        {"trace": one.trace, "unique_blocks": one.unique_blocks, **score.as_dict()}
        for one in comparisons
        for score in one.scores
    ]
    writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)


def _print_whole(console: Console, table: Table) -> None:
    """Print a table; into a file or a pipe at its own width, which no terminal limits."""
    if not console.is_terminal:
        wide = console.options.update(max_width=1000)
        console.width = max(console.width, Measurement.get(console, wide, table).maximum)
    console.print(table)
