"""Ordinary and attacked traffic of many shapes, seeded: what eviction policies are compared on.

Every mixture is one a fixed order of eviction can be wrong about: hot sets that move, loops a
little larger than the pool, scans, growing prompts, reuse that an attacker manufactures. All sizes
are in blocks, so a workload for other blocks has other tokens and the same pressure: block for
block the same, for blocks of two tokens or more. Groups cycle through the paper's contracts, and
every request names its group's, so that a written trace needs no configuration.

What is made up here: all numbers. Only conversations are fitted to data (`chat_model`).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, cycle

from prefixshield.traces.conversations import sharegpt_like
from prefixshield.traces.reader import TraceRequest
from prefixshield.traces.workload import Workload

_CONTRACTS = ("critical", "standard", "best-effort")

#: Refill rate of best-effort in the paper's contracts, blocks per second.
BEST_EFFORT_RATE = 16.0

#: Tokens per block that the model of conversations draws for; lengths are scaled to other blocks.
_CHAT_BLOCK_SIZE = 16

Prefix = tuple[int, ...]


class _Mixer:
    """Collects requests in any order of time; ids are new at every call, so no groups share one."""

    def __init__(self, name: str, seed: int, block_size: int) -> None:
        self.rng = random.Random(f"{name} {seed}")  # as text: stable over Pythons
        self.used = 0
        """Unique blocks so far, if every one was asked for."""
        self._block_size = block_size
        self._asked: list[tuple[float, str, Prefix, float, float, bool]] = []

    def fresh(self, least: int, most: int | None = None) -> Prefix:
        """Blocks that nobody has seen: so many, or uniformly many up to ``most``."""
        size = least if most is None else self.rng.randint(least, most)
        self.used += size
        return tuple(range(self.used - size, self.used))

    def ask(
        self,
        at_s: float,
        group: str,
        prompt: Prefix,
        *,
        tail_blocks: float = 0.5,
        output_blocks: float = 4.0,
        measured: bool = True,
    ) -> None:
        """A request for full blocks and less than a block more, so that all of them can hit."""
        self._asked.append((at_s, group, prompt, tail_blocks, output_blocks, measured))

    def spread(self, count: int, start_s: float, end_s: float) -> list[float]:
        """So many arrivals of a Poisson process."""
        return sorted(self.rng.uniform(start_s, end_s) for _ in range(count))

    def workload(self, name: str, groups: Mapping[str, str]) -> Workload:
        size = self._block_size
        requests = (
            TraceRequest(
                line=line,
                timestamp_ms=round(at_s * 1000, 3),
                # The tail lacks at least a token to a block, and has one where that is possible.
                input_length=len(prompt) * size + min(size - 1, max(1, round(tail * size))),
                output_length=max(1, round(output * size)),
                hash_ids=prompt,
                group=group,
                contract=groups[group],
                prefix_id=None,
                measured=measured,
            )
            for line, (at_s, group, prompt, tail, output, measured) in enumerate(
                sorted(self._asked, key=lambda asked: asked[0]), start=1
            )
        )
        return Workload(name, size, groups, tuple(requests))


def _tenants(count: int) -> dict[str, str]:
    return {
        f"tenant-{number}": contract
        for number, contract in zip(range(count), cycle(_CONTRACTS), strict=False)
    }


def _zipf(count: int, skew: float = 1.0) -> list[float]:
    """Shares, the largest first, together 1."""
    weights = [rank**-skew for rank in range(1, count + 1)]
    return [weight / sum(weights) for weight in weights]


def _counts(total: int, groups: Iterable[str], skew: float) -> dict[str, int]:
    """About ``total`` requests, each group's share by its rank."""
    names = list(groups)
    return {
        name: max(1, round(total * share))
        for name, share in zip(names, _zipf(len(names), skew), strict=True)
    }


# --- kinds of traffic ---


