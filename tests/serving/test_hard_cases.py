"""Hard cases on vLLM's real scheduler, KV-cache manager and block pool, without a model."""

import random

import pytest

pytest.importorskip("vllm")

from control_plane import BLOCK_SIZE, assert_pool_is_sound, make_manager, make_request
from hard_plane import (
    ATTACKER,
    DEFAULT,
    LRU,
    NATIVE,
    NATIVE_ORDER,
    PAPER,
    VICTIM,
    VICTIM_BATCH,
    WAYS,
    HardPlane,
    Traffic,
    backed_cache,
    hybrid_cache,
    mamba_cache,
    write_configs,
)

# isort: split
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.pooling_params import PoolingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import Request
from vllm.v1.simple_kv_offload.metadata import SimpleCPUOffloadWorkerMetadata

from prefixshield.core.ledger import Contract
from prefixshield.errors import IncompatibleEngineError
from prefixshield.policies import PolicySetup, build_policy
from prefixshield.serving.driver import PolicyDriver
from prefixshield.serving.namespace import Identity
from prefixshield.serving.pool import ShieldBlockPool, take_over
from prefixshield.serving.scheduler import build_scheduler

pytestmark = pytest.mark.engine

FAKE = {"kv_connector": "FakeConnector", "kv_connector_module_path": "fake_connector"}
NAMES = ["lru", "shadow", "paper", "default"]


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    return write_configs(tmp_path_factory.mktemp("configs"))


@pytest.fixture(scope="module")
def traffic(paths):
    return Traffic(paths[DEFAULT])


@pytest.fixture
def plane(tiny_model, paths):
    """``plane(way, num_blocks, **options)``; way NATIVE: vLLM without the plug-in."""

    def build(way=DEFAULT, num_blocks=65, **options):
        path = None if way is NATIVE else paths[way]
        return HardPlane(tiny_model, path, num_blocks, **options)

    return build


def drive(p, requests, seed=0, aborts=0.0, look_every=1):
    """Submit, step and abort at random; then finish everything and look what is left."""
    r = random.Random(seed)
    for request in requests:
        p.add(request)
        for _ in range(r.randrange(4)):
            step(p)
        if r.random() < aborts:
            p.abort(r.choice(list(p.outputs)))
    while p.scheduler.has_unfinished_requests():
        for _ in range(look_every - 1):
            p.step()
        step(p)
    p.run()
    assert p.pool.get_num_free_blocks() == p.pool.num_gpu_blocks - 1, "a block leaked"
    return p


def step(p):
    p.step()
    if isinstance(p.pool, ShieldBlockPool):
        assert_pool_is_sound(p.manager)
        assert not p.driver.failed


def mixed(traffic, seed, count=40, longest=600, decode=(1, 60)):
    """Requests of two tenants: shared prefixes of one, unseen prompts of the other."""
    r = random.Random(seed)
    requests = []
    for number in range(count):
        identity = r.choice([VICTIM, ATTACKER])
        prefix = r.randrange(4) if identity is not ATTACKER else 100 + number
        tokens = [prefix * 1000 + i for i in range(r.randrange(20, longest))]
        output = r.randrange(*decode)
        requests.append(traffic.request(f"r{number}", tokens, identity, max_tokens=output))
    return requests


def agree(planes):
    """All finished the same requests with the same tokens; in native order, by the same blocks."""
    native = planes[NATIVE]
    for way, p in planes.items():
        assert p.outputs == native.outputs, way
        assert sorted(p.finished) == sorted(native.finished), way
    for way in NATIVE_ORDER:
        assert planes[way].block_tables == native.block_tables
        assert planes[way].cached_tokens == native.cached_tokens


# -- preemption ---------------------------------------------------------------------------------


def test_a_storm_of_preemptions_leaves_everything_right_and_is_no_worse_than_under_lru(
    plane, traffic
):
    preempted = dict.fromkeys(WAYS, 0)
    for seed in range(2):
        planes = {}
        for way in [NATIVE, *WAYS]:
            p = plane(way, 40, max_num_seqs=16)
            requests = mixed(traffic, seed, count=24, longest=300, decode=(100, 200))
            planes[way] = drive(p, requests, seed, look_every=20)
            if way is not NATIVE:
                preempted[way] += p.preemptions
        agree(planes)
    assert preempted[LRU] > 30, "it was no storm"
    assert preempted[PAPER] <= preempted[LRU]
    assert preempted[DEFAULT] <= preempted[LRU]


