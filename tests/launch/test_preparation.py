"""`polyad prepare --parts`: its steps and their options, and the jobs of Slurm that take them."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from polyad.launch.cli import run
from tests.helpers.started import ROOT, write_command
from tests.launch.test_cli import error_line

PARTS = 3
STAND_INS = {
    "sbatch": """
        for script; do :; done
        number=$(($(cat "$LOG/number" 2> /dev/null || echo 40) + 1))
        echo $number > "$LOG/number"; printf '%s\\n' "$@" > "$LOG/$number"
        test -z "$REFUSED" || { echo "sbatch: error: $REFUSED" >&2; exit 1; }
        echo "$number;cluster" """,
    "srun": """
        while [ "${1#--}" != "$1" ]; do shift; done
        exec "$@" """,
}


@pytest.fixture
def stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Commands of Slurm that note their words, in a folder on the PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in STAND_INS.items():
        write_command(folder / name, text)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("LOG", str(folder))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(os, "fsync", lambda file: None)
    return folder


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def last_line(capfd: pytest.CaptureFixture[str]) -> str:
    """The error, behind lines of progress."""
    return error_line(capfd.readouterr().err.splitlines()[-1])


def words(text: Path, output: Path | str, tokenizer: str = "words") -> list[str]:
    return ["prepare", "--source", str(text), "--tokenizer", tokenizer, "--output", str(output)]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--part", "0"], ["--part: means nothing without --parts N"]),
        (["--join"], ["--join: means nothing without --parts N"]),
        (["--processes", "2"], ["--processes: means nothing without --parts N"]),
        (["--via", "slurm"], ["--via: slurm needs --parts N"]),
        (["--parts", "0"], ["--parts", "'0'", "at least 1"]),
        (["--parts", "1000000"], ["--parts: 1000000 is not allowed; 1 to 100,000"]),
        (["--parts", "3", "--part", "3"], ["--part: 3 is not allowed; 0 to 2"]),
        (["--parts", "3", "--part", "0", "--join"], ["--join", "--part"]),
        (["--parts", "3", "--join", "--processes", "2"], ["--processes: 2", "--join"]),
        (["--parts", "3", "--time", "10"], ["--time: '10'", "--via local", "--via slurm"]),
        (["--parts", "3", "--dry-run"], ["--dry-run", "--via slurm"]),
        (["--parts", "3", "--via", "slurm", "--part", "0"], ["--part", "--via slurm"]),
        (["--parts", "3", "--via", "slurm", "--partition", "a b"], ["--partition: 'a b'"]),
        (["--parts", "3", "--via", "slurm", "--time", "1h"], ["--time: '1h'", "MINUTES"]),
    ],
)
def test_options_that_do_not_go_together_are_one_line(
    options: list[str],
    said: list[str],
    text: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert run([*words(text, tmp_path / "out"), *options]) == 2
    line = last_line(capfd)
    assert all(part in line for part in said), line
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("options", [["--parts", "3"], ["--via", "slurm"], ["--join"]])
def test_images_have_no_parts(
    options: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    output = ["--output", str(tmp_path / "out")]
    assert run(["prepare", "--images", "digits", *output, *options]) == 2
    line = last_line(capfd)
    assert f"{options[0]}: " in line
    assert "applies to text only, and is not allowed with --images" in line


def test_files_that_are_called_as_our_packages_are_not_imported(text: Path, tmp_path: Path) -> None:
    for name in ("data", "train", "launch"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong one')")
    polyad = Path(sys.executable).with_name("polyad")
    command = [polyad, *words(text, tmp_path / "out"), "--parts", "2", "--processes", "2"]
    hidden = ("PYTHONSAFEPATH", "PYTHONPATH")
    environment = {k: v for k, v in os.environ.items() if k not in hidden}
    done = subprocess.run(
        command,
        **{"cwd": tmp_path, "env": environment, "check": False},
        **{"capture_output": True, "text": True},
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "manifest.json").is_file()


def test_steps_of_the_command_make_the_folder(
    text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda file: None)
    assert run(words(text, tmp_path / "whole")) == 0
    whole = capfd.readouterr().out
    command = [*words(text, tmp_path / "out"), "--parts", "2"]
    assert run([*command, "--part", "1"]) == 2
    assert "run the same command once with --begin" in last_line(capfd)
    assert run([*command, "--begin"]) == 0
    assert "2 of 2 parts to encode" in capfd.readouterr().out
    assert run([*command, "--part", "1"]) == 0
    assert "missing: 0\n" in capfd.readouterr().out
    assert run([*command, "--join"]) == 2
    assert "part 0 of 2 (from 0) missing" in last_line(capfd)
    assert run([*command, "--part", "0"]) == 0
    assert "all are there: join them with --join\n" in capfd.readouterr().out
    assert run([*command, "--join"]) == 0
    counts = whole.splitlines()[:-2]  # then the time, and the folder
    assert capfd.readouterr().out.splitlines()[: len(counts)] == counts
    assert files(tmp_path / "out") == files(tmp_path / "whole")


def submit(text: Path, folder: Path, *options: str, tokenizer: str = "words") -> int:
    command = words(text, folder / "out", tokenizer)
    return run([*command, "--parts", f"{PARTS}", "--via", "slurm", *options])


def test_jobs_follow_each_other(
    stand_ins: Path, text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert submit(text, tmp_path) == 0
    launch = tmp_path / ".out.parts" / "launch"
    assert capfd.readouterr().out.splitlines() == [
        f"begin: job 41, {launch}/begin.sh",
        f"parts: job 42, {launch}/parts.sh",
        f"join: job 43, {launch}/join.sh",
    ]
    after = "--kill-on-invalid-dep=yes"
    for number, script, before in ((41, "begin", 0), (42, "parts", 41), (43, "join", 42)):
        given = (stand_ins / f"{number}").read_text().splitlines()
        waits = [f"--dependency=afterok:{before}", after] if before else []
        assert given == ["--parsable", *waits, f"{launch}/{script}.sh"]


@pytest.mark.slow
def test_jobs_make_the_folder(
    stand_ins: Path, text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    key = "a'b $(id) \n"
    rows = (json.dumps({key: path.read_text()}) + "\n" for path in sorted(text.iterdir()))
    text = tmp_path / "text.jsonl"
    text.write_text("".join(rows))
    assert submit(text, tmp_path, "--dry-run", "--text-key", key) == 0
    launch = tmp_path / ".out.parts" / "launch"
    submission = capfd.readouterr().out
    done = subprocess.run(["bash", "-e", "-c", submission], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    given = (stand_ins / "43").read_text().splitlines()
    assert given[1] == "--dependency=afterok:42"
    # The jobs run here, as Slurm would run them.
    for script, tasks in (("begin", [None]), ("parts", range(PARTS)), ("join", [None])):
        for task in tasks:
            variables = {} if task is None else {"SLURM_ARRAY_TASK_ID": f"{task}"}
            done = subprocess.run(
                ["bash", str(launch / f"{script}.sh")],
                **{"env": os.environ | variables, "capture_output": True, "text": True},
            )
            assert done.returncode == 0, done.stderr
    assert run([*words(text, tmp_path / "whole"), "--text-key", key]) == 0
    assert files(tmp_path / "out") == files(tmp_path / "whole")
    assert [path.name for path in launch.parent.iterdir()] == ["launch"]


def test_scripts_ask_for_what_was_asked_and_for_parts_that_are_missing(
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(os, "fsync", lambda file: None)
    monkeypatch.chdir(tmp_path)
    command = [*words(text, "out"), "--parts", f"{PARTS}"]
    assert run([*command, "--begin"]) == 0
    assert run([*command, "--part", "1"]) == 0
    capfd.readouterr()
    asked = {"time": "1-12", "partition": "cpu", "account": "lab.1", "qos": "long"}
    asked |= {"cpus-per-node": "16", "memory-per-node": "64G", "job-name": "tokens"}
    options = [word for key, value in asked.items() for word in (f"--{key}", value)]
    assert run([*command, "--via", "slurm", *options, "--dry-run"]) == 0
    launch = tmp_path / ".out.parts" / "launch"
    assert sorted(os.listdir(launch)) == ["join.sh", "parts.sh"]
    script = (launch / "parts.sh").read_text()
    lines = script.splitlines()
    assert [line for line in lines if line.startswith("#SBATCH")] == [
        "#SBATCH --job-name=tokens",
        "#SBATCH --array=0,2",
        "#SBATCH --nodes=1",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --cpus-per-task=16",
        "#SBATCH --mem=64G",
        "#SBATCH --time=1-12",
        "#SBATCH --partition=cpu",
        "#SBATCH --account=lab.1",
        "#SBATCH --qos=long",
        f"#SBATCH --output={launch}/slurm-%A_%a.out",
        "#SBATCH --open-mode=append",
        "#SBATCH --requeue",
    ]
    for each in ("parts", "join"):
        subprocess.run(["bash", "-n", str(launch / f"{each}.sh")], check=True)
    start = script[script.index("exec srun") :]
    assert shlex.split(start.replace("\\\n", "")) == [
        *("exec", "srun", "--ntasks=1", "--cpus-per-task=16"),
        *(
            sys.executable,
            "-m",
            "polyad.launch",
            "prepare",
            f"--source={text}",
            "--tokenizer=words",
        ),
        *("--output=out", "--text-key=text", "--documents=files", "--parts", "3"),
        *("--part", "$SLURM_ARRAY_TASK_ID"),
    ]
    join = (launch / "join.sh").read_text()
    assert f"\n#SBATCH --output={launch}/slurm-%j.out\n" in join
    assert "--array" not in join
    assert join.rstrip().endswith(" --parts 3 --join")
    done = subprocess.run(["bash", str(launch / "parts.sh")], capture_output=True, text=True)
    assert done.returncode == 2
    assert "polyad: error: not a job array" in done.stderr


def test_all_parts_are_one_array_and_whole_nodes(
    text: Path, tmp_path: Path, data: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert submit(text, tmp_path, "--dry-run", "--image", "polyad.sif", tokenizer=str(data)) == 0
    launch = tmp_path / ".out.parts" / "launch"
    assert sorted(os.listdir(launch)) == ["join.sh", "parts.sh"]  # the tokenizer is there
    script = (launch / "parts.sh").read_text()
    assert "\n#SBATCH --array=0-2\n" in script
    assert "\n#SBATCH --exclusive\n" in script
    here = os.getcwd()
    assert (
        f" apptainer exec --nv --bind {here} --pwd {here} polyad.sif python -m polyad.launch"
        in script
    )


def test_a_refusal_of_sbatch_is_one_line(
    stand_ins: Path,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("REFUSED", "Invalid job array specification")
    assert submit(text, tmp_path) == 1
    line = capfd.readouterr().err.splitlines()[-1]
    assert re.search(r"sbatch refused .*begin\.sh: .*Invalid job array specification", line)


def test_a_folder_that_cannot_stand_in_a_directive_is_refused(
    text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert submit(text, tmp_path / "a b", "--dry-run") == 2
    line = last_line(capfd)
    assert "--output: " in line
    assert "cannot stand in an #SBATCH line" in line
    assert not (tmp_path / "a b").exists()
