"""Models of images against other implementations on the same weights, forward and gradient."""

import pytest
import torch
from torch.nn.functional import cross_entropy, gelu, layer_norm

from polyad.model.build import build_model, materialize, read_model_config

IMAGES = {"image_size": 16, "patch_size": 4, "num_classes": 5, "num_layers": 2, "hidden_size": 24}


def made(**section):
    """A model with every weight drawn anew: zeros would hide a mistake."""
    model = build_model(read_model_config(IMAGES | section))
    materialize(model, 0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model.double()


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


def test_a_vit_is_transformers(images):
    transformers = pytest.importorskip("transformers")
    model = made(kind="vit", num_heads=4, feed_forward={"kind": "dense", "hidden_size": 40})
    theirs = transformers.ViTForImageClassification(
        transformers.ViTConfig(
            hidden_size=24, num_hidden_layers=2, num_attention_heads=4, intermediate_size=40,
            hidden_act="gelu", image_size=16, patch_size=4, num_labels=5, layer_norm_eps=1e-6,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    ).double()  # fmt: skip
    p = {name: value.detach() for name, value in model.named_parameters()}
    ours = {
        "vit.embeddings.cls_token": p["class_token"].unsqueeze(0),
        "vit.embeddings.position_embeddings": p["position_embedding"].unsqueeze(0),
        "vit.embeddings.patch_embeddings.projection.weight": p["patch_embedding.weight"],
        "vit.embeddings.patch_embeddings.projection.bias": p["patch_embedding.bias"],
        "vit.layernorm.weight": p["final_norm.weight"],
        "vit.layernorm.bias": p["final_norm.bias"],
        "classifier.weight": p["head.weight"],
        "classifier.bias": p["head.bias"],
    }
    named = dict(theirs.named_parameters())
    layer = next(name for name in named if name.endswith("0.layernorm_before.weight"))
    prefix = layer.removesuffix("0.layernorm_before.weight")
    pairs = {}
    for block in range(2):
        for kind in ("weight", "bias"):
            here, there = f"blocks.{block}", f"{prefix}{block}"
            qkv = p[f"{here}.attention.qkv.{kind}"].chunk(3)
            names = [n for n in named if n.startswith(there) and n.endswith(kind)]
            # In transformers' order: attention q, k, v, output; intermediate, output; two norms.
            order = {
                "q": qkv[0], "k": qkv[1], "v": qkv[2],
                "projection": p[f"{here}.attention.projection.{kind}"],
                "up": p[f"{here}.feed_forward.up.{kind}"],
                "down": p[f"{here}.feed_forward.down.{kind}"],
                "before": p[f"{here}.attention_norm.{kind}"],
                "after": p[f"{here}.feed_forward_norm.{kind}"],
            }  # fmt: skip
            for name in names:
                pairs[name] = order[_part(name)]
    state = ours | pairs
    assert state.keys() == named.keys()
    theirs.load_state_dict(state)
    expected = theirs(images).logits
    actual = model(images).logits
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)
    cross_entropy(actual, LABELS).backward()
    cross_entropy(expected, LABELS).backward()
    own = dict(model.named_parameters())
    torch.testing.assert_close(
        own["patch_embedding.weight"].grad,
        named["vit.embeddings.patch_embeddings.projection.weight"].grad,
        rtol=0, atol=1e-10,
    )  # fmt: skip
    for name, parameter in named.items():
        if _part(name) in ("up", "down") and name.endswith("weight") and prefix in name:
            block = name.removeprefix(prefix)[0]
            mine = own[f"blocks.{block}.feed_forward.{_part(name)}.weight"].grad
            torch.testing.assert_close(mine, parameter.grad, rtol=0, atol=1e-10)


def _part(name):
    """Which part of a block a parameter of transformers' belongs to."""
    known = {
        "query": "q", "q_proj": "q", "key": "k", "k_proj": "k", "value": "v", "v_proj": "v",
        "attention.output": "projection", "o_proj": "projection", "intermediate": "up",
        "fc1": "up", "fc2": "down", "layernorm_before": "before", "layernorm_after": "after",
        "output.dense": "down",
    }  # fmt: skip
    return next((part for word, part in known.items() if word in name), "")


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


def test_recomputation_changes_nothing(images):
    sections = {"kind": "mixer", "drop_path": 0.5}
    results = []
    for recompute in ("none", "block"):
        model = made(**sections, recompute=recompute).train()
        torch.manual_seed(3)
        cross_entropy(model(images).logits, LABELS).backward()
        results.append([parameter.grad for parameter in model.parameters()])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)
