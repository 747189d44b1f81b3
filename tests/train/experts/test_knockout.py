"""Experts left out of language models: equal to a copy of the model whose expert is all zeros."""

import copy
import math
from collections import Counter

import numpy as np
import pandas as pd
import pytest
import torch
from torch.nn.functional import cross_entropy

from polyad.model.bert import BertConfig
from polyad.model.emoe import EmergentMoE
from polyad.train.errors import ConfigError
from polyad.train.experts.actions import CONTRIBUTION, Action
from polyad.train.experts.interventions import Intervention, intervened
from polyad.train.experts.knockout import ChangeSums, KnockOut
from polyad.train.experts.probing import deciding, routed_layers
from polyad.train.tasks.samples import Passages, embedded, losses, through
from tests.helpers.everyday import everyday
from tests.helpers.random_model import random_model

WINDOWS, LENGTH, VOCABULARY, BATCH = 7, 12, 61, 3
SPARSE = {"kind": "smoe", "num_experts": 6, "expert_hidden_size": 8, "top_k": 2}
CP = {"kind": "mumoe", "factorization": "cp", "num_experts": [6], "rank": 8}
KINDS = {
    "linear top-2": SPARSE,
    "top-1": SPARSE | {"top_k": 1, "num_experts": 9},
    "attention graph": SPARSE | {"graph": "attention"},
    "similarity graph": SPARSE | {"graph": "similarity"},
    "cp": CP,
    "tr levels": CP | {"factorization": "tr", "num_experts": [4, 3], "gate": "softmax"},
    "split": {"kind": "emoe", "num_experts": 8, "top_k": 3},
    "bert": SPARSE | {"top_k": 1},
    "mxd": {"kind": "mxd", "num_experts": 8, "top_k": 3},  # no copy: its rows cannot be zero
}
EXACT = 2e-6
"""A head gives losses of a float64 model in fp32."""
GENERATOR = torch.Generator().manual_seed(5)
IDS_WT = torch.randint(VOCABULARY, (WINDOWS, LENGTH + 1), generator=GENERATOR)
CLASSES = {
    "all": ["all"],
    "remainder": ["0", "1", "2"],
    "place": [str(place) for place in range(LENGTH)],
}


def make_model(kind, **changes):
    kind_of_model = "bert" if kind == "bert" else "gpt2"
    return random_model(KINDS[kind] | changes, num_layers=3, kind=kind_of_model)


def passages_of(model):
    """All windows in batches; the last two predictions of window 4 do not count."""
    for first in range(0, WINDOWS, BATCH):
        number_B = torch.arange(first, min(first + BATCH, WINDOWS))
        ids_BT, target_BT = IDS_WT[number_B, :-1], IDS_WT[number_B, 1:]
        places_BT = torch.arange(LENGTH).expand_as(ids_BT)
        if isinstance(model.config, BertConfig):  # three hidden tokens of each window
            places_BT = torch.tensor([2, 3, 9]).expand(len(ids_BT), -1)
            target_BT = target_BT[:, :3]
        scored_BT = torch.ones_like(target_BT, dtype=torch.bool)
        scored_BT[number_B == 4, -2:] = False
        yield Passages(number_B, ids_BT, places_BT, target_BT, scored_BT)


@torch.inference_mode()
def knocked_out(model, layer, experts, action=CONTRIBUTION):
    alone = [(each,) for each in experts]
    result = KnockOut(model, layer, alone, CLASSES, windows=WINDOWS, action=action)
    for passages in passages_of(model):
        remainder = 1 + passages.target_BP % 3
        columns = [torch.zeros_like(remainder), remainder, 4 + passages.places_BP]
        label_JBP = torch.stack(columns).where(passages.scored_BP, -1)
        kept = {layer.block: None}
        with deciding(model, [layer]) as decisions:
            x = through(model, embedded(model, passages), kept=kept)
        loss = losses(model, x, passages)
        result.add(kept[layer.block], passages, label_JBP, loss, decisions[layer.name])
    return result.result()


