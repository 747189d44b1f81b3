"""A bad half hour: a run over four hosts under one fault after another.

    make bad-half-hour MINUTES=30 SEED=1

The hosts are network namespaces of this machine, each with a real sshd; a small sparse mixture of
experts, spread over all of them, is started by `polyad launch --via ssh`. A quiet run comes first:
it takes half of the time, and its steps are those of the run that follows, to which the faults of
`tests/helpers/faults.py` happen at steps that the seed chooses. The run has to end by itself at its
last step, and its losses have to be those of the quiet run, bitwise.

It needs Linux, root, `ip` and `tc` (Debian's iproute2), and an OpenSSH server.
"""

import pydoc_data.topics
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Annotated, Any

import pytest

from polyad.launch.command import Argument, Command, Json, UsageError, command, names, positive
from polyad.launch.ending import guard
from polyad.launch.output import align, results
from polyad.train.console import Progress, duration
from polyad.train.errors import RunError
from polyad.train.records import METRICS_FILE, record_of
from tests.helpers import started
from tests.helpers.faults import KINDS, Cluster, Done, Fault, do, lives, schedule, small_disk
from tests.helpers.hosts import NO_NETEM, Host, SshServers, several_hosts
from tests.helpers.prepared import jsonl, silent

HOSTS = 4
EVERY = 50
"""Steps between checkpoints."""
STALL_MINUTES = 0.5
"""`monitor.stall_minutes`: longer than a worker is stopped for a while."""
GRACE = 5.0
"""`monitor.grace_seconds`: a save takes a fraction of one here."""
DISK = 192
"""Megabytes of the disk that becomes full."""
PATIENCE = 420.0
"""Seconds after which a run that does not go on is started by hand."""
MOST_BY_HAND = 5
"""Starts by hand, after which nothing more is tried."""
LOOK_AGAIN = 0.05

_START = re.compile(r"continues (?:from|after) step ([\d,]+)|new run: ")


class Launched:
    """A run, as a user starts it and starts it again.

    Args:
        command: `polyad launch` with its options.
        log: gets all that it says.
        folder: of the run.
    """

    def __init__(self, command: Sequence[str], log: Path, folder: Path) -> None:
        self._command, self._log, self._metrics = command, log, folder / METRICS_FILE
        self.starts: list[int] = []
        """The steps that the processes went on from, each time that they started."""
        self.said: list[str] = []
        """Lines of errors, and those of the launcher itself."""
        self.process: subprocess.Popen[str]
        self.start()

    def start(self) -> None:
        """Starts the launcher."""
        self.process = started.start(self._command, stderr=subprocess.STDOUT)
        assert self.process.stdout is not None
        threading.Thread(target=self._listen, args=(self.process.stdout,), daemon=True).start()

    def kill(self) -> None:
        """Ends the launcher at once, and nothing else."""
        self.process.kill()
        self.process.wait()

    def last_step(self) -> int:
        """The last step that has a record; 0 before the first."""
        try:
            with self._metrics.open("rb") as file:
                file.seek(max(0, self._metrics.stat().st_size - 2**16))
                records = [record_of(line) for line in file.read().splitlines()[-3:]]
        except OSError:
            return 0
        return max((int(each["step"]) for each in records if each is not None), default=0)

    def _listen(self, lines: IO[str]) -> None:
        with self._log.open("a") as log:
            for line in lines:
                log.write(f"{time.strftime('%H:%M:%S')} {line}")
                log.flush()
                if found := _START.search(line):
                    self.starts.append(int((found[1] or "0").replace(",", "")))
                if "polyad: " in line:
                    self.said.append(line.strip())


@dataclass(kw_only=True)
class Outcome:
    """What became of a fault."""

    step: int
    """The step that the run had recorded."""
    kind: str
    what: str
    """The host and the processes."""
    survived: bool = True
    """Whether the run went on, and nobody had to start it."""
    detected: float | None = None
    """Seconds until another process of the run ended for it; None: none had to."""
    recovered: float | None = None
    """Seconds until the run recorded a step that it had not before, and the fault was over."""
    repeated: int = 0
    """Steps that were done again."""
    why: str = ""
    """What the launcher said last, where it had to be started by hand."""


