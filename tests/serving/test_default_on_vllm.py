"""The default preset on vLLM's real KV-cache manager and block pool, under random traffic."""

from itertools import chain

import pytest

pytest.importorskip("vllm")

from control_plane import assert_pool_is_sound, count_events, make_manager, make_request
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from invariants import assert_default_bounded

from prefixshield.core.ledger import EPSILON, Contract
from prefixshield.core.retention import RetentionClass
from prefixshield.policies import PolicySetup, build_policy
from prefixshield.policies.adaptive import AdaptiveShield
from prefixshield.serving.driver import PolicyDriver
from prefixshield.serving.namespace import Identity
from prefixshield.serving.pool import take_over

pytestmark = pytest.mark.engine

BLOCKS = 25
BLOCK_SIZE = 4
GROUPS = ("a", "b", "c")
CONTRACTS = {"gold": Contract(8.0, 6.0), "base": Contract(1.0, 2.0), "poor": Contract(0.3, 0.0)}


def default_manager(clock, sliding_window=None):
    """A native manager taken over by the default preset, and its driver."""
    manager = make_manager(BLOCKS, BLOCK_SIZE, sliding_window)
    setup = PolicySetup(BLOCKS, CONTRACTS, GROUPS, reserved_blocks=1)
    driver = PolicyDriver(build_policy("shield", setup), Identity("a", "base"), clock)
    assert isinstance(driver.policy, AdaptiveShield)
    take_over(manager, driver)
    return manager, driver


class Traffic(RuleBasedStateMachine):
    """Requests of three groups come, grow, are preempted, resume and go; blocks lose content."""

    sliding_window: int | None = None

    def __init__(self):
        super().__init__()
        self.now = 0.0
        self.manager, self.driver = default_manager(lambda: self.now, self.sliding_window)
        self.policy = self.driver.policy
        self.pool = self.manager.block_pool
        self.running, self.preempted = [], []
        self.started = self.stored = self.orphans_evicted = 0
        self.group = {}
        self.parent = {}  # hash → the one before it, of every chained block ever cached

    @rule(
        prefix=st.integers(0, 3),
        length=st.integers(1, 50),
        group=st.sampled_from(GROUPS),
        contract=st.sampled_from(sorted(CONTRACTS)),
        chunk=st.integers(1, 60),
        logprobs=st.sampled_from([None, None, None, 1]),
    )
    def start(self, prefix, length, group, contract, chunk, logprobs):
        self.started += 1
        request = make_request(
            f"r{self.started}",
            [prefix * 1000 + i for i in range(length)],
            block_size=BLOCK_SIZE,
            identity=Identity(group, contract),
            salt=group,
            prompt_logprobs=logprobs,
        )
        self.group[request.request_id] = group
        self.remember(request)
        self.admit(request, chunk)

    def remember(self, request):
        hashes = request.block_hashes
        for before, block_hash in zip([None, *hashes], hashes, strict=False):
            self.parent[block_hash] = before

    def admit(self, request, chunk):
        blocks, hit, _ = self.manager.get_computed_blocks(request)
        found = [block for block in chain.from_iterable(blocks.blocks) if not block.is_null]
        group = self.group[request.request_id]
        assert all(self.driver.owner[block.block_id] == group for block in found)  # I7
        chained = {block.block_id for block in found if self.is_chained(block)}
        assert not chained & self.orphans(), "a lookup reached it"
        t = self.policy.ledger.now(self.now)
        owes = self.policy.ledger.raw_debt(group, t) > EPSILON
        before = [self.policy.retention_class(block.block_id) for block in found]
        if not self.allocate(request, min(chunk, request.num_tokens - hit), hit, blocks):
            return False
        for block, was in zip(found, before, strict=True):  # I2
            now = self.policy.retention_class(block.block_id)
            promoted = now is RetentionClass.REUSE is not was
            assert not (promoted and (owes or request.num_preemptions))
        self.running.append(request)
        return True

    def is_chained(self, block):
        """Of the full-attention group, whose number ends the hash."""
        return int.from_bytes(block.block_hash[-4:], "big") in self.pool.chained_groups

    def orphans(self):
        """Cached blocks of chained groups that lack a predecessor, by scanning the pool."""
        held_by = {}
        for block in self.pool.blocks:
            if block.block_hash is not None and self.is_chained(block):
                held_by.setdefault(block.block_hash[:-4], []).append(block.block_id)
        orphans = set()
        for block_hash, ids in held_by.items():
            before = self.parent[block_hash]
            while before is not None and before in held_by:
                before = self.parent[before]
            if before is not None:
                orphans.update(ids)
        return orphans

    def allocate(self, request, count, hit=0, blocks=None):
        queue = self.pool.free_block_queue
        original = type(queue).popleft_n

        def watched(n):
            free = queue.get_all_free_blocks()
            ids = {block.block_id for block in free}
            truly_free = sum(block.block_hash is None for block in free)
            orphans = self.orphans() & ids
            taken = [block.block_id for block in original(queue, n)]
            assert len(set(taken)) == n  # I4
            assert set(taken) <= ids
            victims = taken[min(n, truly_free) :]
            first = victims[: len(orphans)]
            assert set(first) <= orphans, "orphans go first"
            self.orphans_evicted += len(first)
            return [self.pool.blocks[block_id] for block_id in taken]

        queue.popleft_n = watched
        try:
            got = self.manager.allocate_slots(request, count, hit, blocks)
        finally:
            del queue.popleft_n
        if got is None:
            return False
        request.num_computed_tokens += hit + count
        return True

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 99), count=st.integers(1, 30))
    def go_on(self, which, count):
        request = self.running[which % len(self.running)]
        left = request.num_tokens - request.num_computed_tokens
        if left > 0:
            self.allocate(request, min(count, left))
            return
        for i in range(count % 6 + 1):
            request.append_output_token_ids(i)
            self.remember(request)
            if not self.allocate(request, 1):
                return

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 99))
    def finish(self, which):
        self.manager.free(self.running.pop(which % len(self.running)))

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 99))
    def preempt(self, which):
        request = self.running.pop(which % len(self.running))
        self.manager.free(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.preempted.append(request)

    @precondition(lambda self: self.preempted)
    @rule(chunk=st.integers(1, 60))
    def resume(self, chunk):
        if self.admit(self.preempted[0], chunk):
            self.preempted.pop(0)

    @rule(which=st.integers(0, 99))
    def invalidate(self, which):
        """A candidate loses its content."""
        free = [b for b in self.pool.free_block_queue.get_all_free_blocks() if b.block_hash]
        if free:
            self.manager.evict_blocks({free[which % len(free)].block_id})

    @rule(seconds=st.sampled_from([0.1, 1.0, 10.0, -3.0]))
    def wait(self, seconds):
        self.now += seconds

    @rule()
    def reset(self):
        self.manager.reset_prefix_cache()

    @invariant()
    def sound(self):
        assert not self.driver.failed
        assert_pool_is_sound(self.manager)
        assert_default_bounded(self.policy, GROUPS, list(CONTRACTS))

    @invariant()
    def orphans_are_known_and_counted(self):
        found = {block for block in range(BLOCKS) if self.policy._chains.is_orphan(block)}
        assert found == self.orphans()
        assert self.driver.counts["orphans",] == self.orphans_evicted

    @invariant()
    def charged_once(self):
        """I1: vLLM's own events count as many stored blocks as were charged."""
        stored, _ = count_events(self.manager.take_events())
        self.stored += sum(stored.values())
        counted = sum(n for key, n in self.driver.counts.items() if key[0] == "materialised")
        assert counted == self.stored


class HybridTraffic(Traffic):
    """The same with a sliding-window group, which has no chains, beside the full-attention one."""

    sliding_window = 8


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
TestHybridTraffic = HybridTraffic.TestCase
TestHybridTraffic.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)


