"""Models of images: the parameters of the papers, and other implementations on the same weights."""

import pytest
import torch
from torch.nn.functional import cross_entropy, gelu, layer_norm

from polyad.model.build import (
    build_model,
    count_parameters,
    materialize,
    num_parameters,
    read_model_config,
)
from tests.helpers.random_model import built, draw_anew

S16 = {"kind": "mixer", "num_classes": 1000}
B16 = S16 | {
    "num_layers": 12,
    "hidden_size": 768,
    "token_feed_forward": {"kind": "dense", "hidden_size": 384},
}
V_MOE = {
    "kind": "vit", "patch_size": 32, "num_layers": 8, "hidden_size": 512, "num_heads": 8,
    "num_classes": 1000,
}  # fmt: skip


def mumoe(factorization, rank, experts, hidden):
    return {
        "kind": "mumoe", "factorization": factorization, "num_experts": experts, "rank": rank,
        "hidden_size": hidden, "gate_norm": "batch", "gate_input": "normalized",
    }  # fmt: skip


def factorized_mixer(factorization, ranks, experts):
    tokens, channels = ranks
    return S16 | {
        "token_feed_forward": mumoe(factorization, tokens, experts, 256),
        "channel_feed_forward": mumoe(factorization, channels, experts, 2048),
    }


def sparse_vit(experts):
    return V_MOE | {"feed_forward": {"kind": "smoe", "num_experts": experts, "placement": [5, 7]}}


@pytest.mark.parametrize(
    ("section", "parameters"),
    [
        (S16, 18_528_264),  # timm's mixer_s16_224
        (B16, 59_880_472),  # timm's mixer_b16_224
        (factorized_mixer("cp", (147, 384), [64]), 18_630_616),
        (factorized_mixer("tr", (37, 97), [64]), 18_290_792),
        (factorized_mixer("tr", (38, 99), [64, 2]), 18_659_944),
        (factorized_mixer("cp", (147, 384), [64, 2]), 18_658_936),
        (
            {"kind": "vit", "num_classes": 1000, "hidden_size": 384, "num_heads": 6},
            22_050_664,  # timm's vit_small_patch16_224
        ),
        (V_MOE, 27_332_584),
        (sparse_vit(8), 56_736_760),
        (sparse_vit(16), 90_340_360),
        (sparse_vit(32), 157_547_560),
        (sparse_vit(64), 291_961_960),
    ],
)
def test_models_have_the_published_number_of_parameters(section, parameters):
    assert num_parameters(read_model_config(section)) == parameters


HEADS = [
    ({"kind": "linear"}, 768, 1000, 769_000),
    ({"kind": "mumoe", "rank": 393}, 768, 1000, 769_521),
    ({"kind": "mumoe", "factorization": "tr", "rank": 102}, 768, 1000, 771_928),
    ({"kind": "mumoe", "num_experts": [128], "rank": 512}, 768, 40, 578_048),
]


@pytest.mark.parametrize(("head", "width", "classes", "parameters"), HEADS)
def test_heads_have_the_papers_number_of_parameters(head, width, classes, parameters):
    sizes = {"hidden_size": width, "num_layers": 1, "patch_size": 32, "num_classes": classes}
    model = build_model(read_model_config({"kind": "vit", "head": head} | sizes))
    assert count_parameters(model.head) == parameters


