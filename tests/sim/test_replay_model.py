"""Serial replay against the naive model, on random traces."""

from hypothesis import given, settings
from hypothesis import strategies as st
from naive import NaiveReplay

from prefixshield.config import Config, ContractSection, GroupSection
from prefixshield.sim.replay import Replay, replay_policy
from prefixshield.traces import TraceRequest

BLOCK_SIZE = 4
GROUPS = ("a", "b", "c")

# Rates with exact and inexact reciprocals, bursts from none to more than a pool.
contracts = st.dictionaries(
    st.sampled_from(["x", "y", "z"]),
    st.tuples(st.sampled_from([0.5, 1, 3, 16, 40]), st.sampled_from([0, 1, 5, 20])),
    min_size=1,
)


@st.composite
def traces(draw):
    table = draw(contracts)
    names = sorted(table)
    requests = []
    clock = 0
    for line in range(draw(st.integers(1, 40))):
        clock += draw(st.sampled_from([0, 0, 1, 250, 1000, 30_000]))
        # Prefix trees: a path is a chain of small choices, an id names the path so far.
        path = draw(st.lists(st.integers(0, 1), min_size=0, max_size=6))
        ids, code = [], 1
        for step in path:
            code = 2 * code + step
            ids.append(code)
        partial = draw(st.integers(1, BLOCK_SIZE))  # tokens in the last block
        tokens = max(1, (len(ids) - 1) * BLOCK_SIZE + partial)
        requests.append(
            TraceRequest(
                line=line,
                timestamp_ms=float(clock),
                input_length=tokens,
                output_length=0,
                hash_ids=tuple(ids),
                group=draw(st.sampled_from(GROUPS)),
                contract=draw(st.sampled_from(names)),
                prefix_id=draw(st.sampled_from([None, None, None, "p", "q"])),
            )
        )
    return table, requests


def run(table, requests, blocks, policy):
    """Events, counts by the package; check() after every request."""
    config = Config(
        policy=policy,
        preset="paper",
        contracts={
            name: ContractSection(refill_rate=rate, burst=burst)
            for name, (rate, burst) in table.items()
        },
        groups={name: GroupSection(contract=next(iter(table))) for name in GROUPS},
        default_group="a",
    )
    events = []
    replay = Replay(config, replay_policy(config, blocks, requests, BLOCK_SIZE), BLOCK_SIZE)
    for request in requests:
        replay.run([request], lambda event: events.append(tuple(event.values())))
        replay.pool.check()
    return events, replay.result


@settings(max_examples=1500, deadline=None)
@given(traces(), st.integers(1, 14), st.sampled_from(["shield", "lru"]))
def test_replay_agrees_with_the_naive_model(trace, blocks, policy):
    table, requests = trace
    naive = NaiveReplay(table, blocks, BLOCK_SIZE, GROUPS, policy)
    for r in requests:
        naive.serve(
            int(r.timestamp_ms),
            r.input_length,
            list(r.hash_ids),
            r.group,
            r.contract,
            r.prefix_id,
            r.line,
        )
    events, result = run(table, requests, blocks, policy)
    assert events == naive.events
    assert result.total.rejected == naive.rejected
    for group, tally in result.groups.items():
        assert tally.blocks_queried == naive.queried.get(group, 0)
        assert tally.blocks_hit == naive.hit.get(group, 0)
    evictions = [event for event in events if event[1] == "evict"]
    assert sum(result.evictions.values()) == len(evictions)
