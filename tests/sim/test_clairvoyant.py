"""The clairvoyant bound: on one-block requests nothing has more hits (Belady 1966)."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixshield.config import paper_config
from prefixshield.policies import POLICIES
from prefixshield.sim.replay import Replay, replay_policy
from prefixshield.traces import TraceRequest


def hits(keys, capacity, policy):
    requests = [
        TraceRequest(line, float(line), 5, 0, (key,), "a", "standard", None)
        for line, key in enumerate(keys)
    ]
    config = paper_config().model_copy(update={"policy": policy, "preset": "paper"})
    run = Replay(config, replay_policy(config, capacity, requests, 4), 4)
    result = run.run(requests)
    run.pool.check()
    return result.total.blocks_hit


def best_possible(keys, capacity):
    """Belady by scanning the rest of the stream."""
    cached, found = set(), 0
    for position, key in enumerate(keys):
        rest = keys[position + 1 :]
        if key in cached:
            found += 1
            continue
        if len(cached) == capacity:
            cached.remove(max(cached, key=lambda k: rest.index(k) if k in rest else len(keys)))
        cached.add(key)
    return found


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 9), max_size=60), st.integers(1, 6))
def test_it_has_as_many_hits_as_is_possible(keys, capacity):
    assert hits(keys, capacity, "clairvoyant") == best_possible(keys, capacity)


@pytest.mark.parametrize("policy", sorted(POLICIES))
@settings(max_examples=50, deadline=None)
@given(keys=st.lists(st.integers(0, 9), max_size=60), capacity=st.integers(1, 6))
def test_no_policy_has_more(policy, keys, capacity):
    assert hits(keys, capacity, policy) <= hits(keys, capacity, "clairvoyant")
