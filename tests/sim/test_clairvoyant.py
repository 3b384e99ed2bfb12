"""The clairvoyant bound: on one-block requests nothing has more hits (Belady 1966)."""

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixshield.config import paper_config
from prefixshield.errors import PrefixShieldError
from prefixshield.policies import POLICIES
from prefixshield.sim.replay import Replay, replay_policy
from prefixshield.traces import TraceRequest


def replayed(uses, capacity, policy, for_group=None):
    """A replay of one-block requests, each a (group, key)."""
    requests = [
        TraceRequest(line, float(line), 5, 0, (key,), group, "standard", None)
        for line, (group, key) in enumerate(uses)
    ]
    config = paper_config().model_copy(update={"policy": policy, "preset": "paper"})
    run = Replay(config, replay_policy(config, capacity, requests, 4, for_group), 4)
    result = run.run(requests)
    run.pool.check()
    return result


def hits(keys, capacity, policy):
    return replayed([("a", key) for key in keys], capacity, policy).total.blocks_hit


def hits_of(group, uses, capacity, policy):
    for_group = group if policy == "clairvoyant" else None
    return replayed(uses, capacity, policy, for_group).groups[group].blocks_hit


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


def best_possible_for(group, uses, capacity):
    """The group's hits when every victim is tried: what is not cached has to be let in."""

    @cache
    def best(position, cached):
        if position == len(uses):
            return 0
        use = uses[position]
        if use in cached:
            return (use[0] == group) + best(position + 1, cached)
        if len(cached) < capacity:
            return best(position + 1, cached | {use})
        return max(best(position + 1, cached - {victim} | {use}) for victim in cached)

    return best(0, frozenset())


def streams(longest, keys):
    """One-block requests of two groups, the first of them the one that is looked at."""
    use = st.tuples(st.sampled_from("ab"), st.integers(1, keys))
    return st.lists(use, max_size=longest).map(lambda uses: [("a", 1), *uses])


@settings(max_examples=200, deadline=None)
@given(streams(longest=16, keys=4), st.integers(1, 4))
def test_a_group_gets_as_many_hits_as_is_possible(uses, capacity):
    assert hits_of("a", uses, capacity, "clairvoyant") == best_possible_for("a", uses, capacity)


@pytest.mark.parametrize("policy", sorted(POLICIES))
@settings(max_examples=50, deadline=None)
@given(uses=streams(longest=60, keys=9), capacity=st.integers(2, 6))
def test_no_policy_gives_a_group_more(policy, uses, capacity):
    assert hits_of("a", uses, capacity, policy) <= hits_of("a", uses, capacity, "clairvoyant")


def test_a_group_gets_more_than_the_clairvoyant_for_all_gives_it():
    """In a pool of two, a's block outlasts b's, though b's are used sooner."""
    uses = [("a", 1), ("b", 1), ("b", 2), ("b", 1), ("b", 2), ("a", 1)]
    for_all = replayed(uses, 2, "clairvoyant")
    for_a = replayed(uses, 2, "clairvoyant", for_group="a")
    assert [for_all.groups[group].blocks_hit for group in "ab"] == [0, 2]
    assert [for_a.groups[group].blocks_hit for group in "ab"] == [1, 0]


@pytest.mark.parametrize(
    ("policy", "group", "message"),
    [
        ("lru", "a", "--for-group: found the policy 'lru', expected 'clairvoyant'"),
        (
            "clairvoyant",
            "default",
            "--for-group: found 'default', expected a group of the trace: a, b",
        ),
    ],
)
def test_one_group_is_for_the_clairvoyant_and_has_to_be_there(policy, group, message):
    with pytest.raises(PrefixShieldError, match=message):
        replayed([("a", 1), ("b", 1)], 2, policy, for_group=group)
