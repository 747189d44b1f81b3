"""The agent at the other end of an SSH connection: started, signalled, heard and ended."""

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from polyad.launch.output import pass_on
from polyad.launch.via.remote import BEAT, TERMINATION

LOST = 255
"""ssh's own status: the connection could not be made, or broke."""


class Connection:
    """An agent of a host; what it prints goes on with the host's name before it.

    Args:
        host: its name.
        command: opens the connection.
        task: of `polyad.launch.via.remote`.
    """

    def __init__(self, host: str, command: Sequence[str], task: Mapping[str, Any]) -> None:
        self.host = host
        # A session of its own: Ctrl-C in a terminal is handed on through the connection.
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._sending = threading.Lock()
        self._ending: float | None = None
        self.send(json.dumps(task))
        self._threads = [
            threading.Thread(target=pass_on, args=(self._process.stdout, sys.stdout, "")),
            threading.Thread(target=pass_on, args=(self._process.stderr, sys.stderr, f"{host} ")),
            threading.Thread(target=self._beat, daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def send(self, line: str) -> None:
        """Sends a line; one that nobody hears any more is dropped."""
        with self._sending, contextlib.suppress(OSError, ValueError):
            assert self._process.stdin is not None
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()

    def end(self) -> None:
        """Ends the agent: in order if the host answers, else the connection."""
        if self._ending is None:
            self._ending = time.monotonic()
            # In a thread: the pipe to a host that is out of reach may be full.
            threading.Thread(target=self.send, args=("end",), daemon=True).start()

    def poll(self) -> int | None:
        """The agent's status, once everything that it said was shown; None while it runs."""
        if self._ending is not None and time.monotonic() - self._ending > 3 * TERMINATION:
            self._process.kill()
        if self._process.poll() is None:
            return None
        for thread in self._threads[:2]:
            thread.join(timeout=5)
        status = self._process.returncode
        return LOST if status < 0 else status

    def _beat(self) -> None:
        while self._process.poll() is None:
            self.send("beat")
            time.sleep(BEAT)
