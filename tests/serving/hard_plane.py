"""vLLM's real scheduler without a model, with what an engine does beyond the plain step.

Steps scheduled ahead of the answers (async scheduling), drafts (speculative decoding), pooling
and a connector's reports. The made-up tokens of a request depend on its tokens alone, so they are
the same however it was scheduled.
"""

from __future__ import annotations

import copy
from collections import deque
from pathlib import Path

from control_plane import BLOCK_SIZE, ControlPlane, engine_config, make_request

# isort: split
import torch
from vllm.config import KVTransferConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import RequestStatus

from prefixshield.config import load_config
from prefixshield.serving.namespace import Identity, Namespaces
from prefixshield.serving.scheduler import build_scheduler

CONFIG = """
policy: {policy}
preset: {preset}
mode: {mode}
contracts:
  big: {{refill_rate: 1000, burst: 1000}}
  small: {{refill_rate: 0.5, burst: 4}}
groups:
  victim: {{contract: big, keys: [sk-victim, {{value: sk-batch, contract: small}}]}}
  attacker: {{contract: small}}
  shared: {{contract: small}}
default_group: shared
namespace_secret: for tests
"""

VICTIM = Identity("victim", "big")
VICTIM_BATCH = Identity("victim", "small")
ATTACKER = Identity("attacker", "small")

#: What is compared: (policy, preset, mode); None is vLLM without the plug-in.
NATIVE = None
LRU = ("lru", "default", '"on"')
SHADOW = ("shield", "default", "shadow")
PAPER = ("shield", "paper", '"on"')
DEFAULT = ("shield", "default", '"on"')
WAYS = [LRU, SHADOW, PAPER, DEFAULT]
#: Those that evict what native evicts.
NATIVE_ORDER = [LRU, SHADOW]


def hybrid_cache(num_blocks: int, full: int = 32, window: int = 32) -> KVCacheConfig:
    """A full-attention group and one with a sliding window of 64, of these block sizes."""
    shape = {"num_kv_heads": 1, "head_size": 32, "dtype": torch.float32}
    groups = [
        KVCacheGroupSpec(["full"], FullAttentionSpec(block_size=full, **shape)),
        KVCacheGroupSpec(
            ["window"], SlidingWindowSpec(block_size=window, sliding_window=64, **shape)
        ),
    ]
    return KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)


def mamba_cache(num_blocks: int) -> KVCacheConfig:
    """A full-attention group and one of Mamba layers."""
    cache = hybrid_cache(num_blocks)
    spec = MambaSpec(block_size=32, shapes=((1, 32),), dtypes=(torch.float32,))
    cache.kv_cache_groups[1] = KVCacheGroupSpec(["mamba"], spec)
    return cache


def backed_cache(num_blocks: int) -> KVCacheConfig:
    """One full-attention group that says how large its memory is, as CPU offload asks."""
    spec = FullAttentionSpec(block_size=32, num_kv_heads=1, head_size=32, dtype=torch.float32)
    size = num_blocks * spec.page_size_bytes
    tensor = KVCacheTensor(
        size=size,
        layers=["full"],
        layer_stride=size,
        block_stride=spec.page_size_bytes,
        offset=0,
    )
    return KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[tensor],
        kv_cache_groups=[KVCacheGroupSpec(["full"], spec)],
    )


_configs: dict = {}  # vLLM's configurations, which take long to make


class Traffic:
    """Requests of the tenants of one configuration file."""

    def __init__(self, path: Path) -> None:
        self._token = Namespaces.of(load_config(path), path).token

    def request(self, name, tokens, identity=VICTIM, **options):
        return make_request(
            name, tokens, block_size=BLOCK_SIZE, salt=self._token(identity), **options
        )


def write_configs(folder: Path) -> dict:
    """A configuration file for every way."""
    paths = {}
    for number, (policy, preset, mode) in enumerate(WAYS):
        path = paths[policy, preset, mode] = folder / f"{number}.yaml"
        path.write_text(CONFIG.format(policy=policy, preset=preset, mode=mode))
    return paths


