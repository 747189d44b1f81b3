"""Steering: routing moves to the expert, nothing moves at strength 0, and what is refused."""

import json
from itertools import pairwise

import pytest
import torch

from polyad.launch.cli import run as polyad
from polyad.model.build import build_model, materialize
from polyad.model.decoder_config import GPT2Config
from polyad.model.mumoe.config import FACTORIZATIONS
from polyad.model.smoe.router import SCORES
from polyad.train.errors import ConfigError
from polyad.train.evaluation.generate import Sampling, generate_ids
from polyad.train.experts.steering import (
    Steering,
    gate_column,
    loads_of,
    parse_steering,
    steered,
)
from tests.helpers.everyday import everyday

DRAWN = Sampling(temperature=2.0, seed=3)
LEVELS = [6, 3]
KINDS = {
    f"{name}, {gate_input}": {
        "kind": "mumoe", "factorization": name, "num_experts": LEVELS, "gate_input": gate_input,
    }
    for name in FACTORIZATIONS
    for gate_input in ("residual", "normalized")
} | {
    f"sparse, {score}": {"kind": "smoe", "num_experts": 6, "expert_hidden_size": 16, "score": score}
    for score in SCORES
}  # fmt: skip
every_kind = pytest.mark.parametrize("section", KINDS.values(), ids=KINDS)
each_kind_once = everyday(
    "section",
    KINDS.values(),
    keep=["cp, residual", "tr, normalized", "sparse, cosine"],
    ids=KINDS,
)
IDS = torch.arange(32).view(2, 16) % 61


