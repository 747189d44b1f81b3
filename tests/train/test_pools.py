"""Runs with pools of experts: documents come from the data, and a loss that leaks says so."""

import json

import pytest
import torch
import yaml

from polyad.data.text.dataset import PreparedData
from polyad.launch.cli import run as polyad
from polyad.parallel.weights import load_model
from polyad.train.report.command import report
from tests.helpers.runs import evaluation, newest, refusal, run_and_listen, write_config

pytestmark = pytest.mark.distributed
SECTION = {"kind": "smoe", "num_experts": 8, "expert_hidden_size": 16, "pool_least": 2}
LEAK = "warning: model.feed_forward.pool: document lets experts depend on later tokens in training"


def config_of(folder, prepared_path, pool, **changes):
    section = SECTION | {"pool": pool, "allow_leak": pool == "document"}
    given = {"model__feed_forward": section, "loss__load_balance": 0.1} | changes
    return write_config(folder / "config.yaml", prepared_path, **given)


@pytest.fixture(scope="module", params=["prefix", "document"])
def finished(request, workers, prepared_path, tmp_path_factory):
    """A run, with what it said."""
    folder = tmp_path_factory.mktemp(request.param)
    config = config_of(folder, prepared_path, request.param)
    _, said = workers(2).run(run_and_listen, config)[0]
    return request.param, folder / "run", said


def test_documents_end_with_the_token_of_the_data(finished, prepared_path):
    _, folder, _ = finished
    end = PreparedData.open(prepared_path).manifest.tokenizer.end_of_text_id
    kept = yaml.safe_load((newest(folder) / "config.yaml").read_text())
    assert kept["model"]["end_of_text_id"] == end
    assert load_model(newest(folder)).config.end_of_text_id == end


def test_a_loss_that_leaks_says_so_and_evaluation_does_not_leak(finished, workers, capfd):
    pool, folder, said = finished
    leaks = pool == "document"
    assert (LEAK in said) == leaks
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [record.get("loss_leaks", False) for record in records] == [leaks] * 6
    assert ("(sees later tokens)" in said) == leaks
    assert polyad(["validate", str(folder / "config.yaml"), "--without-data"]) == 0
    described = capfd.readouterr().out
    assert (LEAK.removeprefix("warning: ") in described) == leaks
    assert f"in training from a pool of 2 to 8 experts per {pool}" in described
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
    assert polyad(["evaluate", str(folder), "--leak", "64"]) == 2
    assert "causal_graph: true, so no token sees later ones" in capfd.readouterr().err


def test_the_report_says_so_too(finished, tmp_path):
    pool, folder, _ = finished
    leaks = pool == "document"
    found = report(folder, output=tmp_path / "report.html")
    assert found.get("loss_leaks", False) == leaks
    text = (tmp_path / "report.html").read_text()
    assert ("last 10 steps; experts depend on later tokens" in text) == leaks
    assert ("the training loss is not a true prediction loss" in text) == leaks


def test_a_run_goes_on_with_the_same_numbers(workers, prepared_path, tmp_path):
    """Sizes are drawn from the seed and the step, as dropout is."""
    losses = []
    for name, stops in (("whole", ["6"]), ("in-two", ["3", "6"])):
        (tmp_path / name).mkdir()
        config = config_of(tmp_path / name, prepared_path, "prefix", schedule__decay_steps=6)
        for steps in stops:
            workers(1).run(run_and_listen, config, f"train.steps={steps}")
        lines = (tmp_path / name / "run" / "metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(line)["loss"] for line in lines])
    assert losses[0] == losses[1]


def test_another_end_of_documents_is_refused(workers, prepared_path, tmp_path):
    config = config_of(tmp_path, prepared_path, "prefix")
    end = PreparedData.open(prepared_path).manifest.tokenizer.end_of_text_id
    text = refusal(workers(2), config, f"model.end_of_text_id={end + 1}")
    assert text.startswith(f"model.end_of_text_id: {end + 1} is not the token that ends documents")
    assert text.endswith(f", {end}; set it to null to use that one")
    text = refusal(workers(2), config, "model.feed_forward.pool=document")
    assert "pool: document makes routing in training depend on the tokens to be" in text
