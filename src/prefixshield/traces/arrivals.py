"""A trace's requests under the arrivals and the skew of real clients.

Public traces of clients have arrivals and no prefixes, traces with prefixes have no clients: here
one's sessions are dealt to the other's clients.
"""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, cycle, islice, pairwise
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

from prefixshield.errors import PrefixShieldError, TraceError
from prefixshield.traces.reader import TraceRequest, lines
from prefixshield.traces.workload import Workload

#: Columns by which the two formats are told apart; others are not used.
_RECORDED = ("client", "arrival_s")
_RATES = ("pool", "client", "window_start_s", "rate_rps", "pattern", "arg1")

#: Seconds of a window of ServeGen's client rates.
_WINDOW_S = 600.0

#: A block that more than so many different ones follow is common to sessions and belongs to none.
#: Within a session few prompts part from the same block.
_MOST_BRANCHES = 16

_CONTRACTS = ("critical", "standard", "best-effort")


class Arrival(NamedTuple):
    """When some client sends a request."""

    at_s: float
    client: str


def read_arrivals(
    path: Path | str,
    most: int,
    *,
    seed: int = 0,
    pool: str | None = None,
    clients: int | None = None,
) -> list[Arrival]:
    """The first ``most`` arrivals in order of time, from one of two CSV formats, plain or gzip.

    Recorded arrivals (VTC's arena trace, OSDI'24) are a line each: ``client`` and ``arrival_s``.
    Rates (ServeGen) are a line for each ``pool``, ``client`` and window of 600 s. In a window a
    client sends ``rate_rps`` times its length; gaps are drawn from the ``pattern``, Gamma or
    Weibull, with the shape ``arg1``, and scaled to fill the window. So the rate is exact, which
    the scale that was fitted with the shape, ``arg2``, does not ensure.

    Args:
        path: The file; its first line names the columns.
        most: How many to take.
        seed: Of what is drawn.
        pool: Which one, where a file has several.
        clients: Only so many, the busiest.

    Raises:
        TraceError: the file cannot be read, or breaks its format.
        PrefixShieldError: the pool is not one of the file's.

    """
    rows = _rows(path)
    if (header := next(rows, None)) is None:
        raise TraceError(f"{path}: found an empty file, expected a line of column names")
    columns = header.fields
    if set(_RATES) <= set(columns):
        rates = _read_rates(path, columns, rows, pool)
        busy: defaultdict[str, float] = defaultdict(float)
        for rate in rates:
            busy[rate.client] += rate.rate_rps
        chosen = _busiest(busy, clients)
        found = _draw([rate for rate in rates if rate.client in chosen], seed)
    elif set(_RECORDED) <= set(columns):
        if pool is not None:
            raise PrefixShieldError(f"pool: found {pool!r}, expected none: {path} has no pools")
        recorded = _read_recorded(path, columns, rows)
        chosen = _busiest(Counter(arrival.client for arrival in recorded), clients)
        found = iter(sorted(arrival for arrival in recorded if arrival.client in chosen))
    else:
        raise TraceError(
            f"{path}: line {header.number}: found the columns {','.join(columns)[:80]!r}, "
            f"expected {','.join(_RECORDED)} or {','.join(_RATES)} among them"
        )
    return list(islice(found, most))


def mix(
    content: Sequence[TraceRequest],
    arrivals: Sequence[Arrival],
    block_size: int,
    *,
    seed: int = 0,
    rate: float | None = None,
) -> Workload:
    """The requests of ``content`` at the times of ``arrivals``, by their clients.

    A session is what lies behind the last block of a prompt that more than 16 different ones
    follow: behind a common system prompt, for example. Sessions in order of their first request
    are dealt as a whole to clients, in proportion to the arrivals that they still lack. A client
    takes the requests of its sessions in the order of ``content``, one at every arrival; what is
    left when its arrivals are used up is dropped, and where ``content`` ends early, arrivals.

    Every client is a group of its own, and no id is in two groups, so what sessions have in common
    is common only within a client. Contracts cycle through the paper's, the busiest client first.
    Keys beside times, groups, contracts and ids are the content's.

    Args:
        content: Requests in order of time.
        arrivals: In order of time.
        block_size: Tokens per block of the content.
        seed: Of the dealing.
        rate: Requests per second: stretches all times by one factor. None leaves them.

    Raises:
        PrefixShieldError: there is nothing to mix.

    """
    if not content or not arrivals:
        raise PrefixShieldError(
            f"mix: found {len(content)} requests and {len(arrivals)} arrivals, "
            "expected at least one of each"
        )
    times: defaultdict[str, list[float]] = defaultdict(list)
    start_s, end_s = arrivals[0].at_s, arrivals[-1].at_s
    factor = 1.0
    if rate is not None and end_s > start_s:
        factor = len(arrivals) / (end_s - start_s) / rate
    for arrival in arrivals:
        times[arrival.client].append((arrival.at_s - start_s) * factor)
    dealt = _deal(sessions(content), {client: len(at) for client, at in times.items()}, seed)
    new_ids: defaultdict[Hashable, int] = defaultdict(count().__next__)
    ranked = sorted(times, key=lambda client: -len(times[client]))
    groups = {}
    requests = []
    for client, contract in zip(ranked, cycle(_CONTRACTS), strict=False):
        group = f"client-{client}"
        for at_s, index in zip(times[client], sorted(dealt[client]), strict=False):
            request = content[index]
            groups[group] = contract
            requests.append(
                replace(
                    request,
                    timestamp_ms=round(at_s * 1000, 3),
                    hash_ids=tuple(new_ids[group, request.group, i] for i in request.hash_ids),
                    group=group,
                    contract=contract,
                )
            )
    requests.sort(key=lambda request: request.timestamp_ms)
    numbered = (replace(request, line=line) for line, request in enumerate(requests, start=1))
    return Workload("mix", block_size, groups, tuple(numbered))


