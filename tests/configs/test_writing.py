"""Every file of a run is what `make configs` writes, and how it puts one together."""

import pytest

from tests.configs.test_shipped import NAMES
from tests.configs.writing import CONFIGS, parse, read_sources, written

SOURCES = read_sources()


def test_each_file_of_a_run_has_a_source_and_each_source_a_file():
    assert sorted(f"{name}.yaml" for name in SOURCES.keys() - {"base"}) == sorted(NAMES)


def test_files_are_what_their_sources_say():
    others = [
        name
        for name in SOURCES.keys() - {"base"}
        if (CONFIGS / f"{name}.yaml").read_text(encoding="utf-8") != written(name, SOURCES)
    ]
    assert not others, "change tests/configs/deltas, and give `make configs`"


def changed(other: list[str], delta: list[str]) -> list[str]:
    return list(parse(other).changed(parse(delta)).lines())


OTHER = ["a: 1  # one", "b:  # block", "  kind: x", "  c: 2", "  d:", "    e: 3", "f: 4"]


@pytest.mark.parametrize(
    ("delta", "expected"),
    [
        ([], OTHER),
        (["a: 5  # five"], ["a: 5  # five", *OTHER[1:]]),
        (["b:", "  d:", "    e: 6"], [*OTHER[:5], "    e: 6", "f: 4"]),
        (["!f", "b:", "  !d"], OTHER[:4]),
        (["b:", "  kind: x", "  n: 7"], [*OTHER[:3], "  n: 7", *OTHER[3:]]),
        (["first: 0", "f: 8", "last: 9"], ["first: 0", *OTHER[:-1], "f: 8", "last: 9"]),
        (["b:", "  kind: y", "  n: 7"], [*OTHER[:2], "  kind: y", "  n: 7", "f: 4"]),
    ],
)
def test_a_delta_changes_inserts_and_leaves_out_lines(delta, expected):
    assert changed(OTHER, delta) == expected
