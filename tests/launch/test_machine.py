"""What the environment says before libraries read it, in processes of their own."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from polyad.launch.processes import cores_here, cores_of, threads_of_each

ROOT = Path(__file__).resolve().parents[2]
SHOW = (
    "import os; from polyad.launch.processes import prepare_environment; prepare_environment(); "
    "print(os.environ.get('TORCHINDUCTOR_CACHE_DIR'))"
)


def environment(**changes: object) -> dict[str, str]:
    """This process's, without what says where caches are."""
    names = {"XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"}
    names |= {"RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"}
    kept = {name: value for name, value in os.environ.items() if name not in names}
    return kept | {name: str(value) for name, value in changes.items()}


def printed(*words: str, **changes: object) -> str:
    """What Python prints with these words, and with changes of the environment."""
    done = subprocess.run(
        [sys.executable, *words],
        **{"capture_output": True, "text": True, "check": True, "cwd": ROOT},
        env=environment(**changes),
    )
    return done.stdout.strip()


def compiled_code(**changes: object) -> str:
    """Where torch.compile is told to keep its code."""
    return printed("-c", SHOW, **changes)


def test_compiled_code_is_kept_among_the_users_caches(tmp_path):
    folder = tmp_path / ".cache" / "polyad" / "compiled"
    assert compiled_code(HOME=tmp_path) == str(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700  # nobody else puts code there
    other = tmp_path / "caches"
    assert compiled_code(HOME=tmp_path, XDG_CACHE_HOME=other) == f"{other}/polyad/compiled"
    assert compiled_code(HOME=tmp_path, TORCHINDUCTOR_CACHE_DIR="/mine") == "/mine"
    assert compiled_code(HOME="/dev/null") == "None"  # left to torch


def test_computers_that_share_a_home_keep_their_own(tmp_path):
    there = {"HOME": tmp_path / "home", "TMPDIR": tmp_path, "LOCAL_WORLD_SIZE": 2}
    folder = tmp_path / f"polyad-{os.getuid()}" / "compiled"
    assert compiled_code(**there, WORLD_SIZE=4) == str(folder)
    assert stat.S_IMODE(folder.parent.stat().st_mode) == 0o700
    assert compiled_code(**there, WORLD_SIZE=2) == str(tmp_path / "home/.cache/polyad/compiled")


def test_processes_of_a_node_share_whole_cores():
    cores = [frozenset({number, number + 6}) for number in range(6)]  # two threads each
    assert cores_of(0, 2, cores) == {0, 1, 2, 6, 7, 8}
    assert cores_of(1, 2, cores) == {3, 4, 5, 9, 10, 11}
    assert cores_of(3, 4, cores) == {3, 9}
    assert cores_of(0, 7, cores) == set()


BIND = """
import os, sys
from pathlib import Path
from polyad.launch import processes as machine
machine.GPUS = Path("/" if "gpu" in sys.argv else "/nowhere")
if "bound" in sys.argv:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
machine.bind_to_cores()
print(sorted(os.sched_getaffinity(0)))
"""


@pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2,
    reason="this machine lets this process run on one core alone",
)
def test_a_process_with_a_gpu_keeps_to_its_cores_unless_it_was_bound():
    everything = sorted(os.sched_getaffinity(0))

    def allowed(*words: str, **variables: str) -> list[int]:
        shown = printed("-c", BIND, *words, **variables)
        return [int(number) for number in shown.strip("[]").split(",")]

    ranks = [{"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"} for rank in range(2)]
    first, second = (allowed("gpu", **variables) for variables in ranks)
    assert first
    assert set(first).isdisjoint(second)
    assert allowed("gpu", "bound", **ranks[1]) == everything[:1]
    assert allowed(**ranks[0]) == everything
    assert allowed("gpu", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1") == everything


@pytest.mark.slow
def test_a_second_start_of_a_compiled_run_compiles_nothing(config, tmp_path):
    programs = []
    for number in range(2):
        words = ["-m", "polyad.launch", "train", str(config), "model.compile=true", "train.steps=1"]
        folder = f"run.folder={tmp_path / str(number)}"
        printed(*words, folder, XDG_CACHE_HOME=tmp_path / "caches")
        made = (tmp_path / "caches").rglob("*.so")
        programs.append({path: path.stat().st_mtime_ns for path in made})
    assert programs[0]
    assert programs[1] == programs[0]


def test_processes_share_the_cores_unless_told_otherwise(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cores = cores_here()
    assert 1 <= cores <= len(os.sched_getaffinity(0))
    assert threads_of_each(1) == cores
    assert threads_of_each(2 * cores) == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads_of_each(2 * cores) == 3
