"""The parts of a report: records, top tokens, choice, contexts."""

import torch

from polyad.train.experts.probing import RoutedLayer
from polyad.train.report.top_tokens import STRETCH, TopTokens, choose_experts, split_text


def layer_of(*levels, shares=True):
    return RoutedLayer(name="blocks.1.feed_forward", levels=levels, shares=shares)


def test_top_tokens_are_those_of_a_sort_whatever_the_batches():
    generator = torch.Generator().manual_seed(1)
    length, experts, top = 3 * STRETCH + 5, 4, 5
    a_BTS = torch.rand(6, length, experts, generator=generator)
    a_BTS[..., 3] = 0  # never used
    position_BT = torch.arange(6 * length).view(6, length)
    position_BT[5, 40:] = -1
    for sizes in ([6], [1, 2, 3], [1] * 6):
        tops = TopTokens(layer_of(experts), top)
        for a, position in zip(a_BTS.split(sizes), position_BT.split(sizes), strict=True):
            tops.add(a, position)
        for expert in range(3):
            best = []  # of every stretch the highest
            for row in range(6):
                for first in range(0, length, STRETCH):
                    places = range(first, min(first + STRETCH, length))
                    counted = [t for t in places if position_BT[row, t] >= 0]
                    if counted:
                        t = max(counted, key=lambda t: a_BTS[row, t, expert])
                        best.append((a_BTS[row, t, expert].item(), int(position_BT[row, t])))
            assert tops.highest(expert) == sorted(best, reverse=True)[:top]
        assert tops.highest(3) == []
        given_S = a_BTS[position_BT >= 0].double().sum(0)
        assert tops.tokens == int((position_BT >= 0).sum())
        torch.testing.assert_close(tops.shares(), [given_S / given_S.sum()])
        sparse = TopTokens(layer_of(experts, shares=False), top)
        sparse.add(a_BTS, position_BT)
        share_S = torch.tensor([1.0, 1.0, 1.0, 0.0]) / 3  # assignments, whatever their weights
        torch.testing.assert_close(sparse.shares(), [share_S.double()])


def test_equal_coefficients_are_not_all_from_the_beginning():
    tops = TopTokens(layer_of(1), 8)
    for window in range(100):
        tops.add(torch.ones(1, STRETCH, 1), torch.arange(STRETCH).view(1, -1) + window * STRETCH)
    coefficients, positions = zip(*tops.highest(0), strict=True)
    assert set(coefficients) == {1.0}
    assert max(positions) > 50 * STRETCH


def test_experts_are_chosen_by_a_spread_of_their_shares():
    share_S = torch.tensor([0.5, 0.2, 0.1, 0.1, 0.06, 0.04, 0.001, 0.0])
    assert choose_experts([share_S], 3) == [0, 2, 5]
    assert choose_experts([share_S], 100) == [0, 1, 2, 3, 4, 5]
    assert choose_experts([share_S[:4], share_S[4:]], 2) == [0, 4]
    assert choose_experts([torch.zeros(4)], 2) == []


def test_contexts_are_split_between_whole_characters(prepared):
    tokenizer = prepared.tokenizer()
    text = "x = '漢字 🙂🙂' <b>\nünï"
    ids = tokenizer.encode(text)
    for at in range(len(ids)):
        before, token, after = split_text(ids, at, tokenizer.decode)
        assert before + token + after == text
        assert token
        assert "\ufffd" not in token
        inside = split_text(ids[max(0, at - 4) : at + 3], min(at, 4), tokenizer.decode)
        assert inside[0] + token in text
        assert "\ufffd" not in inside[0] + inside[2]