def _templates(mixer: _Mixer, count: int, system: Prefix = ()) -> list[Prefix]:
    """Shared prefixes, the most popular first."""
    return [system + mixer.fresh(20, 120) for _ in range(count)]


def _ask_templates(
    mixer: _Mixer, group: str, templates: Sequence[Prefix], times: Iterable[float]
) -> None:
    """A Zipf-popular template and a short question of its own."""
    cumulative = list(accumulate(_zipf(len(templates))))
    for at_s in times:
        (template,) = mixer.rng.choices(templates, cum_weights=cumulative)
        mixer.ask(at_s, group, template + mixer.fresh(1, 3))


def _chats(mixer: _Mixer, group: str, times: Sequence[float], system: Prefix = ()) -> None:
    """Conversations fitted to ShareGPT, one started at each of ``times``."""
    drawn = sharegpt_like(mixer.rng.getrandbits(32), len(times), block_size=_CHAT_BLOCK_SIZE)
    for start_s, turns in zip(times, drawn.conversations, strict=True):
        now_s = start_s
        said = mixer.fresh(len(turns[-1].hash_ids))
        for turn in turns:
            mixer.ask(
                now_s,
                group,
                system + said[: len(turn.hash_ids)],
                tail_blocks=turn.input_length % _CHAT_BLOCK_SIZE / _CHAT_BLOCK_SIZE,
                output_blocks=turn.output_length / _CHAT_BLOCK_SIZE,
            )
            now_s += 2.0 + 0.025 * turn.output_length + mixer.rng.expovariate(1 / 20.0)


def _one_offs(mixer: _Mixer, group: str, times: Iterable[float]) -> None:
    """Documents that nobody reads again."""
    for at_s in times:
        mixer.ask(at_s, group, mixer.fresh(40, 120))


def _documents(mixer: _Mixer, blocks: int) -> list[Prefix]:
    """A fixed set of documents, so many blocks together."""
    found = []
    while blocks > 0:
        found.append(mixer.fresh(min(blocks, mixer.rng.randint(40, 110))))
        blocks -= len(found[-1])
    return found


def _loop(
    mixer: _Mixer,
    group: str,
    documents: Sequence[Prefix],
    *,
    start_s: float,
    end_s: float,
    round_s: float,
    measured: bool = True,
) -> None:
    """Round after round over the documents in the same order, at slightly random times."""
    gap_s = round_s / len(documents)
    for visit in range(int((end_s - start_s) / gap_s)):
        at_s = start_s + (visit + mixer.rng.random()) * gap_s
        mixer.ask(at_s, group, documents[visit % len(documents)], measured=measured)


# --- benign mixtures ---


def drift(seed: int, block_size: int) -> Workload:
    """Hot sets that move: each tenant replaces one of its twelve templates every minute."""
    duration_s, every_s = 1800.0, 60.0
    mixer = _Mixer("drift", seed, block_size)
    tenants = _tenants(8)
    for tenant, count in _counts(2800, tenants, skew=0.5).items():
        hot = _templates(mixer, 12)
        slots = cycle(mixer.rng.sample(range(len(hot)), len(hot)))
        changes = mixer.rng.random() * every_s
        for at_s in mixer.spread(count, 0.0, duration_s):
            while changes <= at_s:
                (hot[next(slots)],) = _templates(mixer, 1)
                changes += every_s
            _ask_templates(mixer, tenant, hot, [at_s])
    return mixer.workload("drift", tenants)


