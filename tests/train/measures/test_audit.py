"""`polyad experts audit`: equal to models that are changed by hand, token by token."""

import copy

import pytest
import torch
from scipy.stats import ttest_rel
from torch.nn.functional import cross_entropy

from polyad.launch.cli import run as polyad
from polyad.train.errors import ConfigError
from polyad.train.experts.probing import deciding, routed_layers
from polyad.train.experts.ranked import AUDITED, CONTROLS, PairedTest, chosen_places
from polyad.train.measures.audit import Audited, auditable
from polyad.train.measures.measure import examine
from tests.helpers.runs import both_forms, run, write_config
from tests.train.experts.test_interventions import SPARSE, make_model
from tests.train.measures.test_knockout import WINDOWS, token_by_token

pytestmark = pytest.mark.distributed
POSITIONS = 24
NAMES = (*AUDITED, *CONTROLS)
OPTIONS = {
    "tokens": 32 * WINDOWS,
    "positions": POSITIONS,
    "overrides": ("evaluation.batch_size=3",),
}


def audit(path, **options):
    return both_forms(path, Audited, **options)


def changes(path, **options):
    """The changes of the loss, and how far losses were off afterwards."""
    result = examine(path, Audited, **options).result
    (change_WNC2,) = result.layers.values()
    return change_WNC2.tolist(), result.off


@pytest.fixture(scope="module")
def finished(workers, prepared_path, tmp_path_factory):
    """A run whose weights are so large that tokens are routed apart."""
    folder = tmp_path_factory.mktemp("audit")
    experts = {"kind": "smoe", "num_experts": 6, "expert_hidden_size": 16, "top_k": 3}
    changed = {"model__feed_forward": experts | {"placement": [1]}}
    config = write_config(
        folder / "config.yaml", prepared_path, **changed, model__initializer_range=0.3
    )
    workers(1).run(run, config)
    return folder / "run"


@pytest.fixture(scope="module")
def found(workers, finished):
    return workers(1).run(changes, finished, **OPTIONS)[0]


@pytest.fixture(scope="module")
def by_hand(finished, prepared_path):
    """Losses of the audited tokens: as they are, without each expert at the token, without each at
    all tokens; and the experts of each token, by rank of its own weight."""
    model, _, windows = token_by_token(finished, prepared_path)
    (layer,) = routed_layers(model)
    scored = torch.ones(WINDOWS, 32, dtype=torch.bool)
    last = len(windows[-1][1])
    scored[-1, last:] = False
    places = chosen_places(scored, POSITIONS, 0).tolist()
    feed_forward = model.blocks[1].feed_forward

    @torch.no_grad()
    def loss(changed, window, place):
        read, after = windows[window]
        logits_TV = changed(torch.tensor([read])).logits[0].double()
        return float(cross_entropy(logits_TV[place], torch.tensor(after[place])))

    rows = []
    for window, place in places:
        with deciding(model, [layer]) as seen, torch.no_grad():
            model(torch.tensor([windows[window][0]]))
        selected = seen[layer.name].selected
        ids = selected.expert_ids_NK[place].tolist()
        here, everywhere = [], []
        for k, expert in enumerate(ids):

            def without(module, arguments, output, place=place, k=k):
                weights_NK = output.weights_NK.clone()
                weights_NK[place, k] = 0
                return output._replace(weights_NK=weights_NK)

            handle = feed_forward.router.selection.register_forward_hook(without)
            here.append(loss(model, window, place))
            handle.remove()
            other = copy.deepcopy(model)
            for part in (other.blocks[1].feed_forward.experts.down,
                         other.blocks[1].feed_forward.output_bias):  # fmt: skip
                part.data[expert] = 0
            everywhere.append(loss(other, window, place))
        rows.append((loss(model, window, place), here, everywhere, ids))
    return rows


def test_the_control_is_the_loss_without_the_heaviest_and_the_lightest(found, by_hand):
    """Experts of a token stand in the order of their weights."""
    change_WNC2, _ = found
    column = NAMES.index("own_weight")
    for n, (before, here, everywhere, _) in enumerate(by_hand):
        for way, losses in enumerate((here, everywhere)):
            ours = change_WNC2[way][n][column]
            assert ours == pytest.approx([losses[0] - before, losses[-1] - before], abs=1e-5)


