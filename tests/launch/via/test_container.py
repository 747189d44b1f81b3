"""The container recipe: its steps, run in a clean folder with a clean environment."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.started import ROOT

RECIPE = ROOT / "docs" / "cluster" / "Dockerfile"


def instructions() -> list[tuple[str, str]]:
    """(instruction, rest) of each line that is no comment, joined where it is continued."""
    text = re.sub(r"(?m)^#.*\n", "", RECIPE.read_text()).replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.strip()]
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in lines]


def test_the_recipe_is_built_on_cuda_and_installs_the_pinned_packages() -> None:
    found = instructions()
    assert (found[0][0], found[0][1][:5]) == ("ARG", "BASE=")
    assert "nvidia/cuda" in found[0][1]
    assert any("-c constraints.txt" in rest for word, rest in found if word == "RUN")
    assert set(dict(found)) == {"ARG", "FROM", "RUN", "WORKDIR", "COPY", "ENV"}


def test_what_is_left_out_of_the_image_is_not_in_the_repository() -> None:
    kept = subprocess.run(
        ["git", "ls-files", "--cached", "-i", "--exclude-from=.dockerignore"],
        **{"cwd": ROOT, "capture_output": True, "text": True, "check": True},
    )
    assert kept.stdout == ""


@pytest.mark.slow
def test_the_steps_after_the_system_packages_run_in_a_clean_environment(tmp_path: Path) -> None:
    """All but apt-get, which needs the image: its packages are those that this machine has."""
    files = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        **{"cwd": ROOT, "capture_output": True, "text": True, "check": True},
    ).stdout.splitlines()
    keep = ("PIP_", "LANG", "SSL_", "REQUESTS_", "HTTP", "NO_PROXY", "UV_")
    environment = {k: v for k, v in os.environ.items() if k.upper().startswith(keep)}
    environment |= {"HOME": str(tmp_path), "PATH": "/usr/local/bin:/usr/bin:/bin"}
    bin_of_python = str(Path(sys.executable).resolve().parent)
    environment["PATH"] = f"{bin_of_python}:{environment['PATH']}"
    place = tmp_path

    def here(text: str) -> str:
        return text.replace("/opt/", f"{tmp_path}/opt/")

    ran = 0
    for word, rest in instructions():
        if word == "WORKDIR":
            place = Path(here(rest))
            place.mkdir(parents=True)
        elif word == "COPY":
            for file in files:
                (place / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / file, place / file, follow_symlinks=False)
        elif word == "ENV":
            name, _, value = here(rest).partition("=")
            environment[name] = value.replace(f"${name}", environment[name])
        elif word == "RUN" and "apt-get" not in rest:
            done = subprocess.run(
                ["bash", "-c", here(rest)],
                **{"cwd": place, "env": environment, "capture_output": True, "text": True},
            )
            assert done.returncode == 0, f"{rest}\n{done.stderr[-3000:]}"
            ran += 1
    assert ran == 4
