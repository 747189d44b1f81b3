"""Llama-style decoders of transformers and their mixtures, opened here."""

import json

import pytest
import torch
from torch.nn.functional import cross_entropy

from polyad.model.families.keys import HuggingFaceError
from polyad.parallel.families import FamilyWeights
from tests.helpers.decoders import CASES, ROUTED, InDouble, opened, theirs, tokens

pytest.importorskip("transformers")
every_case = pytest.mark.parametrize("case", CASES)


class Chosen:
    """The experts that a model of transformers chose, layer by layer."""

    def __init__(self, model):
        self.ids = []
        for module in model.modules():
            if type(module).__name__.lower().endswith("topkrouter"):
                module.register_forward_hook(lambda m, i, o: self.ids.append(o[2]))


class Selected:
    """The experts that a model of ours chose, layer by layer."""

    def __init__(self, model):
        self.ids = []
        for block in model.blocks:
            if (router := getattr(block.feed_forward, "router", None)) is not None:
                router.register_forward_hook(
                    lambda m, i, o: self.ids.append(o.selected.expert_ids_NK)
                )


def assert_same_choices(ours, of_theirs):
    assert len(ours.ids) == len(of_theirs.ids)
    for a, b in zip(ours.ids, of_theirs.ids, strict=True):
        assert torch.equal(a.sort(-1).values, b.view_as(a).sort(-1).values)


@every_case
@pytest.mark.parametrize("fused", [False, True], ids=["per expert", "fused"])
def test_logits_are_those_of_transformers(case, fused, tmp_path):
    model = theirs(case)
    model.save_pretrained(tmp_path, save_original_format=not fused)
    ours = opened(tmp_path)
    chosen, selected = Chosen(model), Selected(ours)
    with torch.no_grad():
        wanted, found = model(tokens()).logits, ours(tokens()).logits
    assert (wanted - found).abs().max() < 1e-5
    assert wanted.abs().max() > 0.5
    assert (case in ROUTED) == bool(selected.ids)
    assert_same_choices(selected, chosen)


@every_case
def test_gradients_in_float64_are_those_of_transformers(case, tmp_path):
    theirs(case).save_pretrained(tmp_path / "weights")
    model = theirs(case, torch.float64)
    ours, ids = opened(tmp_path / "weights", torch.float64), tokens()
    with InDouble():
        wanted = model(ids, use_cache=False).logits
    found = ours(ids).logits
    assert (wanted - found).abs().max() < 1e-12
    for logits in (wanted, found):
        cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    with torch.no_grad():  # theirs go through the same files as the weights
        for parameter in model.parameters():
            grad = parameter.grad
            parameter.copy_(torch.zeros_like(parameter) if grad is None else grad)
    model.float().save_pretrained(tmp_path / "gradients")
    for (name, parameter), gradient in zip(
        ours.named_parameters(),
        opened(tmp_path / "gradients", torch.float64).parameters(),
        strict=True,
    ):
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        assert (grad - gradient).abs().max() < 1e-7 * max(1, gradient.abs().max()), name
        assert gradient.abs().max() > 0 or "bias" in name, name


@every_case
def test_bf16_chooses_the_same_experts(case, tmp_path):
    model = theirs(case, torch.bfloat16)
    model.save_pretrained(tmp_path)
    ours = opened(tmp_path, torch.bfloat16)
    with torch.no_grad():
        wanted, found = model(tokens()).logits.float(), ours(tokens()).logits.float()
    exact = theirs(case, torch.float64)
    with torch.no_grad(), InDouble():
        true = exact(tokens(), use_cache=False).logits
    error = (wanted - true).abs().mean()
    assert (found - true).abs().mean() < 1.1 * error


def test_a_key_that_is_not_known_refuses_the_folder(tmp_path):
    theirs("mixtral").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["depth_gate"] = 0.5
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(HuggingFaceError, match=r"config\.json: depth_gate: 0\.5 is not known here"):
        FamilyWeights(tmp_path)
