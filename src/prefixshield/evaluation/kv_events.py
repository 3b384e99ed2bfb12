"""vLLM's KV events, listened to: which group creates how many blocks, when, and how long they live.

A server with ``--kv-events-config`` publishes over ZeroMQ, step by step, which blocks were stored
and which were removed. PrefixShield's scheduler puts the opaque name of who pays into the events'
``session_id`` (``serving.namespace``). Token ids, which events carry too, are never decoded.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import zmq

from prefixshield.errors import PrefixShieldError
from prefixshield.serving.namespace import Namespaces

CONNECT_TIMEOUT_S = 10.0

#: Events of other media are of tiers behind the pool.
POOL_MEDIA = (None, "GPU")


class BlockStored(msgspec.Struct, tag=True):
    """Blocks that became cached; one hash may be stored several times."""

    block_hashes: list[int | bytes]
    medium: str | None = None
    group_idx: int | None = None
    session_id: str | None = None


class BlockRemoved(msgspec.Struct, tag=True):
    """Blocks that are cached no more."""

    block_hashes: list[int | bytes]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True):
    """The prefix cache was reset."""


class EventBatch(msgspec.Struct, array_like=True):
    """The events of one scheduler step, in order. ``ts``: seconds since the epoch."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


class Creation(NamedTuple):
    """Blocks that one request created in one step."""

    time: float
    """Seconds since listening began."""
    group: str
    contract: str
    blocks: int


@dataclass(frozen=True)
class Heard:
    """What a time of listening to the engines of a server told."""

    seconds: float
    engines: Sequence[Sequence[Creation]]
    """What each created, in order of time."""
    lifetimes_s: Mapping[str, float | None]
    """Median time in the cache of the blocks created meanwhile, by group, in seconds; None: it is
    longer than they were watched."""
    strangers: int
    """Blocks created for nobody whom the configuration names."""
    missing_batches: int
    """Batches published meanwhile that never came."""


class Listener:
    """Counts batches of one engine that are fed in order."""

    def __init__(self, namespaces: Namespaces) -> None:
        self._namespaces = namespaces
        self.creations: list[Creation] = []
        self.strangers = self.missing_batches = 0
        self.watched: defaultdict[str, list[tuple[float, bool]]] = defaultdict(list)
        """By group, for how long each block was seen in the cache, and whether it left it then."""
        self._next_number: int | None = None
        self._began: float | None = None  # on the server's clock
        self._time = 0.0
        # Of each hash cached now: when each of its blocks was stored, and for which group.
        self._cached: defaultdict[tuple[int | None, int | bytes], list[tuple[float, str]]]
        self._cached = defaultdict(list)

    def feed(self, number: int, batch: EventBatch, heard_at: float) -> None:
        """The next batch; ``number``: vLLM's; ``heard_at``: seconds since listening began."""
        if self._next_number is not None:
            self.missing_batches += max(0, number - self._next_number)
        self._next_number = number + 1
        if self._began is None:
            self._began = batch.ts - heard_at
        self._time = max(self._time, batch.ts - self._began)
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                self._lose_sight()
            elif event.medium not in POOL_MEDIA:
                continue
            elif isinstance(event, BlockStored):
                self._stored(event)
            else:
                for block_hash in event.block_hashes:
                    self._removed((event.group_idx, block_hash))

    def end(self, seconds: float) -> None:
        """Nothing is fed any more; ``seconds``: since listening began."""
        self._time = max(self._time, seconds)
        self._lose_sight()

    def _stored(self, event: BlockStored) -> None:
        blocks = len(event.block_hashes)
        if event.session_id is None or not self._namespaces.knows(event.session_id):
            self.strangers += blocks
            return
        identity, _ = self._namespaces.read(event.session_id)
        self.creations.append(Creation(self._time, *identity, blocks))
        for block_hash in event.block_hashes:
            self._cached[event.group_idx, block_hash].append((self._time, identity.group))

    def _removed(self, key: tuple[int | None, int | bytes]) -> None:
        copies = self._cached.get(key)
        if copies is None:
            return  # stored before, or for a stranger
        since, group = copies.pop(0)
        if not copies:
            del self._cached[key]
        self.watched[group].append((self._time - since, True))

    def _lose_sight(self) -> None:
        """Nothing more will be known of what is cached now."""
        for copies in self._cached.values():
            for since, group in copies:
                self.watched[group].append((self._time - since, False))
        self._cached.clear()


