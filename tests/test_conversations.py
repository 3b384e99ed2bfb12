"""Conversations: the ShareGPT loader, the fitted model, arrivals, groups and bursts."""

import json
import math
import random
import statistics
import sys
from collections import Counter, defaultdict
from dataclasses import replace
from itertools import pairwise

import pytest

from prefixshield.errors import PrefixShieldError, TraceError
from prefixshield.evaluation.run import workload_config
from prefixshield.sim.replay import Replay, replay_policy
from prefixshield.traces import read_trace, write_trace
from prefixshield.traces.chat_model import SHAREGPT, ChatModel, Lengths, fit, threads
from prefixshield.traces.conversations import (
    ConversationSet,
    Turn,
    bursty,
    conversations,
    sharegpt_like,
)
from prefixshield.traces.sharegpt import load_tokenizer, read_sharegpt

GROUPS = {"a": "critical", "b": "standard", "c": "best-effort"}


def letters(text):
    """A tokenizer: one token per byte."""
    return list(text.encode())


def human(text):
    return {"from": "human", "value": text}


def gpt(text):
    return {"from": "gpt", "value": text}


def sharegpt(path, *chats):
    path.write_text(json.dumps([{"id": f"c{n}", "conversations": c} for n, c in enumerate(chats)]))
    return path


# --- the loader ---


