"""`polyad experts atlas`: equal to models that are changed by hand, read window by window."""

import pytest
import torch
from scipy.stats import spearmanr

from polyad.train.experts.information import STATISTICS
from polyad.train.experts.interventions import Intervention, intervened
from polyad.train.experts.probing import deciding, routed_layers
from tests.helpers.runs import atlas, frame_of
from tests.train.measures.test_knockout import LAYER, WINDOWS, losses_of, token_by_token

pytestmark = pytest.mark.distributed
TOKENS = 32 * WINDOWS
SMALL = ("evaluation.batch_size=3",)


@pytest.fixture(scope="module")
def finished(run_of):
    """A run whose weights are so large that tokens are routed apart."""
    experts = {"kind": "smoe", "num_experts": 8, "expert_hidden_size": 16, "placement": [1]}
    return run_of(2, model__feed_forward=experts, model__initializer_range=0.3)


@pytest.fixture(scope="module")
def found(workers, finished):
    options = {"tokens": TOKENS, "overrides": SMALL, "how": "renormalize"}
    return workers(1).run(atlas, finished, **options)[0]


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
@pytest.mark.parametrize("how", ["renormalize", "zero", "mean", "prune"])
def test_changes_are_those_of_one_intervention_after_the_other(
    workers, finished, found, by_hand, how
):
    model, layer, windows, weight_ME, output_MED = by_hand
    result = found
    if how != "renormalize":
        options = {"tokens": TOKENS, "overrides": SMALL, "experts": ["1", "5"]}
        result = workers(1).run(atlas, finished, how=how, **options)[0]
        assert "together" not in result
    used_ME = (weight_ME != 0).double()
    times_E1 = used_ME.sum(0).unsqueeze(1).clamp_min(1)
    mean_ED = torch.einsum("me,med->ed", used_ME, output_MED) / times_E1
    before = mean_loss(model, windows)
    for row in frame_of(result, "experts").to_dict("records"):
        removed = Intervention(layer=1, experts=(row["expert"],), how=how)
        with intervened(model, [removed], lambda: {layer.name: mean_ED}):
            change = mean_loss(model, windows) - before
        assert row["change"] == pytest.approx(change, abs=1e-5)


def test_statistics_are_those_of_each_token(found, by_hand):
    _, layer, _, weight_ME, output_MED = by_hand
    ours = frame_of(found, "experts", module=LAYER)
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
    one, two = (workers(size).run(atlas, finished, **options)[0] for size in (1, 2))
    assert two["experts"] == one["experts"]


def test_correlations_are_scipys(found):
    experts = frame_of(found, "experts", module=LAYER)
    correlations = frame_of(found, "correlations", module=LAYER)
    assert len(correlations) == 2 * len(STATISTICS)
    for ours in correlations.to_dict("records"):
        known = experts.dropna(subset=[ours["target"]])
        rho, p = spearmanr(known[ours["statistic"]], known[ours["target"]])
        assert (ours["rho"], ours["p"]) == pytest.approx((rho, p))
        assert ours["significant"] == (p < 0.05 / len(STATISTICS))
    place = {"statistic": "reap", "target": "change"}
    (reap,) = frame_of(found, "correlations", **place).to_dict("records")
    (told,) = frame_of(found, "predictive", **place).to_dict("records")
    assert (told["significant_in"], told["layers"]) == (int(reap["significant"]), 1)
    assert told["mean_rho"] == pytest.approx(reap["rho"])


def test_sets_are_taken_away_together(found, by_hand):
    model, layer, windows, _, _ = by_hand
    together, sets = (frame_of(found, name) for name in ("together", "sets"))
    of_experts, experts = frame_of(found, "experts"), layer.num_experts
    assert list(together["size"]) == [size for size in (experts // 4, experts // 2) if size > 1]
    before = mean_loss(model, windows)
    for size, of_size in sets.groupby("size"):
        assert list(of_size["chosen_by"]) == [*STATISTICS, *["random"] * 5]
        for each in of_size.to_dict("records"):
            if (name := each["chosen_by"]) != "random":
                lowest = sorted(range(experts), key=lambda expert: of_experts[name][expert])
                assert each["experts"] == sorted(lowest[:size])
            removed = Intervention(layer=1, experts=tuple(each["experts"]), how="renormalize")
            with intervened(model, [removed]):
                change = mean_loss(model, windows) - before
            assert each["change"] == pytest.approx(change, abs=1e-5)
    for each in together.to_dict("records"):
        of_size = sets[sets["size"] == each["size"]].groupby("chosen_by")["change"]
        for name in (*STATISTICS, "random"):
            assert each[name] == pytest.approx(of_size.mean()[name])
        assert each["random_lowest"] == of_size.min()["random"]
