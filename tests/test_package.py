"""What importing the package costs, and which vLLM releases it says it fits."""

import json
import subprocess
import sys
from pathlib import Path

from prefixshield.serving import hooks

ROOT = Path(__file__).parents[1]

HEAVY = ("vllm", "torch", "transformers", "matplotlib", "prometheus_client", "redis", "numpy")


def loaded_by(statement):
    code = f"{statement}; import sys; print(*[m for m in {HEAVY} if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return run.stdout.split()


def test_the_core_and_the_command_load_nothing_heavy():
    modules = "prefixshield, prefixshield.cli, prefixshield.sim.replay, prefixshield.policies"
    assert loaded_by(f"import {modules}") == []


def test_starting_a_server_loads_vllm_in_the_new_process_only():
    assert loaded_by("import prefixshield.serving.launch, prefixshield.serving.identity") == []


def test_the_core_is_standard_library_alone():
    run = (
        "import sys; before = set(sys.modules); "
        "import prefixshield.core.debtors, prefixshield.core.history, prefixshield.core.queues; "
        "names = {m.partition('.')[0] for m in set(sys.modules) - before}; "
        "print(*sorted(names - set(sys.stdlib_module_names) - {'prefixshield'}))"
    )
    out = subprocess.run([sys.executable, "-c", run], capture_output=True, text=True, check=True)
    assert out.stdout.split() == []


def test_every_accepted_release_has_passed_the_end_to_end_tests():
    """What `make compat` wrote when it was last run and checked in."""
    summary = ROOT / "results" / "compat" / "summary.json"
    rows = json.loads(summary.read_text(encoding="utf-8"))["releases"]
    passed = {
        release
        for release, row in rows.items()
        if "test_server.py" in row["run"] and row["passed"] > 0 and row["failed"] == 0
    }
    assert set(hooks.TESTED_VERSIONS) == passed
