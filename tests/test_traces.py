"""Reading traces: what is accepted, and what every mistake is told."""

import gzip
import json

import pytest

from prefixshield.errors import TraceError
from prefixshield.traces import read_trace

GOOD = {"timestamp": 5, "input_length": 9, "output_length": 1, "hash_ids": [1, 2]}


def write(path, *lines):
    path.write_text(
        "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    )
    return path


def test_requests_come_in_timestamp_order_and_equal_ones_as_in_the_file(tmp_path):
    path = write(
        tmp_path / "t.jsonl",
        {**GOOD, "timestamp": 9, "group": "late"},
        "",
        {**GOOD, "group": "first", "contract": "gold", "prefix_id": "p", "extra": 1},
        {**GOOD, "group": "second"},
    )
    requests = read_trace(path, block_size=4)
    assert [request.group for request in requests] == ["first", "second", "late"]
    assert [request.line for request in requests] == [3, 4, 1]
    assert (requests[0].contract, requests[0].prefix_id) == ("gold", "p")


def test_gzip_is_recognised_by_content(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_bytes(gzip.compress(json.dumps(GOOD).encode()))
    assert read_trace(path, 4)[0].hash_ids == (1, 2)


def test_a_last_partly_filled_block_may_have_an_id(tmp_path):
    path = write(tmp_path / "t", {**GOOD, "hash_ids": [1, 2, 3]}, {**GOOD, "hash_ids": [1, 2]})
    assert [len(request.hash_ids) for request in read_trace(path, 4)] == [3, 2]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: not valid JSON"),
        ("[" * 100_000, "line 2: not valid JSON"),
        ("[1]", "line 2: line: found [1], expected a JSON object"),
        (
            {**GOOD, "timestamp": -1},
            "line 2: timestamp: found -1, expected a number of at least 0 (milliseconds)",
        ),
        ('{"timestamp": NaN}', "line 2: timestamp: found nan, expected a number of at least 0"),
        ({**GOOD, "timestamp": True}, "line 2: timestamp: found True, expected a number"),
        ({"timestamp": 1}, "line 2: input_length: missing, expected a whole number"),
        ({"input_length": 1}, "line 2: timestamp: missing, expected milliseconds"),
        (
            {**GOOD, "input_length": 0},
            "line 2: input_length: found 0, expected a whole number of at least 1",
        ),
        ({**GOOD, "input_length": 9.0}, "line 2: input_length: found 9.0, expected a whole number"),
        (
            {**GOOD, "output_length": -1},
            "line 2: output_length: found -1, expected a whole number of at least 0",
        ),
        (
            {"timestamp": 1, "input_length": 9},
            "line 2: hash_ids: missing, expected a list of numbers",
        ),
        (
            {**GOOD, "hash_ids": "12"},
            "line 2: hash_ids: found '12', expected a list of whole numbers",
        ),
        (
            {**GOOD, "hash_ids": [1, "2"]},
            "line 2: hash_ids: found [1, '2'], expected a list of whole numbers",
        ),
        ({**GOOD, "hash_ids": [1, 1]}, "line 2: hash_ids: found [1, 1], expected every id once"),
        (
            {**GOOD, "hash_ids": [1]},
            "line 2: hash_ids: found '1 ids', expected 2 ids, one per full block of 4 tokens",
        ),
        ({**GOOD, "group": 3}, "line 2: group: found 3, expected a non-empty string"),
        ({**GOOD, "group": ""}, "line 2: group: found '', expected a non-empty string"),
    ],
)
def test_a_mistake_is_named_with_file_line_and_key(tmp_path, line, message):
    path = write(tmp_path / "t.jsonl", GOOD, line)
    with pytest.raises(TraceError) as raised:
        read_trace(path, block_size=4)
    assert str(raised.value).startswith(f"{path}: {message}")
    assert len(str(raised.value)) < 400


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(TraceError, match="gone: cannot be read: No such file"):
        read_trace(tmp_path / "gone", 4)
    with pytest.raises(TraceError, match="cannot be read: Is a directory"):
        read_trace(tmp_path, 4)
    damaged = tmp_path / "t.gz"
    damaged.write_bytes(gzip.compress(json.dumps(GOOD).encode() * 1000)[:40])
    with pytest.raises(TraceError, match=r"t\.gz: damaged gzip file"):
        read_trace(damaged, 4)
    damaged.write_bytes(b"\x1f\x8bnot gzip at all")
    with pytest.raises(TraceError, match=r"t\.gz: "):
        read_trace(damaged, 4)
