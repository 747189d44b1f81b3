"""Muon: against singular values, torch's own and loops over matrices; resumed and on processes."""

import math
import re
from typing import NamedTuple

import pytest
import torch
from torch import nn

from polyad.data.text.prepare import prepare
from polyad.model import block
from polyad.model.bert import BertConfig
from polyad.model.build import build_model, matrix_dimensions
from polyad.model.decoder_config import GPT2Config
from polyad.model.mixer import MixerConfig
from polyad.model.vit import ViTConfig
from polyad.parallel.checkpoint.load import Checkpoint
from polyad.parallel.fragments import FlatPart
from polyad.parallel.parallelize import pad_ranks
from polyad.parallel.zero import RATE_FACTOR, STATE_TENSORS
from polyad.train.config.rules import validate
from polyad.train.config.run import parse_config
from polyad.train.errors import ConfigError
from polyad.train.loop.muon import OF_MATRICES, OF_OTHERS, matrices, matrix_of, orthogonalized
from polyad.train.loop.optimizer import (
    GroupConfig,
    OptimizerConfig,
    build_optimizer,
)
from tests.helpers.runs import run, run_and_listen, write_config
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
    result = orthogonalized(scale * matrix.unsqueeze(0))[0]
    assert result.dtype == torch.float32
    inside = U.T @ result.double() @ Vh.T
    values = inside.diagonal()
    assert values.min() > 0.68
    assert values.max() < 1.21
    assert (inside - values.diag()).abs().max() < 1e-5
    torch.testing.assert_close(result.double(), in_float64(matrix), rtol=0, atol=1e-5)


def test_nothing_becomes_of_zero():
    assert torch.equal(orthogonalized(torch.zeros(2, 3, 4)), torch.zeros(2, 3, 4))


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has no Muon")
@pytest.mark.parametrize(
    ("name", "shape"),
    [("up.weight", (12, 30)), ("up.weight", (30, 12)), ("experts.gate", (3, 12, 30)),
     ("experts.down", (3, 30, 12))],
)  # fmt: skip
def test_steps_are_those_of_torch(name, shape):
    weight, gradients = gaussian(*shape), [gaussian(*shape, seed=n) for n in range(1, 4)]
    settings = {"weight_decay": 0.5, "momentum": 0.95, "adjust_lr_fn": "match_rms_adamw"}
    whole = nn.Parameter(weight.clone())
    # Torch takes matrices alone: those of experts one by one.
    theirs = [nn.Parameter(each.clone()) for each in whole.detach().view(-1, *shape[-2:])]
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


def apart(weight, gradients, cut, together):
    """As `moved`, of dense matrices that are stepped one by one."""
    some = zip(cut(weight), zip(*map(cut, gradients), strict=True), strict=True)
    return together([moved(DENSE + "up.weight", *each, learning_rate=1.0) for each in some])


@pytest.mark.parametrize(
    ("name", "shape", "cut", "together"),
    [
        ("attention.qkv.weight", (24, 8), lambda x: x.split(8), torch.cat),
        ("feed_forward.experts.up", (3, 8, 16), lambda x: x.unbind(), torch.stack),
        ("feed_forward.experts.values", (3, 4, 16), lambda x: x.unbind(), torch.stack),
        (
            "token_feed_forward.up.input_factor", (9, 2, 6),
            lambda x: [x.flatten(1)], lambda some: some[0].view(9, 2, 6),
        ),
        (
            "feed_forward.down.output_factor", (2, 6, 20),
            lambda x: [x.flatten(0, 1)], lambda some: some[0].view(2, 6, 20),
        ),
        ("feed_forward.up.expert_factor_1", (5, 7), lambda x: [x], lambda some: some[0]),
    ],
)  # fmt: skip
def test_a_parameter_moves_as_its_matrices_would_alone(name, shape, cut, together):
    weight, gradients = gaussian(*shape), [gaussian(*shape, seed=n) for n in range(1, 3)]
    whole = moved(f"blocks.0.{name}", weight, gradients, learning_rate=1.0)
    expected = apart(weight, gradients, cut, together)
    torch.testing.assert_close(whole, expected, rtol=0, atol=1e-5)


