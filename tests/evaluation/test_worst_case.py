"""The search for the default preset's worst case (``prefixshield worst-case``)."""

import csv
import json
import random
import subprocess
import sys
from dataclasses import asdict, replace

import pytest

from prefixshield.core.order import Rule
from prefixshield.errors import PrefixShieldError
from prefixshield.evaluation import worst_case
from prefixshield.evaluation.worst_case import (
    CONTRACTS,
    KINDS,
    LEAST_POOL_BLOCKS,
    MOST_TENANTS,
    RANGES,
    REFILL_SCALES,
    Figures,
    Genome,
    Tenant,
    evaluate,
    make_workload,
    mutate,
    pool_blocks,
    random_genome,
    search,
)

CHOICES = {
    "kind": KINDS,
    "later": KINDS,
    "contract": CONTRACTS,
    "refill_scale": REFILL_SCALES,
}


def genome(*kinds, **changes):
    tenant = Tenant("loop", "loop", 30, 1.0, 40, 400, 1.0, 8, "standard")
    tenants = [
        replace(tenant, kind=kind, later=later)
        for kind, later in (name.split("/") if "/" in name else (name, name) for name in kinds)
    ]
    return replace(Genome(tuple(tenants), 100.0, 0.1, 1.0), **changes)


def numbers(found):
    yield from ((name, value) for name, value in asdict(found).items() if name != "tenants")
    for tenant in found.tenants:
        yield from asdict(tenant).items()


@pytest.mark.parametrize("seed", range(5))
def test_genomes_stay_within_their_bounds_whatever_mutates(seed):
    rng = random.Random(seed)
    found = random_genome(rng)
    seen = set()
    for _ in range(300):
        found = mutate(found, rng)
        assert 1 <= len(found.tenants) <= MOST_TENANTS
        for name, value in numbers(found):
            if name in CHOICES:
                assert value in CHOICES[name]
            else:
                assert RANGES[name][0] <= value <= RANGES[name][1], name
                assert isinstance(value, type(RANGES[name][0])), name
        seen.add(found)
    assert len(seen) > 250, "mutations change something"


@pytest.mark.parametrize("seed", range(8))
def test_a_workload_follows_from_genome_and_seed_and_grows_at_its_end(seed):
    found = random_genome(random.Random(seed))
    made = make_workload(found, 0, 3000)
    assert made == make_workload(found, 0, 3000)
    longer = make_workload(found, 0, 9000).requests
    assert longer[: len(made.requests)] == made.requests
    lengths = [len(request.hash_ids) for request in longer]
    assert 9000 <= sum(lengths) < 9000 + max(lengths)
    assert max(lengths) <= LEAST_POOL_BLOCKS, "every prompt fits the smallest pool"
    times = [request.timestamp_ms for request in longer]
    assert times == sorted(times)
    owners = {}
    for request in longer:
        for block in request.hash_ids:
            assert owners.setdefault(block, request.group) == request.group


