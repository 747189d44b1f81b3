"""Whole models of which every block routes, and one step of them to be compared."""

import pytest
import torch
from torch import _dynamo
from torch.nn.functional import cross_entropy

from polyad.model.build import compile_model
from tests.helpers.routing import scatter

GRAPH_OPTIONS = {
    "none": {},
    "similarity": {"graph": "similarity"},
    "cosine similarity": {"graph": "similarity", "similarity": "cosine", "tau": 0.2},
    "attention": {"graph": "attention"},
    "one head's own values": {"graph": "attention", "attention_head": 2, "head_mean": False},
}
V_MOE = {
    "router_noise": 1.0,
    "router_bias": False,
    "expert_dropout": 0.2,
}
every_graph = pytest.mark.parametrize("options", GRAPH_OPTIONS.values(), ids=GRAPH_OPTIONS)


def step(model, ids):
    """Logits, statistics and all gradients of one step, with the router's losses."""
    torch.manual_seed(11)  # dropout
    output = model(ids)
    loss = cross_entropy(output.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    for stats in output.routing:
        for name, value in stats.losses.items():
            loss = loss + (0.001 if name == "z_loss" else 0.01) * value
    loss.backward()
    numbers = {"logits": output.logits.detach()}
    for stats in output.routing:
        values = stats.tensors().items()
        numbers |= {f"{stats.name}.{key}": value.detach() for key, value in values}
    return numbers | {name: p.grad for name, p in model.named_parameters()}


def assert_same_step(ours, theirs, tolerance):
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(
            value, theirs[name], atol=tolerance, rtol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


def assert_compiles(plain, other, ids, tolerance=2e-5, **how):
    """Asserts that a model computes what another does when it is compiled, and from few programs.

    Args:
        plain: the model that is not compiled.
        other: an equal one, which will be; it may recompute.
        ids: tokens.
        tolerance: absolute and relative, of logits, statistics and gradients.
        how: arguments of `compile_model`.
    """
    expected, names = step(plain, ids), list(other.state_dict())
    _dynamo.reset()
    _dynamo.utils.counters.clear()
    compile_model(other, **how)
    assert_same_step(step(other, ids), expected, tolerance)
    assert list(other.state_dict()) == names
    # What is before the three blocks, one for all of them, and what is after them.
    assert _dynamo.utils.counters["stats"]["unique_graphs"] == 3
    assert not _dynamo.utils.counters["graph_break"]


def routed(small_model, options, dtype=torch.float32, **overrides):
    """A model of which every block routes, with scattered weights."""
    feed_forward = {"kind": "smoe", "num_experts": 6, "expert_hidden_size": 24} | options
    return scatter(small_model(dtype=dtype, feed_forward=feed_forward, **overrides), 0.1)
