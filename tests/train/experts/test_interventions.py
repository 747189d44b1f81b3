"""Interventions: equal to numbers worked out by hand, and to models whose weights were changed."""

import copy
from typing import get_args

import pytest
import torch

from polyad.train.errors import ConfigError
from polyad.train.experts.actions import CONTRIBUTION, KEYS, Action, How, intervening
from polyad.train.experts.interventions import Intervention, intervened, parse_intervention
from polyad.train.experts.probing import deciding, routed_layers
from tests.helpers.random_model import built, random_model
from tests.helpers.refusals import line_of

SPARSE = {"kind": "smoe", "num_experts": 6, "expert_hidden_size": 8, "top_k": 2}
KINDS = {
    "linear": SPARSE,
    "softmax": SPARSE | {"combine": "scores"},
    "top-1": SPARSE | {"top_k": 1},
    "attention graph": SPARSE | {"graph": "attention"},
    "similarity graph": SPARSE | {"graph": "similarity"},
    "sigmoid, bias": SPARSE | {"score_function": "sigmoid", "balancing_rate": 0.01},
    "split": {"kind": "emoe", "num_experts": 8, "top_k": 3},
}
TABLES = {
    "mxd": {"kind": "mxd", "num_experts": 9, "top_k": 4, "hidden_size": 12},
    "transcoder": {"kind": "transcoder", "num_experts": 9, "top_k": 4},
}
CP = {"kind": "mumoe", "factorization": "cp", "num_experts": [4, 3], "rank": 8}
IDS_BT = torch.randint(61, (3, 12), generator=torch.Generator().manual_seed(5))


def action_of(how, mean_SD=None, **values):
    """An action with the value that it needs of these."""
    needed = {key: values[key] for key in [KEYS.get(how)] if key}
    return Action(how=how, mean_SD=mean_SD, **needed)


def one(model, *experts):
    """Block 0's layer, and a row of its experts."""
    layer = routed_layers(model)[0]
    chosen_1S = torch.zeros(1, layer.num_experts, dtype=torch.bool)
    chosen_1S[0, list(experts)] = True
    return layer, chosen_1S


@torch.no_grad()
def by_use(model):
    """The experts of block 0, the most used first."""
    layer = routed_layers(model)[0]
    with deciding(model, [layer]) as decisions:
        model(IDS_BT)
    used_S = (decisions[layer.name].coefficients() != 0).sum(0)
    return used_S.argsort(descending=True, stable=True).tolist()


@torch.no_grad()
def logits(model, action=None, *experts):
    if action is None:
        return model(IDS_BT).logits
    layer, chosen_1S = one(model, *experts)
    with intervening(model, layer, action) as intervene:
        intervene(chosen_1S, None)
        return model(IDS_BT).logits


def layer_of_constants(p, outputs, top_k, **changes):
    """A model of width 2 whose first layer scores every token with p; an expert's output is its
    bias."""
    feed_forward = SPARSE | {"num_experts": len(p), "top_k": top_k} | changes
    model = random_model(feed_forward, num_layers=1, hidden_size=2, num_heads=1)
    layer = model.blocks[0].feed_forward
    with torch.no_grad():
        layer.experts.down.zero_()
        layer.output_bias.copy_(torch.tensor(outputs, dtype=torch.float64))
        layer.router.score.weight.zero_()
        layer.router.score.weight[:, 0] = torch.tensor(p, dtype=torch.float64).log()
        if getattr(layer.router.score, "bias", None) is not None:
            layer.router.score.bias.zero_()
    return model


@torch.no_grad()
def output_of(model, action, *experts):
    x_BTD = torch.tensor([[[1.0, 0.0]]], dtype=torch.float64)
    layer, chosen_1S = one(model, *experts)
    with intervening(model, layer, action) as intervene:
        intervene(chosen_1S, None)
        return model.blocks[0].feed_forward(x_BTD, x_BTD)[0].flatten().tolist()


MEANS_SD = torch.tensor([[9.0, 9], [0.5, 0.5], [9, 9], [9, 9]], dtype=torch.float64)


@pytest.mark.parametrize(
    ("action", "expected"),
    [
        (CONTRIBUTION, (1.2, 0.2)),
        (Action(how="renormalize"), (1.2 / 0.7, 0.2 / 0.7)),
        (Action(how="swap", to=3), (2.4, 0.2)),
        (Action(how="mean", mean_SD=MEANS_SD), (1.35, 0.35)),
        (Action(how="scale", value=2.0), (1.2, 0.8)),
        (Action(how="clamp", value=1.0), (1.2, 1.2)),
        # In its place the third takes .3 beside its own .2, and is called once.
        (Action(how="swap", to=2), (1.5, 0.5)),
    ],
)
def test_an_expert_removed_in_each_way_by_hand(action, expected):
    """g = (.5, .3, .2), f = (2, 0), (0, 1), (1, 1) and of an expert that is not used (4, 0)."""
    model = layer_of_constants([0.45, 0.27, 0.18, 0.1], [[2, 0], [0, 1], [1, 1], [4, 0]], 3)
    assert output_of(model, Action(how="scale", value=1.0), 1) == pytest.approx([1.2, 0.5])
    assert output_of(model, action, 1) == pytest.approx(expected)


