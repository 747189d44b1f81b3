"""A file may not make text grow without bound, encode by chance, or take exponential time."""

import io
import json
import subprocess
import sys
import time
from base64 import b64encode

import pytest
import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from polyad.data.errors import DataError
from polyad.data.text.dataset import PreparedData
from polyad.data.text.prepare import prepare
from polyad.data.text.tokenizers.content import check_charsmap, check_growth, check_patterns
from polyad.data.text.tokenizers.files import load_tokenizer
from polyad.data.text.tokenizers.tokenizer import Tokenizer
from polyad.data.text.tokenizers.training import resolve_tokenizer, train_tokenizer

MEGABYTE = "b" * 1_000_000
CHARSMAP = b"\4\0\0\0" + b"\0" * 4 + b"x" * 1_000_000 + b"\0"
"""A table of SentencePiece: the size of an index, the index, what it maps to."""


def content(**parts):
    vocabulary = {"<unk>": 0, "<|endoftext|>": 1, "a": 2, "b": 3, "ab": 4}
    backend = tokenizers.Tokenizer(
        models.BPE(vocabulary, [("a", "b")], unk_token="<unk>", **parts.pop("model", {}))
    )
    for name, part in parts.items():
        setattr(backend, name, part)
    return backend.to_str()


def replaced(*pairs):
    return normalizers.Sequence([normalizers.Replace(*pair) for pair in pairs])


def with_charsmap(charsmap):
    value = json.loads(content())
    encoded = b64encode(charsmap).decode()
    value["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": encoded}
    return json.dumps(value)


@pytest.mark.parametrize("spec", ["train:99999999999", "train:10000001", "words:" + "9" * 5000])
def test_a_vocabulary_for_which_no_machine_has_memory_is_refused(spec):
    with pytest.raises(DataError, match=r"at most 10,000,000$") as caught:
        resolve_tokenizer(spec, training_texts=lambda: iter(["a"]))
    assert len(str(caught.value)) < 250
    with pytest.raises(DataError, match="at most 10,000,000"):
        train_tokenizer(iter(["a"]), 99_999_999_999)


def test_the_command_refuses_such_a_vocabulary_with_status_2(tmp_path, texts):
    arguments = ["--source", str(texts), "--output", str(tmp_path / "out")]
    command = [sys.executable, "-m", "polyad.launch", "prepare", *arguments]
    done = subprocess.run(
        [*command, "--tokenizer", "train:99999999999"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "train:99999999999" in done.stderr


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ({"normalizer": normalizers.Replace("a", MEGABYTE)}, "normalizer: Replace.*1,000,000"),
        ({"normalizer": normalizers.Replace(Regex("."), MEGABYTE)}, "normalizer: Replace"),
        ({"normalizer": normalizers.Replace("", "b" * 40)}, "normalizer: Replace.* 41 "),
        ({"normalizer": normalizers.Prepend("b" * 40)}, "normalizer: Prepend"),
        ({"normalizer": replaced(*[("a", "aa")] * 30)}, "normalizer: Replace.* 64 "),
        ({"normalizer": replaced(("a", "b" * 20), ("b", "c" * 20))}, "Replace.* 400 "),
        ({"normalizer": replaced(*[(Regex("b*"), "b")] * 30)}, "normalizer: Replace"),
        ({"normalizer": replaced(*[(Regex(r"(?=\w)"), "b")] * 30)}, "normalizer: Replace"),
        ({"normalizer": normalizers.Replace("a", "\ufdfa" * 10)}, "Replace.* 180 "),
        ({"decoder": decoders.Replace("a", MEGABYTE)}, "decoder: Replace.*1,000,000"),
        (
            {"model": {"continuing_subword_prefix": MEGABYTE}},
            r"model\.continuing_subword_prefix: 1,000,000 characters; at most 100",
        ),
    ],
)
def test_a_tokenizer_that_blows_text_up_is_refused(tmp_path, parts, expected):
    if "model" in parts:
        value = json.loads(content())
        value["model"] |= parts["model"]
        (tmp_path / "tokenizer.json").write_text(json.dumps(value))
    else:
        (tmp_path / "tokenizer.json").write_text(content(**parts))
    with pytest.raises(DataError, match=expected) as caught:
        load_tokenizer(tmp_path)
    assert len(str(caught.value)) < 300


def test_a_table_of_replacements_that_blows_text_up_is_refused(tmp_path):
    (tmp_path / "tokenizer.json").write_text(with_charsmap(CHARSMAP))
    with pytest.raises(DataError, match=r"normalizer: Precompiled makes up to 1,000,000 "):
        load_tokenizer(tmp_path)
    with pytest.raises(DataError, match=r"1,000,000 characters of one; at most 32"):
        check_charsmap(CHARSMAP)


def test_a_sentencepiece_model_that_blows_text_up_is_refused(library_text):
    sentencepiece = pytest.importorskip("sentencepiece")
    from sentencepiece import sentencepiece_model_pb2

    from polyad.data.text.tokenizers.files import SentencePieceTokenizer

    trained = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(library_text.splitlines()[:2000]),
        model_writer=trained,
        minloglevel=2,
        vocab_size=300,
    )
    assert SentencePieceTokenizer(trained.getvalue()).vocab_size == 300
    model = sentencepiece_model_pb2.ModelProto.FromString(trained.getvalue())
    model.normalizer_spec.precompiled_charsmap = CHARSMAP
    with pytest.raises(DataError, match="at most 32"):
        SentencePieceTokenizer(model.SerializeToString())


