"""Random engine traffic over vLLM's real scheduler: native beside our pool under three policies."""

import pytest

pytest.importorskip("vllm")

from control_plane import BLOCK_SIZE, assert_pool_is_sound
from hard_plane import (
    ATTACKER,
    LRU,
    NATIVE,
    NATIVE_ORDER,
    VICTIM,
    VICTIM_BATCH,
    WAYS,
    HardPlane,
    Traffic,
    hybrid_cache,
    write_configs,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prefixshield.serving.pool import ShieldBlockPool

pytestmark = pytest.mark.engine

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}

#: Name → block sizes of the full-attention and the sliding-window group; None: no second group.
CACHES = {"full": None, "hybrid": (32, 32), "uneven": (64, 32)}


class Memory:
    """What a GPU would hold: a digest of all tokens up to each place of each block.

    Two digests agree only if salt and tokens before agree, so a hit on wrong contents shows.
    """

    def __init__(self, block_sizes):
        self._block_sizes = block_sizes
        self._written = {}  # (block, offset) → digest
        self._known = {}  # request → digests of its tokens, behind that of its salt
        self._went_on_from = {}  # request → where its next step should start

    def execute(self, work):
        """Each request of a step computes some tokens and reads all before them.

        They may share blocks that one of them computes: all write, then all read.
        """
        for request, tables, start, count, drafts in work:
            digests = self._digests(request, start + count, drafts)
            self._written.update(self._places(tables, digests, start, len(digests)))
        for request, tables, start, count, drafts in work:
            # All of it when it is scheduled anew, and from time to time.
            if self._went_on_from.get(request.request_id) != start or start % 16 == 0:
                digests = self._digests(request, start, drafts)
                for at, digest in self._places(tables, digests, 0, start):
                    assert self._written.get(at) == digest, (
                        f"request {request.request_id} reads wrong contents at {at}"
                    )
            self._went_on_from[request.request_id] = start + count

    def _digests(self, request, count, drafts):
        """Of the first tokens of a request, those that are known."""
        digests = self._known.setdefault(request.request_id, [hash(request.cache_salt)])
        for token in request.all_token_ids[len(digests) - 1 :]:
            digests.append(hash((digests[-1], token)))
        found = digests[1:]
        for token in drafts:
            found.append(hash((found[-1], token)))
        return found[:count]

    def _places(self, tables, digests, start, end):
        for table, size in zip(tables, self._block_sizes, strict=True):
            for place in range(start, end):
                if block := table[place // size]:  # 0: the null block
                    yield (block, place % size), digests[place]


class CheckedPlane(HardPlane):
    """A plane with a memory, which checks itself after every step."""

    def __init__(self, *arguments, block_sizes, **options):
        super().__init__(*arguments, **options)
        self._memory = Memory(block_sizes)
        self._work = []

    def schedule(self):
        scheduled = super().schedule()
        work = []
        for id_, count in scheduled.num_scheduled_tokens.items():
            request = self.scheduler.requests[id_]
            tables = self.manager.get_block_ids(id_)
            drafts = scheduled.scheduled_spec_decode_tokens.get(id_, [])
            work.append((request, tables, request.num_computed_tokens - count, count, drafts))
        self._work.append(work)
        return scheduled

    def _answer_oldest(self):
        self._memory.execute(self._work.pop(0))
        super()._answer_oldest()

    def check(self):
        pool = self.pool
        for block in pool.blocks:
            assert block.is_null or block.ref_cnt >= 0
            if block.block_hash is not None:
                cached = pool.cached_block_hash_to_block
                assert cached.contain(block.block_hash, block.block_id)
        free = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
        idle = [b.block_id for b in pool.blocks if b.ref_cnt == 0 and not b.is_null]
        assert sorted(free) == idle
        if isinstance(pool, ShieldBlockPool):
            assert not self.driver.failed
            assert_pool_is_sound(self.manager)


operations = st.lists(
    st.one_of(
        st.tuples(
            st.just("submit"),
            st.integers(0, 5),
            st.one_of(st.integers(1, 140), st.integers(300, 700)),
            st.sampled_from([VICTIM, VICTIM_BATCH, ATTACKER]),
            st.one_of(st.integers(1, 8), st.integers(40, 80)),
            st.sampled_from([None, None, None, 1]),
        ),
        st.tuples(st.just("twins"), st.integers(0, 5), st.integers(1, 140)),
        st.tuples(st.just("steps"), st.integers(1, 12)),
        st.tuples(st.just("abort"), st.integers(0, 99)),
        st.tuples(st.just("reset"), st.booleans()),
    ),
    min_size=4,
    max_size=20,
)


class Run:
    """One plane driven by operations."""

    def __init__(self, plane, traffic):
        self.plane = plane
        self._traffic = traffic
        self._started = 0

    def submit(self, prefix, length, identity, output, logprobs):
        name = str(self._started)
        self._started += 1
        if identity == VICTIM_BATCH and not isinstance(self.plane.pool, ShieldBlockPool):
            identity = VICTIM  # the same namespace, which native cannot know
        tokens = [prefix * 1000 + i for i in range(length)]
        options = {} if logprobs is None else {"prompt_logprobs": logprobs}
        self.plane.add(self._traffic.request(name, tokens, identity, max_tokens=output, **options))

    def twins(self, prefix, length):
        for _ in range(2):
            self.submit(prefix, length, VICTIM, 3, None)

    def steps(self, count):
        for _ in range(count):
            self.plane.step()
            self.plane.check()

    def abort(self, which):
        names = sorted(self.plane.scheduler.requests)
        if names:
            self.plane.abort(names[which % len(names)])
            self.plane.check()

    def reset(self, running_too):
        self.plane.scheduler.reset_prefix_cache(reset_running_requests=running_too)
        self.plane.check()

    def finish(self):
        while self.plane.scheduler.has_unfinished_requests():
            self.steps(1)
        self.plane.run()
        self.plane.check()
        pool = self.plane.pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1, "a block leaked"
        assert self.plane.scheduler.reset_prefix_cache()


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    return write_configs(tmp_path_factory.mktemp("configs"))


@settings(
    max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    script=operations,
    cache=st.sampled_from(sorted(CACHES)),
    mode=st.sampled_from(["plain", "async", "drafts"]),
)
def test_the_same_traffic_on_native_and_under_every_policy(tiny_model, paths, script, cache, mode):
    blocks = 67 if CACHES[cache] is None else 131
    block_sizes = CACHES[cache] or (BLOCK_SIZE,)
    traffic = Traffic(paths[LRU])
    runs = {}
    for way in [NATIVE, *WAYS]:
        plane = CheckedPlane(
            tiny_model,
            None if way is NATIVE else paths[way],
            blocks,
            block_sizes=block_sizes,
            cache=None if CACHES[cache] is None else hybrid_cache(blocks, *CACHES[cache]),
            ahead=mode == "async",
            max_num_seqs=8,
            **({"speculative_config": NGRAM} if mode == "drafts" else {}),
        )
        plane.drafts = 3 if mode == "drafts" else 0
        runs[way] = run = Run(plane, traffic)
        for name, *arguments in script:
            getattr(run, name)(*arguments)
        run.finish()
    native = runs[NATIVE].plane
    for way in NATIVE_ORDER:
        same = runs[way].plane
        assert same.block_tables == native.block_tables
        assert same.cached_tokens == native.cached_tokens
        assert same.preemptions == native.preemptions
        assert same.outputs == native.outputs
        assert same.finished == native.finished
    for way in WAYS:
        plane = runs[way].plane
        for name, tokens in plane.outputs.items():  # aborts may come earlier or later
            longer, shorter = sorted((tokens, native.outputs[name]), key=len, reverse=True)
            assert longer[: len(shorter)] == shorter
