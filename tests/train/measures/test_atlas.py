"""`polyad experts atlas`: equal to models that are changed by hand, read window by window."""

import copy

import pytest
import torch
from scipy.stats import spearmanr

from polyad.data.text.dataset import PreparedData
from polyad.launch.cli import run as polyad
from polyad.train.experts.actions import Action, intervening
from polyad.train.experts.interventions import Intervention, intervened
from polyad.train.experts.knockout import Paired
from polyad.train.experts.moments import STATISTICS
from polyad.train.experts.probing import deciding, routed_layers
from polyad.train.measures.atlas import Atlas
from tests.helpers.runs import both_forms, evaluation, run, write_config
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
    options = {"tokens": TOKENS, "overrides": SMALL, "how": "route-around", "unembed": 4}
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
    values = found[0][0]["layers"][LAYER]["by"]["all"]["change"]["value"]
    before = mean_loss(model, windows)
    for expert in range(layer.num_experts):
        asked = Intervention(layer=1, experts=(expert,), action=Action(how="route-around"))
        with intervened(model, [asked]):
            change = mean_loss(model, windows) - before
        assert values[expert][0] == pytest.approx(change, abs=1e-5)


def test_statistics_are_those_of_each_token(found, by_hand):
    _, layer, _, weight_ME, output_MED = by_hand
    ours = found[0][0]["layers"][LAYER]["statistics"]
    assert list(ours) == list(STATISTICS)
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
    asked = {"tokens": 32, "how": "mean"}
    one, two = (workers(size).run(atlas, finished, **asked)[0][0] for size in (1, 2))
    for name, layer in one["layers"].items():
        assert two["layers"][name]["statistics"] == layer["statistics"]
        assert two["layers"][name]["by"]["all"] == layer["by"]["all"]


def test_correlations_are_scipys(found):
    layer = found[0][0]["layers"][LAYER]
    for name, both in layer["correlations"].items():
        for target, ours in both.items():
            change = [row[0] for row in layer["by"]["all"][target]["value"]]
            pairs = zip(layer["statistics"][name], change, strict=True)
            rho, p = spearmanr(*zip(*(pair for pair in pairs if pair[1] is not None), strict=True))
            assert (ours["rho"], ours["p"]) == pytest.approx((rho, p))
    told = found[0][0]["predicting"]["reap"]["change"]
    p = layer["correlations"]["reap"]["change"]["p"]
    assert told == {"layers": int(p < found[0][0]["threshold"]), "of": 1}
    assert found[0][0]["threshold"] == pytest.approx(0.05 / len(STATISTICS))


