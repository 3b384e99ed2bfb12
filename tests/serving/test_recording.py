"""Requests recorded on vLLM's real scheduler: readable as a trace, true of the engine, and empty of content."""

import json
import logging
import os
import random
import stat

import pytest

pytest.importorskip("vllm")

from control_plane import BLOCK_SIZE, ControlPlane, engine_config, make_request

from prefixshield.config import load_config
from prefixshield.evaluation.entitlements import from_trace
from prefixshield.serving.namespace import Identity, Namespaces
from prefixshield.serving.recording import ID_BITS, recording_path
from prefixshield.serving.reload import LiveConfig
from prefixshield.serving.scheduler import build_scheduler
from prefixshield.sim.replay import Replay, replay_policy
from prefixshield.traces import read_trace

pytestmark = pytest.mark.engine

CONFIG = """
policy: lru
contracts:
  big: {refill_rate: 20, burst: 50}
  small: {refill_rate: 2, burst: 10}
groups:
  shop: {contract: big, keys: [sk-shop-key]}
  search: {contract: big, keys: [sk-search-key, {value: sk-batch-key, contract: small}]}
  bulk: {contract: small, keys: [sk-bulk-key]}
default_group: bulk
namespace_secret: secret of the tests
"""
BLOCKS = 100
WAYS = (("lru", "default"), ("shield", "default"), ("shield", "paper"), ("s3fifo", "default"))


class Recorded:
    """A scheduler that records, by a clock of the tests' own."""

    def __init__(self, tiny_model, folder, record):
        self.file = folder / "requests.jsonl"
        self.config_path = folder / "tenants.yaml"
        self.write(record)
        config = engine_config(tiny_model, BLOCKS + 1, str(self.config_path))
        self.plane = ControlPlane(build_scheduler, config, BLOCKS + 1)
        self.now = 0.0
        self.plane.scheduler.driver.clock = lambda: self.now
        if self.plane.scheduler._recorder is not None:
            self.plane.scheduler._recorder._start = 0.0
        self.salts = []

    def write(self, record):
        self.config_path.write_text(CONFIG + record.format(file=self.file))

    def follow(self, record):
        self.write(record)
        self.plane.scheduler._live.look(at_once=True)
        self.plane.scheduler._follow()

    def submit(self, name, identity, tokens, **options):
        config = load_config(self.config_path)
        salt = Namespaces.of(config, self.config_path).token(identity)
        self.salts.append(salt)
        self.plane.add(make_request(name, tokens, block_size=BLOCK_SIZE, salt=salt, **options))

    @property
    def counts(self):
        counts = self.plane.scheduler.driver.counts
        return counts["recorded", "written"], counts["recorded", "lost"]


RECORD = "record: {{path: {file}, max_megabytes: 1}}\n"


