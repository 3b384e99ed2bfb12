"""``python -m demo``: see the package.

The exit status is 0 only if no request failed, every event was counted and PrefixShield was
active; 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence

from prefixshield.serving.child_server import interrupt_by_signals


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m demo")
    parser.add_argument("--seed", type=int, default=7, help="of the traffic (default: 7)")
    parser.add_argument(
        "--policy",
        choices=("lru", "shield"),
        action="append",
        help="run only this server (default: native vLLM, then PrefixShield)",
    )
    options = parser.parse_args(arguments)
    interrupt_by_signals()
    try:
        from demo.run import run  # takes seconds, in which Ctrl-C is to work too

        return run(options.policy or ("lru", "shield"), options.seed)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # one message is enough
        print("demo: interrupted; no server is left running", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
