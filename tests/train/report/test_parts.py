"""The parts of a report: history, top tokens, choice, contexts."""

import base64
import json
import re
import struct

import pytest
import torch

from polyad.data.text.dataset import PreparedData
from polyad.train.errors import ConfigError
from polyad.train.experts.probing import RoutedLayer
from polyad.train.report import snippets
from polyad.train.report.history import read_history
from polyad.train.report.layers import load_figures
from polyad.train.report.snippets import (
    Documents,
    WordTokens,
    has_word,
    line_numbers,
    pieces,
)
from polyad.train.report.top_text import Top, merged
from polyad.train.report.top_tokens import STRETCH, TopTokens, choose_experts
from tests.helpers.prepared import jsonl, silent

LAYER = "routing/blocks.1.feed_forward"


def write(folder, lines):
    text = "".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text)
    return folder


def test_records_fall_into_spans_of_which_the_mean_is_kept(tmp_path):
    lines = [
        {"step": s, "loss": float(s), f"{LAYER}/entropy": 2.0 * s, f"{LAYER}/load": [s, 0.0]}
        for s in range(1, 11)
    ]
    history = read_history(write(tmp_path, lines), max_points=4)
    # Ten steps in spans of three: 1-3, 4-6, 7-9, 10.
    assert (history.width, history.steps) == (3, [3, 6, 9, 10])
    assert history.scalars["loss"] == [2, 5, 8, 10]
    layer = history.layers["blocks.1.feed_forward"]
    assert layer.scalars["entropy"] == [4, 10, 16, 20]
    assert history.final_loss == 5.5


def test_a_heat_map_has_a_column_for_each_record_with_loads(tmp_path):
    # Every third of 1,800 steps, and one with a validation: 601 columns, where curves have 225.
    logged = [*range(3, 1801, 3), 100]
    lines = [
        {"step": s, "loss": 1.0} | ({f"{LAYER}/load": [s, 0.0]} if s in logged else {})
        for s in range(1, 1801)
    ]
    history = read_history(write(tmp_path, lines))
    assert len(history.steps) == 225
    assert (history.load_steps, history.load_width) == (sorted(logged), 1)
    layer = history.layers["blocks.1.feed_forward"]
    assert [row[0] for row in layer.load] == sorted(logged)
    routed = RoutedLayer(name="blocks.1.feed_forward", levels=(2,))
    (figure,) = load_figures(history, routed, layer)
    html = figure.__html__()
    image = base64.b64decode(re.search(r"base64,([^\"]+)", html)[1])
    assert struct.unpack(">II", image[16:24]) == (601, 2)
    assert "one column per step whose record" in html


@pytest.mark.parametrize(
    ("records", "steps", "loads"),
    [
        (4, [1, 2, 3, 4], [1, 2, 3, 4]),
        # Two share a column from the fifth on: 1 and 2, 3 and 4, 5.
        (5, [2, 4, 5], [1.5, 3.5, 5]),
        (8, [2, 4, 6, 8], [1.5, 3.5, 5.5, 7.5]),
        (9, [4, 8, 9], [2.5, 6.5, 9]),  # four of them
        (14, [4, 8, 12, 14], [2.5, 6.5, 10.5, 13.5]),
    ],
)
def test_records_beyond_the_pixels_share_columns_evenly(tmp_path, records, steps, loads):
    lines = [{"step": s, "loss": 1.0, f"{LAYER}/load": [s, 0.0]} for s in range(1, records + 1)]
    history = read_history(write(tmp_path, lines), max_columns=4)
    assert history.load_steps == steps
    assert [row[0] for row in history.layers["blocks.1.feed_forward"].load] == loads


def test_an_odd_number_of_pixels_loses_no_record(tmp_path):
    lines = [{"step": s, "loss": 1.0, f"{LAYER}/load": [s, 0.0]} for s in range(1, 8)]
    history = read_history(write(tmp_path, lines), max_columns=3)
    assert history.load_steps == [4, 7]
    assert [row[0] for row in history.layers["blocks.1.feed_forward"].load] == [2.5, 6]


def test_of_a_step_that_was_done_again_the_later_record_counts_and_all_behind_it_goes(tmp_path):
    first = [{"step": s, "loss": 9.0} for s in (1, 2, 3, 4, 5)]
    again = [{"step": s, "loss": 1.0} for s in (3, 4)]
    history = read_history(write(tmp_path, [*first, *again]))
    assert history.steps == [1, 2, 3, 4]
    assert history.scalars["loss"] == [9, 9, 1, 1]
    assert history.last_record["step"] == 4


def test_a_line_that_is_being_written_and_what_is_not_finite_are_left_out(tmp_path):
    lines = [{"step": 1, "loss": None}, "garbage\n", {"step": 2, "loss": 3.0}, '{"step": 3, "lo']
    history = read_history(write(tmp_path, lines))
    assert history.steps == [1, 2]
    assert history.scalars["loss"] == [None, 3.0]
    assert history.unreadable == 2
    assert history.final_loss == 3.0


