"""``python -m demo.serve``: the demo's server with PrefixShield in the foreground, until Ctrl-C."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence

from demo.server import MODEL_FOLDER, TENANTS_FILE, make_server
from prefixshield.config import load_config, operator_key
from prefixshield.errors import PrefixShieldError
from prefixshield.serving.child_server import (
    MODEL_NAME,
    ServerError,
    free_port,
    interrupt_by_signals,
)
from prefixshield.serving.wiring import OPERATOR_KEY_VARIABLE

USUAL_PORT = 8000


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until the server ends or Ctrl-C; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m demo.serve")
    parser.add_argument(
        "--port", type=int, help=f"default: {USUAL_PORT}, or a free one where that is in use"
    )
    options = parser.parse_args(arguments)
    interrupt_by_signals()
    try:
        return _serve(options.port)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # one message is enough
        print("serve: interrupted; no server is left running", file=sys.stderr)
        return 130


def _serve(port: int | None) -> int:
    from demo.tenants import load_keys
    from prefixshield.serving.tiny_model import write_tiny_model

    try:
        keys = load_keys()
        port = _usual_or_free_port() if port is None else free_port(port)
        write_tiny_model(MODEL_FOLDER)
        with make_server("shield", list(keys.values()), port=port, log_to_file=False) as server:
            server.wait_until_healthy()
            operator = operator_key(load_config(TENANTS_FILE), TENANTS_FILE)
            print(_invitation(server.base_url, keys["victim"], operator), flush=True)
            status = server.wait()
    except PrefixShieldError as error:
        print(f"serve: {error}", file=sys.stderr)
        return 1
    print(f"serve: the server ended with status {status}", file=sys.stderr)
    return 1


def _usual_or_free_port() -> int:
    try:
        return free_port(USUAL_PORT)
    except ServerError:
        return free_port()


def _invitation(base_url: str, key: str, operator: str | None) -> str:
    message = {"role": "user", "content": "w1 w2 w3"}
    body = json.dumps({"model": MODEL_NAME, "messages": [message], "max_tokens": 8})
    return (
        "\nReady. In another terminal (the model is tiny and untrained: expect no sense):\n\n"
        f"curl {base_url}/v1/chat/completions -H 'Authorization: Bearer {key}' "
        f"-H 'Content-Type: application/json' -d '{body}'\n\n"
        f"The live page, for any user with the password {operator}: {base_url}/prefixshield\n"
        f"In a terminal: {OPERATOR_KEY_VARIABLE}={operator} prefixshield top {base_url}\n\n"
        "Ctrl-C stops the server.\n"
    )


if __name__ == "__main__":
    sys.exit(main())
