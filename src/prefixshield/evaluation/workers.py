"""Processes that work for a command: one task over many jobs, and none that outlives it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from prefixshield.errors import PrefixShieldError

_Job = TypeVar("_Job")
_Result = TypeVar("_Result")


def in_parallel(
    task: Callable[[_Job], _Result],
    jobs: Sequence[_Job],
    processes: int,
    progress: Callable[[int, int], None],
) -> list[_Result]:
    """Results in the order of the jobs, whichever ended first; here if one process is enough.

    ``progress`` is told how many are done, of how many.

    Raises:
        PrefixShieldError: a process was killed. A task's own error ends everything, too.

    """
    progress(0, len(jobs))
    if processes == 1:
        results = []
        for job in jobs:
            results.append(task(job))
            progress(len(results), len(jobs))
        return results
    # Spawned, not forked: a progress bar is a thread, and threads do not survive a fork.
    pool = ProcessPoolExecutor(
        max(1, min(processes, len(jobs))),
        multiprocessing.get_context("spawn"),
        initializer=end_with_the_command,
    )
    try:
        futures = [pool.submit(task, job) for job in jobs]
        for done, future in enumerate(as_completed(futures), start=1):
            future.result()  # the first error ends it
            progress(done, len(jobs))
        return [future.result() for future in futures]
    except BrokenProcessPool:
        raise PrefixShieldError(
            "a process that replayed was killed, maybe for want of memory: "
            "fewer processes (--jobs) need less of it"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


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