def test_a_token_without_its_only_expert_gets_nothing():
    model = layer_of_constants([0.6, 0.4], [[1, 2], [3, 4]], 1)
    assert output_of(model, Action(how="renormalize"), 0) == [0, 0]


def pruned_copy(model, expert):
    """A model with an expert less: its rows of all weights, and of the router, are deleted."""
    config = model.config.feed_forward
    kept = [each for each in range(config.num_experts) if each != expert]
    fewer = {"num_experts": len(kept)}
    if config.kind == "emoe":
        fewer["hidden_size"] = model.blocks[0].feed_forward.experts.keys.shape[1] * len(kept)
    sizes = model.config.model_copy(update={"feed_forward": config.model_copy(update=fewer)})
    pruned = built(sizes, dtype=torch.float64)
    of_experts = {
        f"{layer.name}.{name}"
        for layer in routed_layers(model)
        for name, value in model.get_submodule(layer.name).state_dict().items()
        if value.ndim and len(value) == config.num_experts
    }
    state = {
        name: value[kept] if name in of_experts else value
        for name, value in model.state_dict().items()
        if not name.endswith(".unit")
    }
    pruned.load_state_dict(state, strict=False)
    return pruned.eval()


@pytest.mark.parametrize("kind", KINDS)
def test_pruning_is_a_model_without_the_expert(kind):
    model = random_model(KINDS[kind])
    expert = by_use(model)[0]
    with torch.no_grad():
        theirs = pruned_copy(model, expert)(IDS_BT).logits
        both = [Intervention(layer=block, experts=(expert,), how="prune") for block in (0, 1)]
        with intervened(model, both):
            ours = model(IDS_BT).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    assert not torch.allclose(ours, logits(model), atol=1e-3)


CHANGES = [
    *((kind, how) for kind in KINDS for how in ("zero", "scale", "mean", "swap")
      if kind != "split"),  # whose bias is no expert's
    *((kind, how) for kind in TABLES for how in ("zero", "swap")),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "how"), CHANGES)
