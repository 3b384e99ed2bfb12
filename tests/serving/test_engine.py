"""The real engine, model included: same tokens under every policy, protection, fail-safe."""

import gc
import random

import pytest

pytest.importorskip("vllm")

import torch
from control_plane import Front, assert_pool_is_sound, count_events
from llvmlite.binding import ffi
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.v1.core.kv_cache_utils import get_block_hash

from prefixshield.config import load_config
from prefixshield.policies.adaptive import AdaptiveShield
from prefixshield.serving.hooks import installed_vllm, release_numbers
from prefixshield.serving.namespace import Identity, Namespaces
from prefixshield.serving.tiny_model import tokenizer_of, write_tiny_model
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

NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 3,
}

# n-gram speculation imports numba, whose objects answer to any attribute; in one process with the
# engine, vLLM's CPU build trips over them when it looks through all modules for its kernels.
ffi._lib_fn_wrapper.get = lambda self, key: None


@pytest.fixture
def engine(tiny_model, tmp_path, monkeypatch):
    """Start an engine in this process: ``engine(NATIVE | LRU | SHIELD | ..., **options)``."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def start(how, **options):
        gc.collect()  # an engine that ends later would take the next one's process groups along
        wiring = {}
        if how["policy"] is not None:
            path = tmp_path / "config.yaml"
            path.write_text(CONFIG.format(**how))
            wiring = {
                "scheduler_cls": how["scheduler"],
                "additional_config": {"prefixshield": str(path)},
            }
        return LLM(
            str(options.pop("model", tiny_model)),
            load_format=options.pop("load_format", "dummy"),
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

    def reset(step):  # preempted and emptied in the midst of it, twice
        if step in (5, 25):
            assert core.scheduler.reset_prefix_cache(reset_running_requests=True)
            assert driver.candidate_count == 0

    assert stepwise(llm, prompts, parameters, reset) == expected
    assert not driver.failed


def stepwise(llm, prompts, parameters, after_step):
    """Tokens of all prompts, in their order; ``after_step(number)`` looks between two steps."""
    for number, prompt in enumerate(prompts):
        llm.llm_engine.add_request(str(number), prompt, parameters)
    found = {}
    steps = 0
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            if output.finished:
                found[int(output.request_id)] = output.outputs[0].token_ids
        steps += 1
        after_step(steps)
    return [found[number] for number in range(len(prompts))]


@pytest.mark.skipif(
    release_numbers(installed_vllm()[1]) < (0, 31),
    reason="before 0.31.0 vLLM's CPU build itself fails: it takes numba's objects for kernels",
)
def test_drafts_change_no_token_and_only_verified_blocks_are_charged(engine, tmp_path):
    """N-gram speculation, under preemption and eviction."""
    prompts = mixed_prompts(tmp_path)[:16]
    parameters = SamplingParams(max_tokens=50, ignore_eos=True, detokenize=False, temperature=0.0)
    options = {"max_num_batched_tokens": 512, "max_num_seqs": 8}
    without = tokens_of(engine(NATIVE, **options), prompts, parameters)
    gc.collect()
    options["speculative_config"] = NGRAM
    native = tokens_of(engine(NATIVE, **options), prompts, parameters)
    gc.collect()
    llm = engine(SHIELD, disable_log_stats=False, **options)
    scheduler = scheduler_of(llm)
    front = Front(scheduler)
    manager = scheduler.kv_cache_manager

    def look(_):
        assert_pool_is_sound(manager)
        for request in scheduler.running:
            (table,) = manager.get_block_ids(request.request_id)
            for place, block in enumerate(table):
                if key := manager.block_pool.blocks[block].block_hash:
                    assert get_block_hash(key) == request.block_hashes[place], "of verified tokens"

    assert stepwise(llm, prompts, parameters, look) == native == without
    drafted, accepted = (
        sum(m.value for m in llm.get_metrics() if m.name == f"vllm:spec_decode_num_{what}_tokens")
        for what in ("draft", "accepted")
    )
    assert drafted - 10 > accepted > 100
    stored, removed = count_events(front.events)
    assert front.total("materialised") == sum(stored.values()) > 200
    assert front.total("evicted") == len(removed) > 50
    assert not scheduler.driver.failed


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Two sets of weights for the tiny model."""
    folders = []
    for seed in range(2):
        folder = write_tiny_model(tmp_path_factory.mktemp("weights"))
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        weights = {name: w for name, w in model.state_dict().items() if name != "lm_head.weight"}
        for name, weight in weights.items():
            if "proj.weight" in name:
                weight *= 10  # else the answer is the prompt's last token, whatever the weights
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        folders.append(folder)
    return folders


