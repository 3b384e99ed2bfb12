"""LRU, and any policy in shadow mode, against the unmodified vLLM pool, block for block."""

import pytest

pytest.importorskip("vllm")

from control_plane import (
    assert_pool_is_sound,
    count_events,
    make_manager,
    make_request,
    shield_manager,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixshield.core.ledger import Contract
from prefixshield.serving.namespace import Identity

pytestmark = pytest.mark.engine

BLOCKS = 17

operations = st.lists(
    st.one_of(
        st.tuples(st.just("start"), st.integers(0, 5), st.integers(1, 40), st.integers(0, 1)),
        st.tuples(st.just("decode"), st.integers(0, 30), st.integers(1, 6)),
        st.tuples(st.just("finish"), st.integers(0, 30)),
        st.tuples(st.just("invalidate"), st.sets(st.integers(0, BLOCKS - 1), max_size=4)),
        st.tuples(st.just("pin"), st.integers(1, BLOCKS - 1)),
        st.tuples(st.just("reset")),
    ),
    max_size=60,
)


class Side:
    """One manager driven by operations; ``log`` holds everything that can be seen of it."""

    def __init__(self, policy, sliding_window, shadow_of=None):
        """``shadow_of``: the preset of a policy that only accounts."""
        self.manager = make_manager(BLOCKS, sliding_window=sliding_window)
        self.policy = policy
        if policy is not None:
            contracts = {"c": Contract(1.0, 1.0)}
            driver = shield_manager(
                self.manager, policy, contracts, ["a", "b"], lambda: 0.0, shadow_of or "paper"
            )
            driver.shadow = shadow_of is not None
        self.running = []
        self.pinned = []
        self.log = []
        self.started = 0

    def apply(self, operation):
        name, *arguments = operation
        getattr(self, name)(*arguments)
        self.log.append(count_events(self.manager.take_events())[1])
        self.log.append(self.manager.block_pool.get_num_free_blocks())
        if self.policy is not None:
            assert_pool_is_sound(self.manager)

    def start(self, prefix, length, tenant):
        self.started += 1
        tokens = [prefix * 1000 + i for i in range(length)]
        identity = Identity("ab"[tenant], "c")
        request = make_request(str(self.started), tokens, identity=identity, salt=identity.group)
        blocks, hit, _ = self.manager.get_computed_blocks(request)
        got = self.manager.allocate_slots(request, length - hit, hit, blocks)
        self.log.append((hit, None if got is None else got.get_block_ids()))
        if got is not None:
            self.running.append(request)
            request.num_computed_tokens = length

    def decode(self, which, count):
        if not self.running:
            return
        request = self.running[which % len(self.running)]
        for i in range(count):
            request.append_output_token_ids(i)
            got = self.manager.allocate_slots(request, 1)
            self.log.append(None if got is None else got.get_block_ids())
            if got is None:
                return
            request.num_computed_tokens += 1

    def finish(self, which):
        if self.running:
            self.manager.free(self.running.pop(which % len(self.running)))

    def invalidate(self, block_ids):
        self.manager.evict_blocks(block_ids)

    def pin(self, block_id):
        """A connector touches a cached block outside any request, and lets it go later."""
        block = self.manager.block_pool.blocks[block_id]
        if self.pinned:
            self.manager.block_pool.free_blocks([self.pinned.pop()])
        elif block.block_hash is not None:
            self.manager.block_pool.touch([block])
            self.pinned.append(block)

    def reset(self):
        self.log.append(self.manager.reset_prefix_cache())


@settings(max_examples=400, deadline=None)
@given(operations, st.sampled_from([None, 8]))
def test_same_blocks_in_the_same_order(script, sliding_window):
    native, ours = Side(None, sliding_window), Side("lru", sliding_window)
    for operation in script:
        native.apply(operation)
        ours.apply(operation)
        assert ours.log == native.log
    assert not ours.manager.block_pool.driver.failed


@settings(max_examples=200, deadline=None)
@given(operations, st.sampled_from([None, 8]), st.sampled_from(["default", "paper"]))
def test_the_same_in_shadow_mode(script, sliding_window, preset):
    native = Side(None, sliding_window)
    ours = Side("shield", sliding_window, shadow_of=preset)
    for operation in script:
        native.apply(operation)
        ours.apply(operation)
        assert ours.log == native.log
    driver = ours.manager.block_pool.driver
    assert not driver.failed
    assert driver.counts["fallbacks",] == 0