# -- async scheduling ---------------------------------------------------------------------------


def test_async_scheduling_with_deferred_frees(plane, traffic):
    """A KV connector that loads makes vLLM keep the blocks of aborted requests for a step."""
    planes = {}
    for way in [NATIVE, *WAYS]:
        p = plane(way, 66, ahead=True, connector=FAKE)
        deferred = watch_deferred(p)
        planes[way] = drive(p, mixed(traffic, 1, decode=(1, 120)), 1, aborts=0.3, look_every=5)
        assert deferred[0], "no free was deferred"
    agree(planes)


def watch_deferred(p):
    """Counts the frees that are put off."""
    count = [0]
    queue = p.scheduler.deferred_frees

    class Watched(type(queue)):
        def append(self, item):
            count[0] += 1
            super().append(item)

    p.scheduler.deferred_frees = Watched(queue)
    return count


# -- speculative decoding -----------------------------------------------------------------------


def ngram(p, drafts=3):
    p.drafts = drafts
    return p


NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}


def test_speculative_decoding_is_charged_for_verified_blocks_only(plane, traffic):
    p = ngram(plane(DEFAULT, 129, speculative_config=NGRAM))
    lengths = (40, 64, 95)
    for number, length in enumerate(lengths):
        start = 1000 * number
        p.add(traffic.request(str(number), range(start, start + length), max_tokens=150))
    while p.scheduler.has_unfinished_requests():
        step(p)
    assert p.accepted > 50, "no draft was ever accepted"
    # The last token of each is sampled and never computed; or, drafted, it may be.
    at_least = sum((length + 149) // BLOCK_SIZE for length in lengths)
    at_most = sum((length + 150) // BLOCK_SIZE for length in lengths)
    assert at_least <= p.counts("materialised")["victim",] <= at_most
    cached = sum(block.block_hash is not None for block in p.pool.blocks)
    assert p.counts("materialised")["victim",] == cached


def test_speculative_decoding_schedules_what_native_schedules(plane, traffic):
    planes = {}
    for way in [NATIVE, *WAYS]:
        p = ngram(plane(way, 66, speculative_config=NGRAM, max_num_seqs=8))
        planes[way] = drive(p, mixed(traffic, 3, count=24, decode=(1, 200)), 3, aborts=0.1)
        assert p.accepted
    agree(planes)


# -- what else enters the hash ------------------------------------------------------------------


def test_adapters_do_not_share_and_survive_the_rehash_of_a_keys_own_contract(plane, traffic):
    p = plane()

    def serve(name, adapter, identity):
        request = traffic.request(name, range(97), identity)
        request.lora_request = LoRARequest(adapter, ord(adapter), "none") if adapter else None
        request.block_hashes = []
        request.update_block_hashes()
        p.add(request)
        p.run()
        return p.cached_tokens[name]

    assert serve("1", "a", VICTIM) == 0
    assert serve("2", "b", VICTIM) == 0
    assert serve("3", None, VICTIM) == 0
    # Another contract of the group: hashed again in the scheduler, the adapter still in it.
    assert serve("4", "a", VICTIM_BATCH) == 96
    assert serve("5", "b", VICTIM_BATCH) == 96
    assert serve("6", "c", VICTIM_BATCH) == 0
    assert serve("7", "a", ATTACKER) == 0


def test_images_are_part_of_the_hash_and_of_what_is_charged():
    """Two prompts of the same tokens with other images share only what precedes the image."""
    manager, driver = taken_over(make_manager(33, 4))

    def serve(name, image, group="a"):
        place = PlaceholderRange(offset=9, length=6)
        feature = MultiModalFeatureSpec(
            data=None, modality="image", identifier=image, mm_position=place
        )
        request = Request(
            request_id=name,
            prompt_token_ids=list(range(25)),
            sampling_params=make_request("x", [1]).sampling_params,
            pooling_params=None,
            mm_features=[feature],
            cache_salt=group,
            block_hasher=get_request_block_hasher(4, sha256),
        )
        return complete(manager, request)

    assert serve("1", "cat") == 0
    assert serve("2", "cat") == 24
    assert serve("3", "dog") == 8
    assert serve("4", "dog") == 24
    assert serve("5", "cat", "b") == 0
    assert sum(n for key, n in driver.counts.items() if key[0] == "materialised") == 6 + 4 + 6
    assert_pool_is_sound(manager)


def test_a_prefix_that_ends_inside_a_block_hits_the_whole_blocks_before(plane, traffic):
    for way in [NATIVE, *WAYS]:
        p = plane(way)
        p.add(traffic.request("1", range(100)))
        p.run()
        p.add(traffic.request("2", [*range(80), *range(900, 950)]))
        p.run()
        assert p.cached_tokens["2"] == 64
    assert p.counts("materialised") == {("victim",): 3 + 2}


# -- several KV-cache groups --------------------------------------------------------------------


def taken_over(manager, policy="shield", preset="default", blocks=None):
    contracts = {"c": Contract(1.0, 4.0)}
    setup = PolicySetup(manager.block_pool.num_gpu_blocks, contracts, ["a", "b"], preset)
    driver = PolicyDriver(build_policy(policy, setup), Identity("a", "c"), lambda: 0.0)
    take_over(manager, driver)
    return manager, driver


def complete(manager, request):
    """A request from start to end; how many tokens hit."""
    blocks, hit, _ = manager.get_computed_blocks(request)
    count = request.num_tokens - hit
    assert manager.allocate_slots(request, count, hit, blocks) is not None
    request.num_computed_tokens = request.num_tokens
    manager.free(request)
    return hit


def uneven_manager(num_blocks=129):
    """Full attention in blocks of 64, a sliding window in blocks of 32: hashes of 32.

    With EAGLE, whose lookups make vLLM cache the last block of a prompt before it is full.
    """
    return KVCacheManager(
        hybrid_cache(num_blocks, full=64, window=32),
        max_model_len=10_000,
        scheduler_block_size=64,
        hash_block_size=32,
        use_eagle=True,
    )


@pytest.mark.parametrize(("policy", "preset"), [way[:2] for way in (LRU, PAPER, DEFAULT)])
def test_a_block_that_is_cached_before_it_is_full_is_charged_once(policy, preset):
    manager, driver = taken_over(uneven_manager(), policy, preset)

    def charged():
        return sum(n if k[0] == "materialised" else -n for k, n in driver.counts.items())

    def cached():
        return sum(block.block_hash is not None for block in manager.block_pool.blocks)

    request = make_request("1", range(170), block_size=32, max_tokens=300)  # 2 x 64, 32 and a rest
    blocks, hit, _ = manager.get_computed_blocks(request)
    assert manager.allocate_slots(request, 170, hit, blocks) is not None
    request.num_computed_tokens = 170
    assert charged() == cached()
    before = charged()
    for token in range(60):  # its third block of 64 becomes full
        request.append_output_token_ids(token)
        manager.allocate_slots(request, 1)
        request.num_computed_tokens += 1
        assert_pool_is_sound(manager)
    assert charged() > before
    assert not driver.failed
    manager.free(request)
    assert_pool_is_sound(manager)
    again = make_request("2", range(170), block_size=32)
    assert complete(manager, again) == 64  # EAGLE drops the last block of a hit
    assert_pool_is_sound(manager)
    for number in range(3, 60):
        complete(manager, make_request(str(number), range(number * 1000, number * 1000 + 170)))
        assert_pool_is_sound(manager)
    assert manager.block_pool.get_num_free_blocks() == manager.block_pool.num_gpu_blocks - 1
    assert not driver.failed


@pytest.mark.parametrize("sizes", [(32, 32), (64, 32)], ids=["even", "uneven"])
def test_hybrid_models_under_the_scheduler(plane, traffic, sizes):
    planes = {}
    for way in [NATIVE, *WAYS]:
        p = plane(way, 99, cache=hybrid_cache(99, *sizes))
        planes[way] = drive(p, mixed(traffic, 5, decode=(1, 120)), 5, aborts=0.1)
    agree(planes)
    assert planes[LRU].counts("evicted")


# -- KV connectors ------------------------------------------------------------------------------


def loading(traffic, name, tokens, stored, identity=VICTIM, is_async=False, **options):
    """A request of which a connector has the first ``stored`` tokens."""
    parameters = {"external_tokens": stored, "is_async": is_async}
    return traffic.request(
        name, tokens, identity, extra_args={"kv_transfer_params": parameters}, **options
    )


def balance(p, identity):
    policy = p.driver.policy
    return policy.ledger.account(identity.group, identity.contract).balance(policy.ledger.time)


@pytest.mark.parametrize("way", [PAPER, DEFAULT])
def test_blocks_that_a_connector_loads_are_charged_as_they_land(plane, traffic, way):
    p = plane(way, connector=FAKE)
    p.lands = False
    p.add(loading(traffic, "1", range(200), 128, is_async=True))
    step(p)
    assert p.counts("materialised") == {}, "nothing has landed"
    assert p.pool.get_num_free_blocks() < 64, "but its place is held"
    p.lands = True
    step(p)
    step(p)
    assert p.counts("materialised") == {("victim",): 200 // 32}
    p.run()
    # One that the engine waits for is charged when it is scheduled.
    p.add(loading(traffic, "2", range(1000, 1200), 128))
    p.step()
    assert p.counts("materialised") == {("victim",): 2 * (200 // 32)}
    p.run()
    assert_pool_is_sound(p.manager)


@pytest.mark.parametrize("way", WAYS, ids=NAMES)
def test_a_failed_load_gives_the_charge_back(plane, traffic, way):
    p = plane(way, connector=FAKE | {"kv_load_failure_policy": "fail"})
    p.driver.clock = lambda: 5.0
    p.add(traffic.request("before", range(32), ATTACKER))  # one block of its own, cached before
    p.run()
    p.add(loading(traffic, "1", range(200), 128, ATTACKER))
    scheduled = p.schedule()  # by hand: the failure is reported with the answer of this step
    held = p.manager.get_block_ids("1")[0]
    if way != LRU:
        assert balance(p, ATTACKER) == 4 - 1 - 5
    p.in_flight.append((scheduled, {"1": True}))
    p.invalid_blocks = {held[2]}
    p._answer_oldest()
    assert p.finished == ["before", "1"]
    assert_pool_is_sound(p.manager)
    assert not p.driver.failed
    # Blocks 0 (hit) and 1 (loaded) are right and stay; 2 failed, 3 to 5 were computed on it.
    assert p.counts("materialised") == {("attacker",): 1 + 5}
    assert p.counts("refunded") == {("attacker",): 4}
    if way != LRU:
        assert balance(p, ATTACKER) == 4 - 1 - 1
    p.add(traffic.request("2", range(200), ATTACKER))
    p.run()
    assert p.cached_tokens["2"] == 64
    assert p.pool.get_num_free_blocks() == 64


def test_a_failed_load_that_is_computed_instead_is_charged_once(plane, traffic):
    p = plane(PAPER, connector=FAKE | {"kv_load_failure_policy": "recompute"})
    p.add(loading(traffic, "1", range(200), 128))
    scheduled = p.schedule()
    p.in_flight.append((scheduled, {"1": True}))
    p.invalid_blocks = {p.manager.get_block_ids("1")[0][1]}
    p._answer_oldest()
    p.run()
    assert p.finished == ["1"]
    assert p.counts("materialised") == {("victim",): 200 // 32}
    assert p.counts("refunded") == {}
    assert_pool_is_sound(p.manager)


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_of_a_load_that_lands_in_part_only_that_is_charged(plane, traffic, policy):
    p = plane(DEFAULT, connector=FAKE | {"kv_load_failure_policy": policy})
    p.lands = False
    p.add(loading(traffic, "1", range(200), 128, is_async=True, max_tokens=1))
    step(p)
    p.lands = True
    p.invalid_blocks = {p.manager.get_block_ids("1")[0][2]}
    step(p)
    p.run()
    assert p.finished == ["1"]
    assert p.counts("materialised") == ({("victim",): 6} if policy == "recompute" else {})
    assert p.counts("refunded") == {}
    assert p.pool.get_num_free_blocks() == 64


def test_random_loads(plane, traffic):
    planes = {}
    for way in [NATIVE, *WAYS]:
        r = random.Random(8)
        requests = []
        for request in mixed(traffic, 8, decode=(1, 120)):
            request.kv_transfer_params = {
                "external_tokens": r.randrange(0, 400),
                "is_async": r.random() < 0.5,
            }
            requests.append(request)
        p = plane(way, 66, connector=FAKE)
        planes[way] = drive(p, requests, 8, aborts=0.2)
    agree(planes)


OFFLOAD = {
    "kv_connector": "SimpleCPUOffloadConnector",
    "kv_connector_extra_config": {"cpu_bytes_to_use": 2**22},
}


class OffloadPlane(HardPlane):
    """Reports the copies of vLLM's own CPU offload as done with the next answer."""

    loaded = 0

    def _connector_output(self, scheduled):
        output = super()._connector_output(scheduled)
        meta = scheduled.kv_connector_metadata
        self.loaded += len(meta.load_gpu_blocks)
        done = {meta.store_event: 1} if meta.store_event >= 0 else {}
        output.kv_connector_worker_meta = SimpleCPUOffloadWorkerMetadata(done)
        output.finished_recving = {
            id_
            for id_ in output.finished_recving
            if id_ in self.scheduler.connector.scheduler_manager._reqs_to_load
        }
        return output


@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
def test_cpu_offload_keeps_its_own_pool_native(tiny_model, paths, traffic, lazy):
    extra = OFFLOAD["kv_connector_extra_config"] | {"lazy_offload": lazy}
    connector = OFFLOAD | {"kv_connector_extra_config": extra}
    for way in WAYS:
        p = OffloadPlane(tiny_model, paths[way], 66, cache=backed_cache(66), connector=connector)
        offload = p.scheduler.connector.scheduler_manager
        assert type(p.pool) is ShieldBlockPool
        assert offload._gpu_block_pool is p.pool
        assert type(offload.cpu_block_pool) is BlockPool
        assert offload.cpu_block_pool is not p.pool
        requests = mixed(traffic, 4, count=60)
        for request in requests:
            p.add(request)
            for _ in range(6):
                step(p)
        while p.scheduler.has_unfinished_requests():
            step(p)
        for _ in range(20):  # copies still under way hold blocks
            p.step()
        assert p.loaded, "nothing ever came back from the CPU"
        assert len(p.finished) == 60
        assert p.pool.get_num_free_blocks() == 65
        assert not p.driver.failed


# -- pause, sleep, reset ------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS, ids=NAMES)
def test_asleep_with_requests_kept_and_awake_again(plane, traffic, way):
    """What EngineCore.sleep does to the scheduler: pause, empty the cache, resume."""
    requests = mixed(traffic, 2, count=8)
    undisturbed = drive(plane(way), mixed(traffic, 2, count=8))
    p = plane(way)
    for request in requests:
        p.add(request)
    for _ in range(5):
        step(p)
    p.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    assert not p.step()
    assert p.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert p.driver.candidate_count == 0
    assert_pool_is_sound(p.manager)
    assert not p.step()
    p.scheduler.set_pause_state(PauseState.UNPAUSED)
    while p.scheduler.has_unfinished_requests():
        step(p)
    assert p.outputs == undisturbed.outputs


@pytest.mark.parametrize("way", WAYS, ids=NAMES)
def test_a_reset_that_fails_because_blocks_are_held_changes_nothing(plane, traffic, way):
    p = plane(way)
    p.add(traffic.request("done", range(96)))
    p.run()
    p.add(traffic.request("busy", range(500, 596), max_tokens=20))
    step(p)
    assert not p.scheduler.reset_prefix_cache()
    assert_pool_is_sound(p.manager)
    p.run()
    p.add(traffic.request("again", range(96)))
    p.run()
    assert p.cached_tokens["again"] == 64
    assert p.scheduler.reset_prefix_cache()
    p.add(traffic.request("after", range(96)))
    p.run()
    assert p.cached_tokens["after"] == 0


def test_a_reset_keeps_debts(plane, traffic):
    p = plane(DEFAULT)
    p.driver.clock = lambda: 5.0
    p.add(traffic.request("1", range(320), ATTACKER))
    p.run()
    assert p.scheduler.reset_prefix_cache()
    assert balance(p, ATTACKER) == 4 - 10


# -- pooling, data parallel ---------------------------------------------------------------------


def test_pooling_requests_are_charged_and_hit(plane, traffic):
    p = plane()

    def embed(name, identity):
        request = traffic.request(name, range(100), identity)
        request.sampling_params, request.pooling_params = None, PoolingParams(task="embed")
        p.add(request)
        p.run()

    embed("1", VICTIM)
    embed("2", VICTIM_BATCH)
    embed("3", ATTACKER)
    assert p.finished == ["1", "2", "3"]
    assert p.counts("materialised") == {("victim",): 3, ("attacker",): 3}
    assert p.counts("hit_tokens") == {("victim",): 96}
    assert p.counts("promoted") == {}, "contracts differ"
    assert_pool_is_sound(p.manager)


def test_data_parallel_engines_account_for_themselves(plane, traffic):
    """Each engine has its own pool and buckets; a namespace is the same in all of them."""
    one, other = plane(), plane()
    for p in (one, other):
        p.driver.clock = lambda: 5.0
    for name in "12":
        one.add(traffic.request(name, range(100), ATTACKER))
        one.run()
    assert one.cached_tokens["2"] == 96
    assert balance(one, ATTACKER) == 4 - 3
    assert balance(other, ATTACKER) == 4
    other.add(traffic.request("1", range(100), ATTACKER))
    other.run()
    assert other.cached_tokens["1"] == 0
    assert other.pool.get_num_free_blocks() == one.pool.get_num_free_blocks() == 64


# -- full pools ---------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS, ids=NAMES)
def test_a_pool_that_is_cached_to_the_last_block(plane, traffic, way):
    p = plane(way, 65)
    for number in range(8):
        start = 1000 * number
        p.add(traffic.request(str(number), range(start, start + 256), max_tokens=1))
        p.run()
    assert all(block.block_hash is not None for block in p.pool.blocks[1:])
    p.add(traffic.request("all", range(50_000, 50_000 + 64 * 32), ATTACKER, max_tokens=1))
    step(p)
    assert sum(p.counts("evicted").values()) == 64
    p.run()
    assert p.finished[-1] == "all"
    p.add(traffic.request("again", range(256), max_tokens=1))
    p.run()
    assert p.cached_tokens["again"] == 0
    assert_pool_is_sound(p.manager)


@pytest.mark.parametrize("way", WAYS, ids=NAMES)
def test_the_one_candidate_of_a_pool_that_is_held_goes_whoever_owns_it(plane, traffic, way):
    p = plane(way, 65)
    p.add(traffic.request("hot", range(32), max_tokens=1))
    p.run()
    p.add(traffic.request("hot again", range(33), max_tokens=1))  # proven and promoted
    p.run()
    p.add(traffic.request("most", range(2000, 2000 + 63 * 32 - 5), ATTACKER, max_tokens=60))
    p.step()
    assert p.pool.get_num_free_blocks() == 1
    (free,) = p.pool.free_block_queue.get_all_free_blocks()
    assert free.block_hash is not None
    while p.pool.get_num_free_blocks():
        step(p)
    assert p.counts("evicted") == {("victim", "attacker"): 1}
    step(p)
    p.add(traffic.request("waits", range(9000, 9100), max_tokens=1))
    for _ in range(3):
        step(p)
    assert "waits" not in p.finished
    p.abort("most")
    p.run()
    assert p.finished[-1] == "waits"
    assert_pool_is_sound(p.manager)


# -- what is refused at start -------------------------------------------------------------------


def test_what_is_not_supported_is_refused_at_start(tiny_model, paths, plane, monkeypatch):
    with pytest.raises(IncompatibleEngineError, match="with Mamba layers, expected attention"):
        plane(DEFAULT, 65, cache=mamba_cache(65))
    p = plane(DEFAULT)
    config = p.scheduler.vllm_config
    monkeypatch.setattr(config.attention_config, "hisparse_config", object())
    with pytest.raises(IncompatibleEngineError, match="HiSparse keeps a second pool"):
        build_scheduler(config)
    monkeypatch.setattr(config.attention_config, "hisparse_config", None)
    monkeypatch.setattr(config, "diffusion_config", object())
    with pytest.raises(IncompatibleEngineError, match="diffusion models"):
        build_scheduler(config)
