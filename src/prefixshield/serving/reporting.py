"""What the engine's process reports of itself, as it travels to the process that serves metrics.

A report is a dictionary of whole numbers that vLLM serialises with each step's statistics. Each
step's statistics reach one front end only, so counts travel as differences. Gauges travel whole,
in thousandths.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TypeAlias

from prefixshield.serving.catalogue import GroupLabels
from prefixshield.serving.driver import PolicyDriver

#: A count or a gauge: its name in the catalogue, then its label values.
Key: TypeAlias = tuple[str, ...]

#: Seconds between two reports of the counts, which cost a look at every pair of groups. When no
#: request is left, they are always reported: no step may follow that could do it.
COUNT_INTERVAL_S = 0.1

#: Seconds between two reports of the gauges, which cost a look at every group ...
GAUGE_INTERVAL_S = 1.0
#: ... and when no request is left.
IDLE_GAUGE_INTERVAL_S = 0.1

GAUGE_SCALE = 1000

_PREFIX = "prefixshield"
_SEPARATOR = "\n"  # in no name of a group


def encode(numbers: Mapping[Key, int]) -> dict[str, int]:
    """Numbers under keys that survive serialisation."""
    return {_SEPARATOR.join((_PREFIX, *key)): number for key, number in numbers.items()}


def take(carrier: dict[str, int]) -> dict[Key, int]:
    """Remove encoded numbers from the dictionary that carried them, and return them."""
    keys = [key for key in carrier if key.startswith(_PREFIX + _SEPARATOR)]
    return {tuple(key.split(_SEPARATOR)[1:]): carrier.pop(key) for key in keys}


class Reporter:
    """Reports on one driver, step by step."""

    def __init__(
        self,
        driver: PolicyDriver,
        labels: GroupLabels,
        capacity_blocks: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``capacity_blocks``: those that can hold content; ``clock``: of the wall, seconds."""
        self._driver = driver
        self._label = labels
        self._capacity_blocks = capacity_blocks
        self._clock = clock
        self._counted: dict[Key, int] = {}
        self._gauges: dict[Key, float] = {}
        self._counted_at = self._gauged_at = float("-inf")

    def report(self, *, idle: bool) -> dict[str, int]:
        """What to send with this step's statistics; ``idle``: no request is left."""
        now = self._clock()
        numbers: Counter[Key] = Counter()
        if idle or now - self._counted_at >= COUNT_INTERVAL_S:
            self._counted_at = now
            numbers = self._new_counts()
        if now - self._gauged_at >= (IDLE_GAUGE_INTERVAL_S if idle else GAUGE_INTERVAL_S):
            self._gauged_at = now
            self._read_gauges()
            for key, value in self._gauges.items():
                numbers[key] = round(value * GAUGE_SCALE)
        return encode(numbers)

    def _new_counts(self) -> Counter[Key]:
        """What was counted since the last report."""
        new: Counter[Key] = Counter()
        counted = self._counted
        for key, count in self._driver.counts.items():
            before = counted.get(key, 0)
            if count != before:
                counted[key] = count
                new[key] = count - before
        return new

    def _read_gauges(self) -> None:
        """Read all gauges anew; one that is not there any more is 0, for it stays exported."""
        driver, label = self._driver, self._label
        gauges = self._gauges = dict.fromkeys(self._gauges, 0.0)

        def add(value: float, *key: str) -> None:
            gauges[key] = gauges.get(key, 0.0) + value

        add(self._capacity_blocks, "capacity")
        add(driver.failed, "native_order")
        add(driver.shadow, "shadow")
        for (group, of_class), blocks in driver.resident_blocks().items():
            add(blocks, "resident", label(group), of_class)
        for group, debt in driver.debts().items():
            add(debt.raw, "debt", label(group))
            add(debt.normalised, "normalised_debt", label(group))
        for group, entries in driver.remembered().items():
            add(entries, "history", label(group))
