"""`polyad experts atlas`: equal to models that are changed by hand, read window by window."""

import pandas as pd
import pytest
import torch
from scipy.stats import spearmanr

from polyad.launch.cli import run as polyad
from polyad.train.experts.interventions import Intervention, intervened
from polyad.train.experts.moments import STATISTICS
from polyad.train.experts.probing import deciding, routed_layers
from polyad.train.measures.atlas import Atlas
from tests.helpers.runs import both_forms, evaluation, frame_of, run, write_config
from tests.train.measures.test_knockout import LAYER, WINDOWS, losses_of, token_by_token

pytestmark = pytest.mark.distributed
TOKENS = 32 * WINDOWS
SMALL = ("evaluation.batch_size=3",)


def atlas(path, **options):
    return both_forms(path, Atlas, **options)


@pytest.fixture(scope="module")
def finished(workers, prepared_path, tmp_path_factory):
    """A run whose weights are so large that tokens are routed apart."""
    folder = tmp_path_factory.mktemp("atlas")
    experts = {"kind": "smoe", "num_experts": 8, "expert_hidden_size": 16, "placement": [1]}
    changes = {"model__feed_forward": experts, "model__initializer_range": 0.3}
    config = write_config(folder / "config.yaml", prepared_path, **changes)
    workers(2).run(run, config)
    return folder / "run"


@pytest.fixture(scope="module")
def found(workers, finished):
    """With one process and with two."""
    options = {"tokens": TOKENS, "overrides": SMALL, "how": "route-around"}
    return [workers(size).run(atlas, finished, **options)[0] for size in (1, 2)]


@pytest.fixture(scope="module")
def by_hand(finished, prepared_path):
    """The model, what it makes of each window, and the decisions of its layer."""
    model, _, windows = token_by_token(finished, prepared_path)
    (layer,) = routed_layers(model)
    decisions, outputs = [], []
    with deciding(model, [layer]) as seen, torch.no_grad():
        for read, _ in windows:
            model(torch.tensor([read]))
            decision = seen[layer.name]
            decisions.append(decision.coefficients())
            rows = torch.arange(len(read))
            each = [decision.output(0, expert, rows) for expert in range(layer.num_experts)]
            outputs.append(torch.stack(each, 1))
    # The first token of all is the end of text before the split; it is read and scored, too.
    return model, layer, windows, torch.cat(decisions).double(), torch.cat(outputs).double()


def mean_loss(model, windows):
    return float(torch.cat([nats for nats, _ in losses_of(model, windows)]).mean())


@pytest.mark.slow
def test_changes_are_those_of_one_intervention_after_the_other(found, by_hand):
    model, layer, windows, _, _ = by_hand
    values = frame_of(found[0][0], "experts")["change"]
    before = mean_loss(model, windows)
    for expert in range(layer.num_experts):
        removed = Intervention(layer=1, experts=(expert,), how="route-around")
        with intervened(model, [removed]):
            change = mean_loss(model, windows) - before
        assert values[expert] == pytest.approx(change, abs=1e-5)


def test_statistics_are_those_of_each_token(found, by_hand):
    _, layer, _, weight_ME, output_MED = by_hand
    ours = frame_of(found[0][0], "experts", module=LAYER)
    norm_ME = output_MED.norm(dim=-1)
    for expert in range(layer.num_experts):
        used_M = weight_ME[:, expert] != 0
        if not used_M.any():
            assert all(ours[name][expert] == 0 for name in STATISTICS)
            continue
        g, f, n = (x[used_M, expert] for x in (weight_ME, output_MED, norm_ME))
        theirs = {
            "frequency": used_M.double().mean(),
            "mean_weight": g.mean(),
            "mean_norm": n.mean(),
            "sum_norm": n.sum(),
            "reap": (g * n).mean(),
            "mone": f.std(0, correction=0).norm() * g.mean(),
        }
        for name, value in theirs.items():
            assert ours[name][expert] == pytest.approx(float(value), rel=1e-4), name