def test_statistics_rank_the_experts_of_a_token(found, by_hand, workers, finished):
    """By the atlas' statistics of experts; at all tokens by means of logits in place of use."""
    from polyad.train.measures.atlas import Atlas

    options = {"tokens": OPTIONS["tokens"], "overrides": OPTIONS["overrides"]}
    atlas, _ = workers(1).run(both_forms, finished, Atlas, **options)[0]
    (layer,) = atlas["layers"].values()
    for name in AUDITED:
        value = layer["statistics"][name]
        for n, (before, here, everywhere, ids) in enumerate(by_hand):
            order = sorted(range(len(ids)), key=lambda k, ids=ids: value[ids[k]])
            ends = order[-1], order[0]
            for way, losses in enumerate((here, everywhere)):
                if way == 1 and name in ("frequency", "mean_weight"):
                    continue
                ours = found[0][way][n][NAMES.index(name)]
                assert ours == pytest.approx([losses[k] - before for k in ends], abs=1e-5)


def test_as_coded_use_is_the_mean_logit(found, by_hand, finished, prepared_path):
    model, _, windows = token_by_token(finished, prepared_path)
    kept = []
    score = model.blocks[1].feed_forward.router.score
    handle = score.register_forward_hook(lambda module, arguments, output: kept.append(output))
    with torch.no_grad():
        for read, _ in windows:
            model(torch.tensor([read]))
    handle.remove()
    logits_MS = torch.cat(kept).double()
    threshold = min(row.sort().values[-3] for row in logits_MS)
    active = [column[column >= threshold].mean() for column in logits_MS.T]
    for name, value in (("frequency", logits_MS.mean(0)), ("mean_weight", active)):
        for n, (before, _, everywhere, ids) in enumerate(by_hand):
            order = sorted(range(len(ids)), key=lambda k, ids=ids, value=value: value[ids[k]])
            ours = found[0][1][n][NAMES.index(name)]
            expected = [everywhere[k] - before for k in (order[-1], order[0])]
            assert ours == pytest.approx(expected, abs=1e-5)


def test_losses_are_those_of_before_once_nothing_is_taken_away(found):
    assert found[1] == 0


def test_two_processes_give_what_one_gives(found, workers, finished):
    change_WNC2, _ = workers(2).run(changes, finished, **OPTIONS)[0]
    torch.testing.assert_close(torch.tensor(change_WNC2), torch.tensor(found[0]), rtol=0, atol=1e-5)


def test_a_test_by_hand():
    """(.3, .1, .2, 0) against (.1, .1, 0, .1): t = 1, and d by either deviation."""
    pairs = [[0.3, 0.1], [0.1, 0.1], [0.2, 0.0], [0.0, 0.1]]
    change_N2 = torch.tensor(pairs, dtype=torch.float64)
    described, coded = PairedTest.of(change_N2), PairedTest.of(change_N2, ddof=0)
    assert (described.d, coded.d) == pytest.approx((0.5, 0.577), abs=5e-4)
    assert (described.t, described.p) == pytest.approx((1.0, 0.391), abs=5e-4)
    assert (described.high, described.low) == pytest.approx((0.15, 0.075))
    assert PairedTest.of(change_N2[:, :1].expand(-1, 2)).p is None


def test_people_and_programs_are_told_the_same(found, workers, finished):
    result, text = workers(1).run(audit, finished, **OPTIONS, how="route-around")[0]
    assert result["threshold"]["reap"] == pytest.approx(0.05 / len(AUDITED))
    assert result["threshold"]["random"] == 0.05
    tests = result["layers"]["block 1"]
    assert list(tests) == list(NAMES)
    coded_N2 = torch.tensor(found[0][1])[:, NAMES.index("reap")]
    _, p = ttest_rel(*coded_N2.double().T.numpy())
    assert tests["reap"]["coded"]["p"] == pytest.approx(p, rel=1e-3)
    here_N2 = torch.tensor(found[0][0])[:, NAMES.index("reap")]
    assert tests["reap"]["described"]["high"] != pytest.approx(float(here_N2[:, 0].mean()))
    assert sum("own weight" in line for line in text.splitlines()) == 2
    told = [line for line in text.splitlines() if not line.startswith(("checkpoint", "split"))]
    assert max(map(len, told)) < 130, max(told, key=len)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"top_k": 1}, "gives each token only one expert"),
    ],
)
def test_layers_that_cannot_be_audited_are_refused(changed, said):
    model = make_model(SPARSE | changed)
    with pytest.raises(ConfigError, match=said):
        auditable(model, "run", ["all"])


def test_what_cannot_be_audited_is_said(capfd, finished, trained):
    for path, words, said in (
        (finished, ["--layers", "0"], "--layers: 0 is not allowed: blocks with experts are 1"),
        (finished, ["--how", "prune"], "--how"),
        (trained("cp"), [], "every token uses all experts"),
        (trained("dense"), [], "its model has no experts"),
    ):
        assert polyad(["experts", "audit", str(path), *words]) == 2
        assert said in capfd.readouterr().err
