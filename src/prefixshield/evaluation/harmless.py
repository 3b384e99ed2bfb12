"""Does the default preset harm anybody? Serial replays of ordinary and attacked traffic.

Ordinary traffic: hit ratio less that of the better of LRU and S3-FIFO, in points. Attacked traffic:
hit ratio of the benign requests next to LRU's and the paper preset's. All hit ratios are over the
blocks of measured requests. Results are ``harmless/scores.csv``, a row per replay, and
``harmless/experiment.json``, how each section's rows came; ``harmless_report`` makes the rest.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import cycle
from pathlib import Path
from typing import Any

from prefixshield.config import paper_config
from prefixshield.errors import PrefixShieldError
from prefixshield.evaluation.experiments import DEFAULT_BLOCKS, make_workload
from prefixshield.evaluation.results import provenance, replace_files
from prefixshield.evaluation.variations import ABLATIONS, CONSTANTS, UNCHANGED, varied
from prefixshield.evaluation.workers import in_parallel
from prefixshield.sim.replay import Replay, Tally, replay_policy
from prefixshield.traces import TraceRequest, Workload, read_trace
from prefixshield.traces.arrivals import mix, read_arrivals
from prefixshield.traces.conversations import bursty, conversations, sharegpt_like
from prefixshield.traces.mixtures import MIXTURES

LRU, S3FIFO, PAPER, DEFAULT = "lru", "s3fifo", "paper", "default"

#: Pool sizes in percent of an input's unique (group, block) pairs.
SIZES = (2, 5, 10, 25)

#: Factors on the contracts' refill rates.
SCALES = (0.25, 1.0, 4.0)
ALONE_SCALES = (0.001, 1.0, 1000.0)

#: Seeds: constants were chosen on the first one's mixtures, and on the recorded traces.
DESIGN_SEED = 0
HELD_OUT_SEEDS = (1, 2, 3)
ATTACK_SEEDS = (0, 1, 2, 3)
PAPER_SEEDS = (0, 1, 2, 3, 4)

PAPER_ATTACKS = ("one-touch", "low-and-slow", "two-pass replay")
ATTACKS = tuple(name for name in MIXTURES if name.startswith("attack-"))
BENIGN = tuple(name for name in MIXTURES if name not in ATTACKS)

#: Its attacker creates little, so that debt hardly sees it; scored apart.
UNSEEN_ATTACK = "attack-loop"

#: What the constants and the parts of the policy are varied on.
SUBSET = ("drift", "scans", "loops", "alone", "hundred", "rag", "diurnal", "agents")
SUBSET_ATTACKS = ("attack-one-touch", "attack-replay", "attack-three")
SUBSET_SIZES = (10, 25)
ABLATION_SCALES = (0.25, 1.0)

#: The tenants that generated conversations are shared out to, by 1/rank.
_TENANTS = 8
_CONTRACTS = ("critical", "standard", "best-effort")
_CONVERSATIONS = 1000

#: Requests per second of a mix by rates, and at most so many requests.
_MIX_RATE = 3.0
_MIX_REQUESTS = 3000
_MIX_POOL = "m-mid"


@dataclass(frozen=True)
class Source:
    """Where requests come from."""

    kind: str
    """trace, mixture, mix (a trace under other arrivals), generated, or paper."""
    name: str
    seed: int = DESIGN_SEED
    path: Path | None = None
    """Of the trace, if any."""
    block_size: int = 16
    """Tokens per block."""
    arrivals: Path | None = None
    """Of a mix."""
    further: bool = False
    """Whether the trace is not of the folder but was given beside it."""
    alone: bool = False
    """Whether one group sends everything."""


@dataclass(frozen=True)
class Job:
    """One replay."""

    section: str
    source: Source
    size: int | None
    """Percent of the unique blocks; None: the paper's pool."""
    policy: str
    scale: float | None = None
    """Of refill rates; None: the policy reads no contracts."""
    variation: str = UNCHANGED


