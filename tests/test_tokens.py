"""Prompts made from a trace's ids."""

from __future__ import annotations

import subprocess
import sys

from prefixshield.traces.reader import TraceRequest
from prefixshield.traces.tokens import prompt_tokens

VOCABULARY = range(10, 2000)
BLOCK = 16


def request(line: int, input_length: int, *hash_ids: int) -> TraceRequest:
    return TraceRequest(
        line=line,
        timestamp_ms=0.0,
        input_length=input_length,
        output_length=0,
        hash_ids=hash_ids,
        group=None,
        contract=None,
        prefix_id=None,
    )


def tokens(line: int, input_length: int, *hash_ids: int) -> list[int]:
    return prompt_tokens(request(line, input_length, *hash_ids), BLOCK, VOCABULARY)


def test_a_prompt_has_the_trace_s_length_and_tokens_of_the_vocabulary() -> None:
    for length, ids in ((5, ()), (5, (1,)), (32, (1, 2)), (40, (1, 2)), (40, (1, 2, 3))):
        prompt = tokens(1, length, *ids)
        assert len(prompt) == length
        assert set(prompt) <= set(VOCABULARY)


def test_equal_ids_are_equal_blocks_on_every_line() -> None:
    assert tokens(1, 48, 7, 8, 9)[:32] == tokens(2, 40, 7, 8)[:32]


def test_ids_that_differ_are_blocks_that_differ() -> None:
    ids = [*range(-300, 300), 2**64, -(2**64), 2**64 + 1]
    assert len({tuple(tokens(1, BLOCK, i)) for i in ids}) == len(ids)


def test_a_tail_without_an_id_is_of_its_line() -> None:
    first, second = tokens(1, 40, 7, 8), tokens(2, 40, 7, 8)
    assert first[:32] == second[:32]
    assert first[32:] != second[32:]
    assert first == tokens(1, 40, 7, 8)


def test_a_partly_filled_block_with_an_id_is_the_start_of_that_block() -> None:
    assert tokens(1, 20, 7, 8) == tokens(2, 32, 7, 8)[:20]


def test_what_is_remembered_is_not_handed_out() -> None:
    tokens(1, 32, 7, 8).clear()
    assert len(tokens(1, 32, 7, 8)) == 32


def test_another_process_makes_the_same_prompts() -> None:
    script = "import test_tokens; print(test_tokens.tokens(3, 40, 7, -8))"
    output = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        cwd=__file__.rpartition("/")[0],
    ).stdout
    assert output.strip() == str(tokens(3, 40, 7, -8))
