"""Draws a part of a report as one SVG file: the picture in the root README.

    polyad report RUN --top 4
    python docs/picture.py RUN/report.html docs/report.svg --block 2 --experts 3,2

Charts, numbers and texts are the page's own. Styles are written out, so that the file looks alike
wherever it is shown as an image. The run of the picture in this folder:

    polyad prepare --source python-stdlib --tokenizer train:4096 --output runs/picture/data \
        --validation-fraction 0.02 --test-fraction 0.02
    polyad train configs/quickstart/gpt2-smoe.yaml run.folder=runs/picture/run \
        data.path=runs/picture/data model.hidden_size=128 \
        model.feed_forward.expert_hidden_size=256 parallel.expert_parallel_size=1 \
        train.steps=300 log.every=2 evaluation.every=25
    polyad report runs/picture/run --tokens 60000 --top 4
"""

import argparse
import base64
import re
import struct
import zlib
from collections.abc import Iterator
from html import escape, unescape
from pathlib import Path

WIDTH, MARGIN, GAP = 1120, 30, 14
INNER = WIDTH - 2 * MARGIN
HALF = (INNER - GAP) // 2
CHARACTER, LINE = 6.6, 17
"""Of the monospaced text, in pixels."""
LINES_SHOWN = 3
"""Of a token's context."""
MARK = (226, 152, 24)
PAPER, CARD, INK, SOFT, EDGE = "#f7f7f5", "#ffffff", "#1f2328", "#57606a", "#dcdfe3"
COLOURS = {
    "accent": "#1f5f8b", "second": "#b4541a", "shallow": "#8fb8cf", "deep": "#173f5f",
    "unused": "#f3e2c9",
}  # fmt: skip
CSS = f"""
text {{ font-family: system-ui, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
  fill: {INK}; font-size: 14px; }}
.soft {{ fill: {SOFT}; font-size: 12.5px; }} .tick {{ fill: {SOFT}; font-size: 11px; }}
.kicker {{ fill: {COLOURS["accent"]}; font-size: 12px; font-weight: 600; letter-spacing: 1px; }}
.title {{ font-size: 25px; font-weight: 700; }} .fact {{ font-size: 17px; font-weight: 600; }}
.heading {{ font-weight: 600; }} .section {{ font-size: 18px; font-weight: 700; }}
.card {{ fill: {CARD}; stroke: {EDGE}; }} line.grid {{ stroke: {EDGE}; }}
.curve {{ fill: none; stroke-width: 1.8; stroke-linejoin: round; stroke-linecap: round; }}
.unused {{ fill: {COLOURS["unused"]}; }} .frame {{ fill: none; stroke: {INK}; stroke-width: 1.3; }}
.code {{ font-family: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace;
  font-size: 11px; white-space: pre; }}
"""


def main() -> None:
    """Reads the command line, and writes the picture."""
    parser = argparse.ArgumentParser(description="Draws a part of a report as one SVG file.")
    parser.add_argument("page", type=Path, help="report.html")
    parser.add_argument("picture", type=Path, help="the .svg file to write")
    parser.add_argument("--block", default="0", help="whose load and experts are shown")
    parser.add_argument("--experts", default="0", help="of that block, as 3,2")
    options = parser.parse_args()
    page = options.page.read_text(encoding="utf-8")
    options.picture.write_text(picture(page, options.block, options.experts.split(",")))


def picture(page: str, block: str, experts: list[str]) -> str:
    """The picture of a page.

    Args:
        page: HTML as `polyad report` writes it.
        block: whose load over time is drawn.
        experts: of this block, whose tokens are shown.

    Returns:
        SVG.
    """
    parts: list[str] = []
    y = _header(page, parts)
    for names in (["Loss"], ["Evenness of each token's mixture (1 = all experts alike)",
                             "Load of the busiest expert"]):  # fmt: skip
        width = INNER if len(names) == 1 else HALF
        heights = [
            _figure(_named(page, name), MARGIN + i * (HALF + GAP), y, width, parts)
            for i, name in enumerate(names)
        ]
        y += max(heights) + GAP
    layer = re.split(r'<details class="layer"', page.partition(f"<b>Block {block}</b>")[2])[0]
    facts = ", ".join(re.findall(r"<span>(.*?)</span>", layer.partition("</summary>")[0]))
    parts.append(f'<text class="section" x="{MARGIN}" y="{y + 20}">Block {block}</text>')
    parts.append(f'<text class="soft" x="{MARGIN + 80}" y="{y + 20}">{facts}</text>')
    y += 32
    y += _figure(_named(layer, "Load over time"), MARGIN, y, INNER, parts) + GAP
    for expert in experts:
        y += _expert(layer, expert, y, parts) + GAP
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 6}" role="img" '
        f'aria-label="A page of polyad report"><style>{CSS}</style>'
        f'<rect width="{WIDTH}" height="{y + 6}" fill="{PAPER}"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _header(page: str, parts: list[str]) -> int:
    """Name, model and facts; returns where the rest begins."""
    run = re.search(r"<h1>(.*?)</h1>", page)[1]  # type: ignore[index]
    kind = re.search(r'<p class="soft">(.*?)</p>', page)[1]  # type: ignore[index]
    parts.append(f'<text class="kicker" x="{MARGIN}" y="38">POLYAD REPORT</text>')
    parts.append(f'<text class="title" x="{MARGIN}" y="68">{run}</text>')
    parts.append(f'<text class="soft" x="{MARGIN}" y="90">{kind}</text>')
    facts = re.findall(r"<dt>(.*?)</dt><dd>(.*?)<small>(.*?)</small>", page)
    width = (INNER - GAP * (len(facts) - 1)) / len(facts)
    for i, (name, value, small) in enumerate(facts):
        x = MARGIN + i * (width + GAP)
        parts.append(
            f'<rect class="card" x="{x:.1f}" y="106" width="{width:.1f}" height="70" rx="8"/>'
            f'<text class="soft" x="{x + 12:.1f}" y="125">{name}</text>'
            f'<text class="fact" x="{x + 12:.1f}" y="147">{value}</text>'
            f'<text class="tick" x="{x + 12:.1f}" y="166">{small}</text>'
        )
    return 190


