"""Every command that a reader is told to type is run, in order, in a folder that begins empty.

A document's follow those of documents before it that make what they read.
The commands stand as they are written, with options behind them that make them cheap: a tiny model
in place of the one in the file, fewer turns of a benchmark. Studies take no keys, so that theirs
are changed in the folder's copy of the file. What cannot run here is in `NOT_RUN`.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from polyad.train.config.run import load_config
from tests.helpers.written import (
    ROOT,
    World,
    Written,
    by_hand,
    documents,
    help_commands,
    needed_for,
    parsed,
    polyad_words,
)

NOT_RUN = {
    "make setup": "installs packages",
    "make check": "is no use of Polyad",
    "make test": "is this suite",
    "python -m polyad.train.evaluation.lm_eval": "needs an extra, and a task of the network",
    "python -m polyad.launch.torchrun --nnodes 2": "needs two hosts that meet",
    "python -m tests.benchmarks.images --randaugment": "needs an extra, torchvision",
    "tensorboard ": "serves until it is stopped; what it would show is read instead",
    "python -m tests.benchmarks.step --device cuda": "needs a GPU",
    "polyad predict runs/quickstart-images/run": "needs a photo",
    "polyad robustness ": "needs ImageNet, and a model of it",
    "polyad experts rewrite ": "needs a model with factorized experts in its head",
    "polyad train configs/finetune/gpt2-small-sst2.yaml": "needs SST-2, from the network",
    "polyad evaluate runs/gpt2-small-sst2": "is of such a run",
    "polyad report runs/gpt2-small-sst2": "is of such a run",
}
"""How commands begin that are parsed only, and why."""
TINY = (
    *("model.hidden_size=32", "model.num_heads=2", "model.sequence_length=128"),
    *("train.global_batch_size=4", "train.micro_batch_size=2", "evaluation.max_windows=8"),
    "model.compile=false",
)
TINY_IMAGES = (
    *("model.hidden_size=32", "train.global_batch_size=4", "train.micro_batch_size=2"),
    *("evaluation.max_windows=8", "schedule.warmup_steps=2"),
    "model.compile=false",
)
TINY_EXPERTS = ("model.feed_forward.expert_hidden_size=32",)
TINY_STUDY = {
    "model.hidden_size": 32, "model.num_heads": 2, "model.sequence_length": 64, "train.steps": 12,
    "checkpoint.every": 4, "schedule.warmup_steps": 2,
}  # fmt: skip
WIDER = {"mxd": 96, "mxd-long": 96}
"""Widths of studies that have no room in a block of 32 for the decoders of 256 experts."""
SMALL_TEXT = "python:pydantic"
"""In place of the whole standard library."""
FEW_TOKENS = ("--tokens", "8192")
FEW_TURNS = ("--repeats", "1")
SHORT = {
    "tests.benchmarks.images": FEW_TURNS,
    "tests.benchmarks.checkpoint": (*FEW_TURNS, "--steps", "1", "--sequence-length", "16"),
    "tests.benchmarks.step": (*FEW_TURNS, "--batch-size", "1", "--sequence-length", "16"),
    "tests.benchmarks.layer": (*FEW_TURNS, "--tokens", "64", "--width", "128", "--hidden", "512"),
    "tests.benchmarks.routing": (
        *(*FEW_TURNS, "--tokens", "64", "--layers", "0", "--width", "32", "--heads", "2"),
        *("--hidden", "32", "--experts", "4"),
    ),
}
"""Later options replace earlier ones."""

pytestmark = [pytest.mark.slow, pytest.mark.distributed]


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A folder with recipes and configurations, whose studies have one seed and few steps."""
    for folder in ("configs", "docs/recipes"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    for path in (tmp_path / "configs" / "studies").glob("*.yaml"):
        tree = yaml.safe_load(path.read_text())
        if tree["tasks"]:  # their data come from the hub
            continue
        tree["seeds"] = [1]
        of_images = load_config(ROOT / tree["base"]).data.kind == "images"
        tree["common"] |= {"train.steps": 12} if of_images else TINY_STUDY
        if path.stem in WIDER:
            tree["common"]["model.hidden_size"] = WIDER[path.stem]
        path.write_text(yaml.safe_dump(tree, sort_keys=False))
    return tmp_path


def cheaper(command: Written) -> list[str]:
    """The words of a command with what makes it cheap behind them."""
    words = command.words
    given = polyad_words(words[: words.index(">")] if ">" in words else words)
    if given is None:  # python -m timeit
        return [word.replace("2**29", "2**16") for word in words]
    name, _, options = parsed(given)
    if name == "launch" and options.via == "slurm":  # which is not here
        return words if options.dry_run else [*words, "--dry-run"]
    if name in ("train", "launch", "bench"):
        words += ["--steps", "1"] if name == "bench" else []
        config = load_config(ROOT / options.config)
        if config.model.kind == "mixture":  # small as it is
            return words
        if config.data.kind == "images":
            return [*words, *TINY_IMAGES]
        experts = TINY_EXPERTS if "smoe" in options.config.name else ()
        return [*words, *TINY, *experts]
    if name == "prepare" and options.source == "python-stdlib":
        words += ["--source", SMALL_TEXT]
    if name in ("report", "compare", "experts atlas", "experts steer"):
        words += FEW_TOKENS
    return [*words, *SHORT.get(name, ())]


def start(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs a command as a shell in the clone would."""
    programs = {
        "polyad": ["-m", "polyad.launch"],
        "torchrun": ["-m", "torch.distributed.run"],
        "python": [],
    }
    environment = {
        **{key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")},
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",  # this checkout, whichever is installed
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    target = None
    if ">" in words:
        words, target = words[: words.index(">")], words[words.index(">") + 1]
    done = subprocess.run(
        [sys.executable, *programs[words[0]], *words[1:]],
        **{"cwd": folder, "env": environment, "capture_output": True, "text": True},
        timeout=1800,
    )
    if target is not None:
        (folder / target).write_text(done.stdout)
    return done


def follow(commands: list[Written], folder: Path, say: Callable[[str], None]) -> None:
    """Runs commands one after the other; each has to succeed and to make what is said of it."""
    world = World(folder)
    not_made: set[str] = set()
    # A quickstart installs packages first: what it does by hand stands in the file's head.
    for command in (one for each in commands for one in by_hand(each.words) or [each]):
        before = set(world.made())
        world.follow(command)
        reason = next((why for begin, why in NOT_RUN.items() if command.text.startswith(begin)), "")
        if reason:
            say(f"not run: {command}: {reason}")
            not_made |= set(world.made()) - before
            if command.words[0] == "tensorboard":
                board = EventAccumulator(str(folder / command.words[-1])).Reload()
                assert "loss" in board.Tags()["scalars"]
            continue
        words = cheaper(command)
        started = time.monotonic()
        done = start(words, folder)
        say(f"{time.monotonic() - started:6.1f} s  {' '.join(words)}")
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        for path in set(world.made()) - not_made:
            assert (folder / path).exists(), f"{command}\ndid not make {path}"


@pytest.mark.parametrize("place", dict.fromkeys(one.place for one in documents()))
def test_commands_of_a_document_run_in_the_order_in_which_they_stand(
    place: str, clone: Path
) -> None:
    follow(needed_for(place), clone, print)


@pytest.mark.parametrize("name", help_commands())
def test_examples_of_help_run_in_the_order_in_which_they_stand(name: str, clone: Path) -> None:
    follow(help_commands()[name], clone, print)


def test_nothing_is_left_out_that_is_not_written_down() -> None:
    everything = documents() + [one for commands in help_commands().values() for one in commands]
    for begin in NOT_RUN:
        assert any(command.text.startswith(begin) for command in everything), begin
