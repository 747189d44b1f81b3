"""What is added up over tokens leaves out padding: every reader, beside the rows of a trace."""

import numpy as np
import pandas as pd
import pytest
import torch

from polyad.data.text.dataset import PreparedData
from polyad.train.experts.information import STATISTICS
from polyad.train.measures.atlas import Atlas
from polyad.train.measures.removal import Removal
from polyad.train.measures.trace import Trace
from tests.helpers import images as made
from tests.helpers.bert import prepare_pieces
from tests.helpers.decoders import Chosen, hub_with_text
from tests.helpers.fine_tuned import SETTINGS, others
from tests.helpers.runs import both_forms, compare, counts_of, frame_of, measured, run, write_config
from tests.train.measures.test_trace import in_order

pytest.importorskip("transformers")
pytestmark = pytest.mark.distributed
LAYERS = ["blocks.0.feed_forward", "blocks.1.feed_forward", "blocks.2.feed_forward"]


def remainder(tokens):
    """The length of windows of which the last one has the fewest tokens of text, but some."""
    return min((length for length in range(24, 61) if tokens % length), key=tokens.__mod__)


@pytest.fixture(scope="module", params=["begin", pytest.param("", marks=pytest.mark.slow)])
def folder(request, tmp_path_factory):
    """Weights, and text whose last window is mostly padding."""
    root = tmp_path_factory.mktemp("padded")
    model, data = hub_with_text(root, "olmoe", add_bos_token=request.param == "begin")
    return root / "hub", data, model.eval()


def asked(data, split):
    length = remainder(PreparedData.open(data).split(split).num_tokens)
    overrides = (f"model.sequence_length={length}", "evaluation.batch_size=3")
    return {"data": str(data), "overrides": overrides}


@pytest.fixture(scope="module")
def rows(folder, tmp_path_factory):
    """The rows of a trace of the validation split."""
    path = tmp_path_factory.mktemp("trace") / "t.parquet"
    where, data, _ = folder
    both_forms(where, Trace, output=path, extra=["score", "norm"], **asked(data, "validation"))
    frame = in_order(pd.read_parquet(path))
    tokens = frame[(frame["layer"] == 0) & (frame["slot"] == 0)]
    assert len(tokens) == PreparedData.open(data).split("validation").num_tokens
    return frame


def of_trace(rows, layer):
    """The statistics of each expert [8], and the number of tokens."""
    own = rows[rows["module"] == layer]
    tokens = len(own[own["slot"] == 0])
    groups = own.assign(both=own["weight"] * own["norm"]).groupby("expert")
    means = groups[["weight", "norm", "both"]].mean().reindex(range(8), fill_value=0)
    counts = groups.size().reindex(range(8), fill_value=0)
    return tokens, {
        "frequency": counts / tokens,
        "mean_weight": means["weight"],
        "mean_norm": means["norm"],
        "sum_norm": means["norm"] * counts,
        "reap": means["both"],
    }


@pytest.mark.slow
def test_an_atlas_counts_the_tokens_of_a_trace_and_of_transformers(folder, rows):
    where, data, model = folder
    options = asked(data, "validation")
    result, _ = both_forms(where, Atlas, **options)
    length = int(options["overrides"][0].rpartition("=")[2])
    prepared = PreparedData.open(data)
    stream, end = prepared.split("validation"), prepared.manifest.tokenizer.end_of_text_id
    ids = [end, *stream.read(0, stream.num_tokens - 1).tolist()]
    seen, theirs = Chosen(model), np.zeros((3, 8))
    with torch.no_grad():
        for at in range(0, len(ids), length):
            seen.inputs, seen.weights, seen.ids = [], [], []
            model(torch.tensor([ids[at : at + length]]), use_cache=False)
            for layer, experts in enumerate(seen.ids):
                theirs[layer] += np.bincount(experts.flatten(), minlength=8)
    for number, name in enumerate(LAYERS):
        ours = frame_of(result, "experts", module=name)
        tokens, wanted = of_trace(rows, name)
        np.testing.assert_allclose(ours["frequency"], theirs[number] / tokens)
        for statistic, values in wanted.items():
            np.testing.assert_allclose(ours[statistic], values, rtol=1e-4, err_msg=statistic)
    assert {*wanted, "mone"} == {*STATISTICS}