@dataclass(frozen=True)
class Score:
    """What one replay gave, over the measured requests; a row of ``scores.csv``."""

    section: str
    kind: str
    input: str
    seed: int
    size_percent: int | None
    blocks: int
    policy: str
    refill_scale: float | None
    variation: str
    requests: int
    rejected: int
    blocks_queried: int
    blocks_hit: int

    @property
    def percent(self) -> float:
        """Hit ratio in percent."""
        return 100 * self.blocks_hit / self.blocks_queried if self.blocks_queried else 0.0

    @property
    def place(self) -> tuple[str, str, int, int | None]:
        """What scores of several policies have to share to be compared."""
        return self.kind, self.input, self.seed, self.size_percent


# --- inputs ---


def benign_sources(folder: Path, extra: Sequence[tuple[Path, int]]) -> list[Source]:
    """All ordinary traffic: of a folder of traces, of further traces, and made from seed 0.

    Raises PrefixShieldError when the folder has no trace, a further one is not there, or two have
    one name.
    """
    shipped = [(path, _block_size(path)) for path in sorted(folder.glob("*.jsonl.gz"))]
    if not shipped:
        raise PrefixShieldError(f"{folder}: found no trace, expected files like NAME_bs16.jsonl.gz")
    found = [Source("trace", _name(path), 0, path, size) for path, size in shipped]
    found += [Source("trace", _name(path), 0, path, size, further=True) for path, size in extra]
    for path, _ in extra:
        if not path.is_file():
            raise PrefixShieldError(f"--trace: found {str(path)!r}, expected a file")
    if len({source.name for source in found}) != len(found):
        names = ", ".join(source.name for source in found)
        raise PrefixShieldError(f"--trace: found the names {names}, expected every one once")
    mixes = [
        Source("mix", f"{_name(path)} by {_name(times)}", 0, path, size, times)
        for path, size in shipped
        for times in sorted(folder.glob("*.csv*"))
    ]
    generated = [Source("generated", name) for name in ("conversations", "bursty conversations")]
    return [*found, *mixes, *generated, *(Source("mixture", name) for name in BENIGN)]


def load(source: Source) -> Sequence[TraceRequest]:
    """The requests of a source."""
    requests = _load(source)
    if source.alone:
        return [replace(request, group="alone", contract="standard") for request in requests]
    return requests


def _load(source: Source) -> Sequence[TraceRequest]:
    if source.path is None:
        made = _conversations(source) if source.kind == "generated" else _made(source)
        # Not every workload's requests name their contract.
        return [replace(one, contract=made.groups[one.group or ""]) for one in made.requests]
    content = read_trace(source.path, source.block_size)
    if source.arrivals is None:
        return content
    recorded = source.arrivals.suffix == ".csv"
    times = read_arrivals(
        source.arrivals,
        min(_MIX_REQUESTS, len(content)),
        seed=source.seed,
        pool=None if recorded else _MIX_POOL,
    )
    rate = None if recorded else _MIX_RATE
    return mix(content, times, source.block_size, seed=source.seed, rate=rate).requests


def _made(source: Source) -> Workload:
    return make_workload(source.name, source.seed, source.block_size)


def _conversations(source: Source) -> Workload:
    groups = {
        f"tenant-{number}": contract
        for number, contract in zip(range(_TENANTS), cycle(_CONTRACTS), strict=False)
    }
    made = conversations(
        source.seed,
        sharegpt_like(source.seed, _CONVERSATIONS, block_size=source.block_size),
        groups,
        rate=_MIX_RATE,
        shares={group: 1 / rank for rank, group in enumerate(groups, start=1)},
    )
    if source.name.startswith("bursty"):
        made = bursty(made, period_s=60.0, duty_ratio=0.2)
    return made


def parse_trace(text: str) -> tuple[Path, int]:
    """A trace and its tokens per block from ``PATH:16``."""
    path, _, size = text.rpartition(":")
    if not path or not re.fullmatch(r"[1-9][0-9]{0,6}", size):
        raise PrefixShieldError(f"--trace: found {text!r}, expected PATH:BLOCK_SIZE")
    return Path(path), int(size)


def _name(path: Path) -> str:
    """Of a trace or of arrivals: the file's, without its endings and its block size."""
    return re.sub(r"_bs[0-9]+$|_arrivals$|_client_rates$", "", path.name.partition(".")[0])


def _block_size(path: Path) -> int:
    found = re.search(r"_bs([0-9]+)\.", path.name)
    if not found:
        raise PrefixShieldError(f"{path}: found no block size in the name, expected NAME_bs16...")
    return int(found[1])


