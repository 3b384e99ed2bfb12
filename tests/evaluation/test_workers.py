"""Processes that work for a command end with it, however it ends."""

import os
import signal
import subprocess
import sys
import time

import pytest

COMMAND = """
import multiprocessing, sys, time
from concurrent.futures import ProcessPoolExecutor
from prefixshield.evaluation.workers import end_with_the_command

if __name__ == "__main__":
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, spawn, initializer=end_with_the_command) as pool:
        futures = [pool.submit(time.sleep, 120) for _ in range(8)]
        print(*pool._processes, flush=True)
        futures[0].result()
"""


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="reads /proc")
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_no_worker_outlives_its_command(tmp_path, how):
    script = tmp_path / "command.py"
    script.write_text(COMMAND)
    command = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True)
    workers = command.stdout.readline().split()
    assert len(workers) == 2
    time.sleep(1.0)  # they start up
    command.send_signal(how)
    command.wait()
    deadline = time.monotonic() + 30
    while any(map(is_running, workers)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(is_running, workers))
