"""The plug-in inside vLLM's real scheduler: identity, charging, preemption, chunks, failure."""

import logging
import math
import random
from collections import Counter

import pytest

pytest.importorskip("vllm")

import msgspec
from control_plane import (
    BLOCK_SIZE,
    ControlPlane,
    assert_pool_is_sound,
    engine_config,
    make_request,
)
from vllm.distributed.kv_events import BlockStored
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from prefixshield.config import load_config
from prefixshield.core.ledger import Debt
from prefixshield.core.retention import RetentionClass
from prefixshield.errors import ConfigError, IncompatibleEngineError
from prefixshield.evaluation.kv_events import EventBatch, Listener
from prefixshield.policies import POLICIES
from prefixshield.serving import hooks
from prefixshield.serving.namespace import Identity, Namespaces
from prefixshield.serving.scheduler import build_scheduler

pytestmark = pytest.mark.engine

CONFIG = """
policy: {policy}
preset: paper
contracts:
  big: {{refill_rate: 1000, burst: 1000}}
  small: {{refill_rate: 0.001, burst: 4}}
groups:
  victim: {{contract: big, keys: [sk-victim, {{value: sk-victim-batch, contract: small}}]}}
  attacker: {{contract: small, keys: [sk-attacker]}}
  shared: {{contract: small}}
default_group: shared
"""


@pytest.fixture
def write_config(tmp_path):
    def write(policy="shield"):
        path = tmp_path / f"{policy}.yaml"
        path.write_text(CONFIG.format(policy=policy))
        return path

    return write


@pytest.fixture
def plane(tiny_model, write_config):
    """Build a control plane: ``plane(num_blocks, policy, **vLLM options)``; None: native."""

    def build(num_blocks=65, policy="shield", **options):
        if policy is None:
            return ControlPlane(
                Scheduler, engine_config(tiny_model, num_blocks, "", **options), num_blocks
            )
        path = str(write_config(policy))
        config = engine_config(tiny_model, num_blocks, path, **options)
        return ControlPlane(build_scheduler, config, num_blocks)

    return build


@pytest.fixture
def salt(write_config):
    path = write_config()
    config = load_config(path)
    return Namespaces.of(config, path).token


def request(name, tokens, salt=None, **options):
    return make_request(name, tokens, block_size=BLOCK_SIZE, salt=salt, **options)


def counts(plane, name):
    return {key[1:]: n for key, n in plane.scheduler.driver.counts.items() if key[0] == name and n}


VICTIM = Identity("victim", "big")
VICTIM_BATCH = Identity("victim", "small")
ATTACKER = Identity("attacker", "small")


def test_the_token_of_a_key_names_its_group_and_contract(plane, salt):
    p = plane()
    for name, identity in (("1", VICTIM), ("2", VICTIM_BATCH), ("3", ATTACKER)):
        p.add(request(name, range(64), salt(identity)))
        p.run()
    ledger = p.scheduler.driver.policy.ledger
    assert counts(p, "materialised") == {("victim",): 2 + 1, ("attacker",): 2}
    now = p.scheduler.driver.clock()
    # Two contracts, one namespace: the second request of victim hit the first one's block.
    assert p.cached_tokens == {"1": 0, "2": 32, "3": 0}
    assert ledger.account("victim", "small").balance(now) == pytest.approx(4 - 1, abs=0.1)
    assert ledger.account("attacker", "small").balance(now) == pytest.approx(4 - 2, abs=0.1)


def test_a_clients_own_salt_divides_its_namespace_and_nothing_else(plane, salt):
    p = plane()
    p.add(request("1", range(65), salt(VICTIM, "mine")))
    p.add(request("2", range(65), salt(VICTIM_BATCH, "mine")))
    p.run()
    p.add(request("3", range(65), salt(VICTIM, "other")))
    p.add(request("4", range(65), salt(ATTACKER, "mine")))
    p.run()
    assert p.cached_tokens["2"] == 64
    assert p.cached_tokens["3"] == p.cached_tokens["4"] == 0


