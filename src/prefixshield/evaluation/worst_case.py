"""The worst case found by search: benign traffic on which the default preset loses most to LRU.

A genome describes a multi-tenant workload and a pool; several islands evolve genomes, each by a
(μ+λ) strategy, towards the largest loss in serial replay. The result depends on the seed and the
number of evaluations alone, not on the number of processes. What it shows is a lower bound of the
worst case: a search that finds nothing worse proves nothing.
"""

from __future__ import annotations

import csv
import json
import math
import multiprocessing
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

from prefixshield.config import PAPER_CONTRACTS, Config, paper_config
from prefixshield.core.order import Rule
from prefixshield.core.trial import RULES
from prefixshield.errors import PrefixShieldError
from prefixshield.evaluation.markdown import table
from prefixshield.evaluation.results import provenance
from prefixshield.evaluation.workers import end_with_the_command
from prefixshield.policies import PolicySetup
from prefixshield.policies.adaptive import AdaptiveShield
from prefixshield.policies.base import Policy
from prefixshield.policies.lru import Lru
from prefixshield.policies.s3fifo import S3Fifo
from prefixshield.policies.shield import Shield
from prefixshield.sim.replay import Replay, replay_policy
from prefixshield.traces import TraceRequest, Workload

#: Block accesses of a workload, unless a search asks for others.
ACCESSES = 15_000

#: The smallest pool: no prompt of a genome is larger.
LEAST_POOL_BLOCKS = 256

#: Tokens per block; serial replay does not depend on it.
BLOCK_SIZE = 16

#: The draws that a genome's loss is the mean of, and those that it is evaluated on afterwards.
SEEDS = (0, 1)
FRESH_SEEDS = (2, 3, 4, 5, 6)

#: How many times longer a workload is made to see whether its loss passes.
LONGER = 4

ISLANDS = 4
PARENTS = 4  # μ, of each island
CHILDREN = 8  # λ, of each island and generation
FIRST_GENOMES = 16  # drawn at random, of each island

KINDS = ("chat", "templates", "loop", "scan", "drift")
CONTRACTS = tuple(PAPER_CONTRACTS)
REFILL_SCALES = (0.25, 1.0, 4.0)
MOST_TENANTS = 8

#: A conversation's turns, and how many of them make up ``prompt_blocks``.
_TURNS = (2, 8)
_TURNS_OF_A_PROMPT = 4

Prefix = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Tenant:
    """What one tenant sends."""

    kind: str
    later: str
    """What it sends in every other phase; the same as ``kind`` for a tenant without phases."""
    phase_requests: int
    weight: float
    """Requests, relative to the other tenants'."""
    prompt_blocks: int
    working_set: int
    """Blocks of all documents, templates or open conversations together."""
    skew: float
    """Zipf exponent of the templates' popularity."""
    turnover: int
    """Requests between two replacements of a template, of a drifting working set."""
    contract: str


@dataclass(frozen=True, slots=True)
class Genome:
    """A workload and the pool that it runs on."""

    tenants: tuple[Tenant, ...]
    blocks_per_s: float
    pool_share: float
    """Of the workload's unique blocks; ``LEAST_POOL_BLOCKS`` if that is more."""
    refill_scale: float


#: Least and most of every number of a genome; draws and mutations are even in its logarithm.
RANGES = {
    "phase_requests": (20, 1000),
    "weight": (0.05, 1.0),
    "prompt_blocks": (4, 100),
    "working_set": (50, 8000),
    "skew": (0.1, 1.6),
    "turnover": (1, 64),
    "blocks_per_s": (20.0, 1000.0),
    "pool_share": (0.02, 0.5),
}

_CHOICES: dict[str, Sequence[Any]] = {
    "kind": KINDS,
    "later": KINDS,
    "contract": CONTRACTS,
    "refill_scale": REFILL_SCALES,
}


