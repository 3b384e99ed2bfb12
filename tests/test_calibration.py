"""The cost model's fit."""

from __future__ import annotations

import pytest

pytest.importorskip("numpy")

from prefixshield.evaluation.calibration import Sample, fit


def samples(base: float, prefill: float, decode: float, overhead: float) -> list[Sample]:
    shapes = [(1, 384, 0), (1, 768, 0), (1, 1536, 0), (2, 2304, 0), (2, 3072, 0)]
    shapes += [(129, 24 * batch, 128 * batch) for batch in (1, 4, 8)]
    return [
        Sample(
            overhead + base * steps + prefill * tokens + decode * decoded, steps, tokens, decoded
        )
        for steps, tokens, decoded in shapes
    ]


@pytest.mark.parametrize("costs", [(4.0, 0.03, 0.25, 6.0), (10.0, 0.1, 0.0, 1.0)])
def test_exact_times_give_the_costs_they_were_made_of(costs: tuple[float, ...]) -> None:
    assert fit(samples(*costs)) == pytest.approx(costs, abs=1e-9)


def test_no_cost_is_negative() -> None:
    assert fit(samples(4.0, 0.03, -0.1, 6.0))[2] == 0
