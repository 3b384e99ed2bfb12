"""Comparisons: the numbers of replays run one by one, whatever the number of processes."""

import io
import os
import random
import signal
from fractions import Fraction

import pytest
from rich.console import Console

from prefixshield.config import ContractSection, paper_config
from prefixshield.errors import PrefixShieldError
from prefixshield.evaluation import compare as comparing
from prefixshield.evaluation.compare import Question, Score, TraceComparison, compare
from prefixshield.policies import POLICIES
from prefixshield.sim.replay import Replay, Tally, replay_policy
from prefixshield.traces import TraceRequest, read_trace, write_trace

BLOCK_SIZE = 4
GROUPS = {"a": "critical", "b": "best-effort"}


def make_trace(path, seed, requests=150):
    """Requests of two groups for prefixes that share their beginnings, 20 ms apart."""
    rng = random.Random(seed)
    rows = []
    for line in range(1, requests + 1):
        group = rng.choice("aab")
        first = 100 * rng.randrange(6 if group == "a" else 40)
        ids = tuple(range(first, first + rng.randint(1, 6)))
        length = len(ids) * BLOCK_SIZE + 1
        rows.append(TraceRequest(line, 20.0 * line, length, 0, ids, group, GROUPS[group], None))
    write_trace(path, rows)
    return path


@pytest.fixture
def traces(tmp_path):
    return [make_trace(tmp_path / f"{seed}.jsonl", seed) for seed in (1, 2)]


def question_of(traces, **more):
    return Question(
        **{
            "traces": traces,
            "block_size": BLOCK_SIZE,
            "sizes": (12, Fraction(1, 2)),
            "policies": comparing.parse_policies("shield,no-debt-gate"),
            "refill_scales": (0.25, 4.0),
            "per_group": True,
            **more,
        }
    )


def replayed(trace, blocks, policy, scale=None, for_group=None):
    """The same by hand; the paper's contracts with their rates scaled."""
    config = paper_config()
    contracts = {
        name: ContractSection(refill_rate=terms.refill_rate * (scale or 1), burst=terms.burst)
        for name, terms in config.contracts.items()
    }
    config = config.model_copy(update={"policy": policy, "contracts": contracts})
    requests = read_trace(trace, BLOCK_SIZE)
    chosen = replay_policy(config, blocks, requests, BLOCK_SIZE, for_group)
    return Replay(config, chosen, BLOCK_SIZE).run(requests)


def test_every_score_is_that_of_a_replay_run_directly(traces):
    comparisons = compare(question_of(traces), paper_config())
    assert [one.trace for one in comparisons] == traces
    for one in comparisons:
        assert one.requests == 150
        assert next(iter(one.sizes)) == 12
        assert len(one.scores) == len(one.sizes) * (1 + len(GROUPS)) * (3 + 2 * 2)
        for score in one.scores:
            bound_of = score.group if score.policy == "clairvoyant" else None
            result = replayed(one.trace, score.blocks, score.policy, score.refill_scale, bound_of)
            tally = result.total if score.group is None else result.groups[score.group]
            assert score.tally == tally
            baselines = [replayed(one.trace, score.blocks, name) for name in ("lru", "s3fifo")]
            better = max(
                (run.total if score.group is None else run.groups[score.group]).hit_ratio
                for run in baselines
            )
            assert score.distance_pp == pytest.approx(100 * (tally.hit_ratio - better))


def test_the_refill_scale_changes_what_depends_on_contracts(traces):
    (one, _) = compare(question_of(traces), paper_config())
    hits = {
        score.refill_scale: score.tally.blocks_hit
        for score in one.scores
        if (score.blocks, score.policy, score.group) == (12, "shield", None)
    }
    assert set(hits) == {0.25, 4.0}
    assert hits[0.25] != hits[4.0]


@pytest.mark.parametrize("policy", sorted(comparing.CONTRACT_FREE))
def test_what_is_run_once_depends_on_no_contract(traces, policy):
    if policy != "clairvoyant":
        assert policy in POLICIES
    scarce, ample = (replayed(traces[0], 12, policy, scale) for scale in (0.01, 100))
    assert scarce == ample


def test_processes_change_nothing(traces):
    told = []
    question = question_of(traces)
    parallel = compare(question, paper_config(), 2, lambda *progress: told.append(progress))
    assert parallel == compare(question, paper_config(), 1)
    # Two traces, two sizes, five policies of which two under two scales, two groups' bounds.
    total = 2 * 2 * (3 + 2 * 2 + 2)
    assert told == [(done, total) for done in range(total + 1)]


def test_a_percentage_is_of_the_unique_blocks_of_the_trace(tmp_path):
    rows = [
        TraceRequest(1, 0.0, 16, 0, (1, 2, 3, 4), "a", "standard", None),
        TraceRequest(2, 1.0, 16, 0, (1, 2, 3, 5), "a", "standard", None),
        TraceRequest(3, 2.0, 8, 0, (1, 2), None, "standard", None),  # the default group's own
    ]
    trace = tmp_path / "trace.jsonl"
    write_trace(trace, rows)
    sizes = comparing.parse_sizes("50%,4,100%,1%,28.6%", 1000)
    (one,) = compare(question_of([trace], sizes=sizes, per_group=False), paper_config())
    assert one.unique_blocks == 7
    assert list(one.groups) == ["a", "default"]
    assert one.sizes == {4: "4 (50%)", 7: "7 (100%)", 1: "1 (1%)", 2: "2 (28.6%)"}


