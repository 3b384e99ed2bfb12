"""StaticQuota in vLLM's real scheduler, and in the real server over HTTP."""

import logging
import random

import httpx
import pytest

pytest.importorskip("vllm")

from control_plane import (
    BLOCK_SIZE,
    ControlPlane,
    assert_pool_is_sound,
    cache_config,
    engine_config,
    make_request,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.engine import FinishReason
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.structured_output import StructuredOutputManager

from prefixshield.config import load_config
from prefixshield.errors import IncompatibleEngineError
from prefixshield.serving.admission import Admission
from prefixshield.serving.namespace import Identity, Namespaces
from prefixshield.serving.scheduler import build_scheduler

pytestmark = pytest.mark.engine

CONFIG = """
policy: static-quota
contracts: {std: {refill_rate: 1, burst: 4}}
groups:
  a: {contract: std, keys: [sk-a]}
  b: {contract: std, keys: [sk-b]}
default_group: a
"""
NUM_BLOCKS = 65
SHARE = 32  # of 64 usable blocks


@pytest.fixture
def config_path(tmp_path):
    path = tmp_path / "tenants.yaml"
    path.write_text(CONFIG)
    return path


@pytest.fixture
def plane(tiny_model, config_path):
    def build(**options):
        config = engine_config(tiny_model, NUM_BLOCKS, str(config_path), **options)
        return ControlPlane(build_scheduler, config, NUM_BLOCKS)

    return build


@pytest.fixture
def request_of(config_path):
    """Make a request: ``request_of(group, name, first token, blocks, ...)``."""
    token = Namespaces.of(load_config(config_path), config_path).token

    def make(group, name, start, blocks, extra_tokens=0, **options):
        tokens = range(start, start + BLOCK_SIZE * blocks + extra_tokens)
        salt = token(Identity(group, "std"))
        return make_request(name, tokens, block_size=BLOCK_SIZE, salt=salt, **options)

    return make


def group_of(p, request):
    return request.prefixshield.identity.group


def assert_within_shares(p):
    """Count held and cached blocks anew, and compare."""
    manager, driver = p.scheduler.kv_cache_manager, p.scheduler.driver
    assert_pool_is_sound(manager)
    held = {"a": set(), "b": set()}
    for request in p.scheduler.requests.values():
        (blocks,) = manager.get_block_ids(request.request_id)
        held[group_of(p, request)].update(blocks)
    for group, blocks in held.items():
        cached = {
            block.block_id
            for block in p.pool.blocks
            if block.block_hash is not None and driver.owner[block.block_id] == group
        }
        assert driver.shares.held[group] == len(blocks)
        assert driver.shares.resident[group] == len(blocks | cached) <= SHARE


def finish_reasons(p):
    """One step; why requests ended in it."""
    outputs = p.answer(p.schedule())
    return {o.request_id: o.finish_reason for o in outputs if o.finish_reason is not None}


def scheduled(p):
    """One step; which requests took part."""
    p.step()
    assert_within_shares(p)
    return set(p.block_tables[-1])


def test_a_share_leaves_out_vllms_null_block(plane):
    assert plane().scheduler.driver.shares.share_blocks == SHARE


def test_a_borrower_is_capped_at_its_share_and_reclaims_only_its_own(plane, request_of):
    p = plane()
    p.add(request_of("b", "b", 0, 10))
    p.run()
    for number in range(8):
        p.add(request_of("a", f"a{number}", 10_000 * (number + 1), 20, max_tokens=1))
        while p.scheduler.has_unfinished_requests():
            p.step()
            assert_within_shares(p)
    shares = p.scheduler.driver.shares
    assert shares.resident == {"a": SHARE, "b": 10}
    assert p.pool.get_num_free_blocks() == NUM_BLOCKS - 1
    evicted = {key[1:] for key in p.scheduler.driver.counts if key[0] == "evicted"}
    assert evicted == {("a", "a")}
    p.add(request_of("b", "again", 0, 10))
    p.run()
    assert p.cached_tokens["again"] == 9 * BLOCK_SIZE  # the last token is always computed


def test_another_group_never_waits_behind_a_waiting_one(plane, request_of):
    p = plane()
    p.add(request_of("a", "a1", 0, 20, max_tokens=100))
    assert scheduled(p) == {"a1"}
    p.add(request_of("a", "a2", 10_000, 20, max_tokens=8))
    p.add(request_of("b", "b1", 0, 30, max_tokens=8))
    assert scheduled(p) == {"a1", "b1"}, "a2 waits, b1 does not"
    while "a1" not in p.finished:
        assert "a2" not in scheduled(p)
    assert p.finished == ["b1", "a1"]
    p.run()
    assert p.finished == ["b1", "a1", "a2"]
    assert p.preemptions == 0


def test_what_running_requests_may_still_need_is_reserved(plane, request_of):
    """Prompts of 2 x 10 blocks fit at once, but not once they have grown to 20 each."""
    p = plane()
    for name in ("1", "2"):
        grown = request_of("a", name, 10_000 * int(name), 10, max_tokens=10 * BLOCK_SIZE + 1)
        p.add(grown)
    assert scheduled(p) == {"1"}
    p.run()
    assert p.finished == ["1", "2"]
    assert p.preemptions == 0


def test_blocks_that_another_request_holds_already_are_not_counted_twice(plane, request_of):
    p = plane()
    p.add(request_of("a", "1", 0, 25, max_tokens=20))
    assert scheduled(p) == {"1"}
    p.add(request_of("a", "2", 0, 25, extra_tokens=40, max_tokens=20))  # 2 more blocks
    assert scheduled(p) == {"1", "2"}
    assert p.scheduler.driver.shares.held["a"] == 26 + 2
    p.run()


def test_a_small_request_does_not_overtake_a_large_one_of_its_group(plane, request_of):
    p = plane()
    p.add(request_of("a", "running", 0, 20, max_tokens=60))
    p.step()
    p.add(request_of("a", "large", 10_000, 30))
    p.add(request_of("a", "small", 20_000, 2))
    while "running" not in p.finished:
        assert scheduled(p) <= {"running"}
    p.run()
    assert p.finished[1] == "large"


@pytest.mark.parametrize(
    ("blocks", "extra_tokens", "max_tokens", "fits"),
    [
        (SHARE, 0, 1, True),  # the last token is never computed
        (SHARE, 0, 2, False),
        (SHARE, 1, 1, False),
        (SHARE - 1, 0, BLOCK_SIZE + 1, True),
        (SHARE - 1, 0, BLOCK_SIZE + 2, False),
        (1, 0, 1900, False),  # the prompt fits, what may follow does not
    ],
)
def test_what_can_never_fit_fails_at_once(
    plane, request_of, caplog, monkeypatch, blocks, extra_tokens, max_tokens, fits
):
    p = plane()
    p.add(request_of("a", "running", 50_000, 20, max_tokens=50))
    p.step()
    request = request_of("a", "r", 0, blocks, extra_tokens, max_tokens=max_tokens)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.clear()
    p.add(request)
    refused = p.scheduler.driver.counts["refused", "a"]
    if fits:
        assert not refused
        assert not caplog.records
        p.run()
        assert len(p.outputs["r"]) == max_tokens
        return
    assert refused == 1
    assert finish_reasons(p) == {"r": FinishReason.ERROR}, "while another one runs"
    (message,) = {record.getMessage() for record in caplog.records}
    for word in ("request r of group a", f"max_tokens={max_tokens}", f"at most {SHARE}"):
        assert word in message
    p.add(request_of("a", "next", 0, 2))
    p.run()
    assert p.finished == ["running", "next"] or p.finished == ["next", "running"]


def test_streamed_input_is_refused(plane, request_of):
    p = plane()
    request = request_of("b", "r", 0, 1)
    request.resumable = True
    p.add(request)
    assert finish_reasons(p) == {"r": FinishReason.ERROR}
    assert not p.scheduler.has_unfinished_requests()


def test_a_preempted_request_is_judged_again(plane, request_of):
    p = plane()
    p.add(request_of("a", "1", 0, 20, max_tokens=80))
    p.add(request_of("b", "b", 0, 20, max_tokens=80))
    for _ in range(3):
        p.step()
    p.add(request_of("a", "2", 10_000, 20, max_tokens=8))
    p.step()
    assert p.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert_within_shares(p)
    assert p.scheduler.driver.shares.resident.total() == 0
    assert scheduled(p) in ({"1", "b"}, {"2", "b"}), "never both of a"
    p.run()
    assert sorted(p.finished) == ["1", "2", "b"]


@pytest.mark.parametrize("broken", [None, "evict", "release", "materialise"])
@pytest.mark.parametrize("seed", range(4))
def test_random_traffic_ends_and_stays_within_shares(plane, request_of, monkeypatch, seed, broken):
    """Aborts, invalidated blocks, resets, chunks; with a policy that breaks half way, too."""
    p = plane(max_num_batched_tokens=256, max_num_seqs=8)
    driver = p.scheduler.driver
    r = random.Random(seed)
    live, refused, aborted = [], set(), set()

    def step():
        p.step()
        if not driver.failed:
            assert_within_shares(p)
        for group in "ab":
            assert driver.shares.held[group] <= SHARE
        assert p.preemptions == 0

    for number in range(80):
        if number == 40 and broken is not None:
            monkeypatch.setattr(driver.policy, broken, lambda *_: 1 / 0)
        group = r.choice("aaab")
        blocks, extra = r.randrange(0, 26), r.randrange(1, 32)
        name = f"r{number}"
        prefix = r.choice([r.randrange(3), 100 + number])
        limit = r.randrange(1, 500)
        p.add(request_of(group, name, prefix * 10_000, blocks, extra, max_tokens=limit))
        if blocks * BLOCK_SIZE + extra + limit - 1 > SHARE * BLOCK_SIZE:
            refused.add(name)
        live.append(name)
        for _ in range(r.randrange(6)):
            step()
        if r.random() < 0.1:
            name = live.pop(r.randrange(len(live)))
            p.abort(name)
            aborted.add(name)
        if r.random() < 0.1:
            p.scheduler.kv_cache_manager.evict_blocks({r.randrange(1, NUM_BLOCKS)})
    steps = 0
    while p.scheduler.has_unfinished_requests():
        step()
        steps += 1
        assert steps < 20_000, "it hangs"
    assert driver.failed == (broken is not None)
    for name in live:
        assert (not p.outputs[name]) == (name in refused)
    assert sum(n for key, n in driver.counts.items() if key[0] == "refused") == len(refused)
    assert refused - aborted, "none was too large"
    assert driver.shares.held.total() == 0
    assert p.pool.get_num_free_blocks() == NUM_BLOCKS - 1
    assert p.scheduler.reset_prefix_cache()
    assert driver.shares.resident.total() == 0


def test_async_scheduling_takes_no_more_than_was_reserved(tiny_model, config_path, request_of):
    """Two steps in flight, as the engine has; both groups exactly at their shares."""
    config = engine_config(tiny_model, NUM_BLOCKS, str(config_path), max_num_seqs=16)
    config.scheduler_config.async_scheduling = True
    try:
        p = ControlPlane(build_scheduler, config, NUM_BLOCKS)
    finally:
        config.scheduler_config.async_scheduling = False
    assert isinstance(p.scheduler, AsyncScheduler)
    for group in "ab":
        for number in range(6):
            start = 10_000 * (number + 1)
            p.add(request_of(group, f"{group}{number}", start, 7, max_tokens=BLOCK_SIZE + 1))
    in_flight, outputs = [], {}
    for _ in range(2000):
        if not p.scheduler.has_unfinished_requests():
            break
        in_flight.append(p.schedule())
        assert_within_shares(p)
        if len(in_flight) < 2:
            continue
        step = in_flight.pop(0)
        ids = list(step.num_scheduled_tokens)
        answer = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={name: index for index, name in enumerate(ids)},
            sampled_token_ids=[[7] for _ in ids],
        )
        for by_client in p.scheduler.update_from_output(step, answer).values():
            for output in by_client.outputs:
                outputs.setdefault(output.request_id, []).extend(output.new_token_ids)
        assert_within_shares(p)
    assert {len(tokens) for tokens in outputs.values()} == {BLOCK_SIZE + 1}
    assert len(outputs) == 12
    # Four of 8 blocks at a time: all of the share, with nothing to spare.
    assert p.scheduler.driver.shares.resident == {"a": SHARE, "b": SHARE}
    assert not p.scheduler.driver.failed


