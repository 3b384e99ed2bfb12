"""What importing the package costs."""

import subprocess
import sys

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
