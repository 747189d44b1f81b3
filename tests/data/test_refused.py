"""What data refuses: in one line that names the file or the key, and says what is wrong."""

import gzip
import io
import json

import datasets
import pyarrow
import pyarrow.parquet
import pytest
import tokenizers

from polyad.data.errors import DataError
from polyad.data.images.config import ImageDataConfig
from polyad.data.images.dataset import ImageData
from polyad.data.sequences.config import SequenceDataConfig
from polyad.data.sequences.dataset import SequenceData
from polyad.data.text.dataset import PreparedData
from polyad.data.text.manifest import MANIFEST_FILE, ReadOptions
from polyad.data.text.tokenizers.files import load_tokenizer, train_tokenizer, trainer_of
from tests.helpers.prepared import open_source, rewrite
from tests.helpers.refusals import line_of


def write(folder, files):
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def parquet(**columns):
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), file)
    return file.getvalue()


LINES = b'{"text": "fine"}\n'
TEXTS = [
    ("a.txt", b"fine\n\xff\n", {"documents": "lines"}, "cannot be read"),
    ("a.py", b"fine", {}, "--format text"),
    ("a.jsonl", LINES + b"{no", {}, "line 2: is not JSON"),
    ("a.jsonl", LINES + b"[1, 2]", {}, "line 2: is not a JSON object"),
    ("a.jsonl", b'{"txt": "a", "id": 1}', {}, "there are 'txt', 'id' (did you mean 'txt'?)"),
    ("a.jsonl", LINES + b'{"text": 7}', {}, "line 2: 'text' is 7"),
    ("a.jsonl", LINES + rb'{"text": "\ud800"}', {}, "line 2: 'text' is"),
    ("a.jsonl.gz", gzip.compress(LINES * 100, mtime=0)[:-10], {}, ""),
    ("a.jsonl.zst", pyarrow.compress(LINES * 100, "zstd", asbytes=True)[:-5], {}, ""),
    ("a.csv", b"text,id\na,1\n", {"text_key": "txt"}, "did you mean 'text'?"),
    ("a.parquet", parquet(txt=["a"], id=[1]), {}, "'txt', 'id' (did you mean 'txt'?)"),
    ("a.parquet", parquet(text=["a", None]), {}, "row 2"),
    ("a.parquet", parquet(text=["a"])[:-20], {}, ""),
]


@pytest.mark.parametrize(("name", "content", "options", "words"), TEXTS, ids=range(len(TEXTS)))
def test_a_file_without_text_is_named(tmp_path, name, content, options, words):
    source = str(write(tmp_path, {name: content}) / name)
    line = line_of(DataError, lambda: list(open_source(source, ReadOptions(**options)).documents()))
    assert source in line
    assert words in line


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("corpsu.txt", "python-stdlib"),
        ("others/a.xyz", ".jsonl"),
        *(
            (f"python:{name}", "is not a package that this Python has")
            for name in ("no_such_package", "yaml.loader", "argparse", "", "../yaml")
        ),
    ],
)
def test_what_is_no_source_of_text_is_named(tmp_path, monkeypatch, spec, words):
    monkeypatch.chdir(write(tmp_path, {"corpus.txt": "a", "others/a.xyz": "a"}))
    line = line_of(DataError, open_source, spec)
    assert spec in line
    assert words in line


BYTES = train_tokenizer(iter(["a b"]), 260).file_bytes()
WORDS = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "u": 1}, unk_token="u")).to_str()
BEGINS = '{"add_bos_token": true, "bos_token": "<s>"}'
TOKENIZERS = [
    ({"tokenizer.json": "{}"}, "tokeniser.json", None, "no such tokenizer"),
    ({"tokenizer.json": "{}"}, ".", None, "no key 'model'"),
    ({"tokenizer.json": '{"model": {"type": "none"}}'}, ".", None, "not a tokenizer"),
    ({"tokenizer.json": "{"}, "tokenizer.json", None, "tokenizer.json: is not"),
    ({"tokenizer.json": BYTES}, ".", "<|endoftext>", "--end-of-text"),
    ({"tokenizer.json": WORDS}, ".", None, "--end-of-text TOKEN"),
    ({"tokenizer.json": BYTES, "tokenizer_config.json": "["}, ".", None, "is not JSON"),
    ({"tokenizer.json": BYTES, "tokenizer_config.json": BEGINS}, ".", None, "no token '<s>'"),
    ({"other": ""}, ".", None, "this folder has no tokenizer"),
    ({"vocab.txt": "the\na\n"}, ".", None, "not a tokenizer"),
    ({"a.model": ""}, "a.model", None, "a.model: "),
    ({"a.model": "nonsense"}, "a.model", None, "a.model: not a tokenizer"),
]


