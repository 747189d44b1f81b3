"""A BERT in groups of units, with copied experts, and with adapters: what it was, it computes."""

import json

import pytest
import torch
import yaml
from safetensors.torch import load_file

from polyad.data.text.prepare import prepare
from polyad.data.text.tokenizers.files import VOCABULARY_FILE
from polyad.launch.cli import run as polyad
from polyad.model.build import build_model, materialize
from polyad.model.lora import LoRAConfig, add_lora
from polyad.parallel.checkpoint.load import Checkpoint, find_checkpoint
from polyad.parallel.weights import load_model
from polyad.train.exchange.convert import convert
from polyad.train.exchange.experts import Splitting, Upcycling
from tests.helpers import sequences as made
from tests.helpers.bert import SPECIAL, padded_input, their_bert
from tests.helpers.everyday import everyday
from tests.helpers.runs import evaluation, records, run, run_and_listen, write_config

CLASSES = ("BertModel", "BertForMaskedLM", "BertForSequenceClassification")
CUES = [word for words in made.WORDS.values() for word in words.split()]
TREE = {
    "seed": 3,
    "model": {
        "kind": "bert", "num_layers": 2, "hidden_size": 32, "num_heads": 4, "sequence_length": 16,
        "num_segments": 3, "layer_norm_epsilon": 1e-12, "vocab_size": 61,
        "feed_forward": {"kind": "dense", "hidden_size": 96}, "head": {"kind": "classification"},
    },
    "train": {"steps": 2, "global_batch_size": 8, "micro_batch_size": 8, "precision": "fp32"},
    "optimizer": {"kind": "sgd", "learning_rate": 0.05, "clip_grad_norm": 1.0},
    "schedule": {"kind": "constant"},
    "evaluation": {"every": 0},
    "log": {"trackers": []},
}  # fmt: skip


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """Folders of transformers' BERT by class, with a vocabulary."""
    root = tmp_path_factory.mktemp("theirs")
    vocabulary = [*SPECIAL, *made.FILLING, *CUES]
    padding = [f"[unused{number}]" for number in range(61 - len(vocabulary))]
    for name in CLASSES:
        their_bert(name).save_pretrained(root / name)
        (root / name / VOCABULARY_FILE).write_text("\n".join([*vocabulary, *padding]) + "\n")
    made.folder_of(root / "table")
    return root


@pytest.fixture
def config(tmp_path, theirs):
    """Fine-tuning to three classes."""
    section = {"kind": "sequences", "path": str(theirs / "table")}
    tree = TREE | {"run": {"folder": str(tmp_path / "run")}, "data": section}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(tree))
    return tmp_path / "config.yaml"


def output_of(folder, dtype=torch.float64):
    """What a model gives for padded sequences, of the tokens that mean something."""
    ids, mask, segments = padded_input()
    model = load_model(folder).to(dtype)
    with torch.no_grad():
        output = model(ids, mask, segments).logits
    return output[mask] if output.dim() == 3 else output


@pytest.mark.slow
@everyday("name", CLASSES, keep=["BertForMaskedLM"])
def test_split_and_copied_experts_give_the_dense_output_and_merged_ones_its_weights(
    theirs, tmp_path, name
):
    dense = theirs / name
    changes = {
        "split": Splitting("num_experts=8,top_k=8,blocks=[1]"),
        "grouped": Splitting("num_experts=4,top_k=4"),
        "copies": Upcycling("num_experts=4,top_k=2,graph=similarity"),
    }
    for each, change in changes.items():
        notes = convert(dense, tmp_path / each, "polyad", change)["notes"]
        assert any(note.endswith("the dense model's, up to rounding") for note in notes)
        for dtype, close in ((torch.float64, 1e-11), (torch.float32, 1e-5)):
            result, expected = output_of(tmp_path / each, dtype), output_of(dense, dtype)
            torch.testing.assert_close(result, expected, rtol=close, atol=close)
    convert(tmp_path / "split", tmp_path / "merged", "huggingface", merge=True)
    expected, merged = (load_model(p).state_dict() for p in (dense, tmp_path / "merged"))
    assert merged.keys() == expected.keys()
    assert all(torch.equal(merged[each], value) for each, value in expected.items())
    fewer = Splitting("num_experts=8,top_k=2")
    convert(dense, tmp_path / "fewer", "polyad", fewer)
    assert (output_of(tmp_path / "fewer") - output_of(dense)).abs().max() > 1e-3


