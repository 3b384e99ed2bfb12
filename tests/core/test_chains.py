"""Chains against reachability read aloud: blocks come, go and double in any order."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from prefixshield.core.chains import Chains

BLOCKS = 20


def predecessor(key):
    """Keys are paths, as strings; those of length 1 are first blocks."""
    return key[:-1] or None


class Life(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.chains = Chains(BLOCKS)
        self.key = {}  # block → key

    def orphans(self):
        cached = set(self.key.values())
        return {
            block
            for block, key in self.key.items()
            if any(key[:length] not in cached for length in range(1, len(key)))
        }

    @precondition(lambda self: len(self.key) < BLOCKS)
    @rule(key=st.text("01", min_size=1, max_size=5))
    def add(self, key):
        before = self.orphans()
        block = next(block for block in range(BLOCKS) if block not in self.key)
        self.key[block] = key
        back = self.chains.add([block], "g", [key], [predecessor(key)])
        assert len(back) == len(set(back))
        assert set(back) == before - self.orphans()

    @precondition(lambda self: self.key)
    @rule(data=st.data())
    def remove(self, data):
        before = self.orphans()
        some = st.lists(st.sampled_from(sorted(self.key)), min_size=1, max_size=3, unique=True)
        blocks = data.draw(some)
        for block in blocks:
            del self.key[block]
        lost = self.chains.remove(blocks)
        assert len(lost) == len(set(lost))
        assert set(lost) - set(blocks) == self.orphans() - before

    @precondition(lambda self: len(self.key) > 8)
    @rule()
    def clear(self):
        self.chains.clear()
        self.key.clear()

    @invariant()
    def agree(self):
        found = {block for block in range(BLOCKS) if self.chains.is_orphan(block)}
        assert found == self.orphans()
        assert {block: self.chains.key(block) for block in self.key} == self.key

    def teardown(self):
        for block in list(self.key):
            self.chains.remove([block])
        assert not any(self.chains._groups.values())
        assert len(self.chains._unused) == len(self.chains._key), "a link is never used again"


TestChains = Life.TestCase
TestChains.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def test_a_block_without_a_chain_is_no_orphan_and_orphans_nothing():
    chains = Chains(BLOCKS)
    assert not chains.add([1], "g", ["window"], [None])
    assert not chains.add([2], "g", ["later"], [None])
    assert not chains.remove([1])
    assert not chains.is_orphan(2)


def test_a_copy_keeps_what_follows_reachable():
    chains = Chains(BLOCKS)
    for block, key, parent in ((1, "a", None), (2, "a", None), (3, "ab", "a"), (4, "abc", "ab")):
        chains.add([block], "g", [key], [parent])
    assert not chains.remove([1])
    assert set(chains.remove([2])) == {3, 4}
    assert set(chains.add([5], "g", ["a"], [None])) == {3, 4}


def test_a_key_of_another_group_is_another_key():
    chains = Chains(BLOCKS)
    chains.add([1], "g", ["a"], [None])
    chains.add([2], "h", ["ab"], ["a"])
    assert chains.is_orphan(2)
    assert set(chains.add([3], "h", ["a"], [None])) == {2}
    assert not chains.remove([1])