@dataclass(frozen=True, slots=True)
class Figures:
    """Hit ratios, 0-1."""

    lru: float
    s3fifo: float
    default: float

    @property
    def loss(self) -> float:
        """To LRU, in percentage points."""
        return 100 * (self.lru - self.default)

    @property
    def loss_to_better(self) -> float:
        """To the better of LRU and S3-FIFO, in percentage points."""
        return 100 * (max(self.lru, self.s3fifo) - self.default)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One genome of one island."""

    island: int
    generation: int
    genome: Genome
    figures: Figures


# --- genomes ---


def random_genome(rng: random.Random) -> Genome:
    return Genome(
        tuple(_random_tenant(rng) for _ in range(rng.randint(1, MOST_TENANTS))),
        blocks_per_s=_draw(rng, "blocks_per_s"),
        pool_share=_draw(rng, "pool_share"),
        refill_scale=rng.choice(REFILL_SCALES),
    )


def mutate(genome: Genome, rng: random.Random) -> Genome:
    """A genome with one to three changes."""
    for _ in range(rng.randint(1, 3)):
        tenants = list(genome.tenants)
        place = rng.randrange(len(tenants))
        what = rng.random()
        if what < 0.1 and len(tenants) < MOST_TENANTS:
            tenants.append(rng.choice([_random_tenant(rng), tenants[place]]))
        elif what < 0.2 and len(tenants) > 1:
            del tenants[place]
        elif what < 0.45:
            name = rng.choice(["blocks_per_s", "pool_share", "pool_share", "refill_scale"])
            genome = replace(genome, **{name: _changed(rng, name, getattr(genome, name))})
        else:
            tenant = tenants[place]
            name = rng.choice(list(asdict(tenant)))
            value = _changed(rng, name, getattr(tenant, name))
            tenants[place] = replace(tenant, **{name: value})
        genome = replace(genome, tenants=tuple(tenants))
    return genome


def _random_tenant(rng: random.Random) -> Tenant:
    kind = rng.choice(KINDS)
    return Tenant(
        kind=kind,
        later=rng.choice(KINDS) if rng.random() < 0.3 else kind,
        phase_requests=_draw(rng, "phase_requests"),
        weight=_draw(rng, "weight"),
        prompt_blocks=_draw(rng, "prompt_blocks"),
        working_set=_draw(rng, "working_set"),
        skew=_draw(rng, "skew"),
        turnover=_draw(rng, "turnover"),
        contract=rng.choice(CONTRACTS),
    )


def _draw(rng: random.Random, name: str) -> Any:
    least, most = RANGES[name]
    return _within(name, math.exp(rng.uniform(math.log(least), math.log(most))))


def _changed(rng: random.Random, name: str, value: Any) -> Any:
    if name in _CHOICES:
        return rng.choice(_CHOICES[name])
    return _within(name, value * math.exp(rng.gauss(0.0, 0.5)))


def _within(name: str, value: float) -> float:
    """The nearest value that the range allows, whole where its ends are."""
    least, most = RANGES[name]
    value = min(most, max(least, value))
    return round(value) if isinstance(least, int) else float(f"{value:.4g}")


# --- workloads ---


def make_workload(genome: Genome, seed: int, accesses: int) -> Workload:
    """The requests of a genome, until they access so many blocks.

    A longer workload begins with the shorter one's requests.
    """
    rng = random.Random(f"worst case {seed}")  # as text: stable over Pythons
    used = 0

    def fresh(size: int) -> Prefix:
        nonlocal used
        used += size
        return tuple(range(used - size, used))

    streams = [
        _requests_of(tenant, random.Random(f"worst case {seed} {number}"), fresh)
        for number, tenant in enumerate(genome.tenants)
    ]
    cumulative = list(accumulate(tenant.weight for tenant in genome.tenants))
    names = _groups(genome)
    groups = {name: tenant.contract for name, tenant in zip(names, genome.tenants, strict=True)}
    requests: list[TraceRequest] = []
    now_s, asked = 0.0, 0
    while asked < accesses:
        (number,) = rng.choices(range(len(streams)), cum_weights=cumulative)
        prompt = next(streams[number])
        now_s += rng.expovariate(genome.blocks_per_s / len(prompt))
        asked += len(prompt)
        requests.append(
            TraceRequest(
                line=len(requests) + 1,
                timestamp_ms=round(now_s * 1000, 3),
                input_length=len(prompt) * BLOCK_SIZE + 1,
                output_length=1,
                hash_ids=prompt,
                group=names[number],
                contract=groups[names[number]],
                prefix_id=None,
            )
        )
    return Workload("worst-case", BLOCK_SIZE, groups, tuple(requests))


def _groups(genome: Genome) -> list[str]:
    return [f"tenant-{number}" for number in range(len(genome.tenants))]


def pool_blocks(genome: Genome, requests: Sequence[TraceRequest]) -> int:
    """Size of the genome's pool for these requests."""
    unique = len({block for request in requests for block in request.hash_ids})
    return max(LEAST_POOL_BLOCKS, round(genome.pool_share * unique))


