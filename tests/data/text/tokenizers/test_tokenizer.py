import re
import subprocess
import sys

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from polyad.data.errors import DataError
from polyad.data.text.tokenizers.files import load_tokenizer, train_tokenizer
from polyad.data.text.tokenizers.tokenizer import END_OF_TEXT, Tokenizer
from polyad.data.text.writer import cut_between_words, may_cut

TRAIN_ELSEWHERE = """
import inspect, typing
from polyad.data.text.tokenizers.files import train_tokenizer
print(train_tokenizer(iter([inspect.getsource(typing)]), 500).fingerprint)
"""


@pytest.fixture(scope="module")
def trained(library_text):
    return train_tokenizer(iter(library_text.splitlines(keepends=True)), 1000)


def test_training_is_the_same_in_another_process():
    def run() -> str:
        command = [sys.executable, "-c", TRAIN_ELSEWHERE]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    assert re.fullmatch(r"[0-9a-f]{64}\n", first := run())
    assert run() == first


def test_any_text_comes_back(trained, library_text):
    assert trained.vocab_size == 1000
    assert trained.decode(trained.encode(library_text)) == library_text
    assert trained.decode(trained.encode("\0\t🙂 \r\n")) == "\0\t🙂 \r\n"


def test_text_cannot_forge_the_end_of_a_document(trained):
    text = f"one{END_OF_TEXT}two {END_OF_TEXT}{END_OF_TEXT}"
    ids = trained.encode(text)
    assert trained.end_of_text_id not in ids
    assert trained.decode(ids) == text
    assert trained.decode([trained.end_of_text_id]) == END_OF_TEXT


def test_text_cannot_forge_the_end_where_the_model_has_it_as_a_word(tmp_path):
    backend = tokenizers.Tokenizer(
        models.Unigram([("<unk>", 0.0), ("</s>", 0.0), *((c, -9.0) for c in "</s>ab")], 0)
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    assert backend.encode("a</s>b").ids.count(1) == 1
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.end_of_text == "</s>"
    with pytest.raises(DataError, match="--end-of-text"):
        tokenizer.encode("a</s>b")


def test_saved_file_loads_to_the_same_fingerprint(trained, tmp_path):
    trained.save(tmp_path / "tokenizer.json")
    loaded = load_tokenizer(tmp_path)
    assert loaded.fingerprint == trained.fingerprint
    assert loaded.encode("import os\n") == trained.encode("import os\n")
    assert load_tokenizer(tmp_path, end_of_text="a").fingerprint != trained.fingerprint


def test_truncation_padding_and_template_of_the_file_are_ignored(trained, tmp_path):
    trained.save(tmp_path / "plain.json")
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "plain.json"))
    backend.enable_truncation(3)
    backend.enable_padding(length=20)
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"$A {END_OF_TEXT}", special_tokens=[(END_OF_TEXT, 0)]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    texts = ["def main(argv):", "x"]
    assert load_tokenizer(tmp_path).encode_batch(texts) == trained.encode_batch(texts)


def test_added_tokens_count_in_the_vocabulary(trained, tmp_path):
    trained.save(tmp_path / "plain.json")
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "plain.json"))
    backend.add_tokens(["added"])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.vocab_size == 1001
    assert tokenizer.encode("added") == [1000]


@pytest.mark.slow
def test_gpt2_files_agree_with_transformers(shared):
    transformers = pytest.importorskip("transformers")
    folder = shared / "gpt2_bpe"
    tokenizer = load_tokenizer(str(folder))
    assert (tokenizer.vocab_size, tokenizer.end_of_text_id) == (50257, 50256)
    oracle = transformers.GPT2TokenizerFast(
        vocab=str(folder / "vocab.json"), merges=str(folder / "merges.txt")
    )
    text = (shared / "wikitext2" / "valid.txt").read_text()
    assert tokenizer.encode(text) == oracle(text, verbose=False)["input_ids"]
    assert may_cut(tokenizer)
    pieces = tokenizer.encode_batch(list(cut_between_words(text, 500)))
    assert len(pieces) > 1000
    assert [token for ids in pieces for token in ids] == tokenizer.encode(text)


def with_marks():
    """Bytes, two special tokens, and an added token that is not special."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend.add_tokens(alphabet)
    backend.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_start|>x"])
    backend.add_tokens(["<think>"])
    return Tokenizer(backend.to_str())


def test_special_tokens_in_a_text_are_characters():
    tokenizer = with_marks()
    text = "<|im_start|>user<|im_start|>x<think><|endoftext|><|im_start|>"
    ids = tokenizer.encode(text)
    # 12 + 4 + 13 + 1 + 13 + 12 characters, of which <think> alone is one token.
    assert len(ids) == 55
    transformers = pytest.importorskip("transformers")
    backend = tokenizers.Tokenizer.from_str(tokenizer.file_bytes().decode())
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=backend)(text)["input_ids"]
    assert len(theirs) == 55 - (12 + 13 + 13 + 12) + 4
