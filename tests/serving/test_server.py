"""The whole server over HTTP: metrics, the line in the log, and a policy with a bug."""

import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import httpx
import pytest

pytest.importorskip("vllm")

from prefixshield.serving.catalogue import COMMON_LABELS, COUNTERS, GAUGES, UNKNOWN_GROUPS
from prefixshield.serving.page import page
from prefixshield.serving.routes import PAGE_PATH
from prefixshield.serving.wiring import OPERATOR_KEY_VARIABLE

pytestmark = pytest.mark.engine

CONFIG = """
contracts:
  big: {refill_rate: 1000, burst: 1000}
  small: {refill_rate: 0.5, burst: 8}
groups:
  victim: {contract: big, keys: [sk-victim]}
  attacker: {contract: small, keys: [sk-attacker]}
default_group: attacker
operator_key: sk-operator
"""

OPERATOR = {"Authorization": "Bearer sk-operator"}


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("config") / "tenants.yaml"
    path.write_text(CONFIG)
    return path


def complete(server, key, tokens):
    """Cached tokens of one completion."""
    answer = httpx.post(
        f"{server.base_url}/v1/completions",
        headers={"Authorization": f"Bearer {key}"},
        json={"model": "tiny", "prompt": tokens, "max_tokens": 1},
        timeout=60,
    )
    assert answer.status_code == 200, answer.text
    details = answer.json()["usage"]["prompt_tokens_details"]
    return details["cached_tokens"] if details else 0


def metrics(server):
    """Our metrics by name and labels (without model and engine)."""
    found = {}
    for line in httpx.get(f"{server.base_url}/metrics", headers=OPERATOR).text.splitlines():
        match = re.fullmatch(r"(prefixshield_\w+)\{(.*)\} (\S+)", line)
        if match and match[1] not in (UNKNOWN_GROUPS.name, f"{UNKNOWN_GROUPS.name[:-6]}_created"):
            labels = dict(re.findall(r'(\w+)="([^"]*)"', match[2]))
            assert labels.pop("engine") == "0"
            assert labels.pop("model_name")
            found[match[1], *labels.items()] = float(match[3])
    return found


def flood(server, numbers=range(8)):
    """Unseen prompts of 50 blocks, enough to turn over a pool of 64; every one is answered."""
    for number in numbers:
        start = 5 + 200 * number
        assert complete(server, "sk-attacker", [start + i % 199 for i in range(1600)]) == 0


def test_metrics_count_blocks_and_tokens_by_group(start_server, tiny_model, config):
    options = ["--num-gpu-blocks-override", "65"]
    server = start_server(tiny_model, config, options, by_command=True)
    assert re.search(r"PrefixShield \S+ is active: policy shield", server.log_path.read_text())
    hot = list(range(5, 5 + 320 + 1))
    # The first blocks of an empty pool are unproven, those behind them proven: the first are
    # evicted first, and leave orphans.
    flood(server, range(1))
    assert complete(server, "sk-victim", hot) == 0
    assert complete(server, "sk-victim", hot) == 320
    flood(server, range(1, 8))
    time.sleep(0.2)  # else the gauges would be those of a moment ago
    assert complete(server, "sk-victim", hot) == 320, "the flood did not reach it"

    found = metrics(server)
    group = {name: ("group", name) for name in ("victim", "attacker")}
    assert found["prefixshield_materialised_blocks_total", group["victim"]] == 10
    assert found["prefixshield_promoted_blocks_total", group["victim"]] == 10
    assert found["prefixshield_query_tokens_total", group["victim"]] == 3 * 321
    assert found["prefixshield_hit_tokens_total", group["victim"]] == 2 * 320
    assert found["prefixshield_materialised_blocks_total", group["attacker"]] == 8 * 50
    evicted = [key[1:] for key in found if key[0] == "prefixshield_evicted_blocks_total"]
    assert {dict(labels)["owner"] for labels in evicted} == {"attacker"}
    all_evicted = sum(found["prefixshield_evicted_blocks_total", *labels] for labels in evicted)
    assert 0 < found["prefixshield_evicted_orphans_total",] < all_evicted
    assert found["prefixshield_policy_failures_total",] == 0
    assert found["prefixshield_refused_requests_total", group["victim"]] == 0
    # Gauges.
    resident = Counter()
    for (name, *labels), blocks in found.items():
        if name == "prefixshield_resident_blocks":
            resident[dict(labels)["group"]] += blocks
    assert resident == {"victim": 10, "attacker": 8 * 50 - all_evicted}
    assert found["prefixshield_capacity_blocks",] == 64
    assert found["prefixshield_native_order",] == 0
    (info,) = [dict(key[1:]) for key in found if key[0] == "prefixshield_info"]
    assert (info["policy"], info["preset"]) == ("shield", "default")

    exports_what_is_declared(server)
    shows_the_operator_and_nobody_else(server)