@pytest.mark.parametrize("forged", [None, "victim", "x.y", "." * 40, "A" * 22 + "." + "B" * 22])
def test_an_unknown_salt_belongs_to_the_default_group(plane, forged):
    p = plane()
    p.add(request("1", range(64), forged))
    p.run()
    assert counts(p, "materialised") == {("shared",): 2}


def test_chunked_prefill_charges_every_block_once_and_decode_as_blocks_fill(plane, salt):
    p = plane(max_num_batched_tokens=64, max_num_seqs=4)
    p.add(request("1", range(32 * 5 + 30), salt(VICTIM), max_tokens=70))
    seen = []
    while p.step():
        seen.append(counts(p, "materialised").get(("victim",), 0))
    # 190 prompt tokens in chunks of 64, then one token a step; the last one is never computed.
    assert seen[:4] == [2, 4, 5, 5]
    assert seen == sorted(seen)
    assert seen[-1] == (190 + 69) // 32


def test_a_named_prefix_is_first_admitted_once_however_many_chunks(plane, salt):
    p = plane(max_num_batched_tokens=64, max_num_seqs=4)
    named = {"extra_args": {"prefixshield_prefix_id": "template"}}
    policy = p.scheduler.driver.policy

    def classes():
        return {
            policy.retention_class(b.block_id) for b in p.pool.blocks if b.block_hash is not None
        }

    p.add(request("1", range(200), salt(VICTIM), max_tokens=1, **named))
    p.run()
    assert classes() == {RetentionClass.PROBATIONARY}
    p.add(request("2", range(1000, 1200), salt(VICTIM), max_tokens=1, **named))
    p.run()
    assert classes() == {RetentionClass.PROBATIONARY, RetentionClass.NORMAL}


def test_another_requests_hit_promotes_and_a_preempted_ones_own_does_not(plane, salt):
    p = plane()
    policy = p.scheduler.driver.policy
    first = request("1", range(96), salt(VICTIM), max_tokens=8)
    p.add(first)
    p.step()
    p.step()
    p.scheduler.reset_prefix_cache()  # fails: blocks are held
    running = p.scheduler.running.pop()
    p.scheduler._preempt_request(running, 0.0)
    p.run()
    assert first.num_preemptions == 1
    assert counts(p, "promoted") == {}
    hits = counts(p, "hit_tokens")
    p.add(request("2", range(96), salt(VICTIM)))
    p.run()
    assert counts(p, "promoted") == {("victim",): 2}
    assert sum(counts(p, "hit_tokens").values()) == sum(hits.values()) + 64
    assert RetentionClass.REUSE in map(policy.retention_class, range(65))


def test_a_debtor_is_not_promoted(plane, salt):
    p = plane()
    for name in ("1", "2"):
        p.add(request(name, range(32 * 6), salt(ATTACKER)))  # 6 blocks, burst 4
        p.run()
    assert p.cached_tokens["2"] == 32 * 5
    assert counts(p, "promoted") == {}


def test_preempted_requests_are_charged_for_what_they_lost(plane, salt):
    p = plane(num_blocks=66)
    # Two requests of 16 blocks each that grow to 40: more than 65 together.
    for name in ("1", "2"):
        start = 1000 * int(name)
        p.add(request(name, range(start, start + 512), salt(ATTACKER), max_tokens=770))
    while p.step():
        assert_pool_is_sound(p.scheduler.kv_cache_manager)
    assert p.preemptions > 0
    assert sorted(p.finished) == ["1", "2"]
    # Each holds (512 + 769) // 32 = 40 full blocks in the end; recomputes come on top.
    materialised = counts(p, "materialised")["attacker",]
    evicted = sum(counts(p, "evicted").values())
    assert materialised > 2 * 40
    assert materialised - evicted == sum(b.block_hash is not None for b in p.pool.blocks)


def test_an_aborted_request_stays_charged_and_its_blocks_stay_cached(plane, salt):
    p = plane()
    p.add(request("1", range(96), salt(VICTIM), max_tokens=50))
    p.step()
    p.abort("1")
    assert_pool_is_sound(p.scheduler.kv_cache_manager)
    assert counts(p, "materialised") == {("victim",): 3}
    p.add(request("2", range(96), salt(VICTIM)))
    p.run()
    assert p.cached_tokens["2"] == 64


