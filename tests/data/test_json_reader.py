"""JSON that others have written is one line where it is none, whoever reads it."""

import pytest

from polyad.data.errors import DataError
from polyad.data.text.dataset import PreparedData
from polyad.data.text.readers import read_jsonl
from polyad.data.text.tokenizers.files import read_about
from polyad.model.families.keys import WeightsError
from polyad.parallel.tensor_folder import read_json as read_config

BAD = {
    "bytes": b'{"text": "\xff"}',
    "cut": b'{"text": "a',
    "empty": b"",
}


def in_a_folder(path, name, content):
    (path / name).write_bytes(content)
    return path


READERS = {
    "lines of text": lambda p, c: list(read_jsonl(in_a_folder(p, "a.jsonl", c + b"\n") / "a.jsonl",
                                                  "text")),
    "a manifest of text": lambda p, c: PreparedData.open(in_a_folder(p, "manifest.json", c)),
    "about a tokenizer": lambda p, c: read_about(in_a_folder(p, "tokenizer_config.json", c)),
    "another library's": lambda p, c: read_config(in_a_folder(p, "a.json", c) / "a.json"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("reader", READERS)
def test_what_is_no_json_is_one_line_for_every_reader(tmp_path, reader, kind):
    of_lines = reader == "lines of text"  # which passes an empty line over
    content = b"{" if of_lines and kind == "empty" else BAD[kind]
    with pytest.raises((DataError, WeightsError)) as caught:
        READERS[reader](tmp_path, content)
    assert "\n" not in str(caught.value)
    assert ".json" in str(caught.value)
