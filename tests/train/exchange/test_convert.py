"""Weights to Hugging Face and back: bitwise, and equal to transformers."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from polyad.data.text.dataset import PreparedData
from polyad.data.text.prepare import prepare
from polyad.launch.cli import run as polyad
from polyad.parallel.checkpoint.format import MASTER
from polyad.parallel.checkpoint.load import Checkpoint, find_checkpoint
from polyad.parallel.weights import load_model
from polyad.train.exchange.convert import convert
from tests.helpers.everyday import everyday
from tests.helpers.parity import assert_equal_tensors
from tests.helpers.reference import save_reference
from tests.helpers.runs import FEED_FORWARDS, newest, refusal, weights_of
from tests.helpers.training import tensors

pytestmark = pytest.mark.distributed


def test_transformers_loads_an_export_to_equal_logits(finished, exported):
    theirs, report = AutoModelForCausalLM.from_pretrained(
        exported, local_files_only=True, output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]
    assert theirs.dtype == torch.float32
    ids = torch.randint(400, (3, 32), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, logits = theirs.eval()(ids).logits, load_model(finished)(ids).logits
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)


def test_an_export_has_the_tokenizer(exported, prepared_path):
    theirs = AutoTokenizer.from_pretrained(exported, local_files_only=True)
    ours = PreparedData.open(prepared_path).tokenizer()
    for text in ["def f(x):\n    return x", " ünï 漢字 🙂", "", "a  b\n\n\tc"]:
        assert theirs(text)["input_ids"] == ours.encode(text)
        assert theirs.decode(ours.encode(text)) == text
    assert theirs.eos_token_id == theirs.bos_token_id == ours.end_of_text_id
    assert theirs.vocab_size == ours.vocab_size
    config = json.loads((exported / "config.json").read_text())
    assert config["eos_token_id"] == ours.end_of_text_id


def test_polyad_to_huggingface_to_polyad_is_bitwise(finished, exported, tmp_path):
    convert(exported, tmp_path / "back", "polyad")
    assert_equal_tensors(weights_of(tmp_path / "back"), weights_of(newest(finished)))
    original, back = Checkpoint(newest(finished)), Checkpoint(tmp_path / "back")
    assert back.model_config() == original.model_config()
    assert back.state.tokenizer_fingerprint == original.state.tokenizer_fingerprint
    assert back.training_step == 0
    assert {field for _, field in tensors(tmp_path / "back")} == {MASTER}


@pytest.mark.parametrize(("shard_size", "tied"), [("5GB", True), ("20KB", True), ("5GB", False)])
def test_huggingface_to_polyad_to_huggingface_is_bitwise(tmp_path, shard_size, tied):
    options = {"shard_size": shard_size, "tie_word_embeddings": tied}
    reference = save_reference(tmp_path / "theirs", **options)
    assert not convert(tmp_path / "theirs", tmp_path / "ours", "polyad")["tokenizer"]
    second = convert(tmp_path / "ours", tmp_path / "again", "huggingface")
    assert second["parameters"] == sum(p.numel() for p in reference.parameters())
    again = load_file(tmp_path / "again" / "model.safetensors")
    expected = dict(reference.named_parameters())
    assert_equal_tensors(again, expected)
    ours, theirs = (
        json.loads((tmp_path / name / "config.json").read_text()) for name in ("again", "theirs")
    )
    shared = ours.keys() & theirs.keys() - {"bos_token_id", "eos_token_id"}
    assert len(shared) > 15
    assert {key: ours[key] for key in shared} == {key: theirs[key] for key in shared}


STARTS = [
    *(("dense", form, *layout)
      for form in ("huggingface", "polyad") for layout in ((1, 1), (2, 1), (2, 3))),
    ("dense", "safetensors", 2, 3),
    ("smoe", "safetensors", 1, 1),
    ("cp", "safetensors", 2, 3),
    ("cp", "run", 1, 1),
    ("tr", "safetensors", 1, 1),
    ("tr", "run", 2, 2),
]  # fmt: skip


@everyday(("kind", "form", "processes", "stage"), STARTS, keep=[("dense", "huggingface", 2, 3)])
def test_a_run_starts_from_any_form(
    run_of, trained, exported, tmp_path, kind, form, processes, stage
):
    finished = trained(kind)
    source = exported if form == "huggingface" else finished
    if form == "polyad":
        source = tmp_path / "converted"
        convert(exported, source, "polyad")
    elif form == "safetensors":
        source = tmp_path / "converted"
        convert(finished, source, "safetensors")
    # A rate of zero and no decay: the first checkpoint holds what the run started from.
    folder = run_of(
        processes, checkpoint__init_from=str(source), model__feed_forward=FEED_FORWARDS[kind],
        train__steps=1, parallel__zero_stage=stage, evaluation__every=0,
        optimizer__learning_rate=1e-30, optimizer__weight_decay=0.0,
    )  # fmt: skip
    assert_equal_tensors(weights_of(find_checkpoint(folder)), weights_of(newest(finished)))


@pytest.mark.parametrize("kind", ["smoe", "cp", "tr"])
def test_what_transformers_does_not_have_is_refused_with_the_way_that_is_left(
    trained, tmp_path, refused, kind
):
    line = refused("convert", trained(kind), tmp_path / "theirs", "--to", "huggingface")
    assert "model.feed_forward.kind" in line
    assert repr(FEED_FORWARDS[kind]["kind"]) in line
    assert "--to safetensors" in line
    assert list(tmp_path.iterdir()) == []


def test_zeros_are_written_for_biases_that_a_model_lacks(run_of, tmp_path):
    folder = run_of(model__bias=False, train__steps=1)
    convert(folder, tmp_path / "theirs", "huggingface")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "theirs", local_files_only=True)
    biases = [p for name, p in theirs.named_parameters() if name.endswith("bias")]
    assert len(biases) == 2 * 6 + 1
    assert not any(bias.any() for bias in biases)
    ids = torch.arange(20)[None]
    with torch.no_grad():
        expected, logits = theirs.eval()(ids).logits, load_model(folder)(ids).logits
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)


def test_a_start_from_another_model_or_tokenizer_is_refused(
    workers, config, exported, plain, tmp_path, texts
):
    prepare(str(texts), "train:400", tmp_path / "other", validation_fraction=0.3)
    (tmp_path / "t5").mkdir()
    (tmp_path / "t5" / "config.json").write_text('{"model_type": "t5"}')
    init = f"checkpoint.init_from={exported}"
    for override, part in (
        ("model.num_heads=2", "model.num_heads 4 there, 2 here"),
        (f"data.path={tmp_path / 'other'}", "their token ids mean different things"),
        (f"checkpoint.init_from={tmp_path / 't5'}", "model_type: 't5' is not supported"),
        (f"checkpoint.init_from={plain('cp')}", f"{plain('cp')}: is a different model: blocks.0."),
    ):
        text = refusal(workers(1), config, init, "model.dropout=0.5", override)
        assert part in text
        assert "model.dropout" not in text


def test_a_tokenizer_with_the_same_ids_in_another_file_is_accepted(run_of, exported, tmp_path):
    # As when data were prepared with vocab.json and merges.txt, and the folder has tokenizer.json.
    shutil.copytree(exported, tmp_path / "theirs")
    file = tmp_path / "theirs" / "tokenizer.json"
    tree = json.loads(file.read_text())
    tree["pre_tokenizer"]["use_regex"] = False
    file.write_text(json.dumps(tree))
    run_of(train__steps=1, checkpoint__init_from=str(tmp_path / "theirs"))


def test_bad_conversions_are_one_line_and_leave_nothing(finished, exported, tmp_path, refused):
    full, bad, new = (tmp_path / name for name in ("full", "bad", "new"))
    full.mkdir()
    (full / "thesis.txt").write_text("precious")
    shutil.copytree(exported, bad)
    data = (bad / "model.safetensors").read_bytes()
    (bad / "model.safetensors").write_bytes(data[:-4])
    for source, destination, to, part in (
        (finished, full, "huggingface", f"{full}: exists and is not an empty folder"),
        (exported, new, "huggingface", "--to"),
        (finished, new, "polyad", "--to"),
        (tmp_path / "none", new, "polyad", "no such folder"),
        (exported, new, "onnx", "'huggingface', 'polyad'"),
        (bad, new, "polyad", "is damaged"),
    ):
        assert part in refused("convert", source, destination, "--to", to)
    assert "--to" in refused("convert", exported, new)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad", "full"]


def test_a_conversion_that_fails_leaves_nothing(finished, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device", "x")

    monkeypatch.setattr("polyad.train.exchange.convert.write_tensors", full)
    with pytest.raises(OSError, match="No space"):
        convert(finished, tmp_path / "new", "huggingface")
    assert list(tmp_path.iterdir()) == []


def test_the_current_folder_may_be_the_destination_and_the_result_is_json(
    exported, tmp_path, monkeypatch, capfd
):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert polyad(["convert", str(exported), ".", "--to", "polyad", "--json", "-"]) == 0
    result = json.loads(capfd.readouterr().out)
    assert set(result["files"]) == {path.name for path in (tmp_path / "here").iterdir()}
    assert result["notes"] == []
    assert "folder: runs/here\n" in (tmp_path / "here" / "config.yaml").read_text()