@pytest.mark.parametrize(
    ("where", "name", "value", "message"),
    [
        ("scheduler", "connector", object(), "a KV connector"),
        ("scheduler", "is_encoder_decoder", True, "an encoder-decoder model"),
        ("scheduler", "hash_block_size", 16, "other than one group of full attention"),
        ("config", "speculative_config", object(), "speculative decoding"),
        ("parallel", "pipeline_parallel_size", 2, "pipeline parallelism"),
        ("manager", "watermark_blocks", 1, "a watermark"),
    ],
)
def test_it_refuses_an_engine_whose_footprints_it_cannot_know(
    plane, monkeypatch, where, name, value, message
):
    scheduler = plane().scheduler
    holder = {
        "scheduler": scheduler,
        "config": scheduler.vllm_config,
        "parallel": scheduler.vllm_config.parallel_config,
        "manager": scheduler.kv_cache_manager,
    }[where]
    monkeypatch.setattr(holder, name, value)
    with pytest.raises(IncompatibleEngineError, match=message):
        Admission(scheduler, scheduler.driver, scheduler.driver.shares)


def test_it_refuses_a_hybrid_model_and_shares_of_nothing(tiny_model, config_path):
    def start(path, sliding_window=None):
        config = engine_config(tiny_model, NUM_BLOCKS, str(path))
        build_scheduler(
            vllm_config=config,
            kv_cache_config=cache_config(NUM_BLOCKS, BLOCK_SIZE, sliding_window),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK_SIZE,
            hash_block_size=BLOCK_SIZE,
        )

    with pytest.raises(IncompatibleEngineError, match="other than one group of full attention"):
        start(config_path, sliding_window=64)
    many = ", ".join(f"g{n}: {{contract: std}}" for n in range(NUM_BLOCKS))
    crowded = config_path.with_name("crowded.yaml")
    crowded.write_text(
        "policy: static-quota\ncontracts: {std: {refill_rate: 1, burst: 4}}\n"
        f"groups: {{{many}}}\ndefault_group: g0\n"
    )
    with pytest.raises(IncompatibleEngineError, match="a share of 0 blocks"):
        start(crowded)


