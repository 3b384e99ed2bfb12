"""The scheduler that ``vllm serve --scheduler-cls`` names: vLLM's own, with a policy over its pool.

``build_scheduler`` subclasses exactly the class that vLLM would have chosen, so that async
scheduling survives. It refuses to start whatever it is not sure to understand.
"""

from __future__ import annotations

from typing import Any

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.core.kv_cache_coordinator import (
    HybridKVCacheCoordinator,
    UnitaryKVCacheCoordinator,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.request import Request

from prefixshield import __version__
from prefixshield.config import RecordSection
from prefixshield.errors import IncompatibleEngineError
from prefixshield.policies import PolicySetup, build_policy
from prefixshield.serving import hooks
from prefixshield.serving.admission import Admission
from prefixshield.serving.catalogue import GroupLabels
from prefixshield.serving.driver import PolicyDriver
from prefixshield.serving.namespace import Identity
from prefixshield.serving.pool import Tag, tag, tag_of, take_over
from prefixshield.serving.recording import Recorder
from prefixshield.serving.reload import LiveConfig
from prefixshield.serving.reporting import Reporter
from prefixshield.serving.wiring import PREFIX_ID_KEY, config_path

_log = init_logger("vllm.prefixshield")

#: A longer name of a logical prefix is ignored.
MAX_PREFIX_ID_LENGTH = 128


def build_scheduler(vllm_config: VllmConfig, **arguments: Any) -> Scheduler:
    """What vLLM calls in place of a scheduler class.

    Raises:
        ConfigError: the configuration file is missing or wrong.
        IncompatibleEngineError: the installed vLLM, the model or an option is not supported.

    """
    hooks.verify()
    if vllm_config.diffusion_config is not None:
        raise IncompatibleEngineError("diffusion models need a scheduler that is not supported")
    if getattr(vllm_config.attention_config, "hisparse_config", None) is not None:
        raise IncompatibleEngineError(
            "HiSparse keeps a second pool of blocks, which is not supported"
        )
    if not vllm_config.cache_config.enable_prefix_caching:
        raise IncompatibleEngineError(
            "prefix caching is off (--no-enable-prefix-caching, or a model without it), "
            "expected on: there is no cache to protect"
        )
    chosen = (
        ShieldAsyncScheduler if vllm_config.scheduler_config.async_scheduling else ShieldScheduler
    )
    return chosen(vllm_config=vllm_config, **arguments)


class _Shielding(Scheduler):
    """What both schedulers add to vLLM's."""

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        path = config_path(vllm_config)
        self._live = LiveConfig(path)
        self._tenants = self._live.current
        config = self._tenants.config
        super().__init__(vllm_config, *args, **kwargs)
        coordinator = self.kv_cache_manager.coordinator
        supported = (UnitaryKVCacheCoordinator, HybridKVCacheCoordinator)
        if type(coordinator) not in supported or self.has_mamba_layers:
            raise IncompatibleEngineError(
                f"the model's KV cache is run by {type(coordinator).__qualname__}"
                f"{' with Mamba layers' if self.has_mamba_layers else ''}, "
                "expected attention layers (full, sliding window or both)"
            )
        blocks = self.kv_cache_manager.block_pool.num_gpu_blocks
        policy = build_policy(
            config.policy,
            PolicySetup(
                blocks,
                config.contract_table(),
                list(config.groups),
                config.preset,
                reserved_blocks=1,  # vLLM's null block
            ),
        )
        self._labels = GroupLabels(config.groups)
        self.driver = PolicyDriver(policy, self._tenants.namespaces.default, label=self._labels)
        self.driver.shadow = config.mode == "shadow"
        self._reporter = Reporter(self.driver, self._labels, blocks - 1)
        shares = self.driver.shares
        self._admission = None if shares is None else Admission(self, self.driver, shares)
        take_over(self.kv_cache_manager, self.driver)
        _log.info(
            "PrefixShield %s is active: policy %s, preset %s, mode %s, %d groups, %d contracts, "
            "%d blocks, %s, vLLM %s, configuration %s",
            __version__,
            config.policy,
            config.preset,
            config.mode,
            len(config.groups),
            len(config.contracts),
            blocks,
            "async scheduling" if isinstance(self, AsyncScheduler) else "synchronous scheduling",
            hooks.installed_vllm()[1],
            path,
        )
        self._recorder: Recorder | None = None
        self._record(config.record)
        self._live.watch()
        if shares is not None:
            _log.info("PrefixShield: the share of each group is %d blocks", shares.share_blocks)

    def add_request(self, request: Request) -> None:
        self._follow()
        identity, salt = self._read(request.cache_salt)
        if salt != request.cache_salt:
            # A key with a contract other than its group's own: same namespace, so same hashes.
            request.cache_salt = salt
            request.block_hashes = []
            request.update_block_hashes()
        tag(request, Tag(identity, _named_prefix(request)))
        if getattr(request, "session_id", None) is None:  # what KV events say of who stores a block
            request.session_id = self._tenants.namespaces.head(identity)
        if self._recorder is not None:
            self._recorder.arrived(request, self.driver.clock())
        super().add_request(request)
        refusal = self._admission.refusal(request) if self._admission is not None else None
        if refusal is not None:
            _log.error(
                "PrefixShield: request %s of group %s is refused: %s",
                request.request_id,
                identity.group,
                refusal,
            )
            self.driver.count("refused", identity.group, 1)
            # vLLM's own list of requests that the next step's outputs fail.
            self.encoder_cache_mismatch_reqs.add(request.request_id)

    def _read(self, salt: str | None) -> tuple[Identity, str | None]:
        """The identity behind a salt, and the salt to hash instead."""
        if not self._tenants.namespaces.knows(salt):
            self._live.look(at_once=True)  # the middleware may have been faster
            self._follow()
        return self._tenants.namespaces.read(salt)

    def _follow(self) -> None:
        """Go on under the version of the configuration that is in force."""
        if self._tenants is self._live.current:
            return
        before, self._tenants = self._tenants, self._live.current
        config, namespaces = self._tenants.config, self._tenants.namespaces
        self._labels.admit(config.groups)
        self.driver.shadow = config.mode == "shadow"
        self.driver.reconfigure(config.contract_table(), list(config.groups), namespaces.default)
        if config.record != before.config.record:
            self._record(config.record)

    def keep_configuration(self) -> None:
        """From now on the configuration file may change or go; what is in force stays so."""
        self._live.stop()

    def _record(self, settings: RecordSection | None) -> None:
        """End the recording, and begin another if there is to be one."""
        if self._recorder is not None:
            self._recorder.close()
            self._recorder = None
        if settings is not None:
            engine = self.vllm_config.parallel_config.data_parallel_index
            self._recorder = Recorder(
                settings, engine, self.hash_block_size, self.driver.clock(), self.driver.counts
            )

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        if self._recorder is not None:
            self._recorder.ended(request, tag_of(self.driver, request))
        return super()._free_request(request, *args, **kwargs)

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        ready = super()._handle_blocked_waiting_request(request)
        if self._admission is None:
            return ready
        return ready and self._admission.may_start(request)

    def make_stats(self, *args: Any, **kwargs: Any) -> SchedulerStats | None:
        self._follow()
        self.driver.counts["reloads", "accepted"] = self._live.accepted
        self.driver.counts["reloads", "refused"] = self._live.refused
        stats = super().make_stats(*args, **kwargs)
        if stats is not None:
            idle = not self.has_unfinished_requests()
            try:
                stats.waiting_lora_adapters.update(self._reporter.report(idle=idle))
            except Exception:  # what metrics lack is no reason to stop serving
                _log.exception("PrefixShield: this step's metrics are not reported")
        return stats


class ShieldScheduler(_Shielding, Scheduler):
    """Over vLLM's synchronous scheduler."""


class ShieldAsyncScheduler(_Shielding, AsyncScheduler):
    """Over vLLM's asynchronous scheduler."""


def _named_prefix(request: Request) -> str | None:
    extra = getattr(request.sampling_params, "extra_args", None) or {}
    name = extra.get(PREFIX_ID_KEY)
    return name if isinstance(name, str) and 0 < len(name) <= MAX_PREFIX_ID_LENGTH else None