@dataclass(kw_only=True)
class Report:
    """What a bad half hour was like."""

    seed: int
    hosts: int
    processes: int
    steps: int
    quiet_seconds: float
    """What the quiet run took from its start to its end."""
    seconds: float = 0.0
    """The same of the run with faults."""
    ended: bool = False
    """Whether it ended at its last step."""
    by_hand: list[str] = field(default_factory=list)
    """Why it had to be started by hand, each time."""
    faults: list[Outcome] = field(default_factory=list)
    not_done: int = 0
    """Faults that were due at a step which was recorded too late for them."""
    different: list[int] = field(default_factory=list)
    """Steps whose losses are not those of the quiet run, or that have none."""

    @property
    def left_out(self) -> list[str]:
        """What could not happen, and why."""
        short = [each for each in self.faults if each.what.endswith(NO_NETEM)]
        return [
            "a NaN on one process: its step is skipped, as it has to be, and losses after it are "
            "not those of a quiet run",
            *(f"packets lost by chance: this kernel has no tc netem; {NO_NETEM} was lost"
              for _ in short[:1]),
        ]  # fmt: skip

    @property
    def lost(self) -> float:
        """The share of the time in which the quiet run would have trained."""
        return max(0.0, 1 - self.quiet_seconds / self.seconds)

    @property
    def good(self) -> bool:
        """Whether everything was as it has to be."""
        return self.ended and not self.by_hand and not self.different

    def to_json(self) -> dict[str, Any]:
        """All of it, and what follows from it."""
        return vars(self) | {
            "survived": sum(each.survived for each in self.faults),
            "repeated": sum(each.repeated for each in self.faults),
            "lost": self.lost,
            "good": self.good,
            "left_out": self.left_out,
        }

    def text(self) -> str:
        """The same for a person."""
        rows = [("fault", "times", "survived", "detected s", "recovered s", "steps repeated")]
        for kind in dict.fromkeys(each.kind for each in self.faults):
            these = [each for each in self.faults if each.kind == kind]
            rows.append(_row(kind, these))
        rows.append(_row("all", self.faults))
        repeated = sum(each.repeated for each in self.faults)
        same = (
            f"losses of all {self.steps:,} steps are those of the quiet run, bitwise"
            if not self.different
            else f"losses of {len(self.different):,} steps are not those of the quiet run, or are "
            f"missing: {', '.join(map(str, self.different[:5]))}"
        )
        lines = [
            f"seed {self.seed}: {self.processes} processes on {self.hosts} hosts, "
            f"{self.steps:,} steps",
            align(rows),
            f"ended by itself at its last step: "
            f"{'yes' if self.ended and not self.by_hand else 'no'}",
            f"time: {duration(self.seconds)}, of a quiet run {duration(self.quiet_seconds)}: "
            f"{100 * self.lost:.0f}% lost; {repeated:,} steps were done again, none is missing"
            if not self.different
            else f"time: {duration(self.seconds)}",
            same,
        ]
        if self.not_done:
            lines.append(f"{self.not_done} faults were not done: the run had come to its end")
        lines += [
            f"not survived: {each.kind} at step {each.step:,} ({each.what})"
            for each in self.faults
            if not each.survived
        ]
        lines += [f"started by hand: {each}" for each in self.by_hand]
        lines += [f"left out: {each}" for each in self.left_out]
        return "\n".join(lines)


def _row(name: str, these: Sequence[Outcome]) -> tuple[str, ...]:
    return (
        name,
        str(len(these)),
        str(sum(each.survived for each in these)),
        _middle([each.detected for each in these]),
        _middle([each.recovered for each in these]),
        f"{sum(each.repeated for each in these):,}",
    )


def _middle(seconds: Sequence[float | None]) -> str:
    """The mean and the most of those that are known."""
    known = [each for each in seconds if each is not None]
    return f"{sum(known) / len(known):.1f} (at most {max(known):.1f})" if known else "-"