def exports_what_is_declared(server):
    text = httpx.get(f"{server.base_url}/metrics", headers=OPERATOR).text
    types = dict(re.findall(r"^# TYPE (prefixshield_\w+) (\w+)$", text, re.MULTILINE))
    types = {name: kind for name, kind in types.items() if not name.endswith("_created")}
    declared = {metric.name: "counter" for metric in COUNTERS.values()}
    declared |= {metric.name: "gauge" for metric in GAUGES.values()}
    declared[UNKNOWN_GROUPS.name] = "counter"
    assert types == declared
    for metric in (*COUNTERS.values(), *GAUGES.values()):
        for labels in re.findall(rf"^{metric.name}\{{(.*)\}}", text, re.MULTILINE):
            names = re.findall(r'(\w+)="', labels)
            assert sorted(names) == sorted((*COMMON_LABELS, *metric.labels))
        assert f"# HELP {metric.name} {metric.definition}" in text
    # Over all groups, tokens are vLLM's own.
    for ours, theirs in (("query_tokens", "queries"), ("hit_tokens", "hits")):
        lines = re.findall(rf"^vllm:prefix_cache_{theirs}_total\{{.*\}} (\S+)$", text, re.MULTILINE)
        own = re.findall(rf"^prefixshield_{ours}_total\{{.*\}} (\S+)$", text, re.MULTILINE)
        assert sum(map(float, own)) == sum(map(float, lines)) > 0


def shows_the_operator_and_nobody_else(server):
    for path in ("/metrics", PAGE_PATH):
        for headers in ({}, {"Authorization": "Bearer sk-victim"}):
            assert httpx.get(server.base_url + path, headers=headers).status_code == 401
    answer = httpx.get(server.base_url + PAGE_PATH, auth=("operator", "sk-operator"))
    assert answer.status_code == 200
    assert answer.content == page()
    script = Path(sys.executable).with_name("prefixshield")
    command = [str(script), "top", server.base_url, "--once"]
    run = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, OPERATOR_KEY_VARIABLE: ""}
    )
    assert run.returncode == 1
    assert "must hold the operator's key" in run.stderr
    environment = {**os.environ, OPERATOR_KEY_VARIABLE: "sk-operator"}
    run = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    (victim,) = [line.split() for line in run.stdout.splitlines() if line.startswith("│ victim")]
    assert victim[1:4] == ["victim", "│", "10"]
    assert "66.5 %" in run.stdout, "640 of 963 tokens"


def test_a_policy_that_raises_does_not_stop_the_server(start_server, tiny_model, config):
    faulty = str(Path(__file__).with_name("faulty_policy"))
    options = ["--num-gpu-blocks-override", "65"]
    server = start_server(tiny_model, config, options, env={"PYTHONPATH": faulty})
    flood(server)
    hot = list(range(5, 5 + 321))
    complete(server, "sk-victim", hot)
    time.sleep(0.2)  # else the gauges would be those of a moment ago
    assert complete(server, "sk-victim", hot) == 320, "native order still caches"
    assert server.process.poll() is None
    found = metrics(server)
    assert found["prefixshield_policy_failures_total",] == 1
    assert found["prefixshield_native_order",] == 1
    assert found["prefixshield_fallbacks_total",] >= 7
    log = server.log_path.read_text()
    assert log.count("eviction is in native order until the prefix cache is reset") == 1
    assert "ZeroDivisionError: injected by a test" in log


def test_prefixshield_serve_starts_what_the_plain_options_start(config, tmp_path, monkeypatch):
    """Only the command line: the server itself is the same as in the other tests."""
    code = (
        "import os; os.execv = lambda path, command: print(*command, sep='\\n'); "
        "from prefixshield.cli import main; main()"
    )
    more = ["--additional-config", '{"mine": 1}', "--max-model-len", "2048", "-tp", "1"]
    run = subprocess.run(
        [sys.executable, "-c", code, "serve", "some/model", "--config", str(config), *more],
        capture_output=True,
        text=True,
        check=True,
    )
    command = run.stdout.splitlines()
    assert command[command.index("serve") :][:2] == ["serve", "some/model"]
    assert "--scheduler-cls=prefixshield.serving.scheduler.build_scheduler" in command
    assert "--middleware=prefixshield.serving.identity.IdentityMiddleware" in command
    additional = next(word for word in command if word.startswith("--additional-config="))
    assert json.loads(additional.partition("=")[2]) == {"mine": 1, "prefixshield": str(config)}
    assert command[-4:] == ["--max-model-len", "2048", "-tp", "1"]
