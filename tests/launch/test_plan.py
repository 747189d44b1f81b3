"""`polyad plan` as a user calls it."""

import json

import pytest

from polyad.launch.cli import run

GPT2, SMOE = "configs/gpt2/124m.yaml", "configs/gpt2/124m-smoe-16.yaml"
SMALL = ("model.vocab_size=1000", "model.num_layers=2", "model.hidden_size=128")
SMALL += ("model.num_heads=2", "model.sequence_length=64", "train.micro_batch_size=4")
SMALL += ("train.global_batch_size=256",)

pytestmark = pytest.mark.distributed


def planned(*arguments: str, capfd: pytest.CaptureFixture[str]) -> dict:
    assert run(["plan", *arguments, "--json", "-"]) == 0
    return json.loads(capfd.readouterr().out)


def test_a_plan_needs_no_data_and_no_gpu(capfd):
    result = planned(GPT2, "--nodes", "2", *SMALL, capfd=capfd)
    assert result["processes"] == 16
    # 6 FLOPs a weight of 2 blocks of 12 x 128^2 and the head of 1000 x 128, and attention of 64.
    assert result["flops_per_step"] == 256 * 64 * 6 * (2 * 12 * 128**2 + 128_000 + 2 * 2 * 128 * 64)
    layouts = result["layouts"]
    assert [(each["tensor_parallel_size"], each["zero_stage"]) for each in layouts] == [
        (1, 1), (1, 2), (2, 1), (2, 2), (2, 1), (2, 2),
    ]  # fmt: skip
    for each in layouts:
        memory = each["memory_bytes"]
        assert memory["total"] == sum(memory.values()) - memory["total"]
        # Weights in bf16; three numbers of fp32 for each, which are cut over data-parallel ranks.
        assert memory["weights"] == pytest.approx(2 * each["parameters"], rel=0.01)
        share = 12 * each["parameters"] / each["data_parallel_size"]
        assert memory["optimizer"] == pytest.approx(share, rel=0.01)


@pytest.mark.slow
def test_one_layout_in_detail_is_that_of_the_table(capfd):
    two = ("--processes-per-node", "4", *SMALL)
    listed = planned(SMOE, *two, capfd=capfd)["layouts"]
    (row,) = planned(SMOE, *two, "--layout", "tp=2,ep=2,zero=2", capfd=capfd)["layouts"]
    assert row in listed
    keys = ("parallel.tensor_parallel_size=2", "parallel.expert_parallel_size=2")
    same = planned(SMOE, *two, *keys, "--layout", "zero=2", capfd=capfd)["layouts"]
    assert same == [row]


@pytest.mark.slow
def test_a_folder_of_weights_is_planned_as_a_run_that_goes_on_from_it(tmp_path, capfd):
    pytest.importorskip("transformers")
    from tests.helpers.decoders import theirs

    model = theirs("deepseek_v3")
    model.save_pretrained(tmp_path)
    capfd.readouterr()  # what transformers says
    result = planned(str(tmp_path), "--processes-per-node", "4", capfd=capfd)
    assert (result["micro_batch_size"], result["global_batch_size"]) == (1, 4)
    parameters = sum(each.numel() for each in model.parameters())
    whole = result["layouts"][0]
    # A word's row more for each of 2 x 128.
    assert parameters <= whole["parameters"] < parameters + 2 * 128 * 32