class Rehearsal:
    """A run, and what happens to it.

    Args:
        launched: the run.
        cluster: where it is.
        steps: of the run.
    """

    def __init__(self, launched: Launched, cluster: Cluster, steps: int) -> None:
        self._launched, self._cluster, self._steps = launched, cluster, steps
        self._progress = Progress("bad half hour", steps, "steps")
        self._best, self._starts, self._repeated = 0, 0, 0
        self.by_hand: list[str] = []
        """Why somebody had to start it, each time."""
        self.ended = False

    def over(self) -> bool:
        """Looks how the run stands; starts it again where it has given up.

        Returns:
            Whether it has ended at its last step.
        """
        self._best = max(self._best, self._launched.last_step())
        for step in self._launched.starts[self._starts :]:
            self._repeated += max(0, self._best - step)
            self._starts += 1
        if self._best < self._steps:
            self._progress(self._best / self._steps)
        status = self._launched.process.poll()
        if status == 0 and self._best == self._steps:
            self.ended = True
        elif status is not None:
            self._start_by_hand(f"status {status}: {(self._launched.said or [''])[-1]}")
        return self.ended

    def go_through(self, faults: Sequence[Fault]) -> list[Outcome]:
        """Does each fault at its step, once the run has got over the one before.

        Returns:
            What became of those that were done until the run ended.
        """
        outcomes = []
        for fault in faults:
            while not self.over() and self._best < fault.step:
                time.sleep(LOOK_AGAIN)
            if self.ended:
                break
            outcomes.append(self._go_through(fault))
        while not self.over():
            time.sleep(LOOK_AGAIN)
        return outcomes

    def _go_through(self, fault: Fault) -> Outcome:
        others = set(self._cluster.workers())
        begun, by_hand, repeated = time.monotonic(), len(self.by_hand), self._repeated
        done = do(fault, self._cluster)
        outcome = Outcome(step=self._best, kind=fault.kind, what=done.what)
        self._until_it_is_over(fault, done, outcome, others - done.victims, begun)
        outcome.repeated = self._repeated - repeated
        outcome.why = "; ".join(self.by_hand[by_hand:])
        outcome.survived = not outcome.why
        end = "\n" if sys.stderr.isatty() else ""  # of the line with the progress
        print(f"{end}{_line(outcome)}", file=sys.stderr, flush=True)
        return outcome

    def _until_it_is_over(
        self, fault: Fault, done: Done, outcome: Outcome, others: set[int], begun: float
    ) -> None:
        lasts, known, starts = True, self._best, len(self._launched.starts)
        while True:
            now = time.monotonic() - begun
            if outcome.detected is None and not all(map(lives, others)):
                outcome.detected = now
            if lasts and now >= fault.seconds:
                done.end()
                lasts, known = False, max(known, self._launched.last_step())
            started_again = KINDS[fault.kind].passes or len(self._launched.starts) > starts
            # One record may have been on its way.
            if self.over() or (not lasts and started_again and self._best > known + 1):
                outcome.recovered = now
                return
            if now > PATIENCE * (1 + len(self.by_hand)):
                self._launched.kill()
                self._start_by_hand(f"it did not go on within {PATIENCE:g} s")
            time.sleep(LOOK_AGAIN)

    def _start_by_hand(self, why: str) -> None:
        self.by_hand.append(why)
        if len(self.by_hand) > MOST_BY_HAND:
            raise RunError(f"the run with faults was started by hand too often: {why}")
        time.sleep(5)
        self._launched.start()


def _line(outcome: Outcome) -> str:
    """What a person is told of a fault as soon as it is over."""
    parts = [f"step {outcome.step:,}: {outcome.kind}: {outcome.what}"]
    if outcome.detected is not None:
        parts.append(f"detected after {outcome.detected:.1f} s")
    if outcome.recovered is not None:
        parts.append(f"recovered after {outcome.recovered:.1f} s")
    if outcome.repeated:
        parts.append(f"{outcome.repeated} steps repeated")
    if not outcome.survived:
        parts.append(f"started by hand: {outcome.why}")
    return "; ".join(parts)


