"""The policies in vLLM 0.10.2's real scheduler, KV-cache manager and block pool; no model behind.

Only `make compat` runs this file, in an environment with that release: the paper's, which the
plug-in refuses to serve. The classes below put what 0.10.2 lacks between our classes and vLLM's.
"""

import random

import pytest

from prefixshield.serving.control_plane import engine_config

# isort: split
import torch
from vllm.sampling_params import SamplingParams
from vllm.utils import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import (
    FreeKVCacheBlockQueue,
    get_request_block_hasher,
    init_none_hash,
)
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from prefixshield.core.ledger import Contract
from prefixshield.policies import POLICIES, PolicySetup, build_policy
from prefixshield.serving.driver import PolicyDriver
from prefixshield.serving.namespace import Identity
from prefixshield.serving.pool import (
    ShieldBlockPool,
    ShieldKVCacheManager,
    ShieldQueue,
    Tag,
    tag,
    take_over,
)

BLOCK_SIZE = 16
BLOCKS = 129  # the null block included
CONTRACTS = {"big": Contract(1000.0, 1000.0), "small": Contract(0.5, 8.0)}
VICTIM, ATTACKER = Identity("victim", "big"), Identity("attacker", "small")
#: static-quota needs a place in the scheduler that 0.10.2 does not have.
ORDERS = [None, *sorted(set(POLICIES) - {"static-quota"})]

init_none_hash(sha256)


class WithPrepend(FreeKVCacheBlockQueue):
    def prepend_n(self, blocks):
        head = self.fake_free_list_head
        for block in reversed(blocks):
            after = head.next_free_block
            head.next_free_block = after.prev_free_block = block
            block.prev_free_block, block.next_free_block = head, after
        self.num_free_blocks += len(blocks)


class Queue(ShieldQueue, WithPrepend):
    def append_n(self, blocks):
        """0.10.2 appends blocks without content too."""
        self.prepend_n([block for block in blocks if block.block_hash is None])
        super().append_n([block for block in blocks if block.block_hash is not None])


class WithoutMasks(BlockPool):
    def cache_full_blocks(self, *arguments):
        *known, block_mask = arguments
        assert block_mask is None
        super().cache_full_blocks(*known)

    def touch(self, blocks):
        super().touch((blocks,))


class Pool(ShieldBlockPool, WithoutMasks):
    def touch(self, blocks):
        """0.10.2 gives one list for each KV-cache group."""
        super().touch([block for group in blocks for block in group])


class Manager(ShieldKVCacheManager):
    def allocate_slots(self, request, *args, **kwargs):
        request.num_preemptions = int(request.status == RequestStatus.PREEMPTED)
        return super().allocate_slots(request, *args, **kwargs)


