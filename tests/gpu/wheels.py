"""What a GPU machine that reaches no registry lacks, as wheels:

    python -m tests.gpu.wheels wheels      # where a registry is reached
    make gpu-check WHEELS=wheels           # there

Versions are those of constraints.txt. The machine has PyTorch with CUDA, Triton, transformers, and
what scientific Python has.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MISSING = (
    "annotated-types", "datasets", "dill", "entmax", "hjson", "megatron-core", "multiprocess",
    "pydantic", "pydantic_core", "typing-inspection",
)  # fmt: skip
FROM_SOURCE = ("deepspeed",)
"""Without operators that are compiled beforehand its wheel is pure Python."""
PLATFORMS = [
    *(f"manylinux_2_{number}_x86_64" for number in (34, 31, 28, 27, 24, 17)),
    "manylinux2014_x86_64",
]


def main() -> int:
    """Downloads and builds the wheels of the command line's Python version."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", help="version there; default %(default)s")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip"]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as wanted:
        wanted.write("\n".join(_pinned(MISSING)))
        wanted.flush()
        tags = [word for tag in PLATFORMS for word in ("--platform", tag)]
        download = ["download", "-q", "--no-deps", "--only-binary=:all:", "-r", wanted.name]
        version = ["--python-version", given.python, "--implementation", "cp"]
        subprocess.run([*pip, *download, *version, *tags, "-d", str(given.folder)], check=True)
    build = ["wheel", "-q", "--no-deps", "-w", str(given.folder), *_pinned(FROM_SOURCE)]
    subprocess.run([*pip, *build], check=True, env=os.environ | {"DS_BUILD_OPS": "0"})
    files = sorted(given.folder.glob("*.whl"))
    size = sum(file.stat().st_size for file in files) / 2**20
    print(f"{len(files)} wheels, {size:.1f} MiB, in {given.folder}")
    return 0


def _pinned(names: tuple[str, ...]) -> list[str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = {line.partition("==")[0].lower().replace("_", "-"): line for line in lines}
    return [pins[name.lower().replace("_", "-")] for name in names]


if __name__ == "__main__":
    sys.exit(main())
