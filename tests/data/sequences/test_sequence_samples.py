"""Encoding, the order of an epoch, and padding: against transformers, and by hand."""

import itertools

import numpy as np
import pytest
import torch

from polyad.data.errors import DataError
from polyad.data.sampler import micro_batches
from polyad.data.sequences.config import SequenceDataConfig
from polyad.data.sequences.dataset import SequenceData
from polyad.data.sequences.samples import grouped_order, shortened
from polyad.data.text.tokenizers.files import load_tokenizer
from tests.data.sequences.test_tables import named_table
from tests.helpers.sequences import byte_tokenizer, folder_of, rows, write


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(byte_tokenizer(tmp_path_factory.mktemp("bytes")))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return folder_of(tmp_path_factory.mktemp("table"))


def opened(path, tokenizer, length=64, **keys):
    settings = SequenceDataConfig.model_validate({"path": str(path)} | keys)
    return SequenceData(settings, tokenizer, model_kind="gpt2", max_length=length)


def test_a_text_is_its_tokens_and_two_have_the_end_of_text_between(tmp_path, tokenizer):
    table = [{"a": "ab", "b": "cde", "label": n % 2} for n in range(2)]
    path = write(tmp_path / "rows.csv", table)
    one = opened(path, tokenizer, columns={"text": "a"}).training(0)[0]
    real = one.ids_BCT[one.mask_BCT]
    assert real.tolist() == tokenizer.encode("ab")
    two = opened(path, tokenizer, columns={"text": "a", "pair": "b"}).training(0)[0]
    real = two.ids_BCT[two.mask_BCT]
    end = tokenizer.end_of_text_id
    assert real.tolist() == [*tokenizer.encode("ab"), end, *tokenizer.encode("cde")]
    assert two.second_BCT[two.mask_BCT].tolist() == [False] * 3 + [True] * 3


def test_an_empty_text_is_one_token(tmp_path, tokenizer):
    table = [{"text": "", "label": "a"}, {"text": "x", "label": "b"}]
    samples = opened(write(tmp_path / "rows.csv", table), tokenizer).training(0)
    for number in range(2):
        assert samples[number].mask_BCT.sum() == 1


def test_choices_stand_side_by_side(tmp_path, tokenizer):
    table = [
        {"stem": "ab", "begin": "c", "one": "d", "two": "efg", "label": n % 2} for n in range(4)
    ]
    columns = {"text": "stem", "pair": "begin", "choices": ["one", "two"]}
    data = opened(
        write(tmp_path / "rows.csv", table), tokenizer, task="multiple_choice", columns=columns
    )
    sample = data.training(0)[0]
    assert sample.ids_BCT.shape == (2, 64)
    texts = [tokenizer.decode(i[m].tolist()) for i, m in zip(*sample[:2], strict=True)]
    assert texts == ["ab<|endoftext|>c d", "ab<|endoftext|>c efg"]


def test_truncation_is_that_of_transformers(tokenizer):
    from tokenizers import Tokenizer as Backend

    backend = Backend.from_str(tokenizer.file_bytes().decode())
    end = tokenizer.end_of_text_id
    for first, second, room in itertools.product(range(0, 12), range(1, 12), range(2, 14)):
        a, b = list(range(first)), list(range(second))
        ours = shortened(a, b, room)
        assert len(ours[0]) + len(ours[1]) == min(room, first + second)
        assert (a[: len(ours[0])], b[: len(ours[1])]) == ours
        if first + second > room and min(first, second) > room // 2:
            assert abs(len(ours[0]) - len(ours[1])) <= 1
    backend.enable_truncation(9, strategy="longest_first")
    whole = backend.encode("abcdefghij", add_special_tokens=False).ids
    assert shortened(tokenizer.encode("abcdefghij"), [], 9)[0] == whole
    assert end not in whole


def test_bert_gets_its_own_form(tmp_path):
    from transformers import BertTokenizerFast

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "c", "d"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    theirs = BertTokenizerFast(vocab={word: n for n, word in enumerate(words)})
    theirs.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    ours = load_tokenizer(tmp_path / "tokenizer.json")
    table = [{"text": "a b", "other": "c d d", "label": n % 2} for n in range(2)]
    path = write(tmp_path / "rows.csv", table)
    settings = SequenceDataConfig.model_validate(
        {"path": str(path), "columns": {"text": "text", "pair": "other"}}
    )
    data = SequenceData(settings, ours, model_kind="bert", max_length=16)
    sample = data.training(0)[0]
    expected = theirs("a b", "c d d", padding="max_length", max_length=16)
    assert sample.ids_BCT[0].tolist() == expected["input_ids"]
    assert sample.mask_BCT[0].long().tolist() == expected["attention_mask"]
    assert sample.second_BCT[0].long().tolist() == expected["token_type_ids"]


