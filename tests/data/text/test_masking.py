"""Which tokens are hidden, and that it depends on the sample alone."""

import numpy as np
import pytest
import torch

from polyad.data.text.masking import (
    MaskedSamples,
    MaskedWindows,
    SpecialTokens,
    between_marks,
    hide,
)
from polyad.data.text.samples import TrainingSamples

SPECIAL = SpecialTokens(begin=2, end=3, mask=4, padding=0, end_of_text=3, vocab_size=1000)
LENGTH, COUNT = 32, 5


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(seed))


def test_the_count_is_exact_and_ends_are_never_hidden():
    tokens = between_marks(np.arange(5, 35), SPECIAL)
    for seed in range(200):
        hidden = hide(tokens, COUNT, SPECIAL, generator(seed))
        assert len(hidden.positions_P) == COUNT
        assert (np.diff(hidden.positions_P) > 0).all()
        assert hidden.positions_P.min() > 0
        assert hidden.positions_P.max() < 31
        assert (hidden.target_ids_P == tokens[hidden.positions_P]).all()
        others = np.delete(np.arange(32), hidden.positions_P)
        assert (hidden.input_ids_T[others] == tokens[others]).all()


def test_special_tokens_are_hidden_only_where_there_is_nothing_else():
    # 4 words between ends of documents: they are chosen first, and one end of a document after.
    tokens = between_marks(np.array([3, 3, 7, 3, 8, 3, 3, 9, 10, 3]), SPECIAL)
    for seed in range(50):
        positions = hide(tokens, 5, SPECIAL, generator(seed)).positions_P
        assert {3, 5, 8, 9} < set(positions.tolist())
        assert {0, 11}.isdisjoint(positions.tolist())


def test_shares_are_those_of_the_paper():
    # 40,000 hidden tokens: standard deviations of 0.002 and 0.0015.
    tokens = between_marks(np.full(98, 999), SPECIAL)
    masked = kept = 0
    places = np.zeros(100)
    for seed in range(400):
        hidden = hide(tokens, 98, SPECIAL, generator(seed))
        shown = hidden.input_ids_T[hidden.positions_P]
        masked += (shown == 4).sum()
        kept += (shown == 999).sum()
        places[hide(tokens, 15, SPECIAL, generator(seed)).positions_P] += 1
    assert masked / 39_200 == pytest.approx(0.8, abs=0.008)
    assert kept / 39_200 == pytest.approx(0.1, abs=0.006)
    # Each of 98 places in 15 of 98 samples: 61, with a standard deviation of 7.
    assert places[1:-1].min() > 30
    assert places[1:-1].max() < 95


@pytest.fixture
def samples(prepared):
    def make(seed: int = 7) -> MaskedSamples:
        text = TrainingSamples(prepared.split("train"), LENGTH - 2, seed)
        return MaskedSamples(text, COUNT, SPECIAL._replace(vocab_size=400), seed)

    return make


def test_a_sample_depends_on_its_number_alone(samples):
    one, other = samples(), samples()
    n = one.text.samples_per_epoch
    numbers = [5, 0, n + 5, 3]
    first = {number: one[number] for number in numbers}
    for number in reversed(numbers):
        assert all(map(torch.equal, first[number], other[number]))
    # Another epoch, another sample and another seed hide other tokens.
    assert not torch.equal(first[5].positions_BP, first[n + 5].positions_BP)
    assert not torch.equal(first[0].positions_BP, first[3].positions_BP)
    assert not torch.equal(first[5].positions_BP, samples(8)[5].positions_BP)


def test_windows_read_every_token_once_and_hide_the_same_for_every_run(prepared):
    stream = prepared.split("validation")
    windows = MaskedWindows(stream, LENGTH, COUNT, SPECIAL)
    text = []
    for number in range(len(windows)):
        window = windows[number]
        again = MaskedWindows(stream, LENGTH, COUNT, SPECIAL)[number]
        assert all(map(torch.equal, window, again))
        shown, scored = window.input_ids_T.clone(), window.scored_P
        shown[window.positions_P[scored]] = window.target_ids_P[scored]
        text.append(shown[window.mask_T][1:-1])
        assert (window.input_ids_T[~window.mask_T] == SPECIAL.padding).all()
        assert window.mask_T[window.positions_P[scored]].all()
        assert 1 <= scored.sum() <= COUNT
    assert torch.cat(text).tolist() == stream.read(0, stream.num_tokens).tolist()
    assert windows.num_full in (len(windows), len(windows) - 1)
    assert len(MaskedWindows(stream, LENGTH, COUNT, SPECIAL, max_windows=2)) == 2
