"""Facts of vLLM's prefix caching, on vLLM itself and on our pool in LRU mode: the same assertions.

vLLM's wheels do not contain its own tests of them.
"""

import pytest

pytest.importorskip("vllm")

from control_plane import assert_pool_is_sound, count_events, make_manager, make_request

from prefixshield.core.ledger import Contract
from prefixshield.policies import PolicySetup, build_policy
from prefixshield.serving.driver import PolicyDriver
from prefixshield.serving.namespace import Identity
from prefixshield.serving.pool import ShieldBlockPool, take_over

pytestmark = pytest.mark.engine

BLOCKS = 11  # 10 usable ones, of 4 tokens


@pytest.fixture(params=["native", "lru"])
def build(request):
    def build(num_blocks=BLOCKS, sliding_window=None):
        manager = make_manager(num_blocks, 4, sliding_window)
        if request.param == "lru":
            setup = PolicySetup(num_blocks, {"c": Contract(1.0, 1.0)}, ["a"], reserved_blocks=1)
            driver = PolicyDriver(build_policy("lru", setup), Identity("a", "c"), lambda: 0.0)
            take_over(manager, driver)
        return manager

    return build


def start(manager, name, tokens, **options):
    """Look up and allocate a whole prompt; the request, and how many tokens hit."""
    request = make_request(name, tokens, **options)
    blocks, hit, _ = manager.get_computed_blocks(request)
    got = manager.allocate_slots(request, request.num_tokens - hit, hit, blocks)
    if got is None:
        return None, hit
    request.num_computed_tokens = request.num_tokens
    if isinstance(manager.block_pool, ShieldBlockPool):
        assert_pool_is_sound(manager)
    return request, hit


def serve(manager, name, tokens, **options):
    request, hit = start(manager, name, tokens, **options)
    manager.free(request)
    return hit


def ids(manager, request):
    return manager.get_block_ids(request.request_id)[0]


def free_ids(manager):
    return [block.block_id for block in manager.block_pool.free_block_queue.get_all_free_blocks()]


@pytest.mark.parametrize(
    ("length", "again", "hit"),
    [(3, 3, 0), (4, 4, 0), (5, 5, 4), (8, 8, 4), (9, 9, 8), (9, 30, 8), (11, 5, 4), (30, 7, 4)],
)
def test_whole_blocks_hit_and_the_last_token_never_does(build, length, again, hit):
    manager = build()
    assert serve(manager, "1", range(length)) == 0
    assert serve(manager, "2", range(again)) == hit


