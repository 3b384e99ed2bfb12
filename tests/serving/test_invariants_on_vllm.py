"""Invariants I1 to I7 on vLLM's real KV-cache manager and block pool, under random traffic."""

from itertools import chain

import pytest

pytest.importorskip("vllm")

from control_plane import (
    assert_pool_is_sound,
    count_events,
    make_manager,
    make_request,
    shield_manager,
)
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from invariants import assert_bounded, expected_victims

from prefixshield.core.ledger import EPSILON, Contract
from prefixshield.core.retention import RetentionClass
from prefixshield.serving.namespace import Identity

pytestmark = pytest.mark.engine

BLOCKS = 25
BLOCK_SIZE = 4
GROUPS = ("a", "b", "c")
CONTRACTS = {"gold": Contract(8.0, 6.0), "base": Contract(1.0, 2.0), "poor": Contract(0.3, 0.0)}


class Traffic(RuleBasedStateMachine):
    """Requests of three groups come, grow, are preempted, resume and go; the clock runs."""

    sliding_window: int | None = None

    def __init__(self):
        super().__init__()
        self.now = 0.0
        self.manager = make_manager(BLOCKS, BLOCK_SIZE, self.sliding_window)
        self.driver = shield_manager(
            self.manager, "shield", CONTRACTS, GROUPS, clock=lambda: self.now
        )
        self.policy = self.driver.policy
        self.pool = self.manager.block_pool
        self.running, self.preempted = [], []
        self.started = 0
        self.stored = 0
        self.charged = {}  # (group, contract) → blocks, by our own count
        self.identity = {}

    # -- traffic -----------------------------------------------------------------------------

    @rule(
        prefix=st.integers(0, 4),
        length=st.integers(1, 50),
        group=st.sampled_from(GROUPS),
        contract=st.sampled_from(sorted(CONTRACTS)),
        prefix_id=st.sampled_from([None, None, "p"]),
        chunk=st.integers(1, 60),
        logprobs=st.sampled_from([None, None, None, 1]),
    )
    def start(self, prefix, length, group, contract, prefix_id, chunk, logprobs):
        self.started += 1
        request = make_request(
            f"r{self.started}",
            [prefix * 1000 + i for i in range(length)],
            block_size=BLOCK_SIZE,
            identity=Identity(group, contract),
            prefix_id=prefix_id,
            salt=group,
            prompt_logprobs=logprobs,
        )
        self.identity[request.request_id] = (group, contract)
        self._admit(request, chunk)

    def _admit(self, request, chunk):
        """Lookup, then the first chunk, as the scheduler does."""
        blocks, hit, _ = self.manager.get_computed_blocks(request)
        group, _ = self.identity[request.request_id]
        for block in chain.from_iterable(blocks.blocks):  # I7
            assert block.is_null or self.driver.owner[block.block_id] == group
        owes = self.policy.ledger.raw_debt(group, self._accounting_time()) > EPSILON
        before = {b.block_id: self.policy.retention_class(b.block_id) for b in self.pool.blocks}
        count = min(chunk, request.num_tokens - hit)
        if not self._allocate(request, count, hit, blocks):
            return False
        for block in chain.from_iterable(blocks.blocks):  # I2, and no proof by a resumed request
            promoted = (
                before[block.block_id] != RetentionClass.REUSE
                and self.policy.retention_class(block.block_id) == RetentionClass.REUSE
            )
            assert not (promoted and (owes or request.num_preemptions))
        self.running.append(request)
        return True

    def _allocate(self, request, count, hit=0, blocks=None):
        queue = self.pool.free_block_queue
        evicted_before = self._evicted()
        batches = []  # what was taken and what should have been, one for every KV-cache group
        original = type(queue).popleft_n

        def recorded(n):
            free = queue.get_all_free_blocks()
            owners = list(self.driver.owner)
            truly_free = sum(block.block_hash is None for block in free)
            expected = expected_victims(
                self.policy,
                [block.block_id for block in free if block.block_hash is not None],
                lambda b: owners[b],
                max(0, n - truly_free),
                self._accounting_time(),
            )
            blocks = original(queue, n)
            batches.append(([block.block_id for block in blocks], expected))
            return blocks

        queue.popleft_n = recorded
        try:
            got = self.manager.allocate_slots(request, count, hit, blocks)
        finally:
            del queue.popleft_n
        if got is None:
            assert not batches
            return False
        request.num_computed_tokens += hit + count
        for taken, expected in batches:
            assert taken[len(taken) - len(expected) :] == expected  # I5
            for block_id in taken:
                assert self.pool.blocks[block_id].ref_cnt == 1  # I4: it was free
            assert len(set(taken)) == len(taken)
        evicted = sum(len(expected) for _, expected in batches)  # I4: free ones came first
        assert self._evicted() - evicted_before == evicted
        return True

    def _accounting_time(self):
        """The clock may step back, the ledger's time does not."""
        return self.policy.ledger.now(self.now)

    def _evicted(self):
        return sum(n for key, n in self.driver.counts.items() if key[0] == "evicted")

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 99), count=st.integers(1, 30))
    def go_on(self, which, count):
        """The next chunk of a prompt, or decoded tokens one by one."""
        request = self.running[which % len(self.running)]
        left = request.num_tokens - request.num_computed_tokens
        if left > 0:
            self._allocate(request, min(count, left))
            return
        for i in range(count % 6 + 1):
            request.append_output_token_ids(i)
            if not self._allocate(request, 1):
                return

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 99))
    def finish_or_abort(self, which):
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
        if self._admit(self.preempted[0], chunk):
            self.preempted.pop(0)

    @rule(block_ids=st.sets(st.integers(0, BLOCKS - 1), max_size=4))
    def invalidate(self, block_ids):
        self.manager.evict_blocks(block_ids)

    @rule(seconds=st.sampled_from([0.1, 1.0, 10.0, -3.0]))
    def wait(self, seconds):
        self.now += seconds

    @rule()
    def reset(self):
        self.manager.reset_prefix_cache()

    # -- invariants --------------------------------------------------------------------------

    @invariant()
    def sound(self):
        assert not self.driver.failed
        assert_pool_is_sound(self.manager)
        assert_bounded(self.policy, GROUPS, list(CONTRACTS))

    @invariant()
    def charged_once(self):
        """I1: vLLM's own events count as many stored blocks as were charged."""
        stored, _ = count_events(self.manager.take_events())
        self.stored += sum(stored.values())
        counted = sum(n for key, n in self.driver.counts.items() if key[0] == "materialised")
        assert counted == self.stored


