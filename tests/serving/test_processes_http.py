"""A server of two front ends and two engines: every process follows one file, and ends in order."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import count

import httpx
import pytest
from test_operations_http import PATIENCE_S, replace, said, wait_until
from vllm_server import BLOCK_SIZE

from prefixshield.config import load_config
from prefixshield.evaluation.entitlements import from_events
from prefixshield.evaluation.kv_events import listen
from prefixshield.serving.namespace import Namespaces
from prefixshield.serving.page import page
from prefixshield.serving.recording import recording_path
from prefixshield.serving.routes import PAGE_PATH
from prefixshield.traces import read_trace

pytest.importorskip("msgspec")
pytest.importorskip("zmq")
psutil = pytest.importorskip("psutil")

pytestmark = pytest.mark.engine

CONFIG = """
contracts:
  big: {refill_rate: 1000, burst: 1000}
  small: {refill_rate: 0.5, burst: 8}
groups:
  shop: {contract: big, keys: [sk-shop]}
  bulk: {contract: small, keys: [sk-bulk]}
default_group: bulk
operator_key: sk-operator
"""
CHANGED = CONFIG.replace(
    "bulk: {contract: small, keys: [sk-bulk]}",
    "bulk: {contract: small}\n  new: {contract: big, keys: [sk-new]}",
).replace("burst: 8", "burst: 9")

ENGINES = ("0", "1")
PROCESSES = 2 + len(ENGINES)

_prompts = count()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    found = tmp_path_factory.mktemp("config") / "tenants.yaml"
    found.write_text(CONFIG)
    return found


@pytest.fixture(scope="module")
def endpoints():
    """Of each engine's KV events: vLLM counts up from the first one's port."""
    for _ in range(50):
        with ExitStack() as stack:
            first = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            ports = [first.getsockname()[1] + number for number in range(len(ENGINES))]
            try:
                for port in ports[1:]:
                    stack.enter_context(socket.create_server(("127.0.0.1", port)))
            except OSError:
                continue
        return [f"tcp://127.0.0.1:{port}" for port in ports]
    raise AssertionError("no ports that follow each other are free")


@pytest.fixture(scope="module")
def server(start_server, tiny_model, path, endpoints):
    publishing = {"enable_kv_cache_events": True, "publisher": "zmq"}
    publishing["endpoint"] = endpoints[0].replace("127.0.0.1", "*")
    options = ["--num-gpu-blocks-override", "65", "--kv-events-config", json.dumps(publishing)]
    options += ["--api-server-count", "2", "--data-parallel-size", "2", "--shutdown-timeout", "60"]
    return start_server(tiny_model, path, options, by_command=True)


@pytest.fixture(scope="module")
def front_ends(server):
    """A connection to each front end, by its process id."""
    parent = psutil.Process(server.process.pid)
    found = {}
    with ExitStack() as stack:
        for _ in range(200):
            headers = {"Authorization": "Bearer sk-shop"}
            client = stack.enter_context(httpx.Client(base_url=server.base_url, timeout=PATIENCE_S))
            answer = client.get("/v1/models", headers=headers)
            _, port = answer.extensions["network_stream"].get_extra_info("client_addr")
            for process in parent.children():
                if any(c.raddr and c.raddr.port == port for c in process.net_connections()):
                    found[process.pid] = client
            if len(found) == 2:
                break
        assert len(found) == 2, "one front end answers everything"
        yield found


def ask(client, key, **options):
    """An unseen prompt of one block, and one token of an answer."""
    start = 5 + BLOCK_SIZE * (next(_prompts) % 50)
    return client.post(
        "/v1/completions",
        headers={"Authorization": f"Bearer {key}"},
        json={
            "model": "tiny",
            "prompt": list(range(start, start + BLOCK_SIZE)),
            "max_tokens": 1,
            **options,
        },
    )


def statuses(front_ends, key):
    return [ask(client, key).status_code for client in front_ends.values()]


def metrics(client):
    """Samples by (name, engine), summed over all other labels, and by (name, engine, label value)."""
    found = Counter()
    text = client.get("/metrics", headers={"Authorization": "Bearer sk-operator"}).text
    for line in text.splitlines():
        if match := re.fullmatch(r"([\w:]+)\{(.*)\} (\S+)", line):
            labels = dict(re.findall(r'(\w+)="([^"]*)"', match[2]))
            engine = labels.pop("engine", None)
            labels.pop("model_name", None)
            for value in (None, *labels.values()):
                found[match[1], engine, value] += float(match[3])
    return found


def everywhere(front_ends, name, value=None):
    """A metric of each engine, as all front ends give it once they agree."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        told = [metrics(client) for client in front_ends.values()]
        found = [[of[name, engine, value] for engine in ENGINES] for of in told]
        if found[0] == found[1]:
            return found[0]
    raise AssertionError(f"{name}: {found}")