def test_the_rest_moves_as_under_adamw():
    names = ["token_embedding.weight", "blocks.0.feed_forward.gate.weight", "head.weight", "bias"]
    config = {"learning_rate": 0.1, "weight_decay": 0.5, "betas": (0.8, 0.9), "epsilon": 1e-6}
    results = []
    for kind in ("adamw", "muon"):
        named = {name: nn.Parameter(gaussian(5, 6)) for name in names}
        dimensions = [(name, p, 1 if name == "bias" else 2) for name, p in named.items()]
        optimizer = build_optimizer(OptimizerConfig(kind=kind, **config), dimensions)
        for step in range(3):
            for number, parameter in enumerate(named.values()):
                parameter.grad = gaussian(5, 6, seed=10 * step + number)
            optimizer.step()
        results.append([p.detach() for p in named.values()])
    assert all(map(torch.equal, *results))


SMALL = {"num_layers": 2, "hidden_size": 16, "num_heads": 2}
TEXT = {"sequence_length": 8, "vocab_size": 11}
IMAGES = {"image_size": 8, "patch_size": 4, "num_classes": 3}
FEED_FORWARDS = [
    {"kind": "dense"},
    *({"kind": "smoe", "num_experts": 4, "graph": graph} for graph in ("none", "attention")),
    {"kind": "smoe", "num_experts": 4, "score": "cosine"},
    {"kind": "emoe", "num_experts": 4, "top_k": 2, "score": "linear"},
    *(
        {"kind": "mumoe", "num_experts": [4, 2], "rank": 8, "factorization": each}
        for each in ("cp", "tr", "tt", "tucker")
    ),
    {"kind": "mxd", "num_experts": 6, "top_k": 2},
    {"kind": "transcoder", "num_experts": 6, "top_k": 2},
]
LEFT = {
    "router.score.weight", "router.score.projection", "router.score.embedding", "gate.weight",
    "router.score.query", "router.score.key_projection", "router.score.key", "table",
    "shared_gate.weight",
}  # fmt: skip
"""The matrices of feed-forwards that AdamW updates in a run with Muon."""


def test_the_table_has_every_kind_of_feed_forward():
    assert {section["kind"] for section in FEED_FORWARDS} == set(block.FEED_FORWARDS)


@pytest.mark.parametrize(
    ("kind", "feed_forward"),
    [
        (kind, section)
        for kind in (GPT2Config, BertConfig, ViTConfig, MixerConfig)
        for section in FEED_FORWARDS
        if not (kind is MixerConfig and section.get("graph") == "attention")  # it has none
    ],
    ids=lambda case: case.__name__ if isinstance(case, type) else "-".join(
        str(case[key]) for key in case if key != "num_experts"
    ),
)  # fmt: skip
def test_all_matrices_of_blocks_are_known_but_routers_and_gates(kind, feed_forward):
    section = dict(SMALL, **(TEXT if kind in (GPT2Config, BertConfig) else IMAGES))
    if kind is MixerConfig:
        del section["num_heads"]
        section |= {"token_feed_forward": feed_forward, "channel_feed_forward": feed_forward}
    else:
        section["feed_forward"] = feed_forward
    model = build_model(kind.model_validate(section))
    dimensions = matrix_dimensions(model)
    of_blocks = {name for name in dimensions if name.startswith("blocks.") and dimensions[name] > 1}
    left = {name for name in of_blocks if name.split("feed_forward.")[-1] in LEFT}
    if feed_forward["kind"] == "dense":
        left = set()  # its gate multiplies its inner units
    assert matrices(dimensions) == of_blocks - left
    assert of_blocks - left or (kind, feed_forward["kind"]) == (MixerConfig, "transcoder")


