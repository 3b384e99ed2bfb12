"""The attack workloads: seeded, of the paper's block counts, and readable as traces."""

import itertools

import pytest

from prefixshield.core.ledger import Contract
from prefixshield.traces import pollution as make
from prefixshield.traces import read_trace, write_trace
from prefixshield.traces.pollution import ATTACKER, BORROWER, NEUTRAL, VICTIM, Load

LOAD = Load(10.0)
BEST_EFFORT = Contract(16.0, 128.0)

WORKLOADS = {
    "one-touch": lambda seed, size: make.one_touch(seed, LOAD, block_size=size),
    "low-and-slow": lambda seed, size: make.low_and_slow(seed, LOAD, block_size=size),
    "two-pass": lambda seed, size: make.two_pass_replay(seed, LOAD, block_size=size),
    "borrowing": lambda seed, size: make.borrowing(seed, LOAD, block_size=size),
    "pressure": lambda seed, size: make.creation_pressure(
        seed, LOAD, creation_ratio=2.0, refill_rate=16.0, block_size=size
    ),
    "delayed": lambda seed, size: make.delayed_replay(
        seed, wait_ratio=0.5, terms=BEST_EFFORT, capacity_blocks=511, block_size=size
    ),
}


def prefixes(workload, group):
    return [r.hash_ids for r in workload.requests if r.group == group]


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_seed_decides_everything(name):
    make_one = WORKLOADS[name]
    assert make_one(3, 16) == make_one(3, 16)
    assert make_one(3, 16) != make_one(4, 16)


@pytest.mark.parametrize("name", WORKLOADS)
def test_other_blocks_other_tokens_and_nothing_else(name):
    """Same times, ids and question-to-block ratio: the same pressure."""
    small, large = (WORKLOADS[name](0, size).requests for size in (16, 32))
    assert [r.timestamp_ms for r in small] == [r.timestamp_ms for r in large]
    assert [r.hash_ids for r in small] == [r.hash_ids for r in large]
    for a, b in zip(small, large, strict=True):
        assert abs(2 * a.input_length - b.input_length) <= 1
        assert abs(2 * a.output_length - b.output_length) <= 1


@pytest.mark.parametrize("name", WORKLOADS)
def test_as_a_file_it_is_the_same_trace(name, tmp_path):
    requests = WORKLOADS[name](0, 16).requests
    write_trace(tmp_path / "t.jsonl.gz", requests)
    assert tuple(read_trace(tmp_path / "t.jsonl.gz", 16)) == requests
    write_trace(tmp_path / "again.jsonl.gz", requests)
    assert (tmp_path / "t.jsonl.gz").read_bytes() == (tmp_path / "again.jsonl.gz").read_bytes()


def test_the_victim_goes_round_four_prefixes_of_96_blocks():
    visits = prefixes(make.one_touch(0, LOAD), VICTIM)
    hot = visits[:4]
    assert len(set(hot)) == 4
    assert {len(prefix) for prefix in hot} == {96}
    assert visits == [prefix for prefix, _ in zip(itertools.cycle(hot), visits, strict=False)]


def test_one_touch_pollution_never_repeats_a_block():
    ids = [i for prefix in prefixes(make.one_touch(0, LOAD), ATTACKER) for i in prefix]
    assert len(ids) == len(set(ids)) > 96 * 50


def test_two_pass_replay_repeats_each_prefix_once():
    visits = prefixes(make.two_pass_replay(0, LOAD), ATTACKER)
    assert len(visits) > 20
    assert visits[0::2][: len(visits) // 2] == visits[1::2]
    assert len(set(visits)) == len(visits[0::2])


def test_pressure_comes_at_the_papers_rate():
    """min(0.75 C, 1.15 alpha C) for 40 s: 6.9 a second at 60%, 7.5 at 80%."""
    for alpha, rate in ((0.6, 6.9), (0.8, 7.5)):
        load = Load(10.0, alpha)
        assert load.pressure_rate == pytest.approx(rate)
        counts = [
            sum(r.measured or r.group == ATTACKER for r in make.one_touch(seed, load).requests)
            for seed in range(20)
        ]
        # Poisson: 20 runs of 276 (300) requests, so a mean within 4 standard errors.
        assert sum(counts) / 20 == pytest.approx(40 * rate, abs=4 * (40 * rate / 20) ** 0.5)


def test_the_control_is_the_same_victim_without_the_attacker():
    for make_one in (make.low_and_slow, make.two_pass_replay):
        attacked, control = make_one(0, LOAD), make_one(0, LOAD, attacked=False)
        assert prefixes(control, ATTACKER) == []
        when = [
            [r.timestamp_ms for r in workload.requests if r.group == VICTIM]
            for workload in (attacked, control)
        ]
        assert when[0] == when[1]


def test_creation_pressure_is_the_refill_rate_times_the_ratio():
    """2 x 16 blocks/s for 40 s are 1,280 blocks, at 97 a request 13.2 requests."""
    counts = [len(prefixes(WORKLOADS["pressure"](seed, 16), ATTACKER)) for seed in range(60)]
    assert sum(counts) / 60 == pytest.approx(13.2, abs=4 * (13.2 / 60) ** 0.5)


def test_borrowing_leaves_one_group_idle():
    workload = make.borrowing(0, LOAD)
    assert set(workload.groups) == {BORROWER, "idle"}
    assert {r.group for r in workload.requests} == {BORROWER}


def test_delayed_replay_waits_for_its_share_of_the_clearance():
    """The attacker creates 195 blocks on a burst of 128: 67 are owed, cleared at 16/s in 4.19 s."""
    for wait_ratio in (0.0, 0.5, 1.0):
        workload = make.delayed_replay(
            0, wait_ratio=wait_ratio, terms=BEST_EFFORT, capacity_blocks=511
        )
        first, second, again, _ = [r for r in workload.requests if r.group == ATTACKER]
        assert first.hash_ids == again.hash_ids
        assert len(first.hash_ids) + len(second.hash_ids) == 193
        waited_s = (again.timestamp_ms - second.timestamp_ms) / 1000
        assert wait_ratio * 67 / 16 < waited_s < wait_ratio * 67 / 16 + 1.5
        owners = [r.group for r in workload.requests if r.group != ATTACKER]
        assert owners[:2] == [VICTIM] * 2
        assert owners[-2:] == [VICTIM] * 2
        assert set(owners[2:-2]) == {NEUTRAL}
        assert [r.measured for r in workload.requests].count(True) == 2
