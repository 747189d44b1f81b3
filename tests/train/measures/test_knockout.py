"""`polyad experts atlas | steer`: classes token by token, steering, and what is refused."""

import json

import pytest
import torch
from torch.nn.functional import cross_entropy

from polyad.data.text.dataset import PreparedData
from polyad.launch.cli import run as polyad
from polyad.parallel.weights import load_model
from polyad.train.experts.interventions import intervened, parse_intervention
from polyad.train.experts.token_classes import CHARACTERS, character_class
from polyad.train.measures.steer import Steer
from tests.helpers.bert import prepare_pieces
from tests.helpers.prepared import windows_of
from tests.helpers.runs import atlas, both_forms, frame_of, newest

pytestmark = pytest.mark.distributed
WINDOWS = 40
LAYER = "blocks.1.feed_forward"
"""The only feed-forward with experts of the sparse run."""
STEER = "layer=1,expert=2,how=steer,value=40"
SMALL = ("evaluation.batch_size=3",)


def steer(path, **options):
    """`polyad experts steer`."""
    return both_forms(path, Steer, **options)[0]


def token_by_token(folder, prepared_path):
    """The model, its tokenizer, and windows evenly over the split."""
    windows = windows_of(prepared_path)
    windows = [windows[number * len(windows) // WINDOWS] for number in range(WINDOWS)]
    return load_model(newest(folder)), PreparedData.open(prepared_path).tokenizer(), windows


def kind_of(tokenizer, token):
    if token == tokenizer.end_of_text_id:
        return "other"
    return CHARACTERS[character_class(tokenizer.decode([token]))]


@torch.inference_mode()
def losses_of(model, windows):
    """Losses of each token, and probabilities of the next one, window by window."""
    result = []
    for read, after in windows:
        logits_TV = model(torch.tensor([read])).logits[0].double()
        loss_T = cross_entropy(logits_TV, torch.tensor(after), reduction="none")
        result.append((loss_T, logits_TV.softmax(-1)))
    return result


def test_classes_are_as_counted_token_by_token(workers, trained, prepared_path):
    options = {"tokens": 32 * WINDOWS, "layers": ["1"], "overrides": SMALL}
    result = workers(1).run(atlas, trained("smoe"), **options)[0]
    model, tokenizer, windows = token_by_token(trained("smoe"), prepared_path)
    before = losses_of(model, windows)
    assert result["tokens_scored"] == sum(len(after) for _, after in windows)
    mean = float(torch.cat([nats for nats, _ in before]).mean())
    assert result["loss"] == pytest.approx(mean, abs=1e-5)
    expert = 2
    feed_forward = model.blocks[1].feed_forward
    feed_forward.experts.down.data[expert] = feed_forward.output_bias.data[expert] = 0
    without = losses_of(model, windows)
    classes = frame_of(result, "classes", module=LAYER, expert=expert)
    for side in ("predicted", "read"):
        sums = {}
        for (read, after), (nats, _), (others, _) in zip(windows, before, without, strict=True):
            tokens = after if side == "predicted" else read
            for token, change in zip(tokens, (others - nats).tolist(), strict=True):
                sums.setdefault(kind_of(tokenizer, token), []).append(change)
        results = classes[classes["by"] == f"{side} characters"].set_index("class")
        assert set(results.index) == set(sums)
        for name, changes in sums.items():
            assert results.loc[name, "tokens"] == len(changes)
            mean = sum(changes) / len(changes)
            assert results.loc[name, "change"] == pytest.approx(mean, abs=1e-5)
    (every,) = frame_of(result, "experts", module=LAYER, expert=expert).to_dict("records")
    assert every["change_low"] <= every["change"] <= every["change_high"]
    for name in ("position", "predicted frequency", "read frequency"):
        assert classes[classes["by"] == name]["tokens"].sum() == result["tokens_scored"]
    # Two experts a token.
    own = frame_of(result, "experts", module=LAYER)["own_tokens"].sum()
    assert own == 2 * result["tokens_scored"]


def test_steering_is_as_two_passes_say(workers, trained, prepared_path):
    options = {"tokens": 32 * WINDOWS, "changes": [parse_intervention(STEER)], "overrides": SMALL}
    result = workers(1).run(steer, trained("smoe"), **options)[0]
    model, tokenizer, windows = token_by_token(trained("smoe"), prepared_path)
    with intervened(model, [parse_intervention(STEER)]):
        after = losses_of(model, windows)
    before = losses_of(model, windows)
    assert result["changed"] == [STEER]
    change = float((torch.cat([a for a, _ in after]) - torch.cat([b for b, _ in before])).mean())
    assert abs(change) > 1e-3
    (every,) = frame_of(result, "steering", by="all")["change"]
    assert every == pytest.approx(change, abs=1e-5)
    masses = []
    for each in (before, after):
        p_V = torch.cat([p_TV for _, p_TV in each]).mean(0)
        mass = dict.fromkeys(CHARACTERS, 0.0)
        for token, p in enumerate(p_V.tolist()):
            mass[kind_of(tokenizer, token)] += p
        masses.append(mass)
    for row in frame_of(result, "next_tokens", by="characters").to_dict("records"):
        name = row["class"]
        assert row["probability"] == pytest.approx(masses[0][name], abs=1e-5)
        assert row["change"] == pytest.approx(masses[1][name] - masses[0][name], abs=1e-5)
    by_frequency = frame_of(result, "next_tokens", by="frequency")["probability"]
    assert by_frequency.sum() == pytest.approx(1, abs=1e-5)


def test_the_command_says_it_for_people(trained, tmp_path, capfd):
    words = [str(trained("smoe")), "--tokens", "640"]
    file = tmp_path / "found.json"
    assert polyad(["experts", "atlas", *words, "--experts", "1,2", "--json", str(file)]) == 0
    shown = capfd.readouterr().out
    result = json.loads(file.read_text())
    first, second = result["experts"]
    assert (first["expert"], second["expert"]) == (1, 2)
    row = next(line for line in shown.splitlines() if line.startswith(LAYER)).split()
    share = first["own_tokens"] / result["tokens_scored"]
    assert row[1:4] == ["1", f"{share:.4f}", f"{first['change']:+.4f}"]
    assert polyad(["experts", "steer", *words, "--intervene", STEER]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert any(line.split() == ["changed", STEER] for line in lines)
    assert any("probability of classes of the next token" in line for line in lines)


@pytest.mark.parametrize(
    ("kind", "words", "key"),
    [
        ("dense", [], "no experts"),
        ("smoe", ["--layers", "0"], "--layers: 0 is not allowed: blocks with experts are 1"),
        ("smoe", ["--layers", "all,1"], "--layers: all"),
        ("smoe", ["--experts", "4"], "--experts: 4"),
        ("smoe", ["--how", "kill"], "--how"),
    ],
)
def test_what_cannot_be_left_out_is_one_line(trained, refused, kind, words, key):
    assert key in refused("experts", "atlas", trained(kind), *words)


SPARSE = {"kind": "smoe", "num_experts": 4, "expert_hidden_size": 32}


@pytest.mark.slow
def test_of_masked_text_hidden_tokens_are_counted(workers, run_of, tmp_path, texts, refused):
    prepare_pieces(texts, tmp_path / "pieces")
    model = {
        "kind": "bert", "num_layers": 2, "hidden_size": 32, "num_heads": 4, "sequence_length": 32,
        "feed_forward": SPARSE,
    }  # fmt: skip
    data = {"kind": "masked_text", "path": str(tmp_path / "pieces")}
    folder = run_of(model=model, data=data)
    result = workers(2).run(atlas, folder, tokens=320, overrides=SMALL)[0]
    # 320 tokens are eleven windows of 30 and two marks, each with 15% of its tokens hidden.
    assert (result["windows_read"], result["tokens_scored"]) == (11, 55)
    classes = frame_of(result, "classes")
    assert not classes["by"].str.startswith("read").any()
    tokens = classes[classes["by"] == "position"].groupby(["module", "expert"])["tokens"].sum()
    assert (tokens == 55).all()
    assert (frame_of(result, "experts").groupby("module")["own_tokens"].sum() == 2 * 55).all()
    with pytest.raises(Exception, match="steer: is not allowed with data"):
        workers(1).run(steer, folder, changes=[parse_intervention(STEER)])
    words = ("experts", "trace", folder, "--output", tmp_path / "x", "--with", "loss")
    assert "--with loss: is not allowed with data.kind: masked_text" in refused(*words)
