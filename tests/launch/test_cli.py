"""The command line: help, statuses, one-line errors, and standard output kept for results."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import polyad.train.train
from polyad.launch.cli import OTHERS_SPEAK_FIRST, run
from polyad.launch.commands import COMMANDS
from polyad.train.config.run import SHIPPED, load_config, shipped_configs
from polyad.train.errors import RunError, stopped
from tests.helpers.everyday import everyday

GPT2, WORDS = "configs/gpt2/124m.yaml", "model.vocab_size=64"


def error_line(captured: str) -> str:
    """The one line that a user's error is."""
    lines = captured.splitlines()
    assert len(lines) == 1, captured
    assert lines[0].isprintable(), captured
    assert lines[0].startswith("polyad: error: ")
    return lines[0]


def test_help_is_quick_because_it_imports_nothing_heavy():
    code = (
        "import sys; sys.argv = ['polyad', '--help']\n"
        "from polyad.launch.cli import run\n"
        "assert run(['--help']) == 0\n"
        "heavy = {'torch', 'numpy', 'pydantic', 'deepspeed', 'megatron'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "example:" in done.stdout
    assert all(name.split()[0] in done.stdout for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself_with_an_example(name, capfd):
    assert run([*name.split(), "--help"]) == 0
    captured = capfd.readouterr()
    assert f"usage: polyad {name}" in captured.out
    assert "example:\n  polyad " in captured.out
    assert captured.err == ""


@pytest.mark.parametrize("name", ["", "train", "checkpoint", "checkpoint list"])
def test_help_is_a_command_too(name, capfd):
    printed = []
    for words in (["help", *name.split()], [*name.split(), "--help"]):
        assert run(words) == 0
        printed.append(capfd.readouterr().out)
    assert printed[0] == printed[1] != ""


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        (["train.steps"], ["steps: integer >= 1; required"]),
        (["model.replaced.feed_forward.score"], ["(kind: smoe)", "(kind: emoe)"]),
        ([], ["data.mixture[]"]),
        (["data.mixture"], ["weight: "]),
        (["--study"], ["baseline: text; required"]),  # one section, so its keys
        (["grid_seeds", "--study"], ["grid_seeds: integer >= 1, or null; default null"]),
    ],
)
def test_keys_are_explained(words, lines, capfd):
    assert run(["keys", *words]) == 0
    text = capfd.readouterr().out
    assert all(line in text for line in lines), text


def test_version_is_printed(capfd):
    assert run(["--version"]) == 0
    assert capfd.readouterr().out.startswith("polyad ")


WRONG = [
    (["help", "trian"], "nearest is train"),
    (["keys", "train.step"], "the nearest is train.steps"),
    (["xyz"], "polyad --help"),
    (["checkpoint"], "list, verify"),
    (["checkpoint", "lst"], "nearest is checkpoint list"),
    (["train"], "CONFIG"),
    (["train", "DATA"], "Is a directory"),
    (["train", f"{'x' * 300}.yaml"], "File name too long"),
    (["train", "x.yaml", "--train.steps=3"], "no dashes: train.steps=3"),
    (["train", "configs/studies/mumoe.yaml"], "polyad study configs/studies/mumoe.yaml"),
    (["study", GPT2], f"polyad train {GPT2}"),
    (["evaluate", "x", "--rate", "0.1"], "--rate: 0.1"),
    (["evaluate", "x", "--attack", "word-swap"], "needs --rate"),
    (["evaluate", "x", "--split", "a b " * 999], "…"),
    (["evaluate", "x" * 300], "File name too long"),
    (["evaluate", "DATA"], "--data "),
    (["evaluate", "configs/launch"], "holds no complete checkpoint"),
    (["evaluate", "gpt2/124m"], "run.folder"),
    (["experts", "atlas", GPT2], "run.folder"),
    (["experts", "trace", "x"], "--output, or --text and --html"),
    (["prepare", "--source", "x", "--output", "y"], "--tokenizer"),
    (["prepare", "--join", "--source", "x", "--output", "y"], "--source"),
    (["prepare", "--source", "x" * 300, "--tokenizer", "words", "--output", "y"], "too long"),
    (["prepare", "--source", "x", "--tokenizer", "8192", "--output", "y"], "train:8192"),
    (["launch", "x.yaml"], "--processes-per-node"),
    (["launch", "x.yaml", "--processes-per-node", "two"], "'two'"),
    (["validate", "x.yaml", "--process", "2"], "nearest is --processes"),
    (["validate", "gpt2/125m"], "nearest is gpt2/124m"),
    (["validate", "x.yaml", "--lr", "3"], "no dashes: lr=VALUE"),
    (["report", "x", "--lr", "3"], "`polyad report --help`"),
    (["report", "gpt2/124m"], "run.folder"),
    (["report", "x", "--layers", "0,,1"], "as in 0,5"),
    (["report", "x", "--tokens", "-1"], "at least 0"),
    (["tr\x1b[31mian"], r"tr\x1b[31mian"),
    (["convert", "x", "y", "--to", "onnx"], "'huggingface', 'polyad'"),
    (["convert", "x", "y", "--to", "polyad", "--upcycle", "a", "--split", "b"], "--split"),
    (["predict", "x"], "--text, --file and --image"),
    (["generate", "x", "--prompt", "y", "--max-tokens", "0"], "'0'"),
    (["bench", "nowhere.yaml"], "nowhere.yaml: there is no such file"),
    (["bench", GPT2, "data.path=nowhere"], "model.vocab_size"),
    (["bench", GPT2, WORDS, "--processes", "3"], "train.global_batch_size"),
    (["bench", GPT2, WORDS, "--json", "nowhere/x.json"], "there is no folder nowhere"),
    (["bench", GPT2, WORDS, "--forced-balance"], "--forced-balance: "),
    (["plan", GPT2, WORDS, "--layout", "pp=2"], "--layout: pp=2"),
    (["plan", GPT2, WORDS, "--layout", "tp=16"], "tensor_parallel_size: 16"),
    (["plan", GPT2, WORDS, "--nodes", "5"], "train.global_batch_size: "),
    (["plan", GPT2, "data.path=runs/none"], "model.vocab_size"),
    (["doctor", "--via", "slurm"], "CONFIG: is missing"),
    (["doctor", "none.yaml"], "none.yaml: there is no such file"),
    (["configs", "gpt2/124"], "gpt2/124: no such configuration; the nearest is gpt2/124m"),
]