def median_lifetime(watched: Iterable[tuple[float, bool]]) -> float | None:
    """The median of lifetimes, in seconds, of which some were not seen to end.

    ``watched``: for how long each was seen, and whether it ended then. None: not reached. Source:
    Kaplan and Meier, Nonparametric estimation from incomplete observations, 1958.
    """
    ages = sorted(watched, key=lambda one: (one[0], not one[1]))
    surviving = 1.0
    for number, (age, ended) in enumerate(ages):
        if ended:
            surviving *= 1 - 1 / (len(ages) - number)
            if surviving < 0.5 + 1e-9:
                return age
    return None


def heard(listeners: Sequence[Listener], seconds: float) -> Heard:
    """What all of them counted, after so long; nothing can be fed to them any more."""
    watched: defaultdict[str, list[tuple[float, bool]]] = defaultdict(list)
    for listener in listeners:
        listener.end(seconds)
        for group, found in listener.watched.items():
            watched[group] += found
    return Heard(
        seconds,
        [listener.creations for listener in listeners],
        {group: median_lifetime(found) for group, found in watched.items()},
        sum(listener.strangers for listener in listeners),
        sum(listener.missing_batches for listener in listeners),
    )


def listen(endpoints: Sequence[str], seconds: float, namespaces: Namespaces) -> Heard:
    """Listen for so long to engines that publish at one endpoint each.

    Raises PrefixShieldError when an endpoint is none or given twice, or speaks of something else.
    """
    if twice := [one for one, times in Counter(endpoints).items() if times > 1]:
        raise PrefixShieldError(f"{twice[0]}: found twice, expected one endpoint of each engine")
    decoder = msgspec.msgpack.Decoder(EventBatch)
    listeners = [Listener(namespaces) for _ in endpoints]
    with zmq.Context() as context, ExitStack() as closing:
        poller = zmq.Poller()
        engines: dict[zmq.Socket[bytes], tuple[str, Listener]] = {}
        for endpoint, listener in zip(endpoints, listeners, strict=True):
            socket = closing.enter_context(context.socket(zmq.SUB))
            _connect(socket, endpoint)
            poller.register(socket, zmq.POLLIN)
            engines[socket] = endpoint, listener
        for socket in engines:
            socket.setsockopt(zmq.SUBSCRIBE, b"")
        began = time.monotonic()
        while (left := began + seconds - time.monotonic()) > 0:
            for socket, _ in poller.poll(int(1 + 1000 * left)):
                endpoint, listener = engines[socket]
                message = socket.recv_multipart()
                try:
                    _topic, number, payload = message
                    batch = decoder.decode(payload)
                except (ValueError, msgspec.MsgspecError) as error:
                    raise PrefixShieldError(
                        f"{endpoint}: found no KV events of vLLM there: {error}"
                    ) from None
                listener.feed(int.from_bytes(number, "big"), batch, time.monotonic() - began)
    return heard(listeners, seconds)


def _connect(socket: zmq.Socket[bytes], endpoint: str) -> None:
    """Return once the publisher has answered; nothing is heard before a subscription."""
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVHWM, 0)  # no limit
    monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
    try:
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        raise PrefixShieldError(
            f"{endpoint}: cannot be connected to: {zmq.strerror(error.errno or 0)}, "
            "expected tcp://HOST:PORT or ipc://PATH"
        ) from None
    connected = monitor.poll(int(1000 * CONNECT_TIMEOUT_S))
    socket.disable_monitor()
    if not connected:
        raise PrefixShieldError(
            f"{endpoint}: nobody publishes there: no connection within {CONNECT_TIMEOUT_S:g} s"
        )
