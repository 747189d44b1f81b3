"""What every kind of model owes with every feed-forward, over both registries: a new kind inherits
these tests. Causality with every option of a router is `test_causality.py`, padding of sequences
`test_padding.py`."""

import pytest
import torch

from polyad.model.block import FEED_FORWARDS
from polyad.model.build import (
    MODELS,
    build_model,
    initial_values,
    materialize,
    num_parameters,
    read_model_config,
)
from polyad.train.tasks.random_input import losses_for, random_batch
from tests.helpers.routing import scatter
from tests.helpers.small_decoders import DECODERS, SMALL

SIZES = {"num_layers": 2, "hidden_size": 32, "num_heads": 4}
TEXT = SIZES | {"sequence_length": 16, "vocab_size": 61}
IMAGES = {"image_size": 8, "patch_size": 4, "num_classes": 5, "num_layers": 2, "hidden_size": 32}
NETWORK = {"convolutions": [3], "hidden_sizes": [10]}
PLAIN = {
    "gpt2": TEXT,
    "decoder": TEXT,
    "bert": TEXT,
    "mixer": IMAGES,
    "vit": IMAGES | {"num_heads": 4},
    "mixture": {
        "image_size": 8, "num_classes": 5, "num_experts": 2, "top_k": 2, "expert": NETWORK,
        "gate_network": NETWORK,
    },
}  # fmt: skip
SECTIONS = {
    "dense": {},
    "smoe": {"num_experts": 4, "expert_hidden_size": 16},
    "mumoe": {"num_experts": [4], "rank": 8},
    "emoe": {"num_experts": 4, "top_k": 2},
    "mxd": {"num_experts": 12, "top_k": 3},
    "transcoder": {"num_experts": 12, "top_k": 3},
}
CASES = {
    f"{kind} {part}": PLAIN[kind] | {"kind": kind, "feed_forward": SECTIONS[part] | {"kind": part}}
    for kind in ("gpt2", "decoder", "bert", "vit")
    for part in FEED_FORWARDS
}
CASES |= {
    f"mixer {part}": PLAIN["mixer"]
    | {"kind": "mixer", "token_feed_forward": section, "channel_feed_forward": section}
    for part in ("dense", "smoe", "mumoe", "emoe")
    for section in [SECTIONS[part] | {"kind": part}]
}
ROUTED = {"kind": "smoe", "num_experts": 6, "top_k": 2, "expert_hidden_size": 12}
BY_GROUPS = {"num_groups": 3, "combine": "softmax", "routed_scaling_factor": 2.0}
BY_SIGMOID = BY_GROUPS | {
    "score_function": "sigmoid", "combine": "normalized", "top_groups": 2,
    "group_score": "best_two", "selection_bias": True, "graph": "similarity",
}  # fmt: skip
CASES |= {
    f"decoder, {name}": SMALL | section
    for name, section in (
        *DECODERS.items(),
        (
            "window",
            {
                "head_size": 10,
                "sliding_window": 3,
                "attention_sinks": True,
                "query_key_norm": "all",
            },
        ),
        ("linear", {"head_size": 10, "rotary": {"scaling": {"kind": "linear", "factor": 2.0}}}),
        ("similarity", {"head_size": 10, "feed_forward": ROUTED | {"graph": "similarity"}}),
        ("sigmoid", {"head_size": 10, "feed_forward": ROUTED | BY_SIGMOID}),
        (
            "groups",
            {
                "head_size": 10,
                "feed_forward": ROUTED | BY_GROUPS | {"top_groups": 1, "placement": [1]},
            },
        ),
    )
}
CASES["mixture"] = PLAIN["mixture"] | {"kind": "mixture"}


@pytest.fixture(params=CASES.values(), ids=CASES)
def config(request):
    return read_model_config(request.param)


def made(config, dtype=torch.float32):
    """The model away from its initial weights, where gates are not zero."""
    model = build_model(config)
    materialize(model, seed=0)
    return scatter(model, 0.1).to(dtype)


def loss_of(model, config):
    """The mean loss of some samples."""
    batch = random_batch(config, range(4))
    if isinstance(batch, tuple) and hasattr(batch, "images_BCHW"):
        dtype = next(model.parameters()).dtype
        batch = batch._replace(images_BCHW=batch.images_BCHW.to(dtype))
    return losses_for(config)(model, batch)[0].mean()


def test_every_kind_is_here():
    assert set(PLAIN) == set(MODELS)
    assert set(SECTIONS) == set(FEED_FORWARDS)


@pytest.mark.parametrize("training", [False, True])
def test_no_token_sees_a_later_one(config, training):
    if config.kind not in ("gpt2", "decoder"):
        pytest.skip("predicts no next token")
    model = made(config, torch.float64).train(training)
    ids_BT = torch.randint(61, (2, 16), generator=torch.Generator().manual_seed(7))
    before = model(ids_BT).logits
    for last in (0, 7, 14):
        changed_BT = ids_BT.clone()
        changed_BT[:, last + 1 :] = (changed_BT[:, last + 1 :] + 1) % 61
        after = model(changed_BT).logits
        seen = slice(None, last + 1)
        torch.testing.assert_close(after[:, seen], before[:, seen], atol=1e-10, rtol=0)
        assert not torch.allclose(after[:, last + 1 :], before[:, last + 1 :], atol=1e-10, rtol=0)


def test_bf16_is_finite_and_near(config):
    exact, model = loss_of(made(config), config), made(config, torch.bfloat16)
    rounded = loss_of(model, config)
    rounded.backward()
    assert abs(rounded - exact) < 0.05 * exact
    for name, parameter in model.named_parameters():
        assert parameter.grad is None or parameter.grad.isfinite().all(), name


def test_every_weight_gets_a_gradient(config):
    model = made(config)
    loss_of(model, config).backward()
    missing = [
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and (parameter.grad is None or not parameter.grad.any())
    ]
    assert missing == []


def test_weights_hang_on_the_seed_alone_and_are_counted(config):
    models = []
    for seed in (0, 0, 1):
        torch.manual_seed(len(models))
        models.append(build_model(config))
        materialize(models[-1], seed=seed)
    first, again, other = (model.state_dict() for model in models)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)
    named = list(models[0].named_parameters())
    assert num_parameters(config) == sum(value.numel() for _, value in named)
    values = [name for name, _ in initial_values(build_model(config), seed=0)]
    assert values == [name for name, _ in [*named, *models[0].named_buffers()]]