def test_a_reset_while_busy_preempts_and_empties(plane, salt):
    p = plane()
    p.add(request("1", range(96), salt(VICTIM), max_tokens=20))
    for _ in range(3):
        p.step()
    assert p.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert_pool_is_sound(p.scheduler.kv_cache_manager)
    assert p.scheduler.driver.policy.candidate_count == 0
    p.run()
    assert p.finished == ["1"]
    assert counts(p, "materialised") == {("victim",): 3 + 3}


def test_a_prompt_logprobs_request_reads_no_cache_and_pays_for_its_copies(plane, salt):
    p = plane()
    p.add(request("1", range(96), salt(VICTIM)))
    p.run()
    p.add(request("2", range(96), salt(VICTIM), prompt_logprobs=1))
    p.step()
    assert counts(p, "materialised") == {("victim",): 6}
    assert counts(p, "query_tokens") == {("victim",): 96}, "it is no query"


def traffic(salt, seed, identities=(VICTIM, ATTACKER, ATTACKER, VICTIM_BATCH)):
    """Requests of tenants; the attacker's prefixes are all unseen."""
    r = random.Random(seed)
    script = []
    for number in range(60):
        identity = r.choice(identities)
        prefix = r.randrange(4) if identity != ATTACKER else 100 + number
        length = r.randrange(20, 600)
        tokens = [prefix * 1000 + i for i in range(length)]
        script.append((f"r{number}", tokens, salt(identity), r.randrange(1, 60)))
    return script


def drive(p, script, seed, after_step=lambda: None):
    """Submit, step and abort at random; the same calls for the same seed."""
    r = random.Random(seed)
    live = []
    for name, tokens, token, max_tokens in script:
        p.add(request(name, tokens, token, max_tokens=max_tokens))
        live.append(name)
        for _ in range(r.randrange(4)):
            p.step()
            after_step()
        if r.random() < 0.1:
            p.abort(live.pop(r.randrange(len(live))))
    while p.scheduler.has_unfinished_requests():
        p.step()
        after_step()
    return p


@pytest.mark.parametrize("seed", range(4))
def test_lru_schedules_what_native_schedules(plane, salt, seed):
    """Every block table of every step is that of the unmodified vLLM."""
    script = traffic(salt, seed, (VICTIM, ATTACKER))
    native = drive(plane(policy=None), script, seed)
    ours = drive(plane(policy="lru"), script, seed)
    assert counts(ours, "evicted"), "the pool was never full"
    assert ours.block_tables == native.block_tables
    assert ours.outputs == native.outputs
    assert ours.cached_tokens == native.cached_tokens
    assert ours.preemptions == native.preemptions


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("seed", range(4))
def test_random_traffic_leaves_nothing_behind(plane, salt, policy, seed):
    if policy == "static-quota" and not hasattr(Scheduler, "_handle_blocked_waiting_request"):
        with pytest.raises(IncompatibleEngineError, match=r"static-quota needs vLLM 0\.31\.0"):
            plane(policy=policy)
        return
    p = plane(policy=policy)
    drive(
        p,
        traffic(salt, seed),
        seed,
        after_step=lambda: assert_pool_is_sound(p.scheduler.kv_cache_manager),
    )
    assert p.pool.get_num_free_blocks() == p.pool.num_gpu_blocks - 1
    assert not p.scheduler.driver.failed
    assert p.scheduler.kv_cache_manager.reset_prefix_cache()


