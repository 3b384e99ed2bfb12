"""Event logs of serial replay worked out by hand; the sums are in the comments.

Block size 4 throughout. A request is ``time group[/contract] tokens ids``; an event is
``event group block class by``. Blocks of a request are released tail first.
"""

import pytest

from prefixshield.config import Config, ContractSection, GroupSection
from prefixshield.sim.replay import Replay, replay_policy
from prefixshield.traces import TraceRequest


def replay(contracts, blocks, script, policy="shield"):
    """Events as text, by request."""
    config = Config(
        preset="paper",
        contracts={
            name: ContractSection(refill_rate=rate, burst=burst)
            for name, (rate, burst) in contracts.items()
        },
        groups={name: GroupSection(contract=next(iter(contracts))) for name in "abcd"},
        default_group="a",
    ).model_copy(update={"policy": policy})  # replay's own policies are none to serve
    requests = []
    for line, text in enumerate(script):
        time, who, tokens, *ids = text.split()
        group, _, contract = who.partition("/")
        request = TraceRequest(
            line=line,
            timestamp_ms=float(time) * 1000,
            input_length=int(tokens),
            output_length=0,
            hash_ids=tuple(map(int, ids)),
            group=group,
            contract=contract or None,
            prefix_id=None,
        )
        requests.append(request)
    run = Replay(config, replay_policy(config, blocks, requests, 4), 4)
    logs = []
    for request in requests:
        log = []
        run.run([request], log.append)
        run.pool.check()
        assert all(event["t"] == request.timestamp_ms / 1000 for event in log)
        logs.append(
            [" ".join(str(e[k]) for k in ("event", "group", "block", "class", "by")) for e in log]
        )
    return logs


def test_the_debtor_pays_and_a_solvent_group_is_promoted():
    logs = replay(
        {"std": (1, 2)},  # 1 block/s, burst 2
        4,
        [
            "0 a 8 1 2",  # a: 2 - 2 = 0, no debt
            "0 b 12 11 12 13",  # 2 free + 1 victim; nobody owes: native order is 2, 1
            "0 a 8 1 2",  # 1 hits (the last token never does) and is promoted: a owes nothing
            "0 c 4 21",  # a and b owe 1 each
        ],
    )
    assert logs == [
        ["admit a 1 probationary a", "admit a 2 probationary a"],
        [
            "evict a 2 probationary b",
            "admit b 11 probationary b",  # b: 2 - 3 = -1
            "admit b 12 probationary b",
            "admit b 13 probationary b",
        ],
        [
            "promote a 1 reuse a",
            "evict b 13 probationary a",  # b owes 1; a's own charge comes later
            "admit a 2 probationary a",  # known, but a: 0 - 1 = -1
        ],
        # Tie at 1: both offer a probationary block; b's 12 was released before a's 2.
        ["evict b 12 probationary c", "admit c 21 probationary c"],
    ]


def test_a_group_owes_under_two_contracts():
    logs = replay(
        {"gold": (4, 0), "base": (1, 0)},  # weights 4 and 1
        6,
        [
            "0 a/gold 8 1 2",  # a: 2/4 = 0.5
            "0 a/base 4 3",  # a: 0.5 + 1/1 = 1.5, W = 4
            "0 b/base 8 11 12",  # b: 2, W = 1
            "0 c/gold 16 21 22 23 24",  # 1 free + 3 victims; c itself owes nothing yet
            "0 d/gold 8 31 32",  # 2 victims; eviction has repaid nothing: a 1.5, b 2, c 4/4 = 1
        ],
    )
    assert logs[3][:3] == [
        "evict b 12 probationary c",  # b 2 → 1
        "evict a 2 probationary c",  # a 1.5 → 1.25 (1.5 - 1/4)
        "evict a 1 probationary c",  # a 1.25 → 1
    ]
    assert logs[4][:2] == [
        "evict b 11 probationary d",  # b 2, and it has nothing left to give
        "evict a 3 probationary d",  # a 1.5 before c 1
    ]


def test_equal_debts_fall_to_the_lower_class_then_to_native_order():
    logs = replay(
        {"base": (1, 0)},
        4,
        [
            "0 a 8 1 2",
            "0 b 8 11 12",
            "0 c 12 21 22 23",  # a 2, b 2; native order 2, 1, 12, 11
        ],
    )
    assert logs[2][:3] == [
        "evict a 2 probationary c",  # tie at 2: a's stands first; a → 1
        "evict b 12 probationary c",  # b 2; b → 1
        "evict a 1 probationary c",  # tie at 1
    ]


def test_equal_debts_of_unequal_contracts():
    logs = replay(
        {"heavy": (2.5, 0), "base": (1, 0)},  # weights 2.5 and 1
        9,
        [
            "0 b/base 8 1 2",  # b: 2
            "0 a/heavy 28 11 12 13 14 15 16 17",  # a: 7/2.5 = 2.8, W = 2.5
            "0 c/base 16 21 22 23 24",
        ],
    )
    assert logs[2][:4] == [
        "evict a 17 probationary c",  # a 2.8 → 2.4
        "evict a 16 probationary c",  # a 2.4 → 2.0
        "evict b 2 probationary c",  # tie at 2.0: b's 2 was released first; b → 1
        "evict a 15 probationary c",  # a 2.0
    ]


