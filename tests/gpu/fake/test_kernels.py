"""Compiled blocks become machine code of an H100 that is not there: `make fake-gpu`."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.fake.library import run, why_not

ROOT = Path(__file__).resolve().parents[3]
CONFIGS = (
    "gpt2/124m", "gpt2/124m-smoe-16", "gpt2/124m-mumoe-cp", "gpt2/124m-mumoe-tr", "gpt2/124m-emoe",
    "wikitext103/smoe-medium-similarity", "wikitext103/smoe-medium-attention",
    "gpt2/124m-mxd", "gpt2/124m-emo",
    "decoder/olmoe-1b-7b", "vit/vmoe-b16", "bert/base", "mixer/s16-mumoe-cp",
)  # fmt: skip
SPARSE = "gpt2/124m-smoe-16"


def said_of(folder: Path, *words: str) -> dict[str, Any]:
    """What `kernels.py` says."""
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    done = run("kernels", [*words], folder)
    assert done.stdout, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def found_for(config: str, folder: Path, *options: str) -> dict[str, Any]:
    """What it says of a configuration."""
    return said_of(folder, *options, str(ROOT / "configs" / f"{config}.yaml"))


@pytest.mark.slow
@pytest.mark.parametrize(("samples", "gigabytes"), [(12, 7), (60, 34)])
def test_the_head_writes_no_gradients_of_logits_in_fp32(
    samples: int, gigabytes: int, tmp_path: Path
) -> None:
    found = said_of(tmp_path, "--head", str(samples))
    assert not found["failed"]
    assert sum(graph["bytes"] for graph in found["graphs"]) < gigabytes * 1e9


@pytest.mark.slow
@pytest.mark.parametrize(("config", "gigabytes"), [(SPARSE, 0.69), ("decoder/olmoe-1b-7b", 13.2)])
def test_rows_of_experts_are_not_written_twice(
    config: str, gigabytes: float, tmp_path: Path
) -> None:
    found = found_for(config, tmp_path)
    assert found["block"]["forward"]["bytes"] < gigabytes * 1e9


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS)
def test_a_compiled_step_is_traced_whole_and_becomes_machine_code(
    config: str, tmp_path: Path
) -> None:
    found = found_for(config, tmp_path)
    assert (found["failed"], found["breaks"]) == ([], {})
    assert found["kernels"] > 20
    assert found["taken_for_granted"] > found["kernels"]


@pytest.mark.slow
def test_kernels_for_weights_anywhere_take_no_place_for_granted(tmp_path: Path) -> None:
    found = found_for(SPARSE, tmp_path, "--placed-anywhere")
    assert (found["failed"], found["taken_for_granted"]) == ([], 0)
