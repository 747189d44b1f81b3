"""Commands on the GPU give what they give on a CPU, but for rounding."""

import json
from pathlib import Path
from typing import Any

import pytest

from polyad.launch.cli import run as command
from tests.helpers.decoders import commands_on, hub_folder, prepared_for
from tests.helpers.gpu import NEEDS_CUDA
from tests.helpers.runs import evaluation, evaluation_in_parts

pytest.importorskip("transformers")
pytestmark = [*NEEDS_CUDA, pytest.mark.distributed]

FAMILIES = ["olmoe", "deepseek_v3", "gpt_oss"]


@pytest.fixture(params=FAMILIES)
def folder(request, tmp_path) -> Path:
    hub_folder(tmp_path / "hub", request.param)
    return tmp_path / "hub"


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-4), ("bf16", 2e-2)])
def test_perplexity_of_an_opened_model_held_whole_or_read_in_parts(
    on_gpu, workers, folder, tmp_path, precision, tolerance
) -> None:
    asked: dict[str, Any] = {
        "data": str(prepared_for(folder, tmp_path)),
        "overrides": ("model.sequence_length=32", f"train.precision={precision}"),
    }
    (wanted,) = workers(1).run(evaluation, folder, **asked)
    whole = on_gpu(evaluation, folder, **asked)
    parts = on_gpu(evaluation_in_parts, folder, **asked)
    assert whole["loss"] == pytest.approx(wanted["loss"], rel=tolerance)
    assert parts["loss"] == pytest.approx(whole["loss"], rel=1e-5)


def test_measures_of_an_opened_model(folder, tmp_path, capfd) -> None:
    data = str(prepared_for(folder, tmp_path))
    told = str(tmp_path / "told.json")
    compared = ["compare", folder, "--with", folder, "--data", data, "--tokens", "64"]
    for words in (*commands_on(folder, data, 1), compared):
        assert command([*map(str, words), "--json", told]) == 0, capfd.readouterr().err
        assert json.loads(Path(told).read_text())
