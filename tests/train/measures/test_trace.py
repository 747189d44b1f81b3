"""`polyad experts trace`: against transformers, token by token."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch
from scipy.stats import entropy
from torch.nn.functional import cross_entropy, silu

from polyad.data.images.config import ImageDataConfig
from polyad.data.images.dataset import ImageData
from polyad.data.text.dataset import PreparedData
from polyad.data.text.tokenizers.files import load_tokenizer
from polyad.parallel.weights import load_model, open_weights
from polyad.train.errors import ConfigError
from polyad.train.experts.probing import deciding, every_layer, routed_layers
from polyad.train.experts.trace import EXTRA
from polyad.train.measures.trace import Trace
from polyad.train.reading import open_data_for
from polyad.train.tasks.samples import ImageSamples
from tests.helpers.decoders import Chosen, hub_with_text
from tests.helpers.fine_tuned import SETTINGS, others
from tests.helpers.little_memory import little_memory
from tests.helpers.prepared import windows_of
from tests.helpers.runs import both_forms
from tests.train.report.test_top_images import MODELS, train

pytest.importorskip("transformers")
pytestmark = pytest.mark.distributed

LENGTH = 24
OVERRIDES = (f"model.sequence_length={LENGTH}", "evaluation.batch_size=3")
KEYS = ["layer", "module", "image", "window", "document", "choice", "position", "level", "slot"]
"""What tells two rows apart, as far as it is there."""


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A folder of an OLMoE, texts in its tokens, and the model of transformers."""
    root = tmp_path_factory.mktemp("hub")
    model, data = hub_with_text(root, "olmoe", add_bos_token=True)
    return root / "hub", data, model.eval()


def traced(folder, output, **options):
    """Rows in a known order, and the result."""
    result, text = both_forms(folder, Trace, output=output, **options)
    assert re.search(f"^output +{output}$", text, re.MULTILINE)
    return rows_of(output), result


def rows_of(output):
    return in_order(pd.read_parquet(output))


def in_order(frame):
    keys = [key for key in KEYS if key in frame]
    assert not frame.duplicated(keys).any()
    return frame.sort_values(keys, ignore_index=True)


