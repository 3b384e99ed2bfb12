"""The virtual-time engine: vLLM's real scheduler and KV-cache manager, by a clock of our own.

No model runs. A step takes as long as a linear cost model says, and arrivals, charges and first
tokens are on the same clock, so a run is deterministic and takes a second instead of minutes.
"""

from __future__ import annotations

import copy
import functools
import tempfile
from collections import Counter
from pathlib import Path
from typing import cast

from prefixshield.config import Config, dump_config
from prefixshield.evaluation.profiles import CAPACITY_REQUESTS, CostModel
from prefixshield.evaluation.run import Outcome, Run, workload_config
from prefixshield.serving.control_plane import ControlPlane, engine_config

# isort: split
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from prefixshield.policies.adaptive import AdaptiveShield
from prefixshield.policies.shield import Shield
from prefixshield.serving.namespace import Identity, Namespaces
from prefixshield.serving.scheduler import ShieldScheduler, build_scheduler
from prefixshield.serving.tiny_model import write_tiny_model
from prefixshield.serving.wiring import CONFIG_KEY
from prefixshield.traces import TraceRequest, Workload

#: Milliseconds between two looks at the debts.
_DEBT_SAMPLE_MS = 50.0


def run_virtual_time(
    workload: Workload, config: Config, capacity_blocks: int, costs: CostModel
) -> Run:
    """Run a workload in virtual time.

    ``capacity_blocks``: usable blocks; vLLM's null block comes on top.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(dump_config(config), encoding="utf-8")
        return _Engine(workload, config, path, capacity_blocks, costs).run()


class _Engine:
    def __init__(
        self,
        workload: Workload,
        config: Config,
        path: Path,
        capacity_blocks: int,
        costs: CostModel,
    ) -> None:
        self._workload = workload
        self._config = config
        self._costs = costs
        self._now_ms = 0.0
        self._namespaces = Namespaces.of(config, path)
        self._hasher = get_request_block_hasher(workload.block_size, sha256)
        plane_config = _plane_config(workload.block_size, capacity_blocks + 1, costs)
        plane_config.additional_config = {CONFIG_KEY: str(path)}
        longest = max(r.input_length + r.output_length for r in workload.requests)
        plane_config.model_config.max_model_len = max(
            longest, plane_config.model_config.max_model_len
        )
        self._plane = ControlPlane(
            build_scheduler, plane_config, capacity_blocks + 1, workload.block_size
        )
        self._scheduler = cast(ShieldScheduler, self._plane.scheduler)
        self._scheduler.keep_configuration()
        self._driver = self._scheduler.driver
        self._driver.clock = lambda: self._now_ms / 1000
        self._cached_tokens: dict[str, int] = {}
        self._ttft_ms: dict[str, float] = {}
        self._errors: dict[str, str] = {}
        self._preemptions = 0
        self._peak: Counter[str] = Counter()
        self._debt_seconds = dict.fromkeys(workload.groups, 0.0)
        measured = [r.timestamp_ms for r in workload.requests if r.measured]
        self._window_ms = (measured[0], measured[-1]) if measured else (0.0, 0.0)

    def run(self) -> Run:
        requests = self._workload.requests
        arrived = 0
        while arrived < len(requests) or self._scheduler.has_unfinished_requests():
            while arrived < len(requests) and requests[arrived].timestamp_ms <= self._now_ms:
                self._scheduler.add_request(self._request(requests[arrived]))
                arrived += 1
            if not self._step():
                if arrived == len(requests):
                    assert not self._scheduler.has_unfinished_requests(), "the scheduler is stuck"
                    break
                self._advance(requests[arrived].timestamp_ms - self._now_ms)
        counts = self._driver.counts
        window_s = (self._window_ms[1] - self._window_ms[0]) / 1000
        return Run(
            outcomes=[self._outcome(request) for request in requests],
            evictions=Counter({(k[1], k[2]): n for k, n in counts.items() if k[0] == "evicted"}),
            materialised=Counter({k[1]: n for k, n in counts.items() if k[0] == "materialised"}),
            promoted=Counter({k[1]: n for k, n in counts.items() if k[0] == "promoted"}),
            peak_blocks=dict(self._peak),
            mean_debt_blocks={
                group: self._debt_seconds[group] / window_s
                for group in self._workload.groups
                if window_s and isinstance(self._driver.policy, Shield | AdaptiveShield)
            },
            preemptions=self._preemptions,
            duration_s=(self._now_ms - requests[0].timestamp_ms) / 1000,
        )

    def _step(self) -> bool:
        """One step of the engine; returns whether it had anything to do."""
        scheduled = self._plane.schedule()
        self._preemptions += len(scheduled.preempted_req_ids or ())
        if scheduled.num_scheduled_tokens:
            self._advance(self._costs.step_ms(*self._work(scheduled)))
        outputs = self._plane.answer(scheduled)
        for output in outputs:
            if output.prefill_stats is not None:
                self._cached_tokens[output.request_id] = output.prefill_stats.num_cached_tokens
            if output.new_token_ids:
                self._ttft_ms.setdefault(output.request_id, self._now_ms)
            elif output.finish_reason is not None:
                self._errors[output.request_id] = str(output.finish_reason)
        self._note_residents()
        return bool(scheduled.num_scheduled_tokens or outputs)

    def _advance(self, ms: float) -> None:
        """Let time pass; debts are averaged over the time in which measured requests arrive."""
        end_ms = self._now_ms + ms
        begin, end = self._window_ms
        policy = self._driver.policy
        if isinstance(policy, Shield | AdaptiveShield):
            at, until = max(begin, self._now_ms), min(end, end_ms)
            while at < until:  # debts fall with time, so a long wait is taken in pieces
                piece = min(_DEBT_SAMPLE_MS, until - at)
                middle_s = (at + piece / 2) / 1000
                for group in self._workload.groups:
                    debt = policy.ledger.raw_debt(group, middle_s)
                    self._debt_seconds[group] += debt * piece / 1000
                at += piece
        self._now_ms = end_ms

    def _work(self, scheduled: SchedulerOutput) -> tuple[int, int]:
        """Prompt tokens and decoding sequences of a step."""
        prefill = decoding = 0
        for request_id, tokens in scheduled.num_scheduled_tokens.items():
            request = self._scheduler.requests[request_id]
            if tokens == 1 and request.num_computed_tokens > request.num_prompt_tokens:
                decoding += 1
            else:
                prefill += tokens
        return prefill, decoding

    def _note_residents(self) -> None:
        resident: Counter[str] = Counter()
        for (name, *labels), blocks in self._driver.counts.items():
            if name == "materialised":
                resident[labels[0]] += blocks
            elif name == "evicted":
                resident[labels[0]] -= blocks
        for group, blocks in resident.items():
            self._peak[group] = max(self._peak[group], blocks)

    def _request(self, request: TraceRequest) -> Request:
        group = request.group or self._config.default_group
        contract = request.contract or self._config.default_contract(group)
        return Request(
            request_id=str(request.line),
            prompt_token_ids=_tokens(request, self._workload.block_size),
            sampling_params=SamplingParams(max_tokens=request.output_length, ignore_eos=True),
            pooling_params=None,
            arrival_time=request.timestamp_ms / 1000,
            cache_salt=self._namespaces.token(Identity(group, contract)),
            block_hasher=self._hasher,
        )

    def _outcome(self, request: TraceRequest) -> Outcome:
        request_id = str(request.line)
        if error := self._errors.get(request_id):
            return Outcome(request, error=error)
        ttft_ms = self._ttft_ms[request_id] - request.timestamp_ms
        return Outcome(request, self._cached_tokens[request_id], ttft_ms)


def _tokens(request: TraceRequest, block_size: int) -> list[int]:
    """A prompt without a model: a block's tokens are its id, a question's the request's number."""
    tokens = [i for i in request.hash_ids for _ in range(block_size)][: request.input_length]
    return tokens + [-request.line] * (request.input_length - len(tokens))


