"""Muon: against singular values, torch's own and loops over matrices; resumed and on processes."""

import math

import pytest
import torch
from torch import nn

from polyad.model import block
from polyad.model.build import build_model, matrix_dimensions, read_model_config
from polyad.parallel.parallelize import pad_ranks
from polyad.parallel.zero import RATE_FACTOR, STATE_TENSORS
from polyad.train.loop.muon import matrices, matrix_of, orthogonalized
from polyad.train.loop.optimizer import GroupConfig, OptimizerConfig, build_optimizer
from tests.helpers.everyday import everyday
from tests.helpers.parity import assert_same_course
from tests.helpers.small_decoders import DECODERS, small_decoder
from tests.helpers.training import Case, moe_model, mumoe_model, relative, tensors, train

MUON = Case(optimizer="muon")
ATTENTION, DENSE = "blocks.0.attention.", "blocks.0.feed_forward."


def gaussian(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def in_float64(gradient, steps=5):
    """The definition, of one matrix."""
    x = gradient.double()
    x = x / x.norm()
    for _ in range(steps):
        square = x @ x.T
        x = 3.4445 * x - 4.7750 * square @ x + 2.0315 * square @ square @ x
    return x


def of(named, **config):
    """The optimizer of parameters by name."""
    dimensions = [(name, p, p.dim()) for name, p in named.items()]
    return build_optimizer(OptimizerConfig(kind="muon", **config), dimensions)


def moved(name, weight, gradients, **config):
    """A parameter after steps with these gradients."""
    parameter = nn.Parameter(weight.clone())
    optimizer = of({name: parameter}, **config)
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.detach()


@pytest.mark.parametrize(("rows", "columns"), [(24, 24), (16, 40), (40, 16), (1, 5)])
@pytest.mark.parametrize("scale", [1e-3, 1e4])
def test_singular_values_become_about_1_and_vectors_stay(rows, columns, scale):
    matrix = gaussian(rows, columns)
    U, singular, Vh = torch.linalg.svd(matrix.double(), full_matrices=False)
    assert (singular / singular.norm()).min() > 0.002
    result, nothing = orthogonalized(torch.stack([scale * matrix, torch.zeros_like(matrix)]))
    assert result.dtype == torch.float32
    assert not nothing.any()
    inside = U.T @ result.double() @ Vh.T
    values = inside.diagonal()
    assert 0.68 < values.min() <= values.max() < 1.21
    assert (inside - values.diag()).abs().max() < 1e-5
    torch.testing.assert_close(result.double(), in_float64(matrix), rtol=0, atol=1e-5)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has no Muon")
@pytest.mark.parametrize(
    ("name", "shape"),
    [("up.weight", (12, 30)), ("up.weight", (30, 12)), ("experts.gate", (3, 12, 30)),
     ("experts.down", (3, 30, 12))],
)  # fmt: skip
def test_steps_are_those_of_torch(name, shape):
    weight, gradients = gaussian(*shape), [gaussian(*shape, seed=n) for n in range(1, 4)]
    # Torch takes matrices alone: those of experts one by one.
    theirs = [nn.Parameter(each.clone()) for each in weight.view(-1, *shape[-2:])]
    settings = {"weight_decay": 0.5, "momentum": 0.95, "adjust_lr_fn": "match_rms_adamw"}
    optimizer = torch.optim.Muon(theirs, lr=0.1, **settings)
    for gradient in gradients:
        for parameter, each in zip(theirs, gradient.view(-1, *shape[-2:]), strict=True):
            parameter.grad = each.clone()
        optimizer.step()
    expected = torch.stack([each.detach() for each in theirs]).view(shape)
    ours = moved(DENSE + name, weight, gradients, learning_rate=0.1, weight_decay=0.5)
    assert relative(ours, expected) < 0.02  # theirs multiplies in bf16
    assert relative(ours, weight) > 0.1


def test_steps_are_those_of_the_definition():
    weight, gradients = gaussian(12, 30), [gaussian(12, 30, seed=n) for n in range(1, 4)]
    expected, momentum = weight.double(), torch.zeros(12, 30, dtype=torch.float64)
    for gradient in gradients:
        momentum = 0.95 * momentum + 0.05 * gradient.double()
        ahead = 0.05 * gradient.double() + 0.95 * momentum
        update = 0.2 * math.sqrt(30) * in_float64(ahead)
        expected = expected - 0.1 * (0.5 * expected + update)
    ours = moved(DENSE + "up.weight", weight, gradients, learning_rate=0.1, weight_decay=0.5)
    assert relative(ours.double(), expected) < 1e-5


WHOLE = (lambda x: [x], lambda some: some[0])


@pytest.mark.parametrize(
    ("name", "shape", "cut", "together"),
    [
        ("attention.qkv.weight", (24, 8), lambda x: x.split(8), torch.cat),
        ("feed_forward.experts.up", (3, 8, 16), torch.unbind, torch.stack),
        ("feed_forward.experts.values", (3, 4, 16), torch.unbind, torch.stack),
        (
            "token_feed_forward.up.input_factor", (9, 2, 6),
            lambda x: [x.flatten(1)], lambda some: some[0].view(9, 2, 6),
        ),
        (
            "feed_forward.down.output_factor", (2, 6, 20),
            lambda x: [x.flatten(0, 1)], lambda some: some[0].view(2, 6, 20),
        ),
        ("feed_forward.up.expert_factor_1", (5, 7), *WHOLE),
    ],
)  # fmt: skip
def test_a_parameter_moves_as_its_matrices_would_alone(name, shape, cut, together):
    weight, gradients = gaussian(*shape), [gaussian(*shape, seed=n) for n in range(1, 3)]
    whole = moved(f"blocks.0.{name}", weight, gradients, learning_rate=1.0)
    parts = zip(cut(weight), zip(*map(cut, gradients), strict=True), strict=True)
    alone = [moved(DENSE + "up.weight", *each, learning_rate=1.0) for each in parts]
    torch.testing.assert_close(whole, together(alone), rtol=0, atol=1e-5)


def test_the_rest_moves_as_under_adamw():
    names = ["token_embedding.weight", "blocks.0.feed_forward.gate.weight", "head.weight", "bias"]
    config = {"learning_rate": 0.1, "weight_decay": 0.5, "betas": (0.8, 0.9), "epsilon": 1e-6}
    results = []
    for kind in ("adamw", "muon"):
        named = [(name, nn.Parameter(gaussian(5, 6)), 1 + (name != "bias")) for name in names]
        optimizer = build_optimizer(OptimizerConfig(kind=kind, **config), named)
        for step in range(3):
            for number, (_, parameter, _) in enumerate(named):
                parameter.grad = gaussian(5, 6, seed=10 * step + number)
            optimizer.step()
        results.append([parameter.detach() for _, parameter, _ in named])
    assert all(map(torch.equal, *results))


FEED_FORWARDS = [
    {"kind": "dense"},
    {"kind": "smoe", "num_experts": 4, "graph": "attention"},
    {"kind": "smoe", "num_experts": 4, "score": "cosine"},
    {"kind": "emoe", "num_experts": 4, "top_k": 2, "score": "linear"},
    *(
        {"kind": "mumoe", "num_experts": [4, 2], "rank": 8, "factorization": each}
        for each in ("cp", "tr", "tt", "tucker")
    ),
    {"kind": "mxd", "num_experts": 6, "top_k": 2},
    {"kind": "transcoder", "num_experts": 6, "top_k": 2},
]
SIZES = {"num_layers": 2, "hidden_size": 16, "num_heads": 2}
IMAGES = {"image_size": 8, "patch_size": 4, "num_classes": 3}
TEXT = {"sequence_length": 8, "vocab_size": 11}
MIXED = {"token_feed_forward": FEED_FORWARDS[1] | {"graph": "none"},
         "channel_feed_forward": FEED_FORWARDS[4]}  # fmt: skip
CONFIGS = {
    **{str(each): SIZES | TEXT | {"kind": "gpt2", "feed_forward": each} for each in FEED_FORWARDS},
    "bert": SIZES | TEXT | {"kind": "bert"},
    "vit": SIZES | IMAGES | {"kind": "vit", "feed_forward": FEED_FORWARDS[1]},
    "mixer": IMAGES | MIXED | {"kind": "mixer", "num_layers": 2, "hidden_size": 16},
}
ROUTING = (".router.", ".shared_gate.", "feed_forward.table")
GATED = {"mumoe", "mxd", "transcoder"}
"""Kinds whose gate is a router; that of a dense feed-forward multiplies its inner units."""


@pytest.mark.parametrize("name", [*CONFIGS, *DECODERS])
def test_all_matrices_of_blocks_are_known_but_routers_and_gates(name):
    config = small_decoder(name) if name in DECODERS else read_model_config(CONFIGS[name])
    dimensions = matrix_dimensions(build_model(config))
    of_blocks = {name for name in dimensions if name.startswith("blocks.") and dimensions[name] > 1}
    gated = any(f'"kind":"{kind}"' in config.model_dump_json() for kind in GATED)
    others = (*ROUTING, *(["feed_forward.gate."] if gated else []))
    left = {name for name in of_blocks if any(part in name for part in others)}
    assert matrices(dimensions) == of_blocks - left != set()
    assert {section["kind"] for section in FEED_FORWARDS} == set(block.FEED_FORWARDS)


def test_padded_ranks_change_no_scale():
    name, unpadded = DENSE + "up.output_factor", (24, 24, 0.2 * math.sqrt(24))
    assert matrix_of(name, (3, 8, 24), (3, 7, 24)) == unpadded
    assert matrix_of(name, (3, 16, 24), (3, 9, 24)) == (48, 24, 0.2 * math.sqrt(27))
    model = build_model(mumoe_model(rank=7, factorization="tr", expert_rank=3))
    pad_ranks(model)
    named = [(name, p, p.dim()) for name, p in model.named_parameters()]
    optimizer = build_optimizer(OptimizerConfig(kind="muon"), named)
    factor = model.get_parameter(name)
    (group,) = [g for g in optimizer.param_groups if any(p is factor for p in g["params"])]
    assert tuple(group["matrix"]) == unpadded


def test_groups_have_rates_and_decays_of_their_own():
    groups = (
        GroupConfig(match="blocks.*.attention.*", learning_rate=0.1),
        GroupConfig(match="token_embedding.weight", weight_decay=0.3),
    )
    matrix, other = ("exp_avg",), ("exp_avg", "exp_avg_sq")
    expected = {
        ATTENTION + "projection.weight": (0.2, 0.1, 0.2, matrix),
        DENSE + "up.weight": (2.0, 1.0, 0.2, matrix),
        "token_embedding.weight": (2.0, 1.0, 0.3, other),
    }
    named = {name: nn.Parameter(torch.zeros(4, 4)) for name in expected}
    optimizer = of(named, groups=groups, learning_rate=2.0, weight_decay=0.2)
    keys = ("lr", RATE_FACTOR, "weight_decay", STATE_TENSORS)
    found = {id(p): [g[key] for key in keys] for g in optimizer.param_groups for p in g["params"]}
    assert {name: tuple(found[id(p)]) for name, p in named.items()} == expected


MODELS = {
    "dense": MUON.model,
    "mumoe cp": mumoe_model(),
    "mumoe tr": mumoe_model(factorization="tr", expert_rank=3),
    "smoe": moe_model(),
    "latent": small_decoder("latent"),
    "sinks": small_decoder("sinks"),
}


@pytest.mark.distributed
@everyday(
    ("model", "layout"),
    [
        ("latent", {"expert": 2}), ("mumoe tr", {}), ("smoe", {"stage": 2}), ("dense", {}),
        ("mumoe cp", {}), ("smoe", {}), ("smoe", {"expert": 2}), ("mumoe cp", {"stage": 2}),
        ("sinks", {}), ("sinks", {"expert": 2, "stage": 2}),
    ],
    keep=[("latent", {"expert": 2}), ("smoe", {"stage": 2})],
)  # fmt: skip
def test_two_processes_end_as_one(workers, tmp_path, model, layout):
    case = MUON.but(model=MODELS[model], learning_rate=1e-3, clip=0.5)
    one, two = tmp_path / "one", tmp_path / "two"
    (expected,) = workers(1).run(train, case.but(save_to=str(one)))
    for result in workers(2).run(train, case.but(save_to=str(two), **layout)):
        assert_same_course(result, expected)
    ours, theirs = tensors(two / "step-00000004"), tensors(one / "step-00000004")
    assert ours.keys() == theirs.keys()
    # The true gradient of a key's bias is 0, and AdamW makes a step of what rounding leaves of it.
    weights = [k for k in theirs if k[1] == "master" and not k[0].endswith("qkv.bias")]
    assert max(relative(ours[key], theirs[key]) for key in weights) < 1e-5
