"""Ghosts: bounded over all groups, and what one group cannot do to another."""

from hypothesis import example, given, settings
from hypothesis import strategies as st

from prefixshield.core.ghosts import Ghosts

GROUPS = "abc"
CAPACITY = 15  # 13 ghosts, so 4 are within the fair share of one of three groups
LIMIT = 13

calls = st.lists(
    st.tuples(st.sampled_from(GROUPS), st.integers(0, 19), st.sampled_from("rrrrq")), max_size=120
)


@settings(max_examples=100, deadline=None)
@example(  # "first" is lost, rightly; that a recall makes room later does not bring it back
    [("a", n, "r") for n in range(4)]
    + [("b", n, "r") for n in range(2)]
    + [("c", n, "r") for n in range(4)]
    + [("b", 2, "r"), ("a", 0, "q")]
)
@example(  # the second is remembered again, so it is the latest
    [("a", n, "r") for n in range(9)]
    + [("b", 0, "r"), ("a", 0, "r")]
    + [("b", n, "r") for n in range(1, 3)]
    + [("c", 0, "r")]
)
@given(calls)
def test_a_group_loses_none_that_is_within_its_fair_share(script):
    """Scanned: what was always among the latest limit // groups that its group has is there."""
    ghosts = Ghosts(CAPACITY)
    latest = {group: {} for group in GROUPS}  # hash → maker: what may be there
    sure = {group: {} for group in GROUPS}  # the same: what must be, the latest at the end

    def remember(group, block_hash, maker):
        ghosts.remember(group, [block_hash], [maker])
        latest[group][block_hash] = maker
        sure[group].pop(block_hash, None)
        sure[group][block_hash] = maker
        if len(sure[group]) > LIMIT // len(GROUPS):  # it may be lost, and then stays so
            del sure[group][next(iter(sure[group]))]

    def recall(group, block_hash):
        maker = ghosts.recall(group, [block_hash])[0]
        assert maker is None or maker == latest[group].get(block_hash)
        assert maker is not None or block_hash not in sure[group]
        assert ghosts.recall(group, [block_hash])[0] is None, "it was laid to rest"
        latest[group].pop(block_hash, None)
        sure[group].pop(block_hash, None)

    for group in GROUPS:  # all are known from the start
        remember(group, "first", "maker")
    for number, (group, block_hash, call) in enumerate(script):
        if call == "r":
            remember(group, block_hash, number)
        else:
            recall(group, block_hash)
        assert len(ghosts) == sum(ghosts.size(name) for name in GROUPS) <= LIMIT
    for group, remembered in sure.items():
        for block_hash in list(remembered):
            recall(group, block_hash)


def test_a_lone_group_may_have_them_all_until_others_come():
    ghosts = Ghosts(10)
    for number in range(100):
        ghosts.remember("flood", [number], ["maker"])
    assert ghosts.size("flood") == len(ghosts) == 9
    for number in range(4):
        ghosts.remember("quiet", [number], ["maker"])
    assert (ghosts.size("flood"), ghosts.size("quiet")) == (5, 4)
    for number in range(100, 200):
        ghosts.remember("flood", [number], ["maker"])
    assert all(ghosts.recall("quiet", [number])[0] for number in range(4))
    assert not ghosts.recall("flood", [194])[0]
    assert ghosts.recall("flood", [199])[0]


def test_more_groups_than_ghosts_stay_within_the_bound():
    ghosts = Ghosts(1)
    for number in range(50):
        ghosts.remember(f"g{number}", [number], ["maker"])
        assert len(ghosts) <= 1
