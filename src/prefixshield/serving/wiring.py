"""The names under which vLLM finds the plug-in, and how the plug-in finds its configuration.

The file's path travels in ``--additional-config``, which reaches every process of the server.
Only a path: vLLM hashes the whole value into its compile cache key.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prefixshield.errors import IncompatibleEngineError

#: What ``--scheduler-cls`` must name.
SCHEDULER = "prefixshield.serving.scheduler.build_scheduler"

#: What ``--middleware`` must name.
MIDDLEWARE = "prefixshield.serving.identity.IdentityMiddleware"

#: The key of the configuration file's path in ``--additional-config``.
CONFIG_KEY = "prefixshield"

#: The key in ``vllm_xargs`` that names the request's own logical prefix.
PREFIX_ID_KEY = "prefixshield_prefix_id"

#: The environment variable from which ``prefixshield top`` takes the operator's key: on a command
#: line others could see it.
OPERATOR_KEY_VARIABLE = "PREFIXSHIELD_OPERATOR_KEY"


def config_path(vllm_config: Any) -> Path:
    """The path of the configuration file, taken from a `VllmConfig`.

    Raises:
        IncompatibleEngineError: the server was not told where the file is.

    """
    additional = vllm_config.additional_config
    found = additional.get(CONFIG_KEY) if isinstance(additional, Mapping) else None
    if not isinstance(found, str) or not found:
        raise IncompatibleEngineError(
            f"--additional-config: found {found!r} under {CONFIG_KEY!r}, expected the path of a "
            f'PrefixShield configuration file: --additional-config \'{{"{CONFIG_KEY}": "FILE"}}\''
        )
    return Path(found)