def test_layers_stand_in_the_order_of_the_model(tmp_path):
    record = {f"routing/blocks.{block}.feed_forward/entropy": 1.0 for block in (10, 2, 0)}
    history = read_history(write(tmp_path, [{"step": 1, "loss": 1.0} | record]))
    assert list(history.layers) == [f"blocks.{block}.feed_forward" for block in (0, 2, 10)]


@pytest.mark.parametrize("lines", [[], ["\n"], ['{"step": 1, "lo']])
def test_a_file_without_a_record_is_one_line(tmp_path, lines):
    with pytest.raises(ConfigError, match="contains no record of a step yet"):
        read_history(write(tmp_path, lines))


def test_top_tokens_are_those_of_a_sort_whatever_the_batches():
    generator = torch.Generator().manual_seed(1)
    length, experts, top = 3 * STRETCH + 5, 4, 5
    a_BTS = torch.rand(6, length, experts, generator=generator)
    a_BTS[..., 3] = 0  # never used
    position_BT = torch.arange(6 * length).view(6, length)
    position_BT[5, 40:] = -1
    for sizes in ([6], [1, 2, 3], [1] * 6):
        tops = TopTokens(experts, top)
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
        totals = tops.totals()
        counted_MS = a_BTS[position_BT >= 0]
        assert totals.tokens == len(counted_MS)
        torch.testing.assert_close(totals.load_S, counted_MS.double().mean(0))
        torch.testing.assert_close(totals.dominant_S, (counted_MS >= 0.5).double().mean(0))
        torch.testing.assert_close(totals.active_S, (counted_MS > 0).double().mean(0))


def test_equal_coefficients_are_not_all_from_the_beginning():
    tops = TopTokens(1, 8)
    for window in range(100):
        tops.add(torch.ones(1, STRETCH, 1), torch.arange(STRETCH).view(1, -1) + window * STRETCH)
    coefficients, positions = zip(*tops.highest(0), strict=True)
    assert set(coefficients) == {1.0}
    assert max(positions) > 50 * STRETCH


def test_words_are_told_from_punctuation_and_white_space(prepared):
    words = ["a", " the", "x=1", "é", "漢", "_a", "½", "🙂", "\ufffd", "\u0947", "s)"]
    others = ["", " ", "\n\n", "\t", ".", " ==", "(){}", "—", "«", "$", "`", "\x00", "…", "__"]
    assert [has_word(text) for text in words] == [True] * len(words)
    assert [has_word(text) for text in others] == [False] * len(others)
    tokenizer = prepared.tokenizer()
    ids = torch.tensor(
        [tokenizer.encode("def f():\n    return"), tokenizer.encode("def f():\n    return")]
    )
    expected = [has_word(tokenizer.decode([int(token)])) for token in ids[0]]
    assert {True, False} <= set(expected)
    assert WordTokens(tokenizer)(ids).tolist() == [expected] * 2
    assert WordTokens(tokenizer)(torch.tensor([[tokenizer.end_of_text_id]])).tolist() == [[False]]


def test_the_highest_of_all_and_of_words_are_one_list_in_order():
    every = [(0.9, 7), (0.8, 3), (0.8, 5)]
    words = [(0.8, 3), (0.5, 9), (0.4, 1)]
    assert merged(every, words) == [
        Top(0.9, 7, among_all=True, among_words=False),
        Top(0.8, 3, among_all=True, among_words=True),
        Top(0.8, 5, among_all=True, among_words=False),
        Top(0.5, 9, among_all=False, among_words=True),
        Top(0.4, 1, among_all=False, among_words=True),
    ]


def test_experts_are_chosen_by_dominance_and_a_spread_of_load():
    tops = TopTokens(8, 1)
    # Loads 0.5, 0.2, 0.1, 0.1, 0.06, 0.04, 0, 0; expert 3 alone has halves of tokens.
    a_MS = torch.tensor([0.5, 0.2, 0.1, 0.1, 0.06, 0.04, 0.0, 0.0]).repeat(10, 1)
    a_MS[0] = torch.tensor([0, 0, 0, 1.0, 0, 0, 0, 0])
    a_MS[:, 0] = 0.49
    tops.add(a_MS.view(1, 10, 8), torch.arange(10).view(1, 10))
    # Half of four may be dominant, one is; of 0, 1, 2, 4, 5 by load three at equal distances.
    assert choose_experts(tops.totals(), (8,), 4) == [0, 2, 3, 5]
    assert choose_experts(tops.totals(), (8,), 100) == [0, 1, 2, 3, 4, 5]
    assert choose_experts(tops.totals(), (4, 4), 2) == [0, 4]