def diurnal(seed: int, block_size: int) -> Workload:
    """Days and nights: every tenant's rate is a sinusoid of four periods, its peak at its own time.

    Half of the tenants' requests start conversations, the others use templates.
    """
    periods, period_s = 4, 600.0
    mixer = _Mixer("diurnal", seed, block_size)
    tenants = _tenants(8)

    def times(count: int, phase: float) -> list[float]:
        found: list[float] = []
        while len(found) < count:  # by rejection
            at_s = mixer.rng.uniform(0.0, periods * period_s)
            rate = 1 + 0.95 * math.sin(2 * math.pi * (at_s / period_s - phase))
            if 2 * mixer.rng.random() < rate:
                found.append(at_s)
        return sorted(found)

    for number, tenant in enumerate(tenants):
        phase = number / len(tenants)
        _ask_templates(mixer, tenant, _templates(mixer, 10), times(150, phase))
        _chats(mixer, tenant, times(60, phase))
    return mixer.workload("diurnal", tenants)


def scans(seed: int, block_size: int) -> Workload:
    """Hot sets, and two tenants that from time to time read many long documents once or twice."""
    duration_s = 1800.0
    mixer = _Mixer("scans", seed, block_size)
    tenants = _tenants(8)
    for tenant in tenants:
        _ask_templates(mixer, tenant, _templates(mixer, 10), mixer.spread(160, 0.0, duration_s))
        _chats(mixer, tenant, mixer.spread(20, 0.0, duration_s))
    for number, scanner in enumerate(list(tenants)[-2:]):
        for start_s in range(150 * (1 + number), int(duration_s), 300):
            for at_s in mixer.spread(24, start_s, start_s + 60.0):
                document = mixer.fresh(60, 120)
                mixer.ask(at_s, scanner, document)
                if mixer.rng.random() < 0.5:
                    mixer.ask(at_s + mixer.rng.uniform(2.0, 40.0), scanner, document)
    return mixer.workload("scans", tenants)


def loops(seed: int, block_size: int) -> Workload:
    """One tenant cycles over 11% of all unique blocks: 1.1 times a pool of 10%.

    Beside it conversations of six tenants, and one-off documents of one more.
    """
    duration_s = 1800.0
    mixer = _Mixer("loops", seed, block_size)
    tenants = _tenants(8)
    looper, reader, *talkers = tenants
    for talker in talkers:
        _chats(mixer, talker, mixer.spread(80, 0.0, duration_s))
    _one_offs(mixer, reader, mixer.spread(90, 0.0, duration_s))
    documents = _documents(mixer, _part_of_all(mixer.used, 1.1 * 0.10))
    _loop(mixer, looper, documents, start_s=0.0, end_s=duration_s, round_s=90.0)
    return mixer.workload("loops", tenants)


def loop_alone(seed: int, block_size: int) -> Workload:
    """One tenant alone cycles over 27.5% of all unique blocks: 1.1 times a pool of 25%.

    The others are of documents that it reads once.
    """
    duration_s = 3000.0
    mixer = _Mixer("loop-alone", seed, block_size)
    tenants = _tenants(1)
    (tenant,) = tenants
    _one_offs(mixer, tenant, mixer.spread(180, 0.0, duration_s))
    documents = _documents(mixer, _part_of_all(mixer.used, 1.1 * 0.25))
    _loop(mixer, tenant, documents, start_s=0.0, end_s=duration_s, round_s=120.0)
    return mixer.workload("loop-alone", tenants)


def _part_of_all(others: int, ratio: float) -> int:
    """Blocks that are this share (0-1) of themselves and the others."""
    return round(others * ratio / (1 - ratio))


def alone(seed: int, block_size: int) -> Workload:
    """One tenant alone: conversations, templates and documents that it reads once."""
    duration_s = 1800.0
    mixer = _Mixer("alone", seed, block_size)
    tenants = _tenants(1)
    (tenant,) = tenants
    _chats(mixer, tenant, mixer.spread(400, 0.0, duration_s))
    _ask_templates(mixer, tenant, _templates(mixer, 30), mixer.spread(900, 0.0, duration_s))
    _one_offs(mixer, tenant, mixer.spread(130, 0.0, duration_s))
    return mixer.workload("alone", tenants)


