"""One running server through an operator's day: shadow mode, reloads, a gateway, the OpenAI SDK."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from vllm_server import BLOCK_SIZE

from prefixshield.serving.child_server import free_port
from prefixshield.traces import read_trace

pytest.importorskip("vllm")
openai = pytest.importorskip("openai")

pytestmark = pytest.mark.engine

PATIENCE_S = 180

CONFIG = """
mode: shadow
contracts:
  big: {refill_rate: 1000, burst: 1000}
  small: {refill_rate: 0.5, burst: 8}
groups:
  shop: {contract: big, keys: [sk-shop]}
  bulk: {contract: small, keys: [sk-bulk]}
default_group: bulk
trusted_header: {name: X-Tenant, secret: sk-gateway}
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    found = tmp_path_factory.mktemp("config") / "tenants.yaml"
    found.write_text(CONFIG)
    return found


@pytest.fixture(scope="module")
def events():
    """Where the server publishes its KV events."""
    return f"tcp://127.0.0.1:{free_port()}"


@pytest.fixture(scope="module")
def server(start_server, tiny_model, path, events):
    publishing = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": events.replace("127.0.0.1", "*"),
    }
    options = ["--num-gpu-blocks-override", "65", "--kv-events-config", json.dumps(publishing)]
    return start_server(tiny_model, path, options, by_command=True)


def status(server, key, **headers):
    answer = httpx.post(
        f"{server.base_url}/v1/completions",
        headers={"Authorization": f"Bearer {key}", **headers},
        json={"model": "tiny", "prompt": list(range(5, 5 + BLOCK_SIZE)), "max_tokens": 1},
        timeout=PATIENCE_S,
    )
    return answer.status_code


def said(server, text):
    """In how many lines of the log it stands; either process has its own."""
    return len(re.findall(text, server.log_path.read_text()))


