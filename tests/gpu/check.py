"""Whether Polyad works on a GPU, in nine minutes: `make gpu-check`, or a part of it:

    make gpu-check ONLY="tests train"

Each part has a limit of its own; one that fails or does not end is noted, and the next begins.
After each part the folder OUT (./gpu-check) holds what is known so far: `result.json`, and the logs
in one archive. This file needs nothing but Python; the parts need what Polyad needs. How fast it is
`speed.py` measures.
"""

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]
PYTEST = ("-m", "pytest", "-p", "no:cacheprovider", "-o", "addopts=", "--import-mode=importlib")
RUN = ("tests/gpu/test_run.py", "tests/gpu/test_commands.py")


class Part(NamedTuple):
    """A command, and the seconds that it may take."""

    name: str
    limit: int
    words: Sequence[str]
    """After `python`."""
    stopped: bool = False
    """Whether it is to end by its limit."""
    ended_by: signal.Signals = signal.SIGTERM
    """What it gets at its limit. At SIGINT pytest writes what it knows."""
    variables: Mapping[str, str] = MappingProxyType({})
    reserved: bool = False
    """Whether its time is kept free while others run."""


def parts(work: Path, tiny: bool) -> Iterator[Part]:
    """All parts in their order: what a first visit needs most stands first.

    Args:
        work: A folder for data, runs and logs.
        tiny: Small sizes, for a machine without a GPU.
    """
    yield data(work, tiny)
    if not tiny:
        yield Part("card", 40, ("-m", "tests.gpu.measures", "card", str(work / "card.json")))
    yield _tests(work, "tests-device", 75, "tests/gpu/test_device.py")
    few = "not compiled and not does_not_fit"
    yield _tests(work, "tests", 150, *RUN, "-n", "8", "-k", few)
    begun = ["configs/quickstart/gpt2.yaml"]
    if not tiny:
        begun = ["configs/gpt2/124m.yaml", "model.vocab_size=50304"]
    begun += [f"data.path={work / 'data'}", f"run.folder={work / 'train'}"]
    begun += ["train.steps=100000", "checkpoint.every=100", "evaluation.every=0", "log.every=5"]
    for name, limit in (("train", 25 if tiny else 90), ("resume", 30 if tiny else 60)):
        yield Part(name, limit, ("-m", "polyad.launch", "train", *begun), stopped=True)
    yield _tests(work, "tests-compiled", 150, *RUN, "-n", "8", "-k", "compiled")
    yield _tests(work, "tests-memory", 30, RUN[0], "-k", "does_not_fit")


def data(work: Path, tiny: bool) -> Part:
    """Prepares what runs read; without a validation split none is evaluated."""
    source = ("--source", "python:pydantic" if tiny else "python-stdlib")
    source += ("--tokenizer", f"train:{1024 if tiny else 8192}")
    source += ("--validation-fraction", "0", "--test-fraction", "0")
    words = ("-m", "polyad.launch", "prepare", *source, "--output", str(work / "data"))
    return Part("data", 60, words)


def _tests(work: Path, name: str, limit: int, *words: str) -> Part:
    report = ("--junitxml", str(work / f"{name}.xml"))
    words = (*PYTEST, "-v", "-ra", "--tb=short", *report, *words)
    return Part(name, limit, words, ended_by=signal.SIGINT)


def run(part: Part, limit: float, log: Path, environment: dict[str, str]) -> dict[str, Any]:
    """Runs a part; its output goes to a file.

    Args:
        part: What is run.
        limit: Seconds.
        log: The file.
        environment: Variables beside the part's own.

    Returns:
        `status`: 0, that of the command, or `stopped` where it ran into its limit; and `seconds`.
    """
    began = time.monotonic()
    with log.open("wb") as output:
        started = subprocess.Popen(
            [sys.executable, "-W", "ignore", *part.words],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=environment | part.variables,
            start_new_session=True,
        )
        status: int | str
        try:
            status = started.wait(limit)
        except subprocess.TimeoutExpired:
            status = "stopped"
            started.send_signal(part.ended_by)
            with contextlib.suppress(subprocess.TimeoutExpired):
                started.wait(20)
    _end(started)
    return {"status": status, "seconds": round(time.monotonic() - began, 1)}


