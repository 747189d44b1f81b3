"""Runs with pools of experts: documents come from the data, and evaluation has no pools."""

import json

import pytest
import torch
import yaml

from polyad.data.text.dataset import PreparedData
from polyad.launch.cli import run as polyad
from polyad.parallel.weights import load_model
from tests.helpers.runs import evaluation, newest, refusal, run_and_listen, write_config

pytestmark = pytest.mark.distributed
SECTION = {"kind": "smoe", "num_experts": 8, "expert_hidden_size": 16, "pool_least": 2}


def config_of(folder, prepared_path, **changes):
    section = SECTION | {"pool": "prefix"}
    given = {"model__feed_forward": section, "loss__load_balance": 0.1} | changes
    return write_config(folder / "config.yaml", prepared_path, **given)


@pytest.fixture(scope="module")
def finished(workers, prepared_path, tmp_path_factory):
    """The folder of a run."""
    folder = tmp_path_factory.mktemp("pools")
    workers(2).run(run_and_listen, config_of(folder, prepared_path))
    return folder / "run"


def test_documents_end_with_the_token_of_the_data(finished, prepared_path):
    folder = finished
    end = PreparedData.open(prepared_path).manifest.tokenizer.end_of_text_id
    kept = yaml.safe_load((newest(folder) / "config.yaml").read_text())
    assert kept["model"]["end_of_text_id"] == end
    assert load_model(newest(folder)).config.end_of_text_id == end


@pytest.mark.slow
def test_evaluation_has_no_pools(finished, workers, capfd):
    folder = finished
    assert polyad(["validate", str(folder / "config.yaml"), "--without-data"]) == 0
    described = capfd.readouterr().out
    assert "in training from a pool of 2 to 8 experts per prefix" in described
    # The weights are those of a model without pools, and are scored as such.
    [result] = workers(1).run(evaluation, folder)
    model = load_model(newest(folder))
    section = model.config.feed_forward.model_copy(update={"pool": "none", "pool_least": None})
    free = type(model)(model.config.model_copy(update={"feed_forward": section}))
    free.load_state_dict(model.state_dict())
    ids_BT = torch.randint(100, (2, 32), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(model(ids_BT).logits, free.eval()(ids_BT).logits)
        assert (model.train()(ids_BT).logits - free(ids_BT).logits).abs().max() > 1e-4
    assert result["loss"] > 0


def test_a_run_goes_on_with_the_same_numbers(workers, prepared_path, tmp_path):
    """Sizes are drawn from the seed and the step, as dropout is."""
    losses = []
    for name, stops in (("whole", ["6"]), ("in-two", ["3", "6"])):
        (tmp_path / name).mkdir()
        config = config_of(tmp_path / name, prepared_path, schedule__decay_steps=6)
        for steps in stops:
            workers(1).run(run_and_listen, config, f"train.steps={steps}")
        lines = (tmp_path / name / "run" / "metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(line)["loss"] for line in lines])
    assert losses[0] == losses[1]


def test_another_end_of_documents_is_refused(workers, prepared_path, tmp_path):
    config = config_of(tmp_path, prepared_path)
    end = PreparedData.open(prepared_path).manifest.tokenizer.end_of_text_id
    text = refusal(workers(2), config, f"model.end_of_text_id={end + 1}")
    assert text.startswith(f"model.end_of_text_id: {end + 1} is not the token that ends documents")
    assert text.endswith(f", {end}; set it to null to use that one")
    text = refusal(workers(2), config, "model.feed_forward.pool=document")
    assert "pool: document makes routing in training depend on the tokens to be" in text
