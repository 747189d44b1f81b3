"""Routing fluctuation: by hand on made-up choices, and in whole runs by any number of processes."""

import math

import pytest
import torch

from polyad.model.smoe.router import Selected
from polyad.parallel.weights import load_model
from polyad.train.experts.fluctuation import Differences, encode, expert_codes
from polyad.train.experts.probing import Decision, RoutedLayer, deciding, routed_layers
from tests.helpers.runs import records, run

pytestmark = pytest.mark.distributed

SMOE = {"kind": "smoe", "num_experts": 4, "expert_hidden_size": 32, "graph": "similarity"}
MEASURES = ("top1", "set", "entropy_ratio")
LAYER = RoutedLayer(name="blocks.0.feed_forward", levels=(4,))


def chosen(ids_MK, scores_ME):
    scores_ME = torch.tensor(scores_ME)
    ids_MK = torch.tensor(ids_MK)
    selected = Selected.of(scores_ME.gather(-1, ids_MK), ids_MK, 4)
    return encode(Decision(levels=[scores_ME], selected=selected))


def differing(now, before):
    result = Differences([LAYER])
    result.add(0, now, before)
    return result.result().iloc[0]


def test_fluctuation_by_hand():
    even, decided = [0.25] * 4, [0.5, 0.5, 0.0, 0.0]
    before = chosen([[0, 1], [0, 1], [2, 3], [3, 1], [1, 2]], [even] * 5)
    # The same; the order alone; another second; another first; both.
    now = chosen([[0, 1], [1, 0], [2, 0], [0, 1], [0, 3]], [decided] * 5)
    result = differing(now, before)
    assert (result.top1, result.set) == (3 / 5, 3 / 5)
    entropies = (result.entropy, result.compared_entropy)
    assert entropies == pytest.approx((math.log(2), math.log(4)))
    assert result.entropy_ratio == pytest.approx(0.5)
    # Another number of experts is another set.
    result = differing(chosen([[0, 1], [2, 3]], [even] * 2), chosen([[0], [2]], [even] * 2))
    assert (result.top1, result.set) == (0, 1)


def test_the_experts_of_a_mumoe_are_its_leaves_and_its_support():
    # Levels of 3 and 2 experts. Top leaves by hand: (1, 0) -> 2, (2, 1) -> 5, (0, 0) -> 0.
    first = [[0.4, 0.6, 0.0], [0.0, 0.0, 1.0], [0.7, 0.2, 0.1]]
    second = [[1.0, 0.0], [0.3, 0.7], [0.5, 0.5]]
    codes_S = expert_codes(5)

    def encoded(first, second):
        levels = [torch.tensor(first), torch.tensor(second)]
        return encode(Decision(levels=levels, selected=None))

    before = encoded(first, second)
    assert before.first_M.tolist() == [2, 5, 0]
    assert before.set_M.tolist() == [
        int(codes_S[used].sum()) for used in ([0, 1, 3], [2, 3, 4], [0, 1, 2, 3, 4])
    ]
    nats = -0.4 * math.log(0.4) - 0.6 * math.log(0.6)
    assert before.entropy_M[0].item() == pytest.approx(nats)
    # Another leaf of the same support; another support with the same leaf; nothing.
    now = encoded([[0.6, 0.4, 0.0], *first[1:]], [second[0], [0.0, 1.0], second[2]])
    result = differing(now, before)
    assert (result.top1, result.set) == pytest.approx((1 / 3, 1 / 3))


def test_codes_of_sets_are_different():
    codes_S = expert_codes(64)
    pairs = torch.combinations(torch.arange(64))
    sums = codes_S[pairs].sum(-1).tolist() + codes_S.tolist() + [0]
    assert len(set(sums)) == len(sums)


# Windows that neither the batch size nor the processes divide.
RUN_CHANGES = {
    "model__feed_forward": SMOE, "checkpoint__every": 2, "evaluation__batch_size": 2,
    "log": {"fluctuation": True, "fluctuation_tokens": 32 * 11}, "optimizer__learning_rate": 0.002,
}  # fmt: skip


def fluctuation_of(record):
    names = [name for name in record if name.startswith("fluctuation/")]
    return {name: record[name] for name in names if name != "fluctuation/seconds"}


@pytest.fixture(scope="module")
def one_process(run_of):
    return run_of(**RUN_CHANGES)


def test_every_checkpoint_but_the_first_has_a_record(one_process):
    lines = records(one_process)
    assert [bool(fluctuation_of(line)) for line in lines] == [False] * 3 + [True, False, True]
    assert [line["step"] for line in lines if "fluctuation/seconds" in line] == [2, 4, 6]
    layers = [f"blocks.{block}.feed_forward" for block in (0, 1)]
    for line in (lines[3], lines[5]):
        values = fluctuation_of(line)
        assert len(values) == 3 * len(MEASURES)
        for measure in MEASURES:
            each = [values[f"fluctuation/{layer}/{measure}"] for layer in layers]
            assert values[f"fluctuation/{measure}"] == pytest.approx(sum(each) / 2)
        # At this learning rate some tokens change, and not all; with more, one expert has all.
        assert 0 < values["fluctuation/top1"] < 1
        assert 0 < values["fluctuation/set"] < 1


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{}, {"expert": 2}, {"tensor": 2}])
def test_two_processes_log_what_one_logs(run_of, one_process, layout):
    sizes = {f"parallel__{name}_parallel_size": size for name, size in layout.items()}
    two_processes = run_of(2, **RUN_CHANGES | sizes)
    for ours, theirs in zip(records(two_processes), records(one_process), strict=True):
        # Rounding may turn a token that stands between two experts.
        assert fluctuation_of(ours) == pytest.approx(fluctuation_of(theirs), abs=3 / 350)


@pytest.mark.slow
def test_a_run_that_goes_on_compares_with_the_checkpoint_it_goes_on_from(
    workers, one_process, config
):
    for words in (["train.steps=4"], []):
        workers(1).run(run, config, *words)
    ours, theirs = (records(folder) for folder in (config.parent / "run", one_process))
    assert list(map(fluctuation_of, ours)) == list(map(fluctuation_of, theirs))


def test_logging_changes_nothing_else(run_of, one_process):
    lines = records(run_of(**RUN_CHANGES | {"log": {}}))
    assert not any("fluctuation/seconds" in line for line in lines)
    assert [line["loss"] for line in lines] == [line["loss"] for line in records(one_process)]


@pytest.mark.slow
def test_compiled_blocks_are_read_too(one_process):
    model = load_model(one_process)
    layers, codes = routed_layers(model), []
    for compiled in (False, True):
        for block in model.blocks if compiled else ():
            block.compile(backend="eager")  # what traces a block, without what writes code
        with torch.no_grad():
            model(torch.arange(64).view(2, 32))  # makes a program that knows of no hook
            with deciding(model, layers) as decisions:
                model(torch.arange(64).view(2, 32))
        codes.append([encode(decisions[layer.name]) for layer in layers])
    for ours, theirs in zip(*codes, strict=True):
        assert all(map(torch.equal, ours, theirs))
