"""A plan's scaling as a picture, in SVG: what `polyad plan --figure` draws."""

import math
from typing import Any

from polyad.train.console import in_bytes
from polyad.train.page.charts import Axis, Chart, Dot, Line
from polyad.train.page.panels import curve_panel, sheet
from polyad.train.page.template import SERIES

TITLES = {
    "weak": "As much for each GPU (weak scaling)",
    "strong": "The same global batch (strong scaling)",
}


def figure(result: dict[str, Any]) -> str:
    """Draws throughput over the number of GPUs, both on logarithmic axes, beside the ideal.

    Args:
        result: a plan with `scaling`.

    Returns:
        The text of an SVG file.
    """
    layout, unit = result["layout"], result["unit"]
    about = (
        f"Prediction, no run: {result['parameters'] / 1e6:,.0f}M parameters on {layout['device']}, "
        f"tensor parallel {layout['tensor_parallel_size']}, "
        f"expert parallel {layout['expert_parallel_size']}, ZeRO {layout['zero_stage']}"
    )
    panels = [
        _panel(TITLES[kind], points, unit, colour)
        for (kind, points), colour in zip(result["scaling"].items(), SERIES, strict=False)
        if points
    ]
    return sheet(about, panels, note=about)


def _panel(title: str, points: list[dict[str, Any]], unit: str, colour: str) -> Chart:
    first, last = points[0], points[-1]
    processes = [point["processes"] for point in points]
    rates = [point["units_per_second"] for point in points]
    each = rates[0] / processes[0]
    ideal = [each * number for number in processes]
    y = Axis(rates[0], max(1.26 * rates[0], ideal[-1]), logarithmic=True)
    powers = range(math.ceil(math.log10(y.low)), math.floor(math.log10(y.high)) + 1)
    dots = [
        Dot(
            point["processes"],
            point["units_per_second"],
            "mean" if point["fits"] else "open",
            f"{point['processes']} GPUs: {point['units_per_second']:,.0f} {unit}s/s, "
            f"{point['efficiency']:.0%} of the ideal, {in_bytes(point['memory_bytes'])} a process"
            f"{'' if point['fits'] else ', which does not fit'}; {point['why']}",
        )
        for point in points
    ]
    return curve_panel(
        title,
        f"{last['efficiency']:.0%} of {each:,.0f} {unit}s/s a GPU at {last['processes']}",
        processes,
        [
            Line(label="", values=ideal, colour="var(--soft)", is_dashed=True),
            Line(label="", values=rates, colour=colour, dots=dots),
        ],
        Axis(first["processes"], max(2, last["processes"]), logarithmic=True),
        y,
        x_labels={number: f"{number}" for number in processes},
        y_labels={10.0**power: f"1e{power}" for power in powers},
        height=320,
    )