def hundred(seed: int, block_size: int) -> Workload:
    """A hundred tenants of Zipf rates, each with a system prompt, templates and conversations."""
    duration_s = 2400.0
    mixer = _Mixer("hundred", seed, block_size)
    tenants = _tenants(100)
    starts = _counts(330, tenants, skew=1.0)
    for tenant, count in _counts(1300, tenants, skew=1.0).items():
        system = mixer.fresh(10, 60)
        templates = _templates(mixer, 4, system)
        _ask_templates(mixer, tenant, templates, mixer.spread(count, 0.0, duration_s))
        _chats(mixer, tenant, mixer.spread(starts[tenant], 0.0, duration_s), system)
    return mixer.workload("hundred", tenants)


def agents(seed: int, block_size: int) -> Workload:
    """Four tenants' agents: a prompt grows by tool results, with branches and short gaps."""
    mixer = _Mixer("agents", seed, block_size)
    tenants = _tenants(4)
    for tenant in tenants:
        system = mixer.fresh(60, 140)
        for start_s in mixer.spread(14, 0.0, 1700.0):
            task = system + mixer.fresh(5, 30)
            _agent(mixer, tenant, task, start_s, steps=mixer.rng.randint(6, 15))
    return mixer.workload("agents", tenants)


def _agent(
    mixer: _Mixer, group: str, context: Prefix, now_s: float, *, steps: int, branches: bool = True
) -> float:
    """One agent; at times it waits for two or three others that go on from what it knows.

    Returns when it ends, in seconds.
    """
    for _ in range(steps):
        mixer.ask(now_s, group, context, output_blocks=1.5)
        now_s += mixer.rng.uniform(1.0, 7.0)
        context += mixer.fresh(2, 20)
        if branches and mixer.rng.random() < 0.12:
            now_s = max(
                _agent(
                    mixer,
                    group,
                    context + mixer.fresh(1, 4),
                    now_s,
                    steps=mixer.rng.randint(2, 5),
                    branches=False,
                )
                for _ in range(mixer.rng.randint(2, 3))
            )
            context += mixer.fresh(2, 8)  # what they found
    return now_s


def rag(seed: int, block_size: int) -> Workload:
    """Six tenants: a system prompt, one to three Zipf-popular documents, a question.

    A document is the same prefix only behind the same documents in the same order.
    """
    mixer = _Mixer("rag", seed, block_size)
    tenants = _tenants(6)
    for tenant, count in _counts(1900, tenants, skew=0.5).items():
        system = mixer.fresh(15, 40)
        sizes = [mixer.rng.randint(8, 30) for _ in range(60)]
        cumulative = list(accumulate(_zipf(len(sizes), 1.2)))
        prefixes: dict[tuple[int, ...], Prefix] = {(): system}
        for at_s in mixer.spread(count, 0.0, 1800.0):
            wanted = mixer.rng.choices(
                range(len(sizes)), cum_weights=cumulative, k=mixer.rng.randint(1, 3)
            )
            found = tuple(dict.fromkeys(wanted))
            for end in range(1, len(found) + 1):
                if found[:end] not in prefixes:
                    prefixes[found[:end]] = prefixes[found[: end - 1]] + mixer.fresh(
                        sizes[found[end - 1]]
                    )
            mixer.ask(at_s, tenant, prefixes[found] + mixer.fresh(1, 2))
    return mixer.workload("rag", tenants)


# --- attacked mixtures ---

#: When the attackers come, seconds: the benign tenants are alone before and after.
ATTACK_S = (360.0, 840.0)

#: Blocks of an attacker's prefix, unless it says otherwise.
_ATTACK_BLOCKS = 96

Attack = Callable[[_Mixer, str], None]


