"""`polyad experts probe`: noise tells nothing, a planted unit is found, units are those of a model
read window by window."""

import numpy as np
import pytest
import torch
from torch.nn.functional import gelu

from polyad.launch.cli import run as polyad
from polyad.model.lora import LoRAConfig, add_lora
from polyad.train.experts.ksparse import (
    SHARES,
    Choice,
    Hidden,
    Labelled,
    Parts,
    Place,
    Routes,
    best,
    one_thread,
    probe,
)
from polyad.train.experts.probing import deciding, routed_layers
from polyad.train.experts.token_classes import character_class, labellings
from polyad.train.measures.ksparse import KSparse
from polyad.train.reading import open_evaluated, read
from polyad.train.tasks.samples import TextSamples
from tests.helpers.runs import both_forms, newest
from tests.train.experts.test_interventions import IDS_BT, SPARSE, make_model
from tests.train.measures.test_knockout import WINDOWS, token_by_token

pytestmark = pytest.mark.distributed


def random_parts(chance, sizes, units, planted=None):
    parts = []
    for size in sizes:
        label_N = np.repeat([True, False], [size - size // 2, size // 2])
        hidden_NF = chance.normal(size=(size, units)).astype(np.float32)
        if planted is not None:
            hidden_NF[:, planted] += 9 * label_N
        parts.append(Labelled(hidden_NF, label_N))
    return Parts(*parts)


def test_a_planted_unit_is_found():
    parts = random_parts(np.random.default_rng(0), (40, 20, 20), 64, planted=17)
    found = probe(parts, 3)
    assert found.units[0] == 17
    assert len(found.units) == 3
    assert (found.validation, found.test) == (1, 1)
    assert probe(parts.shuffled(np.random.default_rng(1)), 1).test < 0.8


@pytest.mark.parametrize(
    ("candidates", "low", "high"),
    [(64, 0.66, 0.82), pytest.param(1024, 0.78, 0.85, marks=pytest.mark.slow)],
)
def test_noise_tells_a_class_where_the_best_is_chosen_on_what_it_is_scored_on(
    candidates, low, high
):
    """The best of 1,024 candidates at 100 tokens, 25 of them scored: .815; near .5 otherwise."""
    chance = np.random.default_rng(0)
    with one_thread():
        probes = [probe(random_parts(chance, (50, 25, 25), 256), 1) for _ in range(candidates)]
    assert low < max(each.test for each in probes) < high
    several = [probes[first : first + 16] for first in range(0, candidates, 16)]
    chosen = [each[best(each)].test for each in several]
    assert np.mean([max(one.test for one in each) for each in several]) > 0.6
    assert np.mean(chosen) == pytest.approx(0.5, abs=0.08)


@pytest.mark.parametrize(
    "changes",
    [{}, {"activation": "swiglu"}, {"kind": "emoe"}, {"lora": True}, {"experts": "loop"}],
    ids=str,
)
@torch.no_grad()
def test_inner_units_times_the_second_layer_are_the_output(changes):
    changes = dict(changes)
    lora = changes.pop("lora", False)
    kind = {"kind": "emoe", "num_experts": 8, "top_k": 3} if "kind" in changes else SPARSE | changes
    model = make_model(kind, hidden_size=24, num_layers=1)
    module = model.blocks[0].feed_forward
    if lora:
        add_lora(model, LoRAConfig(rank=2, experts=True))
        for name, parameter in list(model.named_parameters()):
            if parameter.is_meta:
                path, _, last = name.rpartition(".")
                values = torch.randn(parameter.shape, dtype=torch.float64)
                setattr(model.get_submodule(path), last, torch.nn.Parameter(values))
        module = model.blocks[0].feed_forward
    layer = routed_layers(model)[0]
    with deciding(model, [layer]) as decisions:
        kept = []
        module.dispatcher.register_forward_pre_hook(lambda _, arguments: kept.append(arguments[0]))
        model(IDS_BT)
    rows_R, expert = torch.tensor([0, 5, 7]), 4
    inner_RF = module.experts.inner(kept[0][rows_R], expert)
    down_FD = module.experts.stacked().down[expert]
    assert inner_RF.shape == (3, down_FD.shape[0])
    output_RD = inner_RF @ down_FD
    if lora:
        A, B = module.experts.down_lora.matrices()
        output_RD += inner_RF @ A[expert] @ B[expert]
    if module.output_bias is not None and kind["kind"] == "smoe":
        output_RD += module.output_bias[expert]
    theirs_RD = decisions[layer.name].output(0, expert, rows_R)
    torch.testing.assert_close(output_RD, theirs_RD, rtol=0, atol=1e-10)


def test_hidden_units_are_those_of_the_tokens(trained, prepared_path):
    """Hidden units of block 0, which is dense, and of an expert of block 1, window by window."""
    path, names = trained("smoe"), ("blocks.0.feed_forward", "blocks.1.feed_forward")
    model, tokenizer, windows = token_by_token(path, prepared_path)
    opened = open_evaluated(newest(path), None, ())
    text = TextSamples(opened.task, "validation", 32 * WINDOWS)
    places = {
        name: Place(name, experts, torch.zeros(()))
        for name, experts in zip(names, (0, 4), strict=True)
    }
    ways = labellings(text.tokenizer, text.stream, text.length)
    routes = Routes(places, ways, text)
    read(model, routed_layers(model), text, [routes], batch_size=3)
    choice = Choice(places, ways, routes, samples=16, candidates=2, seed=0)
    hidden = Hidden(model, choice.tokens, text)
    with hidden.reading():
        read(model, [], text, [hidden], batch_size=3)
    dense, sparse = (block.feed_forward for block in model.blocks)
    seen, used = {name: [] for name in names}, []
    handles = [
        module.register_forward_pre_hook(
            lambda module, arguments, name=name: seen[name].append(arguments[0][0])
        )
        for name, module in zip(names, (dense, sparse), strict=True)
    ]
    for ids, _ in windows:
        with torch.no_grad(), deciding(model, routed_layers(model)) as decisions:
            model(torch.tensor([ids]))
        used.append(decisions[names[1]].selected.expert_ids_NK)
    for handle in handles:
        handle.remove()
    for name in names:
        some = choice.probes[name, "characters: letters"]
        assert len(some) == (1 if name == names[0] else 2)
        expert, tokens = some[0]
        parts = hidden.parts(name, expert, tokens)
        assert [len(each.label_N) for each in parts] == [8, 4, 4]
        for part, ((token_N, label_N), found) in enumerate(zip(tokens, parts, strict=True)):
            for token, label, row in zip(token_N, label_N, found.hidden_NF, strict=True):
                window, place = divmod(int(token), 32)
                assert part == np.repeat([0, 1, 2], SHARES)[window % 4]
                ids = windows[window][0]
                is_letter = ids[place] != tokenizer.end_of_text_id and (
                    character_class(tokenizer.text_within(ids[place])) == 0
                )
                assert label == is_letter
                x_D = seen[name][window][place]
                if name == names[0]:
                    expected_F = dense.up(x_D)
                else:
                    assert expert in used[window][place].tolist()
                    expected_F = x_D @ sparse.experts.up[expert] + sparse.experts.up_bias[expert]
                expected_F = gelu(expected_F, approximate="tanh").detach().numpy()
                np.testing.assert_allclose(row, expected_F, atol=1e-5)


def test_programs_and_people_are_told_the_best_and_chance(workers, trained):
    options = {"samples": 64, "candidates": 2, "units": ["1", "16"], "tokens": 32 * 100}
    result, text = workers(1).run(both_forms, trained("smoe"), KSparse, **options)[0]
    assert list(result["layers"]) == ["block 0", "block 1"]
    for layer, classes in result["layers"].items():
        for by_k in classes.values():
            assert list(by_k) == ["1", "16"]
            for k, found in by_k.items():
                assert len(found["units"]) == int(k)
                assert found["candidates"] <= (1 if layer == "block 0" else 2)
                assert (found["expert"] is None) == (layer == "block 0")
    # What a token is says every unit; labels that mean nothing say nothing.
    letters = result["layers"]["block 0"]["characters: letters"]["16"]
    assert letters["f1"] > 0.6
    every = [found for classes in result["layers"].values() for found in classes.values()]
    assert np.mean([each["16"]["f1_shuffled"] for each in every]) == pytest.approx(0.5, abs=0.1)
    assert "characters: letters" in text
    assert "F1 on test tokens with k hidden units" in text


def test_what_cannot_be_probed_is_said(capfd, trained):
    for kind, words, said in (
        ("smoe", ["--layers", "7"], "--layers: 7 is not allowed"),
        ("smoe", ["--samples", "9"], "--samples: 9 is not a multiple of 8"),
        ("smoe", ["--units", "1,x"], "--units: 'x' is not a whole number of at least 1"),
        ("smoe", ["--units", "999"], "--units: 999 is more than the"),
        ("cp", [], "no block can be probed"),
    ):
        assert polyad(["experts", "probe", str(trained(kind)), *words]) == 2
        assert said in capfd.readouterr().err