def same_rows(first, second):
    """The same rows; other batches round otherwise."""
    assert list(first.columns) == list(second.columns)
    pd.testing.assert_frame_equal(first, second, check_exact=False, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def by_transformers(model, data, chosen):
    """The rows of the windows that are chosen of the validation split, one after the other."""
    prepared, windows, place = PreparedData.open(data), windows_of(data, LENGTH), [(-1, -1)]
    begin = prepared.manifest.tokenizer.begin_of_text_id
    for document, length in enumerate(prepared.split("validation").document_lengths.tolist()):
        place += [(document, offset) for offset in range(length)]
    seen, result = Chosen(model), []
    for window in chosen:
        first, (read, after) = window * LENGTH, windows[window]
        seen.inputs, seen.weights, seen.ids = [], [], []
        logits = model(torch.tensor([read]), use_cache=False).logits[0].double()
        losses = cross_entropy(logits, torch.tensor(after), reduction="none").tolist()
        for layer, (input_TD, weights, experts) in enumerate(
            zip(seen.inputs, seen.weights, seen.ids, strict=True)
        ):
            block = model.model.layers[layer].mlp
            score_TE = (input_TD.view(len(read), -1) @ block.gate.weight.T).softmax(-1)
            for t, k in np.ndindex(len(read), experts.shape[-1]):
                expert = int(experts[t, k])
                up = block.experts.gate_up_proj[expert] @ input_TD.view(len(read), -1)[t]
                gate, up = up.chunk(2)
                output = block.experts.down_proj[expert] @ (silu(gate) * up)
                result.append({
                    "window": window, "position": t, "document": place[first + t][0],
                    "offset": place[first + t][1], "token_id": read[t], "layer": layer,
                    "module": f"blocks.{layer}.feed_forward", "slot": k, "expert": expert,
                    "weight": float(weights[t, k]), "score": float(score_TE[t, expert]),
                    "entropy": entropy(score_TE[t].double().numpy()),
                    "norm": float(output.norm()),
                    "loss": math.nan if after[t] == begin else losses[t],
                })  # fmt: skip
    return in_order(pd.DataFrame(result))


def test_every_column_is_that_of_transformers(hub, tmp_path):
    folder, data, model = hub
    options = {"data": str(data), "overrides": OVERRIDES, "extra": EXTRA}
    result, about = traced(folder, tmp_path / "t.parquet", tokens=150, **options)
    windows = -(-PreparedData.open(data).split("validation").num_tokens // LENGTH)
    chosen = [number * windows // 7 for number in range(7)]  # 7 of 24 hold 150 tokens
    wanted = by_transformers(model, data, chosen)
    assert list(result) == list(wanted) == about["columns"]
    result["module"] = result["module"].astype(str)
    exact = [name for name in wanted if wanted[name].dtype.kind == "i"]
    assert exact == [*("window", "position", "document", "offset", "token_id"),
                     *("layer", "slot", "expert")]  # fmt: skip
    for name in exact:
        assert result[name].tolist() == wanted[name].tolist(), name
    assert result["module"].tolist() == wanted["module"].tolist()
    for name in ("weight", "score", "entropy", "norm", "loss"):
        assert result[name].dtype == np.float32
        np.testing.assert_allclose(result[name], wanted[name], rtol=2e-4, atol=2e-6, err_msg=name)
    assert result["loss"].isna().any()  # before a token that begins a document
    assert about["rows"] == len(result) == 2 * 3 * about["tokens_traced"]
    assert (about["files"], about["bytes"]) == (1, (tmp_path / "t.parquet").stat().st_size)
    # Positions lead back to the data.
    stream = PreparedData.open(data).split("validation")
    for row in result[result["document"] >= 0].iloc[::7].itertuples():
        assert stream.read_document(row.document)[row.offset] == row.token_id
    about = json.loads(pq.read_schema(tmp_path / "t.parquet").metadata[b"polyad"])
    assert about["layers"]["blocks.2.feed_forward"] == {"layer": 2, "experts": [8]}
    assert (about["checkpoint"], about["split"], about["windows"]) == (
        str(folder), "validation", 7)  # fmt: skip
    assert about["data_fingerprint"] == PreparedData.open(data).manifest.fingerprint


def test_processes_and_blocks_write_the_same_rows(hub, workers, tmp_path):
    folder, data, _ = hub
    extra = ["score", "entropy", "norm"]
    options = {"data": str(data), "overrides": OVERRIDES, "extra": extra, "layers": ["0", "2"]}
    alone, _ = traced(folder, tmp_path / "t.parquet", **options)
    assert sorted(set(alone["layer"])) == [0, 2]
    with little_memory():
        streamed, _ = traced(folder, tmp_path / "s", **options)
    same_rows(streamed, alone)
    both = workers(2).run(both_forms, folder, Trace, output=tmp_path / "parts", **options)
    assert both[0][0]["rows"] == both[1][0]["rows"] == len(alone)
    parts = sorted(path.name for path in (tmp_path / "parts").iterdir())
    assert parts == ["part-00000.parquet", "part-00001.parquet"]
    assert all(pq.read_metadata(tmp_path / "parts" / part).num_rows for part in parts)
    same_rows(rows_of(tmp_path / "parts"), alone)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["parts", "s", "t.parquet"]


def test_what_is_not_whole_leaves_nothing(hub, tmp_path):
    """A reading that fails when a block has been written."""
    folder, data, _ = hub
    opened = open_data_for(open_weights(folder), str(data), OVERRIDES, "trained")
    model = load_model(folder)
    model.blocks[1].feed_forward.router.score.weight.data.fill_(torch.nan)
    trace = Trace(output=tmp_path / "t.parquet")
    trace.check(opened)
    with (
        pytest.raises(ConfigError, match=r"coefficients of blocks\.1\.feed_forward are not"),
        opened.loaded("x", "validation", model, needs_whole="x") as (_, world),
    ):
        trace.run(opened, model, world)
    assert not list(tmp_path.iterdir())


def test_what_is_not_allowed_is_one_line(hub, tmp_path, refused):
    folder, data, _ = hub
    (tmp_path / "there").write_text("")
    new = ["--output", tmp_path / "t.parquet"]
    text = ["--text", "x", "--html"]  # what is written is one of two
    for words, key in (
        ([], "--output"),
        (["--text", "x"], "--html"),
        (["--html", "x.html"], "--text"),
        ([*text, "x.html", "--tokens", "9"], "--html"),
        ([*text, "x.txt"], "--html: x.txt"),
        ([*new, "--tokenizer", "x"], "--tokenizer"),
        ([*new, "--data", data, "--with", "norm,size"], "--with: size"),
        ([*new, "--data", data, "--layers", "7"], "--layers: 7"),
        (["--data", data, "--output", tmp_path / "there"], "--output: .*there"),
        (["--data", data, "--output", tmp_path / "no" / "t"], "--output: .*no"),
    ):
        line = refused("experts", "trace", folder, *words)
        assert re.search(key, line), line
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


@pytest.mark.slow
def test_shares_of_levels(trained, prepared_path, tmp_path):
    """Experts of a level are numbered from 0, and the best come first."""
    options = {"top": 3, "extra": ["entropy", "norm", "score"], "tokens": 300}
    result, about = traced(trained("tr"), tmp_path / "t.parquet", **options)
    model, windows = load_model(about["checkpoint"]), windows_of(prepared_path)
    assert result["window"].nunique() == -(-300 // 32)
    for window in sorted(set(result["window"]))[1:3]:
        with deciding(model, routed_layers(model)) as decisions, torch.inference_mode():
            model(torch.tensor([windows[window][0]]))
        for name, decision in decisions.items():
            own = result[(result["module"] == name) & (result["window"] == window)]
            assert sorted(set(own["position"])) == list(range(32))
            for level, share_TE in enumerate(decision.levels):
                rows = own[own["level"] == level].sort_values(["position", "slot"])
                best = share_TE.topk(min(3, share_TE.shape[-1]), dim=-1)
                assert rows["expert"].tolist() == best.indices.flatten().tolist()
                np.testing.assert_allclose(rows["weight"], best.values.flatten(), rtol=1e-4)
                assert rows["weight"].tolist() == rows["score"].tolist()
                each = entropy(share_TE.double().numpy(), axis=1)
                nats = rows[rows["slot"] == 0]["entropy"]
                np.testing.assert_allclose(nats, each, rtol=1e-4, atol=1e-6)
                row = rows.iloc[7]
                at = torch.tensor([row["position"]])
                with torch.inference_mode():
                    output_MD = decision.output(level, int(row["expert"]), at)
                assert row["norm"] == pytest.approx(float(output_MD.norm()), rel=1e-3)


IMAGE_MODELS = MODELS | {
    "mixture": {
        "kind": "mixture", "image_size": 8, "num_experts": 3,
        "expert": {"hidden_sizes": [6]}, "gate_network": {"hidden_sizes": [5]},
    },
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["vit", "mixer", "mixture"])
def test_images_are_named_with_their_patches(kind, workers, tmp_path):
    train(workers, tmp_path, IMAGE_MODELS[kind], train__steps=2)
    result, about = traced(tmp_path / "run", tmp_path / "t.parquet", extra=["norm"], tokens=9)
    split = ImageData.open(ImageDataConfig(path=str(tmp_path / "all"), held_out=0.4)).split(
        "validation"
    )
    chosen = [number * len(split) // 9 for number in range(9)]
    assert sorted(set(result["image"])) == chosen
    for image, file in zip(result["image"], result["file"], strict=True):
        assert file == split.name_of(image)
    opened = open_data_for(open_weights(Path(about["checkpoint"])), None, (), "trained")
    samples = ImageSamples(opened.task, "validation", 9)
    model = load_model(about["checkpoint"])
    ((_, batch),) = samples.batches(16, 0, 1, torch.device("cpu"))
    layers = every_layer(model)
    with deciding(model, layers) as decisions, torch.inference_mode():
        samples.forward(model, batch, {})
    assert set(result["module"]) == set(decisions)
    for name, decision in decisions.items():
        positions = {"vit": range(-1, 4), "mixer": range(4), "mixture": [-1]}[kind]
        positions = list(range(16) if "token" in name else positions)
        own = result[result["module"] == name]
        assert sorted(set(own["position"])) == positions
        assert set(own["layer"]) == ({-1} if kind == "mixture" else {int(name.split(".")[1])})
        coefficients = decision.coefficients()
        rows = [
            chosen.index(image) * len(positions) + positions.index(position)
            for image, position in zip(own["image"], own["position"], strict=True)
        ]
        wanted = coefficients[rows, own["expert"].tolist()]
        np.testing.assert_allclose(own["weight"], wanted, rtol=1e-4)
        assert own["weight"].sum() <= coefficients.sum() + 1e-3
    assert (result["norm"] > 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pairs", "choices"])
def test_labelled_sequences_have_a_row_for_each_token(name, fine_tuned, tmp_path):
    rows = others()[name]
    folder = fine_tuned(name, rows[:16], rows[16:27], steps=2, data=SETTINGS[name])
    both_forms(folder, Trace, output=tmp_path / "t.parquet")
    result = rows_of(tmp_path / "t.parquet")
    choices = 2 if name == "choices" else 1
    assert len(result.groupby(["document", "choice"])) == 11 * choices
    coder = load_tokenizer(folder.parent / "tokenizer.json", None)
    own = result[(result["layer"] == 1) & (result["slot"] == 0)]
    for (document, choice), tokens in own.groupby(["document", "choice"]):
        row = rows[16 + document]
        second = row[f"c{choice}"] if name == "choices" else row["s2"]
        ids = [*coder.encode(row["s1"]), coder.end_of_text_id, *coder.encode(second)]
        assert tokens["position"].tolist() == list(range(len(tokens)))
        assert tokens["token_id"].tolist()[: len(ids)] == ids