def test_a_question_with_an_answer_is_a_request_and_its_prompt_is_all_that_was_said(tmp_path):
    path = sharegpt(tmp_path / "s.json", [human("Hi"), gpt("Hello"), human("Bye"), gpt("So long")])
    found = read_sharegpt(path, letters, block_size=4)
    first, second = "User: Hi\n\nAssistant:", " Hello\n\nUser: Bye\n\nAssistant:"
    (chat,) = found.conversations
    assert [(turn.input_length, turn.output_length) for turn in chat] == [
        (len(first), len(" Hello")),
        (len(first + second), len(" So long")),
    ]
    assert [turn.hash_ids for turn in chat] == [
        tuple(range(len(first) // 4)),
        tuple(range(len(first + second) // 4)),
    ]
    assert (found.block_size, found.skipped, found.turns) == (4, 0, 2)


def test_pieces_are_tokenised_on_their_own(tmp_path):
    pieces = []

    def tokenize(text):
        pieces.append(text)
        return [len(pieces)] * 3

    path = sharegpt(tmp_path / "s.json", [human("Hi"), gpt("Hello"), human("Bye"), gpt("So long")])
    (chat,) = read_sharegpt(path, tokenize, block_size=2).conversations
    assert pieces == [
        "User: Hi\n\nAssistant:",
        " Hello",
        "\n\nUser: Bye\n\nAssistant:",
        " So long",
    ]
    assert [(turn.input_length, turn.output_length) for turn in chat] == [(3, 3), (9, 3)]


def test_equal_ids_are_equal_prefixes_in_all_conversations(tmp_path):
    rng = random.Random(7)
    words = ["yes", "no", "yes", "perhaps"]
    chats = [
        [side(rng.choice(words)) for _ in range(rng.randint(1, 4)) for side in (human, gpt)]
        for _ in range(40)
    ]
    found = read_sharegpt(sharegpt(tmp_path / "s.json", *chats), letters, block_size=3)

    # The same prompts built as one text each: an id is to be a name of the text up to its block.
    prefix_of = {}
    for chat, turns in zip(chats, found.conversations, strict=True):
        text = ""
        for index, turn in enumerate(turns):
            question, answer = (part["value"] for part in chat[2 * index : 2 * index + 2])
            text += ("\n\n" if index else "") + f"User: {question}\n\nAssistant:"
            assert turn.input_length == len(text)
            assert len(turn.hash_ids) == len(text) // 3
            for block, hash_id in enumerate(turn.hash_ids, start=1):
                assert prefix_of.setdefault(hash_id, text[: 3 * block]) == text[: 3 * block]
            text += f" {answer}"
    assert len(set(prefix_of.values())) == len(prefix_of)
    assert list(prefix_of) == list(range(len(prefix_of)))  # by first appearance
    assert len(prefix_of) < sum(len(turns[-1].hash_ids) for turns in found.conversations)


@pytest.mark.parametrize(
    ("turns", "same_as"),
    [
        ([gpt("lost"), human("q"), gpt("r")], [human("q"), gpt("r")]),
        ([human("q"), gpt("r"), human("unanswered")], [human("q"), gpt("r")]),
        ([human("q"), human("s"), gpt("r"), gpt("t")], [human("q\ns"), gpt("r\nt")]),
        ([human("q"), gpt(" "), human("s"), gpt("r")], [human("q\ns"), gpt("r")]),
        ([{"from": "system", "value": "q"}, human("s"), gpt("r")], [human("q\ns"), gpt("r")]),
        ([{"from": "user", "value": "q"}, {"from": "bing", "value": "r"}], [human("q"), gpt("r")]),
    ],
)
def test_what_counts_as_a_turn(tmp_path, turns, same_as):
    found = read_sharegpt(sharegpt(tmp_path / "s.json", turns), letters)
    expected = read_sharegpt(sharegpt(tmp_path / "e.json", same_as), letters)
    assert found == expected
    assert found.turns == 1


def test_conversations_without_a_usable_turn_are_counted(tmp_path):
    chats = [[], [human("q")], [gpt("r")], [human("q"), gpt("")], [human("q"), gpt("r")]]
    found = read_sharegpt(sharegpt(tmp_path / "s.json", *chats), letters)
    assert (len(found.conversations), found.skipped) == (1, 4)
    found = read_sharegpt(tmp_path / "s.json", letters, limit=2)
    assert (len(found.conversations), found.skipped) == (0, 2)


def test_a_conversation_ends_before_a_prompt_that_is_too_long(tmp_path):
    chat = [human("Hi"), gpt("Hello"), human("Bye"), gpt("Bye"), human("?"), gpt("!")]
    path = sharegpt(tmp_path / "s.json", chat)
    (whole,) = read_sharegpt(path, letters).conversations
    second = whole[1].input_length
    assert read_sharegpt(path, letters, max_tokens=second).conversations == (whole[:2],)
    assert read_sharegpt(path, letters, max_tokens=second - 1).conversations == (whole[:1],)
    assert read_sharegpt(path, letters, max_tokens=5).skipped == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", ": not valid JSON"),
        ("[" * 100_000, ": not valid JSON"),
        ("{}", ": found {}, expected a JSON list of conversations"),
        ('[{"conversations": []}, 5]', ": entry 2: found 5, expected a JSON object"),
        ("[{}]", ": entry 1: conversations: missing, expected a list of turns"),
        ('[{"conversations": 5}]', ": entry 1: conversations: found 5, expected a list of turns"),
        (
            '[{"conversations": [5]}]',
            ": entry 1: conversations[0]: found 5, expected a JSON object",
        ),
        (
            '[{"conversations": [{"value": "x"}]}]',
            ": entry 1: conversations[0]: from: missing, expected one of: human",
        ),
        (
            '[{"conversations": [{"from": "cat", "value": "x"}]}]',
            ": entry 1: conversations[0].from: found 'cat', expected one of: human, user",
        ),
        (
            '[{"conversations": [{"from": ["gpt"], "value": "x"}]}]',
            ": entry 1: conversations[0].from: found ['gpt'], expected one of",
        ),
        (
            '[{"conversations": [{"from": "gpt"}]}]',
            ": entry 1: conversations[0]: value: missing, expected a text",
        ),
        (
            '[{"conversations": [{"from": "gpt", "value": null}]}]',
            ": entry 1: conversations[0].value: found None, expected a text",
        ),
    ],
)
def test_a_malformed_file_is_refused(tmp_path, text, message):
    path = tmp_path / "s.json"
    path.write_text(text)
    with pytest.raises(TraceError) as error:
        read_sharegpt(path, letters)
    assert str(error.value).startswith(f"{path}{message}")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(TraceError, match=r"none\.json: cannot be read: No such file"):
        read_sharegpt(tmp_path / "none.json", letters)


def test_a_hugging_face_tokenizer(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel({"?": 0, "hello": 1, "world": 2}, unk_token="?")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="? $0", special_tokens=[("?", 0)]
    )
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    assert load_tokenizer(path)("hello world") == [1, 2]  # no special token in front

    with pytest.raises(TraceError, match=r"none\.json: cannot be read: No such file"):
        load_tokenizer(tmp_path / "none.json")
    path.write_text("{}")
    with pytest.raises(TraceError, match=r"found no tokenizer, expected a tokenizer\.json"):
        load_tokenizer(path)


def test_without_the_tokenizers_package_the_message_says_so(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(PrefixShieldError, match=r"found no package 'tokenizers'.*pip install"):
        load_tokenizer(tmp_path / "tokenizer.json")


# --- the model ---


def test_a_drawn_conversation_grows_by_its_answers_and_shares_nothing():
    drawn = sharegpt_like(3, 200)
    owner = {}
    for number, turns in enumerate(drawn.conversations):
        for turn in turns:
            assert len(turn.hash_ids) == turn.input_length // 16
            assert {owner.setdefault(hash_id, number) for hash_id in turn.hash_ids} <= {number}
        for before, after in pairwise(turns):
            assert after.hash_ids[: len(before.hash_ids)] == before.hash_ids
            assert after.input_length > before.input_length + before.output_length
            assert after.input_length <= SHAREGPT.max_tokens
        assert min(turn.output_length for turn in turns) >= 1
    assert drawn.turns > 400


def test_the_same_seed_gives_the_same_conversations():
    assert sharegpt_like(3, 50) == sharegpt_like(3, 50)
    assert sharegpt_like(3, 50) != sharegpt_like(4, 50)
    assert sharegpt_like(3, 50).conversations == sharegpt_like(3, 60).conversations[:50]


def test_drawn_prompts_can_be_bounded():
    drawn = sharegpt_like(3, 200, max_tokens=500)
    lengths = [turn.input_length for turns in drawn.conversations for turn in turns]
    assert max(lengths) == 500
    assert all(len(turns) >= 1 for turns in drawn.conversations)


OTHER = ChatModel(
    first=Lengths(0.6, 4.5, 0.3, 6.5, 0.5),
    later=Lengths(0.5, 3.0, 0.2, 5.0, 0.4),
    answer_mean_root=12.0,
    answer_sd_root_between=1.5,
    answer_sd_root_within=2.5,
    continue_ratio=0.9,
    max_tokens=4000,
)


@pytest.mark.parametrize("model", [SHAREGPT, OTHER], ids=["sharegpt", "other"])
def test_fitting_what_was_drawn_gives_the_model_back(model):
    drawn = sharegpt_like(1, 3000, model=model)
    found = fit(conversations(1, drawn, GROUPS, rate=1.0).requests, 16)
    for lengths, expected in ((found.first, model.first), (found.later, model.later)):
        assert lengths.short_ratio == pytest.approx(expected.short_ratio, abs=0.04)
        assert lengths.short_mean_log == pytest.approx(expected.short_mean_log, abs=0.04)
        assert lengths.short_sd_log == pytest.approx(expected.short_sd_log, abs=0.04)
        assert lengths.long_mean_log == pytest.approx(expected.long_mean_log, abs=0.08)
        assert lengths.long_sd_log == pytest.approx(expected.long_sd_log, abs=0.08)
    assert found.answer_mean_root == pytest.approx(model.answer_mean_root, rel=0.03)
    assert found.answer_sd_root_between == pytest.approx(model.answer_sd_root_between, rel=0.08)
    assert found.answer_sd_root_within == pytest.approx(model.answer_sd_root_within, rel=0.08)
    assert found.continue_ratio == pytest.approx(model.continue_ratio, abs=0.02)
    assert found.max_tokens == pytest.approx(model.max_tokens, rel=0.08)


def test_a_trace_tells_its_conversations():
    drawn = sharegpt_like(5, 300)
    requests = conversations(5, drawn, GROUPS, rate=5.0).requests
    found = [[(r.input_length, r.output_length) for r in t] for t in threads(requests, 16)]
    # A first prompt below a block has no id, so nothing can be found to continue it.
    known = [turns for turns in drawn.conversations if turns[0].hash_ids]
    expected = [[(t.input_length, t.output_length) for t in turns] for turns in known]
    assert len(known) > 290
    assert all(turns in found for turns in expected)


def test_a_branch_is_a_conversation_of_its_own():
    turns = (Turn(32, 8, (1, 2)), Turn(64, 8, (1, 2, 3, 4)), Turn(96, 8, (1, 2, 5, 6, 7, 8)))
    requests = conversations(1, ConversationSet(16, (turns,)), {"a": "x"}, rate=1.0).requests
    assert [[r.line for r in thread] for thread in threads(requests, 16)] == [[1, 2], [3]]


def test_a_partly_filled_block_with_an_id_does_not_hide_what_follows():
    turns = (Turn(40, 8, (1, 2, 99)), Turn(64, 8, (1, 2, 3, 4)))
    requests = conversations(1, ConversationSet(16, (turns,)), {"a": "x"}, rate=1.0).requests
    assert [len(thread) for thread in threads(requests, 16)] == [2]


def test_too_little_cannot_be_fitted():
    same = ConversationSet(16, ((Turn(32, 8, (1, 2)), Turn(64, 8, (1, 2, 3, 4))),) * 3)
    for requests in ((), conversations(1, same, {"a": "x"}, rate=1.0).requests):
        with pytest.raises(PrefixShieldError, match=r"found \d conversations.*expected enough"):
            fit(requests, 16)


# --- arrivals, groups, bursts ---


def test_a_workload_holds_every_turn_once_in_order_of_time():
    drawn = sharegpt_like(2, 100)
    workload = conversations(2, drawn, GROUPS, rate=3.0)
    requests = workload.requests
    said = Counter(turn for turns in drawn.conversations for turn in turns)
    assert Counter(Turn(r.input_length, r.output_length, r.hash_ids) for r in requests) == said
    assert [r.line for r in requests] == list(range(1, drawn.turns + 1))
    times = [r.timestamp_ms for r in requests]
    assert times == sorted(times)
    assert times == [round(time, 3) for time in times]
    assert all(r.measured and r.contract is None and r.prefix_id is None for r in requests)
    assert (workload.block_size, workload.groups) == (16, GROUPS)
    assert workload == conversations(2, drawn, GROUPS, rate=3.0)
    assert times != [r.timestamp_ms for r in conversations(3, drawn, GROUPS, rate=3.0).requests]


def by_conversation(workload):
    """Requests by the first id, which names a drawn conversation."""
    found = defaultdict(list)
    for request in workload.requests:
        if request.hash_ids:
            found[request.hash_ids[0]].append(request)
    return list(found.values())


def test_a_turn_comes_after_service_and_think_time():
    drawn = sharegpt_like(2, 1500)
    timing = {"think_s": 7.0, "service_s": 3.0, "service_token_s": 0.5}
    chats = by_conversation(conversations(2, drawn, GROUPS, rate=3.0, **timing))
    thinking = [
        (after.timestamp_ms - before.timestamp_ms) / 1000 - 3.0 - 0.5 * before.output_length
        for chat in chats
        for before, after in pairwise(chat)
    ]
    assert min(thinking) >= -0.001
    # Exponential: mean and standard deviation are the same; 3,000 draws are known to 2%, 4%.
    assert statistics.fmean(thinking) == pytest.approx(7.0, rel=0.08)
    assert statistics.pstdev(thinking) == pytest.approx(7.0, rel=0.15)


def test_without_think_time_turns_come_as_fast_as_they_are_served():
    drawn = sharegpt_like(2, 20)
    timing = {"think_s": 0.0, "service_s": 1.0, "service_token_s": 0.0}
    for chat in by_conversation(conversations(2, drawn, GROUPS, rate=3.0, **timing)):
        start = chat[0].timestamp_ms
        assert [r.timestamp_ms for r in chat] == pytest.approx(
            [start + 1000 * n for n in range(len(chat))], abs=0.002
        )


def test_conversations_start_as_a_poisson_process_at_the_rate_of_requests():
    drawn = sharegpt_like(2, 2000)
    workload = conversations(2, drawn, GROUPS, rate=3.0)
    starts = sorted(chat[0].timestamp_ms / 1000 for chat in by_conversation(workload))
    gaps = [after - before for before, after in pairwise(starts)]
    mean = drawn.turns / 2000 / 3.0
    assert statistics.fmean(gaps) == pytest.approx(mean, rel=0.08)
    assert statistics.pstdev(gaps) == pytest.approx(mean, rel=0.12)
    settled = [r for r in workload.requests if 150 <= r.timestamp_ms / 1000 < starts[-1]]
    assert len(settled) / (starts[-1] - 150) == pytest.approx(3.0, rel=0.08)


def test_a_conversation_belongs_to_one_group_by_the_shares_which_change_no_time():
    drawn = sharegpt_like(2, 2000)
    equal = conversations(2, drawn, GROUPS, rate=3.0)
    shares = {"a": 6, "b": 3, "c": 1}
    skewed = conversations(2, drawn, GROUPS, rate=3.0, shares=shares)
    for workload, expected in ((equal, {"a": 1, "b": 1, "c": 1}), (skewed, shares)):
        chats = by_conversation(workload)
        assert all(len({r.group for r in chat}) == 1 for chat in chats)
        count = Counter(chat[0].group for chat in chats)
        for group, share in expected.items():
            ratio = share / sum(expected.values())
            assert count[group] / len(chats) == pytest.approx(ratio, abs=0.04)
    assert [replace(r, group="a") for r in equal.requests] == [
        replace(r, group="a") for r in skewed.requests
    ]


def test_scale_makes_longer_blocks_and_as_many():
    drawn = sharegpt_like(2, 100)
    plain = conversations(2, drawn, GROUPS, rate=3.0)
    doubled = conversations(2, drawn, GROUPS, rate=3.0, scale=2)
    assert doubled.block_size == 32
    for one, two in zip(plain.requests, doubled.requests, strict=True):
        assert two == replace(
            one, input_length=2 * one.input_length, output_length=2 * one.output_length
        )
        assert len(two.hash_ids) == two.input_length // 32
        assert (two.input_length - 1) // 32 == (one.input_length - 1) // 16  # blocks that can hit


def test_bursts_move_arrivals_into_the_first_part_of_each_period():
    workload = conversations(2, sharegpt_like(2, 300), GROUPS, rate=3.0)
    bursts = bursty(workload, period_s=20.0, duty_ratio=0.25)
    assert bursts.name == "conversations-bursty"
    pairs = list(zip(workload.requests, bursts.requests, strict=True))
    assert all(replace(one, timestamp_ms=two.timestamp_ms) == two for one, two in pairs)
    times = [two.timestamp_ms for _, two in pairs]
    assert times == sorted(times)
    assert all(time % 20_000 <= 5_000 for time in times)
    assert [time // 20_000 for time in times] == [one.timestamp_ms // 20_000 for one, _ in pairs]
    assert max(time % 20_000 for time in times) > 4_500
    assert bursty(workload, period_s=20.0, duty_ratio=1.0).requests == workload.requests


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"rate": 0}, "rate: found 0, expected more than 0"),
        ({"rate": math.nan}, "rate: found nan, expected more than 0"),
        ({"think_s": -1.0}, "times: found one below 0"),
        ({"scale": 0}, "scale: found 0, expected a whole number of at least 1"),
        ({"shares": {"a": 1}}, r"shares: found \['a'\], expected those of \['a', 'b', 'c'\]"),
        ({"shares": {"a": 0, "b": 0, "c": 0}}, "shares: found .* expected none below 0, not all 0"),
        ({"shares": {"a": 2, "b": -1, "c": 0}}, "shares: found .* expected none below 0"),
        ({"groups": {}}, "groups: found none, expected at least one"),
        ({"source": ConversationSet(16, ())}, "source: found no conversations"),
    ],
)
def test_arguments_out_of_range(wrong, message):
    arguments = {"source": sharegpt_like(1, 2), "groups": GROUPS, "rate": 1.0, **wrong}
    with pytest.raises(PrefixShieldError, match=message):
        conversations(1, **arguments)


