"""`polyad experts contrast`: shares of tokens as counted window by window, losses as evaluated."""

import json

import pytest
import torch

from polyad.data.text.dataset import PreparedData
from polyad.data.text.prepare import prepare
from polyad.launch.cli import run as polyad
from polyad.parallel.weights import load_model
from polyad.train.experts.interventions import intervened, parse_intervention
from polyad.train.experts.probing import deciding, routed_layers
from polyad.train.experts.steering import parse_steering, steered
from polyad.train.measures.contrast import Contrasted, Contrasting, chosen, random_ones
from tests.helpers.runs import both_forms, newest
from tests.train.measures.test_knockout import losses_of

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def others(prepared_path, tmp_path_factory):
    """Numbers, in the tokens of the first text."""
    folder = tmp_path_factory.mktemp("contrast")
    lines = [json.dumps({"text": " ".join(f"{n * 7919 % 1000}" for n in range(at, at + 60))})
             for at in range(40)]  # fmt: skip
    (folder / "numbers.jsonl").write_text("\n".join(lines) + "\n")
    prepare(
        *(str(folder / "numbers.jsonl"), str(prepared_path / "tokenizer.json"), folder / "data"),
        validation_fraction=0.25,
        report=lambda line: None,
    )
    return folder / "data"


def windows_of(path, split):
    data = PreparedData.open(path)
    stream, end = data.split(split), data.tokenizer().end_of_text_id
    ids = [end, *stream.read(0, stream.num_tokens).tolist()]
    read, after = ids[:-1], ids[1:]
    return [(read[at : at + 32], after[at : at + 32]) for at in range(0, len(read), 32)]


@torch.no_grad()
def test_shares_and_losses_are_those_of_single_windows(workers, trained, prepared_path, others):
    options = {"other": str(others), "force": 1, "avoid": 1, "tokens": 10**6, "strength": 4.0}
    result, text = workers(1).run(both_forms, trained("smoe"), Contrasting, **options)[0]
    model = load_model(newest(trained("smoe")))
    (layer,) = routed_layers(model)
    shares = []
    for path in (prepared_path, others):
        used, tokens = torch.zeros(4), 0
        *whole, last = [read for read, _ in windows_of(path, "train")]
        for batch in (*(whole[at : at + 64] for at in range(0, len(whole), 64)), [last]):
            with deciding(model, [layer]) as decisions:
                model(torch.tensor(batch))
            used += (decisions[layer.name].coefficients() != 0).sum(0)
            tokens += torch.tensor(batch).numel()
        shares.append((used / tokens).tolist())
    deltas = {expert: shares[0][expert] - shares[1][expert] for expert in range(4)}
    assert [each["expert"] for each in result["experts"]] == sorted(
        deltas, key=lambda expert: -abs(deltas[expert])
    )
    for each in result["experts"]:
        assert each["delta"] == pytest.approx(deltas[each["expert"]], abs=1e-5)
        assert each["first"] == pytest.approx(shares[0][each["expert"]], abs=1e-5)
    high, low = max(deltas, key=deltas.get), min(deltas, key=deltas.get)
    asked = [f"layer=1,expert={high},how=force", f"layer=1,expert={low},how=avoid"]
    assert result["moved"] == [
        {"layer": 1, "experts": [high], "how": "force"},
        {"layer": 1, "experts": [low], "how": "avoid"},
    ]
    towards = [f"layer=1,expert={high},strength=4", f"layer=1,expert={low},strength=-4"]
    cases = (("as_it_is", [], []), ("moved", asked, []), ("steered", [], towards))
    for name, words, steerings in cases:
        for column, path in enumerate((prepared_path, others)):
            with (
                intervened(model, [parse_intervention(each) for each in words]),
                steered(model, [parse_steering(each) for each in steerings]),
            ):
                found = losses_of(model, windows_of(path, "validation"))
            mean = float(torch.cat([nats for nats, _ in found]).mean())
            assert result["loss"][name][column] == pytest.approx(mean, abs=1e-5)
    assert len(result["loss_random"]) == 3
    assert "share of the tokens that use each expert, in the first and in the second text" in text


def test_no_layer_forces_more_experts_than_a_token_uses():
    """Two of layer 0, although three of its experts have the largest differences."""
    experts = [Contrasted(0, expert, 0.9 - expert / 10, 0.0) for expert in range(3)]
    experts += [Contrasted(1, 4, 0.2, 0.1), Contrasted(1, 5, 0.0, 0.1), Contrasted(1, 6, 0.0, 0.0)]
    moved = chosen(experts, {0: 2, 1: 2}, force=3, avoid=5)
    assert [str(each) for each in moved] == [
        "layer=0,expert=0+1,how=force", "layer=1,expert=4,how=force",
        "layer=1,expert=5,how=avoid",
    ]  # fmt: skip
    for seed in range(20):
        again = random_ones(experts, {0: 2, 1: 2}, moved, f"{seed}")
        each_of = {"force": [], "avoid": []}
        for one in again:
            each_of[one.action.how] += [(one.layer, expert) for expert in one.experts]
            assert one.action.how == "avoid" or len(one.experts) <= 2
        assert len(each_of["force"]) == 3
        assert len(each_of["avoid"]) == 1
        assert not {*each_of["force"]} & {*each_of["avoid"]}


def test_what_cannot_be_contrasted_is_said(capfd, trained, prepared_path):
    for kind, other, said in (
        ("cp", str(prepared_path), "no layer selects experts"),
        ("smoe", "/nowhere", "/nowhere"),
    ):
        assert polyad(["experts", "contrast", str(trained(kind)), "--with", other]) == 2
        assert said in capfd.readouterr().err
