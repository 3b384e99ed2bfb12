"""Runs experiments: every cell on its engine, resumable; several at once where time is virtual."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from prefixshield.config import PAPER_CONTRACTS
from prefixshield.errors import PrefixShieldError
from prefixshield.evaluation.experiments import (
    DEFAULT_BLOCKS,
    EXPERIMENTS,
    PAPER_CAPACITY,
    VICTIM_BOUND,
    Cell,
    Experiment,
    Variant,
)
from prefixshield.evaluation.overhead import run_overhead
from prefixshield.evaluation.profiles import PROFILES, CostModel
from prefixshield.evaluation.results import KEYS, ResultsFolder, Row, provenance, summarise
from prefixshield.evaluation.run import NAMED_PRESETS, Run, workload_config
from prefixshield.evaluation.workers import end_with_the_command
from prefixshield.sim.clairvoyant import Clairvoyant
from prefixshield.traces import Workload
from prefixshield.traces.pollution import DEFAULT_SHAPE, VICTIM, Load

#: Tokens per block: the paper's, and the smallest that vLLM's CPU attention takes.
BLOCK_SIZE = {"serial": 16, "virtual": 16, "real": 32, "calibrated": 32}

#: Engines that play the paper's pace as much faster as this machine is.
_ON_THIS_MACHINE = ("real", "calibrated")


#: What costs what: no engine, and files of its own.
OVERHEAD = "overhead"


def catalogue() -> Iterator[tuple[str, str, str, str]]:
    """Name, engines, runs per seed and title of every experiment."""
    for name, experiment in EXPERIMENTS.items():
        engines = experiment.engines
        counts = [str(len(cells_of(experiment, engine, range(1)))) for engine in engines]
        yield name, ", ".join(engines), ", ".join(counts), experiment.title
    yield OVERHEAD, "-", "-", "Prototype overhead: selection and metadata"


def chosen(name: str, engine: str | None) -> list[tuple[str, str]]:
    """(experiment, engine) of those that a user names; ``all``: those that take minutes at most.

    Raises PrefixShieldError for an unknown name, or an engine that it does not run on.
    """
    if name == "all":
        found = [
            (key, engine or experiment.engines[0])
            for key, experiment in EXPERIMENTS.items()
            if (engine or experiment.engines[0]) in experiment.engines
            and (engine or experiment.engines[0] not in _ON_THIS_MACHINE)
        ]
        return found if engine else [*found, (OVERHEAD, "-")]
    if name == OVERHEAD:
        return [(OVERHEAD, "-")]
    if name not in EXPERIMENTS:
        names = ", ".join((*EXPERIMENTS, OVERHEAD, "all"))
        raise PrefixShieldError(f"experiment: found {name!r}, expected one of: {names}")
    engines = EXPERIMENTS[name].engines
    if engine is not None and engine not in engines:
        raise PrefixShieldError(
            f"--engine: found {engine!r}, expected one that {name} runs on: {', '.join(engines)}"
        )
    return [(name, engine or engines[0])]


def cells_of(experiment: Experiment, engine: str, seeds: range) -> list[Cell]:
    """All runs of an experiment, in the order of its file."""
    return [
        Cell(engine, name, policy, seed)
        for name, variant in experiment.variants.items()
        for policy in variant.policies
        if engine not in _ON_THIS_MACHINE or policy in experiment.real_policies
        for seed in seeds
    ]


def run(
    name: str,
    engine: str,
    seeds: range,
    results: Path,
    jobs: int,
    on_progress: Callable[[int, int], None],
) -> Path:
    """Run what is missing of an experiment, or of the overhead measurements."""
    if name == OVERHEAD:
        return run_overhead(results, on_progress)
    return run_experiment(name, engine, seeds, results, jobs, on_progress)


def run_experiment(
    name: str,
    engine: str,
    seeds: range,
    results: Path,
    jobs: int,
    on_progress: Callable[[int, int], None],
) -> Path:
    """Run what is missing of an experiment and return the folder of its results.

    ``on_progress`` gets how many runs are done, and how many there are, after each.
    """
    experiment = EXPERIMENTS[name]
    folder = results / (name if engine == experiment.engines[0] else f"{name}-{engine}")
    made_on = provenance()
    machine = _machine(results) if engine in _ON_THIS_MACHINE else {}
    cells = cells_of(experiment, engine, seeds)
    files = ResultsFolder(folder, {**_describe(name, engine, seeds, machine), **made_on})
    rows = {Cell(*(row[key] for key in KEYS)): row for row in files.finished_rows()}
    # Matched runs together: what is there when it is interrupted can be compared.
    missing = sorted((c for c in cells if c not in rows), key=lambda cell: cell.seed)
    on_progress(len(cells) - len(missing), len(cells))
    task = functools.partial(run_cell, name, machine, folder)
    with _mapper(1 if engine == "real" else min(jobs, len(missing))) as run_all:
        for row in run_all(task, missing):
            files.add(row)
            rows[Cell(*(row[key] for key in KEYS))] = row
            on_progress(len(rows), len(cells))
    files.complete(rows[cell] for cell in cells)
    return folder


def run_cell(name: str, machine: dict[str, Any], folder: Path, cell: Cell) -> Row:
    """One run as a row."""
    variant = EXPERIMENTS[name].variants[cell.variant]
    return {**cell._asdict(), **summarise(_run(variant, machine, folder, cell))}


def _run(variant: Variant, machine: dict[str, Any], folder: Path, cell: Cell) -> Run:
    block_size = BLOCK_SIZE[cell.engine]
    if cell.engine == "serial":
        from prefixshield.evaluation.serial import run_serial

        workload = variant.make(cell.seed, Load(PAPER_CAPACITY, variant.alpha), block_size)
        bound = cell.policy == VICTIM_BOUND
        config = workload_config(workload, Clairvoyant.name if bound else cell.policy)
        return run_serial(workload, config, variant.capacity_blocks, VICTIM if bound else None)
    if cell.engine == "virtual":
        from prefixshield.evaluation.virtual_time import prefill_capacity, run_virtual_time

        costs = PROFILES[variant.profile]
        capacity = prefill_capacity(costs, DEFAULT_SHAPE.prompt_tokens(block_size))
        workload = variant.make(cell.seed, Load(capacity, variant.alpha), block_size)
        config = workload_config(workload, cell.policy)
        return run_virtual_time(workload, config, variant.capacity_blocks, costs)
    # The paper's pace, played as much faster as this machine is.
    workload = variant.make(cell.seed, Load(PAPER_CAPACITY, variant.alpha), block_size)
    speed = machine["capacity_rps"] / PAPER_CAPACITY
    config = workload_config(workload, cell.policy, speed=speed)
    if cell.engine == "calibrated":
        from prefixshield.evaluation.virtual_time import run_virtual_time

        costs = CostModel(**{key: machine[key] for key in _STEP_COSTS})
        return run_virtual_time(_faster(workload, speed), config, variant.capacity_blocks, costs)
    from prefixshield.evaluation.real_time import run_real_time

    logs = folder / "logs"
    return run_real_time(workload, config, variant.capacity_blocks, log_folder=logs, speed=speed)


#: What of a calibration is the cost of a step.
_STEP_COSTS = ("base_ms", "prefill_ms_per_token", "decode_ms_per_sequence")


def _faster(workload: Workload, speed: float) -> Workload:
    """The same requests, so many times faster."""
    requests = (
        replace(request, timestamp_ms=round(request.timestamp_ms / speed, 3))
        for request in workload.requests
    )
    return replace(workload, requests=tuple(requests))


def _describe(name: str, engine: str, seeds: range, machine: dict[str, Any]) -> dict[str, Any]:
    experiment = EXPERIMENTS[name]
    command = f"prefixshield experiment {name} --engine {engine}"
    command += f" --runs {len(seeds)} --seed {seeds.start}"
    variants = {
        key: {
            "capacity_blocks": variant.capacity_blocks,
            "alpha": variant.alpha,
            **({"profile": variant.profile} if engine == "virtual" else {}),
        }
        for key, variant in experiment.variants.items()
    }
    description: dict[str, Any] = {
        "experiment": name,
        "title": experiment.title,
        "command": command,
        "engine": engine,
        "block_size": BLOCK_SIZE[engine],
        "seeds": list(seeds),
        "preset": "paper",
        "contracts": {key: terms.model_dump() for key, terms in PAPER_CONTRACTS.items()},
        "shape": asdict(DEFAULT_SHAPE),
        "variants": variants,
    }
    for policy, (_, preset) in NAMED_PRESETS.items():
        if any(policy in variant.policies for variant in experiment.variants.values()):
            description.setdefault("presets", {})[policy] = preset
    if engine == "virtual":
        used = dict.fromkeys(variant.profile for variant in experiment.variants.values())
        description["profiles"] = {profile: asdict(PROFILES[profile]) for profile in used}
    if engine != "serial":
        from prefixshield.serving.hooks import installed_vllm

        description["vllm"] = " ".join(installed_vllm())
    if machine:
        description["calibration"] = machine
    return description


def _machine(results: Path) -> dict[str, Any]:
    """What the real server does on this machine: measured once, then kept beside the results.

    A file that was measured on another machine is measured again.
    """
    path = results / "calibration.json"
    here = provenance()["machine"]
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if found["machine"] == here:
            return found
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError):
        raise PrefixShieldError(
            f"{path}: not a calibration, expected what an experiment on the real engine writes: "
            "remove it and it is measured again"
        ) from None
    from prefixshield.evaluation.calibration import measure_costs

    block_size = BLOCK_SIZE["real"]
    costs = measure_costs(
        DEFAULT_SHAPE.prompt_tokens(block_size),
        block_size=block_size,
        capacity_blocks=DEFAULT_BLOCKS,
        log_folder=results / "logs",
    )
    found = {"machine": here, **asdict(costs)}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return found


_RunAll = Callable[[Callable[[Cell], Row], list[Cell]], Iterator[Row]]


@contextmanager
def _mapper(jobs: int) -> Iterator[_RunAll]:
    """Runs cells here, or in so many processes; rows come as they are finished."""
    if jobs <= 1:
        yield lambda task, cells: map(task, cells)
        return
    # Not forked: vLLM's imports start threads.
    spawn = get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=spawn, initializer=_start) as pool:

        def run_all(task: Callable[[Cell], Row], cells: list[Cell]) -> Iterator[Row]:
            futures = [pool.submit(task, cell) for cell in cells]
            try:
                for future in as_completed(futures):
                    yield future.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

        yield run_all


def _start() -> None:
    """Before vLLM is imported in a process of ours: a hundred schedulers have nothing to say."""
    end_with_the_command()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
