"""A wheel in an environment of its own, used in a folder whose files are called as our folders."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent
# The names that a user's own project has: nanoGPT's files, and folders of data.
THEIRS = ("model.py", "train.py", "launch.py", "parallel.py", "data/__init__.py", "configs.py")
TYPED = """
import polyad

run: polyad.Run = polyad.load("run")
layers = run.experts("text").layers
reveal_type(layers["blocks.0.feed_forward"].experts)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of the tracked files."""
    source = tmp_path_factory.mktemp("source")
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    for name in filter(None, listed.split("\0")):
        if name.startswith("tests/") or not (ROOT / name).exists():
            continue
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name, follow_symlinks=False)
    folder = tmp_path_factory.mktemp("wheel")
    build = ["wheel", str(source), "--no-deps", "--no-build-isolation", "-q", "-w", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", *build], check=True, timeout=300)
    (path,) = folder.iterdir()
    return path


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment: the wheel, and the packages of this one but not our editable install."""
    folder = tmp_path_factory.mktemp("environment") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    ours = Path(sysconfig.get_path("purelib"))
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = folder / "lib" / version / "site-packages"
    for package in ours.iterdir():
        if "polyad" not in package.name and package.suffix != ".pth":
            (site / package.name).symlink_to(package)
    # `src` on the path would count as an installed Polyad.
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    install = ["--python", str(folder / "bin" / "python"), "install", "--no-deps", "-q"]
    pip = [sys.executable, "-m", "pip", *install, str(wheel)]
    subprocess.run(pip, env=clean, check=True, timeout=300)
    return folder / "bin"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder of a user's, whose files are not to be imported."""
    for name in THEIRS:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"raise SystemExit('{name} was imported')\n")
    (tmp_path / "data" / "notes.txt").write_text("Some words of mine, and more of them. " * 300)
    return tmp_path


def done(words: list[object], folder: Path) -> str:
    hidden = ("PYTHONSAFEPATH", "PYTHONPATH")
    clean = {key: value for key, value in os.environ.items() if key not in hidden}
    process = subprocess.run(
        [str(word) for word in words], cwd=folder, env=clean, capture_output=True, text=True,
        timeout=300,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr + process.stdout
    return process.stdout


def test_a_wheel_holds_all_that_is_read_and_takes_one_name(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"polyad"}
    tracked = subprocess.run(
        ["git", "ls-files", "model", "parallel", "train", "data", "launch", "configs"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    wanted = (".py", ".txt", ".yaml", ".json", ".html", ".css", ".sh")
    for name in tracked:
        if name.endswith(wanted) and "studies/results" not in name and (ROOT / name).exists():
            assert f"polyad/{name}" in names
    assert "polyad/py.typed" in names


def test_a_wheel_works_in_a_folder_with_files_called_as_ours(
    environment: Path, project: Path
) -> None:
    polyad, python = environment / "polyad", environment / "python"
    prepare = ["prepare", "--source", "data", "--format", "text", "--tokenizer", "train:300"]
    done([polyad, *prepare, "--validation-fraction", "0.5", "--output", "prepared"], project)
    small = [
        "data.path=prepared", "run.folder=mine", "train.steps=2", "train.global_batch_size=4",
        "train.micro_batch_size=2", "model.sequence_length=16", "model.hidden_size=32",
        "model.num_layers=2", "model.num_heads=2", "evaluation.every=0", "schedule.warmup_steps=1",
        "train.precision=fp32", "model.feed_forward.num_experts=4",
        "model.feed_forward.expert_hidden_size=16",
    ]  # fmt: skip
    # By name, in two processes: torchrun starts `-m polyad.launch` in the folder.
    launch = [polyad, "launch", "quickstart/gpt2-smoe", "--processes-per-node", "2"]
    done([*launch, *small, "model.compile=false"], project)
    code = (
        "import json, polyad\n"
        "from pathlib import Path\n"
        "run = polyad.load('mine')\n"
        "rows = run.experts('words').table()\n"
        "print(json.dumps([polyad.__file__, len(rows), run.evaluate('prepared')['loss']]))"
    )
    file, rows, loss = json.loads(done([python, "-c", code], project).splitlines()[-1])
    assert Path(file).is_relative_to(environment.parent)
    assert rows >= 5
    assert 0 < loss < 10


def test_a_type_checker_knows_what_the_face_returns(environment: Path, project: Path) -> None:
    (project / "notebook.py").write_text(TYPED)
    check = ["-m", "mypy", "--follow-imports=silent", "--python-executable"]
    found = done([sys.executable, *check, environment / "python", "notebook.py"], project)
    assert 'Revealed type is "torch._tensor.Tensor"' in found
