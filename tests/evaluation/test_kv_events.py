"""Contracts from KV events: what is counted by hand, and a publisher that the command listens to."""

import json
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest

pytest.importorskip("msgspec")
pytest.importorskip("zmq")

import msgspec
import zmq

from prefixshield.config import load_config
from prefixshield.errors import PrefixShieldError
from prefixshield.evaluation.entitlements import from_events
from prefixshield.evaluation.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Creation,
    EventBatch,
    Heard,
    Listener,
    heard,
    median_lifetime,
)
from prefixshield.serving.namespace import Identity, Namespaces

CONFIG = """
contracts:
  big: {refill_rate: 30, burst: 4}
  small: {refill_rate: 10, burst: 2}
groups:
  shop: {contract: big, keys: [sk-shop]}
  search: {contract: small}
default_group: shop
"""


@pytest.fixture
def path(tmp_path):
    found = tmp_path / "tenants.yaml"
    found.write_text(CONFIG)
    return found


@pytest.fixture
def namespaces(path):
    return Namespaces.of(load_config(path), path)


@pytest.fixture
def stored(namespaces):
    def stored(group, *hashes, contract=None, **fields):
        own = {"shop": "big", "search": "small"}
        head = namespaces.head(Identity(group, contract or own[group]))
        return BlockStored(list(hashes), session_id=head, **fields)

    return stored


def test_who_created_what_and_how_long_it_lived(namespaces, stored):
    listener = Listener(namespaces)
    batches = [
        # The server's clock reads 1,000 s when we have listened for 2 s.
        (7, 1000.0, [stored("shop", 1, 2, 3), stored("search", 9, medium="GPU")]),
        (8, 1001.0, [BlockRemoved([1, 77]), stored("shop", 2), stored("search", 4, medium="CPU")]),
        (11, 1003.0, [BlockRemoved([2], medium="GPU"), BlockRemoved([9], medium="CPU")]),
        (
            12,
            1002.0,
            [
                stored("search", 5, contract="big"),
                BlockStored([6]),
                BlockStored([8], session_id="x"),
            ],
        ),
        (13, 1005.0, [AllBlocksCleared(), BlockRemoved([3]), stored("shop", 3)]),
    ]
    for number, ts, events in batches:
        listener.feed(number, EventBatch(ts, events), ts - 998.0)
    found = heard([listener], 9.0)
    (creations,) = found.engines
    assert creations == [
        (2.0, "shop", "big", 3),
        (2.0, "search", "small", 1),
        (3.0, "shop", "big", 1),
        (5.0, "search", "big", 1),  # a clock that steps back stands still
        (7.0, "shop", "big", 1),
    ]
    # Shop: 1 ended after 1 s, the older 2 after 3 s; 3 and the other 2 were seen for 5 and 4 s, the
    # last 3 for 2 s: survival 4/5, then 4/5 x 2/3 after 3 s. Search: 9 seen for 5 s, 5 for 2 s.
    assert found.lifetimes_s == {"shop": None, "search": None}
    assert (found.strangers, found.missing_batches) == (2, 2)


def test_the_median_of_lifetimes_counts_those_that_did_not_end():
    assert median_lifetime([(4, True), (1, True), (3, True), (2, True)]) == 2
    assert median_lifetime([(4, True), (1, False), (3, True), (2, True)]) == 3
    assert median_lifetime([(4, False), (1, True), (3, False), (2, False)]) is None
    assert median_lifetime([]) is None


def test_the_proposal_and_the_debts_are_those_of_the_events(path):
    """20 s: shop 100 blocks, one each 0.2 s; search 300, all at 10 s. 20 a second in all."""
    creations = [Creation(0.2 * i, "shop", "big", 1) for i in range(50)]
    creations += [Creation(10.0, "search", "small", 300)]
    creations += [Creation(10 + 0.2 * i, "shop", "big", 1) for i in range(50)]
    told = Heard(20.0, [creations], {"shop": None, "search": 4.0}, 5, 0)
    found = from_events(told, load_config(path), 400, None, 2.0)
    # 400 blocks at 20 a second live for 20 s: 20 a second for 30 + 10 parts.
    assert (found.horizon_s, found.budget, found.buckets) == (20, 20, {"big": 1, "small": 1})
    contracts = {n: (c.refill_rate, c.burst) for n, c in found.proposed.contracts.items()}
    assert contracts == {"big": (15, 30), "small": (5, 10)}
    shop, search = found.effects["shop"], found.effects["search"]
    assert (shop["measured"].created_per_s, search["measured"].created_per_s) == (5, 15)
    assert (shop["measured"].lifetime_s, search["measured"].lifetime_s) == (None, 4)
    assert shop["present"].debt_ratio == shop["proposed"].debt_ratio == 0
    # Search: 298 blocks owed at 10 a second, 290 at 5: to the end.
    assert search["present"].debt_ratio == search["proposed"].debt_ratio == 0.5
    longer = from_events(told, load_config(path), 400, 2.0, 2.0)
    assert longer.budget == 200  # 50 a second, burst 100: 200 blocks owed, paid in 4 s
    assert longer.effects["search"]["proposed"].debt_ratio == pytest.approx(4 / 20)
    assert found.warnings == ["5 more blocks were created by nobody whom --config names"]
    assert found.effects[None]["measured"].hit_ratio is None

    # A second engine on which nothing happens: half of everything, per engine.
    two = from_events(replace(told, engines=[creations, []]), load_config(path), 400, None, 2.0)
    assert (two.horizon_s, two.budget, two.buckets) == (40, 10, {"big": 1, "small": 1})
    assert two.effects["search"]["measured"].created_per_s == 7.5
    assert two.effects["search"]["present"].debt_ratio == 0.25
    # What both do counts once, and owes as one of them does.
    same = from_events(replace(told, engines=[creations] * 2), load_config(path), 400, None, 2.0)
    assert (same.proposed, same.effects) == (found.proposed, found.effects)

    silent = Heard(20.0, [[]], {}, 0, 0)
    with pytest.raises(PrefixShieldError, match="found no block created within 20 s"):
        from_events(silent, load_config(path), 400, None, 2.0)
    strange = Heard(20.0, [[]], {}, 5, 0)
    with pytest.raises(PrefixShieldError, match="found 5 blocks created by nobody whom --config"):
        from_events(strange, load_config(path), 400, None, 2.0)


