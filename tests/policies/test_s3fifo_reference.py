"""S3-FIFO against libCacheSim's, an independent implementation, on one-block requests."""

import random
from itertools import accumulate
from pathlib import Path

import pytest

from prefixshield.core.ledger import Contract
from prefixshield.policies import PolicySetup, build_policy
from prefixshield.policies.base import Access
from prefixshield.sim.pool import SimBlockPool
from prefixshield.traces import read_trace

libcachesim = pytest.importorskip("libcachesim")

MOONCAKE = Path(__file__).resolve().parents[2] / "traces/mooncake_conversation_bs512.jsonl.gz"


def our_miss_ratio(keys, capacity):
    pool = SimBlockPool(
        build_policy("s3fifo", PolicySetup(capacity, {"c": Contract(1.0, 1.0)}, ["a"]))
    )
    misses = 0
    for number, key in enumerate(keys):
        access = Access("a", "c", number, 0.0)
        blocks = pool.lookup("a", [key])
        pool.hold(blocks)
        pool.policy.hit(blocks, access)
        if not blocks:
            misses += 1
            blocks, _ = pool.allocate(1, access)
            pool.cache(blocks, "a", [key], access)
        pool.release(blocks)
    return misses / len(keys)


def their_miss_ratio(keys, capacity):
    cache = libcachesim.S3FIFO(cache_size=capacity)
    request = libcachesim.Request()
    request.obj_size = 1
    misses = 0
    for key in keys:
        request.obj_id = key
        misses += not cache.get(request)
    return misses / len(keys)


@pytest.fixture(scope="module")
def streams():
    weights = list(accumulate(1 / rank**0.9 for rank in range(1, 10_001)))
    zipf = random.Random(3).choices(range(10_000), cum_weights=weights, k=100_000)
    mooncake = [key for request in read_trace(MOONCAKE, 512) for key in request.hash_ids]
    return {"zipf": zipf, "mooncake": mooncake[:120_000]}


@pytest.mark.parametrize("share", [0.01, 0.05, 0.1, 0.25])
@pytest.mark.parametrize("name", ["zipf", "mooncake"])
def test_miss_ratios_agree_within_a_fifth_of_a_point(streams, name, share):
    keys = streams[name]
    capacity = int(len(set(keys)) * share)
    ours, theirs = our_miss_ratio(keys, capacity), their_miss_ratio(keys, capacity)
    assert ours == pytest.approx(theirs, abs=0.002)