def test_a_file_that_changed_is_read_again(traces):
    question = question_of(traces[:1])
    before = compare(question, paper_config())
    make_trace(traces[0], seed=3, requests=40)
    assert before[0].requests == 150
    assert compare(question, paper_config())[0].requests == 40


@pytest.mark.parametrize("processes", [1, 2])
def test_a_bad_trace_is_one_message(tmp_path, traces, processes):
    bad = tmp_path / "bad.jsonl"
    write_trace(bad, [TraceRequest(1, 0.0, 8, 0, (1, 2), "a", "gold", None)])
    with pytest.raises(PrefixShieldError) as error:
        compare(question_of([traces[0], bad]), paper_config(), processes)
    assert str(error.value) == (
        f"{bad}: line 1: contract: found 'gold', expected one of: critical, standard, best-effort"
    )


def _die(config, job):
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_process_that_is_killed_is_one_message(traces, monkeypatch):
    monkeypatch.setattr(comparing, "_replay", _die)
    with pytest.raises(PrefixShieldError, match="a process that replayed was killed"):
        compare(question_of(traces[:1]), paper_config(), 2)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("shield", ("lru", "s3fifo", "shield", "clairvoyant")),
        ("clairvoyant, shield,s3fifo", ("lru", "s3fifo", "shield", "clairvoyant")),
        ("all", (*POLICIES, "clairvoyant")),
    ],
)
def test_baselines_come_first_and_the_bound_last(text, names):
    assert comparing.parse_policies(text) == names


@pytest.mark.parametrize(
    ("parse", "text", "message"),
    [
        (
            comparing.parse_policies,
            "lru,arc",
            "--policies: found 'arc', expected all, or some of: lru, s3fifo, ",
        ),
        (comparing.parse_policies, "", "--policies: found '', expected all"),
        (
            comparing.parse_refill_scales,
            "1,0",
            "--refill-scale: found '0', expected a number greater than 0",
        ),
        (comparing.parse_refill_scales, "nan", "--refill-scale: found 'nan', expected a number"),
        *(
            (
                lambda text: comparing.parse_sizes(text, 1000),
                text,
                f"--blocks: found '{text}', expected blocks, from 1 to 1000, or a percentage",
            )
            for text in ("", "0", "1001", "-1", "x", "5 %", "0%", "1e3%", "1/2")
        ),
    ],
)
def test_a_mistake_names_what_was_found_and_expected(parse, text, message):
    with pytest.raises(PrefixShieldError) as error:
        parse(text)
    assert str(error.value).startswith(message)


def test_lists_lose_repetitions_and_keep_their_order():
    assert comparing.parse_sizes("20, 5%,20,5.0%", 1000) == (20, Fraction(1, 20))
    assert comparing.parse_refill_scales("4,1,4.0,0.25") == (4.0, 1.0, 0.25)


def shown(*arguments, **options):
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(comparing.table(*arguments, **options))
    return [
        [cell.strip() for cell in line.strip("│┃").replace("┃", "│").split("│")]
        for line in console.export_text().splitlines()
    ]


def test_the_table_has_a_row_per_size_and_scale_where_it_matters(traces):
    for scales, policies, labels in [
        ((0.25, 4.0), "shield", [["0.25"], ["4"]]),
        ((0.25, 4.0), "lru", [[]]),
        ((1.0,), "shield", [[]]),
    ]:
        names = comparing.parse_policies(policies)
        question = question_of(traces[:1], sizes=(20,), policies=names, refill_scales=scales)
        (one,) = compare(question, paper_config())
        rows = [row for row in shown(one, question) if row[0] == "20"]
        assert [row[1 : 1 + len(label)] for row, label in zip(rows, labels, strict=True)] == labels
        for row, label in zip(rows, labels, strict=True):
            ratios = [
                f"{score.tally.hit_ratio:.4f}"
                for score in one.scores
                if score.group is None
                and (
                    score.refill_scale is None or not label or label == [f"{score.refill_scale:g}"]
                )
            ]
            assert row[1 + len(label) :] == ratios


def test_the_table_by_group_and_its_marks():
    """A policy that skips other requests than LRU is marked, and a distance is never -0.00."""

    def score(policy, group, hit, rejected, distance_pp):
        return Score(4, None, policy, group, Tally(9, rejected, 10, hit), distance_pp)

    scores = [
        score("lru", "a", 5, 1, 0.0),
        score("s3fifo", "a", 5, 2, -0.001),
        score("clairvoyant", "a", 8, 1, 30.0),
    ]
    names = ("lru", "s3fifo", "clairvoyant")
    one = TraceComparison("trace", 9, 20, ["a"], {4: "4"}, scores)
    rows = shown(one, question_of([], policies=names), per_group=True)
    first = rows.index(["4", "a", "1", "0.5000", "0.5000*", "0.8000"])
    assert rows[first + 1] == ["", "", "", "+0.00", "+0.00", "+30.00"]
    assert "*: skipped other requests than lru did" in " ".join(" ".join(row) for row in rows)
