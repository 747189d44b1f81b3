"""`polyad evaluate --specialization` of text and sequences: as counted token by token."""

import json
import unicodedata
from collections import Counter

import pytest
import torch
from scipy.stats import entropy
from sklearn.metrics import mutual_info_score, normalized_mutual_info_score

from polyad.data.text.dataset import PreparedData
from polyad.launch.cli import run as polyad
from polyad.parallel.weights import load_model
from polyad.train.report.command import report
from tests.helpers.fine_tuned import one_by_one, table, trainer
from tests.helpers.runs import frame_of, measured, run, specialization, write_config

pytestmark = pytest.mark.distributed

SECTIONS = {
    "smoe": {"kind": "smoe", "num_experts": 4, "top_k": 1, "expert_hidden_size": 32},
    "mumoe": {"kind": "mumoe", "num_experts": [6, 2], "rank": 8, "level_std": 0.5},
    "dense": {"kind": "dense"},
}
LAYER = "blocks.1.feed_forward"


@pytest.fixture(scope="module")
def runs(workers, tmp_path_factory, prepared_path):
    folders = {}
    for kind, section in SECTIONS.items():
        folder = tmp_path_factory.mktemp(kind)
        path = write_config(
            folder / "config.yaml",
            prepared_path,
            model__feed_forward=section,
            optimizer__learning_rate=0.0005,  # with more, one expert has all tokens
        )
        workers(1).run(run, path)
        folders[kind] = folder / "run"
    return folders


def token_by_token(folder, prepared_path):
    """Each token of the split, window by window: id, position in its window, what the gates of the
    last block make of it."""
    model = load_model(folder / "checkpoints" / "step-00000006")
    data = PreparedData.open(prepared_path)
    stream, end = data.split("validation"), data.tokenizer().end_of_text_id
    ids = [end, *stream.read(0, stream.num_tokens).tolist()][:-1]
    decided = []
    feed_forward = model.blocks[1].feed_forward
    gate = getattr(feed_forward, "gate", None) or feed_forward.router.selection
    gate.register_forward_hook(
        lambda _, given, output: decided.append(getattr(output, "coefficients", [given[0]]))
    )
    tokens = []
    with torch.inference_mode():
        for first in range(0, len(ids), 32):
            window = ids[first : first + 32]
            model(torch.tensor([window + [end] * (32 - len(window))]))
            levels = [level[: len(window)] for level in decided.pop()]
            tokens += [
                (token, place, [level[place] for level in levels])
                for place, token in enumerate(window)
            ]
    return tokens, data.tokenizer(), Counter(stream.read(0, stream.num_tokens).tolist())


def kind_of(text):
    inner = text.strip()
    if not inner:
        return "space or newline" if text else "other"
    first = inner[0]
    if first.isalpha():
        return "letters"
    if unicodedata.category(first)[0] == "N":
        return "digits"
    category = unicodedata.category(first)
    return "punctuation" if category[0] in "PS" and category != "So" else "other"