def test_a_block_hits_only_behind_the_same_prefix(build):
    manager = build()
    serve(manager, "1", [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert serve(manager, "2", [0, 2, 3, 4, 5, 6, 7, 8, 9]) == 0
    assert serve(manager, "3", [1, 2, 3, 4, 0, 6, 7, 8, 9]) == 4


def test_running_requests_share_blocks_and_count_references(build):
    manager = build()
    first, _ = start(manager, "1", range(9))
    second, hit = start(manager, "2", range(9))
    assert hit == 8
    assert ids(manager, first)[:2] == ids(manager, second)[:2]
    counts = [manager.block_pool.blocks[i].ref_cnt for i in ids(manager, second)]
    assert counts == [2, 2, 1]
    assert manager.block_pool.get_num_free_blocks() == 10 - 4
    manager.free(first)
    assert [manager.block_pool.blocks[i].ref_cnt for i in ids(manager, second)] == [1, 1, 1]
    assert manager.block_pool.get_num_free_blocks() == 10 - 3
    manager.free(second)
    assert manager.block_pool.get_num_free_blocks() == 10


def test_blocks_freed_together_go_tail_first_and_those_without_content_first_of_all(build):
    manager = build()
    request, _ = start(manager, "1", range(14))  # 3 full blocks and a partial one
    one, two, three, partial = ids(manager, request)
    never_used = free_ids(manager)
    manager.free(request)
    assert free_ids(manager) == [partial, *never_used, three, two, one]


def test_eviction_is_least_recently_used_first_and_a_hit_is_a_use(build):
    manager = build(num_blocks=10)  # 9 usable ones
    serve(manager, "old", range(100, 113))
    serve(manager, "new", range(200, 213))
    assert serve(manager, "old again", range(100, 113)) == 12
    serve(manager, "third", range(300, 321))  # 6 blocks: evicts what was not used since
    assert serve(manager, "new again", range(200, 213)) == 0
    manager = build(num_blocks=10)
    serve(manager, "old", range(100, 113))
    serve(manager, "new", range(200, 213))
    serve(manager, "third", range(300, 317))  # 5 blocks: 3 free ones and 2 of the oldest's tail
    assert serve(manager, "old again", range(100, 113)) == 4


def test_a_held_block_is_never_evicted_and_what_does_not_fit_takes_nothing(build):
    manager = build()
    held, _ = start(manager, "held", range(25))  # 7 blocks
    before = free_ids(manager)
    refused, hit = start(manager, "large", [*range(8), *range(500, 520)])  # 2 hit, 5 more
    assert refused is None
    assert hit == 8
    assert free_ids(manager) == before
    assert [manager.block_pool.blocks[i].ref_cnt for i in ids(manager, held)] == [1] * 7
    fits, _ = start(manager, "fits", [*range(8), *range(500, 511)])  # 2 hit, 3 more
    assert fits is not None
    assert manager.block_pool.get_num_free_blocks() == 0
    assert ids(manager, held)[:2] == ids(manager, fits)[:2]


def test_two_of_a_kind_are_two_blocks_and_the_second_outlives_the_first(build):
    manager = build()
    first, _ = start(manager, "1", range(8))
    second, hit = start(manager, "2", range(8))
    assert hit == 4, "the block of the last token is computed again"
    assert ids(manager, first)[1] != ids(manager, second)[1]
    blocks = [manager.block_pool.blocks[ids(manager, r)[1]] for r in (first, second)]
    assert blocks[0].block_hash == blocks[1].block_hash is not None
    manager.free(first)
    manager.evict_blocks({blocks[0].block_id})
    assert serve(manager, "3", range(9)) == 8
    manager.free(second)


def test_blocks_that_decoding_fills_are_cached(build):
    manager = build()
    request, _ = start(manager, "1", range(6))
    for token in range(50, 57):
        request.append_output_token_ids(token)
        assert manager.allocate_slots(request, 1) is not None
        request.num_computed_tokens += 1
    manager.free(request)
    conversation = [*range(6), *range(50, 57)]
    assert serve(manager, "2", [*conversation, 1, 2]) == 12
    assert serve(manager, "3", [*conversation[:9], 0, *conversation[10:]]) == 8


def test_a_chain_with_a_gap_hits_up_to_the_gap(build):
    manager = build()
    request, _ = start(manager, "1", range(17))
    middle = ids(manager, request)[1]
    manager.free(request)
    manager.evict_blocks({middle})
    assert serve(manager, "2", range(17)) == 4
    # What it computed again closes the gap.
    assert serve(manager, "3", range(17)) == 16


@pytest.mark.parametrize(
    ("one", "other"),
    [(None, "a"), ("a", "b"), ("a", "aa"), ("ab", "a"), ("a.b", "ab."), ("cache_salt", None)],
)
def test_salts_never_share(build, one, other):
    manager = build(num_blocks=21)
    serve(manager, "1", range(13), salt=one)
    assert serve(manager, "2", range(13), salt=other) == 0
    assert serve(manager, "3", range(13), salt=one) == 12
    assert serve(manager, "4", range(13), salt=other) == 12


def test_a_request_for_prompt_logprobs_reads_nothing_and_leaves_copies(build):
    manager = build()
    serve(manager, "1", range(9))
    assert serve(manager, "2", range(9), prompt_logprobs=1) == 0
    hashed = [b.block_hash for b in manager.block_pool.blocks if b.block_hash is not None]
    assert len(hashed) == 4
    assert len(set(hashed)) == 2


def test_a_reset_needs_a_pool_that_nobody_holds(build):
    manager = build()
    serve(manager, "1", range(9))
    held, _ = start(manager, "2", range(50, 59))
    assert not manager.reset_prefix_cache()
    assert serve(manager, "3", range(9)) == 8
    manager.free(held)
    assert manager.reset_prefix_cache()
    assert len(manager.block_pool.cached_block_hash_to_block) == 0
    assert serve(manager, "4", range(9)) == 0
    assert manager.block_pool.get_num_free_blocks() == 10


def test_the_null_block_stands_for_what_a_sliding_window_has_left_behind(build):
    manager = build(num_blocks=31, sliding_window=8)
    request, _ = start(manager, "1", range(29))
    null = manager.block_pool.null_block
    assert null.block_id == 0
    assert 0 not in free_ids(manager)
    request.append_output_token_ids(5)
    manager.allocate_slots(request, 1)
    full, window = manager.get_block_ids("1")
    assert 0 not in full
    assert window[:5] == [0] * 5
    assert 0 not in window[6:]
    held = {*full, *window} - {0}
    assert manager.block_pool.get_num_free_blocks() == 30 - len(held)
    manager.free(request)
    assert manager.block_pool.get_num_free_blocks() == 30
    assert null.is_null
    assert 0 not in free_ids(manager)
    assert serve(manager, "2", range(29)) == 28


def test_losing_the_window_loses_the_hit(build):
    manager = build(num_blocks=31, sliding_window=8)
    request, _ = start(manager, "1", range(29))
    window = [i for i in manager.get_block_ids("1")[1] if i]
    manager.free(request)
    manager.evict_blocks(set(window[-3:]))
    assert serve(manager, "2", range(29)) < 28


def test_every_cached_block_is_announced_and_every_lost_one_too(build):
    manager = build()
    for number in range(8):
        serve(manager, str(number), range(100 * number, 100 * number + 13))
    stored, removed = count_events(manager.take_events())
    cached = sum(block.block_hash is not None for block in manager.block_pool.blocks)
    assert sum(stored.values()) == 8 * 3
    assert len(removed) == len(set(removed)) == 8 * 3 - cached