def test_an_epoch_has_each_row_once_in_groups_of_similar_length():
    lengths = np.random.default_rng(0).integers(1, 100, 1000)
    orders = [grouped_order(lengths, 8, np.random.default_rng(seed)) for seed in (1, 1, 2)]
    assert (orders[0] == orders[1]).all()
    assert (orders[0] != orders[2]).any()
    assert sorted(orders[0]) == list(range(1000))
    groups = lengths[orders[0]].reshape(-1, 8)
    # 50 groups are sorted together: one spans about two hundredths of all lengths.
    assert np.ptp(groups, axis=1).mean() < 5
    assert np.ptp(lengths[orders[0]].reshape(-1, 8)[:, 0]) > 50  # not from short to long
    alone = grouped_order(lengths, 1, np.random.default_rng(1))
    assert np.ptp(lengths[alone].reshape(-1, 8), axis=1).mean() > 50


def test_the_global_batch_is_the_same_on_any_layout(folder, tokenizer):
    data = opened(folder, tokenizer)

    def rows_of(rank, ranks, micro, start=0):
        batches = micro_batches(
            data.training(5), start_step=start, num_steps=12 - start, global_batch_size=8,
            micro_batch_size=micro, data_parallel_rank=rank, data_parallel_size=ranks,
        )  # fmt: skip
        return list(batches)

    one = rows_of(0, 1, 8)
    two = [rows_of(rank, 2, 2) for rank in range(2)]
    assert [len(b.labels_B) for b in one] == [8] * 12
    for step, whole in enumerate(one):
        parts = [two[rank][2 * step + turn] for turn in range(2) for rank in range(2)]
        texts = [text for part in parts for text in texts_of(part)]
        assert texts == texts_of(whole)
        assert torch.cat([part.labels_B for part in parts]).tolist() == whole.labels_B.tolist()
    later = rows_of(0, 1, 8, start=7)
    assert [texts_of(b) for b in later] == [texts_of(b) for b in one[7:]]
    # Each is padded to its longest, in steps of 8.
    for batch in one:
        longest = int(batch.mask_BCT.sum(-1).max())
        assert batch.ids_BCT.shape[-1] == -(-longest // 8) * 8
    always = opened(folder, tokenizer, padding="max_length").training(5)
    assert always.__getitems__([3, 4])[0].ids_BCT.shape[-1] == 64


def texts_of(batch):
    pairs = zip(batch.ids_BCT[:, 0], batch.mask_BCT[:, 0], strict=True)
    return [tuple(ids[mask].tolist()) for ids, mask in pairs]


def test_what_is_cut_off_is_counted(tmp_path, tokenizer):
    table = [{"text": "x" * n, "label": n % 2} for n in (5, 20, 21, 30)]
    data = opened(write(tmp_path / "rows.csv", table), tokenizer, length=20)
    assert data.encoded("train").cut == 2
    assert data.encoded("train").lengths_R.tolist() == [5, 20, 20, 20]


def test_a_split_whose_labels_are_hidden_cannot_be_scored(tmp_path, tokenizer):
    write(tmp_path / "train.csv", rows(9, 0))
    (tmp_path / "test.jsonl").write_text('{"text": "a", "label": -1}\n')
    data = opened(tmp_path, tokenizer)
    with pytest.raises(DataError, match="its labels are hidden"):
        data.check_split("test")
    with pytest.raises(DataError, match=r"there are 'train', 'test'; data\.held_out: 0\.1"):
        data.check_split("validation")


def test_classes_of_a_checkpoint_number_the_labels(tmp_path, tokenizer):
    for split, names in (("train", ["meow", "bark"]), ("test", ["bark", "meow"])):
        named_table(tmp_path / f"{split}.parquet", names, ["meow", "bark", "meow"])
    named = opened(tmp_path, tokenizer)
    assert named.class_names == ["meow", "bark"]
    assert named.encoded("test").labels_N.tolist() == [0, 1, 0]
    turned = SequenceData(
        named.settings, tokenizer, model_kind="gpt2", max_length=64, classes=["bark", "meow"]
    )
    assert turned.encoded("test").labels_N.tolist() == [1, 0, 1]
    assert turned.contents("train") != named.contents("train")


def test_numbers_of_choices_have_one_meaning_in_all_splits(tmp_path, tokenizer):
    for split, names in (("train", ["first", "second"]), ("test", ["second", "first"])):
        named_table(tmp_path / f"{split}.parquet", names, ["first"], a=["y"], b=["z"])
    keys = {"task": "multiple_choice", "columns": {"choices": ["a", "b"]}}
    with pytest.raises(DataError, match="have to mean the same"):
        opened(tmp_path, tokenizer, **keys)
