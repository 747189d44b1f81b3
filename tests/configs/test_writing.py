"""Every file of a run is what `make configs` writes, and how it puts one together."""

from tests.configs.test_shipped import NAMES
from tests.configs.writing import CONFIGS, read_sources, written

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
