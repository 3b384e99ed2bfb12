"""Traffic in the background, and what a server's metrics say while it runs."""

from __future__ import annotations

import asyncio
import random
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from demo.report import percentile
from demo.traffic import (
    HOT_PREFIXES,
    PERIOD_S,
    POLLUTION_TOKENS,
    PREFIX_TOKENS,
    QUESTION_TOKENS,
    TENANTS,
    VOCABULARY,
    Outcome,
    Request,
    Tenant,
    send_all,
)
from prefixshield.errors import PrefixShieldError
from prefixshield.serving.child_server import MODEL_NAME
from prefixshield.top import Snapshot, fetch

READ_EVERY_S = 1.0
#: Seconds that the last counters may take from the engine to ``/metrics``.
COUNTERS_WAIT_S = 5.0


class SessionError(PrefixShieldError):
    """The server did not do what the session says it does."""


class Traffic:
    """Plans of the demo's traffic, one after the other: the same hot prefixes in all of them."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._prefixes = [self._tokens("victim", PREFIX_TOKENS) for _ in range(HOT_PREFIXES)]

    def rounds(self, count: int, *, attack: bool) -> list[Request]:
        """The victim visits all its prefixes ``count`` times; the attacker asks as often.

        The attacker sends each prompt twice and then never again: to an order that asks for a
        second use, and knows no tenants, its blocks are worth keeping.
        """
        plan = []
        flood: tuple[int, ...] = ()
        for number in range(count * HOT_PREFIXES):
            at_s = number * PERIOD_S
            prompt = self._prefixes[number % HOT_PREFIXES] + self._tokens("victim", QUESTION_TOKENS)
            plan.append(Request("victim", at_s, prompt, measured=True))
            if attack:
                if number % 2 == 0:
                    flood = self._tokens("attacker", POLLUTION_TOKENS)
                plan.append(Request("attacker", at_s + PERIOD_S / 2, flood, measured=True))
        return plan

    def _tokens(self, tenant: Tenant, count: int) -> tuple[int, ...]:
        return tuple(self._rng.choices(VOCABULARY[tenant], k=count))


@dataclass(frozen=True)
class Phase:
    """A plan that was sent, and the readings from before its first request to after its last."""

    outcomes: Sequence[Outcome]
    readings: Sequence[Snapshot]

    def grown(self, name: str, *labels: str) -> float:
        """What a counter of the catalogue grew, over the series that begin with these labels."""
        return _value(self.readings[-1], name, labels) - _value(self.readings[0], name, labels)

    def hit_ratio(self, tenant: Tenant) -> float:
        """Hit over queried tokens, as the metrics count them, 0-1; 0 without a request."""
        return self.grown("hit_tokens", tenant) / max(1, self.grown("query_tokens", tenant))

    def debts(self, tenant: Tenant) -> list[tuple[float, float]]:
        """Of each reading: seconds since the first one, and the debt in blocks."""
        start = self.readings[0].time
        return [(now.time - start, now.by("debt")[tenant]) for now in self.readings]

    def ttft_p50_ms(self, tenant: Tenant) -> float | None:
        """The client's time to the first token, median by nearest rank."""
        mine = [one.ttft_ms for one in self.outcomes if one.request.tenant == tenant]
        median = percentile(mine, 0.5)
        return None if median is None else round(median, 2)


class Sending:
    """A plan on its way, sent by a thread while the metrics are read in this one.

    ``show`` is called with the reading that the phase began with and each later one.
    """

    def __init__(
        self,
        plan: Sequence[Request],
        base_url: str,
        keys: Mapping[Tenant, str],
        show: Callable[[Snapshot, Snapshot], None],
    ) -> None:
        self._base_url = base_url
        self._show = show
        self._readings = [fetch(base_url)]
        self._outcomes: list[Outcome] = []
        self._error: Exception | None = None

        def send() -> None:
            try:
                self._outcomes = asyncio.run(
                    send_all(plan, f"{base_url}/v1", MODEL_NAME, keys, _succeeded)
                )
            except Exception as error:
                self._error = error

        # daemon: after Ctrl-C nobody waits for the rest of the plan
        self._thread = threading.Thread(target=send, name="traffic", daemon=True)
        self._thread.start()

    def read(self, seconds: float = float("inf")) -> None:
        """Read once a second until the plan is done, or for so long."""
        started = time.monotonic()
        while self._thread.is_alive() and time.monotonic() < started + seconds:
            self._thread.join(READ_EVERY_S)
            if self._thread.is_alive():
                self._readings.append(fetch(self._base_url))
                self._show(self._readings[0], self._readings[-1])

    def finish(self) -> Phase:
        """Read to the end of the plan.

        Raises:
            SessionError: a request failed, or the metrics count other tokens than the answers.

        """
        self.read()
        if self._error is not None:
            raise SessionError(f"a request failed: {self._error}")
        answered: Counter[tuple[str, str]] = Counter()
        for one in self._outcomes:
            answered["query_tokens", one.request.tenant] += one.prompt_tokens
            answered["hit_tokens", one.request.tenant] += one.cached_tokens
        deadline = time.monotonic() + COUNTERS_WAIT_S
        while True:
            phase = Phase(self._outcomes, [*self._readings, fetch(self._base_url)])
            counted = {key: phase.grown(*key) for key in answered}
            if counted == dict(answered):
                break
            if time.monotonic() > deadline:
                raise SessionError(f"/metrics counts {counted}, the answers say {dict(answered)}")
            time.sleep(0.1)
        self._show(phase.readings[0], phase.readings[-1])
        return phase


def slope(points: Sequence[tuple[float, float]]) -> float:
    """The least-squares slope. Raises SessionError for less than three points."""
    if len(points) < 3:
        raise SessionError(f"found {len(points)} readings, expected three to take a slope from")
    times, values = zip(*points, strict=True)
    return statistics.linear_regression(times, values).slope


def hit_ratio_of_blocks(outcomes: Sequence[Outcome], tenant: Tenant, block_size: int) -> float:
    """Hit over full blocks of the prompts, as a replay counts them, 0-1."""
    mine = [one for one in outcomes if one.request.tenant == tenant]
    full = sum(one.prompt_tokens // block_size for one in mine)
    return sum(one.cached_tokens // block_size for one in mine) / max(1, full)


def line(first: Snapshot, now: Snapshot) -> str:
    """A reading in one line; hit ratios since the phase began."""
    phase = Phase([], [first, now])
    told = [f"{now.time - first.time:5.0f} s"]
    for tenant in TENANTS:
        hits = (
            f"{phase.hit_ratio(tenant):6.1%}" if phase.grown("query_tokens", tenant) else "     -"
        )
        told.append(f"{tenant} hits {hits}, owes {now.by('debt')[tenant]:7,.1f} blocks")
    return "   ".join(told)


def _value(reading: Snapshot, name: str, labels: Sequence[str]) -> float:
    series = reading.values.get(name, Counter())
    return sum(value for key, value in series.items() if key[: len(labels)] == tuple(labels))


def _succeeded(outcome: Outcome) -> None:
    if outcome.error is not None:
        raise SessionError(f"{outcome.request.tenant}: {outcome.error}")