def _plane_config(block_size: int, num_blocks: int, costs: CostModel) -> VllmConfig:
    made = engine_config(
        _model(),
        num_blocks,
        "",
        block_size,
        max_num_batched_tokens=costs.max_batched_tokens,
        max_num_seqs=costs.max_sequences,
    )
    config = copy.copy(made)
    config.model_config = copy.copy(made.model_config)
    return config


@functools.cache
def prefill_capacity(costs: CostModel, prompt_tokens: int, capacity_blocks: int = 511) -> float:
    """C_prefill in requests per second: 32 prompts without a common block at once, under LRU.

    Source: paper, section IV, Cache and policy configuration. Blocks are of 16 tokens.
    """
    blocks = prompt_tokens // 16
    requests = tuple(
        TraceRequest(
            line=number + 1,
            timestamp_ms=0.0,
            input_length=prompt_tokens,
            output_length=1,
            hash_ids=tuple(range(number * blocks, (number + 1) * blocks)),
            group=None,
            contract=None,
            prefix_id=None,
        )
        for number in range(CAPACITY_REQUESTS)
    )
    workload = Workload("calibration", 16, {"all": "standard"}, requests)
    run = run_virtual_time(workload, workload_config(workload, "lru"), capacity_blocks, costs)
    assert run.duration_s is not None
    return CAPACITY_REQUESTS / run.duration_s


@functools.cache
def _model() -> Path:
    """Only its configuration is read, once."""
    init_none_hash(sha256)
    folder = tempfile.TemporaryDirectory(prefix="prefixshield-")
    _keep.append(folder)
    return write_tiny_model(Path(folder.name))


_keep: list[tempfile.TemporaryDirectory[str]] = []