def test_engines_have_their_own_numbers_clocks_and_blocks(namespaces, stored):
    """Both cached block 1: the one lived for 1 s, the other for 3 s and on."""
    one, two = Listener(namespaces), Listener(namespaces)
    one.feed(5, EventBatch(1000.0, [stored("shop", 1)]), 0.0)
    two.feed(70, EventBatch(50.0, [stored("shop", 1), stored("search", 2)]), 1.0)
    one.feed(6, EventBatch(1001.0, [BlockRemoved([1])]), 1.0)
    two.feed(72, EventBatch(52.0, [BlockRemoved([2])]), 3.0)
    found = heard([one, two], 4.0)
    assert found.engines == [
        [(0.0, "shop", "big", 1)],
        [(1.0, "shop", "big", 1), (1.0, "search", "small", 1)],
    ]
    assert found.lifetimes_s == {"shop": 1.0, "search": 2.0}
    assert (found.strangers, found.missing_batches) == (0, 1)


def calibrate(endpoint, path, *options):
    return subprocess.run(
        [
            *(sys.executable, "-c", "from prefixshield.cli import main; main()", "calibrate"),
            *(endpoint, "--blocks", "400", "--config", str(path), *options),
        ],
        capture_output=True,
        text=True,
    )


def publish(payload_of):
    """A publisher that goes on until the test ends; returns its endpoint and what ends it."""
    context, ended = zmq.Context(), threading.Event()
    socket = context.socket(zmq.PUB)
    port = socket.bind_to_random_port("tcp://127.0.0.1")

    def run():
        for number in range(100_000):
            payload = payload_of(number)
            socket.send_multipart((b"", number.to_bytes(8, "big"), payload))
            if ended.wait(0.01):
                break
        context.destroy(linger=0)

    thread = threading.Thread(target=run)
    thread.start()

    def end():
        ended.set()
        thread.join()

    return f"tcp://127.0.0.1:{port}", end


def test_the_command_listens(tmp_path, path, namespaces, stored):
    def payload(number):
        events = [stored("shop", 2 * number, 2 * number + 1)]
        if number >= 10:
            events.append(BlockRemoved([2 * number - 20, 2 * number - 19]))
        return msgspec.msgpack.encode(EventBatch(time.time(), events))

    endpoint, end = publish(payload)
    output, picture = tmp_path / "proposed.yaml", tmp_path / "effect.png"
    try:
        options = ["--interval", "1", "--output", str(output), "--picture", str(picture)]
        done = calibrate(endpoint, path, *options, "--json")
    finally:
        end()
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    measured = found["groups"]["shop"]["measured"]
    assert measured["created_per_s"] > 0
    assert measured["lifetime_s"] > 0
    assert measured["hit_ratio"] is None
    assert found["warnings"] == []
    assert found["budget"] == pytest.approx(measured["created_per_s"])
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert load_config(output).contracts["big"].refill_rate == float(f"{found['budget']:.3g}")


def test_the_command_listens_to_several_engines(path, stored):
    """Shop on one and search on the other, of which nobody else would know."""

    def payload_of(group):
        def payload(number):
            events = [stored(group, number)]
            return msgspec.msgpack.encode(EventBatch(time.time(), events))

        return payload

    (one, end_one), (two, end_two) = publish(payload_of("shop")), publish(payload_of("search"))
    try:
        done = calibrate(one, path, two, "--interval", "1", "--json")
    finally:
        end_one()
        end_two()
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    rates = {name: of["measured"]["created_per_s"] for name, of in found["groups"].items()}
    assert rates.keys() == {"shop", "search"}
    assert found["all"]["measured"]["created_per_s"] == pytest.approx(sum(rates.values()))
    assert found["warnings"] == []


def test_an_endpoint_that_is_none_is_one_message(path):
    endpoint, end = publish(lambda _: b"\x00")
    try:
        spoken = calibrate(endpoint, path)
    finally:
        end()
    for done, message in (
        (spoken, f"{endpoint}: found no KV events of vLLM there: "),
        (
            calibrate("tcp://*:5557", path),
            "tcp://*:5557: cannot be connected to: Invalid argument, expected tcp://HOST:PORT or",
        ),
        (calibrate(endpoint, path, endpoint), f"{endpoint}: found twice, expected one endpoint"),
        (calibrate(endpoint, path), f"{endpoint}: nobody publishes there: no connection within"),
    ):
        assert done.returncode == 1
        _listening, line = done.stderr.splitlines()
        assert line.startswith(message)