@pytest.mark.parametrize(
    ("files", "name", "end_of_text", "words"), TOKENIZERS, ids=range(len(TOKENIZERS))
)
def test_what_is_no_tokenizer_is_named(tmp_path, files, name, end_of_text, words):
    line = line_of(DataError, load_tokenizer, write(tmp_path, files) / name, end_of_text)
    assert str(tmp_path) in line
    assert words in line


@pytest.mark.parametrize(
    ("spec", "least"),
    [
        *((f"train{size}", 257) for size in ("", ":abc", ":256", ":-5", ":1e4", f":{10**11}")),
        *((f"words:{size}", 3) for size in ("", "2", "x", "-1")),
    ],
)
def test_the_size_of_a_vocabulary_is_a_number_in_its_range(spec, least):
    assert f"at least {least}" in line_of(DataError, trainer_of, spec)


PREPARED = [
    *((name, lambda path: path.unlink(), "") for name in ("train.bin", "test.idx")),
    ("tokenizer.json", lambda path: path.unlink(), ""),
    *((name, lambda path: path.write_bytes(path.read_bytes()[:-2]), "prepare the data again")
      for name in ("train.bin", "test.idx")),
    *((MANIFEST_FILE, lambda path, content=content: path.write_bytes(content), "")
      for content in (b"{", b"[]", b"{}", b"\xff\xfe", b"\0" * 99)),
    *(
        (file, lambda path, change=change: rewrite(path.parent, lambda tree: tree | change), words)
        for file, change, words in (
            (MANIFEST_FILE, {"format_version": 4}, "format version 4, but this Polyad reads"),
            (MANIFEST_FILE, {"dtype": "int64"}, "'dtype'"),
            ("train.bin", {"dtype": "int32"}, "and manifest.json says"),
            (MANIFEST_FILE, {"left_out": {"x": -1}}, "'left_out.x'"),
            (MANIFEST_FILE, {"more": 1}, "'more'"),
            (MANIFEST_FILE, {"sha256": {"train.bin": "x"}}, "'sha256.train.bin'"),
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change", "words"), PREPARED, ids=range(len(PREPARED)))
def test_a_prepared_folder_that_is_incomplete_or_changed_is_named(copy, name, change, words):
    change(copy / name)
    line = line_of(DataError, PreparedData.open, copy)
    assert str(copy / name) in line
    assert words in line


SENTENCES = [{"sentence": "a", "label": "x"}, {"sentence": "b", "label": "y"}]
AS_LINES = "".join(json.dumps(row) + "\n" for row in SENTENCES)
FORMS = {
    "a.csv": "sentence,label\na,x\nb,y\n",
    "a.jsonl": AS_LINES,
    "a.parquet": parquet(sentence=["a", "b"], label=["x", "y"]),
}
DOMAINS = "text,label,source\na,x,books\nb,y,books\nc,x,films\n"
OF_DOMAINS = {"columns": {"domain": "source"}}
TABLES = [
    *(
        ({name: content}, {}, name)
        for name, content in (
            ("a.csv", b"text,text,label\na,b,c\n"),
            ("a.csv", b"text,label\na,b,c\n"),
            ("a.csv", b"text,label\na,b\nc,\xff\n"),
            ("a.csv", b""),
            ("a.tsv", b"text\tlabel\na\t1\nb\tc\t0\n"),
            ("a.jsonl", b'{"text": "a", "text": "b"}\n'),
            ("a.jsonl", b'{"text": "a"}\n[1]\n'),
            ("a.parquet", b"no parquet"),
            ("a.txt", b"text"),
        )
    ),
    ({"a.csv": "text,label\n"}, {}, "has no rows"),
    *(({name: content}, {}, "no column 'text'; columns present: 'sentence', 'label'")
      for name, content in FORMS.items()),
    ({"a.csv": FORMS["a.csv"]}, {"columns": {"text": "sentense"}}, "(did you mean 'sentence'?)"),
    ({"a.csv": FORMS["a.csv"]}, {"metrics": ["pearson"]}, "data.metrics: 'pearson'"),
    ({"a.csv": FORMS["a.csv"]}, {"task": "multiple_choice"}, "data.columns.choices: null"),
    ({"a.csv": DOMAINS}, {"columns": {"domain": "sauce"}}, "(did you mean 'source'?)"),
    ({"a.csv": f"{DOMAINS}d,y, \n"}, OF_DOMAINS, "row 4: has no domain: 'source'"),
]  # fmt: skip


@pytest.mark.parametrize(("files", "keys", "words"), TABLES, ids=range(len(TABLES)))
def test_a_table_that_cannot_be_learned_from_is_named(tmp_path, prepared, files, keys, words):
    write(tmp_path, files)
    path = tmp_path if len(files) > 1 else tmp_path / next(iter(files))
    settings = SequenceDataConfig.model_validate({"path": str(path), **keys})

    def read():
        data = SequenceData(settings, prepared.tokenizer(), model_kind="gpt2", max_length=64)
        data.training(0)
        data.domains("train")

    assert words in line_of(DataError, read)


def named(labels, names):
    """A table of images whose classes have names; no image is opened."""
    file = io.BytesIO()
    features = datasets.Features(
        {"image": datasets.Value("binary"), "label": datasets.ClassLabel(names=names)}
    )
    rows = {"image": [b"x"] * len(labels), "label": labels}
    datasets.Dataset.from_dict(rows, features=features).to_parquet(file)
    return file.getvalue()


def files(*folders, count=5):
    """Files with the names of images."""
    return {f"{folder}/{number}.png": "" for folder in folders for number in range(count)}


ANTS = {"train.parquet": named([0], ["ant"])}
TREE = files("grey/ant", "grey/bee", "plain/ant", "plain/bee")
NO_TREE = "is not a folder of DOMAIN/CLASS/image"
IMAGES = [
    ({}, "nowhere", {}, "there is no such file or folder"),
    (files("train", "val"), ".", {}, "has no training images with classes"),
    (files("train/ant", "val/ant", "valid/ant"), ".", {}, "are both the validation split"),
    ({"a.parquet": b"PAR1 damaged"}, "a.parquet", {}, "a.parquet: "),
    ({"a.parquet": parquet(image=[b"x"], other=[1])}, "a.parquet", {}, "no column of labels"),
    ({"a.parquet": parquet(image=[1], label=[1])}, "a.parquet", {}, "column 'image'"),
    (ANTS | {"test.parquet": named([0], ["dog"])}, ".", {}, "the class 'dog', which no training"),
    (ANTS | {"test.parquet": parquet(image=[b"x"], label=[0])}, ".", {}, "the class '0', which"),
    (
        {"train.parquet": parquet(image=[b"x", b"x"], label=[0, 5_000_000])},
        ".",
        {},
        "the label 5000000, which is not the number of",
    ),
    (TREE, ".", {"leave_out": ["grey"]}, "data.leave_out: 'grey' is not allowed"),
    *(
        (tree, ".", {"domains": True, "held_out": 0.2, "leave_out": leave_out}, words)
        for tree, leave_out, words in (
            (TREE, ["gray"], "data.leave_out: 'gray' is not a domain of"),
            (TREE, ["grey", "plain"], "data.leave_out: all domains of"),
            (TREE | files("plain/cat"), ["plain"], "data.leave_out: 'plain' has the class 'cat'"),
            (TREE | files("red/ant", count=1), None, "data.held_out: 0.2 of 1 images of red"),
            (files("train/ant", "val/ant"), None, NO_TREE),
            ({"other": ""}, None, NO_TREE),
        )
    ),
]


@pytest.mark.parametrize(("tree", "name", "keys", "words"), IMAGES, ids=range(len(IMAGES)))
def test_images_that_cannot_be_learned_from_are_named(tmp_path, tree, name, keys, words):
    path = write(tmp_path, tree) / name
    assert words in line_of(DataError, ImageData.open, ImageDataConfig(path=str(path), **keys))
