"""What `polyad inspect` says of folders and checkpoints."""

import json

import pytest
from safetensors.torch import load_file, save_file

from polyad.launch.cli import run
from polyad.model.families.keys import WeightsError
from polyad.train.describe import inspect, inspection_table
from polyad.train.exchange.convert import convert
from tests.helpers.decoders import theirs

pytest.importorskip("transformers")


@pytest.mark.parametrize("case", ["qwen3_moe", "deepseek_v3", "gpt_oss", "llama"])
def test_every_parameter_of_transformers_is_counted(case, tmp_path, capfd):
    model = theirs(case)
    model.save_pretrained(tmp_path / "a")
    capfd.readouterr()  # what transformers says
    assert run(["inspect", str(tmp_path / "a"), "--json", "-"]) == 0
    result = json.loads(capfd.readouterr().out)
    assert result["parameters"] == sum(each.numel() for each in model.parameters())
    assert result["not_read"] == []
    stored = {name for tensor in result["tensors"] for name in tensor["stored"]}
    assert all(tensor["stored"] for tensor in result["tensors"])
    assert len(stored) >= len(result["tensors"]) - 2 * len(result["routed_blocks"])
    if case == "llama":
        assert (result["num_experts"], result["active_parameters"]) == (0, result["parameters"])
        return
    routed = sum(each.numel() for name, each in model.named_parameters() if ".experts." in name)
    share = result["top_k"] / result["num_experts"]
    assert result["active_parameters"] == result["parameters"] - routed + round(routed * share)
    text = inspection_table(result)
    assert f"{result['num_experts']} in each of {len(result['routed_blocks'])} blocks" in text
    assert "blocks.1.feed_forward.experts.down" in {each["name"] for each in result["tensors"]}
    convert(tmp_path / "a", tmp_path / "b", to="polyad")
    again = inspect(tmp_path / "b")
    assert (again["family"], again["parameters"]) == ("Polyad", result["parameters"])
    assert again["model"] == result["model"]


def test_a_tensor_that_is_not_known_refuses_the_folder(tmp_path):
    theirs("mixtral").save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.0.depth.weight"] = tensors["model.norm.weight"].clone()
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(WeightsError, match=r"unknown tensor layers\.0\.depth\.weight"):
        inspect(tmp_path)
