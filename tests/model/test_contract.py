"""What every kind of model owes with every feed-forward, router and option, over the registries: a
new kind inherits these tests. Padding of sequences is `test_padding.py`."""

import pytest
import torch

from polyad.model.attention import KeyValueCache
from polyad.model.block import FEED_FORWARDS
from polyad.model.build import (
    MODELS,
    build_model,
    initial_values,
    num_parameters,
    read_model_config,
)
from polyad.model.mumoe.config import FACTORIZATIONS
from polyad.model.mumoe.gating import ACTIVATIONS
from polyad.model.smoe.graph import GRAPHS
from polyad.model.smoe.router import SCORES
from polyad.train.tasks.random_input import losses_for, random_batch
from tests.helpers.random_model import built
from tests.helpers.routing import assert_causal, logits_and_experts, scatter
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
CASES["mixture"] = PLAIN["mixture"] | {"kind": "mixture"}

BY_GROUPS = {
    "num_experts": 6, "num_groups": 3, "combine": "scores", "routed_scaling_factor": 2.0,
}  # fmt: skip
BY_SIGMOID = BY_GROUPS | {
    "score_function": "sigmoid", "combine": "sum_to_one", "top_groups": 2,
    "group_score": "best_two", "selection_bias": True, "graph": "similarity",
}  # fmt: skip
POOL = {"pool": "prefix", "pool_least": 3, "pool_most": 3}
ROUTERS = {
    **{
        f"{score}, {graph}": {"score": score, "graph": graph}
        for score in SCORES
        for graph in GRAPHS
    },
    "a fixed head": {"graph": "attention", "attention_head": 2},
    "a head's own values": {"graph": "attention", "head_mean": False, "sigma": 2.0},
    "cosine similarity": {"graph": "similarity", "similarity": "cosine", "tau": 0.5},
    "balancing, similarity": {"graph": "similarity", "balancing_rate": 0.1},
    "one expert, attention": {"graph": "attention", "top_k": 1},
    "all experts, similarity": {"graph": "similarity", "top_k": 8},
    "growing k": {"score": "random", "top_k": 1, "final_top_k": 8},
    "every second block": {"graph": "similarity", "placement": 2},
    "groups": BY_GROUPS | {"top_groups": 1},
    "sigmoid": BY_SIGMOID,
    **{f"pools, {graph}": POOL | {"graph": graph, "balancing_rate": 0.1} for graph in GRAPHS},
}
FACTORIZED = {
    f"{name}, {gate}, {gate_input}, {len(levels)} levels": {
        "kind": "mumoe", "factorization": name, "gate": gate, "gate_input": gate_input,
        "num_experts": levels,
    }
    for name in FACTORIZATIONS
    for gate in ACTIVATIONS
    for gate_input in ("residual", "normalized")
    for levels in ([8], [4, 2, 2])
}  # fmt: skip
UNITS = {
    f"units, {', '.join(map(str, options.values()))}": {
        "kind": "emoe",
        "num_experts": 8,
        "top_k": 3,
    }
    | options
    for options in (
        {"score": "linear"},
        {"score": "cosine", "blocks": [1]},
        {"select": "bottom_k"},
        {"select": "not_top_k"},
    )
}
# Without biases, which make all tokens alike, block by block.
OPEN = TEXT | {"kind": "gpt2", "bias": False, "end_of_text_id": 18}
ROUTED = {
    "kind": "smoe", "num_experts": 8, "expert_hidden_size": 16, "sigma": 8.0, "tau": 3.0,
}  # fmt: skip
CASES |= {
    name: OPEN | {"feed_forward": (ROUTED if name in ROUTERS else {}) | options}
    for name, options in (ROUTERS | FACTORIZED | UNITS).items()
}
CASES["a long sequence"] = CASES["linear, similarity"] | {"sequence_length": 300, "num_layers": 1}
CASES |= {f"decoder, {name}": SMALL | section for name, section in DECODERS.items()}
CASES["decoder, window"] = SMALL | {
    "head_size": 10, "sliding_window": 3, "attention_sinks": True, "query_key_norm": "all",
}  # fmt: skip
CASES["decoder, linear"] = SMALL | {
    "head_size": 10, "rotary": {"scaling": {"kind": "linear", "factor": 2.0}},
}  # fmt: skip
# Where no token is predicted.
VIT = PLAIN["vit"] | {"kind": "vit"}
CASES |= {
    "V-MoE": VIT
    | {
        "feed_forward": ROUTED
        | {"router_noise": 1.0, "router_bias": False, "expert_dropout": 0.2, "capacity_factor": 1.5}
    },
    "a factorized head": VIT | {"head": {"kind": "mumoe", "num_experts": [4], "rank": 2}},
    "a norm over the batch": VIT
    | {"feed_forward": SECTIONS["mumoe"] | {"kind": "mumoe", "gate_norm": "batch"}},
}
CAUSAL = {name: case for name, case in CASES.items() if case["kind"] in ("gpt2", "decoder")}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def made(config, dtype=torch.float32):
    """The model away from its initial weights, where gates are not zero."""
    model = built(config)
    return scatter(model, 0.1).to(dtype)