def sessions(content: Sequence[TraceRequest]) -> list[list[int]]:
    """The sessions of a trace, by the positions of their requests; see `mix`."""
    following: defaultdict[tuple[str | None, int], set[int]] = defaultdict(set)
    for request in content:
        for block, after in pairwise(request.hash_ids):
            following[request.group, block].add(after)
    common = {block for block, after in following.items() if len(after) > _MOST_BRANCHES}
    found: defaultdict[Hashable, list[int]] = defaultdict(list)
    for index, request in enumerate(content):
        ids = request.hash_ids
        depth = max(
            (i + 1 for i, block in enumerate(ids) if (request.group, block) in common), default=0
        )
        first = ids[min(depth, len(ids) - 1)] if ids else None
        # A prompt without a full block shares nothing.
        found[(request.group, first) if ids else index].append(index)
    return list(found.values())


def _deal(
    found: Sequence[Sequence[int]], arrivals: Mapping[str, int], seed: int
) -> Mapping[str, list[int]]:
    """The positions of each client's requests, at least as many as it has arrivals if there are."""
    rng = random.Random(f"deal {seed}")
    dealt: dict[str, list[int]] = {client: [] for client in arrivals}
    names, lacking = list(arrivals), list(arrivals.values())
    for session in found:
        if not any(lacking):
            break
        (chosen,) = rng.choices(range(len(names)), lacking)
        dealt[names[chosen]] += session
        lacking[chosen] = max(0, lacking[chosen] - len(session))
    return dealt


# --- the two formats ---


class _Row(NamedTuple):
    number: int
    fields: list[str]


@dataclass(frozen=True, slots=True)
class _Rate:
    """What one client sends in one window."""

    client: str
    start_s: float
    rate_rps: float
    pattern: str
    shape: float


#: A gap of the given shape, on any scale.
_PATTERNS: Mapping[str, Callable[[random.Random, float], float]] = {
    "Gamma": lambda rng, shape: rng.gammavariate(shape, 1.0),
    "Weibull": lambda rng, shape: rng.weibullvariate(1.0, shape),
}


def _rows(path: Path | str) -> Iterator[_Row]:
    for number, line in lines(path):
        try:
            yield _Row(number, line.decode().strip().split(","))
        except UnicodeDecodeError:
            raise TraceError(f"{path}: line {number}: not UTF-8 text") from None


def _records(
    path: Path | str, columns: Sequence[str], rows: Iterator[_Row]
) -> Iterator[tuple[int, dict[str, str]]]:
    """Lines as mappings, with their numbers."""
    for number, fields in rows:
        if len(fields) != len(columns):
            raise TraceError(
                f"{path}: line {number}: found {len(fields)} fields, expected {len(columns)}"
            )
        yield number, dict(zip(columns, fields, strict=True))


def _read_recorded(path: Path | str, columns: Sequence[str], rows: Iterator[_Row]) -> list[Arrival]:
    return [
        Arrival(_number(path, number, record, "arrival_s"), record["client"])
        for number, record in _records(path, columns, rows)
    ]


def _read_rates(
    path: Path | str, columns: Sequence[str], rows: Iterator[_Row], pool: str | None
) -> list[_Rate]:
    """Those of one pool."""
    by_pool: defaultdict[str, list[_Rate]] = defaultdict(list)
    for number, record in _records(path, columns, rows):
        if (pattern := record["pattern"]) not in _PATTERNS:
            raise TraceError(
                f"{path}: line {number}: pattern: found {pattern!r}, "
                f"expected one of: {', '.join(_PATTERNS)}"
            )
        rate = _Rate(
            client=record["client"],
            start_s=_number(path, number, record, "window_start_s"),
            rate_rps=_number(path, number, record, "rate_rps"),
            pattern=pattern,
            shape=_number(path, number, record, "arg1", positive=True),
        )
        by_pool[record["pool"]].append(rate)
    if pool is None and len(by_pool) == 1:
        (pool,) = by_pool
    if by_pool and pool not in by_pool:
        what = "missing" if pool is None else f"found {pool!r}"
        raise PrefixShieldError(f"pool: {what}, expected one of: {', '.join(by_pool)}")
    return by_pool[pool] if pool is not None else []


def _draw(rates: Sequence[_Rate], seed: int) -> Iterator[Arrival]:
    """Arrivals window by window, as far as they are asked for."""
    rng = random.Random(f"arrivals {seed}")
    windows: defaultdict[float, list[_Rate]] = defaultdict(list)
    for rate in rates:
        windows[rate.start_s].append(rate)
    for start_s, present in sorted(windows.items()):
        found = []
        for rate in present:
            expected = rate.rate_rps * _WINDOW_S
            sent = int(expected) + (rng.random() < expected % 1)
            ends = [0.0]
            for _ in range(sent + 1):
                ends.append(ends[-1] + _PATTERNS[rate.pattern](rng, rate.shape))
            scale = _WINDOW_S / ends[-1] if ends[-1] else 0.0
            found += [Arrival(start_s + end * scale, rate.client) for end in ends[1:-1]]
        yield from sorted(found, key=attrgetter("at_s"))


def _busiest(requests: Mapping[str, float], clients: int | None) -> set[str]:
    return set(sorted(requests, key=lambda client: -requests[client])[:clients])


def _number(
    path: Path | str, number: int, record: Mapping[str, str], column: str, positive: bool = False
) -> float:
    text = record[column]
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf or (positive and value == 0):
        raise TraceError(
            f"{path}: line {number}: {column}: found {text!r}, "
            f"expected a number {'above' if positive else 'of at least'} 0"
        )
    return value
