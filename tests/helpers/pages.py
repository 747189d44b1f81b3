"""Pages of `polyad report`, read as a browser reads them."""

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
        self.ids: list[str] = []
        self.policy = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        given = dict(attributes)
        self.links += [given[name] for name in ("src", "href", "action", "data") if name in given]
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

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