def loss_of(model, config):
    """The mean loss of some samples, with the losses of routers."""
    batch = random_batch(config, range(4))
    if isinstance(batch, tuple) and hasattr(batch, "images_BCHW"):
        dtype = next(model.parameters()).dtype
        batch = batch._replace(images_BCHW=batch.images_BCHW.to(dtype))
    losses, routing = losses_for(config)(model, batch)
    of_routers = [value for stats in routing for value in stats.losses.values()]
    return losses.mean() + 0.01 * sum(of_routers)


def step_of(model, config):
    """The loss, and the gradients, of one step with random numbers that are always the same."""
    torch.manual_seed(11)
    loss = loss_of(model, config)
    loss.backward()
    return {"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters()}


def dropping(case):
    """The configuration with the dropout that the kind of model has."""
    config = read_model_config(case)
    names = {"dropout", "drop_path"} & type(config).model_fields.keys()
    return config.model_copy(update=dict.fromkeys(names, 0.2))


def test_every_kind_is_here():
    assert set(PLAIN) == set(MODELS) - {"transformers"}  # whose blocks are another library's
    assert set(SECTIONS) == set(FEED_FORWARDS)


def attentive(config):
    """The model in float64, away from its initial weights, and tokens that gates tell apart."""
    model = built(config, dtype=torch.float64)
    generator = torch.Generator().manual_seed(5)
    for name, buffer in model.named_buffers():
        if name.endswith(("head_entropy", "balancing_bias")):
            buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
    scatter(model, 0.2)
    with torch.no_grad():  # or gates would see nothing but positions
        model.token_embedding.weight.mul_(10)
    size = (2, config.sequence_length)
    return model, torch.randint(61, size, generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize("case", CAUSAL.values(), ids=CAUSAL)
def test_no_token_sees_a_later_one(case):
    model, ids_BT = attentive(read_model_config(case))
    length = ids_BT.shape[1]
    for last in (0, length // 2 - 1, length - 2):
        assert_causal(model, ids_BT, last)
    assert_causal(model.eval(), ids_BT, length // 2)
    _, chosen = logits_and_experts(model, ids_BT)
    _, others = logits_and_experts(model, (ids_BT + 1) % 61)
    for ours, theirs in zip(chosen, others, strict=True):
        assert not torch.allclose(ours.double(), theirs.double(), atol=1e-3)


@pytest.mark.parametrize(
    ("name", "leak"),
    [
        *((f"gpt2 {kind}", {"capacity_factor": 0.5}) for kind in ("smoe", "emoe")),
        ("gpt2 mumoe", {"gate_norm": "batch"}),
        ("pools, none", {"pool": "document"}),
    ],
)
def test_what_leaks_is_caught(name, leak):
    """These are refused; here they are set behind the back of the checks."""
    config = read_model_config(CASES[name])
    part = config.feed_forward.model_copy(update=leak)
    model, ids_BT = attentive(config.model_copy(update={"feed_forward": part}))
    with pytest.raises(AssertionError):
        assert_causal(model, ids_BT, 7)


@pytest.mark.parametrize("case", CAUSAL.values(), ids=CAUSAL)
def test_logits_in_pieces_are_those_of_the_whole(case):
    config = read_model_config(case)
    model = made(config, torch.float64).eval()
    length = config.sequence_length
    ids_BT = torch.randint(61, (3, length), generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        expected = model(ids_BT).logits
        for pieces in ([length], [5, 1, 1, length - 7], *([[1] * length] if length < 20 else [])):
            cache = KeyValueCache(config.num_layers, config.sequence_length)
            parts = [model(part, cache).logits for part in ids_BT.split(pieces, dim=1)]
            torch.testing.assert_close(torch.cat(parts, 1), expected, atol=1e-10, rtol=0)
    assert cache.length == length
    assert expected.std() > 0.01


@every_case
def test_bf16_is_finite_and_near(case):
    config = read_model_config(case)
    torch.manual_seed(11)
    exact = loss_of(made(config), config)
    rounded = step_of(made(config, torch.bfloat16), config)
    # bf16 draws other noise.
    assert abs(rounded.pop("loss") - exact) < (0.2 if case is CASES["V-MoE"] else 0.05) * exact
    for name, gradient in rounded.items():
        assert gradient is None or gradient.isfinite().all(), name


@every_case
def test_every_weight_gets_a_gradient_and_recomputation_changes_none(case):
    config = dropping(case)
    plain = step_of(made(config), config)
    assert [
        name for name, gradient in plain.items() if gradient is None or not gradient.any()
    ] == []
    again = config.model_copy(update={"recompute": "block"})
    recomputed = step_of(made(again), again)
    torch.testing.assert_close(recomputed, plain)


@every_case
def test_weights_hang_on_the_seed_alone_and_are_counted(case):
    config, models = read_model_config(case), []
    for seed in (0, 0, 1):
        torch.manual_seed(len(models))
        models.append(built(config, seed))
    first, again, other = (model.state_dict() for model in models)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)
    named = list(models[0].named_parameters())
    assert num_parameters(config) == sum(value.numel() for _, value in named)
    values = [name for name, _ in initial_values(build_model(config), seed=0)]
    assert values == [name for name, _ in [*named, *models[0].named_buffers()]]