def test_kv_events_tell_who_creates_what(plane, salt, write_config):
    """Whenever one begins to listen: each event names who pays, not only a chain's first one."""
    if "session_id" not in BlockStored.__struct_fields__:
        pytest.skip("the events of this vLLM name no session")
    p = plane(max_num_batched_tokens=64, max_num_seqs=4)
    path = write_config()
    namespaces = Namespaces.of(load_config(path), path)
    decode = msgspec.msgpack.Decoder(EventBatch).decode
    listener, late = Listener(namespaces), Listener(namespaces)
    before, batches = Counter(), []

    def publish(batch):
        batches.append(decode(msgspec.msgpack.encode(batch)))
        listener.feed(len(batches), batches[-1], 0.0)
        if len(batches) > 40:
            late.feed(len(batches), batches[-1], 0.0)
        else:
            before.clear()
            before.update(counts(p, "materialised"))

    p.pool.enable_kv_cache_events = True
    p.scheduler.kv_event_publisher.publish = publish
    drive(p, traffic(salt, 3), 3)
    driver = Counter(counts(p, "materialised"))
    for fed, expected in ((listener, driver), (late, driver - before)):
        fed.end(1.0)
        created = Counter()
        for creation in fed.creations:
            created[creation.group,] += creation.blocks
        assert created == expected
        assert {(c.group, c.contract) for c in fed.creations} == {VICTIM, VICTIM_BATCH, ATTACKER}
        assert fed.strangers == fed.missing_batches == 0
    assert before.total() > 0


@pytest.mark.parametrize("method", ["materialise", "hit", "hold", "release", "evict"])
@pytest.mark.parametrize("when", [0, 5])
def test_a_policy_that_raises_costs_protection_and_nothing_else(
    plane, salt, caplog, monkeypatch, method, when
):
    script = traffic(salt, 1)
    p = plane()
    driver = p.scheduler.driver
    calls = [0]
    sound = getattr(driver.policy, method)

    def broken(*arguments):
        calls[0] += 1
        if calls[0] > when:
            raise RuntimeError("a bug")
        return sound(*arguments)

    monkeypatch.setattr(driver.policy, method, broken)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with caplog.at_level(logging.ERROR, logger="vllm.prefixshield"):
        drive(p, script, 1, lambda: assert_pool_is_sound(p.scheduler.kv_cache_manager))
    assert driver.failed
    assert driver.counts["policy_failures",] == 1
    assert driver.counts["fallbacks",] > 0
    assert "native order" in caplog.text
    assert p.pool.get_num_free_blocks() == p.pool.num_gpu_blocks - 1
    # A reset gives the policy another chance.
    monkeypatch.setattr(driver.policy, method, sound)
    assert p.scheduler.reset_prefix_cache()
    assert not driver.failed
    drive(p, [(f"again-{n}", *rest) for n, *rest in script], 2)
    assert not driver.failed


def test_a_policy_whose_promotions_make_no_sense_is_not_believed(plane, salt, monkeypatch):
    p = plane()
    monkeypatch.setattr(p.scheduler.driver.policy, "hit", lambda blocks, access: 7)
    for name in ("1", "2"):
        p.add(request(name, range(96), salt(VICTIM)))
        p.run()
    assert p.scheduler.driver.failed
    assert p.finished == ["1", "2"]


@pytest.mark.parametrize(
    "answer",
    [
        lambda victims, held: victims[:-1],
        lambda victims, held: [*victims, victims[0]],
        lambda victims, held: [victims[0]] * len(victims),
        lambda victims, held: [held, *victims[1:]],
        lambda victims, held: [10**9, *victims[1:]],
        lambda victims, held: [-1, *victims[1:]],
        lambda victims, held: ["7", *victims[1:]],
        lambda victims, held: 7,
    ],
    ids=["few", "many", "twice", "held", "beyond", "negative", "text", "number"],
)
def test_a_policy_that_answers_nonsense_is_not_believed(plane, salt, monkeypatch, answer):
    p = plane(num_blocks=66)
    driver = p.scheduler.driver
    p.add(request("hold", range(90_000, 90_064), salt(VICTIM), max_tokens=500))
    p.step()
    held = p.scheduler.kv_cache_manager.get_block_ids("hold")[0][0]
    sound = driver.policy.evict
    monkeypatch.setattr(driver.policy, "evict", lambda n, access: answer(sound(n, access), held))
    for number in range(6):
        start = 1000 * number
        p.add(request(f"r{number}", range(start, start + 800), salt(ATTACKER), max_tokens=2))
        for _ in range(4):
            p.step()
            assert_pool_is_sound(p.scheduler.kv_cache_manager)
    assert driver.failed
    p.run()
    assert len(p.finished) == 7