def test_a_tie_falls_to_the_lower_class_before_native_order():
    logs = replay(
        {"base": (1, 1)},
        3,
        [
            "0 a 5 1",  # a: 1 - 1 = 0
            "0 a 5 1",  # hit, promoted: a owes nothing
            "0 b 4 11",  # b: 0
            "0 a 4 2",  # a: -1; candidates now 1 (reuse), 11, 2
            "0 b 4 12",  # a owes 1, b nothing: a gives its lowest class, 2; then b: -1
            "0 c 4 21",  # tie at 1: a offers 1 (reuse, oldest), b offers 11 (probationary)
        ],
    )
    assert logs[1] == ["promote a 1 reuse a"]
    assert logs[4][0] == "evict a 2 probationary b"
    assert logs[5][0] == "evict b 11 probationary c"


def test_debt_clears_in_the_middle():
    logs = replay(
        {"std": (1, 1)},
        4,
        [
            "0 a 13 1 2 3",  # a: 1 - 3 = -2, clear at t = 2
            "1 a 13 1 2 3",  # all hit, but a owes 2 - 1 = 1: no promotion
            "2 a 13 1 2 3",  # a owes 2 - 2 = 0: promoted
            "2 b 8 11 12",  # 1 free + 1 victim; nobody owes, all are reuse: native order
            "2 c 4 21",  # b: 1 - 2 = -1
            "3 d 4 31",  # b owes 1 - 1 = 0, c spent its burst: nobody owes
        ],
    )
    assert logs[1] == []
    assert logs[2] == ["promote a 1 reuse a", "promote a 2 reuse a", "promote a 3 reuse a"]
    assert logs[3] == [
        "evict a 3 reuse b",
        "admit b 11 probationary b",
        "admit b 12 probationary b",
    ]
    assert logs[4] == ["evict b 12 probationary c", "admit c 21 probationary c"]
    assert logs[5] == ["evict b 11 probationary d", "admit d 31 probationary d"]


def test_the_last_block_of_a_full_hit_is_materialised_again():
    logs = replay(
        {"std": (1, 10)},
        4,
        [
            "0 a 8 1 2",
            "1 a 8 1 2",  # (8 - 1) // 4 = 1 block can hit; 2 becomes cached a second time
            "2 a 9 1 2",  # two can hit; lookup finds the older 2
            "3 b 12 11 12 13",  # 1 free + 2 victims; nobody owes
        ],
    )
    assert logs[1] == ["promote a 1 reuse a", "admit a 2 normal a"]
    assert logs[2] == ["promote a 2 reuse a"]
    assert logs[3][:2] == ["evict a 2 normal b", "evict a 2 reuse b"]


def test_lru_has_no_classes_and_knows_no_debt():
    logs = replay(
        {"std": (1, 0)},
        3,
        ["0 a 8 1 2", "0 b 4 11", "0 a 5 1", "0 b 8 12 13"],
        policy="lru",
    )
    # Native order after the third request: 2, 11, 1.
    assert logs[2:] == [
        [],
        ["evict a 2 None b", "evict b 11 None b", "admit b 12 None b", "admit b 13 None b"],
    ]


def test_a_request_larger_than_the_pool_is_skipped_and_counted():
    config = Config(
        contracts={"std": ContractSection(refill_rate=1, burst=1)},
        groups={"a": GroupSection(contract="std")},
        default_group="a",
    )
    big = TraceRequest(7, 0.0, 12, 0, (1, 2, 3), None, None, None)
    small = TraceRequest(8, 0.0, 8, 0, (1, 2), None, None, None)
    run = Replay(config, replay_policy(config, 2, [big, small], 4), 4)
    result = run.run([big, small])
    assert result.rejected_lines == [7]
    assert (result.total.requests, result.total.rejected) == (2, 1)
    assert result.total.blocks_queried == 2


def test_the_clairvoyant_keeps_what_is_used_next():
    logs = replay(
        {"std": (1, 0)},
        2,
        [
            "0 a 5 1",
            "0 a 5 2",
            "0 a 5 3",  # 1 is used at 5, 2 never again: 2 goes, though 1 is older
            "0 a 5 4",  # 1 at 5, 3 at 6: 3 goes
            "0 a 4 4",  # its only token block is computed again: 4, used no more, makes room
            "0 a 5 1",
            "0 a 5 3",
        ],
        policy="clairvoyant",
    )
    assert logs[2][0] == "evict a 2 None a"
    assert logs[3][0] == "evict a 3 None a"
    assert logs[4][0] == "evict a 4 None a"
    assert logs[5] == []  # a hit


@pytest.mark.parametrize("policy", ["lru", "shield"])
def test_a_lone_group_fills_the_pool_whatever_it_owes(policy):
    logs = replay(
        {"std": (1, 0)},
        4,
        ["0 a 8 1 2", "0 a 8 3 4", "0 a 4 5"],
        policy,
    )
    assert [len([e for e in log if e.startswith("evict")]) for log in logs] == [0, 0, 1]
