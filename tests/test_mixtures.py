"""Mixtures do what their names say, counted; arrivals of real clients carry other requests."""

import gzip
import statistics
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path

import pytest

from prefixshield.cli import main
from prefixshield.config import PAPER_CONTRACTS
from prefixshield.evaluation.experiments import make_workload
from prefixshield.traces import TraceRequest, read_trace, write_trace
from prefixshield.traces.arrivals import Arrival, mix, read_arrivals, sessions
from prefixshield.traces.mixtures import ATTACK_S, BEST_EFFORT_RATE, MIXTURES

TRACES = Path(__file__).parent.parent / "traces"
ATTACKED = [name for name in MIXTURES if name.startswith("attack-")]


def made(name, seed=0, block_size=16):
    return MIXTURES[name](seed, block_size)


def accesses(requests):
    return sum(len(request.hash_ids) for request in requests)


def unique(requests):
    return {block for request in requests for block in request.hash_ids}


def used_once(requests):
    """Blocks of exactly one request."""
    uses = Counter(block for request in requests for block in request.hash_ids)
    return {block for block, times in uses.items() if times == 1}


# --- every mixture ---


@pytest.mark.parametrize("name", MIXTURES)
def test_every_mixture_has_its_size_its_order_and_its_own_ids(name):
    workload = made(name)
    requests = workload.requests
    assert 100_000 <= accesses(requests) <= 300_000
    assert 10_000 <= len(unique(requests)) <= 60_000
    assert 15 * 60 <= requests[-1].timestamp_ms / 1000 <= 60 * 60
    assert all(a.timestamp_ms <= b.timestamp_ms for a, b in pairwise(requests))
    assert [request.line for request in requests] == list(range(1, len(requests) + 1))
    owner, before = {}, {}
    for request in requests:
        for above, block in zip((None, *request.hash_ids), request.hash_ids, strict=False):
            assert owner.setdefault(block, request.group) == request.group
            assert before.setdefault(block, above) == above, "an id names its whole prefix"
    assert {request.group for request in requests} == set(workload.groups)
    tenants = [group for group in workload.groups if group.startswith("tenant-")]
    cycle = [list(PAPER_CONTRACTS)[number % 3] for number in range(len(tenants))]
    assert [workload.groups[tenant] for tenant in tenants] == cycle
    assert all(request.contract == workload.groups[request.group] for request in requests)
    assert all(request.measured == (request.group in tenants) for request in requests)


@pytest.mark.parametrize("name", MIXTURES)
def test_the_seed_decides_and_block_size_changes_no_pressure(name):
    workload = made(name)
    assert made(name) == workload != made(name, seed=1)
    for block_size in (2, 512):
        other = made(name, block_size=block_size)
        assert len(other.requests) == len(workload.requests)
        for a, b in zip(workload.requests, other.requests, strict=True):
            assert (a.timestamp_ms, a.group, a.hash_ids) == (b.timestamp_ms, b.group, b.hash_ids)
            # As many blocks can hit: all, since the last token is behind them.
            assert (b.input_length - 1) // block_size == len(b.hash_ids)


def test_a_mixture_is_a_workload_that_the_command_writes_and_the_reader_reads(tmp_path):
    workload = make_workload("rag", 3, 32)
    write_trace(tmp_path / "rag.jsonl", workload.requests)
    assert tuple(read_trace(tmp_path / "rag.jsonl", 32)) == workload.requests
    assert workload == made("rag", 3, 32)


# --- what each claims ---


def test_drift_moves_gradually_and_altogether():
    workload = made("drift")
    end_ms = workload.requests[-1].timestamp_ms
    parts = [
        [r for r in workload.requests if tenth <= 10 * r.timestamp_ms / end_ms < tenth + 1]
        for tenth in range(10)
    ]
    hot = [unique(part) - used_once(workload.requests) for part in parts]

    def kept(a, b):
        return len(hot[a] & hot[b]) / len(hot[a])

    assert kept(0, 9) < 0.02
    assert all(kept(tenth, tenth + 1) > 0.5 for tenth in range(9))