@pytest.mark.parametrize("name", [*DECODERS])
def test_all_matrices_of_decoders_are_known_but_routers(name):
    config = small_decoder(name)
    dimensions = matrix_dimensions(build_model(config))
    of_blocks = {name for name in dimensions if name.startswith("blocks.") and dimensions[name] > 1}
    routing = {name for name in of_blocks if ".router." in name or ".shared_gate." in name}
    if config.feed_forward.kind == "mumoe":
        routing |= {name for name in of_blocks if ".feed_forward.gate." in name}
    assert matrices(dimensions) == of_blocks - routing


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 7])
def test_parts_give_whole_matrices(ranks):
    # 3 + 2 matrices of 4 numbers; parts of 20 / ranks, the last ones with padding.
    numbers = torch.arange(1.0, 21.0)
    length = -(-20 // ranks)
    padded = torch.cat([numbers, torch.zeros(ranks * length - 20)])
    parts, sent = padded.split(length), []

    class Collects(NamedTuple):
        rank: int
        size: int = ranks

        def total(self, cut_NS):
            sent.append(cut_NS)
            return cut_NS

    class Answers(Collects):
        def total(self, cut_NS):
            return torch.stack(sent).sum(0)

    for kind in (Collects, Answers):
        found = [FlatPart(kind(n), 20) for n in range(ranks)]
        edges = [part.edges(flat, 4) for part, flat in zip(found, parts, strict=True)]
    assert len(sent) in (0, ranks)  # all take part, or none
    matrices_54 = numbers.view(5, 4)
    for part, flat, some in zip(found, parts, edges, strict=True):
        seen = torch.zeros(length)
        inner_N4 = part.inner(flat, 4)
        assert all(any(torch.equal(each, row) for row in matrices_54) for each in inner_N4)
        inner_N4 += 100  # a view
        for whole_4, here, there in some:
            assert any(torch.equal(whole_4, row) for row in matrices_54)
            assert torch.equal(flat[here], whole_4[there])
            seen[here] += 1
        real = flat.new_tensor([n < 20 for n in range(part.group.rank * length, 99)][:length])
        assert torch.equal(seen + (flat > 100), real)


def test_padded_ranks_change_no_scale():
    model = build_model(mumoe_model(rank=7, factorization="tr", expert_rank=3))
    pad_ranks(model)
    name = DENSE + "up.output_factor"
    assert matrix_of(name, (3, 8, 24), (3, 7, 24)) == (24, 24, 0.2 * math.sqrt(24))
    assert matrix_of(name, (3, 16, 24), (3, 9, 24)) == (48, 24, 0.2 * math.sqrt(27))
    named = [(name, p, p.dim()) for name, p in model.named_parameters()]
    optimizer = build_optimizer(OptimizerConfig(kind="muon"), named)
    factor = model.get_parameter(name)
    (group,) = [g for g in optimizer.param_groups if any(p is factor for p in g["params"])]
    assert tuple(group["matrix"]) == (24, 24, 0.2 * math.sqrt(24))


def test_groups_have_rates_and_decays_of_their_own():
    names = [ATTENTION + "projection.weight", DENSE + "up.weight", "token_embedding.weight"]
    groups = (
        GroupConfig(match="blocks.*.attention.*", learning_rate=0.1),
        GroupConfig(match="token_embedding.weight", weight_decay=0.3),
    )
    named = {name: nn.Parameter(torch.zeros(4, 4)) for name in names}
    optimizer = of(named, groups=groups, learning_rate=2.0, weight_decay=0.2)
    found = {
        name: (group["lr"], group[RATE_FACTOR], group["weight_decay"], group[STATE_TENSORS])
        for name, parameter in named.items()
        for group in optimizer.param_groups
        if any(parameter is p for p in group["params"])
    }
    assert found == {
        names[0]: (0.2, 0.1, 0.2, ("exp_avg",)),
        names[1]: (2.0, 1.0, 0.2, ("exp_avg",)),
        names[2]: (2.0, 1.0, 0.3, ("exp_avg", "exp_avg_sq")),
    }


CONFIG = """
run: {folder: runs/x}
model: {kind: gpt2, num_layers: 2, hidden_size: 32, num_heads: 4, sequence_length: 16}
data: {path: data/x}
train: {steps: 10, global_batch_size: 8, micro_batch_size: 2}
optimizer: {kind: muon}
parallel: {zero_stage: 1}
"""


def parse(*overrides):
    return parse_config(CONFIG, overrides, origin="run.yaml")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (
            "parallel.zero_stage=3",
            "parallel.zero_stage: 3 is not allowed with optimizer.kind: muon",
        ),
        (
            "parallel.tensor_parallel_size=2",
            "parallel.tensor_parallel_size: 2 is not allowed with optimizer.kind: muon",
        ),
        ("adapt.lora={rank: 2}", "adapt.lora: {...} is not allowed with optimizer.kind: muon"),
    ],
)
def test_what_cuts_or_freezes_matrices_is_refused(override, expected):
    validate(parse(), 2)
    with pytest.raises(ConfigError, match="^" + re.escape(expected)) as caught:
        validate(parse(override, "checkpoint.init_from=runs/y"), 2)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_status == 2


MODELS = {
    "dense": MUON.model,
    "mumoe cp": mumoe_model(),
    "mumoe tr": mumoe_model(factorization="tr", expert_rank=3),
    "smoe": moe_model(),
    "latent": small_decoder("latent"),
    "sinks": small_decoder("sinks"),
}
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("dense", "mumoe cp", "mumoe tr")]


