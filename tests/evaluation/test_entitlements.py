"""Contracts proposed from traffic: the sums by hand, and the table against a replay of its own."""

import json
import os
import socket
import stat
import subprocess
import sys
import threading
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import chain, count

import pytest

from prefixshield.config import Config, load_config
from prefixshield.errors import PrefixShieldError
from prefixshield.evaluation.entitlements import from_metrics, from_trace, propose
from prefixshield.sim.replay import Replay, replay_policy
from prefixshield.top import parse
from prefixshield.traces import TraceRequest, read_trace, write_trace

CONFIG = """
preset: {preset}
contracts:
  big: {{refill_rate: 30, burst: 40}}
  small: {{refill_rate: 10, burst: 20}}
groups:
  shop: {{contract: big, keys: [sk-shop]}}
  search: {{contract: small}}
  idle: {{contract: small}}
default_group: shop
"""


def config(tmp_path, preset="default"):
    path = tmp_path / "tenants.yaml"
    path.write_text(CONFIG.format(preset=preset))
    return path


def run(*arguments):
    return subprocess.run(
        [sys.executable, "-c", "from prefixshield.cli import main; main()", *map(str, arguments)],
        capture_output=True,
        text=True,
    )


def request(line, t, ids, group, contract=None):
    return TraceRequest(line, 1000.0 * t, 4 * len(ids) + 1, 1, tuple(ids), group, contract, None)


def test_the_pools_budget_is_divided_by_weight(tmp_path):
    """1,000 blocks that are to live for 10 s: 100 a second. 2 x 30 + 4 x 10 = 100 parts."""
    present = load_config(config(tmp_path)).contracts
    found = propose(present, 1000, {"big": 2, "small": 4}, 10, 2.01, {"small": 25})
    assert {name: (c.refill_rate, c.burst) for name, c in found.items()} == {
        "big": (30, 61),
        "small": (10, 25),
    }
    alone = propose(present, 1000, {"small": 3}, 7, 1, {})
    # 142.857 for 3 x 10 parts: 47.6 each; 3 times that for a group under the other contract.
    assert {name: c.refill_rate for name, c in alone.items()} == {"big": 143, "small": 47.6}


def known_traffic():
    """For 20 s: shop asks for the same 3 blocks every 2 s, search creates 2 blocks every second."""
    fresh = count(1000)
    shop = [(2.0 * i, [1, 2, 3], "shop") for i in range(11)]
    search = [(1.0 * i, [next(fresh), next(fresh)], "search") for i in range(21)]
    rows = sorted(chain(shop, search), key=lambda row: row[0])
    return [request(line, *row) for line, row in enumerate(rows, start=1)]


def test_of_known_traffic(tmp_path):
    present = Config.model_validate(
        {
            "contracts": {
                "big": {"refill_rate": 4.0, "burst": 2.0},
                "small": {"refill_rate": 1.0, "burst": 2.0},
            },
            "groups": {"shop": {"contract": "big"}, "search": {"contract": "small"}},
            "default_group": "shop",
        }
    )
    found = from_trace(known_traffic(), present, 100, 4, 2.0, 0.1)
    # Blocks that are to live for 2 s: 100 blocks absorb 50 a second: 4 + 1 = 5 parts.
    assert (found.horizon_s, found.budget, found.buckets) == (2, 50, {"big": 1, "small": 1})
    contracts = {n: (c.refill_rate, c.burst) for n, c in found.proposed.contracts.items()}
    assert contracts == {"big": (40, 4), "small": (10, 2)}  # bursts: 3 and 2 in a prompt; 4 > 3
    shop, search = found.effects["shop"], found.effects["search"]
    assert shop["lru"].hit_ratio == 30 / 33
    assert (shop["lru"].created_per_s, search["lru"].created_per_s) == (3 / 20, 42 / 20)
    assert search["lru"].debt_ratio is None
    # Shop creates 3 at once on a burst of 2: 1 block owed, 0.25 s. Search: nothing owed after the
    # first 2, then 2 more every second against 1 refilled: in debt from 1 s to the end, 19 of 20.
    assert shop["present"].debt_ratio == pytest.approx(0.25 / 20)
    assert search["present"].debt_ratio == pytest.approx(19 / 20)
    assert shop["proposed"].debt_ratio == search["proposed"].debt_ratio == 0


