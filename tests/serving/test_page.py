"""The live page in a real browser, behind the real middleware, over made-up metrics."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from html import unescape

import pytest

pytest.importorskip("httpx")
pytest.importorskip("uvicorn")
pytest.importorskip("websockets")

import httpx
import uvicorn
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client import Counter as PrometheusCounter
from prometheus_client import Gauge as PrometheusGauge

from demo.browser import Browser
from prefixshield.errors import PrefixShieldError
from prefixshield.serving.catalogue import COMMON_LABELS, COUNTERS, GAUGES
from prefixshield.serving.identity import IdentityMiddleware
from prefixshield.serving.reload import LiveConfig
from prefixshield.serving.routes import PAGE_PATH
from prefixshield.serving.wiring import OPERATOR_KEY_VARIABLE
from prefixshield.top import fetch

CONFIG = """
contracts: {std: {refill_rate: 1, burst: 2}}
groups: {victim: {contract: std}, attacker: {contract: std}}
default_group: victim
operator_key: op-key
namespace_secret: s
"""

#: No name of ours, but a model's may hold anything.
MODEL = '<img src=x onerror="document.title=1">"\\'


class Metrics:
    """Engines' metrics, which move with every reading; an ASGI application."""

    def __init__(self, *engines):
        self.engines = engines
        self.registry = CollectorRegistry()
        self.readings = 0
        self.of = {}
        for key, metric in {**COUNTERS, **GAUGES}.items():
            kind = PrometheusCounter if key in COUNTERS else PrometheusGauge
            labels = (*COMMON_LABELS, *metric.labels)
            self.of[key] = kind(metric.name, metric.definition, labels, registry=self.registry)
        for engine in self.engines:
            what = ("9.9", "shield", "default", "0.32.0")
            self.of["info"].labels(MODEL, engine, *what).set(1)
            self.of["capacity"].labels(MODEL, engine).set(100)
            self.of["native_order"].labels(MODEL, engine).set(0)
            self.of["evicted"].labels(MODEL, engine, "victim", "attacker")

    async def __call__(self, scope, receive, send):
        self.readings += 1
        for engine in self.engines:
            for group, hits, debt in (("victim", 750, 0), ("attacker", 0, 10 * self.readings)):
                self.of["query_tokens"].labels(MODEL, engine, group).inc(1000)
                self.of["hit_tokens"].labels(MODEL, engine, group).inc(hits)
                self.of["debt"].labels(MODEL, engine, group).set(debt)
                self.of["normalised_debt"].labels(MODEL, engine, group).set(debt / 2)
                self.of["materialised"].labels(MODEL, engine, group).inc(4)
            self.of["resident"].labels(MODEL, engine, "victim", "reuse").set(40)
            self.of["resident"].labels(MODEL, engine, "victim", "normal").set(3)
            self.of["resident"].labels(MODEL, engine, "attacker", "probationary").set(20)
            self.of["evicted"].labels(MODEL, engine, "attacker", "attacker").inc(8)
            self.of["evicted"].labels(MODEL, engine, "victim", "attacker").inc(1)
        body = generate_latest(self.registry)
        headers = [(b"content-type", b"text/plain; version=0.0.4")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


@pytest.fixture(scope="module")
def metrics():
    return Metrics("0", "1")


@contextmanager
def served(metrics, folder):
    """Host and port of a server with the middleware around the metrics."""
    path = folder / "tenants.yaml"
    path.write_text(CONFIG)
    application = IdentityMiddleware(metrics)
    application._live = LiveConfig(path)
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(application, lifespan="off", log_level="error"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"127.0.0.1:{listener.getsockname()[1]}"
    server.should_exit = True
    thread.join()
    listener.close()


@pytest.fixture(scope="module")
def address(metrics, tmp_path_factory):
    with served(metrics, tmp_path_factory.mktemp("page")) as found:
        yield found


@pytest.fixture(scope="module")
def chromium():
    found = next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )
    if found is None:
        pytest.skip("needs Chromium on the PATH (Debian: apt-get install chromium)")
    return found


@pytest.fixture(scope="module")
def document(chromium, tmp_path_factory):
    """What the browser has made of the page after some seconds of its own time."""

    def browse(url, *options):
        command = [
            chromium,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
        ]
        command += [
            f"--user-data-dir={tmp_path_factory.mktemp('profile')}",
            *options,
            "--dump-dom",
            url,
        ]
        run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        return run.stdout

    return browse


def cells(row):
    return [
        unescape(re.sub(r"<.*?>", "", cell)) for cell in re.findall(r"<t[dh][^>]*>.*?</t[dh]>", row)
    ]


def rows(document, of):
    (place,) = re.findall(rf'id="{of}">(.*?)</table>', document, re.DOTALL)
    return [cells(row) for row in re.findall(r"<tr.*?</tr>", place, re.DOTALL)]


def test_the_page_shows_what_the_metrics_say(document, address):
    text = document(f"http://operator:op-key@{address}{PAGE_PATH}", "--virtual-time-budget=9000")
    assert re.search(r'id="state"[^>]*class="">up<', text), text
    what = unescape(re.search(r'id="what">(.*?)</p>', text)[1])
    assert what == f"{MODEL} · policy shield, preset default · PrefixShield 9.9, vLLM 0.32.0"
    assert "<title>PrefixShield</title>" in text
    # Sums over both engines.
    assert "126 of 200 blocks cached: reuse 80, normal 6, probationary 40" in text
    head, attacker, victim = rows(text, "groups")
    assert head[:5] == ["group", "cached", "hit ratio", "debt", "normalised"]
    assert victim[:6] == ["victim", "86", "75.0 %", "0", "0", "75.0 %"]
    assert attacker[:3] == ["attacker", "40", "0.0 %"]
    debt = float(attacker[3])
    assert debt >= 60, "read three times at least"
    assert float(attacker[4]) == debt / 2
    # 8 blocks of both groups in every reading, once in two seconds; time in the browser is skipped.
    created, lost, evicted = (float(cell) for cell in attacker[6:])
    assert lost == pytest.approx(2 * created, rel=0.05)
    assert evicted == pytest.approx(lost * 9 / 8, rel=0.05)
    blame = rows(text, "blame")
    assert blame[0] == ["lost by ↓ for →", "attacker"]
    readings = debt / 20
    assert [row[0] for row in blame[1:]] == ["attacker", "victim"]
    assert float(blame[1][1]) == 16 * (readings - 1)
    assert float(blame[2][1]) == 2 * (readings - 1)
    for title in ("Hit ratio", "Debt, blocks", "Cached blocks", "Lost blocks per second"):
        (chart,) = re.findall(rf"<h2>{title}</h2>(<svg.*?</svg>)", text, re.DOTALL)
        curves = dict(re.findall(r'<path d="(\S[^"]*)"[^>]*data-group="(\w+)"', chart))
        assert sorted(curves.values()) == ["attacker", "victim"]
        assert all("L" in curve and "NaN" not in curve for curve in curves)


def test_the_chosen_engine_stays_while_it_is_there(chromium, tmp_path):
    """A server may come back with fewer engines, or with more, under an open page."""
    server = [Metrics("0", "1")]

    async def metrics(scope, receive, send):
        await server[0](scope, receive, send)

    def shows(browser, engines, chosen, capacity):
        """What can be chosen (nothing to choose from: None), what is, and the blocks shown."""
        menu = "document.getElementById('engine')"
        script = (
            f"[{menu}.hidden ? null : [...{menu}.options].map(o => o.value), {menu}.value, "
            "document.getElementById('classes').textContent.match(/of (.*) blocks/)?.[1]]"
        )
        deadline = time.monotonic() + 30
        while (found := browser.evaluate(script)) != [engines, chosen, capacity]:
            assert time.monotonic() < deadline, found
            time.sleep(0.1)
        return True

    with (
        served(metrics, tmp_path) as address,
        Browser(chromium, f"http://operator:op-key@{address}{PAGE_PATH}") as browser,
    ):
        assert shows(browser, ["all", "0", "1"], "all", "200")
        choose = "var menu = document.getElementById('engine'); menu.value = '1';"
        browser.evaluate(f"{choose} menu.dispatchEvent(new Event('change'))")
        assert shows(browser, ["all", "0", "1"], "1", "100")
        server[0] = Metrics("0", "1", "2")
        assert shows(browser, ["all", "0", "1", "2"], "1", "100")
        server[0] = Metrics("0", "2", "3")
        assert shows(browser, ["all", "0", "2", "3"], "all", "300")
        server[0] = Metrics("0")
        assert shows(browser, None, "all", "100")


def test_without_the_key_the_browser_gets_nothing(document, address):
    text = document(f"http://{address}{PAGE_PATH}")
    assert "<title>PrefixShield" not in text
    text = document(f"http://operator:wrong@{address}{PAGE_PATH}")
    assert "<title>PrefixShield" not in text


def test_the_page_asks_nobody_else(address):
    """One file: no address in it, and a policy under which the browser would load none."""
    answer = httpx.get(f"http://{address}{PAGE_PATH}", auth=("x", "op-key"))
    assert answer.status_code == 200
    assert (
        re.findall(r"(?:https?:)?//[\w.]+", answer.text.replace("http://www.w3.org/2000/svg", ""))
        == []
    )
    assert not re.findall(r"<(?:link|img|iframe|script\s)|@import|url\(", answer.text)
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "connect-src 'self'" in policy


def test_top_shows_the_same(address, metrics):
    """Live, until Ctrl-C: into a pipe goes the last frame."""
    code = "from prefixshield.cli import main; main()"
    readings = metrics.readings
    process = subprocess.Popen(
        [sys.executable, "-c", code, "top", f"http://{address}", "--interval", "0.1"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, OPERATOR_KEY_VARIABLE: "op-key"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    while metrics.readings < readings + 8 and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert f"{MODEL}: policy shield, preset default, PrefixShield 9.9, vLLM 0.32.0" in text
    assert "126 of 200 blocks cached (reuse 80, normal 6, probationary 40)" in text
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines()]
    attacker, victim, lost_by_attacker, lost_by_victim = [line for line in lines if line]
    assert victim[:6] == ["victim", "86", "75.0 %", "0.0", "0.0", "75.0 %"]
    assert attacker[:3] == ["attacker", "40", "0.0 %"]
    assert float(attacker[3]) == 2 * float(attacker[4]) > 0
    created, lost, evicted = map(float, attacker[6:])
    assert lost == pytest.approx(2 * created, rel=0.05)
    assert evicted == pytest.approx(lost * 9 / 8, rel=0.05)
    assert lost_by_attacker[0] == "attacker"
    assert lost_by_victim[0] == "victim"
    assert float(lost_by_attacker[1]) == 8 * float(lost_by_victim[1]) > 0


@pytest.mark.parametrize(
    ("url", "key", "message"),
    [
        (
            "localhost:8000",
            "",
            "found 'localhost:8000', expected a URL such as http://localhost:8000",
        ),
        (
            "http://ADDRESS",
            "",
            "answers 401: PREFIXSHIELD_OPERATOR_KEY must hold the operator's key",
        ),
        ("http://127.0.0.1:9", "", "http://127.0.0.1:9/metrics: cannot be read: "),
    ],
)
def test_top_says_why_it_cannot_read(address, monkeypatch, url, key, message):
    monkeypatch.setenv(OPERATOR_KEY_VARIABLE, key)
    with pytest.raises(PrefixShieldError, match=re.escape(message)):
        fetch(url.replace("ADDRESS", address))