def zeroed(model, layer, expert):
    """A copy whose expert gives nothing."""
    copied = copy.deepcopy(model)
    module = copied.get_submodule(layer.name)
    with torch.no_grad():
        if isinstance(module, EmergentMoE):
            module.experts.values[expert] = 0
        elif hasattr(module, "router"):
            module.experts.down[expert] = module.output_bias[expert] = 0
        else:
            level, number = layer.place(expert)
            for part in (module.up, module.down):
                factor = part.get_parameter(f"expert_factor_{level}")
                factor.select(factor.shape.index(layer.levels[level]), number).zero_()
    return copied


@torch.no_grad()
def token_by_token(model, layer):
    """The loss of each prediction by logits, and what the layer adds to each token, by window."""
    added = []
    hook = model.get_submodule(layer.name).register_forward_hook(
        lambda module, given, output: added.append(output[0])
    )
    result = []
    for passages in passages_of(model):
        logits_BTV = model(passages.ids_BT).logits
        index = passages.places_BP.unsqueeze(-1).expand(-1, -1, VOCABULARY)
        logits_BPV = logits_BTV.gather(1, index)
        loss_BP = cross_entropy(logits_BPV.mT, passages.target_BP, reduction="none")
        result += list(zip(loss_BP, added.pop(), strict=True))
    hook.remove()
    return result


def of_class(changes, row, by, column, classes=CLASSES):
    """What a table says of a class, by its number."""
    place = {"row": row, "by": by, "class": classes[by][column]}
    (result,) = changes[(changes[list(place)] == pd.Series(place)).all(axis=1)].to_dict("records")
    return result


def check_layer(model, layer, experts):
    """Compares all classes of some experts with copies of the model; gives the windows changed."""
    result = knocked_out(model, layer, experts)
    whole, again = token_by_token(model, layer), 0
    every = [row for passages in passages_of(model) for row in zip(*passages[1:], strict=True)]
    for row, expert in enumerate(experts):
        without = token_by_token(zeroed(model, layer, expert), layer)
        tokens = {}
        for (loss, y), (other, z), (_, places, targets, scored) in zip(
            whole, without, every, strict=True
        ):
            own_T = ((y - z).abs() > 1e-12).any(-1)
            again += bool(own_T.any())
            first = int(own_T.int().argmax()) if own_T.any() else LENGTH
            change = other - loss
            if not isinstance(model.config, BertConfig):
                assert float(change[:first].abs().sum()) < 1e-12  # nothing before it changes
            for place, target, counts, nats in zip(places, targets, scored, change, strict=True):
                if counts:
                    for key in (("all", 0), ("remainder", int(target) % 3), ("place", int(place))):
                        tokens.setdefault(key, []).append((float(nats), bool(own_T[place])))
        for (name, column), pairs in tokens.items():
            ours = of_class(result.changes, row, name, column)
            own = [nats for nats, is_own in pairs if is_own]
            assert ours["tokens"] == len(pairs)
            assert ours["own_tokens"] == len(own)
            expected = np.mean([nats for nats, _ in pairs])
            assert ours["change"] == pytest.approx(expected, abs=EXACT)
            if own:
                assert ours["own_change"] == pytest.approx(np.mean(own), abs=EXACT)
    assert max(map(abs, result.of_all())) > 1e3 * EXACT
    assert result.windows_again == again
    return again


@everyday("kind", [*KINDS][:-1], keep=["attention graph", "tr levels"])
def test_each_class_loses_what_a_copy_with_zeros_loses(kind):
    model = make_model(kind)
    first, _, last = routed_layers(model)
    for layer, experts in ((first, [0, 2, 5]), (last, list(range(last.num_experts)))):
        again = check_layer(model, layer, experts)
        assert 0 < again <= WINDOWS * len(experts)


def test_only_windows_with_a_token_of_the_expert_are_run_from_its_block_on():
    model = make_model("top-1")
    layer, experts = routed_layers(model)[1], list(range(9))
    rows = Counter()
    for block in model.blocks:
        block.register_forward_hook(lambda module, given, _: rows.update({module: len(given[0])}))
    result = knocked_out(model, layer, experts)
    assert result.windows_again < WINDOWS * len(experts)  # some windows do without some experts
    again = WINDOWS + result.windows_again
    assert [rows[block] for block in model.blocks] == [WINDOWS, again, again]