@torch.no_grad()
def test_an_action_is_a_change_of_weights(kind, how):
    """An expert of zeros, one that always gives its mean, one with twice its output, another."""
    model = random_model((KINDS | TABLES)[kind])
    expert, to, *_ = by_use(model)
    changed = copy.deepcopy(model)
    part = changed.blocks[0].feed_forward
    mean_SD = torch.randn(6, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    outputs = [part.table] if kind in TABLES else [part.experts.down, part.output_bias]
    if how == "swap":
        for value in outputs if kind in TABLES else (*part.experts.parameters(), part.output_bias):
            value[expert] = value[to]
    else:
        for value in outputs:
            value[expert] *= 2 if how == "scale" else 0
    if how == "mean":
        part.output_bias[expert] = mean_SD[expert]
    action = action_of(how, to=to, value=2.0, mean_SD=mean_SD)
    ours, theirs = logits(model, action, expert), logits(changed)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    assert not torch.allclose(ours, logits(model), atol=1e-3)


@pytest.mark.parametrize("how", ["zero", "renormalize", "swap", "scale", "clamp"])
def test_shares_of_a_level_by_hand(how):
    """The coefficients of a muMoE themselves."""
    model = random_model(CP)
    layer, chosen_1S = one(model, 1)
    with torch.no_grad(), deciding(model, [layer]) as decisions:
        model(IDS_BT)
    a_MN, b_MN = (each.clone() for each in decisions[layer.name].levels)
    expected = a_MN.clone()
    expected[:, 1] = {"scale": 0.5, "clamp": 0.0}.get(how, 0.0) * a_MN[:, 1]
    if how == "clamp":
        expected[:, 1] = torch.where(a_MN[:, 1] > 0, 0.25, 0.0)
    if how == "swap":
        expected[:, 3] += a_MN[:, 1]
    if how == "renormalize":
        rest = expected.sum(-1, keepdim=True)
        expected = torch.where(rest > 0, expected / rest, 0.0)
    action = action_of(how, to=3, value={"scale": 0.5, "clamp": 0.25}.get(how))
    with intervening(model, layer, action) as intervene, deciding(model, [layer]) as decisions:
        intervene(chosen_1S, None)
        with torch.no_grad():
            model(IDS_BT)
    ours_MN, other_MN = decisions[layer.name].levels
    torch.testing.assert_close(ours_MN, expected)
    assert torch.equal(other_MN, b_MN)
    assert (expected != a_MN).any()


@pytest.mark.parametrize("how", get_args(How))
@torch.no_grad()
def test_rows_and_places_are_changed_one_by_one(how):
    """Rows with experts of their own, at one token: as each row alone, nothing before the token."""
    model = random_model(SPARSE)
    layer, (first, second, third, *_, last) = routed_layers(model)[0], by_use(model)
    mean_SD = torch.ones(6, 16, dtype=torch.float64)
    action = action_of(how, to=last, value=0.3, mean_SD=mean_SD)
    experts = [first, second, third]
    chosen_BS = torch.eye(6, dtype=torch.bool)[experts]
    at_BT = torch.zeros(3, 12, dtype=torch.bool)
    at_BT[:, 7] = True
    before = logits(model)
    with deciding(model, [layer]) as decisions:
        model(IDS_BT)
    used_BTS = decisions[layer.name].coefficients().view(3, 12, 6) != 0
    used_BT = torch.stack([used_BTS[row, :, expert] for row, expert in enumerate(experts)])
    with intervening(model, layer, action) as intervene:
        intervene(chosen_BS, None)
        everywhere = model(IDS_BT).logits
        intervene(chosen_BS, at_BT)
        at_one = model(IDS_BT).logits
        for row in range(3):
            intervene(chosen_BS[row : row + 1], None)
            alone = model(IDS_BT[row : row + 1]).logits
            torch.testing.assert_close(everywhere[row : row + 1], alone)
        intervene(None, None)
        assert torch.equal(model(IDS_BT).logits, before)
    if how in ("force", "steer"):  # also tokens that do not use the expert
        used_BT = torch.ones_like(used_BT)
    changed_BT = ((at_one - before).abs() > 1e-9).any(-1)
    assert not changed_BT[:, :7].any()
    assert changed_BT[:, 7].tolist() == used_BT[:, 7].tolist()
    assert not changed_BT[~used_BT[:, 7]].any()
    changed_BT = ((everywhere - before).abs() > 1e-9).any(-1)
    assert changed_BT.tolist() == (used_BT.cumsum(1) > 0).tolist()  # from its first token on
    assert used_BT[:, 7].any()
    assert torch.equal(logits(model), before)  # nothing is left of it


@pytest.mark.parametrize("order", [1, -1])
@torch.no_grad()
def test_experts_forced_and_avoided_by_hand(order):
    """The last of p = (.4, .3, .2, .1) is forced and the first avoided, by either order of words:
    (.1 e^-.01, .3, .2, .4 e^.01) over their sum 1.0030."""
    model = layer_of_constants([0.4, 0.3, 0.2, 0.1], [[1, 0], [10, 0], [0, 1], [0, 10]], 2)
    layer, x_BTD = routed_layers(model)[0], torch.tensor([[[1.0, 0.0]]], dtype=torch.float64)
    asked = [parse_intervention("layer=0,expert=3,how=force"),
             parse_intervention("layer=0,expert=0,how=avoid")][::order]  # fmt: skip
    with intervened(model, asked), deciding(model, [layer]) as decisions:
        y_BTD, _ = model.blocks[0].feed_forward(x_BTD, x_BTD)
    (p_1S,) = decisions[layer.name].levels
    assert p_1S[0].tolist() == pytest.approx([0.0987, 0.2991, 0.1994, 0.4028], abs=5e-5)
    assert y_BTD.flatten().tolist() == pytest.approx([10 * 0.42614, 10 * 0.57386], abs=1e-3)
    with intervened(model, asked[:1] if order == -1 else asked[1:]):
        y_BTD, _ = model.blocks[0].feed_forward(x_BTD, x_BTD)
    assert y_BTD.flatten().tolist() == pytest.approx([6, 0.4])  # .3 and .2: the next two


@pytest.mark.parametrize(
    ("section", "text", "key"),
    [
        (SPARSE, "layer=0", "expert"),
        (SPARSE, "expert=1", "layer"),
        (SPARSE, "layer=0,expert=1,how=kill", "how: 'kill'"),
        (SPARSE, "layer=0,expert=1,colour=red", "colour"),
        (SPARSE, "layer=0,layer=1,expert=1", "each key once"),
        (SPARSE, "layer=-1,expert=1", "layer: '-1'"),
        (SPARSE, "layer=0,expert=1+x", "expert.1: 'x'"),
        (SPARSE, "layer=0,expert=1,how=swap", "to is missing"),
        (SPARSE, "layer=0,expert=1,to=2", "to means nothing"),
        (SPARSE, "layer=0,expert=1,how=scale,value=nan", "value: 'nan'"),
        (SPARSE, "layer=7,expert=1", "layer: 7"),
        (SPARSE, "layer=1,expert=6", "expert: 6"),
        (SPARSE, "layer=1,expert=0,how=swap,to=6", "to: 6"),
        (SPARSE, "layer=1,expert=0,how=swap,to=0", "to: 0"),
        (SPARSE, "layer=1,expert=0+1+2+3+4,how=prune", "1 experts left"),
        (SPARSE, "layer=1,expert=0,how=mean", "held-out data"),
        (SPARSE | {"score_function": "sigmoid"}, "layer=0,expert=1,how=avoid", "how: avoid"),
        *((CP, f"layer=0,expert=1,how={how}", f"how: {how} is not allowed")
          for how in ("mean", "prune", "force", "avoid")),
        (TABLES["mxd"], "layer=0,expert=1,how=prune", "how: prune is not allowed"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_line(section, text, key):
    model = random_model(section)
    assert key in line_of(
        ConfigError, lambda: intervened(model, [parse_intervention(text)]).__enter__()
    )
