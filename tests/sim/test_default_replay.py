"""Serial replay under the default preset: a tenant alone, another process, exact counts."""

import hashlib
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixshield.config import Config, ContractSection, GroupSection
from prefixshield.core.ledger import Contract
from prefixshield.policies import Access, PolicySetup, build_policy
from prefixshield.sim.replay import Replay, replay_policy
from prefixshield.traces import TraceRequest, read_trace

AGENTS = Path(__file__).resolve().parents[2] / "traces/agents_bs16.jsonl.gz"
BLOCK_SIZE = 4
CONTRACTS = {"gold": (16, 20), "base": (3, 5), "poor": (0.5, 0)}


def config(scale=1.0, groups=("a",)):
    return Config(
        policy="shield",
        preset="default",
        contracts={
            name: ContractSection(refill_rate=rate * scale, burst=burst)
            for name, (rate, burst) in CONTRACTS.items()
        },
        groups={name: GroupSection(contract="base") for name in groups},
        default_group=groups[0],
    )


def replay(requests, blocks, block_size=BLOCK_SIZE, **options):
    """The result and all events."""
    chosen = config(**options)
    run = Replay(chosen, replay_policy(chosen, blocks, requests, block_size), block_size)
    events = []
    result = run.run(requests, events.append)
    run.pool.check()
    return result, events


def contents(events):
    """What came and went, and when: the log without classes and promotions."""
    return [(e["t"], e["event"], e["block"]) for e in events if e["event"] != "promote"]


def make(line, timestamp_ms, path, group="a", contract="base", partial=BLOCK_SIZE, prefix=None):
    """A request for a path in a tree of prefixes: an id names the path so far."""
    ids, code = [], 1
    for step in path:
        code = 4 * code + step
        ids.append(code)
    tokens = max(1, (len(ids) - 1) * BLOCK_SIZE + partial)
    return TraceRequest(line, float(timestamp_ms), tokens, 0, tuple(ids), group, contract, prefix)


@st.composite
def lone_traces(draw):
    requests, clock = [], 0
    for line in range(draw(st.integers(1, 40))):
        clock += draw(st.sampled_from([0, 1, 250, 30_000]))
        requests.append(
            make(
                line,
                clock,
                draw(st.lists(st.integers(0, 1), max_size=6)),
                contract=draw(st.sampled_from(sorted(CONTRACTS))),
                partial=draw(st.integers(1, BLOCK_SIZE)),
                prefix=draw(st.sampled_from([None, None, "p"])),
            )
        )
    return requests


@settings(max_examples=60, deadline=None)
@given(lone_traces(), st.integers(1, 14))
def test_a_tenant_alone_is_served_alike_whatever_its_refill_rates(requests, blocks):
    logs = [contents(replay(requests, blocks, scale=s)[1]) for s in (0.001, 0.25, 1, 4, 1000)]
    assert all(log == logs[0] for log in logs)


@pytest.fixture(scope="module")
def agents():
    return read_trace(AGENTS, 16)[:350]


def test_agents_as_one_tenant_are_served_alike_whatever_the_refill_rates(agents):
    lone = [replace(request, group="a", contract=None) for request in agents]
    logs = []
    for scale in (0.001, 1, 1000):
        result, events = replay(lone, 655, 16, scale=scale)
        assert sum(result.evictions.values()) > 1000
        logs.append(contents(events))
    assert logs[0] == logs[1] == logs[2]


def mixed(seed):
    """Requests of two groups for overlapping prefixes: some orphans, and debts that are paid."""
    rng = random.Random(seed)
    return [
        make(n, 250 * n, [rng.randrange(3) for _ in range(rng.randint(1, 6))], rng.choice("ab"))
        for n in range(300)
    ]


def choices():
    """Digests of the event logs of some replays; and the order of many orphans of one block."""
    found, orphans = [], 0
    for seed in range(5):
        result, events = replay(mixed(seed), 24, groups=("a", "b"))
        orphans += result.orphans_evicted
        found.append(hashlib.sha256(repr(events).encode()).hexdigest()[:12])
    assert orphans
    policy = build_policy("shield", PolicySetup(200, {"base": Contract(1.0, 0.0)}, ["a"]))
    access = Access("a", "base", 1, 0.0)
    children = [f"child {n}" for n in range(8)]
    policy.materialise(range(9), ["first", *children], access, [None, *["first"] * 8])
    policy.release(range(9))
    policy.evict(1, access)
    came_first = policy.evict(4, access)
    policy.materialise([0], ["first"], access, [None])
    return found, came_first, policy.evict(4, access)


def test_another_process_makes_the_same_choices():
    run = subprocess.run(
        [sys.executable, "-c", "import test_default_replay as t; print(t.choices())"],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parent,
        env={**os.environ, "PYTHONHASHSEED": "1234"},
    )
    assert run.stdout.strip() == str(choices())


def test_no_request_hits_what_another_group_made():
    """I7: the same ids, asked for by one group and then by the other."""
    for seed in range(3):
        requests = [replace(request, group="a") for request in mixed(seed)]
        alone, _ = replay(requests, 3000, groups=("a", "b"))
        echo = [replace(request, group="b") for request in requests]
        both, _ = replay([*requests, *echo], 3000, groups=("a", "b"))
        assert both.groups["b"].blocks_hit == alone.groups["a"].blocks_hit
        assert replay([*requests, echo[0]], 3000, groups=("a", "b"))[0].groups["b"].blocks_hit == 0