def test_sets_are_taken_away_together(found, by_hand):
    model, layer, windows, _, _ = by_hand
    ours = found[0][0]["layers"][LAYER]
    experts = layer.num_experts
    assert [each["size"] for each in ours["together"]] == [
        size for size in (experts // 4, experts // 2) if size > 1
    ]
    before = mean_loss(model, windows)
    for each in ours["together"]:
        assert len(each["at_random"]) == 5
        for name, change in each["lowest"].items():
            statistic = ours["statistics"][name]
            lowest = sorted(range(experts), key=lambda expert: statistic[expert])[: each["size"]]
            asked = Intervention(layer=1, experts=tuple(lowest), action=Action(how="route-around"))
            with intervened(model, [asked]):
                assert change == pytest.approx(mean_loss(model, windows) - before, abs=1e-5)


@torch.no_grad()
def test_tokens_that_an_expert_raises_are_those_of_its_mean_output_alone(
    found, by_hand, prepared_path
):
    """Logits of the final norm and the head, where nothing else is in the residual stream."""
    model, layer, _, weight_ME, output_MED = by_hand
    tokenizer = PreparedData.open(prepared_path).tokenizer()
    ours = found[0][0]["layers"][LAYER]["unembedded"]
    model = copy.deepcopy(model)
    model.final_norm.bias.zero_()
    for expert in range(layer.num_experts):
        used_M = weight_ME[:, expert] != 0
        if not used_M.any():
            assert ours[expert] == []
            continue
        mean_D = output_MED[used_M, expert].mean(0).float()
        logits_V = model.score(1e3 * mean_D.view(1, 1, -1)).flatten()
        effect_V = (logits_V - logits_V.mean()) / logits_V.std()
        best = effect_V.topk(4)
        assert [each["token"] for each in ours[expert]] == best.indices.tolist()
        assert [each["effect"] for each in ours[expert]] == pytest.approx(
            best.values.tolist(), rel=1e-3
        )
        for each in ours[expert]:
            assert each["text"] in (
                tokenizer.text_within(each["token"]), tokenizer.decode([each["token"]])
            )  # fmt: skip
    assert "promotes most, in standard deviations" in found[0][1]


def test_two_processes_give_what_one_gives(found):
    one, two = (each[0] for each in found)
    assert one["loss"] == pytest.approx(two["loss"], abs=1e-6)
    for name, values in one["layers"][LAYER]["statistics"].items():
        assert values == pytest.approx(two["layers"][LAYER]["statistics"][name], rel=1e-5)
    pairs = list(zip(*(each["layers"][LAYER]["paired"] for each in (one, two)), strict=True))
    assert any(a is not None for a, _ in pairs)
    for a, b in pairs:
        assert a == b if a is None else a == pytest.approx(b, rel=1e-3, abs=1e-6)
    assert found[0][1].count("\n") == found[1][1].count("\n")


def test_people_are_told_whether_statistics_predict(found):
    text = found[0][1]
    assert "rank correlation of each statistic with the change in loss over all tokens" in text
    assert "predictive in" in text
    assert "without several experts at once" in text
    raised = text.index("tokens that each expert's mean output promotes")
    assert max(map(len, text[:raised].splitlines())) < 200


@pytest.mark.slow
@pytest.mark.parametrize("how", ["contribution", "mean", "prune"])
def test_every_way_to_take_away_is_that_of_the_model_itself(how, workers, finished):
    """Beside the loss that `evaluate` finds of all tokens under the same intervention."""
    result = workers(1).run(atlas, finished, overrides=SMALL, how=how, experts=["5"])[0][0]
    asked = [Intervention(layer=1, experts=(5,), action=Action(how=how))]
    before, after = (
        workers(1).run(evaluation, finished, overrides=SMALL, interventions=each)[0]
        for each in ([], asked)
    )
    change = result["layers"][LAYER]["by"]["all"]["change"]["value"][0][0]
    assert after["interventions"] == [{"layer": 1, "experts": [5], "how": how}]
    assert result["layers"][LAYER]["together"] == []
    # The atlas reads the end of text before the first token, and each window by itself.
    assert change == pytest.approx(after["loss"] - before["loss"], abs=2e-2)
    assert change != 0


def test_a_paired_test_by_hand():
    """(.3, .1, .2, 0) - (.1, .1, 0, .1): mean .075, deviation .15."""
    differences = torch.tensor([0.2, 0.0, 0.2, -0.1], dtype=torch.float64)
    ours = Paired.of(4, float(differences.sum()), float(differences.square().sum()))
    assert ours.d == pytest.approx(0.5)
    assert ours.t == pytest.approx(1.0)
    assert ours.p == pytest.approx(0.391, abs=5e-4)
    assert Paired.of(1, 0.2, 0.04) is None
    assert Paired.of(3, 0.3, 0.03) is None  # all alike


@torch.no_grad()
def test_blocks_before_an_intervention_need_no_second_pass():
    from tests.train.experts.test_interventions import IDS_BT, SPARSE, make_model

    model = make_model(SPARSE, num_layers=4).double()
    layer = routed_layers(model)[2]
    chosen_1S = torch.zeros(1, 6, dtype=torch.bool)
    chosen_1S[0, 3] = True
    given = model.given(torch.arange(12), torch.float64)

    def through(x_BTD, first):
        for block in model.blocks[first:]:
            x_BTD, *_ = block(x_BTD, given)
        return x_BTD

    x_BTD = kept_BTD = model.embed(IDS_BT, torch.arange(12))
    for block in model.blocks[:2]:
        kept_BTD, *_ = block(kept_BTD, given)
    before = through(x_BTD, 0)
    with intervening(model, layer, Action(how="prune")) as intervene:
        intervene(chosen_1S, None)
        whole, cached = through(x_BTD, 0), through(kept_BTD, 2)
    torch.testing.assert_close(cached, whole, rtol=0, atol=1e-12)
    assert not torch.allclose(whole, before, atol=1e-6)


def test_what_is_not_allowed_is_said(capfd, finished):
    for words, said in (
        (["--layers", "0"], "--layers: 0 is not allowed: blocks with experts are 1"),
        (["--how", "kill"], "--how"),
        (["--unembed", "0"], "--unembed"),
    ):
        status = polyad(["experts", "atlas", str(finished), *words])
        assert status == 2
        assert said in capfd.readouterr().err