def serve(manager, name, tokens, group="a"):
    """A request from start to end; how many tokens hit."""
    request = make_request(name, tokens, identity=Identity(group, "gold"), salt=group)
    blocks, hit, _ = manager.get_computed_blocks(request)
    assert manager.allocate_slots(request, len(tokens) - hit, hit, blocks) is not None
    request.num_computed_tokens = len(tokens)
    manager.free(request)
    return hit


def test_what_a_lost_predecessor_leaves_is_evicted_first_and_counted():
    manager, driver = default_manager(lambda: 0.0)
    pool = manager.block_pool
    serve(manager, "chain", range(5 * BLOCK_SIZE))  # blocks 1 to 5
    serve(manager, "other", range(500, 500 + 19 * BLOCK_SIZE), "b")
    manager.evict_blocks({2})
    assert [driver.policy._chains.is_orphan(block) for block in range(1, 6)] == [0, 0, 1, 1, 1]
    serve(manager, "new", range(900, 900 + 4 * BLOCK_SIZE), "c")  # the free one and 3 orphans
    assert driver.counts["orphans",] == 3
    assert driver.counts["evicted", "a", "c"] == driver.counts["lost", "a", "orphan"] == 3
    assert pool.blocks[1].block_hash is not None
    assert serve(manager, "again", range(5 * BLOCK_SIZE)) == BLOCK_SIZE
    assert_pool_is_sound(manager)


def test_in_the_shadow_orphans_go_in_native_order_and_are_counted():
    manager, driver = default_manager(lambda: 0.0)
    driver.shadow = True
    serve(manager, "chain", range(5 * BLOCK_SIZE))  # blocks 1 to 5, the last one first in order
    serve(manager, "other", range(500, 500 + 19 * BLOCK_SIZE), "b")
    manager.evict_blocks({2})
    serve(manager, "new", range(900, 900 + 5 * BLOCK_SIZE), "c")  # 5 4 3, the free one, 1
    assert driver.counts["orphans",] == 3
    assert driver.counts["lost", "a", "order"] == 4
    assert_pool_is_sound(manager)


def test_a_sliding_window_group_makes_no_chains():
    manager, driver = default_manager(lambda: 0.0, sliding_window=8)
    serve(manager, "1", range(9 * BLOCK_SIZE))
    (full,) = manager.block_pool.chained_groups
    follows = {full: [], 1 - full: []}
    chains = driver.policy._chains
    for block in manager.block_pool.blocks:
        if block.block_hash is not None:
            number = int.from_bytes(block.block_hash[-4:], "big")
            follows[number].append(chains._parent[chains._link[block.block_id]] >= 0)
    assert follows[full] == [False] + [True] * 8
    assert len(follows[1 - full]) > 1
    assert not any(follows[1 - full])
    manager.evict_blocks({b.block_id for b in manager.block_pool.blocks[1:3] if b.block_hash})
    assert_pool_is_sound(manager)


def test_out_of_the_shadow_what_lost_its_content_is_handed_out_first():
    manager, driver = default_manager(lambda: 0.0)
    driver.shadow = True
    serve(manager, "1", range(4 * BLOCK_SIZE))  # blocks 1 to 4
    serve(manager, "2", range(500, 500 + 20 * BLOCK_SIZE), "b")
    manager.evict_blocks({2, 3})  # they keep their places, as in vLLM
    driver.shadow = False
    serve(manager, "3", range(900, 900 + 2 * BLOCK_SIZE), "c")
    assert driver.counts["evicted", "a", "c"] == driver.counts["evicted", "b", "c"] == 0
    assert_pool_is_sound(manager)
