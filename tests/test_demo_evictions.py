"""The demo's eviction counts: from events to owners and causers."""

from __future__ import annotations

import pytest

pytest.importorskip("zmq")
msgspec = pytest.importorskip("msgspec")

import zmq  # noqa: E402 - after importorskip

from demo.evictions import (  # noqa: E402
    UNKNOWN,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    EventTap,
    EvictionLedger,
)


def tenant_of_token(token: int) -> str:
    return "victim" if token < 1000 else "attacker"


def stored(token: int, *hashes: bytes) -> BlockStored:
    return BlockStored(block_hashes=list(hashes), token_ids=[token] * 32 * len(hashes))


def batch(*events: BlockStored | BlockRemoved | AllBlocksCleared) -> EventBatch:
    return EventBatch(ts=0.0, events=list(events))


@pytest.fixture
def ledger() -> EvictionLedger:
    return EvictionLedger(tenant_of_token)


def test_the_causer_is_whoever_stores_next(ledger: EvictionLedger) -> None:
    ledger.feed(batch(stored(1, b"v1", b"v2"), stored(1001, b"a1")))
    ledger.feed(
        batch(
            BlockRemoved([b"v1"]),
            BlockRemoved([b"a1"]),
            stored(1002, b"a2"),
            BlockRemoved([b"v2"]),
            stored(2, b"v3"),
        )
    )
    assert ledger.evicted_blocks == {
        ("victim", "attacker"): 1,
        ("attacker", "attacker"): 1,
        ("victim", "victim"): 1,
    }


def test_a_removal_that_nothing_follows_has_no_known_causer(ledger: EvictionLedger) -> None:
    ledger.feed(batch(stored(1, b"v1")))
    ledger.feed(batch(BlockRemoved([b"v1"])))
    ledger.feed(batch(stored(1001, b"a1")))
    assert ledger.evicted_blocks == {("victim", UNKNOWN): 1}


def test_every_copy_of_a_hash_is_counted(ledger: EvictionLedger) -> None:
    ledger.feed(batch(stored(1, b"v1"), stored(1, b"v1")))
    ledger.feed(batch(BlockRemoved([b"v1"]), BlockRemoved([b"v1"]), stored(1001, b"a1")))
    assert ledger.evicted_blocks == {("victim", "attacker"): 2}


def test_a_reset_forgets_without_counting(ledger: EvictionLedger) -> None:
    ledger.feed(batch(stored(1, b"v1")))
    ledger.feed(batch(AllBlocksCleared(), stored(1001, b"a1")))
    assert not ledger.evicted_blocks


def test_the_tap_reads_batches_and_reports_gaps(ledger: EvictionLedger) -> None:
    context = zmq.Context()
    with EventTap() as tap, context.socket(zmq.XPUB) as publisher:
        publisher.connect(tap.endpoint)
        assert publisher.poll(5000), "the tap subscribes"
        for number, event in ((0, stored(1, b"v1")), (2, stored(1001, b"a1"))):
            payload = msgspec.msgpack.encode(batch(event))
            publisher.send_multipart((b"", number.to_bytes(8, "big"), payload))
        assert tap.read_into(ledger, [1001] * 32, wait_s=5)
        assert tap.missing_batches == 1
        assert not tap.read_into(ledger, [7] * 32, wait_s=0.05), "an end that never comes"
    context.destroy(linger=0)


@pytest.mark.engine
def test_vllm_publishes_what_the_demo_reads() -> None:
    """Guards the fields' names and the encoding; not the order of vLLM's events."""
    theirs = pytest.importorskip("vllm.distributed.kv_events")
    events = [
        theirs.BlockStored(
            block_hashes=[b"v1"],
            parent_block_hash=None,
            token_ids=[1] * 32,
            block_size=32,
            lora_id=None,
            medium="GPU",
            lora_name=None,
        ),
        theirs.BlockRemoved(block_hashes=[b"v1"], medium="GPU"),
        theirs.AllBlocksCleared(),
    ]
    payload = msgspec.msgpack.encode(theirs.KVEventBatch(ts=1.0, events=events))
    decoded = msgspec.msgpack.decode(payload, type=EventBatch)
    assert decoded.events == [
        BlockStored(block_hashes=[b"v1"], token_ids=[1] * 32),
        BlockRemoved(block_hashes=[b"v1"]),
        AllBlocksCleared(),
    ]
