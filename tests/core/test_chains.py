"""Chains against reachability read aloud: blocks come, go and double in any order."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from prefixshield.core import chains as chains_module
from prefixshield.core.chains import Chains

BLOCKS = 20


def predecessor(key):
    """Keys are paths, as strings; those of length 1 are first blocks."""
    return key[:-1] or None


class Life(RuleBasedStateMachine):
    finds_all = True
    """Whether every call has enough looks."""

    def __init__(self):
        super().__init__()
        self.chains = Chains(BLOCKS)
        self.key = {}  # block → key
        self.told = set()  # of the cached blocks, those that were orphans when last told of

    def orphans(self):
        cached = set(self.key.values())
        return {
            block
            for block, key in self.key.items()
            if any(key[:length] not in cached for length in range(1, len(key)))
        }

    def hear(self, turned):
        lost, back = turned
        assert len({*lost, *back}) == len(lost) + len(back)
        self.told = (self.told | set(lost)) - set(back)
        self.told &= self.key.keys()

    @precondition(lambda self: len(self.key) < BLOCKS)
    @rule(key=st.text("01", min_size=1, max_size=5))
    def add(self, key):
        block = next(block for block in range(BLOCKS) if block not in self.key)
        self.key[block] = key
        turned = self.chains.add([block], "g", [key], [predecessor(key)])
        if self.chains.is_orphan(block):
            self.told.add(block)
        self.hear(turned)

    @precondition(lambda self: self.key)
    @rule(data=st.data())
    def remove(self, data):
        some = st.lists(st.sampled_from(sorted(self.key)), min_size=1, max_size=3, unique=True)
        blocks = data.draw(some)
        for block in blocks:
            del self.key[block]
        self.hear(self.chains.remove(blocks))

    @precondition(lambda self: len(self.key) > 8)
    @rule()
    def clear(self):
        self.chains.clear()
        self.key.clear()
        self.told.clear()

    @rule()
    def find_the_others(self):
        before = -1
        while before != len(self.chains._doubtful):
            before = len(self.chains._doubtful)
            self.hear(self.chains.remove([]))
        assert not before
        assert self.told == self.orphans()

    @invariant()
    def agree(self):
        found = {block for block in range(BLOCKS) if self.chains.is_orphan(block)}
        assert found == self.told
        if self.finds_all:
            assert found == self.orphans()
        assert {block: self.chains.key(block) for block in self.key} == self.key
        assert len(self.chains._doubtful) <= 2 * len(self.chains._key)

    def teardown(self):
        for block in list(self.key):
            self.chains.remove([block])
        assert not any(self.chains._groups.values())
        assert len(self.chains._unused) == len(self.chains._key), "a link is never used again"


@pytest.mark.parametrize("looks", [1, 2, 4096])
def test_what_turns_is_told_once_and_found_at_last(looks, monkeypatch):
    monkeypatch.setattr(chains_module, "LOOKS_PER_CALL", looks)
    case = type("Machine", (Life,), {"finds_all": looks > BLOCKS}).TestCase
    case.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
    case().runTest()


def test_one_call_does_not_look_at_all_that_hangs_on_a_prefix(monkeypatch):
    monkeypatch.setattr(chains_module, "LOOKS_PER_CALL", 5)
    chains = Chains(BLOCKS)
    chains.add([0], "g", ["a"], [None])
    chains.add(range(1, 13), "g", [f"a{number}" for number in range(12)], ["a"] * 12)
    assert [len(chains.remove(blocks).lost) for blocks in ([0], [], [], [])] == [5, 5, 2, 0]
    assert len(chains.add([0], "g", ["a"], [None]).back) == 5


def test_a_block_without_a_chain_is_no_orphan_and_orphans_nothing():
    chains = Chains(BLOCKS)
    assert not any(chains.add([1], "g", ["window"], [None]))
    assert not any(chains.add([2], "g", ["later"], [None]))
    assert not any(chains.remove([1]))
    assert not chains.is_orphan(2)


def test_a_copy_keeps_what_follows_reachable():
    chains = Chains(BLOCKS)
    for block, key, parent in ((1, "a", None), (2, "a", None), (3, "ab", "a"), (4, "abc", "ab")):
        chains.add([block], "g", [key], [parent])
    assert not any(chains.remove([1]))
    assert set(chains.remove([2]).lost) == {3, 4}
    assert set(chains.add([5], "g", ["a"], [None]).back) == {3, 4}


def test_a_key_of_another_group_is_another_key():
    chains = Chains(BLOCKS)
    chains.add([1], "g", ["a"], [None])
    chains.add([2], "h", ["ab"], ["a"])
    assert chains.is_orphan(2)
    assert set(chains.add([3], "h", ["a"], [None]).back) == {2}
    assert not any(chains.remove([1]))
