"""The real engine, model included: same tokens under every policy, protection, fail-safe."""

import gc
import random

import pytest

pytest.importorskip("vllm")

from control_plane import Front, count_events
from vllm import LLM, SamplingParams, TokensPrompt

from prefixshield.config import load_config
from prefixshield.policies.adaptive import AdaptiveShield
from prefixshield.serving.namespace import Identity, Namespaces
from prefixshield.serving.tiny_model import tokenizer_of
from prefixshield.serving.wiring import SCHEDULER

pytestmark = pytest.mark.engine

CONFIG = """
policy: {policy}
preset: {preset}
contracts:
  big: {{refill_rate: 1000, burst: 1000}}
  small: {{refill_rate: 0.5, burst: 8}}
groups:
  victim: {{contract: big}}
  attacker: {{contract: small}}
default_group: attacker
namespace_secret: for tests
"""

NATIVE = {"policy": None, "scheduler": None}
LRU = {"policy": "lru", "preset": "default", "scheduler": SCHEDULER}
SHIELD = {**LRU, "policy": "shield"}
PAPER = {**SHIELD, "preset": "paper"}
ASYNC = {**SHIELD, "scheduler": "async_scheduling.build_async_scheduler"}


@pytest.fixture
def engine(tiny_model, tmp_path, monkeypatch):
    """Start an engine in this process: ``engine(NATIVE | LRU | SHIELD | ..., **options)``."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def start(how, **options):
        wiring = {}
        if how["policy"] is not None:
            path = tmp_path / "config.yaml"
            path.write_text(CONFIG.format(**how))
            wiring = {
                "scheduler_cls": how["scheduler"],
                "additional_config": {"prefixshield": str(path)},
            }
        return LLM(
            str(tiny_model),
            load_format="dummy",
            dtype="float32",
            block_size=32,
            num_gpu_blocks_override=options.pop("num_blocks", 129),
            enforce_eager=True,
            max_model_len=2048,
            skip_tokenizer_init="tokenizer" not in options,
            seed=0,
            **wiring,
            **options,
        )

    return start


def scheduler_of(llm):
    return llm.llm_engine.engine_core.engine_core.scheduler


def tokens_of(llm, prompts, parameters):
    outputs = llm.generate(prompts, parameters, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def salts(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG.format(**SHIELD))
    config = load_config(path)
    namespaces = Namespaces.of(config, path)
    return namespaces.token(Identity("victim", "big")), namespaces.token(
        Identity("attacker", "small")
    )


def mixed_prompts(tmp_path):
    """Shared and unseen prefixes of two tenants, more than the pool holds."""
    r = random.Random(3)
    victim, attacker = salts(tmp_path)
    prefixes = [[r.randrange(5, 2000) for _ in range(700)] for _ in range(3)]
    prompts = []
    for number in range(36):
        if number % 2:
            ids = [r.randrange(5, 2000) for _ in range(r.randrange(200, 900))]
        else:
            ids = prefixes[r.randrange(3)] + [r.randrange(5, 2000) for _ in range(40)]
        prompts.append(
            TokensPrompt(prompt_token_ids=ids, cache_salt=attacker if number % 2 else victim)
        )
    return prompts


def test_tokens_are_the_same_under_every_policy(engine, tmp_path):
    prompts = mixed_prompts(tmp_path)
    parameters = SamplingParams(max_tokens=40, ignore_eos=True, detokenize=False, temperature=0.0)
    results = {}
    ways = {"native": NATIVE, "lru": LRU, "shield": SHIELD, "paper": PAPER, "async": ASYNC}
    for name, how in ways.items():
        llm = engine(how, max_num_batched_tokens=512, max_num_seqs=8)
        results[name] = tokens_of(llm, prompts, parameters)
        if how["policy"]:
            scheduler = scheduler_of(llm)
            evicted = [n for key, n in scheduler.driver.counts.items() if key[0] == "evicted"]
            assert sum(evicted) > 50, "the pool was never under pressure"
            assert not scheduler.driver.failed
            assert isinstance(scheduler.driver.policy, AdaptiveShield) == (
                name in ("shield", "async")
            )
            assert ("Async" in type(scheduler).__name__) == (name == "async")
        del llm
        gc.collect()
    for name in ways:
        assert results[name] == results["native"], name


def test_chunks_sleep_and_resets_change_no_token(engine, tmp_path):
    prompts = mixed_prompts(tmp_path)[:16]
    parameters = SamplingParams(max_tokens=40, ignore_eos=True, detokenize=False, temperature=0.0)
    options = {"max_num_batched_tokens": 256, "max_num_seqs": 8}
    expected = tokens_of(engine(NATIVE, **options), prompts, parameters)
    gc.collect()
    llm = engine(SHIELD, **options)
    core = llm.llm_engine.engine_core.engine_core
    driver = core.scheduler.driver
    assert tokens_of(llm, prompts, parameters) == expected

    llm.sleep(level=0)
    assert core.is_scheduler_paused()
    llm.wake_up(tags=["scheduling"])
    assert llm.reset_prefix_cache()
    assert driver.candidate_count == 0

    # Preempted and emptied in the midst of it, twice.
    for number, prompt in enumerate(prompts):
        llm.llm_engine.add_request(str(number), prompt, parameters)
    found = {}
    steps = 0
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            if output.finished:
                found[int(output.request_id)] = output.outputs[0].token_ids
        steps += 1
        if steps in (5, 25):
            assert core.scheduler.reset_prefix_cache(reset_running_requests=True)
            assert driver.candidate_count == 0
    assert [found[number] for number in range(len(prompts))] == expected
    assert not driver.failed


def test_embeddings_are_the_same_from_the_cache(engine, tiny_model, tmp_path):
    victim, attacker = salts(tmp_path)
    # vLLM renders for pooling models with a tokenizer or not at all.
    llm = engine(SHIELD, runner="pooling", convert="embed", tokenizer=str(tokenizer_of(tiny_model)))
    driver = scheduler_of(llm).driver

    def embed(salt):
        prompt = TokensPrompt(prompt_token_ids=list(range(5, 205)), cache_salt=salt)
        (output,) = llm.embed(prompt, use_tqdm=False)
        return output.outputs.embedding

    first = embed(victim)
    assert driver.counts["hit_tokens", "victim"] == 0
    assert embed(victim) == pytest.approx(first, abs=1e-5)
    assert driver.counts["hit_tokens", "victim"] == 192
    assert embed(attacker) == pytest.approx(first, abs=1e-5)
    assert driver.counts["hit_tokens", "attacker"] == 0
    assert driver.counts["materialised", "victim"] == 200 // 32


def test_a_flood_empties_native_and_not_the_shield(engine, tmp_path):
    """The headline, offline: hit ratio of a victim with four hot prefixes, three quarters of the pool."""
    victim, attacker = salts(tmp_path)
    parameters = SamplingParams(max_tokens=2, ignore_eos=True, detokenize=False)

    def hit_ratio(how):
        r = random.Random(5)
        llm = engine(how)
        hot = [[r.randrange(5, 2000) for _ in range(24 * 32)] for _ in range(4)]
        hits = queried = 0
        for turn in range(24):
            unseen = [r.randrange(5, 2000) for _ in range(1500)]
            llm.generate(
                TokensPrompt(prompt_token_ids=unseen, cache_salt=attacker),
                parameters,
                use_tqdm=False,
            )
            ids = hot[turn % 4] + [r.randrange(5, 2000) for _ in range(16)]
            (output,) = llm.generate(
                TokensPrompt(prompt_token_ids=ids, cache_salt=victim), parameters, use_tqdm=False
            )
            if turn >= 8:  # every prefix has been seen twice
                hits += output.num_cached_tokens
                queried += len(ids)
        return hits / queried

    native, shield = hit_ratio(NATIVE), hit_ratio(SHIELD)
    assert native < 0.05
    assert shield > native + 0.2


def test_counters_agree_with_vllms_own_events(engine, tmp_path):
    """Chunked prompts of two tenants and a reset of the prefix cache in between."""
    llm = engine(SHIELD, disable_log_stats=False, max_num_batched_tokens=512, max_num_seqs=8)
    front = Front(scheduler_of(llm))
    parameters = SamplingParams(max_tokens=40, ignore_eos=True, detokenize=False)
    prompts = mixed_prompts(tmp_path)
    tokens_of(llm, prompts, parameters)
    assert llm.reset_prefix_cache()
    tokens_of(llm, prompts[::-1], parameters)
    stored, removed = count_events(front.events)
    assert front.total("materialised") == sum(stored.values()) > 500
    assert front.total("evicted") == len(removed) > 100


def test_a_policy_failure_does_not_stop_the_engine(engine, tmp_path, monkeypatch):
    prompts = mixed_prompts(tmp_path)
    parameters = SamplingParams(max_tokens=8, ignore_eos=True, detokenize=False)
    expected = tokens_of(engine(NATIVE), prompts, parameters)
    gc.collect()
    llm = engine(SHIELD)
    driver = scheduler_of(llm).driver

    def broken(*_):
        raise ZeroDivisionError

    monkeypatch.setattr(driver.policy, "evict", broken)
    assert tokens_of(llm, prompts, parameters) == expected
    assert driver.failed
    assert driver.counts["policy_failures",] == 1
    assert driver.counts["fallbacks",] > 0