@pytest.mark.parametrize("causes", [7, [("debt",)], [("debt", 1)], [("debt", "all")]])
def test_a_policy_whose_causes_make_no_sense_is_not_believed(plane, salt, monkeypatch, causes):
    p = plane(num_blocks=66)
    driver = p.scheduler.driver
    sound = driver.policy.evict

    def evict(count, access):
        victims = sound(count, access)
        driver.policy.causes = causes
        return victims

    monkeypatch.setattr(driver.policy, "evict", evict)
    for number in range(6):
        start = 1000 * number
        p.add(request(f"r{number}", range(start, start + 800), salt(ATTACKER), max_tokens=2))
        p.run()
        assert_pool_is_sound(p.scheduler.kv_cache_manager)
    assert driver.failed
    assert len(p.finished) == 6


@pytest.mark.parametrize(
    ("method", "answer"),
    [
        ("debts", {"attacker": Debt(math.nan, math.inf)}),
        ("debts", 7),
        ("resident_blocks", {"attacker": 3}),
        ("remembered", {"attacker": "many"}),
    ],
)
def test_a_policy_whose_figures_make_no_sense_costs_the_metrics_alone(
    plane, salt, monkeypatch, caplog, method, answer
):
    p = plane()
    monkeypatch.setattr(p.scheduler.driver.policy, method, lambda *arguments: answer)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with caplog.at_level(logging.ERROR, logger="vllm.prefixshield"):
        p.add(request("r", range(96), salt(ATTACKER)))
        p.run()
    assert p.finished == ["r"]
    assert "metrics are not reported" in caplog.text


def test_the_class_that_vllm_would_choose(tiny_model, write_config):
    path = str(write_config())
    config = engine_config(tiny_model, 65, path)
    assert not config.scheduler_config.async_scheduling, "the CPU platform switches it off"
    assert not isinstance(ControlPlane(build_scheduler, config, 65).scheduler, AsyncScheduler)
    config.scheduler_config.async_scheduling = True
    try:
        assert isinstance(ControlPlane(build_scheduler, config, 65).scheduler, AsyncScheduler)
    finally:
        config.scheduler_config.async_scheduling = False


def test_it_refuses_what_it_does_not_understand(tiny_model, tmp_path, write_config, monkeypatch):
    def start(additional, **options):
        ControlPlane(build_scheduler, engine_config(tiny_model, 65, additional, **options), 65)

    with pytest.raises(IncompatibleEngineError, match="prefix caching is off"):
        start(str(write_config()), enable_prefix_caching=False)
    with pytest.raises(IncompatibleEngineError, match="--additional-config"):
        start("")
    with pytest.raises(ConfigError, match=r"gone\.yaml: cannot be read"):
        start(str(tmp_path / "gone.yaml"))
    with monkeypatch.context() as patch:
        patch.setattr(hooks, "installed_vllm", lambda: ("vllm", "0.99.0"))
        with pytest.raises(IncompatibleEngineError, match=r"vllm 0\.99\.0 is installed"):
            start(str(write_config()))
    with monkeypatch.context() as patch:
        patch.setattr(hooks, "mismatches", lambda *_: ["touch is not there"])
        with pytest.raises(IncompatibleEngineError, match="was changed: touch is not there"):
            start(str(write_config()))


def test_a_pool_of_another_class_is_refused(tiny_model, write_config, monkeypatch):
    from vllm.v1.core import kv_cache_coordinator

    class Other(kv_cache_coordinator.BlockPool):
        pass

    monkeypatch.setattr(kv_cache_coordinator, "BlockPool", Other)
    with pytest.raises(IncompatibleEngineError, match="a block pool of its own"):
        ControlPlane(build_scheduler, engine_config(tiny_model, 65, str(write_config())), 65)