def flooded_traffic():
    """For 50 s: shop asks for one of 4 prefixes of 12 blocks every half second, and search for 16
    blocks as often, each twice and never again. Between two visits to a prefix: 36 + 32 blocks."""
    rows = []
    for i in range(100):
        rows.append(request(2 * i + 1, 0.5 * i, range(100 * (i % 4), 100 * (i % 4) + 12), "shop"))
        flood = range(10_000 + 100 * (i // 2), 10_016 + 100 * (i // 2))
        rows.append(request(2 * i + 2, 0.5 * i + 0.2, flood, "search"))
    return rows


def test_without_a_horizon_the_worst_off_group_decides(tmp_path):
    """Each horizon replayed by itself; LRU and the present contracts count among a group's best."""
    present, traffic = load_config(config(tmp_path)), flooded_traffic()
    asked = present, 64, 4
    found = from_trace(traffic, *asked, None, 10.0)
    # Under LRU shop hits nothing, search every second time: 100 x 12 + 50 x 16 blocks in 49.7 s.
    horizons = [64 / (2000 / 49.7) * factor for factor in (1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8)]
    assert list(found.losses) == pytest.approx(horizons)
    alone = {horizon: from_trace(traffic, *asked, horizon, 10.0) for horizon in horizons}
    hits = {
        group: [
            *(found.effects[group][way].hit_ratio for way in ("lru", "present")),
            *(one.effects[group]["proposed"].hit_ratio for one in alone.values()),
        ]
        for group in ("shop", "search")
    }
    assert hits["shop"][0] == 0
    worst = [
        max(max(of_group) - of_group[2 + number] for of_group in hits.values())
        for number in range(len(horizons))
    ]
    assert list(found.losses.values()) == pytest.approx(worst, abs=0.0005)
    assert found.losses[found.horizon_s] == min(found.losses.values()) < max(worst) - 0.5
    assert found.warnings == []

    generous = alone[horizons[0]]
    assert generous.effects["search"]["proposed"].debt_ratio == 0, "a flood within its contract"
    now, then = (generous.effects["shop"][way].hit_ratio for way in ("present", "proposed"))
    assert now > then + 0.01
    (warning,) = generous.warnings
    assert f"less than now: shop {then:.1%} instead of {now:.1%}. Try another --horizon" in warning
    assert "search" not in warning
    path, trace = config(tmp_path), tmp_path / "trace.jsonl"
    write_trace(trace, traffic)
    options = ["--blocks", 64, "--block-size", 4, "--config", path]
    shown = run("calibrate", trace, *options, "--horizon", horizons[0]).stdout
    assert f"Warning: {warning}" in shown
    assert "Warning" not in run("calibrate", trace, *options).stdout


def churning_traffic():
    """Three groups, one of them under two contracts, on more blocks than the pool has."""
    rows = []
    for i in range(400):
        group, contract = [
            ("shop", None), ("search", None), ("shop", "small"), ("new", "big")
        ][i * 7 % 4]  # fmt: skip
        base = 1000 * (i % 23 if group != "search" else i)
        rows.append(request(i + 1, 0.05 * i, range(base, base + 3 + i % 9), group, contract))
    return rows


def debt_seconds(charges, contracts, end):
    """Time in debt by group: each bucket by itself, and the union of when they are empty."""
    intervals = defaultdict(list)
    for (group, contract), events in charges.items():
        terms, balance, before = contracts[contract], None, 0.0
        for (t, blocks), (after, _) in zip(events, [*events[1:], (end, 0)], strict=True):
            balance = terms.burst if balance is None else balance
            balance = min(terms.burst, balance + terms.refill_rate * (t - before)) - blocks
            before = t
            if balance < 0:
                intervals[group].append((t, min(after, t - balance / terms.refill_rate)))
    seconds = {}
    for group, found in intervals.items():
        total, last = 0.0, 0.0
        for begin, until in sorted(found):
            total += max(0.0, until - max(begin, last))
            last = max(last, until)
        seconds[group] = total
    return seconds


@pytest.mark.parametrize("preset", ["default", "paper"])
def test_the_numbers_are_those_of_a_replay_under_the_file_it_writes(tmp_path, preset):
    path, trace = config(tmp_path, preset), tmp_path / "trace.jsonl"
    output, picture = tmp_path / "proposed.yaml", tmp_path / "effect.png"
    write_trace(trace, churning_traffic())
    options = ["--blocks", 60, "--block-size", 4, "--config", path, "--horizon", 3]
    done = run("calibrate", trace, *options, "--json", "--output", output, "--picture", picture)
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    present, proposed = load_config(path), load_config(output)
    assert proposed.contracts != present.contracts
    assert proposed.groups.keys() - present.groups.keys() == {"new"}
    assert proposed.groups["shop"] == present.groups["shop"]
    assert proposed.groups["new"].contract == "big"
    assert stat.S_IMODE(os.stat(output).st_mode) == 0o600, "it holds the keys"
    assert picture.read_bytes().startswith(b"\x89PNG")

    requests = read_trace(trace, 4)
    end = requests[-1].timestamp_ms / 1000
    for way, settings in {
        "lru": present.model_copy(update={"policy": "lru"}),
        "present": present,
        "proposed": proposed,
    }.items():
        charges = defaultdict(list)
        contract_at = {
            (r.timestamp_ms / 1000, r.group): r.contract or present.default_contract(r.group)
            for r in requests
        }

        def log(event, charges=charges, contract_at=contract_at):
            if event["event"] == "admit":
                key = event["group"], contract_at[event["t"], event["group"]]
                charges[key].append((event["t"], 1))

        chosen = replay_policy(settings, 60, requests, 4)
        result = Replay(settings, chosen, 4).run(requests, log)
        owed = debt_seconds(charges, settings.contracts, end)
        for group, tally in (*result.groups.items(), (None, result.total)):
            found = data["all" if group is None else "groups"]
            found = (found if group is None else found[group])[way]
            assert found["hit_ratio"] == tally.hit_ratio
            created = tally.blocks_queried - tally.blocks_hit
            assert found["created_per_s"] == pytest.approx(created / end)
            if way == "lru" or group is None:
                assert found["debt_ratio"] is None
            else:
                assert found["debt_ratio"] == pytest.approx(owed.get(group, 0.0) / end)
    assert any(0 < ways["present"]["debt_ratio"] < 1 for ways in data["groups"].values())
    shown = run("calibrate", trace, *options).stdout
    for ways in data["groups"].values():
        for way in ("lru", "present", "proposed"):
            assert f" {ways[way]['hit_ratio']:.4f} " in shown
            assert f" {ways[way]['created_per_s']:.2f} " in shown
        assert f" {ways['proposed']['debt_ratio']:.1%} " in shown
    assert run("calibrate", trace, *options).stdout == shown


METRICS = """
prefixshield_materialised_blocks_total{{model_name="m",engine="0",group="shop"}} {shop}
prefixshield_materialised_blocks_total{{model_name="m",engine="1",group="shop"}} {shop}
prefixshield_materialised_blocks_total{{model_name="m",engine="0",group="search"}} {search}
prefixshield_query_tokens_total{{model_name="m",engine="0",group="shop"}} {query}
prefixshield_hit_tokens_total{{model_name="m",engine="0",group="shop"}} {hit}
prefixshield_capacity_blocks{{model_name="m",engine="0"}} 3000
prefixshield_capacity_blocks{{model_name="m",engine="1"}} 3000
prefixshield_info{{model_name="m",engine="0",version="1",policy="shield",preset="default",vllm_version="x"}} 1
prefixshield_info{{model_name="m",engine="1",version="1",policy="shield",preset="default",vllm_version="x"}} 1
"""
BEFORE = {"shop": 100, "search": 50, "query": 1000, "hit": 0}
AFTER = {"shop": 500, "search": 850, "query": 2000, "hit": 250}


def readings(before=BEFORE, after=AFTER):
    return parse(METRICS.format(**before), 5.0), parse(METRICS.format(**after), 25.0)


def test_of_two_readings_of_two_engines(tmp_path):
    """An engine's mean over 20 s: shop 2 x 400 / 2 / 20 = 20 a second, search 800 / 2 / 20 = 20."""
    present = load_config(config(tmp_path))
    found = from_metrics(*readings(), present, None, None, 2.0)
    # Blocks live for 3,000 / 40 = 75 s now, and go on so: 40 a second, 30 + 10 parts.
    assert (found.horizon_s, found.budget, found.buckets) == (75, 40, {"big": 1, "small": 1})
    contracts = {n: (c.refill_rate, c.burst) for n, c in found.proposed.contracts.items()}
    assert contracts == {"big": (30, 60), "small": (10, 20)}
    measured = found.effects["shop"]["measured"]
    assert (measured.hit_ratio, measured.created_per_s) == (0.25, 20)
    assert found.effects[None]["measured"].created_per_s == 40
    owes = {group: found.effects[group]["proposed"].debt_ratio for group in ("shop", "search")}
    assert owes == {"shop": 0, "search": 1}

    shorter = from_metrics(*readings(), present, 6000, 50, 2.0)
    assert shorter.budget == 120
    assert shorter.effects["search"]["proposed"].debt_ratio == 0

    with pytest.raises(PrefixShieldError, match="the server restarted meanwhile"):
        from_metrics(*readings(AFTER, BEFORE), present, None, None, 2.0)
    with pytest.raises(PrefixShieldError, match="found no block created within 20 s"):
        from_metrics(*readings(AFTER, AFTER), present, None, None, 2.0)
    others = present.model_copy(update={"groups": {"shop": present.groups["shop"]}})
    with pytest.raises(PrefixShieldError, match=r"found the group search, .* --config: shop$"):
        from_metrics(*readings(), others, None, None, 2.0)


def test_a_servers_metrics_are_read_twice(tmp_path):
    pages = iter([METRICS.format(**BEFORE), METRICS.format(**AFTER)])

    class Page(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(next(pages).encode())

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        options = ["--config", config(tmp_path), "--interval", 0.2]
        picture, output = tmp_path / "effect.png", tmp_path / "proposed.yaml"
        done = run("calibrate", url, *options, "--picture", picture, "--output", output)
        server.shutdown()
    assert done.returncode == 0, done.stderr
    assert " 0.2500 " in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert load_config(output).contracts["small"].refill_rate > 10


@pytest.mark.parametrize(
    "answer", [b"no HTTP\n", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\ncut"]
)
def test_an_answer_that_is_none_is_one_message(tmp_path, answer):
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve():
            with listening.accept()[0] as connection:
                connection.recv(4096)
                connection.sendall(answer)

        serving = threading.Thread(target=serve)
        serving.start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        done = run("calibrate", url, "--config", config(tmp_path))
        serving.join()
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"{url}/metrics: cannot be read: ")


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("trace", ["--block-size", 4], "--blocks: missing, expected a number"),
        ("trace", ["--blocks", 9], "--block-size: missing, expected a number"),
        ("trace", ["--horizon", 0], "--horizon: found 0.0, expected more than 0 seconds"),
        ("trace", ["--burst-horizon", "inf"], "--burst-horizon: found inf, expected more than 0"),
        ("http://127.0.0.1:9", [], "--config: missing, expected the server's configuration"),
        ("tpc://host:5557", [], "SOURCE: found 'tpc://host:5557', expected the path of a trace, h"),
        (
            "localhost:8000",
            [],
            "SOURCE: found 'localhost:8000', expected the path of a trace, http",
        ),
        ("http:/host", [], "SOURCE: found 'http:/host', expected the path of a trace, http://HOST"),
        ("gone.jsonl", ["--blocks", 9], "SOURCE: found 'gone.jsonl', expected the path of a trace"),
        ("trace", ["once"], "SOURCE: found trace once, expected one, or several of KV events"),
        ("tcp://a:1", ["http://b:2"], "SOURCE: found tcp://a:1 http://b:2, expected one, or"),
        ("once", ["--blocks", 9, "--block-size", 4], "once: timestamp: found no time between"),
        ("trace", ["--blocks", 1, "--block-size", 4], "trace: found no request that fits into 1"),
        ("gold", ["--blocks", 9, "--block-size", 4], "gold: line 1: contract: found 'gold', expec"),
        ("name", ["--blocks", 9, "--block-size", 4], "name: groups.a b: found the name 'a b', exp"),
    ],
)
def test_bad_input_gives_one_message(tmp_path, monkeypatch, source, options, message):
    monkeypatch.chdir(tmp_path)
    write_trace(tmp_path / "trace", known_traffic())
    write_trace(tmp_path / "once", known_traffic()[:1])
    write_trace(tmp_path / "gold", [request(i + 1, i, [1], "shop", "gold") for i in range(3)])
    write_trace(tmp_path / "name", [request(i + 1, i, [1], "a b") for i in range(3)])
    done = run("calibrate", source, *options, "--output", tmp_path / "out.yaml")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(message) or f"/out.yaml: {message.partition(': ')[2]}" in line
    assert not (tmp_path / "out.yaml").exists()