@pytest.mark.slow
def test_text_is_as_counted_token_by_token(workers, runs, prepared_path):
    result = workers(1).run(specialization, runs["smoe"])[0]
    tokens, tokenizer, _ = token_by_token(runs["smoe"], prepared_path)
    assert result["tokens_scored"] == len(tokens)
    assert result["windows_scored"] == -(-len(tokens) // 32)
    assert [row["module"] for row in result["levels"]] == ["blocks.0.feed_forward", LAYER]
    level = result["levels"][1]
    scores = torch.stack([levels[0] for *_, levels in tokens]).double()
    experts = scores.argmax(-1).tolist()
    each = entropy(scores.numpy(), base=2, axis=1)
    assert level["entropy_bits"] == pytest.approx(each.mean(), rel=1e-5)
    used = entropy(scores.mean(0).numpy(), base=2)
    assert level["usage_entropy_bits"] == pytest.approx(used, rel=1e-5)
    end = tokenizer.end_of_text_id
    labels = {
        "characters": [
            "other" if token == end else kind_of(tokenizer.decode([token])) for token, *_ in tokens
        ],
        "position": [f"{4 * (place // 4)} to {4 * (place // 4) + 3}" for _, place, _ in tokens],
    }
    for name, label in labels.items():
        (measures,) = frame_of(result, "labels", module=LAYER, by=name).to_dict("records")
        counted = frame_of(result, "counts", module=LAYER, by=name)
        given = zip(counted["expert"], counted["class"], counted["tokens"], strict=True)
        counts = Counter(zip(experts, label, strict=True))
        assert {(expert, group): tokens for expert, group, tokens in given} == counts
        bits = mutual_info_score(experts, label) / torch.log(torch.tensor(2.0)).item()
        assert measures["information_bits"] == pytest.approx(bits, rel=1e-6, abs=1e-9)
        ratio = normalized_mutual_info_score(experts, label)
        assert measures["normalized_information"] == pytest.approx(ratio, rel=1e-6)
        low, high = (measures[f"information_bits_{end}"] for end in ("low", "high"))
        assert low <= measures["information_bits"] <= high
    assert frame_of(result, "counts", module=LAYER, by="frequency")["tokens"].sum() == len(tokens)
    # An expert follows the token more than any place in a window: chance is what shifting leaves.
    (characters,) = frame_of(result, "labels", module=LAYER, by="characters").to_dict("records")
    assert characters["information_bits"] > 2 * characters["information_bits_by_chance"]


@pytest.mark.slow
def test_levels_of_a_mumoe_are_apart(workers, runs, prepared_path):
    result = workers(1).run(specialization, runs["mumoe"])[0]
    tokens, *_ = token_by_token(runs["mumoe"], prepared_path)
    levels = frame_of(result, "levels", module=LAYER).to_dict("records")
    assert [level["experts"] for level in levels] == [6, 2]
    for number, level in enumerate(levels):
        scores = torch.stack([levels[number] for *_, levels in tokens]).double()
        each = entropy(scores.numpy(), base=2, axis=1)
        assert level["entropy_bits"] == pytest.approx(each.mean(), rel=1e-5)
        counted = frame_of(result, "counts", module=LAYER, level=number, by="position")
        given = torch.tensor(counted.groupby("expert")["tokens"].sum().to_numpy())
        torch.testing.assert_close(given, scores.sum(0).to(given), rtol=1e-4, atol=1e-3)


def without(result, *names):
    return {key: value for key, value in result.items() if key not in names}


@pytest.mark.slow
def test_two_processes_measure_as_one(workers, runs):
    options = {"overrides": ("evaluation.batch_size=3",)}
    one, two = (workers(size).run(specialization, runs["smoe"], **options)[0] for size in (1, 2))
    assert (one["processes"], two["processes"]) == (1, 2)
    kept = [json.loads(json.dumps(each), parse_float=lambda x: round(float(x), 4)) for each in
            (without(result, "processes", "seconds") for result in (one, two))]  # fmt: skip
    assert kept[0] == kept[1]


def test_sequences_are_by_class(workers, tmp_path_factory, capfd):
    held_out = table(10, 2)
    folder = trainer(workers, tmp_path_factory)("smoe", table(24, 1), held_out)
    result, text = workers(2).run(measured, folder, "specialize")[0]
    _, tokens = one_by_one(folder, [row["text"] for row in held_out])
    assert result["sequences_scored"] == len(held_out)
    for measures in frame_of(result, "labels", by="class").to_dict("records"):
        name = measures["module"]
        expected = Counter[tuple[int, str]]()
        for row, given in zip(held_out, tokens, strict=True):
            for expert, count in enumerate(torch.tensor(given[name]).sum(0).tolist()):
                expected[expert, row["label"]] += count
        counted = frame_of(result, "counts", module=name)
        ours = zip(counted["expert"], counted["class"], counted["tokens"], strict=True)
        assert {(expert, group): n for expert, group, n in ours} == +expected
        most = counted.groupby("expert")["tokens"].max().sum()
        assert measures["purity"] == pytest.approx(most / counted["tokens"].sum())
    assert "polysemanticity" not in text
    # Of a split whose labels nobody has there is nothing to tell.
    hidden = [json.dumps(row | {"label": -1}) + "\n" for row in held_out]
    (folder.parent / "table" / "test.jsonl").write_text("".join(hidden))
    capfd.readouterr()
    assert polyad(["experts", "specialize", str(folder), "--split", "test"]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.endswith("table (test): its labels are hidden, so nothing can be scored")


@pytest.mark.slow
def test_the_report_says_the_same(workers, runs, tmp_path):
    """Its contexts leave out the one token before the text, which both count."""
    told = report(runs["smoe"], output=tmp_path / "page.html", tokens=10**9)
    result = workers(1).run(specialization, runs["smoe"])[0]
    assert told["units_read"] == result["tokens_scored"] - 1
    both = told["specialization"], result
    for label in ("characters", "position", "frequency"):
        ours, theirs = (
            frame_of(each, "counts", module=LAYER, by=label).set_index(["expert", "class"])[
                "tokens"
            ]
            for each in both
        )
        difference = theirs.sub(ours, fill_value=0)
        assert difference.abs().sum() == 0
    ours, theirs = (frame_of(each, "levels", module=LAYER)["entropy_bits"][0] for each in both)
    assert ours == pytest.approx(theirs, rel=1e-3)