def _end(started: subprocess.Popen[bytes]) -> None:
    """Ends whatever is left of a command and its processes."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(started.pid, signal.SIGKILL)
    started.wait()


def outcomes_of(report: Path) -> dict[str, Any]:
    """How many tests passed, failed and were left out, and the names of those that failed."""
    cases = list(ElementTree.parse(report).iter("testcase"))
    failed = [c for c in cases if c.find("failure") is not None or c.find("error") is not None]
    skipped = sum(each.find("skipped") is not None for each in cases)
    return {
        "passed": len(cases) - len(failed) - skipped,
        "failed": [f"{each.get('classname')}::{each.get('name')}" for each in failed],
        "skipped": skipped,
    }


def trace_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Where a traced step went.

    Args:
        events: Of a Chrome trace, as the profiler of a run writes it; times in microseconds.

    Returns:
        Seconds from the first kernel to the last and those in which one ran, the number of kernels,
        and those that took most, by name, with milliseconds and calls.
    """
    on_gpu = ("kernel", "gpu_memcpy", "gpu_memset")
    kernels = [event for event in events if event.get("cat") in on_gpu]
    if not kernels:
        return {"kernels": 0}
    spans = sorted((event["ts"], event["ts"] + event["dur"]) for event in kernels)
    busy, end = 0.0, spans[0][0]
    for first, last in spans:
        busy += max(0.0, last - max(first, end))
        end = max(end, last)
    took, calls = Counter[str](), Counter[str]()
    for event in kernels:
        took[event["name"][:100]] += event["dur"]
        calls[event["name"][:100]] += 1
    return {
        "kernels": len(kernels),
        "seconds": (end - spans[0][0]) / 1e6,
        "busy_seconds": busy / 1e6,
        "most": {name: [time / 1e3, calls[name]] for name, time in took.most_common(25)},
    }


def run_of(folder: Path) -> dict[str, Any]:
    """What a training run took: medians of its steps, and its traced step."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "step_seconds" in row]
    if not rows:
        raise ValueError("no step was taken")
    late = [row for row in rows if 4 <= row["step"] < max(5, rows[-1]["step"] - 1)] or rows
    keys = ("step_seconds", "tokens_per_second", "mfu", "memory_bytes")
    found: dict[str, Any] = {"steps": [row["step"] for row in (rows[0], rows[-1])]}
    found["losses"] = [row["loss"] for row in rows[:10]]
    for key in keys:
        values = [row[key] for row in late if row.get(key) is not None]
        found[key] = statistics.median(values) if values else None
    for trace in (folder / "profile").glob("*.json"):
        found["trace"] = trace_of(json.loads(trace.read_text())["traceEvents"])
    return found


def found_by(part: str, work: Path) -> dict[str, Any]:
    """What a part's files say, whether or not it came to its end."""
    if (report := work / f"{part}.xml").exists():
        return {"tests": outcomes_of(report)}
    folder = work / ("train" if part == "resume" else part)
    if (folder / "metrics.jsonl").exists():
        return {"run": run_of(folder)}
    if (rows := work / f"{part}.json").exists():
        return {"measured": json.loads(rows.read_text())}
    return {}


def rates_of(run: dict[str, Any]) -> str:
    """The speed of a run, for people."""
    line = f"{run['tokens_per_second']:,.0f} tokens/s"
    line += f", MFU {run['mfu']:.1%}" if run["mfu"] else ""
    if (trace := run.get("trace", {})).get("kernels"):
        share = trace["busy_seconds"] / trace["seconds"]
        line += f", GPU busy {share:.0%} of a traced step of {trace['kernels']:,} kernels"
    return line


