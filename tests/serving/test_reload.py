"""The configuration file changes while the server runs: what each version does, in any order."""

import asyncio
import itertools
import logging
import os
import signal
import threading
import time
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_identity import Client, Recorder, state_of, with_key

from prefixshield.errors import ConfigError
from prefixshield.serving import reload
from prefixshield.serving.identity import IdentityMiddleware
from prefixshield.serving.namespace import Identity
from prefixshield.serving.reload import LiveConfig

START = """
policy: shield
contracts:
  big: {refill_rate: 100, burst: 100}
  small: {refill_rate: 1, burst: 10}
groups:
  shop: {contract: big, keys: [sk-shop]}
  bulk: {contract: small, keys: [sk-bulk]}
default_group: bulk
"""
NEW_KEY = START.replace("[sk-shop]", "[sk-shop, sk-new]")
OTHER_TERMS = START.replace("burst: 100", "burst: 50")
OTHER_CONTRACT = START.replace("shop: {contract: big", "shop: {contract: small")
NO_BULK = START.replace("  bulk: {contract: small, keys: [sk-bulk]}\n", "").replace(
    "default_group: bulk", "default_group: shop"
)
MORE = START.replace(
    "groups:", "  mid: {refill_rate: 9, burst: 9}\ngroups:\n  new: {contract: mid}"
)
BROKEN = START.replace("refill_rate: 1,", "refill_rate: 0,")
NOT_YAML = START + "\nkeys: [sk-hidden"
OTHER_POLICY = START.replace("policy: shield", "policy: lru")
OTHER_SECRET = START + "namespace_secret: another\n"
NOBODY = START.replace("[sk-shop]", "[]").replace("[sk-bulk]", "[]")
SAME_KEY = START.replace("[sk-bulk]", "[sk-shop]")

_mtimes = itertools.count(1_000_000)


def put(path, text, mtime=None):
    """Write a file as one that has been left alone for long."""
    path.write_text(text)
    mtime = next(_mtimes) if mtime is None else mtime
    os.utime(path, (mtime, mtime))
    return path


def look(live):
    """1: another version is in force; -1: one was refused; 0: neither."""
    accepted, refused = live.accepted, live.refused
    live.look(at_once=True)
    return live.accepted - accepted - (live.refused - refused)


@pytest.fixture
def path(tmp_path):
    return put(tmp_path / "tenants.yaml", START)


@pytest.fixture
def log(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level(logging.INFO, logger="vllm.prefixshield")
    return caplog


def test_a_new_version_takes_effect_and_the_log_says_what_changed(path, log):
    live = LiveConfig(path)
    assert look(live) == 0
    put(path, MORE.replace("[sk-shop]", "[sk-new, sk-newer]").replace("burst: 100", "burst: 50"))
    assert look(live) == 1
    config, keys, _, _, namespaces = live.current
    assert config.contracts["big"].burst == 50
    assert keys["sk-new"] == ("shop", "big")
    assert namespaces.read(namespaces.token(Identity("new", "mid")))[0] == ("new", "mid")
    (line,) = log.messages
    assert line.endswith(
        "was read again: contracts added: mid; contracts changed: big; groups added: new; "
        "API keys: 2 added, 1 removed"
    )
    assert "sk-" not in line


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BROKEN, "contracts.small.refill_rate: found 0, expected a number from 0.000000001 to"),
        (NOT_YAML, "not valid YAML: line "),
        (OTHER_POLICY, "policy: has changed, expected as at the start: restart the server"),
        (START + "preset: paper\n", "preset: has changed"),
        (OTHER_SECRET, "namespace_secret: has changed"),
        (NOBODY, "groups: found no API key"),
        (SAME_KEY, "groups.bulk.keys.0: found the same key as groups.shop.keys.0"),
        (START.replace("sk-shop", "{env: NOT_SET}"), "found 'NOT_SET', which is not set"),
        (None, "cannot be read: No such file or directory"),
    ],
)
def test_a_version_that_cannot_be_used_is_refused_once(path, log, text, message):
    live = LiveConfig(path)
    was = live.current
    if text is None:
        path.unlink()
    else:
        put(path, text)
    assert look(live) == -1
    assert live.current is was
    assert message in log.messages[0]
    assert "sk-" not in log.text
    if text is not None:
        put(path, text)  # touched: the same version
    assert look(live) == 0
    assert len(log.messages) == 1
    put(path, START)
    assert look(live) == 0, "back to what is in force"
    put(path, OTHER_TERMS)
    assert look(live) == 1