@pytest.mark.parametrize("wrong", [{"period_s": 0.0}, {"duty_ratio": 0.0}, {"duty_ratio": 1.5}])
def test_bursts_out_of_range(wrong):
    workload = conversations(1, sharegpt_like(1, 2), GROUPS, rate=1.0)
    with pytest.raises(PrefixShieldError, match=f"{next(iter(wrong))}: found"):
        bursty(workload, **{"period_s": 1.0, "duty_ratio": 0.5, **wrong})


def test_a_workload_survives_its_file_and_replays(tmp_path):
    workload = conversations(2, sharegpt_like(2, 100), GROUPS, rate=3.0)
    path = tmp_path / "t.jsonl.gz"
    write_trace(path, workload.requests)
    requests = read_trace(path, workload.block_size)
    assert tuple(requests) == workload.requests

    # In a pool that never evicts, what hits is all that a turn has from the turn before it.
    config = workload_config(workload, "lru")
    policy = replay_policy(config, 100_000, requests, 16)
    total = Replay(config, policy, 16).run(requests).total
    reused = sum(
        min(len(before.hash_ids), (after.input_length - 1) // 16)
        for chat in by_conversation(workload)
        for before, after in pairwise(chat)
    )
    assert total.blocks_hit == reused > 0
    assert total.rejected == 0
