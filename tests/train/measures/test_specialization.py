"""`polyad evaluate --specialization` of text and sequences: as counted token by token."""

import math
from collections import Counter

import pytest
import torch
from scipy.stats import entropy
from sklearn.metrics import mutual_info_score, normalized_mutual_info_score

from polyad.data.text.dataset import PreparedData
from polyad.parallel.weights import load_model
from tests.helpers.prepared import windows_of
from tests.helpers.runs import frame_of, measured, newest
from tests.train.measures.test_knockout import kind_of

pytestmark = pytest.mark.distributed

SECTIONS = {
    "smoe": {"kind": "smoe", "num_experts": 4, "top_k": 1, "expert_hidden_size": 32},
    "mumoe": {"kind": "mumoe", "num_experts": [6, 2], "rank": 8, "level_std": 0.5},
}
LAYER = "blocks.1.feed_forward"


@torch.inference_mode()
def token_by_token(folder, windows):
    """Each token of the windows: its id, its position in its window, and what the gates of the
    last block make of it, by level."""
    model, decided, tokens = load_model(newest(folder)), [], []
    feed_forward = model.blocks[1].feed_forward
    gate = getattr(feed_forward, "gate", None) or feed_forward.router.selection
    gate.register_forward_hook(
        lambda _, given, output: decided.append(getattr(output, "coefficients", [given[0]]))
    )
    for read, _ in windows:
        model(torch.tensor([read]))
        tokens += [(token, place) for place, token in enumerate(read)]
    return tokens, [torch.cat(level).double() for level in zip(*decided, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", SECTIONS)
def test_text_is_as_counted_token_by_token(workers, run_of, prepared_path, kind):
    # At a higher rate one expert has all tokens.
    folder = run_of(model__feed_forward=SECTIONS[kind], optimizer__learning_rate=0.0005)
    ((result, _),) = workers(1).run(measured, folder, "specialize")
    windows = windows_of(prepared_path)
    tokens, scores = token_by_token(folder, windows)
    assert result["tokens_scored"] == len(tokens)
    assert result["windows_scored"] == len(windows)
    assert list(dict.fromkeys(row["module"] for row in result["levels"])) == [
        "blocks.0.feed_forward", LAYER,
    ]  # fmt: skip
    levels = frame_of(result, "levels", module=LAYER).to_dict("records")
    for number, (level, score_ME) in enumerate(zip(levels, scores, strict=True)):
        assert level["experts"] == score_ME.shape[1]
        each = entropy(score_ME.numpy(), base=2, axis=1)
        assert level["entropy_bits"] == pytest.approx(each.mean(), rel=1e-5)
        used = entropy(score_ME.mean(0).numpy(), base=2)
        assert level["usage_entropy_bits"] == pytest.approx(used, rel=1e-5)
        if kind == "mumoe":  # where shares are counted
            counted = frame_of(result, "counts", module=LAYER, level=number, by="position")
            given = torch.tensor(counted.groupby("expert")["tokens"].sum().to_numpy())
            torch.testing.assert_close(given, score_ME.sum(0).to(given), rtol=1e-4, atol=1e-3)
    if kind == "mumoe":
        return
    experts, tokenizer = scores[0].argmax(-1).tolist(), PreparedData.open(prepared_path).tokenizer()
    labels = {
        "characters": [kind_of(tokenizer, token) for token, _ in tokens],
        "position": [f"{4 * (place // 4)} to {4 * (place // 4) + 3}" for _, place in tokens],
    }
    for name, label in labels.items():
        (measures,) = frame_of(result, "labels", module=LAYER, by=name).to_dict("records")
        counted = frame_of(result, "counts", module=LAYER, by=name)
        given = zip(counted["expert"], counted["class"], counted["tokens"], strict=True)
        counts = Counter(zip(experts, label, strict=True))
        assert {(expert, group): tokens for expert, group, tokens in given} == counts
        bits = mutual_info_score(experts, label) / math.log(2)
        assert measures["information_bits"] == pytest.approx(bits, rel=1e-6, abs=1e-9)
        ratio = normalized_mutual_info_score(experts, label)
        assert measures["normalized_information"] == pytest.approx(ratio, rel=1e-6)
        low, high = (measures[f"information_bits_{end}"] for end in ("low", "high"))
        assert low <= measures["information_bits"] <= high
    assert frame_of(result, "counts", module=LAYER, by="frequency")["tokens"].sum() == len(tokens)
    # An expert follows the token more than any place in a window: chance is what shifting leaves.
    (characters,) = frame_of(result, "labels", module=LAYER, by="characters").to_dict("records")
    assert characters["information_bits"] > 2 * characters["information_bits_by_chance"]