@pytest.mark.parametrize(("words", "named"), WRONG)
def test_a_wrong_command_line_is_one_line(words, named, data, refused):
    assert named in refused(*(data if word == "DATA" else word for word in words))


def test_a_run_is_continued_by_its_folder_wherever_it_lies(config, polyad):
    assert run(["train", str(config), "train.steps=2"]) == 0
    moved = (config.parent / "run").rename(config.parent / "moved")
    done = polyad("train", moved, "train.steps=3")
    assert "3 steps done" in done.stdout, done.stderr
    assert (moved / "checkpoints" / "step-00000003").is_dir()
    assert not (config.parent / "run").exists()


@pytest.mark.parametrize("command", ["validate", "train", "launch"])
@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("model.num_layer=3", "model.num_layers"),
        ("trian.steps=3", "train"),
        ("train.steps", "key=value"),
        ("model.num_heads=5", "model.num_heads"),
        ("train.global_batch_size=5", "train.global_batch_size"),
        ("parallel.tensor_parallel_size=2", "parallel.tensor_parallel_size"),
        ("data.path=/no/such/data", "polyad prepare"),
        ("data.path=null", "data.path"),
        ("model.vocab_size=10", "model.vocab_size"),
        ("model.sequence_length=1000000", "one sample"),
        ("checkpoint.init_from=/no/such/run", "/no/such/run"),
        ("run.folder=/dev/null/run", "run.folder"),
        ('data.path="a\\e[31mb"', r"'\x1b'"),
        ("train.steps=\x1b[31m", "#x001b"),
    ],
)
def test_a_wrong_key_is_one_line_before_anything_starts(command, override, named, config, refused):
    arguments = ["--processes-per-node", "1"] if command == "launch" else []
    assert named in refused(command, config, *arguments, override)
    assert not (config.parent / "run").exists()


def test_a_folder_that_is_no_run_is_not_written_to(config, refused):
    folder = config.parent / "run"
    folder.mkdir()
    (folder / "thesis.txt").write_text("precious")
    assert f"run.folder: {folder}" in refused("train", config)
    assert [path.name for path in folder.iterdir()] == ["thesis.txt"]


def test_prepare_prints_its_counts_on_stdout(text, tmp_path, capfd):
    arguments = ["--tokenizer", "train:300", "--output", str(tmp_path / "out")]
    assert run(["prepare", *arguments, "--source", str(text), "--test-fraction", "0"]) == 0
    captured = capfd.readouterr()
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    rows = {line.split()[0]: line.split()[1:] for line in captured.out.splitlines()[:4]}
    keys = ["documents", "tokens", "words", "bytes"]
    for name, split in manifest["splits"].items():
        assert rows[name][:-1] == [f"{split[key]:,}" for key in keys]
    assert "tokens/s" in captured.out
    assert str(tmp_path / "out") in captured.out


def test_a_config_may_stand_between_options_and_overrides(config, capfd):
    arguments = [str(config), "train.steps=6", "--processes", "2", "train.micro_batch_size=1"]
    assert run(["validate", *arguments, "--json", "-", "seed=3"]) == 0
    captured = capfd.readouterr()
    description = json.loads(captured.out)
    assert captured.err == ""
    assert description["training"]["steps"] == 6
    assert description["layout"]["micro_batch_size"] == 1
    assert description["layout"]["accumulation_steps"] == 2


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (RunError("step 3: too many\nsteps"), 1, "error: step 3: too many steps"),
        (OSError(28, "Disk is full", "run/x"), 1, "error: run/x: Disk is full"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (stopped(signal.SIGUSR1, "kept"), 138, "stopped by SIGUSR1; kept"),
    ],
)
def test_a_run_that_fails_or_is_stopped_has_one_line_and_its_status(
    error, status, words, config, monkeypatch, capfd
):
    def fail(*_: object, **__: object) -> None:
        os.write(1, b"noise of a library\n")
        raise error

    monkeypatch.setattr(polyad.train.train, "main", fail)
    assert run(["train", str(config)]) == status
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines()[-1] == f"polyad: {words}"