def _named(page: str, heading: str) -> str:
    """The figure with this heading."""
    for found in re.findall(r"<figure.*?</figure>", page, re.S):
        if f"<h3>{escape(heading)}</h3>" in found:
            return str(found)
    raise SystemExit(f"picture.py: the page has no figure {heading!r}")


def _figure(html: str, x: float, y: float, width: float, parts: list[str]) -> int:
    """A chart with its heading and legend on a card; returns its height."""
    heading = re.search(r"<h3>(.*?)</h3>", html)[1]  # type: ignore[index]
    drawing = re.search(r'<svg[^>]*viewBox="0 0 (\d+) (\d+)"[^>]*>(.*?)</svg>', html, re.S)
    assert drawing
    scale = (width - 24) / int(drawing[1])
    height = 42 + round(int(drawing[2]) * scale)
    parts.append(
        f'<rect class="card" x="{x}" y="{y}" width="{width}" height="{height}" rx="8"/>'
        f'<text class="heading" x="{x + 14}" y="{y + 23}">{heading}</text>'
    )
    right = x + width - 14
    named = re.findall(r'background:(.*?)"></i>(.*?)</li>', html)
    if sum(7 * len(label) + 34 for _, label in named) + 6 * len(heading) > width - 28:
        named = []  # no room beside the heading; the chart beside this one has the same colours
    for colour, label in reversed(named):
        right -= 7 * len(label)
        parts.append(f'<text class="soft" x="{right}" y="{y + 23}">{label}</text>')
        right -= 20
        parts.append(
            f'<rect x="{right}" y="{y + 17}" width="14" height="3" fill="{_resolved(colour)}"/>'
        )
        right -= 14
    inside = re.sub(r'<rect class="hit".*?</rect>|<title>.*?</title>', "", drawing[3])
    inside = re.sub(r"<image [^>]*/>", _cells, inside)
    inside = re.sub(r'(?<=stroke="|..fill=")[^"]*\)(?=")', lambda m: _resolved(m[0]), inside)
    parts.append(f'<g transform="translate({x + 12},{y + 34}) scale({scale:.4f})">{inside}</g>')
    return height


def _resolved(colour: str) -> str:
    """A colour without variables. Mixtures are taken in sRGB, near enough for a picture."""
    if mixed := re.match(r"color-mix\(in oklab, var\(--(\w+)\) (\d+)%, var\(--(\w+)\)\)", colour):
        share = int(mixed[2]) / 100
        pair = [bytes.fromhex(COLOURS[mixed[i]][1:]) for i in (1, 3)]
        return "#" + "".join(
            f"{round(share * a + (1 - share) * b):02x}" for a, b in zip(*pair, strict=True)
        )
    return re.sub(r"var\(--(\w+)\)", lambda m: COLOURS[m[1]], colour)