class Theatre:
    """Hosts, their servers, a disk and the text, for a quiet run and one with faults.

    Args:
        hosts: the hosts.
        folder: for keys, logs and configurations.
        disk: for the runs.
        processes: of a run.
    """

    def __init__(self, hosts: Sequence[Host], folder: Path, disk: Path, processes: int) -> None:
        self.hosts, self.servers, self._folder, self._disk = (
            hosts, SshServers(hosts, folder), folder, disk,
        )  # fmt: skip
        self.processes = processes
        (folder / "hosts").write_text(
            "".join(f"{host.alias} slots={processes // len(hosts)}\n" for host in hosts)
        )
        source = Path(pydoc_data.topics.__file__).read_text(encoding="utf-8")
        pieces = [source[at : at + 4000] for at in range(0, 200_000, 4000)]
        texts = jsonl(folder / "text.jsonl", pieces)
        silent(texts, "train:400", folder / "text", validation_fraction=0.1)

    def launch(self, name: str, steps: int) -> Launched:
        """Starts a run.

        Args:
            name: of its folder.
            steps: to do.
        """
        experts = {"kind": "smoe", "num_experts": 8, "expert_hidden_size": 32, "top_k": 2}
        config = started.write_run(
            *(self._folder / name, self._folder / "text", steps, EVERY),
            run={"folder": str(self.run(name))},
            model=started.SMALL["model"] | {"dropout": 0.1, "feed_forward": experts},
            train={"steps": steps, "global_batch_size": self.processes, "micro_batch_size": 1},
            schedule={"kind": "constant"},
            parallel={
                "zero_stage": 1,
                "expert_parallel_size": min(4, self.processes),
                "timeout_minutes": 5.0,
            },
            checkpoint={"every": EVERY, "keep_last": 3},
            evaluation={"every": 0},
            monitor={"stall_minutes": STALL_MINUTES, "grace_seconds": GRACE},
        )
        options = [
            *("--via", "ssh", "--hostfile", str(self._folder / "hosts"), "--interface", "eth0"),
            *("--ssh-config", str(self.servers.client), "--max-restarts", "1000"),
        ]
        words = [sys.executable, "-m", "polyad.launch", "launch", str(config), *options]
        return Launched(words, self._folder / f"{name}.log", self.run(name))

    def run(self, name: str) -> Path:
        """The folder of a run."""
        return self._disk / name

    def quiet(self, seconds: float, steps: int | None) -> tuple[int, float]:
        """Does the run that nothing happens to.

        Args:
            seconds: after which it is stopped, where no number of steps was given.
            steps: to do.

        Returns:
            The steps that it has done, and the seconds that it took.
        """
        begun = time.monotonic()
        launched = self.launch("quiet", steps or 10**6)
        progress = Progress("quiet run", steps or seconds, "steps" if steps else "s")
        while launched.process.poll() is None:
            spent = time.monotonic() - begun
            if steps is None and spent > seconds:
                launched.process.send_signal(signal.SIGTERM)
                launched.process.wait()
            share = launched.last_step() / steps if steps else spent / seconds
            progress(min(share, 0.999))  # at 1 the line would end
            time.sleep(LOOK_AGAIN)
        if launched.process.returncode not in (0, 128 + signal.SIGTERM):
            raise RunError(f"the quiet run failed: {(launched.said or ['it said nothing'])[-1]}")
        return launched.last_step(), time.monotonic() - begun


@contextmanager
def theatre(processes: int, hosts: int, folder: Path) -> Iterator[Theatre]:
    """Builds hosts, disk and text, and removes them.

    Args:
        processes: of a run.
        hosts: that they are on.
        folder: for all files; it is made.
    """
    folder.mkdir()
    with small_disk(folder / "disk", DISK) as disk, several_hosts(hosts, net=79) as made:
        yield Theatre(made, folder, disk, processes)