def test_a_process_without_a_window_adds_nothing(workers, finished):
    options = {"tokens": 32, "how": "mean"}
    one, two = (workers(size).run(atlas, finished, **options)[0][0] for size in (1, 2))
    assert two["experts"] == one["experts"]


def test_correlations_are_scipys(found):
    experts = frame_of(found[0][0], "experts", module=LAYER)
    correlations = frame_of(found[0][0], "correlations", module=LAYER)
    assert len(correlations) == 2 * len(STATISTICS)
    for ours in correlations.to_dict("records"):
        known = experts.dropna(subset=[ours["target"]])
        rho, p = spearmanr(known[ours["statistic"]], known[ours["target"]])
        assert (ours["rho"], ours["p"]) == pytest.approx((rho, p))
        assert ours["significant"] == (p < 0.05 / len(STATISTICS))
    (told,) = frame_of(found[0][0], "predictive", statistic="reap", target="change").to_dict(
        "records"
    )
    (reap,) = frame_of(found[0][0], "correlations", statistic="reap", target="change").to_dict(
        "records"
    )
    assert (told["significant_in"], told["layers"]) == (int(reap["significant"]), 1)
    assert told["mean_rho"] == pytest.approx(reap["rho"])


def test_sets_are_taken_away_together(found, by_hand):
    model, layer, windows, _, _ = by_hand
    together, sets = (frame_of(found[0][0], name) for name in ("together", "sets"))
    of_experts, experts = frame_of(found[0][0], "experts"), layer.num_experts
    assert list(together["size"]) == [size for size in (experts // 4, experts // 2) if size > 1]
    before = mean_loss(model, windows)
    for size, of_size in sets.groupby("size"):
        assert list(of_size["chosen_by"]) == [*STATISTICS, *["random"] * 5]
        for each in of_size.to_dict("records"):
            if (name := each["chosen_by"]) != "random":
                lowest = sorted(range(experts), key=lambda expert: of_experts[name][expert])
                assert each["experts"] == sorted(lowest[:size])
            removed = Intervention(layer=1, experts=tuple(each["experts"]), how="route-around")
            with intervened(model, [removed]):
                change = mean_loss(model, windows) - before
            assert each["change"] == pytest.approx(change, abs=1e-5)
    for each in together.to_dict("records"):
        of_size = sets[sets["size"] == each["size"]].groupby("chosen_by")["change"]
        for name in (*STATISTICS, "random"):
            assert each[name] == pytest.approx(of_size.mean()[name])
        assert each["random_lowest"] == of_size.min()["random"]


def test_two_processes_give_what_one_gives(found):
    one, two = (each[0] for each in found)
    assert one["loss"] == pytest.approx(two["loss"], abs=1e-6)
    ours, theirs = (frame_of(each, "experts") for each in (one, two))
    statistics = list(STATISTICS)
    pd.testing.assert_frame_equal(ours[statistics], theirs[statistics], rtol=1e-5)
    assert found[0][1].count("\n") == found[1][1].count("\n")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["contribution", "mean", "prune"])
def test_every_way_to_take_away_is_that_of_the_model_itself(how, workers, finished):
    """Beside the loss that `evaluate` finds of all tokens under the same intervention."""
    result = workers(1).run(atlas, finished, overrides=SMALL, how=how, experts=["5"])[0][0]
    changes = [Intervention(layer=1, experts=(5,), how=how)]
    before, after = (
        workers(1).run(evaluation, finished, overrides=SMALL, interventions=each)[0]
        for each in ([], changes)
    )
    (change,) = frame_of(result, "experts", module=LAYER)["change"]
    assert after["interventions"] == [{"layer": 1, "experts": [5], "how": how}]
    assert "together" not in result
    # The atlas reads the end of text before the first token, and each window by itself.
    assert change == pytest.approx(after["loss"] - before["loss"], abs=2e-2)
    assert change != 0


def test_what_is_not_allowed_is_said(capfd, finished):
    for words, message in (
        (["--layers", "0"], "--layers: 0 is not allowed: blocks with experts are 1"),
        (["--how", "kill"], "--how"),
    ):
        status = polyad(["experts", "atlas", str(finished), *words])
        assert status == 2
        assert message in capfd.readouterr().err
