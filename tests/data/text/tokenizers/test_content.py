"""A file may not encode by chance, and training ends on any text."""

import json
import time

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from polyad.data.text.dataset import PreparedData
from polyad.data.text.prepare import prepare
from polyad.data.text.tokenizers.files import train_tokenizer
from polyad.data.text.tokenizers.tokenizer import Tokenizer


def content(**parts):
    vocabulary = {"<unk>": 0, "<|endoftext|>": 1, "a": 2, "b": 3, "ab": 4}
    backend = tokenizers.Tokenizer(
        models.BPE(vocabulary, [("a", "b")], unk_token="<unk>", **parts.pop("model", {}))
    )
    for name, part in parts.items():
        setattr(backend, name, part)
    return backend.to_str()


def test_chance_in_a_tokenizer_is_switched_off(tmp_path):
    words = "abab ab ba aab " * 200
    source = tmp_path / "a.jsonl"
    source.write_text((json.dumps({"text": words}) + "\n") * 30)
    splitter = pre_tokenizers.WhitespaceSplit()
    (tmp_path / "tokenizer.json").write_text(
        content(model={"dropout": 0.5}, pre_tokenizer=splitter)
    )
    plain = Tokenizer(content(pre_tokenizer=splitter))
    manifests = [prepare(str(source), str(tmp_path), tmp_path / name) for name in "xy"]
    assert manifests[0].fingerprint == manifests[1].fingerprint
    assert manifests[0].tokenizer.fingerprint == plain.fingerprint
    data = PreparedData.open(tmp_path / "x")
    assert data.split("train").read_document(0).tolist()[:-1] == plain.encode(words)
    random = Tokenizer((tmp_path / "tokenizer.json").read_text())
    assert random.fingerprint == plain.fingerprint
    assert random.encode_batch([words] * 5) == [plain.encode(words)] * 5


def test_unigram_that_samples_is_switched_off():
    backend = tokenizers.Tokenizer(
        models.Unigram([("<unk>", 0.0), ("</s>", 0.0), ("a", -1.0), ("aa", -1.5), ("aaa", -2.0)], 0)
    )
    value = json.loads(backend.to_str())
    value["model"] |= {"alpha": 0.1, "nbest_size": 10}
    sampling = Tokenizer(json.dumps(value))
    assert len({tuple(ids) for ids in sampling.encode_batch(["a" * 50] * 50)}) == 1


@pytest.mark.parametrize("unit", ["\n", " ", "\t \n", "a", "漢", "qwertyuiopasdfghjkl"])
def test_training_does_not_stall_on_one_character_without_end(unit):
    # 400 KB of line feeds took more than a minute while white space was not cut.
    text = unit * (400_000 // len(unit))
    started = time.monotonic()
    tokenizer = train_tokenizer(iter([text, "some words"]), 1000)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert time.monotonic() - started < 20


def test_white_space_up_to_its_limit_trains_as_before():
    # What a tokenizer learns of usual text depends on no cut: the runs are whole words to it.
    text = "".join(f"x{' ' * n}y\n" for n in range(1, 250))
    ours = train_tokenizer(iter([text]), 300)
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator([text], trainer=trainer)
    assert ours.vocabulary() == backend.get_vocab()