def said(name: str, result: dict[str, Any]) -> str:
    """A part's line for people."""
    line = f"{name:22} {result['status']!s:>8} {result['seconds']:6.1f} s"
    if tests := result.get("tests"):
        counts = tests["passed"], len(tests["failed"]), tests["skipped"]
        line += "  {} passed, {} failed, {} not run".format(*counts)
        line += "".join(f"\n    {test}" for test in tests["failed"])
    if run := result.get("run"):
        line += f"  {rates_of(run)}"
    return line


def main() -> int:
    """Runs the parts; status 1 if one failed."""
    given = options(__doc__, "gpu-check").parse_args()
    return visit(given, parts, found_by, said)


def options(text: str | None, out: str) -> argparse.ArgumentParser:
    """The options of a visit, whose results go to the folder `out` where $OUT names none."""
    parser = argparse.ArgumentParser(description=text)
    parser.add_argument("--out", type=Path, default=os.environ.get("OUT", out))
    parser.add_argument("--wheels", type=Path, help="a folder; its packages are installed first")
    parser.add_argument("--only", nargs="*", help="names of parts, or how they begin")
    parser.add_argument("--seconds", type=float, default=530, help="for all; default %(default)s")
    parser.add_argument("--tiny", action="store_true", help="small sizes, without a GPU")
    return parser


def visit(
    given: argparse.Namespace,
    parts: Callable[[Path, bool], Iterator[Part]],
    found_by: Callable[[str, Path], dict[str, Any]],
    said: Callable[[str, dict[str, Any]], str],
) -> int:
    """Runs parts one after the other, and writes after each what is known.

    Args:
        given: The options.
        parts: Lists all parts; gets a folder, and whether sizes are small.
        found_by: Reads what a part left in the folder.
        said: A part's line for people.

    Returns:
        1 if a part failed.
    """
    ends = time.monotonic() + given.seconds
    given.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, dict[str, Any]] = {"visit": {"status": 0, "seconds": 0.0}}
    results["visit"]["date"] = time.strftime("%Y-%m-%d %H:%M")
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as place:
        work = Path(place)
        (work / "logs").mkdir()
        site = work / "site"
        path = [str(each) for each in (site, ROOT / "src", ROOT)]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([*path, os.environ.get("PYTHONPATH", "")]),
            "PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1", "HF_HUB_OFFLINE": "1",
            "XDG_CACHE_HOME": str(work / "cache"), "TOKENIZERS_PARALLELISM": "false",
            "TORCHINDUCTOR_CACHE_DIR": str(work / "inductor"),
        }  # fmt: skip
        chosen = [each for each in parts(work, given.tiny) if _chosen(each.name, given.only)]
        if given.wheels is not None:
            files = map(str, sorted(given.wheels.resolve().glob("*.whl")))
            words = ("-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target", str(site))
            chosen.insert(0, Part("install", 60, (*words, *files)))
        for number, part in enumerate(chosen):
            kept = sum(later.limit for later in chosen[number + 1 :] if later.reserved)
            limit = min(part.limit, ends - time.monotonic() - kept - 6)
            if limit < 8:
                results[part.name] = {"status": "no time", "seconds": 0.0}
            else:
                log = work / "logs" / f"{part.name}.log"
                results[part.name] = run(part, limit, log, environment)
                if part.stopped and results[part.name]["status"] == "stopped":
                    results[part.name]["status"] = 0  # as it was to end
                try:
                    results[part.name] |= found_by(part.name, work)
                except (OSError, ValueError, KeyError, ElementTree.ParseError) as error:
                    results[part.name]["unread"] = f"{type(error).__name__}: {error}"
            print(said(part.name, results[part.name]), flush=True)
            (given.out / "result.json").write_text(json.dumps(results, indent=1))
            with tarfile.open(given.out / "logs.tar.gz", "w:gz") as archive:
                archive.add(work / "logs", "logs")
    return int(any(each["status"] != 0 for each in results.values()))


def _chosen(name: str, only: Sequence[str] | None) -> bool:
    return not only or name == "data" or any(name.startswith(each) for each in only)


if __name__ == "__main__":
    sys.exit(main())