# --- what is replayed ---


def _against_baselines(
    section: str,
    source: Source,
    scales: Sequence[float],
    *,
    sizes: Sequence[int] = SIZES,
    paper: bool = True,
) -> Iterator[Job]:
    for size in sizes:
        yield Job(section, source, size, LRU)
        yield Job(section, source, size, S3FIFO)
        if paper:
            yield Job(section, source, size, PAPER, 1.0)
        for scale in scales:
            yield Job(section, source, size, DEFAULT, scale)


def _benign(section: str, sources: Sequence[Source]) -> Iterator[Job]:
    for source in sources:
        yield from _against_baselines(section, source, SCALES)


def _held_out(section: str, sources: Sequence[Source]) -> Iterator[Job]:
    """Other scales for the first of the seeds alone."""
    for seed in HELD_OUT_SEEDS:
        scales = SCALES if seed == HELD_OUT_SEEDS[0] else (1.0,)
        for name in BENIGN:
            yield from _against_baselines(section, Source("mixture", name, seed), scales)


def _attacks(section: str, sources: Sequence[Source]) -> Iterator[Job]:
    """Other scales for the first of the seeds alone."""
    for name in PAPER_ATTACKS:
        for seed in PAPER_SEEDS:
            yield Job(section, Source("paper", name, seed), None, LRU)
            for policy in (PAPER, DEFAULT):
                yield Job(section, Source("paper", name, seed), None, policy, 1.0)
    for seed in ATTACK_SEEDS:
        for name in ATTACKS:
            source = Source("mixture", name, seed)
            for size in SIZES:
                yield Job(section, source, size, LRU)
                for scale in SCALES if seed == ATTACK_SEEDS[0] else (1.0,):
                    for policy in (PAPER, DEFAULT):
                        yield Job(section, source, size, policy, scale)


def _alone(section: str, sources: Sequence[Source]) -> Iterator[Job]:
    for source in sources:
        one = replace(source, alone=True)
        yield from _against_baselines(section, one, ALONE_SCALES, paper=False)


def _on_subset(section: str, variations: Sequence[str], scales: Sequence[float]) -> Iterator[Job]:
    for name in SUBSET:
        source = Source("mixture", name)
        yield from _against_baselines(section, source, (), sizes=SUBSET_SIZES, paper=False)
        for size in SUBSET_SIZES:
            for scale in scales:
                for variation in variations:
                    yield Job(section, source, size, DEFAULT, scale, variation)
    for name in SUBSET_ATTACKS:
        source, size = Source("mixture", name), SUBSET_SIZES[0]
        yield Job(section, source, size, LRU)
        yield Job(section, source, size, PAPER, 1.0)
        for variation in variations:
            yield Job(section, source, size, DEFAULT, 1.0, variation)


def _sensitivity(section: str, sources: Sequence[Source]) -> Iterator[Job]:
    variations = [name for values in CONSTANTS.values() for name in values]
    return _on_subset(section, [UNCHANGED, *variations], (1.0,))


def _ablations(section: str, sources: Sequence[Source]) -> Iterator[Job]:
    return _on_subset(section, [UNCHANGED, *ABLATIONS], ABLATION_SCALES)


#: Every section by its name: its replays, from the benign sources.
SECTIONS: Mapping[str, Callable[[str, Sequence[Source]], Iterator[Job]]] = {
    "benign": _benign,
    "attacks": _attacks,
    "held-out": _held_out,
    "alone": _alone,
    "ablations": _ablations,
    "sensitivity": _sensitivity,
}


def chosen(names: Sequence[str]) -> Sequence[str]:
    """The sections of these names; of no name, all. Raises PrefixShieldError for an unknown one."""
    for name in names:
        if name not in SECTIONS:
            known = ", ".join(SECTIONS)
            raise PrefixShieldError(f"--section: found {name!r}, expected one of: {known}")
    return names or list(SECTIONS)


