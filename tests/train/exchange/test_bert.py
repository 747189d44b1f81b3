"""A BERT with adapters and a new head: trained, scored, merged and read by peft."""

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from polyad.data.text.tokenizers.files import VOCABULARY_FILE
from polyad.parallel.weights import load_model
from polyad.train.exchange.convert import convert
from tests.helpers import sequences as made
from tests.helpers.adapted import unmerged
from tests.helpers.bert import SPECIAL, padded_input, their_bert
from tests.helpers.runs import evaluation, records, run_and_listen, write_config

STEPS = 60
CUES = [word for words in made.WORDS.values() for word in words.split()]
LORA = {
    "rank": 4, "alpha": 8.0, "targets": ["attention.*", "feed_forward.*"], "trained": ["head.*"],
}  # fmt: skip
MODEL = {
    "kind": "bert", "num_layers": 2, "hidden_size": 32, "num_heads": 4, "sequence_length": 16,
    "num_segments": 3, "layer_norm_epsilon": 1e-12, "vocab_size": 61,
    "feed_forward": {"kind": "dense", "hidden_size": 96}, "head": {"kind": "classification"},
}  # fmt: skip


def of_transformers(folder, adapters=None, **keys):
    """What a model of transformers gives for padded sequences, and its tensors by name."""
    model = AutoModelForSequenceClassification.from_pretrained(
        folder, local_files_only=True, **keys
    )
    if adapters is not None:
        model = PeftModel.from_pretrained(model, adapters)
    ids, mask, segments = padded_input()
    with torch.no_grad():
        output = model.eval()(input_ids=ids, attention_mask=mask.long(), token_type_ids=segments)
    read = {name.replace(".default", ""): value for name, value in model.state_dict().items()}
    return output.logits, {
        name.replace(".modules_to_save", ""): value for name, value in read.items()
    }


@pytest.mark.slow
@pytest.mark.distributed
def test_adapters_and_a_new_head_are_trained_scored_merged_and_read_by_peft(workers, tmp_path):
    theirs, base, folder = tmp_path / "theirs", tmp_path / "ours", tmp_path / "run"
    their_bert("BertForMaskedLM").save_pretrained(theirs)
    vocabulary = [*SPECIAL, *made.FILLING, *CUES]
    padding = [f"[unused{number}]" for number in range(61 - len(vocabulary))]
    (theirs / VOCABULARY_FILE).write_text("\n".join([*vocabulary, *padding]) + "\n")
    convert(theirs, base, "polyad")
    config = write_config(
        tmp_path / "config.yaml", made.folder_of(tmp_path / "table"), model=MODEL,
        data__kind="sequences", adapt__lora=LORA, checkpoint__init_from=str(base),
        train__steps=STEPS, train__global_batch_size=16, optimizer__weight_decay=0.0,
        evaluation__every=0,
    )  # fmt: skip
    ((steps, message),) = workers(1).run(run_and_listen, config)
    assert steps == STEPS
    assert "; initialized from the seed: head.*" in message
    # By hand: width 32, inner width 96, two blocks; pooler and classifier are trained whole.
    beside = 2 * 4 * ((32 + 96) + (32 + 32) + (32 + 96) + (96 + 32))
    whole = 32 * 32 + 32 + 3 * 32 + 3
    assert f"trains {beside + whole:,} parameters; " in message
    losses = [line["loss"] for line in records(folder)]
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    assert workers(1).run(evaluation, folder)[0]["accuracy"] > 0.4
    expected = unmerged(folder, base, LORA)(*padded_input()).logits
    assert convert(folder, tmp_path / "peft", "peft")["parameters"] == beside
    convert(folder, tmp_path / "merged", "huggingface", merge=True)
    stored = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    logits, read = of_transformers(theirs, tmp_path / "peft", num_labels=3)
    # What peft does not find it leaves out with no more than a warning.
    assert all(torch.equal(read[name], value) for name, value in stored.items())
    assert sum("lora_" in name for name in read) == sum("lora_" in name for name in stored) == 24
    merged, _ = of_transformers(tmp_path / "merged")
    for each in (logits, merged, load_model(folder)(*padded_input()).logits):
        torch.testing.assert_close(each, expected, rtol=1e-5, atol=1e-5)
