"""A headless Chromium on one page, over its own DevTools protocol: read it, draw it.

Real time passes in it, so a page that draws curves has some to show.
"""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import tempfile
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from websockets.sync.client import ClientConnection, connect

from prefixshield.errors import PrefixShieldError

NAMES = ("chromium", "chromium-browser", "google-chrome")
TIMEOUT_S = 60.0


def find_chromium() -> str | None:
    """The command of a Chromium on the PATH; None: there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """Shows one page from entering to leaving the context.

    Raises PrefixShieldError when the browser does not start or does not answer.
    """

    def __init__(self, chromium: str, url: str) -> None:
        self._command = [
            *(chromium, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
            *("--remote-debugging-port=0", "--window-size=1000,1150", url),
        ]
        self._number = 0
        self._socket: ClientConnection
        self._closing = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as opened:
            made = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
            profile = opened.enter_context(made)
            process = subprocess.Popen(
                [*self._command, f"--user-data-dir={profile}"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            opened.callback(process.wait)
            opened.callback(process.terminate)
            address = _page_address(Path(profile) / "DevToolsActivePort", process)
            self._socket = opened.enter_context(connect(address, max_size=None, proxy=None))
            self._closing = opened.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    def evaluate(self, script: str) -> Any:
        """The value of a JavaScript expression in the page, as plain data."""
        answer = self._ask("Runtime.evaluate", expression=script, returnByValue=True)
        return answer["result"].get("value")

    def screenshot(self, path: Path) -> None:
        """Draw what the window shows, as PNG."""
        path.write_bytes(base64.b64decode(self._ask("Page.captureScreenshot")["data"]))

    def _ask(self, method: str, **params: object) -> dict[str, Any]:
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": params}))
        try:
            while True:
                answer = json.loads(self._socket.recv(timeout=TIMEOUT_S))
                if answer.get("id") == self._number:
                    break
        except TimeoutError:
            raise PrefixShieldError(f"{self._command[0]}: {method} is not answered") from None
        if "error" in answer:
            raise PrefixShieldError(f"{self._command[0]}: {method}: {answer['error']['message']}")
        found: dict[str, Any] = answer["result"]
        return found


def _page_address(port_file: Path, process: subprocess.Popen[bytes]) -> str:
    """Where the page can be asked, once the browser has said where it listens."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            port = int(port_file.read_text().split()[0])
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/json") as response:
                targets = json.load(response)
            pages = [target for target in targets if target["type"] == "page"]
            return str(pages[0]["webSocketDebuggerUrl"])
        except (OSError, IndexError, ValueError):  # not yet
            time.sleep(0.1)
    raise PrefixShieldError("Chromium does not start, or shows no page")
