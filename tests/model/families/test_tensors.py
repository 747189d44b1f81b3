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
GATE, UP = OURS, OURS + 1000
CASES = {
    "renamed": ([(Rule(("a",)), MATRIX)], {"a": MATRIX}),
    "transposed": ([(transposed("a"), MATRIX)], {"a": MATRIX.T}),
    "a vector is not": ([(transposed("a"), VECTOR)], {"a": VECTOR}),
    "rows": (
        [(rows("q", "k", "v"), MATRIX)], {"q": MATRIX[:2], "k": MATRIX[2:4], "v": MATRIX[4:]},
    ),
    "more axes": ([(parameter("a", 2), MATRIX)], {"a": MATRIX[None, None]}),
    "fewer axes": ([(parameter("a", -1), MATRIX[:1])], {"a": MATRIX[0]}),
    "experts": (
        [(per_expert("e.{expert}.w"), OURS)],
        {f"e.{number}.w": OURS[number].T for number in range(4)},
    ),
    # Granite: [E, 2 out, in], the gate's outputs first.
    "halves": (
        [(half("w", index, is_transposed=True), each) for index, each in enumerate((GATE, UP))],
        {"w": torch.cat([GATE.mT, UP.mT], dim=1)},
    ),
    # gpt-oss: [E, in, 2 out], columns of gate, up, gate, ...
    "turns": (
        [(every_other("w", index), each) for index, each in enumerate((GATE, UP))],
        {"w": torch.stack([GATE, UP], -1).flatten(-2)},
    ),
    # A shared expert: [2 out, in].
    "of a matrix": (
        [(half("w", index), each[0]) for index, each in enumerate((GATE, UP))],
        {"w": torch.cat([GATE[0], UP[0]])},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_rules_write_what_they_read_box_by_box(case):
    weights, expected = CASES[case]
    stored = file_of(*weights)
    assert stored.keys() == expected.keys()
    assert all(torch.equal(stored[name], tensor) for name, tensor in expected.items())
    for rule, ours in weights:
        for box in boxes(ours.shape):
            assert torch.equal(read(rule, stored, tuple(ours.shape), box), ours[box])
