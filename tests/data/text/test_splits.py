import random

import pytest

from polyad.data.text.prepare import documents_needed, split_by_bytes, split_by_position
from polyad.data.text.sources import Document

SHARES = {"validation": 0.1, "test": 0.2}


def splits(*texts, shares=SHARES):
    """Documents of each split."""
    documents = [Document(f"#{number}", text) for number, text in enumerate(texts)]
    found = {name: [] for name in ("train", *shares)}
    for name, document in split_by_position(documents, shares):
        found[name].append(document.text)
    assert all(all(texts) for texts in found.values())
    return found


def test_the_last_parts_of_one_document_are_held_out():
    lines = [f"{number:04} 漢字\n" for number in range(1000)]
    found = splits("".join(lines))
    assert [len(texts) for texts in found.values()] == [1, 1, 1]
    assert found["train"][0] + found["validation"][0] + found["test"][0] == "".join(lines)
    assert [texts[0].count("\n") for texts in found.values()] == [700, 100, 200]


def test_a_text_without_lines_is_cut_before_a_word_or_anywhere():
    found = splits("abc " * 1000)
    assert found["validation"][0].startswith(" abc")
    found = splits("x" * 1000)
    assert [len(texts[0]) for texts in found.values()] == [700, 100, 200]


def test_few_documents_are_laid_end_to_end():
    found = splits("a\n" * 500, "b\n" * 500)
    assert found["train"] == ["a\n" * 500, "b\n" * 200]
    assert found["validation"] == ["b\n" * 100]
    assert found["test"] == ["b\n" * 200]
    assert splits("a" * 70, "b" * 10, "c" * 20) == {
        "train": ["a" * 70],
        "validation": ["b" * 10],
        "test": ["c" * 20],
    }


def test_a_split_that_has_no_share_takes_nothing():
    found = splits("a\n" * 500, shares={"validation": 0.1, "test": 0.0})
    assert found == {"train": ["a\n" * 450], "validation": ["a\n" * 50], "test": []}
    assert splits("abc", shares={"validation": 0.0, "test": 0.0})["train"] == ["abc"]


def test_a_document_is_dealt_out_whole_where_it_is_no_more_than_a_share():
    assert documents_needed({"validation": 0.05, "test": 0.1}) == 20
    assert documents_needed({"validation": 0.0, "test": 0.3}) == 4
    assert documents_needed({"validation": 0.0, "test": 0.0}) == 1


HEAVY = ([1, 3, 10, 200], [60, 25, 12, 3])
"""Sizes of documents, and their weights: 3 in 100 have most of the text."""


def dealt_by_bytes(sizes, **fractions):
    """The split of a document of each size, and the size."""
    documents = (Document("", "x" * size) for size in sizes)
    return [(split, document.size) for split, document in split_by_bytes(documents, fractions)]


def test_shares_are_of_bytes_by_hand():
    """A fifth is held out. Before the fifth document a document has to bring the share closer."""
    sizes = [10, 10, 10, 100, 10, 10, 10, 100]
    # What is held out and half the document, against a fifth of all bytes so far: 5 of 2, 5 of 4,
    # 5 of 6 (taken), 60 of 26. What is held out, and the size against twice the mean: 10 of 28 and
    # 10 of 56 (taken), 20 of 30 and 10 of 50 (taken), 30 of 32 and 10 of 46 (taken), 40 of 52 but
    # 100 of 65; and 90 of 52.
    taken = [split == "validation" for split, _ in dealt_by_bytes(sizes, validation=0.2)]
    assert taken == [False, False, True, False, True, True, True, False]


@pytest.mark.parametrize("order", ["as drawn", "falling", "rising"])
def test_shares_of_bytes_are_kept_where_few_documents_have_most_of_the_text(order):
    sizes = [int(1000 * size) for size in random.Random(1).choices(*HEAVY, k=400)]
    sizes = {"as drawn": sizes, "falling": sorted(sizes)[::-1], "rising": sorted(sizes)}[order]
    held = {"train": 0, "validation": 0, "test": 0}
    for split, size in dealt_by_bytes(sizes, validation=0.05, test=0.1):
        held[split] += size
    # Sorted, the documents around the last one are all large or all small.
    usual = 2 * sum(sizes) / len(sizes) if order == "as drawn" else max(sizes)
    assert abs(held["validation"] - 0.05 * sum(sizes)) < usual
    assert abs(held["test"] - 0.1 * sum(sizes)) < usual
