"""Paired statistics over matched runs (paper, section IV, Methodology)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

#: Resamples of a bootstrap, and the seed that they are drawn with.
_RESAMPLES, _SEED = 9999, 1


class Estimate(NamedTuple):
    """A mean with its 95% confidence interval; all three in the unit of the data."""

    mean: float
    low: float
    high: float

    @property
    def is_tie(self) -> bool:
        """Whether a difference is inside the noise: its interval holds zero."""
        return self.low <= 0.0 <= self.high


def estimate(values: Sequence[float]) -> Estimate:
    """Mean and 95% bootstrap confidence interval (percentile method); one value has no interval."""
    import numpy
    from scipy.stats import bootstrap

    mean = float(numpy.mean(values))
    if len(set(values)) == 1:
        return Estimate(mean, mean, mean)
    found = bootstrap(
        (numpy.asarray(values),),
        numpy.mean,
        n_resamples=_RESAMPLES,
        method="percentile",
        rng=numpy.random.default_rng(_SEED),
    ).confidence_interval
    return Estimate(mean, float(found.low), float(found.high))


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` (0-1) of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