def test_every_process_follows_the_file(server, front_ends, path):
    assert said(server, "PrefixShield .* is active") == len(ENGINES)
    assert statuses(front_ends, "sk-bulk") == [200, 200]
    assert statuses(front_ends, "sk-new") == [401, 401]
    replace(path, CHANGED)
    server.process.send_signal(signal.SIGHUP)  # the one that watches over them takes no harm
    changes = "contracts changed: small; groups added: new; API keys: 1 added, 1 removed"
    wait_until(lambda: said(server, f"was read again: {changes}") == PROCESSES)
    assert statuses(front_ends, "sk-bulk") == [401, 401]
    for _ in range(20):
        assert statuses(front_ends, "sk-new") == [200, 200]
    wait_until(
        lambda: sum(everywhere(front_ends, "prefixshield_query_tokens_total", "new")) == 40 * 32
    )
    assert min(everywhere(front_ends, "prefixshield_materialised_blocks_total", "new")) > 0
    assert everywhere(front_ends, "prefixshield_reloads_total", "accepted") == [1, 1]

    replace(path, CONFIG.replace("refill_rate: 0.5", "refill_rate: -1"))
    wait_until(lambda: said(server, "stays in force: .*refill_rate: found -1") == PROCESSES)
    assert statuses(front_ends, "sk-new") == [200, 200]

    replace(path, CONFIG)
    for front_end in front_ends:
        os.kill(front_end, signal.SIGHUP)
    wait_until(lambda: said(server, "was read again: contracts changed: small") == 2 * PROCESSES)
    assert statuses(front_ends, "sk-new") == [401, 401]
    while min(everywhere(front_ends, "prefixshield_reloads_total", "accepted")) < 2:
        assert statuses(front_ends, "sk-bulk") == [200, 200]
    assert everywhere(front_ends, "prefixshield_reloads_total", "refused") == [1, 1]
    assert said(server, "sk-") == 0


def test_every_front_end_shows_all_engines(front_ends):
    for client in front_ends.values():
        assert client.get(PAGE_PATH).status_code == 401
        answer = client.get(PAGE_PATH, auth=("operator", "sk-operator"))
        assert (answer.status_code, answer.content) == (200, page())
    assert everywhere(front_ends, "prefixshield_info") == [1, 1]
    assert everywhere(front_ends, "prefixshield_capacity_blocks") == [64, 64]
    for ours, theirs in (("query_tokens", "queries"), ("hit_tokens", "hits")):
        own = everywhere(front_ends, f"prefixshield_{ours}_total")
        assert own == everywhere(front_ends, f"vllm:prefix_cache_{theirs}_total")


def test_each_engine_records_a_file_of_its_own(server, front_ends, path):
    recording = path.with_name("requests.jsonl")
    replace(path, f"{CONFIG}record: {{path: {recording}}}\n")
    wait_until(lambda: said(server, "was read again: record changed") == PROCESSES)
    for _ in range(10):
        assert statuses(front_ends, "sk-shop") == [200, 200]
    replace(path, CONFIG)
    wait_until(lambda: said(server, "was read again: record changed") == 2 * PROCESSES)
    assert statuses(front_ends, "sk-shop") == [200, 200]
    files = [recording_path(recording, int(engine)) for engine in ENGINES]
    recorded = [len(read_trace(file, BLOCK_SIZE)) for file in files]
    assert sum(recorded) == 20
    assert min(recorded) > 0
    assert everywhere(front_ends, "prefixshield_recorded_requests_total", "written") == recorded


def test_calibrate_listens_to_all_engines(front_ends, path, endpoints):
    """A prompt of one block and a token make one block, of which each engine tells once."""
    config = load_config(path)
    before = everywhere(front_ends, "prefixshield_materialised_blocks_total")
    with ThreadPoolExecutor() as pool:
        listening = pool.submit(listen, endpoints, 5.0, Namespaces.of(config, path))
        while not listening.done():
            assert statuses(front_ends, "sk-shop") == [200, 200]
    heard = listening.result()
    created = [sum(one.blocks for one in engine) for engine in heard.engines]
    assert min(created) > 0

    def counted():  # more: until it was connected, and after it had heard enough
        after = everywhere(front_ends, "prefixshield_materialised_blocks_total")
        return all(map(lambda one, old, new: one <= new - old, created, before, after))

    wait_until(counted)
    assert {(one.group, one.contract) for engine in heard.engines for one in engine} == {
        ("shop", "big")
    }
    assert heard.strangers == heard.missing_batches == 0
    assert heard.lifetimes_s["shop"] is not None
    found = from_events(heard, config, 64, None, 10.0)
    assert found.effects[None]["measured"].created_per_s == sum(created) / 2 / 5


def test_a_server_that_may_finish_records_everything_and_leaves_no_process(
    server, front_ends, path
):
    """Without --shutdown-timeout: test_operations_http.py."""
    recording = path.with_name("last.jsonl")
    replace(path, f"{CONFIG}record: {{path: {recording}}}\n")
    wait_until(lambda: said(server, "was read again: record changed") == 3 * PROCESSES)
    for _ in range(5):
        assert statuses(front_ends, "sk-shop") == [200, 200]
    processes = psutil.Process(server.process.pid).children(recursive=True)
    asked = {"model": "tiny", "prompt": "w1", "max_tokens": 200, "ignore_eos": True, "stream": True}
    headers = {"Authorization": "Bearer sk-shop"}
    url = f"{server.base_url}/v1/completions"
    with ExitStack() as stack:
        for _ in range(4):
            stream = httpx.stream("POST", url, headers=headers, json=asked, timeout=PATIENCE_S)
            answer = stack.enter_context(stream)
            assert next(answer.iter_lines()).startswith("data:")
        server.process.terminate()
        server.process.wait(PATIENCE_S)
    assert psutil.wait_procs(processes, timeout=PATIENCE_S)[1] == []
    requests = [
        (request.input_length, request.output_length)
        for engine in ENGINES
        for request in read_trace(recording_path(recording, int(engine)), BLOCK_SIZE)
    ]
    long = [output for prompt, output in requests if prompt == 1]
    assert [pair for pair in requests if pair[0] != 1] == [(BLOCK_SIZE, 1)] * 10
    assert len(long) == 4
    assert all(0 < output <= 200 for output in long), "finished, or ended with its front end"
