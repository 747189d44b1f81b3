"""The token that begins a document: where a folder says so, transformers puts it there, too."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer, processors

from polyad.data.errors import DataError
from polyad.data.text.dataset import PreparedData
from polyad.data.text.prepare import prepare
from polyad.data.text.tokenizers.files import load_tokenizer
from tests.helpers.decoders import BEGIN, END, write_tokenizer
from tests.helpers.prepared import jsonl

TEMPLATES = {
    "none": None,
    "begins": processors.TemplateProcessing(
        single=f"{BEGIN} $A", pair=f"{BEGIN} $A {BEGIN} $B:1", special_tokens=[(BEGIN, 0)]
    ),
    "both": processors.TemplateProcessing(
        single=f"{BEGIN} $A {END}",
        pair=f"{BEGIN} $A {END} $B",
        special_tokens=[(BEGIN, 0), (END, 2)],
    ),
    "ends": processors.TemplateProcessing(
        single=f"$A {END}", pair=f"$A {END} $B", special_tokens=[(END, 2)]
    ),
}  # fmt: skip
WITH_MORE = {"__type": "AddedToken", "content": BEGIN, "special": True}
CASES = [
    ("none", {}, False),
    ("none", {"add_bos_token": True}, True),
    ("none", {"add_bos_token": False}, False),
    ("none", {"add_bos_token": True, "bos_token": None}, False),
    ("none", {"add_bos_token": True, "bos_token": WITH_MORE}, True),
    ("begins", {}, True),
    ("begins", {"add_bos_token": False}, False),
    ("begins", {"add_bos_token": True}, True),
    ("both", {}, False),
    ("both", {"add_bos_token": True}, True),
    ("ends", {}, False),
]


def folder_of(folder, template, about):
    folder.mkdir()
    write_tokenizer(folder, **about)
    file = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    if TEMPLATES[template] is not None:
        tokenizer.post_processor = TEMPLATES[template]
    tokenizer.save(file)
    return folder


@pytest.mark.parametrize(("template", "about", "begins"), CASES)
def test_it_is_that_of_transformers(template, about, begins, tmp_path):
    transformers = pytest.importorskip("transformers")
    folder = folder_of(tmp_path / "hub", template, about)
    ours = load_tokenizer(folder)
    assert (ours.begin_of_text, ours.end_of_text) == (BEGIN if begins else None, END)
    assert ours.before == ([0] if begins else [])
    if template not in ("both", "ends"):  # around single texts, which documents are not
        # Version 5 does not look at the key beside a tokenizer.json, version 4 does.
        given = {key: about[key] for key in ("add_bos_token",) if key in about}
        theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder, **given)
        wanted = theirs("def one(x)").input_ids
        assert [*ours.before, *ours.encode("def one(x)")] == wanted
    # The file that is saved says the same by itself.
    ours.save(tmp_path / "tokenizer.json")
    again = load_tokenizer(tmp_path / "tokenizer.json", END)
    assert (again.before, again.fingerprint) == (ours.before, ours.fingerprint)


@pytest.mark.parametrize("documents", [40, 2], ids=["dealt out", "split by position"])
def test_each_document_begins_with_it(tmp_path, documents):
    folder = folder_of(tmp_path / "hub", "none", {"add_bos_token": True})
    texts = [f"def number_{n}(x):\n    return {n} * x\n" for n in range(documents)]
    source = tmp_path / "texts.jsonl"
    manifest = prepare(jsonl(source, texts), str(folder), tmp_path / "data")
    assert (manifest.tokenizer.begin_of_text, manifest.tokenizer.begin_of_text_id) == (BEGIN, 0)
    assert f"begins with {BEGIN} (0)" in manifest.tokenizer.in_words()
    data, tokenizer = PreparedData.open(tmp_path / "data"), load_tokenizer(folder)
    first = data.split("train").read_document(0).tolist()
    assert first == [0, *tokenizer.encode(texts[0]), 2]
    for name in ("train", "validation", "test"):
        tokens = data.split(name).read(0, data.split(name).num_tokens)
        starts = np.cumsum([0, *data.split(name).document_lengths[:-1]])
        assert np.array_equal(np.flatnonzero(tokens == 0), starts[: len(tokens)])
    data.verify()
    # Without it the same text is other data.
    config = json.loads((folder / "tokenizer_config.json").read_text()) | {"add_bos_token": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match="--overwrite"):
        prepare(str(source), str(folder), tmp_path / "data")
