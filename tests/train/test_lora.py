"""Runs with LoRA: what they start from, save, go on with, and become."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from parallel.weights import load_model
from tests.helpers.runs import evaluation, newest, run_and_listen, weights_of, write_config
from train.exchange.convert import convert

pytestmark = pytest.mark.distributed

LORA = {
    "rank": 4,
    "alpha": 8.0,
    "targets": ["attention.qkv", "attention.projection", "feed_forward.*"],
}


def lora_config(folder, data, base, **changes):
    """A run of 6 steps that adapts what another run has trained."""
    defaults = {
        "adapt__lora": LORA, "checkpoint__init_from": str(base), "optimizer__learning_rate": 0.02,
        "optimizer__weight_decay": 0.0,
    }  # fmt: skip
    return write_config(folder / "config.yaml", data, **defaults | changes)


@pytest.fixture(scope="session")
def adapted(workers, finished, tmp_path_factory, prepared_path):
    folder = tmp_path_factory.mktemp("adapted")
    config = lora_config(folder, prepared_path, finished)
    results = workers(2).run(run_and_listen, config)
    assert [steps for steps, _ in results] == [6, 6]
    return folder / "run", results[0][1]


def test_flow(adapted, workers, finished):
    folder, said = adapted
    print(said)
    print(
        sorted(weights_of(newest(folder)))[:5],
        sum((p.stat().st_size) for p in newest(folder).iterdir()),
        sum((p.stat().st_size) for p in newest(finished).iterdir()),
    )
    a = workers(1).run(evaluation, folder)[0]
    b = workers(1).run(evaluation, finished)[0]
    print(a["loss"], b["loss"])
    assert a["loss"] < b["loss"]


def test_peft(adapted, tmp_path, exported, finished):
    from peft import PeftModel

    folder, _ = adapted
    convert(folder, tmp_path / "peft", "peft")
    theirs = AutoModelForCausalLM.from_pretrained(exported, local_files_only=True)
    theirs = PeftModel.from_pretrained(theirs, tmp_path / "peft").eval()
    ids = torch.randint(400, (3, 32), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(
            load_model(folder)(ids).logits, theirs(ids).logits, atol=1e-5, rtol=1e-5
        )
        assert (load_model(folder)(ids).logits - load_model(finished)(ids).logits).abs().max() > 0.1
