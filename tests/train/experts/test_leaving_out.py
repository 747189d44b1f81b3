"""Leaving experts out, one by one: equal to a loop over experts and images, and to weights of 0."""

import math

import pytest
import torch

from polyad.train.experts.actions import intervening
from polyad.train.experts.probing import routed_layers
from polyad.train.measures.specialization import LeaveOneOut, polysemanticity, without_capacity
from tests.helpers.everyday import everyday
from tests.helpers.random_model import built, draw_anew

IMAGES = {
    "image_size": 8, "patch_size": 4, "num_classes": 4, "num_layers": 2, "hidden_size": 16,
}  # fmt: skip
CP = {
    "kind": "mumoe", "factorization": "cp", "num_experts": [6], "rank": 8, "hidden_size": 20,
    "gate_input": "normalized",
}  # fmt: skip
SPARSE = {"kind": "smoe", "num_experts": 5, "expert_hidden_size": 12}
MODELS = {
    "mixer cp": {
        "kind": "mixer",
        "token_feed_forward": CP | {"gate_norm": "batch"},
        "channel_feed_forward": CP | {"num_experts": [4, 2], "level_std": 0.5},
    },
    "vit tr": {"kind": "vit", "num_heads": 4, "feed_forward": CP | {"factorization": "tr"}},
    "vit sparse": {"kind": "vit", "num_heads": 4, "pool": "mean", "feed_forward": SPARSE},
    "vit capacity": {
        "kind": "vit", "num_heads": 4, "pool": "mean",
        "feed_forward": SPARSE | {"capacity_factor": 0.7},
    },
}  # fmt: skip


def make_model(kind):
    return draw_anew(built(IMAGES | MODELS[kind]), 0.5).eval()


IMAGES_BCHW = torch.randn(12, 3, 8, 8, generator=torch.Generator().manual_seed(3))
LABELS_B = torch.arange(12) % 4


@everyday("kind", MODELS, keep=["vit tr", "vit sparse", "vit capacity"])
@torch.inference_mode()
def test_counts_are_those_of_a_loop_over_experts_and_images(kind):
    """The loop has no capacity, with which the other images of a batch would matter."""
    model = make_model(kind)
    counts = []
    for layer in routed_layers(model):
        counts.append(LeaveOneOut(model, layer, classes=list("abcd"), rows=7))
        counts[-1].add(IMAGES_BCHW[:8], LABELS_B[:8])
        counts[-1].add(IMAGES_BCHW[8:], LABELS_B[8:])
    with without_capacity(model):
        whole = model(IMAGES_BCHW).logits.argmax(-1) == LABELS_B
    for layer, count in zip(routed_layers(model), counts, strict=True):
        lost = torch.zeros(layer.num_experts, 4, dtype=torch.float64)
        for expert in range(layer.num_experts):
            for image in range(12):
                with without_capacity(model), intervening(model, layer) as intervene:
                    intervene(torch.arange(layer.num_experts).eq(expert).unsqueeze(0), None)
                    logits = model(IMAGES_BCHW[image : image + 1]).logits
                still = bool(logits.argmax(-1) == LABELS_B[image])
                lost[expert, LABELS_B[image]] += float(whole[image]) - still
        assert torch.equal(count.lost_SK, lost)
        assert count.images_K.tolist() == [3, 3, 3, 3]
        assert count.right_K.tolist() == [float(whole[c == LABELS_B].sum()) for c in range(4)]


def test_polysemanticity_by_hand():
    right = torch.tensor([10.0, 20.0, 0.0])
    lost = torch.tensor(
        [
            [10.0, 0.0, 0.0],  # d = (1, 0, 0): one class alone, p = 0
            [5.0, 10.0, 0.0],  # d = (0.5, 0.5, 0): |(-0.5, 0.5)| (the first is the highest)
            [0.0, -2.0, 0.0],  # d = (0, -0.1, 0): the highest is class 0, |(-1, -0.1, 0)|
            [0.0, 0.0, 0.0],  # matters to none
        ]
    )
    p_S, class_S = polysemanticity(right, lost)
    expected = [0.0, math.sqrt(0.5), math.sqrt(1.01)]
    assert p_S[:3].tolist() == pytest.approx(expected)
    assert p_S[3].isnan()
    assert class_S.tolist() == [0, 0, 0, -1]