def test_a_server_refuses_what_can_never_fit_and_serves_everybody_else(
    start_server, tiny_model, config_path
):
    server = start_server(
        tiny_model, config_path, ["--num-gpu-blocks-override", str(NUM_BLOCKS)], by_command=True
    )

    def complete(key, tokens, **more):
        return httpx.post(
            f"{server.base_url}/v1/completions",
            headers={"Authorization": f"Bearer {key}"},
            json={"model": "tiny", "prompt": tokens, "max_tokens": 1, **more},
            timeout=60,
        )

    too_large = list(range(5, 5 + SHARE * BLOCK_SIZE + 1))
    answer = complete("sk-a", too_large)
    assert answer.status_code == 500, answer.text
    assert "error" in answer.json()
    streamed = complete("sk-a", too_large, stream=True)
    assert "error" in streamed.text
    for key in ("sk-a", "sk-b"):
        answer = complete(key, too_large[:-1])
        assert answer.status_code == 200, answer.text
    assert complete("sk-b", [5], max_tokens=1500).status_code == 500
    log = server.log_path.read_text()
    assert f"the share of each group is {SHARE} blocks" in log
    assert f"needs {SHARE + 1} blocks of {BLOCK_SIZE} tokens, expected at most {SHARE}" in log
    metrics = httpx.get(f"{server.base_url}/metrics").text
    counted = {
        line.partition('group="')[2][0]: float(line.split()[-1])
        for line in metrics.splitlines()
        if line.startswith("prefixshield_refused_requests_total")
    }
    assert counted == {"a": 2, "b": 1}
    assert server.process.poll() is None
