"""What the engine reports: exact against vLLM's own KV events, bounded, and not too often."""

import asyncio
import gc
import random
import sys
from collections import Counter

import pytest

pytest.importorskip("vllm")

from control_plane import (
    BLOCK_SIZE,
    ControlPlane,
    Front,
    count_events,
    engine_config,
    make_request,
)

from prefixshield.config import load_config
from prefixshield.core.ledger import Contract, Debt
from prefixshield.core.retention import RetentionClass
from prefixshield.policies import build_policy
from prefixshield.policies.base import PolicySetup
from prefixshield.policies.never_hit_first import NeverHitFirst
from prefixshield.serving.catalogue import MAX_GROUP_LABELS, OTHER, GroupLabels
from prefixshield.serving.driver import PolicyDriver
from prefixshield.serving.identity import IdentityMiddleware
from prefixshield.serving.namespace import Identity, Namespaces
from prefixshield.serving.reload import LiveConfig
from prefixshield.serving.reporting import Reporter, take
from prefixshield.serving.scheduler import build_scheduler
from prefixshield.serving.wiring import config_path

pytestmark = pytest.mark.engine

CONFIG = """
policy: {policy}
preset: {preset}
contracts:
  big: {{refill_rate: 1000, burst: 1000}}
  small: {{refill_rate: 0.001, burst: 4}}
groups:
  victim: {{contract: big, keys: [sk-victim]}}
  attacker: {{contract: small}}
default_group: attacker
"""


@pytest.fixture
def plane(tiny_model, tmp_path):
    def build(policy, preset="default", num_blocks=65):
        path = tmp_path / f"{policy}-{preset}.yaml"
        path.write_text(CONFIG.format(policy=policy, preset=preset))
        config = engine_config(tiny_model, num_blocks, str(path), max_num_batched_tokens=2048)
        namespaces = Namespaces.of(load_config(path), path)
        return ControlPlane(build_scheduler, config, num_blocks), namespaces.token

    return build


WAYS = [("shield", "default"), ("shield", "paper"), ("lru", "default"), ("static-quota", "default")]


@pytest.mark.parametrize(("policy", "preset"), WAYS)
def test_counters_agree_with_vllms_own_events(plane, policy, preset):
    """Random traffic with shared prefixes, aborts, preemptions and resets, in a small pool."""
    p, token = plane(policy, preset)
    front = Front(p.scheduler)
    r = random.Random(7)
    salts = [token(Identity("victim", "big")), token(Identity("attacker", "small")), None]
    prefixes = [[r.randrange(1000) for _ in range(6 * BLOCK_SIZE)] for _ in range(4)]
    resets = 0
    for number in range(300):
        tokens = list(r.choice(prefixes)) if r.random() < 0.5 else []
        tokens += [r.randrange(1000) for _ in range(r.randrange(1, 12 * BLOCK_SIZE))]
        name = str(number)
        p.add(
            make_request(
                name,
                tokens,
                block_size=BLOCK_SIZE,
                salt=r.choice(salts),
                max_tokens=r.choice([1, 4, 90]),
            )
        )
        for _ in range(r.randrange(4)):
            p.step()
        if r.random() < 0.1:
            p.abort(name)
        if r.random() < 0.02:
            p.run()
            resets += p.scheduler.reset_prefix_cache()
            assert not any(p.scheduler.driver.resident.values())
    p.run()
    p.scheduler._reporter._gauged_at = float("-inf")
    p.add(make_request("last", range(3), block_size=BLOCK_SIZE, max_tokens=1))
    p.run()

    stored, removed = count_events(front.events)
    assert front.total("materialised") == sum(stored.values()) > 1000
    assert front.total("evicted") == front.total("lost") == len(removed) > 500
    assert resets
    assert policy == "static-quota" or p.preemptions, "no request was preempted"
    # What is cached is what the events of vLLM's pool leave.
    hashed = [block for block in p.pool.blocks if block.block_hash is not None]
    resident = Counter()
    for (name, *labels), blocks in front.gauges.items():
        if name == "resident":
            resident[labels[0]] += blocks
    assert +resident == Counter(p.scheduler.driver.owner[block.block_id] for block in hashed)
    assert front.gauges["capacity",] == 64


