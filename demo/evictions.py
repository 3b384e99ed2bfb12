"""Who lost how many blocks to whom, counted from vLLM's own KV cache events.

vLLM publishes, step by step and in order, which blocks were stored (with their tokens) and which
were removed from the prefix cache. Both servers of the demo are counted by this same code. The
owner of a block is the tenant whose tokens it holds. An allocation first removes what it evicts
and then stores what it fills, so the causer is the tenant of the next block stored in that step;
the demo's prompts are such that every allocation stores at least one block.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

import msgspec
import zmq

#: Causer of evictions that no stored block followed in the same step.
UNKNOWN = "unknown"


class BlockStored(msgspec.Struct, tag=True):
    """Blocks that became cached: their hashes in prefix order, and all their tokens."""

    block_hashes: list[int | bytes]
    token_ids: list[int]


class BlockRemoved(msgspec.Struct, tag=True):
    """Blocks that are no longer cached."""

    block_hashes: list[int | bytes]


class AllBlocksCleared(msgspec.Struct, tag=True):
    """The whole prefix cache was reset."""


class EventBatch(msgspec.Struct, array_like=True):
    """The events of one scheduler step, in order. ``ts`` is seconds since the epoch."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


class EvictionLedger:
    """Counts evicted blocks by (owner, causer) from batches of events fed in order.

    Args:
        tenant_of_token: names the tenant whose prompts contain a token id.

    """

    def __init__(self, tenant_of_token: Callable[[int], str]) -> None:
        self._tenant_of_token = tenant_of_token
        #: Of each cached hash: its owner, and how many blocks hold it.
        self._cached: dict[int | bytes, tuple[str, int]] = {}
        self.evicted_blocks: Counter[tuple[str, str]] = Counter()
        self.last_stored_tokens: list[int] = []

    def feed(self, batch: EventBatch) -> None:
        """Count one step."""
        owners: list[str] = []
        for event in batch.events:
            if isinstance(event, BlockStored):
                causer = self._tenant_of_token(event.token_ids[0])
                self._charge(owners, causer)
                for block_hash in event.block_hashes:
                    copies = self._cached.get(block_hash, (causer, 0))[1]
                    self._cached[block_hash] = (causer, copies + 1)
                self.last_stored_tokens = event.token_ids
            elif isinstance(event, BlockRemoved):
                owners.extend(self._remove(block_hash) for block_hash in event.block_hashes)
            else:
                self._cached.clear()
        self._charge(owners, UNKNOWN)

    def _remove(self, block_hash: int | bytes) -> str:
        owner, copies = self._cached.pop(block_hash, (UNKNOWN, 1))
        if copies > 1:
            self._cached[block_hash] = (owner, copies - 1)
        return owner

    def _charge(self, owners: list[str], causer: str) -> None:
        self.evicted_blocks.update((owner, causer) for owner in owners)
        owners.clear()


class EventTap:
    """A ZeroMQ subscriber for one server's events, open before that server starts.

    The tap binds and vLLM's publisher connects, so no port is raced for. A thread receives all the
    time, for a subscription is only sent to a publisher that has come when somebody uses the
    socket; by the time the server is healthy it has long been there. Batches are only decoded when
    the traffic is over, not to disturb what is being timed.
    """

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.RCVHWM, 0)  # no limit
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        #: For ``--kv-events-config``.
        self.endpoint = f"tcp://127.0.0.1:{port}"
        #: Batches that never arrived, by the gaps in vLLM's sequence numbers from 0.
        self.missing_batches = 0
        self._next_sequence = 0
        self._decoder = msgspec.msgpack.Decoder(EventBatch)
        #: Sequence number and payload of each batch, as they come.
        self._received: queue.SimpleQueue[tuple[int, bytes]] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._receive, name="event-tap", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._closing.set()
        self._thread.join()
        self._context.destroy(linger=0)

    def read_into(self, ledger: EvictionLedger, last_block: Sequence[int], wait_s: float) -> bool:
        """Feed what has been published, up to the block whose tokens are ``last_block``.

        Returns whether that block was seen within ``wait_s`` seconds; if not, events are missing
        at the end, which sequence numbers alone cannot tell.
        """
        deadline = time.monotonic() + wait_s
        end = list(last_block)
        while ledger.last_stored_tokens[-len(end) :] != end:
            try:
                number, payload = self._received.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                return False
            self.missing_batches += number - self._next_sequence
            self._next_sequence = number + 1
            ledger.feed(self._decoder.decode(payload))
        return True

    def _receive(self) -> None:
        while not self._closing.is_set():
            if self._socket.poll(100):
                _topic, number, payload = self._socket.recv_multipart()
                self._received.put((int.from_bytes(number, "big"), payload))