def test_diurnal_tenants_come_and_go_in_every_period_each_at_its_own_time():
    busiest = []
    for tenant in (f"tenant-{number}" for number in range(8)):
        times = [r.timestamp_ms / 1000 for r in made("diurnal").requests if r.group == tenant]
        eighths = Counter(int(at_s % 600 // 75) for at_s in times)
        busiest.append(max(eighths, key=lambda n: eighths[n] + eighths[(n + 1) % 8]))
        assert max(eighths.values()) > 3 * min(eighths[n] for n in range(8))
        assert all(sum(n <= at_s / 600 < n + 1 for at_s in times) > 50 for n in range(4))
    assert len(set(busiest)) >= 6


def test_scans_read_long_documents_once_or_twice_and_only_two_tenants_scan():
    requests = made("scans").requests
    by_first = defaultdict(list)
    for request in requests:
        by_first[request.hash_ids[:1]].append(request)
    # The others' prompts of that length are a template and a question, or grow by turns.
    scanned = {
        group[0].hash_ids: (group[0].group, len(group))
        for group in by_first.values()
        if len(group) <= 2
        and len({r.hash_ids for r in group}) == 1
        and len(group[0].hash_ids) >= 60
    }
    scanners = {"tenant-6", "tenant-7"}
    mine = {ids: times for ids, (group, times) in scanned.items() if group in scanners}
    assert len(mine) > 0.9 * len(scanned)
    assert Counter(mine.values()).keys() == {1, 2}
    assert sum(map(len, mine)) > 0.4 * len(unique(requests))


@pytest.mark.parametrize(("name", "pool_ratio"), [("loops", 0.10), ("loop-alone", 0.25)])
def test_loops_are_a_little_larger_than_the_pool_and_go_round_in_order(name, pool_ratio):
    requests = made(name).requests
    prompts = Counter(r.hash_ids for r in requests if r.group == "tenant-0")
    loop = [r.hash_ids for r in requests if r.group == "tenant-0" and prompts[r.hash_ids] > 5]
    documents = list(dict.fromkeys(loop))
    assert 1.05 < len({b for ids in loop for b in ids}) / (pool_ratio * len(unique(requests))) < 1.2
    assert all(ids == documents[n % len(documents)] for n, ids in enumerate(loop))
    assert len(loop) > 15 * len(documents)


def test_who_is_alone_and_who_is_one_of_a_hundred():
    for name in ("alone", "loop-alone"):
        assert len(made(name).groups) == 1
    requests = made("hundred").requests
    sent = Counter(request.group for request in requests)
    assert len(sent) == 100
    assert sent.most_common(1)[0][1] > 20 * statistics.median(sent.values())
    systems = defaultdict(set)
    for request in requests:
        systems[request.group].add(request.hash_ids[:10])
    assert all(len(found) == 1 for found in systems.values())


def test_agents_grow_branch_and_hardly_wait():
    requests = [r for r in made("agents").requests if r.group == "tenant-0"]
    continued = 0
    gaps_s, following = [], defaultdict(set)
    latest = {}  # when a prompt that ends with this block came
    for request in requests:
        ids = request.hash_ids
        known = next((n for n in range(len(ids) - 1, 0, -1) if ids[n - 1] in latest), None)
        if known is not None:
            continued += 1
            gaps_s.append((request.timestamp_ms - latest[ids[known - 1]]) / 1000)
        for block, after in pairwise(ids):
            following[block].add(after)
        latest[ids[-1]] = request.timestamp_ms
    assert continued > 0.9 * len(requests)
    assert statistics.median(gaps_s) < 10
    assert sum(len(after) in (3, 4) for after in following.values()) > 10


def test_rag_shares_the_first_document_and_the_order_decides_the_rest():
    """Of the blocks of a prompt, those at its front were far more often seen before."""
    seen, hits, total = set(), Counter(), Counter()
    for request in made("rag").requests:
        for part, block in (
            (3 * n // len(request.hash_ids), b) for n, b in enumerate(request.hash_ids)
        ):
            total[part] += 1
            hits[part] += block in seen
        seen.update(request.hash_ids)
    ratios = [hits[part] / total[part] for part in range(3)]
    assert ratios[0] > 0.95
    assert ratios[0] > ratios[1] > ratios[2] + 0.2


# --- attacks ---


@pytest.mark.parametrize("name", ATTACKED)
def test_attackers_create_more_than_all_tenants_and_several_times_their_contract(name):
    workload = made(name)
    attackers = [group for group in workload.groups if group.startswith("attacker-")]
    assert len(attackers) == {"attack-two": 2, "attack-three": 3}.get(name, 1)
    assert {workload.groups[attacker] for attacker in attackers} == {"best-effort"}
    assert PAPER_CONTRACTS["best-effort"].refill_rate == BEST_EFFORT_RATE
    hostile = [r for r in workload.requests if r.group in attackers]
    benign = [r for r in workload.requests if r.group not in attackers]
    # What a loop asks for again has long gone from any pool that it does not fill.
    created = accesses(hostile) if name == "attack-loop" else len(unique(hostile))
    assert created >= len(unique(benign))
    start_s, end_s = ATTACK_S
    assert created > 2 * len(attackers) * BEST_EFFORT_RATE * 0.8 * (end_s - start_s)
    assert all(start_s <= r.timestamp_ms / 1000 <= end_s + 6 for r in hostile)
    strip = [(r.timestamp_ms, r.group, r.hash_ids) for r in benign]
    other = made("attack-one-touch").requests
    assert strip == [(r.timestamp_ms, r.group, r.hash_ids) for r in other if r.measured]


def test_attackers_differ_as_their_names_say():
    def uses(name, attacker):
        hostile = [r for r in made(name).requests if r.group == f"attacker-{attacker}"]
        return hostile, set(Counter(r.hash_ids for r in hostile).values())

    assert uses("attack-one-touch", 0)[1] == uses("attack-two", 0)[1] == {1}
    assert uses("attack-replay", 0)[1] == uses("attack-three", 1)[1] == {2}
    slow, once = uses("attack-three", 2)
    gaps = [b.timestamp_ms - a.timestamp_ms for a, b in pairwise(slow)]
    assert once == {1}
    assert max(gaps) - min(gaps) < 1
    loop, rounds = uses("attack-loop", 0)
    assert min(rounds) >= 3
    assert len(unique(loop)) > 0.25 * len(unique(made("attack-loop").requests))


# --- arrivals of real clients ---


def request(at_ms, ids, group=None):
    return TraceRequest(at_ms + 1, at_ms, len(ids) * 4 + 1, 1, tuple(ids), group, None, None)


def test_sessions_part_behind_what_many_share_and_nowhere_else():
    """Behind a system prompt of 2 blocks: twenty sessions, one of them with a branch."""
    first = [request(n, (1, 2, 100 + n)) for n in range(20)]
    more = [request(20, (1, 2, 100, 200)), request(21, (1, 2, 100, 201)), request(22, ())]
    found = sessions([*first, *more])
    assert found[0] == [0, 20, 21]
    assert found[1:] == [[n] for n in (*range(1, 20), 22)]


@pytest.mark.parametrize(
    ("file", "options"),
    [("vtc_arena_arrivals.csv", {}), ("servegen_client_rates.csv.gz", {"pool": "deepseek-r1"})],
)
def test_a_mix_keeps_arrivals_and_skew_and_sessions_whole_and_in_order(file, options):
    content = read_trace(TRACES / "agents_bs16.jsonl.gz", 16)
    arrivals = read_arrivals(TRACES / file, 1000, seed=1, **options)
    workload = mix(content, arrivals, 16, seed=1)
    assert workload == mix(content, arrivals, 16, seed=1) != mix(content, arrivals, 16, seed=2)
    start_s = arrivals[0].at_s
    given = Counter((f"client-{a.client}", round((a.at_s - start_s) * 1000, 3)) for a in arrivals)
    taken = Counter((r.group, r.timestamp_ms) for r in workload.requests)
    assert not taken - given
    assert len(workload.requests) > 0.9 * len(arrivals)
    assert all(a.timestamp_ms <= b.timestamp_ms for a, b in pairwise(workload.requests))
    # Ids are renamed, so a request is told by its lengths; of each session a client has the front.
    session_of = {i: n for n, found in enumerate(sessions(content)) for i in found}
    lengths = defaultdict(list)
    for index, one in enumerate(content):
        lengths[one.input_length, one.output_length, len(one.hash_ids)].append(index)
    told = {key: found[0] for key, found in lengths.items() if len(found) == 1}
    owner, last = {}, {}
    for one in workload.requests:
        index = told.get((one.input_length, one.output_length, len(one.hash_ids)))
        if index is not None:
            session = session_of[index]
            assert owner.setdefault(session, one.group) == one.group
            assert last.get(session, -1) < index
            last[session] = index
    assert len(owner) > 20
    groups = defaultdict(set)
    for one in workload.requests:
        for block in one.hash_ids:
            groups[block].add(one.group)
    assert all(len(found) == 1 for found in groups.values())
    sent = Counter(one.group for one in workload.requests)
    contracts = [workload.groups[group] for group in workload.groups]
    assert contracts[:3] == list(PAPER_CONTRACTS)
    assert sent[next(iter(workload.groups))] == max(sent.values())


def test_what_prompts_have_in_common_stays_common_within_a_client():
    content = [request(n, (1, 2, 100 + n)) for n in range(40)]
    arrivals = [Arrival(float(n), "ab"[n % 2]) for n in range(40)]
    for group in ("client-a", "client-b"):
        mine = [r for r in mix(content, arrivals, 4).requests if r.group == group]
        assert len(mine) == 20
        assert len({r.hash_ids[:2] for r in mine}) == 1
        assert len({r.hash_ids[2] for r in mine}) == 20


def test_a_rate_stretches_all_times_by_one_factor():
    content = [request(n, (n,)) for n in range(10)]
    arrivals = [Arrival(5.0 + n * n, "a") for n in range(10)]
    times = [r.timestamp_ms for r in mix(content, arrivals, 4, rate=2.0).requests]
    assert times == pytest.approx([n * n / 81 * 5000 for n in range(10)], abs=0.001)


def test_rates_are_met_exactly_and_gaps_have_their_shape(tmp_path):
    rows = ["pool,client,window_start_s,rate_rps,cv,pattern,arg1,arg2"]
    rows += ["p,even,600,2,0.1,Gamma,100,9", "p,bursty,600,2,4,Gamma,0.0625,9"]
    rows += [
        "p,some,0,0.5,2,Weibull,0.54,9",
        "p,few,0,0.01,1,Weibull,1,9",
        "q,other,0,9,1,Gamma,1,1",
    ]
    path = tmp_path / "rates.csv.gz"
    path.write_bytes(gzip.compress("\n".join(rows).encode()))
    arrivals = read_arrivals(path, 10**6, pool="p")
    assert Counter(a.client for a in arrivals) == {
        "even": 1200,
        "bursty": 1200,
        "some": 300,
        "few": 6,
    }
    assert arrivals == sorted(arrivals)
    assert all(600 <= a.at_s <= 1200 for a in arrivals if a.client in ("even", "bursty"))

    def variation(client):
        gaps = [b - a for a, b in pairwise(x.at_s for x in arrivals if x.client == client)]
        return statistics.stdev(gaps) / statistics.fmean(gaps)

    assert variation("even") == pytest.approx(0.1, rel=0.1)
    assert variation("bursty") == pytest.approx(4, rel=0.25)
    assert variation("some") == pytest.approx(2, rel=0.25)
    assert {a.client for a in read_arrivals(path, 10**6, pool="p", clients=2)} == {"even", "bursty"}
    assert read_arrivals(path, 100, pool="p") == arrivals[:100]


RATES = "pool,client,window_start_s,rate_rps,cv,pattern,arg1,arg2\n"


@pytest.mark.parametrize(
    ("text", "pool", "message"),
    [
        ("", None, "{path}: found an empty file, expected a line of column names"),
        ("a,b\n1,2\n", None, "{path}: line 1: found the columns 'a,b', expected client,arrival_s"),
        ("client,arrival_s\n1,soon\n", None, "{path}: line 2: arrival_s: found 'soon', expected"),
        ("client,arrival_s\n1,nan\n", None, "{path}: line 2: arrival_s: found 'nan', expected"),
        ("client,arrival_s\n1\n", None, "{path}: line 2: found 1 fields, expected 2"),
        ("client,arrival_s\n1,2\n", "p", "pool: found 'p', expected none: {path} has no pools"),
        (
            RATES + "p,0,0,1,1,Pareto,1,1\n",
            "p",
            "{path}: line 2: pattern: found 'Pareto', expected",
        ),
        (RATES + "p,0,0,1,1,Gamma,0,1\n", "p", "{path}: line 2: arg1: found '0', expected a"),
        (RATES + "p,0,0,-1,1,Gamma,1,1\n", "p", "{path}: line 2: rate_rps: found '-1', expected"),
        (RATES + "p,0,0,1,1,Gamma,1,1\n", "q", "pool: found 'q', expected one of: p"),
        (
            RATES + "p,0,0,1,1,Gamma,1,1\nq,0,0,1,1,Gamma,1,1\n",
            None,
            "pool: missing, expected one of: p, q",
        ),
        ("client,arrival_s\n", None, "mix: found 1 requests and 0 arrivals, expected at least one"),
    ],
)
def test_a_bad_file_of_arrivals_is_one_message(tmp_path, monkeypatch, capsys, text, pool, message):
    arrivals, content = tmp_path / "arrivals.csv", tmp_path / "content.jsonl"
    arrivals.write_text(text)
    write_trace(content, [request(0, (1,))])
    more = [] if pool is None else ["--pool", pool]
    output = tmp_path / "out.jsonl"
    command = ["mix", content, arrivals, "--block-size", "4", "--output", output, *more]
    monkeypatch.setattr("sys.argv", ["prefixshield", *map(str, command)])
    with pytest.raises(SystemExit) as ended:
        main()
    err = capsys.readouterr().err
    assert ended.value.code == 1
    assert err.startswith(message.format(path=arrivals))
    assert err.count("\n") == 1
    assert not output.exists()


def test_the_command_writes_a_mix_that_the_reader_reads(tmp_path, monkeypatch, capsys):
    output = tmp_path / "mix.jsonl.gz"
    command = ["mix", TRACES / "agents_bs16.jsonl.gz", TRACES / "vtc_arena_arrivals.csv"]
    command += ["--output", output, "--requests", "200", "--clients", "5", "--rate", "4"]
    monkeypatch.setattr("sys.argv", ["prefixshield", *map(str, command)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    found = read_trace(output, 16)
    assert len({one.group for one in found}) <= 5
    assert 150 < len(found) <= 200
    assert found[-1].timestamp_ms <= 50_000
    assert capsys.readouterr().out.startswith(f"{output}: {len(found)} requests of ")