def test_normalizers_that_are_in_use_are_allowed():
    umlauts = [(a, b) for a in "äöüÄÖÜßяжшч" for b in ("ae", "shch")]
    assert check_growth(content(normalizer=replaced(*umlauts))) == 4
    spaces = [(Regex(r"\s+"), " "), (Regex("[^ -~]"), " "), (Regex(" {2,}"), " ")] * 5
    assert check_growth(content(normalizer=replaced(*spaces))) == 1
    llama = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    assert check_growth(content(normalizer=llama)) == 1
    forms = normalizers.Sequence([normalizers.NFKD(), normalizers.Lowercase()])
    assert check_growth(content(normalizer=forms)) == 1


def test_text_that_grows_is_given_to_the_library_in_smaller_groups(monkeypatch):
    tokenizer = Tokenizer(content(normalizer=normalizers.Replace("c", "ab" * 5)))
    texts = ["abc", "c" * 20, "", "ba", "cab"]
    whole = tokenizer.encode_batch(texts)
    sizes = []
    monkeypatch.setattr("polyad.data.text.tokenizers.tokenizer.CHARACTERS_AT_ONCE", 50)
    for group in tokenizer._groups(texts):
        sizes.append(len(group))
    assert sizes == [1, 1, 3]
    assert tokenizer.encode_batch(texts) == whole


def test_chance_in_a_tokenizer_is_switched_off_and_said(tmp_path):
    words = "abab ab ba aab " * 200
    source = tmp_path / "a.jsonl"
    source.write_text((json.dumps({"text": words}) + "\n") * 30)
    splitter = pre_tokenizers.WhitespaceSplit()
    (tmp_path / "tokenizer.json").write_text(
        content(model={"dropout": 0.5}, pre_tokenizer=splitter)
    )
    plain = Tokenizer(content(pre_tokenizer=splitter))
    lines = []
    manifests = [
        prepare(str(source), str(tmp_path), tmp_path / name, report=lines.append) for name in "xy"
    ]
    assert manifests[0].fingerprint == manifests[1].fingerprint
    assert manifests[0].tokenizer.fingerprint == plain.fingerprint
    assert sum("model.dropout: 0.5 is turned off" in line for line in lines) == 2
    data = PreparedData.open(tmp_path / "x")
    assert data.split("train").read_document(0).tolist()[:-1] == plain.encode(words)
    # What was prepared before with such a file still opens, and encodes the same each time.
    old = Tokenizer((tmp_path / "tokenizer.json").read_text())
    assert old.fingerprint != plain.fingerprint
    assert old.encode_batch([words] * 5) == [plain.encode(words)] * 5


def test_unigram_that_samples_is_switched_off():
    backend = tokenizers.Tokenizer(
        models.Unigram([("<unk>", 0.0), ("</s>", 0.0), ("a", -1.0), ("aa", -1.5), ("aaa", -2.0)], 0)
    )
    value = json.loads(backend.to_str())
    value["model"] |= {"alpha": 0.1, "nbest_size": 10}
    sampling = Tokenizer(json.dumps(value))
    assert sampling.chance() == "model.alpha: 0.1, model.nbest_size: 10"
    assert len({tuple(ids) for ids in sampling.encode_batch(["a" * 50] * 50)}) == 1
    assert sampling.without_chance().chance() is None


def test_a_token_id_wider_than_the_files_is_refused():
    value = json.loads(content())
    value["model"]["vocab"]["<unk>"] = 2**32 - 1
    with pytest.raises(DataError, match="token id 4294967295: ids are below 2147483647"):
        Tokenizer(json.dumps(value))


def test_tokenizer_that_fuses_unknown_characters_is_not_cut():
    kept = {"model": {"fuse_unk": True}}
    assert not Tokenizer(content(**kept)).encodes_in_pieces()
    assert Tokenizer(content()).encodes_in_pieces()


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


GOOD = [
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t)?",
    r"\p{N}{1,3}(?=(\p{N}{3})*\b)",
    r" {2,}",
]
"""GPT-2's, GPT-4's, and parts of later ones."""
BAD = [r"(a+)+$", r"(x+x+)+y", r"(\w+\s?)*$", r"([a-zA-Z]+)*$", r"(([a-z])+.)+[A-Z]([a-z])+$"]


@pytest.mark.parametrize("pattern", GOOD)
def test_patterns_in_use_are_read(pattern):
    check_patterns({"pre_tokenizer": {"pattern": {"Regex": pattern}}})


@pytest.mark.parametrize("pattern", BAD)
def test_a_pattern_of_exponential_time_is_one_line(tmp_path, pattern):
    backend = tokenizers.Tokenizer(models.BPE(vocab={"a": 0, "<|endoftext|>": 1}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Whitespace(), pre_tokenizers.Split(Regex(pattern), "isolated")]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    began = time.process_time()
    with pytest.raises(DataError, match="takes exponential time, as on") as caught:
        load_tokenizer(tmp_path / "tokenizer.json")
    assert time.process_time() - began < 20
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["[" * 100_000, '{"model": ' + "9" * 5000 + "}", "\xff", "{"])
def test_a_file_that_is_no_json_is_one_line(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content, encoding="latin-1")
    with pytest.raises(DataError, match=r"tokenizer\.json: (is not|not a)") as caught:
        load_tokenizer(tmp_path / "tokenizer.json")
    assert "\n" not in str(caught.value)
    assert json.dumps(str(caught.value))