def test_a_fault_of_the_program_keeps_its_traceback(config, monkeypatch, capfd):
    monkeypatch.setattr(polyad.train.train, "main", lambda *_, **__: [][0])
    assert run(["train", str(config)]) == 1
    assert "Traceback" in capfd.readouterr().err


def test_another_process_that_ended_is_one_line(config, monkeypatch, capfd):
    def lost(*_: object, **__: object) -> None:
        raise RuntimeError(
            "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:52: "
            "Connection reset by peer. This is typically caused by a remote worker"
        )

    monkeypatch.setattr(polyad.train.train, "main", lost)
    assert run(["train", str(config)]) == 1
    line = error_line(capfd.readouterr().err)
    assert "another process of this run ended" in line
    assert "(Read error [127.0.0.1]:52: Connection reset by peer)" in line


def test_another_rank_leaves_the_error_to_the_first_of_its_host(config, monkeypatch, refused):
    waited: list[float] = []
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr("polyad.launch.cli.time.sleep", waited.append)
    assert "rank 1: " in refused("validate", config, "train.stps=3")
    assert waited == [OTHERS_SPEAK_FIRST]


@pytest.mark.parametrize("target", ["no/such/x.json", "."])
@pytest.mark.parametrize("command", ["validate", "evaluate"])
def test_a_json_file_that_cannot_be_written_is_found_before_the_work(
    config, tmp_path, command, target, refused
):
    of = config if command == "validate" else tmp_path / "no-run"
    assert "error: --json: " in refused(command, of, "--json", tmp_path / target)


@pytest.mark.parametrize(("name", "value"), [("WORLD_SIZE", "abc"), ("RANK", "0")])
def test_half_an_environment_of_torchrun_is_one_line(config, monkeypatch, refused, name, value):
    monkeypatch.setenv(name, value)
    refused("train", config)


@everyday("closed", [">&-", "2>&-", "<&-"], keep=[])
def test_a_closed_stream_changes_no_exit_status(closed):
    options = "--without-data model.vocab_size=8192"  # runs/stdlib need not be there
    command = f"{sys.executable} -m polyad.launch validate configs/quickstart/gpt2.yaml {options}"
    for more, status in (("", 0), (" x=1", 2)):
        done = subprocess.run(
            ["bash", "-c", f"{command}{more} {closed}"],
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
        )
        assert (done.returncode, "Traceback" in done.stderr) == (status, False)


def test_validate_describes_the_run_to_a_person_and_writes_json(config, tmp_path, capfd):
    assert run(["validate", str(config), "--processes", "2", "--json", str(tmp_path / "d")]) == 0
    captured = capfd.readouterr()
    description = json.loads((tmp_path / "d").read_text())
    assert captured.err == ""
    assert "(a new run)" in captured.out
    assert f"{description['model']['parameters']:,}" in captured.out
    assert "processes 2, data parallel size 2, " in captured.out
    assert description["training"]["epochs"] > 0
    assert not (tmp_path / "run").exists()


def test_validate_takes_the_number_of_processes_from_torchrun(config, monkeypatch, capfd):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert run(["validate", str(config), "--json", "-"]) == 0
    assert json.loads(capfd.readouterr().out)["layout"]["processes"] == 2


def test_without_data_the_vocabulary_has_to_be_given(config, capfd, refused):
    arguments = ["validate", str(config), "--without-data", "data.path=/no/such/data"]
    assert "model.vocab_size" in refused(*arguments)
    assert run([*arguments, "model.vocab_size=400"]) == 0
    assert "not checked" in capfd.readouterr().out


def test_configurations_are_listed_with_what_they_are_for(capfd):
    assert run(["configs"]) == 0
    rows = [line.split(maxsplit=1) for line in capfd.readouterr().out.splitlines()]
    names = [file.relative_to(SHIPPED).with_suffix("").as_posix() for file in shipped_configs()]
    assert [name for name, _ in rows] == sorted(names)
    assert "launch/kubernetes" not in names
    about = dict(rows)
    assert about["gpt2/124m-smoe-16"].startswith("GPT-2 124M with 16 experts in every block")
    assert all(len(text) <= 72 and "$schema" not in text for text in about.values())


@pytest.mark.parametrize("name", ["quickstart/gpt2", "configs/quickstart/gpt2.yaml"])
def test_a_configuration_is_printed_as_it_is_and_can_be_trained(name, tmp_path, capfd):
    assert run(["configs", name]) == 0
    printed = capfd.readouterr().out
    assert printed == (SHIPPED / "quickstart/gpt2.yaml").read_text()
    (tmp_path / "mine.yaml").write_text(printed)
    assert load_config(tmp_path / "mine.yaml", []).train.steps == 200