def reload_weights(llm, folder):
    """vLLM's CPU build reloads the embeddings alone: enough to make every cached block stale."""
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})


def test_no_block_of_old_weights_is_hit_after_a_reload(engine, checkpoints, tmp_path):
    old, new = checkpoints
    prompts = mixed_prompts(tmp_path)
    parameters = SamplingParams(max_tokens=8, ignore_eos=True, detokenize=False, temperature=0.0)
    options = {"load_format": "auto", "max_num_batched_tokens": 512, "max_num_seqs": 8}
    llm = engine(NATIVE, model=old, **options)
    reload_weights(llm, new)
    expected = tokens_of(llm, prompts, parameters)
    del llm
    llm = engine(SHIELD, model=old, **options)
    manager = scheduler_of(llm).kv_cache_manager
    driver = scheduler_of(llm).driver
    driver.clock = lambda: 5.0
    before = tokens_of(llm, prompts, parameters)
    assert before != expected
    debts = driver.debts()
    assert debts["attacker"].raw > 100

    def cached_tokens():
        (output,) = llm.generate(prompts[-2], parameters, use_tqdm=False)
        return output.num_cached_tokens

    def nothing_is_left():
        assert +driver.resident == {}
        assert set(driver.owner) == {None}
        assert_pool_is_sound(manager)

    # Asleep: vLLM empties the cache before it hands the weights over.
    llm.sleep(level=1)
    nothing_is_left()
    assert driver.debts() == debts
    reload_weights(llm, new)
    llm.wake_up()
    assert cached_tokens() == 0
    assert tokens_of(llm, prompts, parameters) == expected
    assert_pool_is_sound(manager)
    assert driver.debts()["attacker"].raw > debts["attacker"].raw
    # Awake: the cache has to be emptied by whoever reloads, as without us.
    reload_weights(llm, old)
    assert cached_tokens() > 0
    assert llm.reset_prefix_cache()
    nothing_is_left()
    assert cached_tokens() == 0
    assert tokens_of(llm, prompts, parameters) == before
    assert_pool_is_sound(manager)
    assert not driver.failed


def test_weights_are_reloaded_under_running_requests(engine, checkpoints, tmp_path):
    """They go on where they were, from blocks of the new weights alone, as they do natively."""
    old, new = checkpoints
    prompts = mixed_prompts(tmp_path)[:12]
    parameters = SamplingParams(max_tokens=40, ignore_eos=True, detokenize=False, temperature=0.0)
    found = {}
    for name, how in (("native", NATIVE), ("shield", SHIELD)):
        llm = engine(how, model=old, load_format="auto", num_blocks=600, max_num_seqs=8)
        manager = scheduler_of(llm).kv_cache_manager

        def swap(step, llm=llm, name=name, manager=manager):
            if step == 20:
                assert len(scheduler_of(llm).running) > 4
                llm.sleep(level=1, mode="keep")
                if name == "shield":
                    assert +manager.block_pool.driver.resident == {}
                    assert_pool_is_sound(manager)
                reload_weights(llm, new)
                llm.wake_up()
            if name == "shield":
                assert_pool_is_sound(manager)

        found[name] = stepwise(llm, prompts, parameters, swap)
        del llm, manager, swap
        gc.collect()
    assert found["shield"] == found["native"]


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
