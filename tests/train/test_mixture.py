"""Whole runs on several prepared folders."""

import math

import pytest

from polyad.data.text.prepare import prepare
from polyad.data.text.tokenizers.files import load_tokenizer
from polyad.parallel.checkpoint.load import Checkpoint
from polyad.train.tasks.vocabulary import need_tokenizer
from tests.helpers.parity import assert_equal_state
from tests.helpers.runs import evaluation, newest, records, refusal, run, write_config

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def other_path(tmp_path_factory, texts, prepared_path):
    folder = tmp_path_factory.mktemp("other")
    (folder / "last.jsonl").write_text("\n".join(texts.read_text().splitlines()[-10:]))
    source, tokenizer = str(folder / "last.jsonl"), str(prepared_path)
    prepare(source, tokenizer, folder / "other", validation_fraction=0.2)
    return folder / "other"


@pytest.fixture
def config(tmp_path, prepared_path, other_path):
    weights = {prepared_path: 3, other_path: 1}
    mixture = [{"path": str(path), "weight": weight} for path, weight in weights.items()]
    changes = {"data__path": None, "data__mixture": mixture, "evaluation": {"batch_size": 16}}
    return write_config(tmp_path / "config.yaml", prepared_path, **changes)


@pytest.mark.slow
def test_a_mixture_is_validated_by_source_and_resumes_bitwise(
    workers, config, tmp_path, prepared_path, other_path, refused
):
    assert workers(2).run(run, config) == [6, 6]
    lines = records(tmp_path / "run")
    one, two, both = (lines[-1][f"validation_loss{n}"] for n in ("/modules", "/other", ""))
    assert both == pytest.approx(0.75 * one + 0.25 * two, rel=1e-12)
    assert one != two
    kept = Checkpoint(newest(tmp_path / "run"))
    assert need_tokenizer(kept, None).fingerprint == load_tokenizer(other_path).fingerprint
    for name, loss in (("/modules", one), ("/other", two), ("", both)):
        assert lines[-1][f"validation_perplexity{name}"] == math.exp(loss)
    assert "validation_loss/modules" not in lines[0]
    alone = workers(1).run(evaluation, tmp_path / "run", data=str(other_path))[0]
    assert alone["loss"] == pytest.approx(two, rel=1e-6)
    line = refused("evaluate", tmp_path / "run")
    assert ("--data" in line, str(other_path) in line) == (True, True)

    second = f"run.folder={tmp_path / 'second'}"
    for steps in (3, 6):
        assert workers(2).run(run, config, second, f"train.steps={steps}") == [steps] * 2
    assert_equal_state(*(newest(tmp_path / name) for name in ("run", "second")))

    # A changed mixture is another run.
    def mixed(*weights):
        paths = zip((prepared_path, other_path), weights, strict=True)
        sources = ", ".join(f"{{path: {path}, weight: {weight}}}" for path, weight in paths)
        return f"data.mixture=[{sources}]"

    single = (f"data.path={prepared_path}", "data.mixture=null")
    for change, said in (((mixed(3, 2),), "mixes it by other weights"), (single, "other data tha")):
        assert said in refusal(workers(1), config, *change, "train.steps=9")
    assert workers(2).run(run, config, mixed(6, 2), "train.steps=7") == [7, 7]


def test_bad_weights_and_both_keys_are_one_line_that_names_them(workers, config, prepared_path):
    for change, said in (
        *((f"data.mixture=[{{path: a, weight: {each}}}]", "data.mixture.0.weight: ")
          for each in ("-1", "0", ".nan")),
        ("data.mixture=[{path: a, weigth: 1}]", "unknown key data.mixture.0.weigth; the nearest"),
        (f"data.path={prepared_path}", "data.mixture: is not allowed together with data.path"),
        ("data.mixture=null", "data.path: is missing"),
    ):  # fmt: skip
        assert said in refusal(workers(1), config, change)
