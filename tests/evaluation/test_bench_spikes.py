"""The costliest calls are prepared as they say. No times."""

import pytest

pytest.importorskip("vllm")

from prefixshield.core.order import MAX_CHANCES
from prefixshield.evaluation import bench_spikes
from prefixshield.evaluation.bench_core import make_policy

pytestmark = pytest.mark.engine

BLOCKS, GROUPS = 400, 5


def build(name="shield default"):
    return make_policy(name, BLOCKS, [f"g{number}" for number in range(GROUPS)])


def test_every_block_was_hit_as_often_as_counts():
    policy = build()
    call = bench_spikes.all_hit(policy, GROUPS)
    assert policy.candidate_count == 4 * bench_spikes.BATCH
    chances = policy.order._chances
    assert [left for left in chances if left] == [MAX_CHANCES] * policy.candidate_count
    assert len(call()) == bench_spikes.BATCH
    assert not any(chances), "the call went round so often"


def test_all_others_follow_the_block_that_is_lost():
    policy = build()
    call = bench_spikes.first_lost(policy, GROUPS)
    assert not policy._orphans
    call()
    assert len(policy._orphans) == policy.candidate_count == 4 * bench_spikes.BATCH
    call()
    policy.check()


def test_all_groups_owe_and_are_reported():
    policy = build()
    report = bench_spikes.reported(policy, GROUPS)()
    owed = [value for key, value in report.items() if key.split("\n")[1] == "debt"]
    assert len(owed) == GROUPS
    assert all(owed)


def test_a_row_for_every_situation_pool_and_policy(monkeypatch):
    monkeypatch.setattr(bench_spikes, "POOLS", ((BLOCKS, GROUPS),))
    rows = bench_spikes.run_bench_spikes(make_policy, lambda what: None)
    assert len(rows) == len(bench_spikes.SITUATIONS) * len(bench_spikes.POLICIES)
    assert {len(row) for row in rows} == {len(bench_spikes.COLUMNS)}