def test_other_readers_count_the_tokens_of_a_trace(folder, rows, even):
    where, data, _ = folder
    options = asked(data, "validation")
    result, _ = measured(where, "specialize", **options)
    shares, _ = measured(where, even.name, **options)
    same = compare(where, where, tokens=10**6, **options)
    tokens = len(rows[(rows["layer"] == 0) & (rows["slot"] == 0)])
    assert same["probe_tokens"] == result["tokens_scored"] == tokens
    for name in LAYERS:
        own = rows[rows["module"] == name]
        counts = counts_of(result, name, "characters")
        frequency = of_trace(rows, name)[1]["frequency"]
        np.testing.assert_allclose(counts.sum(1) / tokens, frequency)
        weights = own.groupby("expert")["weight"].sum().reindex(range(8), fill_value=0)
        (share,) = frame_of(shares, "layers", module=name)["even"]
        assert share == pytest.approx(weights[::2].sum() / weights.sum(), rel=1e-4)


@pytest.mark.slow
def test_experts_are_kept_that_the_tokens_of_a_trace_use(folder, tmp_path):
    where, data, _ = folder
    options = asked(data, "train")
    both_forms(where, Trace, output=tmp_path / "t.parquet", split="train", **options)
    rows = pd.read_parquet(tmp_path / "t.parquet")
    pruned = {"output": tmp_path / "small", "by": "frequency", "keep": 0.5, "tokens": 10**6}
    result, _ = both_forms(where, Removal, **pruned, **options)
    for name in LAYERS:
        own = rows[rows["module"] == name]
        counts = np.bincount(own["expert"], minlength=8)
        kept = sorted(np.argsort(-counts, kind="stable")[:4].tolist())
        made_of = frame_of(result, "kept", module=name)["made_of"]
        assert list(made_of) == [[expert] for expert in kept]


SPARSE = {"kind": "smoe", "num_experts": 4, "top_k": 2, "expert_hidden_size": 8}
SIZES = {"num_layers": 2, "hidden_size": 16, "num_heads": 2, "feed_forward": SPARSE}


def run_of(kind, workers, tmp_path, texts):
    """A run of two steps of masked text or of images."""
    if kind == "images":
        data = made.class_folders(tmp_path / "all", 20)
        keys = {"held_out": 0.4, "normalization": "half"}
        model = SIZES | {"kind": "vit", "image_size": 8, "patch_size": 4}
    else:
        data, keys, model = tmp_path / "pieces", {}, SIZES | {"kind": "bert", "sequence_length": 37}
        prepare_pieces(texts, data)
    keys = {f"data__{key}": value for key, value in (keys | {"kind": kind}).items()}
    config = write_config(tmp_path / "c.yaml", data, model=model, train__steps=2, **keys)
    workers(1).run(run, config)
    return tmp_path / "run"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pairs", "choices", "masked_text", "images"])
def test_readers_of_other_tasks_count_the_tokens_of_a_trace(
    kind, workers, fine_tuned, tmp_path, texts
):
    if kind in SETTINGS:
        rows = others()[kind]
        folder = fine_tuned(kind, rows[:16], rows[16:27], steps=2, data=SETTINGS[kind])
    else:
        folder = run_of(kind, workers, tmp_path, texts)
    both_forms(folder, Trace, output=tmp_path / "t.parquet")
    rows = pd.read_parquet(tmp_path / "t.parquet")
    result = measured(folder, "specialize")[0]
    for name in LAYERS[:2]:
        wanted = np.bincount(rows[rows["module"] == name]["expert"], minlength=4)
        kinds = list(frame_of(result, "labels", module=name)["by"])
        assert kinds
        for label in kinds:
            assert counts_of(result, name, label).sum(1).tolist() == wanted.tolist(), label