def begun(workers, config, start, folder, *keys):
    """A run with the weights of a folder; gives the losses of its steps, and what it said."""
    words = [f"checkpoint.init_from={start}", f"run.folder={folder}", *keys]
    saved = start / "config.yaml"
    if saved.exists():  # of ours, with the feed-forward that it has become
        section = yaml.safe_load(saved.read_text())["model"]["feed_forward"]
        words.append(f"model.feed_forward={yaml.safe_dump(section, default_flow_style=True)}")
    ((_, message),) = workers(1).run(run_and_listen, config, *words)
    return [line["loss"] for line in records(folder)], message


@pytest.mark.slow
@pytest.mark.distributed
def test_a_run_with_a_new_head_begins_from_them_where_it_begins_from_the_dense_one(
    workers, theirs, config, tmp_path
):
    dense = theirs / "BertModel"
    convert(dense, tmp_path / "split", "polyad", Splitting("num_experts=8,top_k=8,blocks=[1]"))
    convert(dense, tmp_path / "copies", "safetensors", Upcycling("num_experts=4,placement=[1]"))
    of_dense, _ = begun(workers, config, dense, tmp_path / "dense-run")
    for name in ("split", "copies"):
        losses, message = begun(workers, config, tmp_path / name, tmp_path / f"{name}-run")
        assert "; initialized from the seed: head.classifier.*" in message
        assert losses[0] == pytest.approx(of_dense[0], rel=1e-6)
        # With all units the gradients are the dense model's; each copy has a part of the tokens.
        assert (losses[1] == pytest.approx(of_dense[1], rel=1e-6)) == (name == "split")
    # A language model has no pooler to begin with.
    masked = tmp_path / "masked"
    convert(theirs / "BertForMaskedLM", masked, "polyad", Splitting("num_experts=8,top_k=4"))
    _, message = begun(workers, config, masked, tmp_path / "masked-run")
    assert "; initialized from the seed: head.*" in message
    result = workers(1).run(evaluation, tmp_path / "masked-run")[0]
    assert result["sequences_scored"] == 21


LORA = {"rank": 4, "alpha": 8.0, "targets": ["attention.*", "feed_forward.*"]}


@pytest.fixture(scope="module")
def adapted(workers, theirs, tmp_path_factory):
    """Gives a finished run with adapters, by transformers' class of the base, and what it said."""
    made_of = {}

    def make(base, steps=60, **lora):
        key = (str(base), *lora)
        if key not in made_of:
            folder = tmp_path_factory.mktemp("adapted")
            tree = TREE | {
                "run": {"folder": str(folder / "run")},
                "data": {"kind": "sequences", "path": str(theirs / "table")},
                "adapt": {"lora": LORA | lora}, "checkpoint": {"init_from": str(base)},
                "optimizer": {"learning_rate": 0.01, "weight_decay": 0.0},
            }  # fmt: skip
            tree["train"] = TREE["train"] | {"steps": steps, "global_batch_size": 16}
            (folder / "config.yaml").write_text(yaml.safe_dump(tree))
            ((done, message),) = workers(1).run(run_and_listen, folder / "config.yaml")
            assert done == steps
            made_of[key] = folder / "run", message
        return made_of[key]

    return make


def of_peft(base, folder, kind="AutoModelForSequenceClassification", **keys):
    """What peft's model gives for padded sequences, and the names and values that it has read."""
    import transformers
    from peft import PeftModel

    model = getattr(transformers, kind).from_pretrained(base, local_files_only=True, **keys)
    model = PeftModel.from_pretrained(model, folder).eval()
    ids, mask, segments = padded_input()
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=mask.long(), token_type_ids=segments).logits
    read = {name.replace(".default", ""): value for name, value in model.state_dict().items()}
    return logits, {name.replace(".modules_to_save", ""): value for name, value in read.items()}


def unmerged(folder, start, lora):
    """The model of a run as it was trained: frozen weights and adapters beside them."""
    checkpoint = Checkpoint(find_checkpoint(folder))
    model = build_model(checkpoint.model_config())
    add_lora(model, LoRAConfig.model_validate(lora))
    materialize(model, 0)
    base = load_model(start).state_dict()
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.copy_(checkpoint.whole(name) if name in checkpoint.shapes() else base[name])
    return model.eval()


