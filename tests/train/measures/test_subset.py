"""`polyad experts subset`: experts and losses as of models whose rows are deleted by hand."""

import json

import pytest
import torch
from torch.nn.functional import cross_entropy

from polyad.data.text.dataset import PreparedData
from polyad.data.text.prepare import prepare
from polyad.launch.cli import run as polyad
from polyad.model.build import build_model
from polyad.parallel.weights import load_model
from polyad.train.measures.removal import Removal
from polyad.train.measures.subset import Subsetting
from tests.helpers.runs import both_forms, newest, run, write_config

pytestmark = pytest.mark.distributed
EXPERTS = 8
ROWS = ("router.score.weight", "router.score.bias", "experts.up", "experts.up_bias",
        "experts.down", "output_bias", "router.selection.balancing_bias")  # fmt: skip
"""What has a row for each expert."""


@pytest.fixture(scope="module")
def numbers(prepared_path, tmp_path_factory):
    """A domain, in the tokens of the text that is trained on."""
    folder = tmp_path_factory.mktemp("subset")
    lines = [json.dumps({"text": " ".join(f"{n * 7919 % 1000}" for n in range(at, at + 60))})
             for at in range(40)]  # fmt: skip
    (folder / "numbers.jsonl").write_text("\n".join(lines) + "\n")
    prepare(
        *(str(folder / "numbers.jsonl"), str(prepared_path / "tokenizer.json"), folder / "data"),
        validation_fraction=0.25,
        report=lambda line: None,
    )
    return folder / "data"


@pytest.fixture(scope="module")
def finished(workers, prepared_path, tmp_path_factory):
    """A run with pools of prefixes, whose tokens are routed apart."""
    folder = tmp_path_factory.mktemp("pooled")
    experts = {
        "kind": "smoe", "num_experts": EXPERTS, "expert_hidden_size": 16, "pool": "prefix",
        "balancing_rate": 0.01,
    }  # fmt: skip
    changes = {"model__feed_forward": experts, "model__initializer_range": 0.3}
    changes |= {"loss__load_balance": 0.1, "loss__load_balance_counts": "all"}
    config = write_config(folder / "config.yaml", prepared_path, **changes)
    workers(2).run(run, config)
    return folder / "run"


def windows_of(path, split, most):
    """The first windows of a split, each after the token before it."""
    data = PreparedData.open(path)
    stream, end = data.split(split), data.tokenizer().end_of_text_id
    ids = [end, *stream.read(0, stream.num_tokens).tolist()]
    read, after = ids[:-1], ids[1:]
    return [(read[at : at + 32], after[at : at + 32]) for at in range(0, len(read), 32)][:most]


def mean_probabilities(model, windows):
    """By layer, the softmax of each router's product, over all tokens."""
    sums, tokens, hooks = {}, 0, []
    for block, layer in enumerate(model.blocks):

        def keep(module, arguments, logits_NE, block=block):
            sums[block] = sums.get(block, 0) + logits_NE.double().softmax(-1).sum(0)

        hooks.append(layer.feed_forward.router.score.register_forward_hook(keep))
    for read, _ in windows:
        model(torch.tensor([read]))
        tokens += len(read)
    for hook in hooks:
        hook.remove()
    return [sums[block] / tokens for block in range(len(model.blocks))]


def mean_loss(model, windows):
    """Of all tokens that follow, one window after the other."""
    total, tokens = 0.0, 0
    for read, after in windows:
        logits_TV = model(torch.tensor([read])).logits[0].double()
        total += cross_entropy(logits_TV, torch.tensor(after), reduction="sum").item()
        tokens += len(after)
    return total / tokens


def with_rows(model, kept):
    """The model of some experts of each layer, with their rows alone."""
    left = len(kept[0])
    section = model.config.feed_forward.model_copy(update={"num_experts": left})
    small = build_model(model.config.model_copy(update={"feed_forward": section}))
    weights = {}
    for name, value in model.state_dict().items():
        is_row = name.endswith(ROWS)
        weights[name] = value[kept[int(name.split(".")[1])]] if is_row else value
    small.load_state_dict(weights, assign=True)
    return small.eval()


@torch.no_grad()
def test_losses_are_those_of_models_whose_rows_are_deleted(finished, numbers, workers):
    # All windows but few examples: evenly spread ones are then not the first.
    options = {"data": str(numbers), "keep": [0.75, 0.5, 0.25], "tokens": 10**6}
    result, text = workers(1).run(both_forms, finished, Subsetting, examples=10**6, **options)[0]
    model = load_model(newest(finished)).eval()
    read, held_out = (windows_of(numbers, split, None) for split in ("train", "validation"))
    assert result["examples_tokens"] == sum(len(window) for window, _ in read)
    assert result["tokens_scored"] == sum(len(window) for window, _ in held_out)
    assert result["loss"] == pytest.approx(mean_loss(model, held_out), abs=1e-5)
    probabilities = mean_probabilities(model, read)
    losses = [result["loss"]]
    for each, left in zip(result["subsets"], (6, 4, 2), strict=True):
        kept = [sorted(p_E.topk(left).indices.tolist()) for p_E in probabilities]
        assert list(each["kept"].values()) == kept
        assert each["experts_left"] == left
        small = mean_loss(with_rows(model, kept), held_out)
        assert each["loss"] == pytest.approx(small, abs=1e-5)
        assert len(set(each["loss_random"])) == 3
        losses.append(small)
        assert f"{left} ({100 * left / 8:g}%)" in text
    assert len({round(loss, 4) for loss in losses}) == 4
    assert "probability, on" in text
    # Few examples choose, and all else is scored as before.
    few, _ = workers(1).run(both_forms, finished, Subsetting, examples=64, **options)[0]
    assert few["examples_tokens"] == 64
    assert few["loss"] == result["loss"]


@torch.no_grad()
def test_prune_writes_the_model_of_the_same_experts(finished, numbers, workers, tmp_path):
    options = {"data": str(numbers), "tokens": 10**6, "by": "probability"}
    keep = {"keep": [0.25], "examples": 10**6}
    subset, _ = workers(1).run(both_forms, finished, Subsetting, **options, **keep)[0]
    written, _ = workers(1).run(
        both_forms, finished, Removal, output=tmp_path / "small", keep=0.25, **options
    )[0]
    [chosen] = subset["subsets"]
    kept = {name: [expert for (expert,) in each] for name, each in written["kept"].items()}
    assert kept == chosen["kept"]
    assert written["loss_smaller"] == pytest.approx(chosen["loss"], abs=1e-5)
    small = load_model(tmp_path / "small").config
    assert (small.feed_forward.num_experts, small.feed_forward.pool) == (2, "prefix")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--keep", "0.5,0.1"], "--keep: 0.1 leaves 1 of 8 experts; 2 to 7"),
        (["--keep", "0.5,all"], "--keep: 'all' is not a number from 0 to 1"),
        ([], "--keep"),
    ],
)
def test_what_is_not_allowed_is_said(words, said, finished, capfd):
    assert polyad(["experts", "subset", str(finished), *words]) == 2
    assert said in capfd.readouterr().err


def test_other_models_are_refused(trained, capfd):
    assert polyad(["experts", "subset", str(trained("dense")), "--keep", "0.5"]) == 2
    said = capfd.readouterr().err
    assert "kind: dense: only sparse experts (smoe) can be left out" in said
