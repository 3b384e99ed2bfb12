"""The calibration beside the results: of this machine, or measured again."""

import json

import pytest

from prefixshield.errors import PrefixShieldError
from prefixshield.evaluation import calibration, runner
from prefixshield.evaluation.calibration import MeasuredCosts


def test_another_machines_calibration_is_measured_again(tmp_path, monkeypatch):
    measured = []

    def measure(*_, **__):
        measured.append(1)
        return MeasuredCosts(1.0, 0.1, 0.5, 2.0, 17.0)

    monkeypatch.setattr(calibration, "measure_costs", measure)
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps({"machine": "another", "capacity_rps": 3.0}))
    found = runner._machine(tmp_path)
    assert found["capacity_rps"] == 17.0
    assert runner._machine(tmp_path) == found == json.loads(path.read_text())
    assert len(measured) == 1


@pytest.mark.parametrize("text", ["", "[]", "{}", "not JSON"])
def test_a_file_that_is_no_calibration_is_one_message(tmp_path, text):
    (tmp_path / "calibration.json").write_text(text)
    with pytest.raises(PrefixShieldError, match=r"calibration\.json: not a calibration"):
        runner._machine(tmp_path)