def make_model(dtype=torch.float64, **section):
    """Three blocks away from their initial values, their gates further than the rest."""
    sizes = {"num_layers": 3, "hidden_size": 32, "num_heads": 4, "sequence_length": 16}
    model = build_model(GPT2Config(**sizes, vocab_size=61, feed_forward=section))
    materialize(model, seed=0, dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.numel() > 1:
                noise = torch.randn(parameter.shape, generator=generator).to(dtype)
                scores = "gate." in name or ".score." in name
                parameter.add_(noise, alpha=0.3 if scores else 0.1)
    return model.eval()


def load_of(model, layer, expert, *steerings):
    """The load of an expert in a block, on tokens that are always the same."""
    with torch.no_grad(), steered(model, steerings):
        return model(IDS).routing[layer].load_E[expert].item()


@every_kind
@pytest.mark.parametrize("expert", [0, 4])
def test_routing_moves_to_the_expert_the_more_the_stronger(section, expert):
    model = make_model(**section)
    loads = [
        load_of(model, 1, expert, Steering(layer=1, expert=expert, strength=strength))
        for strength in (0.0, 1.0, 2.0, 4.0, 8.0)
    ]
    # Where nearly every token has it, the last thousandth depends on the tokens.
    assert all(more > less - 1e-3 for less, more in pairwise(loads)), loads
    assert loads[-1] > loads[0]
    # A sparse mixture gives it at most one of each token's two choices.
    assert loads[-1] > (0.49 if section["kind"] == "smoe" else 0.9), loads
    away = load_of(model, 1, expert, Steering(layer=1, expert=expert, strength=-4.0))
    assert away < loads[0]


def test_every_level_of_a_hierarchy_has_its_own_columns():
    model = make_model(kind="mumoe", num_experts=LEVELS)
    gate, seen = model.blocks[1].feed_forward.gate, []
    gate.register_forward_hook(lambda module, args, gated: seen.append(gated.coefficients[1]))
    for strength in (0.0, 2.0, 8.0):
        load_of(model, 1, 0, Steering(layer=1, level=1, expert=2, strength=strength))
    means = [coefficients.mean(0)[2].item() for coefficients in seen]
    assert means == sorted(means)
    assert means[-1] > means[0] + 0.2
    column = gate_column(model, Steering(layer=1, level=1, expert=2, strength=1.0))
    assert torch.equal(column, gate.weight[6 + 2])


def test_scores_rise_by_what_the_gate_says_by_hand():
    # The gate reads the residual stream: with attention and its output silenced, that is x + 3 g.
    model = make_model(kind="mumoe", num_experts=[6])
    block, scores = model.blocks[1], []
    torch.nn.init.zeros_(block.attention.projection.weight)
    torch.nn.init.zeros_(block.attention.projection.bias)
    block.feed_forward.gate.norm.register_forward_hook(
        lambda module, args, normalized: scores.append(args[0])
    )
    for strength in (0.0, 3.0):
        load_of(model, 1, 0, Steering(layer=1, expert=2, strength=strength))
    weight_ND = block.feed_forward.gate.weight.detach()
    expected_N = 3 * weight_ND @ weight_ND[2]  # |g|^2 three times for expert 2 itself
    difference_MN = scores[1] - scores[0]
    torch.testing.assert_close(difference_MN, expected_N.expand_as(difference_MN))


@every_kind
def test_only_the_steered_block_and_those_after_it_change(section):
    model = make_model(**section)
    with torch.no_grad():
        before = model(IDS)
        with steered(model, [Steering(layer=1, expert=2, strength=4.0)]):
            during = model(IDS)
        after = model(IDS)
    assert torch.equal(during.routing[0].load_E, before.routing[0].load_E)
    assert not torch.equal(during.routing[1].load_E, before.routing[1].load_E)
    assert not torch.equal(during.logits, before.logits)
    assert torch.equal(after.logits, before.logits)
    assert not any(block._forward_pre_hooks for block in model.blocks)


@each_kind_once
@everyday("dtype", [torch.float32, torch.bfloat16], keep=[torch.bfloat16])
def test_strength_0_changes_not_a_bit(section, dtype):
    model = make_model(dtype=dtype, **section)
    nothing = [Steering(layer=layer, expert=3, strength=0.0) for layer in range(3)]
    with torch.no_grad():
        expected = model(IDS).logits
        with steered(model, nothing):
            assert torch.equal(model(IDS).logits, expected)
    tokens = list(generate_ids(model, [3, 4], max_tokens=30, sampling=DRAWN))
    with steered(model, nothing):
        again = list(generate_ids(model, [3, 4], max_tokens=30, sampling=DRAWN))
    assert again == tokens


@each_kind_once
def test_a_cache_changes_no_token_of_steered_text(section):
    # 40 tokens of a window of 16: it slides, and the steered prompt is read again.
    model = make_model(dtype=torch.float32, **section)
    steering = Steering(layer=1, expert=4, strength=3.0)
    with steered(model, [steering]):
        cached, plain = (
            list(generate_ids(model, [5, 6, 7], max_tokens=40, sampling=DRAWN, use_cache=use_cache))
            for use_cache in (True, False)
        )
    assert cached == plain
    free = list(generate_ids(model, [5, 6, 7], max_tokens=40, sampling=DRAWN))
    assert free != cached


def test_steerings_of_one_block_are_summed_and_others_stand_beside():
    model = make_model(kind="mumoe", num_experts=[6])
    one, two = (Steering(layer=1, expert=2, strength=strength) for strength in (1.5, 2.5))
    there = Steering(layer=0, expert=1, strength=5.0)
    both = load_of(model, 1, 2, one, there, two)
    assert both == pytest.approx(
        load_of(model, 1, 2, there, Steering(layer=1, expert=2, strength=4.0)), abs=1e-12
    )
    assert both != pytest.approx(load_of(model, 1, 2, one, two), abs=1e-6)


def test_the_effect_is_what_two_passes_say():
    model = make_model(kind="mumoe", num_experts=LEVELS)
    steerings = [
        Steering(layer=1, expert=2, strength=4.0),
        Steering(layer=2, level=1, expert=0, strength=1.0),
    ]
    ids = list(range(16))
    first, second = loads_of(model, steerings, ids)
    with torch.no_grad():
        before = model(torch.tensor([ids])).routing
        with steered(model, steerings):
            after = model(torch.tensor([ids])).routing
    load, unsteered = after[1].load_E[2].item(), before[1].load_E[2].item()
    weight = model.blocks[1].feed_forward.gate.weight
    assert (first.load, first.load_unsteered) == (load, unsteered)
    assert first.column_length == pytest.approx(weight[2].norm().item())
    inside = LEVELS[0]  # the second level's experts come after those of the first
    assert second.to_json()["level"] == 1
    assert second.load == after[2].load_E[inside].item()
    assert second.load_unsteered == before[2].load_E[inside].item()
    lines = [str(first), str(second)]
    assert lines[0].startswith("steered: layer 1, expert 2: 4 times its gate's column, of length")
    assert lines[0].endswith(f"load on these tokens {load:.3f}, without {unsteered:.3f}")
    assert "layer 2, level 1, expert 0: 1 times" in lines[1]
    assert lines[1].endswith(f"{second.load:.3f}, without {second.load_unsteered:.3f}")


def test_a_command_line_is_read():
    steering = parse_steering("layer=5,expert=37,strength=8")
    assert steering == Steering(layer=5, expert=37, strength=8.0)
    assert str(steering) == "layer=5,expert=37,strength=8"
    steering = parse_steering(" strength = -0.5, level=1 ,expert=0,layer=2")
    assert steering == Steering(layer=2, level=1, expert=0, strength=-0.5)
    assert parse_steering(str(steering)) == steering


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["key=value", "layer=N,expert=N,strength=X"]),
        ("5,37,8", ["'5' is not key=value"]),
        ("layer=1,expert=2", ["strength is missing", "layer=N"]),
        ("expert=2,strength=1", ["layer is missing"]),
        ("layer=1,strength=1", ["expert is missing"]),
        ("layr=1,expert=2,strength=1", ["unknown key 'layr'", "nearest is layer"]),
        ("layer=1,expert=2,strength=1,x=3", ["unknown key 'x'"]),
        ("layer=1,layer=1,expert=2,strength=1", ["layer is given twice"]),
        ("layer=-1,expert=2,strength=1", ["layer: '-1'", "whole number"]),
        ("layer=1,expert=2.5,strength=1", ["expert: '2.5'", "whole number"]),
        ("layer=1,expert=2,strength=much", ["strength: 'much'", "finite number"]),
        ("layer=1,expert=2,strength=nan", ["strength: 'nan'", "finite number"]),
        ("layer=1,expert=2,strength=-inf", ["strength: '-inf'", "finite number"]),
        ("layer=1,expert=2,strength=", ["strength: ''", "finite number"]),
    ],
)
def test_a_wrong_command_line_is_one_line_before_anything_is_read(text, words, capfd):
    assert polyad(["generate", "nowhere", "--prompt", "x", "--steer", text]) == 2
    captured = capfd.readouterr()
    (line,) = captured.err.splitlines()
    assert captured.out == ""
    assert all(word in line for word in [f"--steer {text}: ", *words]), line


