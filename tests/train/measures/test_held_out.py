"""`polyad.load(...).read(...)`: tables beside those of commands, and of models changed by hand."""

import numpy as np
import pandas as pd
import pytest
import torch
from torch.nn.functional import cross_entropy

import polyad
from polyad.train.errors import ConfigError
from polyad.train.measures.trace import Trace
from tests.helpers.prepared import windows_of
from tests.helpers.runs import both_forms

pytestmark = pytest.mark.distributed
TOKENS = 32 * 40


@pytest.fixture(scope="module")
def run(trained):
    return polyad.load(trained("smoe"))


@pytest.fixture(scope="module")
def text(run):
    return run.read(tokens=TOKENS)


@pytest.fixture(scope="module")
def trace(text):
    return text.trace("score", "norm", "loss")


def test_a_trace_is_that_of_the_command(trained, trace, tmp_path):
    path = tmp_path / "t.parquet"
    extra = ["score", "norm", "loss"]
    both_forms(trained("smoe"), Trace, output=path, extra=extra, tokens=TOKENS)
    order = ["window", "position", "layer", "slot"]
    both = (each.sort_values(order, ignore_index=True) for each in (trace, pd.read_parquet(path)))
    pd.testing.assert_frame_equal(*both, check_categorical=False, rtol=1e-4)


@pytest.mark.slow
def test_losses_are_those_that_are_evaluated(run):
    table = run.read(tokens=10**9).losses()
    scores = run.evaluate()
    assert len(table) == scores["tokens_scored"]
    assert table["loss"].mean() == pytest.approx(scores["loss"], rel=1e-6)
    with run.intervened("layer=1,expert=0+1,how=prune"):
        pruned = run.evaluate()["loss"]
        assert run.read(tokens=10**9).losses()["loss"].mean() == pytest.approx(pruned, rel=1e-6)
        assert set(run.read(tokens=TOKENS).trace()["expert"]) == {2, 3}
    assert abs(pruned - scores["loss"]) > 1e-4
    assert run.evaluate()["loss"] == scores["loss"]


def test_statistics_are_means_over_a_trace(text, trace):
    statistics = text.statistics().set_index("expert")
    groups = trace.assign(both=trace["weight"] * trace["norm"]).groupby("expert")
    tokens = len(trace) / 2
    for name, values in {
        "frequency": groups.size() / tokens,
        "mean_weight": groups["weight"].mean(),
        "mean_norm": groups["norm"].mean(),
        "reap": groups["both"].mean(),
    }.items():
        values = values.reindex(range(4), fill_value=0)
        np.testing.assert_allclose(statistics[name], values, rtol=1e-4, err_msg=name)
    assert statistics["probability"].sum() == pytest.approx(1)
    # A token's two experts have the largest of its scores.
    scores = groups["score"].sum().reindex(range(4), fill_value=0)
    assert (statistics["probability"] * tokens >= scores - 1e-3).all()


def test_an_expert_is_removed_at_its_token_alone(run, text, trace, prepared_path):
    rows = trace[trace["loss"].notna()].iloc[[0, 7, 101, 102, 900, 901]]
    result = text.without(rows)
    selection = run.model.blocks[1].feed_forward.router.selection
    windows = windows_of(prepared_path)
    for row, ours in zip(rows.itertuples(), result, strict=True):
        read, after = windows[row.window]

        def without(module, arguments, output, row=row):
            weights_NK = output.weights_NK.clone()
            weights_NK[row.position, row.slot] = 0
            return output._replace(weights_NK=weights_NK)

        handle = selection.register_forward_hook(without)
        with torch.no_grad():
            logits_TV = run.model(torch.tensor([read])).logits[0]
        handle.remove()
        loss = cross_entropy(logits_TV[row.position], torch.tensor(after[row.position]))
        assert ours == pytest.approx(float(loss), abs=1e-5)
        assert abs(ours - row.loss) > 1e-6


def test_hidden_units_are_those_of_the_tokens(run, text, trace, prepared_path):
    rows = trace.iloc[[3, 500, 20, 21]]  # in any order
    result = text.hidden(rows)
    module = run.model.blocks[1].feed_forward
    up_EDF, windows = module.experts.stacked().up, windows_of(prepared_path)
    for row, ours in zip(rows.itertuples(), result, strict=True):
        seen = []
        handle = module.register_forward_pre_hook(lambda _, u, seen=seen: seen.append(u[0]))
        with torch.no_grad():
            run.model(torch.tensor([windows[row.window][0]]))
        handle.remove()
        inner = seen[0][0, row.position] @ up_EDF[row.expert] + module.experts.up_bias[row.expert]
        expected = torch.nn.functional.gelu(inner, approximate="tanh").detach().numpy()
        np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-5)


def test_classes_are_of_the_tokens_that_are_read(run, text):
    table = text.classes()
    assert len(table) == len(text.losses())
    for row in table.iloc[::97].itertuples():
        first = run.tokenizer.text_within(row.token_id).strip()[:1]
        assert (row.characters == "letters") == first.isalpha()
        low, _, high = row.place.partition(" to ")
        assert int(low) <= row.position <= int(high)
    assert table["frequency"].cat.categories[0] == "most frequent eighth"


def test_what_does_not_fit_is_one_line(run, text, trained):
    factorized = polyad.load(trained("cp")).read(tokens=TOKENS)
    for call, part in (
        (lambda: text.trace("size"), "trace: size"),
        (lambda: run.intervened("layer=7,expert=0").__enter__(), "layer: 7"),
        (lambda: factorized.hidden(factorized.trace()), "hidden: block 0 is not allowed"),
    ):
        with pytest.raises(ConfigError, match=part):
            call()