def shares_of_first_sights(found, accesses=6000):
    """By fifths of the requests, the share of the blocks that are seen for the first time."""
    requests = make_workload(found, 0, accesses).requests
    seen, fifths = set(), []
    for start in range(0, len(requests), -(-len(requests) // 5)):
        part = requests[start : start - (-len(requests) // 5)]
        blocks = [block for request in part for block in request.hash_ids]
        fifths.append(sum(block not in seen for block in dict.fromkeys(blocks)) / len(blocks))
        seen.update(blocks)
    return fifths


def test_every_kind_is_what_it_says():
    assert shares_of_first_sights(genome("scan")) == [1.0] * 5
    assert shares_of_first_sights(genome("loop"))[1:] == [0.0] * 4
    templates = shares_of_first_sights(genome("templates"), 20_000)
    assert templates[2:] == [pytest.approx(1 / 41, abs=0.001)] * 3, "the block of its own"
    drift = shares_of_first_sights(genome("drift"), 20_000)
    assert all(0.08 < share < 0.2 for share in drift[2:])
    chat = make_workload(genome("chat"), 0, 6000).requests
    grown = {request.hash_ids[:10]: request.hash_ids for request in chat}
    assert {len(prompt) for prompt in grown.values()} <= set(range(10, 81, 10))
    assert len({request.hash_ids for request in chat}) == len(chat), "every turn adds something"
    first, second, third = (
        make_workload(genome("loop/scan"), 0, 6000).requests[start : start + 30]
        for start in (0, 30, 60)
    )
    assert {request.hash_ids for request in first} == {request.hash_ids for request in third}
    assert len({request.hash_ids for request in second}) == 30


def test_the_pool_is_a_share_of_the_unique_blocks():
    requests = make_workload(genome("scan"), 0, 10_000).requests
    assert pool_blocks(genome("scan", pool_share=0.5), requests) == 5000
    assert pool_blocks(genome("scan", pool_share=0.02), requests) == LEAST_POOL_BLOCKS


def test_a_loop_larger_than_the_pool_is_where_lru_gets_nothing():
    loop = genome("loop", pool_share=0.5)
    loop = replace(loop, tenants=(replace(loop.tenants[0], working_set=1000),))
    found = evaluate(loop, 8000)
    assert found.lru == 0
    assert found.default > 0.1
    assert found.loss == pytest.approx(-100 * found.default)
    assert Figures(0.5, 0.7, 0.6).loss_to_better == pytest.approx(10)
    # Native order over everything is LRU; the rule that keeps proven blocks is not.
    native = worst_case._with_rule(loop, 8000, Rule(0.0, False))
    assert native == 0 < worst_case._with_rule(loop, 8000, Rule(0.9, False))


def test_a_search_follows_from_its_seed_on_any_number_of_processes(monkeypatch):
    monkeypatch.setattr(worst_case, "examine", look_away)
    monkeypatch.setattr(worst_case, "FIRST_GENOMES", 2)
    one = search(17, 0, accesses=700, processes=1)
    assert one == search(17, 0, accesses=700, processes=2)
    assert one.history[:4] != search(4, 1, accesses=700, processes=1).history
    assert len(one.history) == 17
    assert [found.island for found in one.history[:4]] == [0, 1, 2, 3]
    assert {found.generation for found in one.history} == {0, 1}
    *islands, to_better = one.best
    most = max(found.figures.loss_to_better for found in one.history)
    assert to_better.figures.loss_to_better == most
    for island, best in enumerate(islands):
        losses = [found.figures.loss for found in one.history if found.island == island]
        assert best.figures.loss == max(losses)


def look_away(genome, accesses):
    return {}


def test_too_few_evaluations_are_refused():
    with pytest.raises(PrefixShieldError, match="--evaluations: found 3, expected at least 4"):
        search(3, 0)


def test_the_command_writes_what_it_found(tmp_path):
    code = "from prefixshield.cli import main; main()"
    arguments = ["worst-case", "--evaluations", 5, "--accesses", 300, "--output", tmp_path / "w"]
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [
        str(tmp_path / "w" / name) for name in ("best.json", "history.csv", "summary.md")
    ]
    best = json.loads((tmp_path / "w/best.json").read_text())
    rows = list(csv.DictReader((tmp_path / "w/history.csv").open()))
    assert len(rows) == best["evaluations"] == 5
    assert best["commit"]
    text = (tmp_path / "w/summary.md").read_text()
    assert "`prefixshield worst-case --evaluations 5 --seed 0 --accesses 300`" in text
    most = max(float(row["loss_to_better"]) for row in rows)
    assert best["to_better"]["figures"]["loss_to_better"] == pytest.approx(most, abs=1e-4)
    assert "## Largest loss to the better of both" in text
    assert len(best["islands"]) == 4
    for island in best["islands"]:
        assert f"## Island {island['island']}" in text
        own = [float(row["loss"]) for row in rows if row["island"] == str(island["island"])]
        assert island["figures"]["loss"] == pytest.approx(max(own), abs=1e-4)
        assert len(island["fixed_rules"]) == 6
        assert len(island["fresh_seeds"]) == 5
        assert [len(parts) for parts in island["longer"]] == [4, 4]
        for part in (part for parts in island["longer"] for part in parts):
            assert sum(part["followed"].values()) == pytest.approx(1)