ROUTERS = {
    "softmax": {},
    "not renormalized": {"combine": "scores"},
    "one": {"top_k": 1},
    "one, not renormalized": {"top_k": 1, "combine": "scores"},
    "similarity graph": {"graph": "similarity"},
    "attention graph": {"graph": "attention"},
    "sigmoid": {"score_function": "sigmoid", "top_k": 1},
    "sigmoid, normalized": {"score_function": "sigmoid", "combine": "sum_to_one"},
    "groups": {"num_groups": 4, "top_groups": 2},
    "groups by two": {"num_groups": 4, "top_groups": 2, "group_score": "best_two"},
    "shared": {"shared_hidden_size": 8},
    "cosine": {"score": "cosine"},
}
MANY = {
    **{name: ("linear top-2", {"num_experts": 16} | keys) for name, keys in ROUTERS.items()},
    **{kind: (kind, {}) for kind in ("cp", "tr levels", "split", "mxd")},
}


@everyday("name", MANY, keep=["attention graph", "cp", "tr levels", "split", "mxd"])
def test_each_action_changes_what_the_same_intervention_changes(name):
    """In windows of which most do without most experts, so that it matters which are read again."""
    kind, changes = MANY[name]
    model = make_model(kind, **changes)
    layer = routed_layers(model)[1]
    scored = torch.cat([passages.scored_BP for passages in passages_of(model)])
    whole = torch.stack([loss for loss, _ in token_by_token(model, layer)])
    mean_SD = torch.randn(layer.num_experts, 16, generator=GENERATOR, dtype=torch.float64)
    for how in ("zero", "renormalize", *(() if layer.shares else ("mean", "prune"))):
        action = Action(how=how, mean_SD=mean_SD if how == "mean" else None)
        result = knocked_out(model, layer, range(layer.num_experts), action)
        for expert in range(layer.num_experts):
            removed = Intervention(layer=layer.block, experts=(expert,), how=how)
            with intervened(model, [removed], lambda: {layer.name: mean_SD}):
                without = torch.stack([loss for loss, _ in token_by_token(model, layer)])
            expected = float((without - whole)[scored].mean())
            ours = result.of_all()[expert]
            assert ours == pytest.approx(expected, abs=EXACT), (how, expert)


def test_weights_that_are_not_finite_are_one_line():
    model = make_model("top-1")
    model.final_norm.weight.data[3] = torch.nan
    layer = routed_layers(model)[1]
    with pytest.raises(ConfigError, match=f"{layer.name}: losses are not finite: weights hold"):
        knocked_out(model, layer, [0])


def test_intervals_are_of_windows_and_may_be_below_zero():
    """Every window loses the same, so that no draw differs; or one of two alone changes."""
    classes = {"all": ["all"], "parity": ["even", "odd"]}
    sums = ChangeSums(2, classes, windows=40)
    number_B = torch.arange(40)
    label_JBP = torch.stack([torch.zeros(40, 2), 1 + torch.arange(2).expand(40, 2)]).long()
    own_BP = torch.tensor([[True, False]]).expand(40, 2)
    sums.add_whole(label_JBP, number_B, torch.full((40, 2), 3.0))
    sums.add(label_JBP, number_B, torch.zeros(40).long(), torch.tensor([[-0.5, 0.1]] * 40), own_BP)
    changing = torch.where(number_B % 2 == 0, 1.0, -1.0).unsqueeze(1).expand(40, 2)
    sums.add(label_JBP, number_B, torch.ones(40).long(), changing, own_BP)
    result = sums.result("test")

    def ends(row, by, column, name="change"):
        ours = of_class(result, row, by, column, classes)
        return tuple(ours[f"{name}{end}"] for end in ("", "_low", "_high"))

    assert ends(0, "all", 0) == pytest.approx((-0.2, -0.2, -0.2))
    assert ends(0, "parity", 0) == pytest.approx((-0.5, -0.5, -0.5))
    assert ends(0, "all", 0, "own_change") == pytest.approx((-0.5, -0.5, -0.5))
    value, low, high = ends(1, "all", 0)
    assert value == 0
    # The standard error of a mean of 40 windows of +1 or -1 is 1 / sqrt(40) = 0.158.
    assert (low, high) == pytest.approx((-0.31, 0.31), abs=0.06)
    assert ends(1, "parity", 0, "own_change")[0] == 0
    assert math.isnan(ends(1, "parity", 1, "own_change")[0])
    assert of_class(result, 0, "all", 0, classes)["loss"] == 3.0
