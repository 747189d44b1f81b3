"""Compiled steps on an H100 that is not there move at most so many bytes: `make fake-gpu`."""

import json
from pathlib import Path

import pytest

from tests.gpu.fake.library import run, why_not

CONFIGS = Path(__file__).resolve().parents[3] / "configs"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "samples", "forward", "both", "head"),
    # GB of a block's forward pass, of both its passes, and of the output head with its loss.
    # Of muMoE's 2.71, 0.22 are the multiplications between its products, two kernels in each
    # pass, which only products with an epilogue would fuse.
    [
        ("gpt2/124m", 12, 0.72, 2.1, 7.0),
        ("gpt2/124m-smoe-16", 12, 0.93, 2.75, 7.0),
        ("gpt2/124m-mumoe-cp", 12, 0.97, 2.72, 7.0),
        ("decoder/olmoe-1b-7b", 4, 6.4, 18.7, 10.0),
    ],
)
def test_a_compiled_step_moves_few_bytes_and_stores_nothing_twice(
    tmp_path: Path, name: str, samples: int, forward: float, both: float, head: float
) -> None:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    done = run("kernels", [str(samples), str(CONFIGS / f"{name}.yaml")], tmp_path)
    assert done.stdout, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["failed"], found["breaks"], found["stored_twice"]) == ([], {}, [])
    # Forward: the embedding, a block, the head; backward in the other order.
    assert [graph["pass"] for graph in found["graphs"]] == ["forward"] * 3 + ["backward"] * 3
    moved = [graph["bytes"] / 1e9 for graph in found["graphs"]]
    assert moved[1] < forward
    assert moved[1] + moved[4] < both
    assert moved[2] + moved[3] < head
