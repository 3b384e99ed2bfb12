"""Counters on vLLM's own ``/metrics``.

The scheduler runs in the engine's process, Prometheus is served by the front end. What the driver
counts crosses over inside ``SchedulerStats.num_kv_fetch_reqs_by_stage``, a dictionary of numbers
that vLLM serialises; a logger in the front end takes it out again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm.v1.metrics.loggers import StatLoggerBase

if TYPE_CHECKING:
    from prometheus_client import Counter as PrometheusCounter
    from vllm.config import VllmConfig
    from vllm.v1.metrics.stats import SchedulerStats

_PREFIX = "prefixshield"
_SEPARATOR = "\n"  # in no group's name

#: Every counter: name of the driver's count → (metric, labels, help).
COUNTERS: Mapping[str, tuple[str, tuple[str, ...], str]] = {
    "materialised": (
        "prefixshield_materialised_blocks",
        ("group",),
        "Blocks that became cached and were charged to the group.",
    ),
    "promoted": (
        "prefixshield_promoted_blocks",
        ("group",),
        "Blocks promoted to the reuse class.",
    ),
    "evicted": (
        "prefixshield_evicted_blocks",
        ("owner", "causer"),
        "Cached blocks evicted, by the group that owned them and the group that needed space.",
    ),
    "orphans": (
        "prefixshield_evicted_orphans",
        (),
        "Evicted blocks that no lookup could reach, because a block before them was gone.",
    ),
    "query_tokens": (
        "prefixshield_query_tokens",
        ("group",),
        "Tokens looked up in the prefix cache, as vLLM counts queries.",
    ),
    "hit_tokens": (
        "prefixshield_hit_tokens",
        ("group",),
        "Tokens found in the prefix cache, as vLLM counts hits.",
    ),
    "refused": (
        "prefixshield_refused_requests",
        ("group",),
        "Requests failed at once because they can never fit their group's share.",
    ),
    "reloads": (
        "prefixshield_reloads",
        ("outcome",),
        "Versions of the configuration file read while running: accepted or refused.",
    ),
    "fallbacks": (
        "prefixshield_fallbacks",
        (),
        "Allocations served in native order because the policy had failed.",
    ),
    "policy_failures": ("prefixshield_policy_failures", (), "Failures of the policy."),
}


def encode(counts: Mapping[tuple[str, ...], int]) -> dict[str, int]:
    """Counts as a dictionary that survives vLLM's serialisation."""
    return {_SEPARATOR.join((_PREFIX, *key)): count for key, count in counts.items()}


def take(carrier: dict[str, int]) -> dict[tuple[str, ...], int]:
    """Remove encoded counts from the dictionary that carried them, and return them."""
    keys = [key for key in carrier if key.startswith(_PREFIX + _SEPARATOR)]
    return {tuple(key.split(_SEPARATOR)[1:]): carrier.pop(key) for key in keys}


class ShieldStatLogger(StatLoggerBase):
    """vLLM's stat-logger plug-in; silent in a server that does not run the plug-in's scheduler."""

    _metrics: Mapping[str, PrometheusCounter] | None = None  # one set per process

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        self._engine = str(engine_index)
        self._model = str(vllm_config.model_config.served_model_name)

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        if scheduler_stats is None:
            return
        for (name, *labels), count in take(scheduler_stats.num_kv_fetch_reqs_by_stage).items():
            self._counter(name).labels(self._model, self._engine, *labels).inc(count)

    def log_engine_initialized(self) -> None:
        pass

    @classmethod
    def _counter(cls, name: str) -> PrometheusCounter:
        if cls._metrics is None:
            from prometheus_client import Counter

            cls._metrics = {
                key: Counter(metric, text, ("model_name", "engine", *labels))
                for key, (metric, labels, text) in COUNTERS.items()
            }
        return cls._metrics[name]
