"""Pages of `polyad report`, read as a browser reads them."""

import base64
import re
from hashlib import sha256
from html.parser import HTMLParser

VOID = {"meta", "link", "br", "img", "hr", "input"}
"""Elements that never close."""


class Page(HTMLParser):
    """Checks that elements close in order, and keeps what refers to somewhere else."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str | None] = []
        self.tags: set[str] = set()
        self.peaks = 0
        self.ids: list[str] = []
        self.scripts: list[str] = []
        self.policy = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        given = dict(attributes)
        self.links += [given[name] for name in ("src", "href", "action", "data") if name in given]
        self.peaks += given.get("class") == "peak"
        self.ids += [given["id"] or ""] if "id" in given else []
        assert not any(name.startswith("on") for name in given), given
        if given.get("http-equiv") == "Content-Security-Policy":
            self.policy = given["content"] or ""
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["script"]:
            self.scripts.append(data)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def check_scripts(self) -> None:
        """Checks that the only script is the one that the page's policy names by its digest."""
        digests = [base64.b64encode(sha256(one.encode()).digest()).decode() for one in self.scripts]
        allowed = re.findall(r"'sha256-([^']+)'", self.policy)
        assert (allowed, "unsafe-inline" in self.policy.partition("script-src")[2]) == (
            digests,
            False,
        )
        assert len(digests) <= 1