@pytest.mark.slow
@pytest.mark.distributed
def test_adapters_and_a_new_head_are_trained_scored_merged_and_read_by_peft(
    workers, theirs, adapted, tmp_path
):
    base = theirs / "BertForMaskedLM"
    folder, message = adapted(base, trained=["head.*"])
    # By hand: width 32, inner width 96, two blocks; pooler and classifier are trained whole.
    beside = 2 * 4 * ((32 + 96) + (32 + 32) + (32 + 96) + (96 + 32))
    whole = 32 * 32 + 32 + 3 * 32 + 3
    assert f"trains {beside + whole:,} parameters; " in message
    losses = [line["loss"] for line in records(folder)]
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    assert workers(1).run(evaluation, folder)[0]["accuracy"] > 0.4
    expected = unmerged(folder, base, LORA | {"trained": ["head.*"]})(*padded_input()).logits
    result = convert(folder, tmp_path / "peft", "peft")
    convert(folder, tmp_path / "merged", "huggingface", merge=True)
    stored = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    logits, read = of_peft(base, tmp_path / "peft", num_labels=3)
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    # What peft does not find it leaves out with no more than a warning.
    assert all(torch.equal(read[name], value) for name, value in stored.items())
    assert sum("lora_" in name for name in read) == sum("lora_" in name for name in stored) == 24
    assert result["parameters"] == beside
    merged = their_model(tmp_path / "merged")
    ids, mask, segments = padded_input()
    with torch.no_grad():
        others = [
            merged(input_ids=ids, attention_mask=mask.long(), token_type_ids=segments).logits,
            load_model(folder)(*padded_input()).logits,
        ]
    for each in others:
        torch.testing.assert_close(each, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.distributed
def test_a_base_of_ours_may_have_another_head_and_what_peft_has_no_place_for_is_refused(
    theirs, adapted, tmp_path, capfd
):
    convert(theirs / "BertForMaskedLM", tmp_path / "masked", "polyad")
    folder, message = adapted(tmp_path / "masked", 4, trained=["head.*", "embedding_norm.*"])
    assert "; initialized from the seed: head.*" in message
    unmerged_logits = unmerged(
        folder, tmp_path / "masked", LORA | {"trained": ["head.*", "embedding_norm.*"]}
    )(*padded_input()).logits
    torch.testing.assert_close(load_model(folder)(*padded_input()).logits, unmerged_logits)
    capfd.readouterr()
    assert polyad(["convert", str(folder), str(tmp_path / "new"), "--to", "peft"]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert "embedding_norm.bias was fully trained (adapt.lora.trained)" in line
    assert "of this model head.classifier. and head.pooler. may be; use --merge to write" in line
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
@pytest.mark.distributed
def test_a_language_model_with_adapters_is_read_by_peft(workers, theirs, tmp_path):
    base = theirs / "BertForMaskedLM"
    (tmp_path / "texts.jsonl").write_text(
        "".join(json.dumps({"text": row["text"]}) + "\n" for row in made.rows(300, 5))
    )
    prepare(str(tmp_path / "texts.jsonl"), str(base), tmp_path / "data")
    config = write_config(
        tmp_path / "config.yaml", tmp_path / "data", data__kind="masked_text",
        model=TREE["model"] | {"head": {"kind": "language"}}, adapt__lora=LORA,
        checkpoint__init_from=str(base), optimizer__weight_decay=0.0, evaluation__max_windows=2,
    )  # fmt: skip
    workers(1).run(run, config)
    convert(tmp_path / "run", tmp_path / "peft", "peft")
    logits, read = of_peft(base, tmp_path / "peft", "BertForMaskedLM")
    mask = padded_input()[1]
    torch.testing.assert_close(
        logits[mask], output_of(tmp_path / "run", torch.float32), rtol=1e-5, atol=1e-5
    )
    stored = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    assert all(torch.equal(read[name], value) for name, value in stored.items())
    before = output_of(base, torch.float32)
    assert (logits[mask] - before).abs().max() > 1e-2


def their_model(folder):
    from transformers import AutoModelForSequenceClassification

    return AutoModelForSequenceClassification.from_pretrained(folder, local_files_only=True).eval()