def _cells(image: re.Match[str]) -> str:
    """A heat map's image as rectangles: runs of cells of one colour in one path."""
    attributes = dict(re.findall(r'([\w-]+)="([^"]*)"', image[0]))
    rows, palette = _pixels(base64.b64decode(attributes["href"].partition(",")[2]))
    left, top, width, height = (float(attributes[k]) for k in ("x", "y", "width", "height"))
    step_x, step_y = width / len(rows[0]), height / len(rows)
    paths: dict[int, list[str]] = {}
    for r, row in enumerate(rows):
        first = 0
        coarse = [value and 1 + (value - 1) // 6 * 6 for value in row]  # of 254 shades, 43
        for column in range(1, len(row) + 1):
            if column == len(row) or coarse[column] != coarse[first]:
                if coarse[first]:
                    x, long = left + first * step_x, (column - first) * step_x
                    place, long = f"M{x:.1f} {top + r * step_y:.0f}", long + 0.3  # without seams
                    box = f"{place}h{long:.1f}v{step_y:.0f}h-{long:.1f}z"
                    paths.setdefault(coarse[first], []).append(box)
                first = column
    return "".join(
        f'<path fill="#{palette[3 * value : 3 * value + 3].hex()}" d="{"".join(boxes)}"/>'
        for value, boxes in paths.items()
    )


def _pixels(png: bytes) -> tuple[list[bytes], bytes]:
    """Rows of an indexed PNG without filters, as `train/report` writes it, and its palette."""
    chunks, place = {}, 8
    while place < len(png):
        size, kind = struct.unpack(">I4s", png[place : place + 8])
        chunks[kind] = png[place + 8 : place + 8 + size]
        place += size + 12
    columns = struct.unpack(">I", chunks[b"IHDR"][:4])[0]
    raw = zlib.decompress(chunks[b"IDAT"])
    rows = [raw[i + 1 : i + 1 + columns] for i in range(0, len(raw), columns + 1)]
    return rows, chunks[b"PLTE"]


def _expert(layer: str, name: str, y: float, parts: list[str]) -> int:
    """An expert's highest words in their context; returns the height."""
    html = next(
        (e for e in layer.split('<div class="expert">')[1:] if e.startswith(f"<h3>Expert {name}<")),
        None,
    )
    if html is None:
        raise SystemExit(f"picture.py: expert {name} of this block is not on the page")
    facts = re.search(r"<span>(.*?)</span></h3>", html)[1]  # type: ignore[index]
    found = re.findall(r'<li(?: class="words-only")?>(.*?)</li>', html, re.S)[:4]
    height = 24 + -(-len(found) // 2) * (LINES_SHOWN * LINE + 44)
    parts.append(f'<text class="heading" x="{MARGIN}" y="{y + 20}">Expert {name}</text>')
    parts.append(f'<text class="soft" x="{MARGIN + 76}" y="{y + 20}">{facts}</text>')
    for i, snippet in enumerate(found):
        x = MARGIN + i % 2 * (HALF + GAP)
        top = y + 32 + i // 2 * (LINES_SHOWN * LINE + 44)
        parts.append(_snippet(snippet, x, top))
    return height


def _snippet(html: str, x: float, y: float) -> str:
    """A token in its context, the colour behind each token its routing weight."""
    score = re.search(r"<b>(.*?)</b>", html)[1]  # type: ignore[index]
    place = re.search(r"</b><span>(.*?)</span>", html)[1]  # type: ignore[index]
    parts = [
        f'<rect class="card" x="{x}" y="{y}" width="{HALF}" height="{LINES_SHOWN * LINE + 34}" '
        f'rx="6"/><text class="heading" x="{x + 10}" y="{y + 19}" font-size="12">{score}</text>'
        f'<text class="soft" x="{x + HALF - 10}" y="{y + 19}" text-anchor="end">{place}</text>'
    ]
    lines = _wrapped(list(_characters(html)), int((HALF - 24) / CHARACTER))
    peak = next(i for i, line in enumerate(lines) if any(c[2] for c in line))
    first = max(0, min(peak - 1, len(lines) - LINES_SHOWN))
    for row, line in enumerate(lines[first : first + LINES_SHOWN]):
        base = y + 40 + row * LINE
        for number in sorted({c[3] for c in line if c[1]}):
            held = [i for i, c in enumerate(line) if c[3] == number]
            parts.append(
                f'<rect x="{x + 12 + held[0] * CHARACTER:.1f}" y="{base - 12}" '
                f'width="{len(held) * CHARACTER:.1f}" height="15" fill="rgb{MARK}" '
                f'fill-opacity="{0.78 * line[held[0]][1]:.2f}"/>'
            )
        framed = [i for i, c in enumerate(line) if c[2]]
        if framed:
            parts.append(
                f'<rect class="frame" x="{x + 12 + framed[0] * CHARACTER:.1f}" y="{base - 12}" '
                f'width="{len(framed) * CHARACTER:.1f}" height="15" rx="2"/>'
            )
        text = "".join(c[0] for c in line)
        if text.strip():
            # Positions are given for each character: no font decides where the colours are.
            at = " ".join(f"{x + 12 + i * CHARACTER:.1f}" for i in range(len(text)))
            parts.append(f'<text class="code" x="{at}" y="{base}">{escape(text)}</text>')
    return "".join(parts)


Character = tuple[str, float, bool, int]
"""What is shown, its token's routing weight, whether that token is the one that counts, and the
token's number."""


def _characters(html: str) -> Iterator[Character]:
    pre = re.search(r"<pre>(.*?)</pre>", html, re.S)[1]  # type: ignore[index]
    pre = re.sub(r'<span class="sign">(.*?)</span>', r"\1", pre)
    for number, piece in enumerate(re.split(r"(<mark.*?</mark>)", pre, flags=re.S)):
        weight = re.search(r"--a:([\d.]+)", piece)
        text = unescape(re.sub(r"<[^>]*>", "", piece))
        for character in text:
            yield character, float(weight[1]) if weight else 0.0, 'class="peak"' in piece, number


def _wrapped(characters: list[Character], columns: int) -> list[list[Character]]:
    lines: list[list[Character]] = [[]]
    for character in characters:
        if character[0] == "\n" or len(lines[-1]) == columns:
            lines.append([])
        if character[0] != "\n":
            lines[-1].append(character)
    return lines


if __name__ == "__main__":
    main()
