"""A headless Chromium, driven through the pipe of its DevTools protocol."""

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")


def chromium() -> str | None:
    """The path of the program; None if there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One page.

    Args:
        to: the pipe that the browser reads.
        answers: the pipe that it writes to.
    """

    def __init__(self, to: int, answers: int) -> None:
        self._to, self._answers, self._number, self._rest = to, answers, 0, b""
        self.errors: list[str] = []
        """Errors on the page's console, and uncaught ones."""
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Calls a method of the protocol and waits for its result."""
        self._number += 1
        asked = {"id": self._number, "method": method, "params": parameters}
        asked |= {"sessionId": self._session} if self._session else {}
        os.write(self._to, json.dumps(asked).encode() + b"\0")
        while (said := self._next()).get("id") != self._number:
            self._note(said)
        assert "error" not in said, (method, said["error"])
        return said["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._answers], [], [], 60)
            assert ready, "the browser does not answer"
            read = os.read(self._answers, 1 << 20)
            assert read, "the browser has ended"
            self._rest += read
        line, _, self._rest = self._rest.partition(b"\0")
        return json.loads(line)

    def _note(self, said: dict[str, Any]) -> None:
        if said.get("method") == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(said["params"]["exceptionDetails"])[:500])
        if said.get("method") == "Log.entryAdded" and said["params"]["entry"]["level"] == "error":
            entry = said["params"]["entry"]
            self.errors.append(f"{entry['text']} {entry.get('url', '')}")

    def open(self, address: str) -> None:
        """Opens a page and waits until it is loaded."""
        self.call("Page.navigate", url=address)
        self.wait("document.readyState === 'complete'")

    def evaluate(self, expression: str) -> Any:
        """The value of an expression on the page."""
        found = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, expression: str, seconds: float = 30) -> None:
        """Waits until an expression is true, as JavaScript sees it."""
        end = time.monotonic() + seconds
        while not self.evaluate(f"Boolean({expression})"):
            assert time.monotonic() < end, f"never true: {expression}; {self.errors}"
            time.sleep(0.05)

    def key(self, name: str) -> None:
        """Presses a key."""
        codes = {"Tab": 9, "Enter": 13, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39}
        number = {"windowsVirtualKeyCode": codes.get(name, 40)}
        text = {"text": "\r"} if name == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=name, code=name, **number, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=name, code=name, **number)

    def type(self, text: str) -> None:
        """Types into what has the focus."""
        self.call("Input.insertText", text=text)

    def picture(self, path: Path, width: int, height: int, scheme: str = "light") -> None:
        """Writes a picture of the window."""
        self.resize(width, height)
        scheme = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=scheme)
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def resize(self, width: int, height: int) -> None:
        """Changes the size of the window."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)


@contextmanager
def browsing(folder: Path) -> Iterator[Browser]:
    """Yields a browser that is closed after the context.

    Args:
        folder: for its profile.
    """
    program = chromium()
    assert program is not None
    reads, to = _high(*os.pipe())
    answers, writes = _high(*os.pipe())
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    options += ["--no-first-run", "--remote-debugging-pipe", f"--user-data-dir={folder}"]
    redirected = f'exec "$@" 3<&{reads} 4>&{writes}'
    with subprocess.Popen(
        ["bash", "-c", redirected, "bash", program, *options],
        pass_fds=(reads, writes),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        os.close(reads)
        os.close(writes)
        try:
            yield Browser(to, answers)
        finally:
            process.kill()
            os.close(to)
            os.close(answers)


def _high(*files: int) -> list[int]:
    """Duplicates files to descriptors other than 3 and 4, which the browser uses."""
    moved = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, 20) for file in files]
    for file in files:
        os.close(file)
    return moved
