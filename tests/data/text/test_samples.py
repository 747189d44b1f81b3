import hashlib
import json
import pickle
import re

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from polyad.data.config import DataConfig
from polyad.data.errors import DataError
from polyad.data.text.dataset import PreparedData
from polyad.data.text.prepare import prepare
from polyad.data.text.samples import (
    BLOCK,
    MixedSamples,
    TrainingData,
    TrainingSamples,
    shares_of_a_block,
)

LENGTH = 16


@pytest.fixture(scope="module")
def folders(tmp_path_factory, library_text, prepared_path):
    """Three prepared folders of different texts and one tokenizer; the last validates nothing."""
    root = tmp_path_factory.mktemp("mixture")
    size = len(library_text) // 3
    for number, name in enumerate("abc"):
        text = library_text[number * size : (number + 1) * size]
        lines = [json.dumps({"text": text[i : i + 1000]}) for i in range(0, size, 1000)]
        (root / f"{name}.jsonl").write_text("\n".join(lines))
        fraction = 0.0 if name == "c" else 0.1
        source = str(root / f"{name}.jsonl")
        prepare(source, str(prepared_path), root / name, validation_fraction=fraction)
    return root


def mixture(folders, **weights):
    sources = [{"path": str(folders / name), "weight": w} for name, w in weights.items()]
    return TrainingData.open(DataConfig.model_validate({"mixture": sources}))


def sources(folders, names="abc", seed=5):
    streams = [PreparedData.open(folders / name).split("train") for name in names]
    return [TrainingSamples(stream, LENGTH, seed) for stream in streams]


def test_each_sample_is_the_next_of_its_source(folders):
    mixed = mixture(folders, a=3, b=1, c=2).samples(LENGTH, seed=5)
    each = sources(folders)
    taken = [0, 0, 0]
    for g in range(3000):
        source, number = mixed.place(g)
        assert number == taken[source]
        assert torch.equal(mixed[g], each[source][number])
        taken[source] += 1
    assert taken == [1500, 500, 1000]


@pytest.mark.parametrize("weights", [(0.7, 0.2, 0.1), (1, 1), (5, 1, 1, 1, 92), (0.999, 0.001)])
def test_any_beginning_holds_the_shares(weights):
    shares = np.array(weights) / sum(weights)
    mixed = MixedSamples([_Counted()] * len(shares), shares, seed=1)
    chosen = np.array([mixed.place(g)[0] for g in range(20_000)])
    for source, share in enumerate(shares):
        counts = np.cumsum(chosen == source)
        expected = share * np.arange(1, len(chosen) + 1)
        assert np.abs(counts - expected).max() <= len(shares) + 1


class _Counted:
    samples_per_epoch = 1000


def test_places_go_on_over_the_end_of_a_block():
    mixed = MixedSamples([_Counted()] * 2, [0.75, 0.25], seed=9)
    around = [mixed.place(g) for g in range(BLOCK - 50, BLOCK + 50)]
    for source in (0, 1):
        numbers = [number for s, number in around if s == source]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    assert mixed.place(BLOCK)[1] in (BLOCK * 3 // 4, BLOCK // 4)


def test_shares_of_a_block_by_hand():
    assert shares_of_a_block([0.5, 0.5]).tolist() == [65536, 65536]
    # 131072 / 3 = 43690.67: the two largest remainders, here the first two, get one more.
    assert shares_of_a_block([1 / 3] * 3).tolist() == [43691, 43691, 43690]
    assert shares_of_a_block([1 - 1 / BLOCK, 1 / BLOCK]).tolist() == [BLOCK - 1, 1]


def test_order_depends_on_the_seed_and_nothing_else(folders):
    data = mixture(folders, a=3, b=1, c=2)
    one, other = data.samples(LENGTH, seed=1), data.samples(LENGTH, seed=2)
    places = [one.place(g) for g in range(200)]
    assert places != [other.place(g) for g in range(200)]
    double = mixture(folders, a=6, b=2, c=4).samples(LENGTH, seed=1)
    for same in (pickle.loads(pickle.dumps(one)), double):
        assert [same.place(g) for g in range(200)] == places


def test_the_order_is_frozen():
    # Another order would change every resumed run.
    mixed = MixedSamples([_Counted()] * 3, [0.5, 0.3, 0.2], seed=1234)
    digest = hashlib.sha256(str([mixed.place(g) for g in range(1000)]).encode()).hexdigest()
    assert digest.startswith("fa29a77a4d50038d")


def test_one_source_is_the_folder_itself(folders):
    alone = mixture(folders, a=7)
    path = TrainingData.open(DataConfig(path=str(folders / "a")))
    assert alone.fingerprint == path.fingerprint == path.parts[0].data.manifest.fingerprint
    one, other = (data.samples(LENGTH, seed=5) for data in (alone, path))
    assert all(torch.equal(one[number], other[number]) for number in range(50))


def test_fingerprint_knows_data_weights_and_order(folders):
    first = mixture(folders, a=1, b=3).fingerprint
    assert mixture(folders, a=2, b=6).fingerprint == first
    others = [mixture(folders, a=1, b=2), mixture(folders, b=3, a=1), mixture(folders, a=1, c=3)]
    assert len({first, *(data.fingerprint for data in others)}) == 4


def test_validation_leaves_out_what_has_none(folders):
    parts = mixture(folders, a=3, b=1, c=4).validation()
    assert [(part.name, part.share) for part in parts] == [("a", 0.75), ("b", 0.25)]
    assert parts[1].data.split("validation").num_tokens > 0


@pytest.mark.parametrize(
    "value",
    [
        {"path": "x", "mixture": [{"path": "a", "weight": 1}]},
        {"mixture": [{"path": "a", "weight": 0}]},
        {"mixture": [{"path": "x/a", "weight": 1}, {"path": "y/a", "weight": 1}]},
    ],
)
def test_bad_mixture_is_refused(value):
    with pytest.raises(ValidationError, match="mixture"):
        DataConfig.model_validate(value)


@pytest.mark.parametrize(
    ("weights", "key"),
    [
        ({"a": 1, "no_folder": 1}, "data.mixture.1.path"),
        ({"a": 1, "other_tokenizer": 1}, "data.mixture.1.path"),
        ({"a": 1, "b": 1e-6}, "data.mixture.1.weight"),
    ],
)
def test_a_folder_that_cannot_be_mixed_in_is_named(folders, weights, key):
    prepare(str(folders / "a.jsonl"), "train:300", folders / "other_tokenizer", overwrite=True)
    with pytest.raises(DataError, match=f"^{re.escape(key)}: "):
        mixture(folders, **weights)


def test_a_split_shorter_than_a_sample_is_refused(folders):
    stream = PreparedData.open(folders / "a").split("train")
    TrainingSamples(stream, stream.num_tokens - 1, 0)
    with pytest.raises(DataError, match=r"a/train\.bin: .* tokens, but one sample"):
        TrainingSamples(stream, stream.num_tokens, 0)
