"""The catalogue's metrics on vLLM's own ``/metrics``.

The scheduler runs in the engine's process, Prometheus is served by the front end. What the engine
reports (`reporting`) crosses over inside ``SchedulerStats.waiting_lora_adapters``, which vLLM
fills in the front end only. This logger, which vLLM asks before its own, takes it out again, in
every front end and for every engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm.v1.metrics.loggers import StatLoggerBase

from prefixshield import __version__
from prefixshield.config import Config, load_config
from prefixshield.errors import PrefixShieldError
from prefixshield.serving.catalogue import COMMON_LABELS, COUNTERS, GAUGES, OUTCOMES, GroupLabels
from prefixshield.serving.hooks import installed_vllm
from prefixshield.serving.reporting import GAUGE_SCALE, take
from prefixshield.serving.wiring import config_path

if TYPE_CHECKING:
    from prometheus_client import Counter, Gauge
    from vllm.config import VllmConfig
    from vllm.v1.metrics.stats import SchedulerStats


class ShieldStatLogger(StatLoggerBase):
    """vLLM's stat-logger plug-in; silent in a server that does not run the plug-in's scheduler."""

    _counters: Mapping[str, Counter] | None = None  # one set per process
    _gauges: Mapping[str, Gauge]

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        self._labels = (str(vllm_config.model_config.served_model_name), str(engine_index))
        try:
            config = load_config(config_path(vllm_config))
        except PrefixShieldError:  # not switched on, or the scheduler says what is wrong
            return
        self._declare()
        self._start_at_zero(config)

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        if scheduler_stats is None:
            return
        for (name, *labels), number in take(scheduler_stats.waiting_lora_adapters).items():
            self._declare()
            assert self._counters is not None
            if name in GAUGES:
                self._gauges[name].labels(*self._labels, *labels).set(number / GAUGE_SCALE)
            else:
                self._counters[name].labels(*self._labels, *labels).inc(number)

    def log_engine_initialized(self) -> None:
        pass

    def _start_at_zero(self, config: Config) -> None:
        """Export what is known before anything happens: a rate does not see a series' first step.

        Pairs of groups are left out, because there are many.
        """
        assert self._counters is not None
        for name, metric in COUNTERS.items():
            if metric.labels == ("group",):
                for group in GroupLabels(config.groups).own:
                    self._counters[name].labels(*self._labels, group)
            elif metric.labels == ("outcome",):
                for outcome in OUTCOMES[name]:
                    self._counters[name].labels(*self._labels, outcome)
            elif not metric.labels:
                self._counters[name].labels(*self._labels)
        what = (__version__, config.policy, config.preset, installed_vllm()[1])
        self._gauges["info"].labels(*self._labels, *what).set(1)

    @classmethod
    def _declare(cls) -> None:
        """Register the metrics, once in a process.

        Imported only now: vLLM decides where the values live before it starts a front end.
        """
        if cls._counters is not None:
            return
        from prometheus_client import Counter, Gauge

        cls._gauges = {
            key: Gauge(
                metric.name,
                metric.definition,
                (*COMMON_LABELS, *metric.labels),
                multiprocess_mode="mostrecent",
            )
            for key, metric in GAUGES.items()
        }
        cls._counters = {
            key: Counter(metric.name, metric.definition, (*COMMON_LABELS, *metric.labels))
            for key, metric in COUNTERS.items()
        }
