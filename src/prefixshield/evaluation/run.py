"""What one run of one workload under one policy yields, whichever engine it ran on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from prefixshield.config import PAPER_CONTRACTS, Config, ContractSection, GroupSection
from prefixshield.traces.reader import TraceRequest
from prefixshield.traces.workload import Workload

#: The default preset beside the paper's: a policy's name in an experiment.
SHIELD_DEFAULT = "shield-default"

#: Policy and preset behind a name that is no policy's own; all others run under the paper's preset.
NAMED_PRESETS: Mapping[str, tuple[str, str]] = {SHIELD_DEFAULT: ("shield", "default")}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one request."""

    request: TraceRequest
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    ttft_ms: float | None = None
    """Arrival to first token; None: the engine has no time, or the request failed."""
    error: str | None = None
    """None: it was served."""

    @property
    def hit_ratio(self) -> float:
        """h_r = cached tokens over prompt tokens, 0-1 (paper, section IV, Methodology)."""
        return self.cached_tokens / self.request.input_length


@dataclass(slots=True)
class Run:
    """All outcomes of a run, in trace order, and the pool's counts."""

    outcomes: list[Outcome]
    evictions: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Evicted blocks by (owner, causer)."""
    materialised: Counter[str] = field(default_factory=Counter)
    """Blocks charged, by group."""
    promoted: Counter[str] = field(default_factory=Counter)
    """Blocks promoted to the reuse class, by group."""
    peak_blocks: Mapping[str, int] = field(default_factory=dict)
    """Most blocks that a group had cached at any time."""
    mean_debt_blocks: Mapping[str, float] = field(default_factory=dict)
    """Time average of a group's raw debt while measured requests arrive; empty: no debts kept."""
    preemptions: int | None = None
    """None: the engine does not say."""
    duration_s: float | None = None
    """First arrival to last token, on the engine's own clock; None: the engine has no time."""
    max_send_lag_ms: float | None = None
    """How late a request was sent at worst, or would have been; None: the engine has no client."""


def workload_config(
    workload: Workload,
    policy: str,
    speed: float = 1.0,
) -> Config:
    """A policy as an experiment names it, the paper's contracts; the first group is the default.

    ``speed``: how many times faster than its timestamps say the trace is played; refill rates
    rise with it, so that creation stays in proportion to entitlement.
    """
    scaled = {
        name: ContractSection(refill_rate=terms.refill_rate * speed, burst=terms.burst)
        for name, terms in PAPER_CONTRACTS.items()
    }
    groups = {name: GroupSection(contract=contract) for name, contract in workload.groups.items()}
    policy, preset = NAMED_PRESETS.get(policy, (policy, "paper"))
    config = Config(
        preset=preset,
        contracts=scaled,
        groups=groups,
        default_group=next(iter(workload.groups)),
    )
    return config.model_copy(update={"policy": policy})  # which may be one of replay's alone