def rehearse(
    place: Theatre,
    *,
    seed: int,
    minutes: float,
    steps: int | None = None,
    count: int | None = None,
    kinds: Sequence[str] = tuple(KINDS),
) -> Report:
    """Does a quiet run, and one with faults.

    Args:
        place: where.
        seed: of the faults.
        minutes: that both take, about: half of them is the quiet one's.
        steps: of each in place of what comes of the minutes.
        count: of faults; None: one a minute, at least one of each kind.
        kinds: that happen.
    """
    steps, quiet_seconds = place.quiet(30 * minutes, steps)
    report = Report(
        seed=seed, hosts=len(place.hosts), processes=place.processes, steps=steps,
        quiet_seconds=quiet_seconds,
    )  # fmt: skip
    faults = schedule(
        *(seed, count or max(len(kinds), round(minutes)), range(EVERY + 1, steps * 19 // 20)),
        hosts=len(place.hosts), workers=place.processes // len(place.hosts), kinds=kinds,
    )  # fmt: skip
    begun = time.monotonic()
    launched = place.launch("bad", steps)
    cluster = Cluster(place.hosts, place.servers, place.run("bad"), launched)
    rehearsal = Rehearsal(launched, cluster, steps)
    try:
        report.faults = rehearsal.go_through(faults)
    finally:
        with suppress(ProcessLookupError):
            launched.kill()
    report.seconds, report.ended = time.monotonic() - begun, rehearsal.ended
    report.by_hand = rehearsal.by_hand
    report.not_done = len(faults) - len(report.faults)
    quiet, bad = (started.losses(place.run(name)) for name in ("quiet", "bad"))
    report.different = [n for n in range(1, steps + 1) if n not in bad or bad[n] != quiet[n]]
    return report


def minutes_of(text: str) -> float:
    """The type of a number of minutes on the command line."""
    with suppress(ValueError):
        if 0 < (number := float(text)) <= 24 * 60:
            return number
    import argparse

    raise argparse.ArgumentTypeError(f"{text!r} is not a number of minutes, more than 0")


@command(
    "bad_half_hour",
    "python -m tests.reliability.bad_half_hour --minutes 30 --seed 1 --json report.json",
    program="python -m tests.reliability.",
)
def bad_half_hour(
    *,
    minutes: Annotated[
        float, Argument("about what it takes in all; default %(default)s", "N", minutes_of)
    ] = 30,
    seed: Annotated[int, Argument("of the faults; default %(default)s", "N")] = 1,
    faults: Annotated[
        int | None,
        Argument("how many; default: one a minute, at least one of each kind", "N", positive),
    ] = None,
    processes: Annotated[
        int, Argument("4 or 8, on four hosts; default %(default)s", "N", positive)
    ] = 4,
    steps: Annotated[
        int | None, Argument("of the run, in place of what --minutes gives", "N", positive)
    ] = None,
    only: Annotated[
        list[str] | None, Argument(f"kinds between commas, of {', '.join(KINDS)}", "KINDS", names)
    ] = None,
    keep: Annotated[
        Path | None, Argument("a new folder for logs and runs, which stays", "DIR")
    ] = None,
    json: Json = None,
) -> int:
    """Does a quiet run and one with a fault after another, and compares them.

    Its status is 1 where a fault was not survived, or losses differ.
    """
    for each in only or ():
        if each not in KINDS:
            raise UsageError(
                f"--only: {each!r} is not a kind of fault; there are {', '.join(KINDS)}"
            )
    if processes not in (HOSTS, 2 * HOSTS):
        raise UsageError(f"--processes: {processes} is not allowed; {HOSTS} or {2 * HOSTS}")
    with results(json) as show, tempfile.TemporaryDirectory() as temporary:
        folder = keep or Path(temporary) / "all"
        try:
            with theatre(processes, HOSTS, folder) as place:
                report = rehearse(
                    place, seed=seed, minutes=minutes, steps=steps, count=faults,
                    kinds=only or tuple(KINDS),
                )  # fmt: skip
        except pytest.skip.Exception as reason:
            raise RunError(f"not here: {reason}") from None
        show(report, report.text())
        return 0 if report.good else 1


def main(script: Command, words: Sequence[str]) -> int:
    """Runs the command; an error is one line. SIGTERM, too, leaves no host or disk behind."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    return guard(lambda: script(words))


if __name__ == "__main__":
    sys.exit(main(bad_half_hour, sys.argv[1:]))