@pytest.mark.parametrize(("num_experts", "coefficient"), [(64, 1 / 64), (32, 1.0)])
def test_load_is_beside_its_mean_where_coefficients_do_not_sum_to_1(num_experts, coefficient):
    """A score of top 1 is its weight, and groups of units weigh 1 each."""
    tops = TopTokens(num_experts, 1)
    a_MS = torch.zeros(num_experts, num_experts)
    for token in range(num_experts):
        a_MS[token, [token, token - 1]] = coefficient
    tops.add(a_MS[None], torch.arange(num_experts)[None])
    totals = tops.totals()
    torch.testing.assert_close(
        totals.times_mean((num_experts,)).double(), torch.ones(num_experts).double()
    )
    assert len(choose_experts(totals, (num_experts,), 8)) == 8
    assert not TopTokens(4, 1).totals().times_mean((2, 2)).any()


def test_experts_of_several_levels_have_two_numbers():
    layer = RoutedLayer(name="blocks.3.feed_forward", levels=(4, 2))
    assert [layer.expert_name(column) for column in (0, 3, 4, 5)] == ["0.0", "0.3", "1.0", "1.1"]
    assert (layer.block, layer.num_experts) == (3, 6)


def test_contexts_are_whole_characters_and_say_each_tokens_coefficient(prepared):
    tokenizer, stream = prepared.tokenizer(), prepared.split("train")
    text = "x = '漢字 🙂🙂' <b>\nünï"
    ids = tokenizer.encode(text)
    place = Documents(stream).place(0, -1, 10)._replace(read_first=0, read_stop=len(ids))
    for position in range(len(ids)):
        for first in range(max(0, position - 5), position + 1):
            here = place._replace(position=position, first=first, stop=position + 4)
            coefficients = [index / 100 for index in range(len(ids))]
            shown = pieces(here, ids, coefficients, tokenizer.decode, tokenizer.end_of_text_id)
            joined = "".join(piece.text for piece in shown)
            assert "\ufffd" not in joined
            assert joined in text
            (peak,) = [piece for piece in shown if piece.is_peak]
            assert position / 100 in peak.coefficients
    end = tokenizer.end_of_text_id
    shown = pieces(
        place._replace(read_stop=2, stop=2), [ids[0], end], [0, 1], tokenizer.decode, end
    )
    assert shown[-1].text == "<end of text>"


def test_a_place_stays_in_its_document_and_window(prepared):
    stream = prepared.split("train")
    lengths = stream.document_lengths
    first = int(lengths[0])
    place = Documents(stream).place(first, first - 9, first + 20)  # first token of the second
    assert (place.document, place.offset) == (1, 0)
    assert (place.first, place.read_first) == (first, first)
    assert place.stop == place.read_stop - 3 == first + 13
    place = Documents(stream).place(first - 1, first - 9, first + 20)  # the end of the first
    assert (place.document, place.offset) == (0, first - 1)
    assert (place.first, place.stop) == (first - 9, first)
    # A character that the window's edge cuts is read whole, but not beyond the document.
    assert (place.read_first, place.read_stop) == (first - 12, first)


def test_lines_are_those_of_the_decoded_document(prepared, monkeypatch):
    tokenizer, stream = prepared.tokenizer(), prepared.split("train")
    documents = Documents(stream)
    monkeypatch.setattr(snippets, "AT_ONCE", 50)
    ends = [0, *stream.document_lengths.cumsum().tolist()]
    positions = [p for first in ends[:3] for p in (first, first + 1, first + 170, first + 171)]
    places = [documents.place(p, p - 5, p + 5) for p in positions]
    found = line_numbers([*places, places[0]], stream, tokenizer)
    assert sorted(found) == sorted(set(positions))
    for place in places:
        begin = place.position - place.offset
        before = tokenizer.decode(stream.read(begin, place.position).tolist())
        whole = tokenizer.decode(stream.read(begin, place.position + 1).tolist())
        token = whole[len(before) :]
        # The line of the first character that is no white space, if there is one.
        upto = before + (token[: -len(token.lstrip())] if token.strip() else "")
        assert found[place.position] == 1 + upto.count("\n")
    assert max(found.values()) > 3


def test_tokens_that_keep_no_line_ends_have_no_lines(tmp_path):
    texts = [f"some words {number}" for number in range(60)]
    silent(jsonl(tmp_path / "a.jsonl", texts), "words", tmp_path / "data")
    data = PreparedData.open(tmp_path / "data")
    place = Documents(data.split("train")).place(1, 0, 3)
    assert line_numbers([place], data.split("train"), data.tokenizer()) == {}


def test_thousands_of_experts_share_the_rows_of_a_heat_map(tmp_path):
    lines = [{"step": s, "loss": 1.0, f"{LAYER}/load": [e / 500 for e in range(1000)]}
             for s in (1, 2)]  # fmt: skip
    history = read_history(write(tmp_path, lines))
    layer = RoutedLayer(name="blocks.1.feed_forward", levels=(1000,))
    (figure,) = load_figures(history, layer, history.layers[layer.name])
    html = figure.__html__()
    image = base64.b64decode(re.search(r"base64,([^\"]+)", html)[1])
    assert struct.unpack(">II", image[16:24]) == (2, 256)
    assert "4 experts share a row" in html
    # Busiest first: 999, 998, 997 and 996 of 500, of 1000 experts.
    assert "experts 999, ...: latest load 1,995 times the mean" in html
