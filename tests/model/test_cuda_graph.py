"""Blocks as CUDA graphs: which passes are taken, and what becomes of statistics. That replaying
computes the same is for `tests/gpu/test_run.py`; here blocks stand in the place of their graphs."""

import pytest
import torch

from polyad.model.cuda_graph import GraphedBlocks
from polyad.model.output import AUXILIARY_LOSSES, ask_for_statistics
from tests.helpers.random_model import built
from tests.helpers.training import MODEL, mumoe_model

MODELS = {"dense": MODEL, "cp": mumoe_model(), "ring": mumoe_model(factorization="tr")}


def keep(recorded, model):
    """Has blocks of a model run as they are, once more before: a recording draws random numbers,
    too."""
    own = {id(parameter) for parameter in model.parameters()}

    def record(functions, inputs, allow_unused_input):
        assert allow_unused_input
        for function, given in zip(functions, inputs, strict=True):
            outputs = function(*given)
            # Of the weights given, and none of the model's, which may have hooks.
            assert not {id(each) for each in given} & own
            gradients = torch.autograd.grad(outputs[0].square().sum(), given)
            assert all(gradient.any() for gradient in gradients)
        recorded.append(inputs[0][0].shape)
        return functions

    return record


def made(name, recorded=None):
    model = built(MODELS[name].model_copy(update={"dropout": 0.1}))
    ask_for_statistics(model, losses=AUXILIARY_LOSSES, samples=False, record_is_due=False)
    if recorded is not None:
        model.blocks.graphs = GraphedBlocks(model.blocks.children(), keep(recorded, model))
    return model


def step(model, size=2):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 61, (size, 17), generator=generator)
    torch.manual_seed(2)  # dropout
    output = model(ids, target_ids_BT=ids)
    output.logits.mean().backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    return output, gradients


@pytest.mark.parametrize("name", MODELS)
def test_losses_statistics_gradients_and_random_numbers_are_those_of_blocks(name):
    (plain, expected), recorded = step(made(name)), []
    model = made(name, recorded)
    for _ in range(2):
        output, gradients = step(model)
        assert torch.equal(output.logits, plain.logits)
        assert all(torch.equal(gradients[key], value) for key, value in expected.items())
        assert [stats.name for stats in output.routing] == [stats.name for stats in plain.routing]
        for ours, theirs in zip(output.routing, plain.routing, strict=True):
            for value, other in zip(ours, theirs, strict=True):
                assert torch.equal(value, other) if torch.is_tensor(value) else value == other
    assert recorded == [(2, 17, 36)]


def test_records_evaluation_and_other_shapes_run_without_graphs():
    recorded = []
    model = made("cp", recorded)
    model.eval()
    step(model)
    with torch.no_grad():
        model.train()
        model(torch.zeros(2, 17, dtype=torch.int64))
    ask_for_statistics(model, losses=AUXILIARY_LOSSES, samples=False, record_is_due=True)
    due = step(model)[0].routing[0]
    assert due.measures.get("entropy") is not None
    assert recorded == []
    ask_for_statistics(model, losses=AUXILIARY_LOSSES, samples=False, record_is_due=False)
    assert step(model)[0].routing[0].measures.get("entropy") is None
    step(model, size=3)
    assert recorded == [(2, 17, 36)]
