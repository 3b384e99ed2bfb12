"""A server as a child process ends with whoever started it, however that is told to end."""

import os
import signal
import subprocess
import sys

import pytest

#: Starts what sleeps in place of a server, says who it is, and waits for it.
HOLDER = """
import sys
from prefixshield.serving.child_server import ChildServer

with ChildServer([sys.executable, "-c", "import time; time.sleep(600)"], log=None) as server:
    print(server._process.pid, flush=True)
    server.wait()
"""


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def held(ignored=()):
    """As a script starts it with ``&``: with these signals ignored, whatever the tests ignore."""

    def ignore():
        for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)

    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        preexec_fn=ignore,
    )
    return holder, int(holder.stdout.readline())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_server_ends_with_a_command_in_the_background(number):
    holder, server = held(ignored=[signal.SIGINT, signal.SIGQUIT])
    assert alive(server)
    holder.send_signal(number)
    assert holder.wait(timeout=60) != 0
    assert not alive(server)
    holder.stdout.close()


def test_nohup_is_obeyed():
    holder, server = held(ignored=[signal.SIGHUP])
    holder.send_signal(signal.SIGHUP)
    holder.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        holder.wait(timeout=0.5)
    assert alive(server)
    holder.send_signal(signal.SIGTERM)
    assert holder.wait(timeout=60) != 0
    assert not alive(server)
    holder.stdout.close()