def run(
    section: str,
    sources: Sequence[Source],
    output: Path,
    processes: int = 1,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Replay one of `SECTIONS` and put its rows in place of those that it had.

    Raises:
        PrefixShieldError: a trace cannot be used, or a process died.

    """
    made_on = provenance()
    scores = replay_all(list(SECTIONS[section](section, sources)), processes, progress)
    kept = [score for score in read_scores(output) if score.section != section]
    order = list(SECTIONS)
    rows = sorted([*kept, *scores], key=lambda score: order.index(score.section))
    manifest = {**read_manifest(output), section: _describe(section, sources, scores, made_on)}
    manifest = {name: manifest[name] for name in order if name in manifest}
    text = io.StringIO()
    writer = csv.DictWriter(text, list(Score.__annotations__), lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(score) for score in rows)
    files = {"scores.csv": text.getvalue(), "experiment.json": json.dumps(manifest, indent=2)}
    replace_files(output, {name: content.rstrip("\n") + "\n" for name, content in files.items()})


def _describe(
    section: str, sources: Sequence[Source], scores: Sequence[Score], made_on: Mapping[str, Any]
) -> dict[str, Any]:
    further = [
        f" --trace {one.path.name}:{one.block_size}" for one in sources if one.further and one.path
    ]
    return {
        "command": f"prefixshield harmless --section {section}{''.join(further)}",
        "replays": len(scores),
        **made_on,
    }


def read_manifest(output: Path) -> dict[str, Any]:
    """How the rows came, by section; empty when there are none."""
    try:
        found: dict[str, Any] = json.loads((output / "experiment.json").read_text("utf-8"))
    except FileNotFoundError:
        return {}
    return found


def read_scores(output: Path) -> list[Score]:
    """All rows in the order of the file; none when there is no file."""
    path = output / "scores.csv"
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return [_typed(path, row) for row in csv.DictReader(file)]
    except FileNotFoundError:
        return []


def _typed(path: Path, row: Mapping[str, str]) -> Score:
    columns = list(Score.__annotations__)
    if list(row) != columns:
        raise PrefixShieldError(
            f"{path}: found the columns {', '.join(row)}, expected {', '.join(columns)}"
        )
    texts = ("section", "kind", "input", "policy", "variation")
    typed: dict[str, Any] = {
        key: text if key in texts else json.loads(text or "null") for key, text in row.items()
    }
    return Score(**typed)


def replay_all(
    jobs: Sequence[Job],
    processes: int = 1,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Score]:
    """Scores in the order of the jobs, whichever replay ended first."""
    return in_parallel(measure, jobs, processes, progress)


def measure(job: Job) -> Score:
    """Replay a job and count over the measured requests."""
    requests, unique = _requests(job.source)
    blocks = DEFAULT_BLOCKS if job.size is None else max(1, round(job.size * unique / 100))
    config = paper_config()
    contracts = {
        name: terms.model_copy(update={"refill_rate": terms.refill_rate * (job.scale or 1)})
        for name, terms in config.contracts.items()
    }
    preset = job.policy in (PAPER, DEFAULT)
    chosen = {"policy": "shield", "preset": job.policy} if preset else {"policy": job.policy}
    config = config.model_copy(update={**chosen, "contracts": contracts})
    counted = Tally()
    with varied(job.variation):
        policy = replay_policy(config, blocks, requests, job.source.block_size)
        replay = Replay(config, policy, job.source.block_size)
        total = replay.result.total
        for request in requests:
            before = replace(total)
            replay.run([request])
            if request.measured:
                counted.requests += 1
                counted.rejected += total.rejected - before.rejected
                counted.blocks_queried += total.blocks_queried - before.blocks_queried
                counted.blocks_hit += total.blocks_hit - before.blocks_hit
    return Score(
        section=job.section,
        kind=job.source.kind,
        input=job.source.name,
        seed=job.source.seed,
        size_percent=job.size,
        blocks=blocks,
        policy=job.policy,
        refill_scale=job.scale,
        variation=job.variation,
        requests=counted.requests,
        rejected=counted.rejected,
        blocks_queried=counted.blocks_queried,
        blocks_hit=counted.blocks_hit,
    )


@lru_cache(maxsize=1)
def _requests(source: Source) -> tuple[Sequence[TraceRequest], int]:
    """The requests and how many unique (group, block) pairs they have."""
    requests = load(source)
    return requests, len({(one.group, block) for one in requests for block in one.hash_ids})