def _requests_of(
    tenant: Tenant, rng: random.Random, fresh: Callable[[int], Prefix]
) -> Iterator[Prefix]:
    """A tenant's prompts, each phase going on where the one of its kind before it ended."""
    streams = {kind: _KINDS[kind](tenant, rng, fresh) for kind in (tenant.kind, tenant.later)}
    while True:
        for kind in (tenant.kind, tenant.later):
            for _ in range(tenant.phase_requests):
                yield next(streams[kind])


def _chat(tenant: Tenant, rng: random.Random, fresh: Callable[[int], Prefix]) -> Iterator[Prefix]:
    """Open conversations, any of which goes on; one that ends makes room for another."""
    turn_blocks = max(1, tenant.prompt_blocks // _TURNS_OF_A_PROMPT)
    count = max(1, tenant.working_set // tenant.prompt_blocks)
    said: list[Prefix] = [()] * count
    left = [rng.randint(*_TURNS) for _ in range(count)]
    while True:
        place = rng.randrange(count)
        said[place] += fresh(turn_blocks)
        yield said[place]
        left[place] -= 1
        if not left[place]:
            said[place], left[place] = (), rng.randint(*_TURNS)


def _templates(
    tenant: Tenant, rng: random.Random, fresh: Callable[[int], Prefix]
) -> Iterator[Prefix]:
    """Zipf-popular templates, each followed by a block of its own."""
    return _popular(tenant, rng, fresh, turnover=None)


def _drift(tenant: Tenant, rng: random.Random, fresh: Callable[[int], Prefix]) -> Iterator[Prefix]:
    """The same, one template after the other being replaced."""
    return _popular(tenant, rng, fresh, turnover=tenant.turnover)


def _popular(
    tenant: Tenant, rng: random.Random, fresh: Callable[[int], Prefix], turnover: int | None
) -> Iterator[Prefix]:
    count = max(1, tenant.working_set // tenant.prompt_blocks)
    templates: list[Prefix] = [()] * count
    cumulative = list(accumulate(rank**-tenant.skew for rank in range(1, count + 1)))
    replaced = rng.sample(range(count), count)
    asked = 0
    while True:
        asked += 1
        if turnover and asked % turnover == 0:
            templates[replaced[asked // turnover % count]] = ()
        (place,) = rng.choices(range(count), cum_weights=cumulative)
        if not templates[place]:
            templates[place] = fresh(tenant.prompt_blocks)
        yield templates[place] + fresh(1)


def _loop(tenant: Tenant, rng: random.Random, fresh: Callable[[int], Prefix]) -> Iterator[Prefix]:
    """Fixed documents, round after round in the same order."""
    count = max(1, tenant.working_set // tenant.prompt_blocks)
    documents = [fresh(tenant.prompt_blocks) for _ in range(count)]
    while True:
        yield from documents


def _scan(tenant: Tenant, rng: random.Random, fresh: Callable[[int], Prefix]) -> Iterator[Prefix]:
    """Documents that nobody has seen or will see again."""
    while True:
        yield fresh(tenant.prompt_blocks)


_KINDS: dict[str, Callable[[Tenant, random.Random, Callable[[int], Prefix]], Iterator[Prefix]]] = {
    "chat": _chat,
    "templates": _templates,
    "loop": _loop,
    "scan": _scan,
    "drift": _drift,
}


# --- replays ---


class FixedRule(AdaptiveShield):
    """The default preset with one rule in place of the trial."""

    def __init__(self, setup: PolicySetup, rule: Rule) -> None:
        super().__init__(setup)
        self.order.rule = rule

    def _try(self, blocks: Sequence[int]) -> None:
        """Nothing is on trial."""


def evaluate(genome: Genome, accesses: int, seeds: Sequence[int] = SEEDS) -> Figures:
    """Hit ratios of a genome's workload, means over the seeds."""
    ratios: list[list[float]] = []
    for seed in seeds:
        requests = make_workload(genome, seed, accesses).requests
        blocks = pool_blocks(genome, requests)
        policies = [_policy(genome, name, requests, blocks) for name in _COMPARED]
        ratios.append([_hit_ratio(genome, policy, requests) for policy in policies])
    return Figures(*(sum(column) / len(seeds) for column in zip(*ratios, strict=True)))


_COMPARED = (Lru.name, S3Fifo.name, Shield.name)


def _config(genome: Genome, policy: str) -> Config:
    contracts = {
        name: terms.model_copy(update={"refill_rate": terms.refill_rate * genome.refill_scale})
        for name, terms in PAPER_CONTRACTS.items()
    }
    return paper_config().model_copy(update={"policy": policy, "contracts": contracts})


def _policy(genome: Genome, name: str, requests: Sequence[TraceRequest], blocks: int) -> Policy:
    return replay_policy(_config(genome, name), blocks, requests, BLOCK_SIZE)


def _hit_ratio(genome: Genome, policy: Policy, requests: Sequence[TraceRequest]) -> float:
    run = Replay(_config(genome, policy.name), policy, BLOCK_SIZE)
    return run.run(requests).total.hit_ratio


# --- the worst one, looked at ---


def examine(genome: Genome, accesses: int) -> dict[str, Any]:
    """Where a genome's loss comes from, and whether it stays."""
    return {
        "fresh_seeds": [_as_dict(evaluate(genome, accesses, [seed])) for seed in FRESH_SEEDS],
        "refill_scales": {
            f"{scale:g}": _as_dict(evaluate(replace(genome, refill_scale=scale), accesses))
            for scale in REFILL_SCALES
        },
        "fixed_rules": {_label(rule): _with_rule(genome, accesses, rule) for rule in RULES},
        "longer": [_longer(genome, accesses, seed) for seed in SEEDS],
    }


def _with_rule(genome: Genome, accesses: int, rule: Rule) -> float:
    """Hit ratio under a fixed rule, the mean over ``SEEDS``."""
    total = 0.0
    for seed in SEEDS:
        requests = make_workload(genome, seed, accesses).requests
        contracts = _config(genome, Shield.name).contract_table()
        setup = PolicySetup(pool_blocks(genome, requests), contracts, _groups(genome))
        total += _hit_ratio(genome, FixedRule(setup, rule), requests)
    return total / len(SEEDS)


def _longer(genome: Genome, accesses: int, seed: int) -> list[dict[str, Any]]:
    """A longer workload in parts of the ordinary length: hit ratios, and the rules followed.

    The pool is the one of the ordinary length.
    """
    blocks = pool_blocks(genome, make_workload(genome, seed, accesses).requests)
    requests = make_workload(genome, seed, LONGER * accesses).requests
    parts: list[dict[str, Any]] = [{} for _ in range(LONGER)]
    for name, key in zip(_COMPARED, ("lru", "s3fifo", "default"), strict=True):
        policy = _policy(genome, name, requests, blocks)
        run = Replay(_config(genome, name), policy, BLOCK_SIZE)
        total = run.result.total
        hits, asked = [0] * LONGER, [0] * LONGER
        followed: list[Counter[str]] = [Counter() for _ in range(LONGER)]
        for request in requests:
            part = min(LONGER - 1, sum(asked) // accesses)
            before = total.blocks_hit
            run.run([request])
            hits[part] += total.blocks_hit - before
            asked[part] += len(request.hash_ids)
            if isinstance(policy, AdaptiveShield):
                followed[part][_label(policy.order.rule)] += len(request.hash_ids)
        for part, found in enumerate(parts):
            found[key] = hits[part] / asked[part]
            if followed[part]:
                found["followed"] = {
                    rule: count / asked[part] for rule, count in followed[part].most_common()
                }
    return parts


def _label(rule: Rule) -> str:
    calls = "debts called in" if rule.calls_in_debts else "no debts"
    return f"proven share {rule.proven_share:g}, {calls}"


# --- the search ---


@dataclass(slots=True)
class Found:
    """What a search found."""

    seed: int
    accesses: int
    """Block accesses of a workload."""
    history: list[Evaluation]
    """In the order of the search."""
    best: list[Evaluation]
    """Of each island, and after them the one that loses most to the better of both baselines."""
    examined: list[dict[str, Any]]
    """What ``examine`` says of each of them."""
    made_on: dict[str, Any]
    """The code and the machine that searched."""


def search(
    evaluations: int,
    seed: int,
    accesses: int = ACCESSES,
    processes: int = 1,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Found:
    """Evolve genomes towards the largest loss to LRU; ``progress`` is told of evaluations.

    Raises:
        PrefixShieldError: fewer evaluations than islands, or a process died.

    """
    if evaluations < ISLANDS:
        raise PrefixShieldError(
            f"--evaluations: found {evaluations}, expected at least {ISLANDS}, one per island"
        )
    made_on = provenance()
    rngs = [random.Random(f"worst case search {seed} {island}") for island in range(ISLANDS)]
    history: list[Evaluation] = []
    parents: list[list[Evaluation]] = [[] for _ in range(ISLANDS)]
    generation = 0
    # Spawned, not forked: a progress bar is a thread, and threads do not survive a fork.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, initializer=end_with_the_command) as pool:
        try:
            while len(history) < evaluations:
                born = [
                    (island, genome)
                    for island, rng in enumerate(rngs)
                    for genome in _next_generation(parents[island], rng)
                ]
                # Whose turn it is when the evaluations run out: one of every island, and again.
                size = len(born) // ISLANDS
                born = [born[island * size + n] for n in range(size) for island in range(ISLANDS)]
                born = born[: evaluations - len(history)]
                figures = pool.map(partial(evaluate, accesses=accesses), [g for _, g in born])
                for (island, genome), found in zip(born, figures, strict=True):
                    one = Evaluation(island, generation, genome, found)
                    history.append(one)
                    parents[island].append(one)
                    progress(len(history), evaluations)
                for group in parents:
                    group.sort(key=lambda one: -one.figures.loss)
                    del group[PARENTS:]
                generation += 1
            best = [group[0] for group in parents]
            best.append(max(history, key=lambda one: one.figures.loss_to_better))
            look = partial(examine, accesses=accesses)
            examined = list(pool.map(look, [one.genome for one in best]))
        except BrokenProcessPool:
            raise PrefixShieldError("a process that replayed was killed") from None
    return Found(seed, accesses, history, best, examined, made_on)


def _next_generation(parents: Sequence[Evaluation], rng: random.Random) -> list[Genome]:
    if not parents:
        return [random_genome(rng) for _ in range(FIRST_GENOMES)]
    return [mutate(rng.choice(parents).genome, rng) for _ in range(CHILDREN)]


# --- files ---


def write(found: Found, folder: Path) -> list[Path]:
    """Write best.json, history.csv and summary.md. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / name for name in ("best.json", "history.csv", "summary.md")]
    islands = [
        {
            "island": one.island,
            "genome": asdict(one.genome),
            "figures": _as_dict(one.figures),
            **examined,
        }
        for one, examined in zip(found.best, found.examined, strict=True)
    ]
    to_better = islands.pop()
    head = {
        "seed": found.seed,
        "evaluations": len(found.history),
        "accesses": found.accesses,
        **found.made_on,
    }
    paths[0].write_text(
        json.dumps(head | {"islands": islands, "to_better": to_better}, indent=1) + "\n", "utf-8"
    )
    with paths[1].open("w", encoding="utf-8", newline="") as file:
        rows = [
            {
                "evaluation": number,
                "island": one.island,
                "generation": one.generation,
                **{key: f"{value:.4f}" for key, value in _as_dict(one.figures).items()},
                "tenants": " ".join(_kind(tenant) for tenant in one.genome.tenants),
                "pool_share": one.genome.pool_share,
                "refill_scale": one.genome.refill_scale,
                "blocks_per_s": one.genome.blocks_per_s,
            }
            for number, one in enumerate(found.history)
        ]
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    paths[2].write_text(summary(found), "utf-8")
    return paths


def summary(found: Found) -> str:
    """The findings as Markdown."""
    order = sorted(range(ISLANDS), key=lambda island: -found.best[island].figures.loss)
    count = len(found.history)
    command = f"prefixshield worst-case --evaluations {count} --seed {found.seed}"
    if found.accesses != ACCESSES:
        command += f" --accesses {found.accesses}"
    text = [
        "# The worst case found by search",
        "",
        f"`{command}`, commit {found.made_on['commit']}: benign workloads of "
        f"{found.accesses:,} block accesses in serial replay, evolved on {ISLANDS} islands towards "
        "the default preset's largest loss to LRU. Losses are in percentage points of the overall "
        "hit ratio, a negative one is a gain.",
        "",
        _losses(found),
        "",
        "## Worst of each island",
        "",
        table(
            ["island", *_RATIOS, "loss to LRU, fresh seeds"],
            [
                [
                    str(island),
                    *_cells(found.best[island].figures),
                    _fresh(found.examined[island]["fresh_seeds"]),
                ]
                for island in order
            ],
        ),
        "",
    ]
    for island in order:
        text += [f"## Island {island}", ""]
        text += _describe(found.best[island], found.examined[island], found.accesses)
    lru, s3fifo, default, loss, to_better = _cells(found.best[-1].figures)
    text += [
        "## Largest loss to the better of both",
        "",
        f"Met on the way, not searched for: LRU {lru}, S3-FIFO {s3fifo}, default {default}, "
        f"{to_better} less than the better, {loss} less than LRU; on fresh seeds "
        f"{_fresh(found.examined[-1]['fresh_seeds'], 'loss_to_better')} less than the better.",
        "",
        *_describe(found.best[-1], found.examined[-1], found.accesses),
    ]
    return "\n".join(text)


_RATIOS = ("LRU", "S3-FIFO", "default", "loss to LRU", "loss to the better")
_TENANT = (
    "tenant",
    "kind",
    "share of requests",
    "prompt, blocks",
    "working set, blocks",
    "skew",
    "turnover, requests",
    "contract",
)


def _losses(found: Found) -> str:
    losses = sorted(one.figures.loss for one in found.history if one.generation == 0)
    over = sum(loss > 1 for loss in losses)
    return (
        f"Of the {len(losses)} genomes drawn at random, {over} lose more than one point; the median"
        f" is {losses[len(losses) // 2]:.2f}, the largest loss {losses[-1]:.2f}. The search then "
        "looks for the worst on purpose."
    )


def _fresh(seeds: Sequence[dict[str, float]], what: str = "loss") -> str:
    losses = [one[what] for one in seeds]
    return f"{sum(losses) / len(losses):.2f} ({min(losses):.2f} to {max(losses):.2f})"


def _describe(one: Evaluation, examined: dict[str, Any], accesses: int) -> list[str]:
    genome = one.genome
    drawn = [make_workload(genome, seed, accesses).requests for seed in SEEDS]
    blocks = [pool_blocks(genome, requests) for requests in drawn]
    scales = examined["refill_scales"]
    rules = examined["fixed_rules"]
    return [
        f"A pool of {' and '.join(map(str, blocks))} blocks ({genome.pool_share:.1%} of the unique "
        f"ones, but at least {LEAST_POOL_BLOCKS}), {genome.blocks_per_s:g} blocks per second, "
        f"refill rates times {genome.refill_scale:g}.",
        "",
        table(
            _TENANT,
            [
                [
                    str(number),
                    _kind(tenant),
                    f"{tenant.weight / sum(other.weight for other in genome.tenants):.0%}",
                    f"{tenant.prompt_blocks}",
                    f"{tenant.working_set}",
                    f"{tenant.skew:.2f}",
                    f"{tenant.turnover}",
                    tenant.contract,
                ]
                for number, tenant in enumerate(genome.tenants)
            ],
        ),
        "",
        "Loss to LRU under refill scales: "
        + ", ".join(f"{scale}: {figures['loss']:.2f}" for scale, figures in scales.items())
        + ". With one rule instead of the trial:",
        "",
        table(
            ["rule", "hit ratio", "loss to LRU"],
            [
                [rule, f"{ratio:.2%}", f"{100 * (one.figures.lru - ratio):.2f}"]
                for rule, ratio in rules.items()
            ],
        ),
        "",
        f"{LONGER} times as long, the same pool, in parts of the ordinary length:",
        "",
        table(
            ["seed", "part", *_RATIOS, "rules followed, share of the accesses"],
            [
                [
                    str(seed),
                    str(number),
                    *_cells(Figures(part["lru"], part["s3fifo"], part["default"])),
                    "; ".join(f"{rule} {share:.0%}" for rule, share in part["followed"].items()),
                ]
                for seed, parts in zip(SEEDS, examined["longer"], strict=True)
                for number, part in enumerate(parts, start=1)
            ],
        ),
        "",
    ]


def _kind(tenant: Tenant) -> str:
    if tenant.kind == tenant.later:
        return tenant.kind
    return f"{tenant.kind}/{tenant.later}({tenant.phase_requests})"


def _cells(figures: Figures) -> list[str]:
    ratios = [f"{ratio:.2%}" for ratio in (figures.lru, figures.s3fifo, figures.default)]
    return [*ratios, f"{figures.loss:.2f}", f"{figures.loss_to_better:.2f}"]


def _as_dict(figures: Figures) -> dict[str, float]:
    losses = {"loss": figures.loss, "loss_to_better": figures.loss_to_better}
    return {**asdict(figures), **losses}