class HardPlane(ControlPlane):
    """A control plane that answers as a whole engine does."""

    def __init__(
        self,
        model: Path,
        path: Path | None,
        num_blocks: int = 65,
        *,
        cache: KVCacheConfig | None = None,
        connector: dict | None = None,
        ahead: bool = False,
        **options,
    ) -> None:
        """``path``: our configuration, None: native; ``ahead``: with async scheduling."""
        key = (str(model), num_blocks, str(path), repr(sorted(options.items())))
        if key not in _configs:
            made = engine_config.__wrapped__(model, num_blocks, str(path or ""), **options)
            _configs[key] = made
        made = _configs[key]
        config = copy.copy(made)
        config.scheduler_config = copy.copy(made.scheduler_config)
        config.scheduler_config.async_scheduling = ahead
        if connector is not None:
            config.kv_transfer_config = KVTransferConfig(kv_role="kv_both", **connector)
        native = AsyncScheduler if ahead else Scheduler
        super().__init__(native if path is None else build_scheduler, config, num_blocks, cache)
        self.ahead = ahead
        self.in_flight: deque = deque()
        self.drafts = 0  # how many tokens are drafted for every running request
        self.invalid_blocks: set[int] = set()
        """Blocks that the connector reports as failed with the next answer."""
        self.lands = True
        """Whether loads that requests wait for land with the next answer."""
        self.accepted = 0

    @property
    def manager(self):
        return self.scheduler.kv_cache_manager

    @property
    def driver(self):
        return self.scheduler.driver

    def counts(self, name: str) -> dict:
        return {key[1:]: n for key, n in self.driver.counts.items() if key[0] == name and n}

    def step(self) -> bool:
        """Schedule a step and answer one; returns whether anything was scheduled or in flight."""
        scheduled = self.schedule()
        requests = self.scheduler.requests
        samples = {
            id_: not requests[id_].is_prefill_chunk for id_ in scheduled.num_scheduled_tokens
        }
        self.block_tables.append(
            {id_: self.manager.get_block_ids(id_) for id_ in scheduled.num_scheduled_tokens}
        )
        self.preemptions += len(scheduled.preempted_req_ids or ())
        self.in_flight.append((scheduled, samples))
        if not (self.ahead and scheduled.num_scheduled_tokens and len(self.in_flight) == 1):
            self._answer_oldest()
        return bool(scheduled.num_scheduled_tokens or self.in_flight)

    def run(self, limit: int = 10_000) -> None:
        super().run(limit)
        while self.in_flight:
            self._answer_oldest()

    def _answer_oldest(self) -> None:
        scheduled, samples = self.in_flight.popleft()
        sampled, pooled = [], []
        for id_, does_sample in samples.items():
            request = self.scheduler.requests.get(id_)
            pooling = request is not None and request.pooling_params is not None
            pooled.append(torch.zeros(1) if pooling and does_sample else None)
            if request is None or pooling or not does_sample:
                sampled.append([])
            else:
                drafts = scheduled.scheduled_spec_decode_tokens.get(id_, [])
                sampled.append(self._sample(request, drafts))
        answer = ModelRunnerOutput(
            req_ids=list(samples),
            req_id_to_index={id_: index for index, id_ in enumerate(samples)},
            sampled_token_ids=sampled,
            pooler_output=pooled if any(p is not None for p in pooled) else None,
            kv_connector_output=self._connector_output(scheduled),
        )
        by_client = self.scheduler.update_from_output(scheduled, answer)
        for outputs in by_client.values():
            for output in outputs.outputs:
                self.outputs[output.request_id] += output.new_token_ids
                if output.prefill_stats is not None:
                    self.cached_tokens[output.request_id] = output.prefill_stats.num_cached_tokens
                if output.finish_reason is not None:
                    self.finished.append(output.request_id)
        if self.drafts:
            self._draft()

    def _sample(self, request, drafts) -> list[int]:
        """The drafts that the made-up model agrees with, and its next token."""
        tokens = list(request.all_token_ids)
        sampled: list[int] = []
        for draft in [*drafts, None]:
            sampled.append(next_token(tokens + sampled))
            if sampled[-1] != draft:
                break
        self.accepted += len(sampled) - 1
        return sampled

    def _draft(self) -> None:
        """Draft for every running request: right at first, wrong from some place on."""
        ids, drafts = [], []
        for request in self.scheduler.running:
            tokens = list(request.all_token_ids)
            right = len(tokens) % (self.drafts + 1)
            for place in range(self.drafts):
                tokens.append(next_token(tokens) if place < right else -7)
            ids.append(request.request_id)
            drafts.append(tokens[-self.drafts :])
        self.scheduler.update_draft_token_ids(DraftTokenIds(ids, drafts))

    def _connector_output(self, scheduled) -> KVConnectorOutput | None:
        if self.scheduler.connector is None:
            return None
        waiting = {
            id_
            for id_, request in self.scheduler.requests.items()
            if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
            and id_ not in self.scheduler.finished_recving_kv_req_ids
        }
        # An aborted request keeps its blocks until its load has landed.
        waiting |= {id_ for id_, r in self.scheduler.requests.items() if r.is_finished()}
        invalid, self.invalid_blocks = self.invalid_blocks, set()
        return KVConnectorOutput(
            finished_recving=waiting if self.lands else None, invalid_block_ids=invalid
        )


def next_token(tokens: list[int]) -> int:
    """A made-up next token that depends on everything before it, as a model's would."""
    return hash((len(tokens), tuple(tokens[-3:]))) % 1000
