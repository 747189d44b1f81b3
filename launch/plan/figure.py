"""A plan's scaling as a picture, in SVG: what `polyad plan --figure` draws."""

import math
from html import escape
from typing import Any

from polyad.launch.study.drawing import COLOURS, STYLE
from polyad.train.console import in_bytes

WIDTH, HEIGHT, MARGIN = 460, 320, 56
TITLES = {
    "weak": "As much for each GPU (weak scaling)",
    "strong": "The same global batch (strong scaling)",
}


def figure(result: dict[str, Any]) -> str:
    """Draws throughput over the number of GPUs, both on logarithmic axes, beside the ideal.

    Args:
        result: of a plan with `scaling`.

    Returns:
        The text of an SVG file.
    """
    layout, unit = result["layout"], result["unit"]
    about = (
        f"Prediction, no run: {result['parameters'] / 1e6:,.0f}M parameters on {layout['device']}, "
        f"tensor parallel {layout['tensor_parallel_size']}, "
        f"expert parallel {layout['expert_parallel_size']}, ZeRO {layout['zero_stage']}"
    )
    panels = []
    for number, (kind, points) in enumerate(result["scaling"].items()):
        if points:
            panels += _panel(kind, points, unit, COLOURS[number], number * (WIDTH + 12), 36)
    width, height = 2 * WIDTH + 12, HEIGHT + 48
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img" aria-label="{escape(about)}"><title>{escape(about)}</title>'
        f'<style>{STYLE}</style><rect width="100%" height="100%" fill="#fff"/>'
        f'<text class="note" x="12" y="20">{escape(about)}</text>' + "".join(panels) + "</svg>\n"
    )


def _panel(
    kind: str, points: list[dict[str, Any]], unit: str, colour: str, left: float, top: float
) -> list[str]:
    first, last = points[0], points[-1]
    ideal = first["units_per_second"] / first["processes"]
    low_x, high_x = math.log2(first["processes"]), max(1.0, math.log2(last["processes"]))
    low_y = math.log10(first["units_per_second"])
    high_y = max(low_y + 0.1, math.log10(ideal * last["processes"]))

    def x(processes: float) -> float:
        share = (math.log2(processes) - low_x) / max(high_x - low_x, 1e-9)
        return left + MARGIN + share * (WIDTH - MARGIN - 20)

    def y(rate: float) -> float:
        share = (math.log10(rate) - low_y) / (high_y - low_y)
        return top + HEIGHT - 30 - share * (HEIGHT - 70)

    parts = [
        f'<text class="title" x="{left + 12:g}" y="{top + 14:g}">{escape(TITLES[kind])}</text>'
    ]
    for power in range(math.ceil(low_y), math.floor(high_y) + 1):
        at = y(10**power)
        parts.append(
            f'<line class="grid" x1="{left + MARGIN:.1f}" x2="{left + WIDTH - 20:.1f}" '
            f'y1="{at:.1f}" y2="{at:.1f}"/><text class="note" x="{left + MARGIN - 4:.1f}" '
            f'y="{at + 4:.1f}" text-anchor="end">1e{power}</text>'
        )
    parts += [
        f'<text class="note" x="{x(p["processes"]):.1f}" y="{top + HEIGHT - 12:.1f}" '
        f'text-anchor="middle">{p["processes"]}</text>'
        for p in points
    ]
    parts.append(
        f'<line x1="{x(first["processes"]):.1f}" y1="{y(first["units_per_second"]):.1f}" '
        f'x2="{x(last["processes"]):.1f}" y2="{y(ideal * last["processes"]):.1f}" '
        f'stroke="#888" stroke-dasharray="4 4"/>'
    )
    way = " ".join(f"{x(p['processes']):.1f},{y(p['units_per_second']):.1f}" for p in points)
    parts.append(f'<polyline points="{way}" fill="none" stroke="{colour}" stroke-width="2"/>')
    for point in points:
        about = (
            f"{point['processes']} GPUs: {point['units_per_second']:,.0f} {unit}s/s, "
            f"{point['efficiency']:.0%} of the ideal, {in_bytes(point['memory_bytes'])} a process"
            f"{'' if point['fits'] else ', which does not fit'}; {point['why']}"
        )
        inside = colour if point["fits"] else "#fff"
        at_x, at_y = x(point["processes"]), y(point["units_per_second"])
        parts.append(
            f'<circle cx="{at_x:.1f}" cy="{at_y:.1f}" r="3.5" fill="{inside}" '
            f'stroke="{colour}">'
            f"<title>{escape(about)}</title></circle>"
        )
    end = f"{last['efficiency']:.0%} of {ideal:,.0f} {unit}s/s a GPU at {last['processes']}"
    parts.append(
        f'<text class="note" x="{left + WIDTH - 20:.1f}" y="{top + 32:.1f}" text-anchor="end">'
        f"{escape(end)}</text>"
    )
    return parts
