"""What every process does first that works for a command: it must not outlive it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading


def end_with_the_command() -> None:
    """Die at once on Ctrl-C, and when the command that started this process is gone.

    A pool shut down by its command ends its processes anyway; one that was killed cannot.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_follow, args=(parent,), daemon=True).start()


def _follow(parent: multiprocessing.process.BaseProcess) -> None:
    parent.join()
    os._exit(1)