HIERARCHY = {"kind": "mumoe", "num_experts": LEVELS}
SECOND = {"kind": "smoe", "num_experts": 6, "expert_hidden_size": 16, "placement": [1]}


@pytest.mark.parametrize(
    ("section", "place", "words"),
    [
        ({"kind": "dense"}, (0, 0, 0), "the model is dense: no layer has experts"),
        (SECOND, (0, 0, 0), "layer 0 is dense; with experts: 1"),
        (SECOND, (1, 0, 6), "expert 6: layer 1 has 0 to 5"),
        (SECOND, (1, 1, 0), "level 1: layer 1 has 0 alone"),
        (SECOND, (3, 0, 0), "layer 3: the model has 0 to 2"),
        (HIERARCHY, (0, 0, 6), "expert 6: level 0 of layer 0 has 0 to 5"),
        (HIERARCHY, (0, 1, 3), "expert 3: level 1 of layer 0 has 0 to 2"),
        (HIERARCHY, (2, 2, 0), "level 2: layer 2 has 0 to 1"),
    ],
)
def test_what_the_model_does_not_have_is_refused(section, place, words):
    model = make_model(**section)
    layer, level, expert = place
    steering = Steering(layer=layer, level=level, expert=expert, strength=1.0)
    with pytest.raises(ConfigError) as caught, steered(model, [steering]):
        raise AssertionError("it was accepted")
    assert str(caught.value) == f"--steer {steering}: {words}"
    assert caught.value.exit_status == 2


@pytest.mark.distributed
@everyday("kind", ["smoe", "cp", "tr"], keep=[])
def test_the_command_says_what_it_steered(trained, kind, capfd):
    layer = 1  # of the sparse one, the only block with experts
    command = ["generate", str(trained(kind)), "--prompt", "def ", "--max-tokens", "20"]

    def said(*asked):
        flags = [f"--steer=layer={layer},expert={e},strength={strength}" for e, strength in asked]
        assert polyad([*command, *flags, "--json", "-"]) == 0
        captured = capfd.readouterr()
        return json.loads(captured.out), captured.err

    plain, quiet = said()
    assert plain["steering"] == []
    assert "steered" not in quiet
    nothing, _ = said(*((expert, 0) for expert in range(4)))
    assert nothing["token_ids"] == plain["token_ids"]
    loads = [one["load_unsteered"] for one in nothing["steering"]]
    assert [one["load"] for one in nothing["steering"]] == loads
    idle = loads.index(min(loads))  # one that has room to gain
    strong, told = said((idle, 100), (idle, 300))
    for one, strength in zip(strong["steering"], (100, 300), strict=True):
        assert (one["layer"], one["level"], one["expert"]) == (layer, 0, idle)
        assert one["strength"] == strength
        assert one["load"] > one["load_unsteered"]
    assert told.count(f"steered: layer 1, expert {idle}: ") == 2
    assert polyad([*command, "--steer", "layer=9,expert=3,strength=1"]) == 2
    captured = capfd.readouterr()
    assert captured.out == ""  # not even the prompt
    assert "layer 9: the model has 0 to 1" in captured.err