class ControlPlane:
    """The scheduler of one engine, fed, stepped and answered with made-up tokens."""

    def __init__(self, vllm_config, policy, preset="paper"):
        spec = FullAttentionSpec(
            block_size=BLOCK_SIZE, num_kv_heads=1, head_size=32, dtype=torch.float32, use_mla=False
        )
        self.scheduler = Scheduler(
            vllm_config=vllm_config,
            kv_cache_config=KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(["full"], spec)]),
            structured_output_manager=StructuredOutputManager(vllm_config),
            log_stats=True,
        )
        self.driver = None
        self.outputs, self.cached, self.preemptions = {}, {}, 0
        manager = self.scheduler.kv_cache_manager
        self.pool = manager.block_pool
        if policy is not None:
            setup = PolicySetup(
                BLOCKS, CONTRACTS, ["victim", "attacker"], preset, reserved_blocks=1
            )
            self.driver = PolicyDriver(build_policy(policy, setup), ATTACKER)
            take_over(manager, self.driver)
            manager.__class__, self.pool.__class__ = Manager, Pool
            self.pool.free_block_queue.__class__ = Queue

    def add(self, name, tokens, identity, max_tokens=4):
        request = Request(
            name,
            list(tokens),
            SamplingParams(max_tokens=max_tokens, ignore_eos=True),
            None,
            None,
            cache_salt=identity.group,
            block_hasher=get_request_block_hasher(BLOCK_SIZE, sha256),
        )
        tag(request, Tag(identity, None))
        self.outputs[name] = []
        self.scheduler.add_request(request)

    def step(self):
        scheduled = self.scheduler.schedule()
        ids = list(scheduled.num_scheduled_tokens)
        for request in self.scheduler.running:
            self.cached.setdefault(request.request_id, request.num_cached_tokens)
        self.preemptions += sum(
            request.status == RequestStatus.PREEMPTED for request in self.scheduler.waiting
        )
        sampled = []
        for name in ids:
            request = self.scheduler.requests[name]
            done = request.num_computed_tokens >= request.num_tokens
            sampled.append([sum(request.all_token_ids[-3:]) % 1000] if done else [])
        answer = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={name: index for index, name in enumerate(ids)},
            sampled_token_ids=sampled,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )
        for outputs in self.scheduler.update_from_output(scheduled, answer).values():
            for output in outputs.outputs:
                self.outputs[output.request_id] += output.new_token_ids

    def run(self):
        for _ in range(10_000):
            if not self.scheduler.has_unfinished_requests():
                return
            self.step()
            if self.driver is not None:
                self.assert_sound()
        raise AssertionError("not finished")

    def assert_sound(self):
        """Every block is one of null, held, candidate or truly free; queue and policy agree."""
        free = [block.block_id for block in self.pool.free_block_queue.get_all_free_blocks()]
        assert len(free) == len(set(free)) == self.pool.get_num_free_blocks()
        blocks = self.pool.blocks
        assert set(free) == {b.block_id for b in blocks if b.ref_cnt == 0 and not b.is_null}
        hashed = [block_id for block_id in free if blocks[block_id].block_hash is not None]
        if self.driver.told:
            assert self.driver.candidate_count == len(hashed)
            assert self.driver.policy.candidate_count == len(hashed)
            self.driver.policy.check()
        assert free[len(free) - len(hashed) :] == hashed, "truly free blocks stand in front"


@pytest.fixture(scope="module")
def vllm_config(tiny_model):
    return engine_config(tiny_model, BLOCKS, "", BLOCK_SIZE)


@pytest.mark.parametrize("policy", ORDERS)
def test_requests_get_the_same_tokens_and_leave_nothing_behind(vllm_config, policy):
    """Shared and unseen prefixes of two tenants, with preemptions; native is the reference."""

    def serve(policy):
        r = random.Random(7)
        plane = ControlPlane(vllm_config, policy)
        prefixes = [[r.randrange(5, 2000) for _ in range(160)] for _ in range(4)]
        for number in range(100):
            tokens = prefixes[r.randrange(4)][: r.randrange(16, 160)]
            tokens = tokens + [r.randrange(5, 2000) for _ in range(r.randrange(1, 200))]
            plane.add(str(number), tokens, (VICTIM, ATTACKER)[number % 2], r.randrange(1, 60))
        plane.run()
        return plane

    native, ours = serve(None), serve(policy)
    assert ours.outputs == native.outputs
    assert native.preemptions > 0
    assert ours.preemptions > 0
    assert ours.pool.get_num_free_blocks() == BLOCKS - 1
    if policy is not None:
        assert not ours.driver.failed
        assert sum(n for key, n in ours.driver.counts.items() if key[0] == "evicted") > 100
    assert ours.scheduler.kv_cache_manager.reset_prefix_cache()


@pytest.mark.parametrize("preset", ["paper", "default"])
def test_a_flood_empties_native_and_not_the_shield(vllm_config, preset):
    """Hit ratio of a victim with four hot prefixes, three quarters of the pool."""

    def hit_ratio(policy):
        r = random.Random(5)
        plane = ControlPlane(vllm_config, policy, preset)
        hot = [[r.randrange(5, 2000) for _ in range(24 * BLOCK_SIZE)] for _ in range(4)]
        hits = queried = 0
        for turn in range(40):
            plane.add(f"a{turn}", [r.randrange(5, 2000) for _ in range(750)], ATTACKER)
            plane.run()
            tokens = hot[turn % 4] + [r.randrange(5, 2000) for _ in range(8)]
            plane.add(f"v{turn}", tokens, VICTIM)
            plane.run()
            if turn >= 8:  # every prefix has been seen twice
                hits += plane.cached[f"v{turn}"]
                queried += len(tokens)
        return hits / queried

    native, shield = hit_ratio(None), hit_ratio("shield")
    assert native < 0.05
    assert shield > native + 0.2