@pytest.mark.distributed
@pytest.mark.parametrize("model", ["smoe", *SLOW])
@pytest.mark.slow
def test_a_resumed_run_ends_with_the_same_bits(workers, tmp_path, model):
    case = MUON.but(model=MODELS[model], average=0.9, last_step=12)
    once, first, second = (str(tmp_path / each) for each in ("once", "first", "second"))
    whole = workers(1).run(train, case.but(save_to=once))[0]
    begun = workers(1).run(train, case.but(save_to=first, last_step=6))[0]
    resume = f"{first}/step-00000006"
    rest = workers(1).run(train, case.but(save_to=second, resume=resume, first_step=6))[0]
    assert begun["losses"] + rest["losses"] == whole["losses"]
    ours, expected = tensors(f"{second}/step-00000012"), tensors(f"{once}/step-00000012")
    assert ours.keys() == expected.keys()
    assert all(torch.equal(ours[key], expected[key]) for key in expected)
    names = {name for name, field in ours if field == "master"}
    for name in names:
        kept = {field for other, field in ours if other == name}
        own = OF_MATRICES if name in matrices(names) else OF_OTHERS
        assert kept == {"master", "ema", *own}


@pytest.mark.slow
@pytest.mark.distributed
def test_a_run_goes_on_with_what_its_checkpoint_has(workers, texts, tmp_path):
    prepare(str(texts), "train:300", tmp_path / "data", validation_fraction=0.2)
    experts = {"kind": "mumoe", "num_experts": [5], "rank": 7}
    config = write_config(
        tmp_path / "config.yaml", tmp_path / "data", model__feed_forward=experts,
        optimizer__kind="muon", parallel__zero_stage=1, evaluation__max_windows=2,
    )  # fmt: skip
    assert workers(1).run(run, config, "train.steps=3") == [3]
    step, said = workers(1).run(run_and_listen, config)[0]
    assert (step, "step-00000003" in said) == (6, True)
    saved = tmp_path / "run" / "checkpoints" / "step-00000006"
    kept = Checkpoint(saved).tensors
    assert set(kept[ATTENTION + "qkv.weight"]) == {"master", "exp_avg"}
    assert set(kept[ATTENTION + "qkv.bias"]) == {"master", "exp_avg", "exp_avg_sq"}


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("latent", {"expert": 2, "stage": 1}),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in [
                ("mumoe tr", {}), ("smoe", {"stage": 2}),
                ("dense", {}), ("mumoe cp", {}), ("smoe", {}), ("smoe", {"expert": 2}),
                ("dense", {"stage": 1}), ("mumoe tr", {"stage": 1}), ("mumoe cp", {"stage": 2}),
                ("sinks", {"stage": 1}), ("sinks", {"expert": 2, "stage": 2}),
            ]
        ),
    ],
)  # fmt: skip
def test_two_processes_end_as_one(workers, tmp_path, model, layout):
    case = MUON.but(model=MODELS[model], learning_rate=1e-3, clip=0.5)
    one, two = tmp_path / "one", tmp_path / "two"
    expected = workers(1).run(train, case.but(save_to=str(one)))[0]
    results = workers(2).run(train, case.but(save_to=str(two), **layout))
    assert results[0]["losses"] == results[1]["losses"]
    for key in ("losses", "norms"):
        ours, theirs = torch.tensor(results[0][key]), torch.tensor(expected[key])
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)
    ours, theirs = tensors(two / "step-00000004"), tensors(one / "step-00000004")
    assert ours.keys() == theirs.keys()
    # The true gradient of a key's bias is 0, and AdamW makes a step of what rounding leaves of it.
    weights = [k for k in theirs if k[1] == "master" and not k[0].endswith("qkv.bias")]
    assert max(relative(ours[key], theirs[key]) for key in weights) < 1e-5


@pytest.mark.slow
@pytest.mark.distributed
def test_moments_go_from_zero_2_to_one_process(workers, tmp_path):
    case = MUON.but(model=MODELS["latent"], learning_rate=1e-3)
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    whole = workers(1).run(train, case.but(last_step=8))[0]
    half = case.but(stage=2, expert=2, save_to=first)
    begun = workers(4).run(train, half)[0]
    kept = Checkpoint(tmp_path / "first" / "step-00000004").tensors
    assert set(kept["blocks.1.feed_forward.experts.gate"]) == {"master", "exp_avg"}
    assert set(kept["blocks.1.feed_forward.router.score.weight"]) == {
        "master", "exp_avg", "exp_avg_sq",
    }  # fmt: skip
    resume = f"{first}/step-00000004"
    rest = case.but(first_step=4, last_step=8, resume=resume, save_to=second)
    losses = begun["losses"] + workers(1).run(train, rest)[0]["losses"]
    torch.testing.assert_close(
        torch.tensor(losses), torch.tensor(whole["losses"]), rtol=1e-5, atol=0
    )
