"""The real-time engine: its client, its checks, and a small workload on the real server."""

from __future__ import annotations

import asyncio
import http.server
import itertools
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("httpx")

from prefixshield.config import ContractSection
from prefixshield.errors import PrefixShieldError
from prefixshield.evaluation import real_time
from prefixshield.evaluation.client import Call, Reply, complete, make_call, make_client
from prefixshield.evaluation.real_time import Counts, parse_counts, run_real_time
from prefixshield.evaluation.run import workload_config
from prefixshield.serving.tiny_model import CONTEXT_LENGTH
from prefixshield.sim.replay import Replay, replay_policy
from prefixshield.traces import TraceRequest, Workload

BLOCK = 32

FIRST = b'data: {"choices": [{"text": "a"}], "usage": null}\n\n'
USAGE = b'data: {"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": 64}}}\n\n'
DONE = b"data: [DONE]\n\n"


@contextmanager
def answering(status: int, body: bytes, promised: int | None = None) -> Iterator[str]:
    """A server that gives one answer to everything; ``promised``: its Content-Length."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(status)
            self.send_header("Content-Length", str(promised or len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def ask(base_url: str) -> Reply:
    async def send() -> Reply:
        async with make_client(base_url, timeout_s=30) as client:
            return await complete(client, make_call("sk-any", [5, 6, 7], 1))

    return asyncio.run(send())


def test_a_stream_is_timed_and_its_cached_tokens_are_read() -> None:
    with answering(200, FIRST + FIRST + USAGE + DONE) as base_url:
        reply = ask(base_url)
    assert reply.error is None
    assert reply.cached_tokens == 64
    assert reply.first_token_s is not None
    assert reply.last_token_s is not None
    assert reply.sent_s < reply.first_token_s <= reply.last_token_s
    assert reply.ttft_ms == pytest.approx((reply.first_token_s - reply.sent_s) * 1000)


@pytest.mark.parametrize(
    ("status", "body", "promised", "message"),
    [
        (500, b"out of luck", None, "HTTP 500: out of luck"),
        (200, FIRST + DONE, None, "without a token or without its usage"),
        (200, USAGE + DONE, None, "without a token or without its usage"),
        (200, FIRST + b'data: {"error": {"message": "died"}}\n\n', None, "died"),
        (200, FIRST, 10_000, "RemoteProtocolError"),
        (200, b"data: {not json\n\n", None, "JSONDecodeError"),
    ],
)
def test_a_failure_is_a_reply_with_an_error_and_no_time(
    status: int, body: bytes, promised: int | None, message: str
) -> None:
    with answering(status, body, promised) as base_url:
        reply = ask(base_url)
    assert message in (reply.error or "")
    assert reply.ttft_ms is None


def test_nobody_listening_is_a_failure_too() -> None:
    with answering(200, b"") as base_url:
        pass
    assert "ConnectError" in (ask(base_url).error or "")


def test_counters_are_read_from_what_prometheus_is_given() -> None:
    labels = 'engine="0",model_name="tiny"'
    text = "\n".join(
        [
            "# TYPE prefixshield_materialised_blocks_total counter",
            f'prefixshield_materialised_blocks_total{{{labels},group="a"}} 12.0',
            f'prefixshield_materialised_blocks_total{{{labels},group="b.c-d"}} 1e+06',
            f'prefixshield_materialised_blocks_created{{{labels},group="a"}} 1.7e+09',
            f'prefixshield_promoted_blocks_total{{{labels},group="a"}} 3.0',
            f'prefixshield_evicted_blocks_total{{causer="b.c-d",{labels},owner="a"}} 7.0',
            f"prefixshield_policy_failures_total{{{labels}}} 1.0",
            f"vllm:num_preemptions_total{{{labels}}} 2.0",
            f"vllm:prompt_tokens_total{{{labels}}} 99.0",
        ]
    )
    assert parse_counts(text) == Counts(
        materialised=Counter({"a": 12, "b.c-d": 1_000_000}),
        promoted=Counter({"a": 3}),
        evictions=Counter({("a", "b.c-d"): 7}),
        preemptions=2,
        policy_failures=1,
    )


def request(line: int, group: str, hash_ids: tuple[int, ...], tail: int) -> TraceRequest:
    return TraceRequest(
        line=line,
        timestamp_ms=400.0 * line,
        input_length=len(hash_ids) * BLOCK + tail,
        output_length=4,
        hash_ids=hash_ids,
        group=group,
        contract=None,
        prefix_id=None,
    )


def config_of(workload):
    return workload_config(workload, "shield").model_copy(update={"contracts": CONTRACTS})


def small_workload() -> Workload:
    """Two hot prefixes of the victim's, and an attacker that never asks the same twice."""
    unseen = itertools.count(1000)
    hot = [tuple(range(100, 110)), tuple(range(200, 210))]
    requests = [request(i, "victim", hot[i % 2], tail=8) for i in range(1, 5)]
    for line in range(5, 13):
        if line % 2:
            fresh = tuple(itertools.islice(unseen, 20))
            requests.append(request(line, "attacker", fresh, tail=8))
        else:
            requests.append(request(line, "victim", hot[line // 2 % 2], tail=8))
    return Workload("small", BLOCK, {"victim": "rich", "attacker": "poor"}, tuple(requests))


CONTRACTS = {
    "rich": ContractSection(refill_rate=1000, burst=1000),
    "poor": ContractSection(refill_rate=0.001, burst=0),
    "spare": ContractSection(refill_rate=1000, burst=1000),
}


def with_request(workload: Workload, **changes: object) -> Workload:
    first, *others = workload.requests
    return replace(workload, requests=(replace(first, **changes), *others))


@pytest.mark.parametrize(
    ("workload", "blocks", "message"),
    [
        (replace(small_workload(), requests=()), 64, "found no requests"),
        (replace(small_workload(), block_size=16), 64, "expected a multiple of 32"),
        (with_request(small_workload(), group="nobody"), 64, "request 1: group: found 'nobody'"),
        (
            with_request(small_workload(), contract="none"),
            64,
            "request 1: contract: found 'none', expected one of: rich, poor, spare",
        ),
        (
            with_request(small_workload(), output_length=CONTEXT_LENGTH),
            1000,
            f"found {328 + CONTEXT_LENGTH} tokens of prompt and answer, expected at most "
            f"{CONTEXT_LENGTH}",
        ),
        (
            small_workload(),
            20,
            "request 5: found 652 tokens of prompt and answer, expected at most 640",
        ),
    ],
)
def test_a_workload_that_cannot_be_served_is_one_message(
    workload: Workload, blocks: int, message: str, tmp_path: Path
) -> None:
    config = config_of(small_workload())
    with pytest.raises(PrefixShieldError) as caught:
        run_real_time(workload, config, blocks, log_folder=tmp_path)
    assert message in str(caught.value)
    assert not list(tmp_path.iterdir()), "no server was started"


@pytest.mark.engine
def test_requests_far_apart_hit_what_serial_replay_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("vllm")
    blocks = 48
    workload = with_request(small_workload(), contract="spare", prefix_id="hot", output_length=0)
    config = config_of(workload)
    refused = request(13, "attacker", (900,), tail=8)
    make = real_time._call

    def make_but_refused(key: str, one: TraceRequest, block_size: int) -> Call:
        return make("sk-unknown" if one is refused else key, one, block_size)

    monkeypatch.setattr(real_time, "_call", make_but_refused)
    sent = replace(workload, requests=(*workload.requests, refused))
    run = run_real_time(sent, config, blocks, log_folder=tmp_path)

    failed = run.outcomes.pop()
    assert failed.request is refused
    assert "HTTP 401" in (failed.error or "")
    assert failed.ttft_ms is None
    expected, replayed = replayed_hits(workload, blocks)
    assert [outcome.error for outcome in run.outcomes] == [None] * len(workload.requests)
    assert [outcome.request for outcome in run.outcomes] == list(workload.requests)
    assert [outcome.cached_tokens // BLOCK for outcome in run.outcomes] == expected
    assert sum(expected) > 0, "something hits"
    assert all(outcome.ttft_ms is not None for outcome in run.outcomes)

    created = {"victim": 20, "attacker": 4 * 20}
    assert run.materialised == created
    assert run.promoted == {"victim": 10}, "not what another contract and a named prefix made"
    assert {owner for owner, _ in run.evictions} == {"attacker"}
    assert 0 <= run.evictions.total() - replayed.total() <= len(workload.requests), (
        "a partly filled block, which replay does not know, may cost one eviction a request"
    )
    assert set(run.peak_blocks) == set(created)
    for group, peak in run.peak_blocks.items():
        assert 20 <= peak <= min(blocks, created[group])
    assert run.preemptions == 0
    assert run.duration_s is not None
    assert run.duration_s >= 11 * 0.4
    assert run.max_send_lag_ms is not None
    assert (tmp_path / "small-shield-paper.log").is_file()


def replayed_hits(workload: Workload, blocks: int) -> tuple[list[int], Counter[tuple[str, str]]]:
    """Blocks hit by each request in serial replay, and the evictions."""
    config = config_of(workload)
    policy = replay_policy(config, blocks, workload.requests, BLOCK)
    replay = Replay(config, policy, BLOCK)
    totals = [replay.run([one]).total.blocks_hit for one in workload.requests]
    hits = [after - before for before, after in itertools.pairwise([0, *totals])]
    return hits, replay.result.evictions