def _attacked(name: str, *attacks: Attack) -> Callable[[int, int], Workload]:
    """The same eight tenants for the same seed in all of them, and one attacker for each attack.

    Tenants of even number have conversations, the others templates. The attackers' requests are
    not measured; without them it is the control.
    """

    def make(seed: int, block_size: int) -> Workload:
        duration_s = 900.0
        mixer = _Mixer("attacked", seed, block_size)
        groups = _tenants(8)
        for number, tenant in enumerate(groups):
            if number % 2:
                times = mixer.spread(230, 0.0, duration_s)
                _ask_templates(mixer, tenant, _templates(mixer, 12), times)
            else:
                _chats(mixer, tenant, mixer.spread(36, 0.0, duration_s))
        for number, attack in enumerate(attacks):
            groups[f"attacker-{number}"] = "best-effort"
            attack(mixer, f"attacker-{number}")
        return mixer.workload(name, groups)

    make.__doc__ = f"Eight tenants and {len(attacks)} of the attackers above: {name}."
    return make


def _one_touch(ratio: float) -> Attack:
    """Unseen long prompts; creates ``ratio`` times what its contract refills."""

    def attack(mixer: _Mixer, group: str) -> None:
        for at_s in _attack_times(mixer, ratio, blocks=140):
            mixer.ask(at_s, group, mixer.fresh(80, 200), measured=False)

    return attack


def _replay(ratio: float) -> Attack:
    """Every unseen prefix comes a second time a few seconds later: reuse, manufactured."""

    def attack(mixer: _Mixer, group: str) -> None:
        for at_s in _attack_times(mixer, ratio, blocks=_ATTACK_BLOCKS):
            prefix = mixer.fresh(_ATTACK_BLOCKS)
            mixer.ask(at_s, group, prefix, measured=False)
            mixer.ask(at_s + mixer.rng.uniform(1.0, 6.0), group, prefix, measured=False)

    return attack


def _low_and_slow(ratio: float) -> Attack:
    """Unseen prefixes at an even pace, without bursts."""

    def attack(mixer: _Mixer, group: str) -> None:
        times = _attack_times(mixer, ratio, blocks=_ATTACK_BLOCKS)
        gap_s = (ATTACK_S[1] - ATTACK_S[0]) / len(times)
        for number in range(len(times)):
            at_s = ATTACK_S[0] + number * gap_s
            mixer.ask(at_s, group, mixer.fresh(_ATTACK_BLOCKS), measured=False)

    return attack


def _own_loop(blocks: int, round_s: float) -> Attack:
    """Round after round over a large set of its own: reuse, manufactured, too far apart to hit."""

    def attack(mixer: _Mixer, group: str) -> None:
        start_s, end_s = ATTACK_S
        _loop(
            mixer,
            group,
            _documents(mixer, blocks),
            start_s=start_s,
            end_s=end_s,
            round_s=round_s,
            measured=False,
        )

    return attack


def _attack_times(mixer: _Mixer, ratio: float, *, blocks: int) -> list[float]:
    """Poisson arrivals of prompts of so many blocks that create ``ratio`` times the refill."""
    start_s, end_s = ATTACK_S
    count = round(ratio * BEST_EFFORT_RATE * (end_s - start_s) / blocks)
    return mixer.spread(count, start_s, end_s)


#: Every mixture by its name; each takes a seed and the tokens per block.
MIXTURES: Mapping[str, Callable[[int, int], Workload]] = {
    "drift": drift,
    "diurnal": diurnal,
    "scans": scans,
    "loops": loops,
    "loop-alone": loop_alone,
    "alone": alone,
    "hundred": hundred,
    "agents": agents,
    "rag": rag,
    "attack-one-touch": _attacked("attack-one-touch", _one_touch(4.0)),
    "attack-replay": _attacked("attack-replay", _replay(4.0)),
    "attack-two": _attacked("attack-two", _one_touch(2.75), _replay(2.75)),
    "attack-three": _attacked("attack-three", _one_touch(2.25), _replay(2.0), _low_and_slow(1.25)),
    "attack-loop": _attacked("attack-loop", _own_loop(12_000, 120.0)),
}
