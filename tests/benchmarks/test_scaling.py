"""`scaling.py`: what is compared, the numbers of a fabricated step, and a real run."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from polyad.parallel.plan.traffic import Amount, Exchange
from polyad.train.config.rules import validate
from polyad.train.config.run import load_config
from polyad.train.errors import ConfigError
from polyad.train.forecast.step import footprint
from tests.benchmarks.scaling import Variant, Watched, compared, point, scaling, variants_of
from tests.benchmarks.scaling_process import Measured
from tests.benchmarks.scaling_table import scaling_table
from tests.benchmarks.script import run
from tests.benchmarks.waiting import Call, Step
from tests.launch.test_cli import error_line

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = [sys.executable, "-m", "tests.benchmarks.scaling"]
ENVIRONMENT = {
    **{key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")},
    "PYTHONPATH": str(ROOT),
}
GPT2, SMOE = Path("configs/gpt2/124m.yaml"), Path("configs/gpt2/124m-smoe-16.yaml")
SMALL = (
    *("model.vocab_size=64", "model.num_layers=1", "model.hidden_size=16", "model.num_heads=2"),
    *("model.sequence_length=16", "train.global_batch_size=8", "train.micro_batch_size=2"),
    *("model.compile=false", "train.precision=fp32"),
)
SUM = Exchange("all-reduce", "data", "float32")


def batches(variants: list[Variant]) -> dict[str, tuple[int, int]]:
    return {
        each.name: (each.config.train.global_batch_size, each.config.train.micro_batch_size)
        for each in variants
    }


def test_weak_scaling_keeps_a_process_s_samples_and_strong_scaling_those_of_all() -> None:
    variants, left_out = variants_of(GPT2, SMALL, (8, 1, 4, 4))
    assert batches(variants) == {
        "first 1": (8, 2),
        "weak 4": (32, 2),
        "strong 4": (8, 2),
        "weak 8": (64, 2),
        "strong 8": (8, 1),  # one sample for each is left
    }
    assert left_out == []


def test_what_the_degrees_do_not_fit_is_left_out() -> None:
    degrees = ("parallel.tensor_parallel_size=2", "parallel.expert_parallel_size=2")
    variants, left_out = variants_of(SMOE, [*SMALL, *degrees], (1, 2, 4, 6, 8))
    # Of 4 processes each pair has 4 samples, of 8 it keeps them.
    assert batches(variants) == {"first 4": (8, 2), "weak 8": (16, 2), "strong 8": (8, 2)}
    assert [each["variant"] for each in left_out] == ["1 processes", "2 processes", "6 processes"]
    assert "parallel.tensor_parallel_size: 2 does not divide" in left_out[0]["why"]
    assert "parallel.expert_parallel_size: 2 does not divide" in left_out[2]["why"]


def test_a_batch_that_cannot_be_divided_is_left_out_alone() -> None:
    variants, left_out = variants_of(GPT2, SMALL, (1, 3))
    assert batches(variants) == {"first 1": (8, 2), "weak 3": (24, 2)}
    (one,) = left_out
    assert one["variant"] == "strong 3"
    assert "train.global_batch_size: 8 is not divisible" in one["why"]


def fabricated(name: str, processes: int, threads: int, seconds: float) -> dict:
    """A point of two turns, of which the second's step counts: it took 8 s, the first's 9.

    In it every process but the last comes to a sum 1 s after it begins; the last comes at 5, and
    all go on at 7. In the plain step of that turn they took 4 s.
    """
    variants = {each.name: each for each in variants_of(GPT2, SMALL, (1, processes))[0]}

    def turn(end: float, plain: float) -> Watched:
        last = processes - 1
        steps = [
            Step(0, end, [Call("a", SUM, came, came, 7)])
            for came in (5 if rank == last else 1 for rank in range(processes))
        ]
        found = [Measured(0, plain, step, {SUM: Amount(1, 100, 50)}) for step in steps]
        return Watched(plain, found)

    row = {"seconds": seconds, "seconds_ratio": 1.0, "seconds_ratio_interval": None, "timed": 2}
    return point(variants[name], threads, row, [turn(9, 1), turn(8, 4)], cores=2)


def test_parts_are_those_of_the_middle_step() -> None:
    made = fabricated("strong 4", 4, 1, 2.0)
    watched = made["watched"]
    assert watched["seconds"] == 8
    assert watched["over_plain"] == 2
    assert watched["waiting"] == {"mean": 3, "max": 4, "of_each": [4, 4, 4, 0]}
    assert watched["moving"] == {"mean": 2, "max": 2, "of_each": [2, 2, 2, 2]}
    assert watched["computing"] == {"mean": 3, "max": 6, "of_each": [2, 2, 2, 6]}
    (row,) = made["exchanges"]
    assert (row["kind"], row["axis"]) == ("all-reduce", "data")
    assert (row["processes"], row["calls"], row["sent_bytes"]) == (4, 1, 50)
    assert (row["waiting"], row["moving"]) == (3, 2)
    assert made["units_per_second"] == 8 * 16 / 2.0


def test_efficiency_is_of_the_cores_that_compute() -> None:
    def efficiency(name: str, threads: tuple[int, int], ratio: float) -> float:
        processes = int(name.split()[1])
        base = fabricated("first 1", processes, threads[0], 1.0)
        made = fabricated(name, processes, threads[1], ratio)
        interval = (0.5 * ratio, 2 * ratio)
        made |= {"seconds_ratio": ratio, "seconds_ratio_interval": interval}
        found = compared(made, base)
        low, high = found["efficiency_interval"]
        assert low == pytest.approx(found["efficiency"] / 2)
        assert high == pytest.approx(found["efficiency"] * 2)
        assert made["share_cores"] is (processes * threads[1] > 2)
        return found["efficiency"]

    # Both cores compute, before and after: twice the samples may take twice the time.
    assert efficiency("weak 2", (2, 1), 2.0) == pytest.approx(1.0)
    assert efficiency("strong 2", (2, 1), 1.25) == pytest.approx(0.8)
    # One core before and two after: twice the samples in the same time.
    assert efficiency("weak 2", (1, 1), 1.0) == pytest.approx(1.0)
    assert efficiency("strong 2", (1, 1), 0.625) == pytest.approx(0.8)
    # Four processes do not bring more cores than there are.
    assert efficiency("weak 4", (1, 1), 2.0) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere.yaml"], ["nowhere.yaml: there is no such file"]),
        (["--processes", "0"], ["--processes", "'0'", "at least 1"]),
        (["--processes", "1", "two"], ["--processes", "'two'", "at least 1"]),
        (["--processes", "train.steps=1"], ["--processes: train.steps=1 is not a number"]),
        (["--processes", "1", "model.num_layer=2"], ["model.num_layer", "nearest is"]),
        (["--processes", "1", "64"], ["--processes: 64", "train.global_batch_size: 8"]),
        (["model.num_layer=2"], ["model.num_layer", "nearest is model.num_layers"]),
        ([str(GPT2), "data.path=nowhere"], ["model.vocab_size: null", "model.vocab_size=50257"]),
        (
            ["parallel.tensor_parallel_size=2", "--processes", "1", "3"],
            ["--processes", "parallel.tensor_parallel_size: 2 does not divide the 3 processes"],
        ),
        (["--json", "nowhere/x.json"], ["--json", "there is no folder nowhere"]),
        (["--repeats", "0"], ["--repeats", "at least 1"]),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    arguments: list[str], words: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(scaling, arguments) == 2
    captured = capfd.readouterr()
    assert captured.out == ""
    for word in words:
        assert word in error_line(captured.err)


def test_nothing_fits_is_said_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="does not divide"):
        variants_of(GPT2, [*SMALL, "parallel.tensor_parallel_size=2"], (1, 3))


@pytest.mark.slow
@pytest.mark.distributed
def test_one_and_two_processes_take_turns(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    words = [*SCRIPT, str(GPT2), "--repeats", "2", "--threads", "1", "--json", str(path)]
    done = subprocess.run(
        [*words, "--processes", "1", "2", *SMALL],
        **{"cwd": ROOT, "env": ENVIRONMENT, "capture_output": True, "text": True},
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(path.read_text())
    for kind in ("weak", "strong"):
        assert [each["processes"] for each in result[kind]] == [1, 2]
    assert result["strong"][0] == result["weak"][0]
    assert result["left_out"] == []
    config = load_config(GPT2, SMALL)
    for kind in ("weak", "strong"):
        made = result[kind][1]
        train = {"global_batch_size": made["global_batch_size"], "micro_batch_size": 2}
        other = config.model_copy(update={"train": config.train.model_copy(update=train)})
        forecast = footprint(other, validate(other, 2)).exchanges
        sent = {
            (each["kind"], each["axis"], each["precision"]): (each["calls"], each["sent_bytes"])
            for each in made["exchanges"]
        }
        assert sent == {tuple(key): (each.calls, each.sent) for key, each in forecast.items()}
        watched = made["watched"]
        for parts in zip(
            *(watched[part]["of_each"] for part in ("computing", "waiting", "moving")), strict=True
        ):
            assert sum(parts) == pytest.approx(watched["seconds"])
            assert min(parts) >= 0
    assert scaling_table(result) + "\n" == done.stdout
    for words in ("weak scaling", "strong 2 reduce", "waiting"):
        assert words in done.stdout
    assert "2 of 2, " in done.stderr
    assert "s left" in done.stderr


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("whom", ["one of its processes", "the bench"])
def test_no_process_is_left_when_one_is_killed_or_the_bench_interrupted(
    whom: str, tmp_path: Path
) -> None:
    said = tmp_path / "stderr"
    words = [*SCRIPT, str(GPT2), *SMALL, "--repeats", "5000", "--processes", "1", "2"]
    with said.open("w") as stderr:
        bench = subprocess.Popen(words, cwd=ROOT, env=ENVIRONMENT, stderr=stderr)
    while "1 of 5000" not in said.read_text():  # until they train
        assert bench.poll() is None, said.read_text()
        time.sleep(0.1)
    started = psutil.Process(bench.pid).children(recursive=True)
    trainers = [each for each in started if "tests.benchmarks.scaling_process" in each.cmdline()]
    assert len(trainers) == 5  # two torchruns among them
    if whom == "the bench":
        bench.send_signal(signal.SIGINT)
    else:
        max(trainers, key=lambda each: each.pid).kill()
    bench.wait(timeout=90)
    _, alive = psutil.wait_procs(started, timeout=30)
    assert alive == []
    errors = said.read_text()
    last = errors.splitlines()[-1]
    if whom == "the bench":
        assert bench.returncode == 130
        assert "Traceback" not in errors
        assert last == "polyad: interrupted"
    else:
        assert bench.returncode == 1
        assert last.startswith("polyad: error: scaling: ")
        assert last.endswith("failed; it has said why")
