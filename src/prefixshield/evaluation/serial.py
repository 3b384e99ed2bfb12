"""Serial replay as an engine of the evaluation: no time, no concurrency, every bound."""

from __future__ import annotations

from prefixshield.config import Config
from prefixshield.evaluation.run import Outcome, Run
from prefixshield.sim.replay import Replay, replay_policy
from prefixshield.traces import Workload


def run_serial(
    workload: Workload, config: Config, capacity_blocks: int, for_group: str | None = None
) -> Run:
    """Run a workload in serial replay; ``for_group``: whose hits the clairvoyant bound is for."""
    size = workload.block_size
    policy = replay_policy(config, capacity_blocks, workload.requests, size, for_group)
    replay = Replay(config, policy, size)
    total = replay.result.total
    outcomes = []
    for request in workload.requests:
        hits, rejected = total.blocks_hit, total.rejected
        replay.run([request])
        if total.rejected > rejected:
            outcomes.append(Outcome(request, error="larger than the pool or its group's share"))
        else:
            outcomes.append(Outcome(request, (total.blocks_hit - hits) * size))
    return Run(outcomes, evictions=replay.result.evictions)
