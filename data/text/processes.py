"""Encodes several parts at the same time on this machine, each in its own process.

`python -m polyad.data.text.processes` is such a process. It reads its task from standard input and
writes JSON lines about its progress; it exits when nobody reads them.
"""

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Queue
from typing import NamedTuple

from polyad.data.errors import DataError
from polyad.data.files import writing
from polyad.data.progress import Progress
from polyad.data.text.job import Asked

SEND_SECONDS = 0.2
THREADS = "RAYON_NUM_THREADS"
"""Number of threads of the tokenizers library."""


class PartError(RuntimeError):
    """A process that was encoding a part exited before it was done."""

    exit_status = 1


class Message(NamedTuple):
    """A message of a process: its progress, or why its part cannot be encoded."""

    read: int = 0
    tokens: int = 0
    error: str | None = None


@dataclass(frozen=True)
class Work:
    """The task of a process."""

    asked: Asked
    output: str
    parts: int


def encode_in_processes(
    work: Work, numbers: list[int], processes: int, update: Callable[[int, int], None]
) -> list[int]:
    """Encodes parts, several at the same time.

    Args:
        work: The task.
        numbers: The numbers of the parts.
        processes: Number of parts encoded at the same time; they share the cores.
        update: Called with the total bytes read and tokens written.

    Returns:
        The total bytes read and tokens written.

    Raises:
        DataError: A part cannot be encoded; the others were stopped, and are encoded again from
            their beginning by the same command.
        PartError: A process was killed.
    """
    said: Queue[tuple[int, Message | None]] = Queue()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = max(1, (cores or 1) // processes)
    running: dict[int, subprocess.Popen[str]] = {}
    left = list(numbers)
    done = {number: (0, 0) for number in numbers}
    try:
        while left or running:
            while left and len(running) < processes:
                number = left.pop(0)
                running[number] = _start(work, number, threads)
                listen = threading.Thread(target=_listen, args=(running[number], number, said))
                listen.daemon = True
                listen.start()
            number, message = said.get()
            if message is None:
                _check_ended(number, running.pop(number).wait())
            elif message.error is not None:
                raise DataError(message.error)
            else:
                done[number] = message.read, message.tokens
                update(*_total(done))
    finally:
        for process in running.values():
            process.kill()
            process.wait()
    return _total(done)


def _total(done: dict[int, tuple[int, int]]) -> list[int]:
    return [sum(counts) for counts in zip(*done.values(), strict=True)]


def _start(work: Work, number: int, threads: int) -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        [sys.executable, "-m", "polyad.data.text.processes"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={THREADS: f"{threads}", **os.environ},
        start_new_session=True,  # so that only the command gets Ctrl-C; it ends this process
    )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin as told:
        json.dump({**asdict(work), "number": number}, told)
    return process


def _listen(
    process: "subprocess.Popen[str]",
    number: int,
    said: "Queue[tuple[int, Message | None]]",
) -> None:
    assert process.stdout is not None
    try:
        with process.stdout as lines:
            for line in lines:
                said.put((number, Message(*json.loads(line))))
    finally:  # else nobody would notice that it has ended
        said.put((number, None))


def _check_ended(number: int, status: int) -> None:
    if status:
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        raise PartError(
            f"the process that tokenized part {number} {how}; run the same command again to "
            "continue"
        )


def main() -> int:
    """Encodes the part that the parent process requests.

    Returns:
        The exit status.
    """
    from polyad.data.text.parts import encode_part
    from polyad.data.text.plan import Cut

    told = json.load(sys.stdin)
    sent = time.monotonic()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # keep output of libraries apart from the messages

    def send(message: Message) -> None:
        print(json.dumps(message), file=answers, flush=True)

    def update(read: int, tokens: int) -> None:
        nonlocal sent
        if time.monotonic() - sent >= SEND_SECONDS:
            send(Message(read, tokens))
            sent = time.monotonic()

    output = Path(told["output"])
    try:
        with writing(output):
            silent = Progress(lambda line: None)
            job = Asked(**told["asked"]).open()
            cut = Cut(job, job.sources(silent), output, told["parts"])
            work = cut.open(silent, train=False, overwrite=False)
            done = encode_part(work, told["number"], update)
    except DataError as error:
        send(Message(error=str(error)))
        return 0
    send(Message(done.bytes_read, done.tokens))
    return 0


if __name__ == "__main__":
    sys.exit(main())
