"""Patterns of a tokenizer's file that take exponential time are refused, those in use are not."""

import json
import time

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from polyad.data.errors import DataError
from polyad.data.text.tokenizers.content import check_patterns
from polyad.data.text.tokenizers.files import load_tokenizer

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
    backend = Tokenizer(models.BPE(vocab={"a": 0, "<|endoftext|>": 1}, merges=[]))
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