@pytest.fixture
def recorded(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr(LiveConfig, "watch", lambda self: None)  # the tests say when to look
    return lambda record=RECORD: Recorded(tiny_model, tmp_path, record)


SHOP = Identity("shop", "big")
BULK = Identity("bulk", "small")


def traffic(seed, count, whole_blocks):
    """Requests of three groups that come back to some of their prefixes, and what they are."""
    r = random.Random(seed)
    groups = [SHOP, Identity("search", "big"), Identity("search", "small"), BULK]
    shared = [[r.randrange(1000) for _ in range(20 * BLOCK_SIZE)] for _ in range(12)]
    for number in range(count):
        identity = groups[r.choice((0, 0, 1, 1, 2, 3))]
        prefix = r.choice(shared)[: BLOCK_SIZE * r.randrange(1, 20)]
        tail = r.randrange(3) if whole_blocks else 0
        tokens = prefix + [r.randrange(1000) for _ in range(tail * BLOCK_SIZE)]
        if not whole_blocks:
            tokens += [r.randrange(1000) for _ in range(r.randrange(1, 70))]
        yield number, identity, tokens


def replayed(recorded, policy, preset):
    config = load_config(recorded.config_path)
    config = config.model_copy(update={"policy": policy, "preset": preset})
    requests = read_trace(recorded.file, BLOCK_SIZE)
    chosen = replay_policy(config, BLOCKS, requests, BLOCK_SIZE)
    return Replay(config, chosen, BLOCK_SIZE).run(requests)


def test_a_serial_recording_replays_to_the_engines_own_hits(recorded):
    """One request after the other, in whole blocks: exactly, group by group."""
    engine = recorded()
    sent = []
    for number, identity, tokens in traffic(1, 150, whole_blocks=True):
        engine.now += 0.25
        answer = 1 if number % 2 else 3
        name = f"request {number}"
        engine.submit(name, identity, tokens, max_tokens=answer, prefix_id="named prefix")
        engine.plane.run()
        row = (1000 * engine.now, len(tokens), answer, identity.group, identity.contract)
        sent.append(row)
    requests = read_trace(engine.file, BLOCK_SIZE)
    assert sent == [
        (r.timestamp_ms, r.input_length, r.output_length, r.group, r.contract) for r in requests
    ]
    results = {way: replayed(engine, *way) for way in WAYS}
    lru = results["lru", "default"]
    counts = engine.plane.scheduler.driver.counts
    for group, tally in lru.groups.items():
        assert tally.rejected == 0
        assert tally.blocks_hit * BLOCK_SIZE == counts["hit_tokens", group] > 0
    assert sum(lru.evictions.values()) > 100, "the pool was under pressure"
    assert {result.total.requests for result in results.values()} == {150}
    assert len({result.total.blocks_hit for result in results.values()}) > 1, "policies differ"
    assert engine.counts == (150, 0)
    config = load_config(engine.config_path)
    proposal = from_trace(requests, config, BLOCKS, BLOCK_SIZE, None, 10.0)
    assert {way: effect.hit_ratio for way, effect in proposal.effects[None].items()}.items() >= {
        ("lru", lru.total.hit_ratio),
        ("present", results["shield", "default"].total.hit_ratio),
    }


def test_a_recording_of_concurrent_requests_replays_to_about_the_same(recorded):
    """Up to four under way at a time, prompts and answers that end inside blocks: within 3 points."""
    engine = recorded()
    prompts = 0
    for number, identity, tokens in traffic(2, 300, whole_blocks=False):
        engine.now += 0.05
        engine.submit(f"request {number}", identity, tokens, max_tokens=1 + number % 40)
        prompts += len(tokens)
        while len(engine.plane.scheduler.requests) > 3:
            engine.plane.step()
    engine.plane.run()
    lru = replayed(engine, "lru", "default").total
    hit_tokens = sum(
        n for key, n in engine.plane.scheduler.driver.counts.items() if key[0] == "hit_tokens"
    )
    assert lru.requests == 300
    assert abs(lru.blocks_hit * BLOCK_SIZE - hit_tokens) / prompts < 0.03
    assert hit_tokens / prompts > 0.1


def test_nothing_of_prompts_salts_hashes_or_secrets_is_in_it(recorded):
    engine = recorded()
    tokens = list(range(7000, 7000 + 3 * BLOCK_SIZE))
    hashes = []
    for number in range(2):
        engine.submit(f"client's id {number}", SHOP, tokens, max_tokens=2)
        request = engine.plane.scheduler.requests[f"client's id {number}"]
        hashes += [bytes(block_hash) for block_hash in request.block_hashes]
        engine.plane.run()
    text = engine.file.read_bytes()
    rows = [json.loads(line) for line in text.splitlines()]
    assert [set(row) for row in rows] == [
        {"timestamp", "input_length", "output_length", "hash_ids", "group", "contract"}
    ] * 2
    assert rows[0]["hash_ids"] == rows[1]["hash_ids"]
    assert all(0 <= number < 2**ID_BITS for number in rows[0]["hash_ids"])
    told = [salt.encode() for salt in engine.salts] + [b"client's id", b"sk-", b"secret", b"7001"]
    told += [engine.plane.scheduler._recorder._key.hex().encode()]
    for block_hash in hashes:
        number = int.from_bytes(block_hash, "big")
        told += [block_hash, block_hash.hex().encode()]
        told += [str(number >> shift).encode() for shift in (0, 192, 256 - ID_BITS)]
        told += [str(number % 2**bits).encode() for bits in (ID_BITS, 64)]
    assert [secret for secret in told if secret in text] == []
    assert stat.S_IMODE(os.stat(engine.file).st_mode) == 0o600
    engine.follow("")
    engine.file.unlink()
    engine.follow(RECORD)
    engine.submit("again", SHOP, tokens, max_tokens=2)
    engine.plane.run()
    (again,) = read_trace(engine.file, BLOCK_SIZE)
    assert not set(again.hash_ids) & set(rows[0]["hash_ids"]), "every recording has its own key"


def test_it_begins_and_ends_with_the_configuration(recorded):
    """Without a restart; only requests that arrive while it records, and that run."""
    engine = recorded("")
    assert not engine.file.exists()
    engine.submit("before", SHOP, range(BLOCK_SIZE), max_tokens=2)
    engine.now = 100.0
    engine.follow(RECORD)
    engine.now = 101.5
    engine.submit("during", SHOP, range(BLOCK_SIZE), max_tokens=40)
    engine.submit("aborted at once", SHOP, range(BLOCK_SIZE))
    engine.plane.abort("aborted at once")
    engine.plane.step()
    engine.plane.step()
    engine.plane.abort("during")
    engine.plane.run()
    (request,) = read_trace(engine.file, BLOCK_SIZE)
    assert (request.timestamp_ms, request.input_length, request.output_length) == (1500, 32, 2)
    engine.follow("")
    engine.submit("after", SHOP, range(BLOCK_SIZE), max_tokens=2)
    engine.plane.run()
    assert len(read_trace(engine.file, BLOCK_SIZE)) == 1
    assert engine.counts == (1, 0)


def test_it_ends_at_its_size_and_says_so(recorded, caplog_vllm):
    engine = recorded()
    engine.plane.scheduler._recorder._most_bytes = 500
    for number in range(10):
        engine.submit(str(number), SHOP, range(2 * BLOCK_SIZE), max_tokens=1)
        engine.plane.run()
    written, lost = engine.counts
    assert 0 < written < 10
    assert lost == 0
    assert len(read_trace(engine.file, BLOCK_SIZE)) == written
    assert engine.file.stat().st_size <= 500
    (said,) = [text for text in caplog_vllm.messages if "as large as it may be" in text]
    assert f"{engine.file} is as large as it may be: it has {written} requests" in said


def test_a_failure_is_said_once_counted_and_touches_nobody(recorded, caplog_vllm, monkeypatch):
    """A file that is there is never written over; a full disk leaves whole lines only."""
    engine = recorded("")
    engine.file.write_text("somebody's\n")
    engine.follow(RECORD)
    for number in range(3):
        engine.submit(str(number), SHOP, range(2 * BLOCK_SIZE), max_tokens=1)
    engine.plane.run()
    assert sorted(engine.plane.finished) == ["0", "1", "2"]
    assert engine.counts == (0, 3)
    assert engine.file.read_text() == "somebody's\n"
    (said,) = [text for text in caplog_vllm.messages if "cannot be recorded to" in text]
    assert f"{engine.file}: cannot be recorded to: File exists" in said

    engine.follow("")
    engine.file.unlink()
    engine.follow(RECORD)
    whole = os.write
    for number in range(3, 6):
        cut = 10 if number == 4 else None
        monkeypatch.setattr(os, "write", lambda file, data, cut=cut: whole(file, data[:cut]))
        engine.submit(str(number), SHOP, range(2 * BLOCK_SIZE), max_tokens=1)
        engine.plane.run()
    assert engine.counts == (2, 4)
    assert len(read_trace(engine.file, BLOCK_SIZE)) == 2


def test_data_parallel_engines_write_files_of_their_own(recorded, tiny_model, tmp_path):
    engine = recorded()
    other = engine_config(tiny_model, BLOCKS + 1, str(engine.config_path), max_num_seqs=7)
    other.parallel_config.data_parallel_index = 2
    second = ControlPlane(build_scheduler, other, BLOCKS + 1)
    assert second.scheduler._recorder.path == tmp_path / "requests-2.jsonl"
    assert {path.name for path in tmp_path.glob("*.jsonl")} == {
        "requests.jsonl",
        "requests-2.jsonl",
    }
    assert recording_path(tmp_path / "r", 1) == tmp_path / "r-1"


@pytest.fixture
def caplog_vllm(caplog, monkeypatch):
    """vLLM's loggers do not hand records up to the root."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    return caplog