def test_a_head_matches_a_linear_one_and_is_the_sum_of_its_experts():
    section = {
        "kind": "vit", "image_size": 8, "patch_size": 4, "num_layers": 1, "hidden_size": 16,
        "num_heads": 2, "num_classes": 30, "head": {"kind": "mumoe", "num_experts": [5]},
    }  # fmt: skip
    model = build_model(read_model_config(section))
    # Next to a linear head's 17 x 30, up to half of a rank's 5 + 17 + 30 and the gate.
    assert abs(count_parameters(model.head) - 17 * 30) <= 26 + 5 * 16
    materialize(model, 0)
    torch.manual_seed(0)
    torch.nn.init.normal_(model.head.gate.weight)
    z = torch.randn(4, 16)
    logits, stats = model.head(z)
    a = model.head.gate(z).coefficients[0]
    u1, u2, u3 = (
        model.head.layer.get_parameter(f"{name}_factor{suffix}")
        for name, suffix in (("expert", "_0"), ("input", ""), ("output", ""))
    )
    # Every expert's matrix is built, with its bias as the row of a constant input.
    w = torch.einsum("nr,ir,ro->nio", u1, u2, u3)
    with_one = torch.cat([z, torch.ones(4, 1)], dim=1)
    expected = torch.einsum("bn,nio,bi->bo", a, w, with_one)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    assert stats.name == "head"
    assert model(torch.randn(2, 3, 8, 8)).routing[-1].name == "head"


IMAGES = {"image_size": 16, "patch_size": 4, "num_classes": 5, "num_layers": 2, "hidden_size": 24}


def made(**section):
    return draw_anew(built(IMAGES | section), 0.3).double()


@pytest.fixture
def images():
    return torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(2)).double()


LABELS = torch.tensor([0, 4, 2])


def test_a_mixer_is_what_its_equations_say(images):
    model = made(kind="mixer", token_feed_forward={"kind": "dense", "hidden_size": 10})
    p = dict(model.named_parameters())
    # Patches by rows; a patch's numbers are ordered by channel, row and column.
    patches = torch.stack(
        [
            images[:, :, i : i + 4, j : j + 4].flatten(1)
            for i in range(0, 16, 4)
            for j in range(0, 16, 4)
        ],
        dim=1,
    )
    weight = p["patch_embedding.weight"].view(24, -1)
    x = torch.einsum("btn,dn->btd", patches, weight) + p["patch_embedding.bias"]

    def mlp(z, name):
        inner = torch.einsum("...i,hi->...h", z, p[f"{name}.up.weight"]) + p[f"{name}.up.bias"]
        down, bias = p[f"{name}.down.weight"], p[f"{name}.down.bias"]
        return torch.einsum("...h,oh->...o", gelu(inner), down) + bias

    for block in ("blocks.0", "blocks.1"):
        norms = [
            (p[f"{block}.{name}_norm.weight"], p[f"{block}.{name}_norm.bias"])
            for name in ("token", "channel")
        ]
        columns = layer_norm(x, (24,), *norms[0], eps=1e-6).mT
        x = x + mlp(columns, f"{block}.token_feed_forward").mT
        x = x + mlp(layer_norm(x, (24,), *norms[1], eps=1e-6), f"{block}.channel_feed_forward")
    final = layer_norm(x, (24,), p["final_norm.weight"], p["final_norm.bias"], eps=1e-6)
    expected = final.mean(1) @ p["head.weight"].T + p["head.bias"]
    actual = model(images).logits
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)
    names, parameters = zip(*p.items(), strict=True)
    ours = torch.autograd.grad(cross_entropy(actual, LABELS), parameters)
    theirs = torch.autograd.grad(cross_entropy(expected, LABELS), parameters)
    for name, a, b in zip(names, ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10, msg=name)


@pytest.mark.parametrize("pool", ["class_token", "mean"])
def test_blocks_can_be_entered_in_the_middle(images, pool):
    model = made(kind="vit", num_heads=4, pool=pool, pre_logits=6, pre_norm=True).eval()
    x = model.embed(images)
    x, _ = model.blocks[0](x)
    torch.testing.assert_close(model.tail(x, 1), model(images).logits)


def test_stochastic_depth_drops_whole_images_and_keeps_the_mean():
    from polyad.model.layers import DropPath

    torch.manual_seed(0)
    layer, ones = DropPath(0.25), torch.ones(4000, 2, 3)
    dropped = layer(ones)
    values = dropped.unique()
    assert values.tolist() == pytest.approx([0.0, 4 / 3])
    assert bool((dropped == dropped[:, :1, :1]).all())  # an image as a whole
    assert float(dropped.mean()) == pytest.approx(1.0, abs=0.03)
    assert torch.equal(layer.eval()(ones), ones)
