"""The ``prefixshield`` command."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from prefixshield import __version__
from prefixshield.config import Config, load_config, paper_config
from prefixshield.errors import PrefixShieldError
from prefixshield.policies import POLICIES, PRESETS
from prefixshield.sim.clairvoyant import Clairvoyant
from prefixshield.sim.replay import Event, Replay, ReplayResult, Tally, replay_policy
from prefixshield.traces import read_trace

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Multi-tenant KV-cache protection for vLLM: whoever fills the prefix cache pays for it.",
)

#: The largest pool that replay takes, in blocks: far above any real one, so that a digit too many
#: ends in a message and not in the machine's memory.
MAX_BLOCKS = 2**24

PolicyName = StrEnum("PolicyName", {name: name for name in (*POLICIES, Clairvoyant.name)})  # type: ignore[misc]
PresetName = StrEnum("PresetName", {name: name for name in PRESETS})  # type: ignore[misc]


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
        typer.echo(
            f"{trace}: {len(result.rejected_lines)} requests are larger than the pool of "
            f"{blocks} blocks and were skipped (lines {shown}{more})",
            err=True,
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


def main() -> None:
    """Entry point: every error of ours is one message and exit status 1."""
    try:
        app()
    except PrefixShieldError as error:
        typer.echo(str(error), err=True)
        sys.exit(1)
    except BrokenPipeError:  # the reader of our output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


@contextmanager
def _event_log(path: Path | None) -> Iterator[Callable[[Event], None] | None]:
    """A writer of events that puts the file in place only when everything went well."""
    if path is None:
        yield None
        return
    if path.exists() and not path.is_file():  # a pipe or a terminal: nothing to put in place
        with _written(path), path.open("w", encoding="utf-8") as file:
            yield lambda event: print(json.dumps(event), file=file)
        return
    path = path.resolve()  # through a link, to the file itself
    with _written(path):
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with open(handle, "w", encoding="utf-8") as file:
                yield lambda event: print(json.dumps(event), file=file)
            os.chmod(name, 0o644)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise


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
    console.print(table)
