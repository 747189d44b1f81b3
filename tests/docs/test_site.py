"""The documentation site is built without a broken link, and its reference has all of the code."""

import re

import pytest
import yaml

from docs.site import REFERENCE, commands_page, keys_page, main
from polyad.launch.commands import COMMANDS
from polyad.train.config.run import RunConfig
from polyad.train.study import StudyConfig
from tests.helpers.written import SITE, pages_of

NAVIGATION = list(pages_of(yaml.safe_load(SITE.read_text(encoding="utf-8"))["nav"]))


@pytest.mark.slow
def test_every_page_of_the_navigation_is_built_and_loads_nothing_from_elsewhere(tmp_path):
    main(tmp_path / "site")
    for page in NAVIGATION:
        place = page.replace("README.md", "index.md").removesuffix(".md") + ".html"
        text = (tmp_path / "site" / place).read_text(encoding="utf-8")
        assert "<article" in text, page
        loaded = re.findall(
            r'<(?:script|img|link rel="stylesheet")[^>]*(?:src|href)="(http[^"]*)', text
        )
        assert loaded == [], page
        assert "worker.js" in text, page  # for search in pages that are opened from disk
    assert (tmp_path / "site/search/search_index.js").exists()
    assert "polyad.load" in (tmp_path / "site" / REFERENCE / "python.html").read_text()
    assert (tmp_path / "site/model/smoe/index.html").exists()


@pytest.mark.parametrize(("kind", "key"), [(RunConfig, "top_k"), (StudyConfig, "baseline")])
def test_the_reference_of_keys_has_every_key(kind, key):
    text = keys_page("Keys", kind)
    assert f"| `{key}` | " in text
    for name in kind.model_fields:
        assert f"| `{name}` | " in text or f"## {name}" in text, name
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert all(len(re.split(r"(?<!\\)\|", row)) == 6 for row in rows)


def test_the_reference_of_commands_has_every_command():
    text = commands_page()
    for name in COMMANDS:
        assert f"### polyad {name}\n" in text
        assert f"usage: polyad {name}" in text