def wait_until(true):
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def replace(path, text):
    """As an editor or a deployment does: another file under the same name."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.rename(path)


def metric(server, name, **labels):
    """Summed over the series that have these labels."""
    lines = httpx.get(f"{server.base_url}/metrics").text.splitlines()
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    of_name = [line for line in lines if re.match(rf"{name}[{{ ]", line)]
    found = [line for line in of_name if all(pair in line for pair in wanted)]
    return sum(float(line.rpartition(" ")[2]) for line in found)


def test_reloads_reach_both_processes(server, path):
    assert said(server, "is active: policy shield, preset default, mode shadow") == 1
    assert (status(server, "sk-shop"), status(server, "sk-new")) == (200, 401)
    replace(
        path,
        CONFIG.replace(
            "bulk: {contract: small, keys: [sk-bulk]}",
            "bulk: {contract: small}\n  new: {contract: big, keys: [sk-new]}",
        ).replace("mode: shadow", "mode: on"),
    )
    server.process.send_signal(signal.SIGHUP)
    wait_until(lambda: status(server, "sk-new") == 200)
    assert (status(server, "sk-shop"), status(server, "sk-bulk")) == (200, 401)
    wait_until(
        lambda: (
            said(
                server,
                "was read again: groups added: new; API keys: 1 added, 1 removed; mode changed",
            )
            == 2
        )
    )
    assert metric(server, "prefixshield_materialised_blocks_total", group="new") >= 1

    replace(path, CONFIG.replace("refill_rate: 0.5", "refill_rate: -1"))
    wait_until(
        lambda: said(server, "stays in force: .*refill_rate: found -1, expected a number") == 2
    )
    os.utime(path)
    assert (status(server, "sk-new"), status(server, "sk-bulk")) == (200, 401)

    replace(path, CONFIG)
    wait_until(lambda: said(server, "was read again: groups removed: new;") == 2)
    assert (status(server, "sk-new"), status(server, "sk-bulk")) == (401, 200)
    assert said(server, "refill_rate: found -1") == 2, "once in each process"
    assert metric(server, "prefixshield_reloads_total", outcome="accepted") == 2
    assert metric(server, "prefixshield_reloads_total", outcome="refused") == 1
    assert said(server, "sk-") == 0


def test_requests_are_recorded_until_the_server_is_told_to_stop(server, path):
    """The recording itself: test_recording.py."""
    recording = path.with_name("requests.jsonl")
    replace(path, f"{CONFIG}record: {{path: {recording}}}\n")
    wait_until(lambda: said(server, "was read again: record changed") == 2)
    assert [status(server, key) for key in ("sk-shop", "sk-bulk", "sk-shop")] == [200] * 3
    replace(path, CONFIG)
    wait_until(lambda: said(server, "was read again: record changed") == 4)
    assert status(server, "sk-shop") == 200
    requests = read_trace(recording, BLOCK_SIZE)
    assert [(r.group, r.contract, r.input_length, r.output_length) for r in requests] == [
        ("shop", "big", BLOCK_SIZE, 1),
        ("bulk", "small", BLOCK_SIZE, 1),
        ("shop", "big", BLOCK_SIZE, 1),
    ]
    first, other, again = (request.hash_ids for request in requests)
    assert first == again != other, "groups are told apart, as their namespaces are"
    assert metric(server, "prefixshield_recorded_requests_total", outcome="written") == 3


def test_contracts_are_proposed_from_the_servers_events(server, path, events):
    """The events themselves: tests/evaluation/test_kv_events.py."""
    before = metric(server, "prefixshield_materialised_blocks_total", group="shop")
    script = Path(sys.executable).with_name("prefixshield")
    command = [script, "calibrate", events, "--blocks", "64", "--config", path, "--interval", "2"]
    with subprocess.Popen([*command, "--json"], stdout=subprocess.PIPE, text=True) as listening:
        while listening.poll() is None:  # each time a block more: the last token is computed again
            assert status(server, "sk-shop") == 200
        found = json.load(listening.stdout)
    assert listening.returncode == 0
    shop = found["groups"]["shop"]
    assert shop["contract"] == "big"
    created = 2 * shop["measured"]["created_per_s"]
    wait_until(
        lambda: (
            metric(server, "prefixshield_materialised_blocks_total", group="shop")
            >= before + created
        )
    )
    assert created > 0
    assert found["warnings"] == []


def test_a_gateway_names_the_group(server):
    before = metric(server, "prefixshield_query_tokens_total", group="shop")
    assert status(server, "sk-gateway", **{"X-Tenant": "shop"}) == 200
    wait_until(
        lambda: (
            metric(server, "prefixshield_query_tokens_total", group="shop") == before + BLOCK_SIZE
        )
    )
    assert status(server, "sk-gateway", **{"X-Tenant": "nobody"}) == 403
    assert status(server, "sk-gateway") == 403
    assert metric(server, "prefixshield_unknown_groups_total", outcome="refused") == 2
    bulk = metric(server, "prefixshield_query_tokens_total", group="bulk")
    assert status(server, "sk-bulk", **{"X-Tenant": "shop"}) == 200
    wait_until(
        lambda: metric(server, "prefixshield_query_tokens_total", group="bulk") == bulk + BLOCK_SIZE
    )


def test_the_openai_sdk(server):
    def sdk(key, **options):
        return openai.OpenAI(
            base_url=f"{server.base_url}/v1", api_key=key, max_retries=0, **options
        )

    client = sdk("sk-shop")
    assert [model.id for model in client.models.list()] == ["tiny"]
    asked = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "w1 w2 w3"}],
        "max_tokens": 4,
    }
    answer = client.chat.completions.create(**asked, extra_body={"cache_salt": "a user's own"})
    assert answer.usage.completion_tokens == 4
    streamed = client.chat.completions.create(**asked, stream=True)
    assert sum(bool(chunk.choices) for chunk in streamed) >= 1
    assert client.completions.create(model="tiny", prompt="w1", max_tokens=1).choices
    with pytest.raises(openai.AuthenticationError):
        sdk("sk-nobody").models.list()
    with pytest.raises(openai.PermissionDeniedError, match="not on PrefixShield's list"):
        client.files.list()
    by_gateway = sdk("sk-gateway", default_headers={"X-Tenant": "shop"})
    assert by_gateway.chat.completions.create(**asked).usage.completion_tokens == 4


def test_ctrl_c_leaves_a_recording_of_whatever_had_ended(server, path):
    """The terminal interrupts all processes at once, and vLLM kills its engine without waiting."""
    recording = path.with_name("last.jsonl")
    before = said(server, "was read again: record changed")
    replace(path, f"{CONFIG}record: {{path: {recording}}}\n")
    wait_until(lambda: said(server, "was read again: record changed") == before + 2)
    assert [status(server, key) for key in ("sk-shop", "sk-bulk")] == [200, 200]
    asked = {"model": "tiny", "prompt": "w1", "max_tokens": 1900, "ignore_eos": True}
    headers = {"Authorization": "Bearer sk-shop"}
    url = f"{server.base_url}/v1/completions"
    with httpx.stream("POST", url, headers=headers, json={**asked, "stream": True}) as answer:
        assert next(answer.iter_lines()).startswith("data:")
        os.killpg(server.process.pid, signal.SIGINT)
        server.process.wait(PATIENCE_S)
    assert recording.read_bytes().endswith(b"}\n")
    requests = read_trace(recording, BLOCK_SIZE)
    assert [(r.group, r.input_length, r.output_length) for r in requests[:2]] == [
        ("shop", BLOCK_SIZE, 1),
        ("bulk", BLOCK_SIZE, 1),
    ]
