"""Ghosts: bounded over all groups, and what one group cannot do to another."""

from hypothesis import given, settings
from hypothesis import strategies as st

from prefixshield.core.ghosts import Ghosts

GROUPS = "abc"
CAPACITY = 15  # 13 ghosts, so 4 are within the fair share of one of three groups
LIMIT = 13

calls = st.lists(
    st.tuples(st.sampled_from(GROUPS), st.integers(0, 19), st.sampled_from("rrrrq")), max_size=120
)


@settings(max_examples=100, deadline=None)
@given(calls)
def test_a_group_loses_none_that_is_within_its_fair_share(script):
    """Scanned: the latest limit // groups that a group remembered and did not recall are there."""
    ghosts = Ghosts(CAPACITY)
    latest = {group: {} for group in GROUPS}  # hash → maker, the one remembered last at the end
    for group in GROUPS:  # all are known from the start
        ghosts.remember(group, ["first"], ["maker"])
        latest[group]["first"] = "maker"
    for number, (group, block_hash, call) in enumerate(script):
        if call == "r":
            ghosts.remember(group, [block_hash], [number])
            latest[group].pop(block_hash, None)
            latest[group][block_hash] = number
        else:
            sure = list(latest[group])[-(LIMIT // len(GROUPS)) :]
            maker = ghosts.recall(group, [block_hash])[0]
            assert maker is None or maker == latest[group][block_hash]
            assert maker is not None or block_hash not in sure
            latest[group].pop(block_hash, None)
        assert len(ghosts) == sum(ghosts.size(name) for name in GROUPS) <= LIMIT
    for group, remembered in latest.items():
        for block_hash, maker in list(remembered.items())[-(LIMIT // len(GROUPS)) :]:
            assert ghosts.recall(group, [block_hash])[0] == maker
            assert ghosts.recall(group, [block_hash])[0] is None, "it was laid to rest"


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
