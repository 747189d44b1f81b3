import pytest
import torch

from polyad.data.errors import DataError
from polyad.data.sampler import held_out_batches
from polyad.data.text.dataset import TokenStream
from polyad.data.text.samples import EvaluationWindows


def naive_windows(tokens, length, stride, end):
    """Which targets each window scores, by stepping through the stream."""
    context = [end, *tokens]
    scored_to, start, windows = 0, 0, []
    while scored_to < len(tokens):
        stop = min(start + length, len(tokens))
        windows.append((context[start:stop], tokens[start:stop], scored_to - start))
        scored_to, start = stop, start + stride
    return windows


@pytest.mark.parametrize(("length", "stride"), [(64, 64), (64, 32), (64, 1), (50, 37), (7, 3)])
def test_windows_equal_a_naive_computation(prepared, length, stride):
    stream = prepared.split("validation")
    stream = TokenStream(stream.prefix, 500, stream.num_documents, stream.vocab_size)
    end = prepared.manifest.tokenizer.end_of_text_id
    windows = EvaluationWindows(stream, length, stride, end)
    expected = naive_windows(stream.read(0, 500).tolist(), length, stride, end)
    assert len(windows) == len(expected)
    for number, (inputs, targets, first) in enumerate(expected):
        window = windows[number]
        assert [field.shape for field in window] == [(length,)] * 3
        assert [field.dtype for field in window] == [torch.int64, torch.int64, torch.bool]
        assert window.input_BT[: len(inputs)].tolist() == inputs
        assert window.target_BT[: len(targets)].tolist() == targets
        positions = window.scored_BT.nonzero().flatten().tolist()
        assert positions == list(range(first, len(targets)))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ranks_share_the_windows_in_equal_batches(prepared, world_size):
    stream = prepared.split("test")
    windows = EvaluationWindows(stream, 128, 100, 0)
    ranks = [
        list(held_out_batches(windows, 3, rank, world_size, torch.device("cpu")))
        for rank in range(world_size)
    ]
    assert len({len(batches) for batches in ranks}) == 1
    assert all(field.shape == (3, 128) for batches in ranks for b, *_ in batches for field in b)
    dealt = [batches[i] for i in range(len(ranks[0])) for batches in ranks]
    scored = torch.cat([b.target_BT[b.scored_BT & own_B[:, None]] for b, own_B, _ in dealt])
    assert scored.tolist() == stream.read(0, stream.num_tokens).tolist()


def test_bad_arguments_are_refused(prepared):
    stream = prepared.split("test")
    for stride in (0, 9):
        with pytest.raises(DataError, match=f"stride {stride}: at least 1 and at most"):
            EvaluationWindows(stream, 8, stride, 0)
    with pytest.raises(DataError, match="no tokens to evaluate on"):
        EvaluationWindows(TokenStream(stream.prefix, 0, 0, 256), 8, 8, 0)
