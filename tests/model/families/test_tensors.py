"""Rules of names, on a family that no library has: boxes of ours, and files written from ours."""

import itertools

import pytest
import torch

from polyad.model.families.tensors import (
    Rule,
    every_other,
    half,
    parameter,
    per_expert,
    rows,
    transposed,
)

OURS = torch.arange(4 * 6 * 10.0).view(4, 6, 10)
"""[E, in, out] for experts; parts of it for others."""


def file_of(*weights):
    """The tensors that rules write, by name; of each weight its rule and itself."""
    stored = {}
    for rule, weight in weights:
        for piece in rule.pieces(tuple(weight.shape)):
            tensor = stored.setdefault(piece.name, torch.full(piece.shape, -1.0))
            piece.write(tensor, weight)
    return stored


def read(rule, stored, shape, slices):
    parts = []
    for piece in rule.pieces(shape):
        start = max(slices[0].start, piece.rows.start) - piece.rows.start
        stop = min(slices[0].stop, piece.rows.stop) - piece.rows.start
        if start < stop:
            box = (slice(start, stop), *slices[1:])
            size = tuple(each.stop - each.start for each in box)
            parts.append(piece.in_our_form(stored[piece.name][piece.box(box)], size))
    return torch.cat(parts)


def boxes(shape):
    """Boxes of a weight: all of it, its corners, its middle."""
    ends = [sorted({(0, n), (0, 1), (n - 1, n), (n // 3, n - n // 4)}) for n in shape]
    return [tuple(slice(*each) for each in box) for box in itertools.product(*ends)]


MATRIX, VECTOR = OURS[0], OURS[1, 2]
CASES = {
    "renamed": (Rule(("a",)), MATRIX, {"a": MATRIX}),
    "transposed": (transposed("a"), MATRIX, {"a": MATRIX.T}),
    "a vector is not": (transposed("a"), VECTOR, {"a": VECTOR}),
    "rows": (rows("q", "k", "v"), MATRIX, {"q": MATRIX[:2], "k": MATRIX[2:4], "v": MATRIX[4:]}),
    "more axes": (parameter("a", 2), MATRIX, {"a": MATRIX[None, None]}),
    "fewer axes": (parameter("a", -1), MATRIX[:1], {"a": MATRIX[0]}),
    "experts": (
        per_expert("e.{expert}.w"), OURS, {f"e.{number}.w": OURS[number].T for number in range(4)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_rule_writes_what_it_reads_box_by_box(case):
    rule, ours, expected = CASES[case]
    stored = file_of((rule, ours))
    assert stored.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(stored[name], tensor)
    for box in boxes(ours.shape):
        assert torch.equal(read(rule, stored, tuple(ours.shape), box), ours[box])


GATE, UP = OURS, OURS + 1000
FUSED = {
    # Granite: [E, 2 out, in], the gate's outputs first.
    "halves": (
        lambda index: half("w", index, is_transposed=True),
        torch.cat([GATE.mT, UP.mT], dim=1),
    ),
    # gpt-oss: [E, in, 2 out], columns of gate, up, gate, ...
    "turns": (lambda index: every_other("w", index), torch.stack([GATE, UP], -1).flatten(-2)),
    # A shared expert: [2 out, in].
    "of a matrix": (lambda index: half("w", index), torch.cat([GATE[0], UP[0]])),
}


@pytest.mark.parametrize("case", FUSED)
def test_two_weights_share_a_fused_tensor(case):
    rule, fused = FUSED[case]
    gate, up = (GATE[0], UP[0]) if case == "of a matrix" else (GATE, UP)
    stored = file_of((rule(0), gate), (rule(1), up))
    assert stored.keys() == {"w"}
    assert torch.equal(stored["w"], fused)
    for index, ours in enumerate((gate, up)):
        for box in boxes(ours.shape):
            assert torch.equal(read(rule(index), stored, tuple(ours.shape), box), ours[box])