def test_groups_are_fixed_where_they_divide_the_pool(path):
    put(path, START.replace("policy: shield", "policy: static-quota"))
    live = LiveConfig(path)
    put(path, MORE.replace("policy: shield", "policy: static-quota"))
    assert look(live) == -1
    put(path, NEW_KEY.replace("policy: shield", "policy: static-quota"))
    assert look(live) == 1


@pytest.mark.parametrize("text", [NEW_KEY, OTHER_TERMS, OTHER_CONTRACT, NO_BULK, MORE])
def test_a_group_that_stays_keeps_its_namespace(path, text):
    live = LiveConfig(path)

    def namespace():
        """What is hashed for a request of shop, whatever its contract."""
        config, _, _, _, namespaces = live.current
        token = namespaces.token(Identity("shop", config.groups["shop"].contract), "salt")
        return namespaces.read(token)[1]

    before = namespace()
    put(path, text)
    assert look(live) == 1
    assert namespace() == before


good = [START, NEW_KEY, OTHER_TERMS, OTHER_CONTRACT, NO_BULK, MORE]
bad = [BROKEN, NOT_YAML, OTHER_POLICY, OTHER_SECRET, NOBODY, SAME_KEY]


@settings(deadline=None, max_examples=40)
@given(st.lists(st.sampled_from(good + bad), max_size=5), st.sampled_from(good))
def test_two_processes_that_saw_different_versions_agree_on_the_last(tmp_path_factory, seen, last):
    path = put(tmp_path_factory.mktemp("live") / "tenants.yaml", START)
    eager, lazy = LiveConfig(path), LiveConfig(path)
    for text in [*seen, last]:
        put(path, text)
        eager.look(at_once=True)
    lazy.look(at_once=True)
    assert eager.current[:3] == lazy.current[:3]
    identity = next(iter(eager.current.keys.values()))
    tokens = {one.current.namespaces.token(Identity(*identity)) for one in (eager, lazy)}
    assert len(tokens) == 1


def test_a_file_just_written_may_not_be_complete(path, monkeypatch):
    live = LiveConfig(path)
    put(path, OTHER_TERMS, mtime=100)
    monkeypatch.setattr(time, "time", lambda: 100.9)
    live.look()
    assert live.accepted == 0
    monkeypatch.setattr(time, "time", lambda: 101.1)
    live.look()
    assert live.accepted == 1
    put(path, START, mtime=101)
    live.look(at_once=True)
    assert live.accepted == 2, "the operator says that it is complete"


def test_the_watcher_sees_a_new_version_and_ends_with_its_object(path, monkeypatch):
    monkeypatch.setattr(reload, "INTERVAL_S", 0.01)
    before = threading.active_count()
    kept = [LiveConfig(path)]
    kept[0].watch()
    put(path, OTHER_TERMS)
    wait_until(lambda: kept[0].accepted)
    kept.clear()
    wait_until(lambda: threading.active_count() == before)


def wait_until(true):
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_link_that_is_pointed_elsewhere_is_a_new_version(tmp_path):
    old, new = put(tmp_path / "old", START), put(tmp_path / "new", OTHER_TERMS)
    link = tmp_path / "tenants.yaml"
    link.symlink_to(old)
    live = LiveConfig(link)
    link.unlink()
    link.symlink_to(new)
    assert look(live) == 1


# The middleware


def test_keys_come_and_go_with_the_file(path):
    client = Client(path)

    def status(key):
        client.middleware._live.look(at_once=True)
        return client.post("/v1/completions", {}, headers=with_key(key))[0]

    assert (status("sk-bulk"), status("sk-new")) == (200, 401)
    put(path, NO_BULK.replace("sk-shop", "sk-new"))
    assert (status("sk-bulk"), status("sk-shop"), status("sk-new")) == (401, 401, 200)
    put(path, BROKEN)
    assert (status("sk-bulk"), status("sk-shop"), status("sk-new")) == (401, 401, 200)


def test_sighup_has_the_file_read_at_once(path, monkeypatch):
    monkeypatch.setattr(reload, "INTERVAL_S", 3600.0)
    middleware = IdentityMiddleware(Recorder())

    async def run():
        async def receive():
            return {"type": "lifespan.startup"}

        async def send(message):
            assert message["type"] == "lifespan.startup.complete"

        scope = {"type": "lifespan", "app": SimpleNamespace(state=state_of(path))}
        await middleware(scope, receive, send)
        put(path, NO_BULK, mtime=time.time())
        signal.raise_signal(signal.SIGHUP)
        await asyncio.sleep(0.05)

    asyncio.run(run())
    assert "bulk" not in middleware._admission.config.groups


def test_a_file_that_cannot_be_used_at_the_start_is_an_error(path):
    put(path, BROKEN)
    with pytest.raises(ConfigError):
        LiveConfig(path)