class HybridTraffic(Traffic):
    """The same with a sliding-window group beside the full-attention one."""

    sliding_window = 8


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestHybridTraffic = HybridTraffic.TestCase
TestHybridTraffic.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_charge_is_what_was_materialised_to_the_block():
    """I1 on the ledger itself: with a clock that stands still, balance = burst - blocks."""
    manager = make_manager(BLOCKS, BLOCK_SIZE)
    driver = shield_manager(manager, "shield", CONTRACTS, GROUPS, clock=lambda: 5.0)
    account = driver.policy.ledger.account
    gold, base = Identity("a", "gold"), Identity("a", "base")

    def serve(name, tokens, identity, **options):
        request = make_request(name, tokens, identity=identity, salt=identity.group, **options)
        blocks, hit, _ = manager.get_computed_blocks(request)
        assert manager.allocate_slots(request, len(tokens) - hit, hit, blocks) is not None
        request.num_computed_tokens = len(tokens)
        return request

    first = serve("1", range(10), gold)  # 2 full blocks and a partial one
    assert account("a", "gold").balance(5.0) == 6 - 2
    for token in (77, 78):  # the third block becomes full: charged then
        first.append_output_token_ids(token)
        manager.allocate_slots(first, 1)
        first.num_computed_tokens += 1
    assert account("a", "gold").balance(5.0) == 6 - 3
    manager.free(first)

    again = serve("2", range(9), base)  # 2 blocks hit: charges nothing
    assert account("a", "base").balance(5.0) == 2
    twin = serve("3", range(8), base)  # aligned: the last block is materialised a second time
    assert account("a", "base").balance(5.0) == 2 - 1
    whole = serve("4", range(8), base, prompt_logprobs=1)  # reads no cache: both anew
    assert account("a", "base").balance(5.0) == 2 - 1 - 2
    assert driver.counts["materialised", "a"] == 6
    for request in (again, twin, whole):
        manager.free(request)
    assert manager.reset_prefix_cache()
    assert account("a", "base").balance(5.0) == -1, "a reset repays nothing"
    assert account("b", "gold").balance(5.0) == 6


def test_a_lone_debtor_fills_the_pool_and_is_never_refused():
    """I3."""
    manager = make_manager(BLOCKS, BLOCK_SIZE)
    driver = shield_manager(manager, "shield", CONTRACTS, GROUPS, clock=lambda: 0.0)
    for number in range(30):
        request = make_request(
            str(number), [number * 100 + i for i in range(20)], identity=Identity("a", "poor")
        )
        assert manager.allocate_slots(request, 20) is not None
        manager.free(request)
    assert sum(owner == "a" for owner in driver.owner) == BLOCKS - 1
    request = make_request(
        "all", range(5000, 5000 + 4 * (BLOCKS - 1)), identity=Identity("a", "poor")
    )
    assert manager.allocate_slots(request, request.num_tokens) is not None
