"""Whole runs on several prepared folders."""

import math

import pytest
import torch

from tests.helpers.runs import evaluation, records, refusal, run, write_config
from tests.helpers.training import tensors

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def other_path(tmp_path_factory, texts, prepared_path):
    from polyad.data.text.prepare import prepare

    folder = tmp_path_factory.mktemp("other")
    last = texts.read_text().splitlines()[-10:]
    (folder / "last.jsonl").write_text("\n".join(last))
    prepare(
        str(folder / "last.jsonl"),
        str(prepared_path),
        folder / "other",
        validation_fraction=0.2,
    )
    return folder / "other"


@pytest.fixture
def config(tmp_path, prepared_path, other_path):
    paths = {str(prepared_path): 3, str(other_path): 1}
    mixture = [{"path": path, "weight": weight} for path, weight in paths.items()]
    return write_config(
        tmp_path / "config.yaml",
        prepared_path,
        data__path=None,
        data__mixture=mixture,
        evaluation={"batch_size": 16},
    )


@pytest.mark.slow
def test_a_mixture_is_validated_by_source_and_resumes_bitwise(
    workers, config, tmp_path, prepared_path, other_path
):
    assert workers(2).run(run, config) == [6, 6]
    lines = records(tmp_path / "run")
    last = lines[-1]
    each = [last["validation_loss/modules"], last["validation_loss/other"]]
    assert last["validation_loss"] == pytest.approx(0.75 * each[0] + 0.25 * each[1], rel=1e-12)
    assert each[0] != each[1]
    perplexities = [last[f"validation_perplexity{name}"] for name in ("", "/modules", "/other")]
    assert perplexities == [math.exp(loss) for loss in (last["validation_loss"], *each)]
    assert "validation_loss/modules" not in lines[0]
    alone = workers(1).run(evaluation, tmp_path / "run", data=str(other_path))[0]
    assert alone["loss"] == pytest.approx(each[1], rel=1e-6)
    text = _evaluation_error(workers, tmp_path / "run")
    assert "--data" in text
    assert str(other_path) in text

    second = f"run.folder={tmp_path / 'second'}"
    assert workers(2).run(run, config, second, "train.steps=3") == [3, 3]
    assert workers(2).run(run, config, second) == [6, 6]
    step = "checkpoints/step-00000006"
    one, two = tensors(tmp_path / "run" / step), tensors(tmp_path / "second" / step)
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)

    # A changed mixture is another run.
    def mixed(*weights):
        paths = zip((prepared_path, other_path), weights, strict=True)
        sources = ", ".join(f"{{path: {path}, weight: {weight}}}" for path, weight in paths)
        return f"data.mixture=[{sources}]"

    text = refusal(workers(1), config, mixed(3, 2), "train.steps=9")
    assert "mixes it by other weights" in text
    single = (f"data.path={prepared_path}", "data.mixture=null")
    assert "holds other data than" in refusal(workers(1), config, *single, "train.steps=9")
    assert workers(2).run(run, config, mixed(6, 2), "train.steps=7") == [7, 7]


def _evaluation_error(workers, path):
    with pytest.raises(Exception, match="data") as caught:
        workers(1).run(evaluation, path)
    return str(caught.value)


def test_bad_weights_and_both_keys_are_one_line_that_names_them(workers, config, prepared_path):
    for weight in ("-1", "0", ".nan"):
        text = refusal(workers(1), config, f"data.mixture=[{{path: a, weight: {weight}}}]")
        assert "data.mixture.0.weight: " in text
        assert f"{weight.strip('.')} is not allowed" in text
    text = refusal(workers(1), config, "data.mixture=[{path: a, weigth: 1}]")
    assert "unknown key data.mixture.0.weigth; the nearest is data.mixture.weight" in text
    text = refusal(workers(1), config, f"data.path={prepared_path}")
    assert "data.mixture: is not allowed together with data.path" in text
    assert "data.path: is missing" in refusal(workers(1), config, "data.mixture=null")