def test_what_travels_when():
    class Stub(NeverHitFirst):
        looks = 0

        def debts(self, time):
            self.looks += 1
            return {"a": Debt(1.5, 0.5), "b": Debt(2.25, 1), "c": Debt(4, 2)}

        def resident_blocks(self):
            return {("a", RetentionClass.REUSE): 3}

    times = [100.0]
    stub = Stub(PolicySetup(8, {}, ["a"]))
    driver = PolicyDriver(stub, Identity("a", "x"))
    reporter = Reporter(driver, GroupLabels(["a"]), 7, lambda: times[-1])
    sent = take(reporter.report(idle=False))
    assert sent["debt", "a"] == 1500
    assert sent["debt", OTHER] == 6250
    assert sent["normalised_debt", OTHER] == 3000
    assert sent["resident", "a", "reuse"] == 3000
    for seconds, idle, counted, looks in [
        (100.9, False, 1, 1),
        (100.95, True, 1, 2),
        (101.0, True, 1, 2),
        (101.05, False, 0, 2),
        (101.9, False, 2, 2),
        (101.96, False, 0, 3),
        (101.97, True, 2, 3),
    ]:
        times.append(seconds)
        driver.counts["materialised", "a"] += 1
        sent = take(reporter.report(idle=idle))
        assert sent.get(("materialised", "a"), 0) == counted
        assert stub.looks == looks
    # A policy that fails keeps its series, and leaves counting to the driver.
    driver.disbelieve([], 1)
    driver.resident["a"] = 5
    times.append(200.0)
    sent = take(reporter.report(idle=False))
    assert sent["native_order",] == 1000
    assert sent["debt", "a"] == sent["resident", "a", "reuse"] == 0
    assert sent["resident", "a", "none"] == 5000


def test_a_gauge_that_raises_ends_in_native_order():
    class Broken(NeverHitFirst):
        def debts(self, time):
            raise ZeroDivisionError

    driver = PolicyDriver(Broken(PolicySetup(8, {}, ["a"])), Identity("a", "x"))
    sent = take(Reporter(driver, GroupLabels(["a"]), 7).report(idle=True))
    assert driver.failed
    assert ("capacity",) in sent


def test_made_up_names_leave_memory_and_labels_flat(plane):
    """10,000 keys and 10,000 salts that nobody configured."""
    p, _ = plane("shield")
    front = Front(p.scheduler)
    answered = Counter()

    async def reached(scope, receive, send):
        raise AssertionError("an unknown key reached vLLM")

    middleware = IdentityMiddleware(reached)
    middleware._live = LiveConfig(config_path(p.scheduler.vllm_config))

    async def send(message):
        if message["type"] == "http.response.start":
            answered[message["status"]] += 1

    async def made_up(numbers):
        for number in numbers:
            headers = [
                (b"authorization", b"Bearer sk-%d" % number),
                (b"x-prefixshield-group", b"group-%d" % number),
            ]
            scope = {"type": "http", "method": "POST", "path": "/v1/completions"}
            await middleware({**scope, "headers": headers}, None, send)
            salt = f"group-{number}.{number}"
            p.add(
                make_request(
                    str(number),
                    range(BLOCK_SIZE + 1),
                    block_size=BLOCK_SIZE,
                    salt=salt,
                    max_tokens=1,
                )
            )
            if number % 100 < 99:
                continue
            p.run()
            # What the test itself keeps of a request.
            for kept in (p.block_tables, p.outputs, p.cached_tokens, p.finished, front.events):
                kept.clear()

    asyncio.run(made_up(range(1000)))
    labels = set(front.counts) | set(front.gauges)
    before = objects()
    asyncio.run(made_up(range(1000, 10_000)))
    grown = objects() - before
    assert answered == {401: 10_000}
    assert set(front.counts) | set(front.gauges) == labels
    assert {key[1] for key in labels if len(key) > 1} == {"attacker"}
    assert grown < 900, f"{grown} objects more after 9,000 made-up names"


def objects():
    """How many small objects Python has allocated, a string in a table of names included."""
    gc.collect()
    return sys.getallocatedblocks()


def test_labels_are_bounded_for_ever():
    labels = GroupLabels(f"g{number}" for number in range(MAX_GROUP_LABELS - 1))
    labels.admit(["late", "too-late"])
    assert labels("late") == "late"
    assert labels("too-late") == labels("never-configured") == OTHER
    assert len(labels.own) == MAX_GROUP_LABELS


def test_counts_are_as_many_as_labels_however_many_groups_there_are():
    """What the report looks through ten times a second does not grow with the groups."""
    names = [f"g{number}" for number in range(500)]
    policy = build_policy("lru", PolicySetup(500, {"c": Contract(1.0, 1.0)}, names))
    driver = PolicyDriver(policy, Identity("g0", "c"), label=GroupLabels(names[:3]))
    for number, name in enumerate(names):
        access = driver.access(Identity(name, "c"))
        driver.allocate_for(lambda access=access: access)
        driver.materialised([number], [], access)
        driver.evicted([number])
    assert driver.counts["materialised", "g2"] == driver.counts["lost", "g2", "order"] == 1
    assert driver.counts["materialised", OTHER] == 497
    assert driver.counts["evicted", OTHER, OTHER] == 497
    pairs = {key[1:] for key in driver.counts if key[0] == "evicted"}
    assert pairs == {(label, label) for label in ("g0", "g1", "g2", OTHER)}
    assert len(driver.counts) == 4 * 3 + 1, "materialised, evicted, lost; fallbacks"
