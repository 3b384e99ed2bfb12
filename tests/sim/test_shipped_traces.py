"""Exact counts on the shipped traces: a change in any of them is a change of the policy."""

from collections import OrderedDict
from pathlib import Path

import pytest

from prefixshield.config import paper_config
from prefixshield.sim.replay import Replay, replay_policy
from prefixshield.traces import read_trace

TRACES = Path(__file__).resolve().parents[2] / "traces"
AGENTS = TRACES / "agents_bs16.jsonl.gz"
MOONCAKE = TRACES / "mooncake_conversation_bs512.jsonl.gz"


def replay(path, block_size, blocks, policy):
    requests = read_trace(path, block_size)
    config = paper_config().model_copy(update={"policy": policy, "preset": "paper"})
    run = Replay(config, replay_policy(config, blocks, requests, block_size), block_size)
    result = run.run(requests)
    run.pool.check()
    return result


@pytest.mark.parametrize(
    ("path", "block_size", "blocks", "policy", "hits", "queried", "rejected"),
    [
        (AGENTS, 16, 1311, "lru", 180236, 205666, 29),
        (AGENTS, 16, 1311, "shield", 178192, 205666, 29),
        (AGENTS, 16, 2623, "lru", 227032, 253122, 3),
        (AGENTS, 16, 2623, "shield", 225760, 253122, 3),
        (AGENTS, 16, 6557, "lru", 235179, 261489, 0),
        (AGENTS, 16, 6557, "shield", 235145, 261489, 0),
        (AGENTS, 16, 2623, "s3fifo", 224290, 253122, 3),
        (AGENTS, 16, 2623, "clairvoyant", 227262, 253122, 3),
        (MOONCAKE, 512, 9139, "lru", 56373, 288500, 0),
        (MOONCAKE, 512, 9139, "shield", 42372, 288500, 0),
    ],
)
def test_counts(path, block_size, blocks, policy, hits, queried, rejected):
    total = replay(path, block_size, blocks, policy).total
    assert (total.blocks_hit, total.blocks_queried, total.rejected) == (hits, queried, rejected)


def test_lru_against_a_textbook_lru():
    """One entry per hash instead of two for a block cached twice: nearly the same hits."""
    cache, hits = OrderedDict(), 0
    for request in read_trace(AGENTS, 16):
        keys = [(request.group, block) for block in request.hash_ids]
        if len(keys) > 2623:
            continue
        found = 0
        while found < (request.input_length - 1) // 16 and keys[found] in cache:
            found += 1
        hits += found
        for key in keys:
            cache.pop(key, None)
        for key in reversed(keys):
            cache[key] = True
        while len(cache) > 2623:
            cache.popitem(last=False)
    assert replay(AGENTS, 16, 2623, "lru").total.blocks_hit == pytest.approx(hits, rel=0.002)
