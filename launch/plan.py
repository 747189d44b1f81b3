"""Output of a plan: its table, and its scaling as a figure."""

import math
from typing import Any

from polyad.train.console import duration, in_bytes
from polyad.train.page.charts import Axis, Chart, Dot, Line
from polyad.train.page.panels import curve_panel, sheet
from polyad.train.page.template import SERIES
from polyad.train.results import aligned

EVERY = 1e-4
"""Collectives that send less than this share of a step's largest one are combined in one line."""
TITLES = {
    "weak": "Weak scaling (same batch per GPU)",
    "strong": "Strong scaling (same global batch)",
}


def table(result: dict[str, Any]) -> str:
    """Formats a plan as aligned lines: memory of a process, time of a step, and how often to
    save."""
    unit, layout = result["unit"], result["layout"]
    of = "" if layout["device"] == "cpu-here" else "predicted, not measured: "
    lines = [
        f"{of}{result['parameters']:,} parameters on {layout['processes']} {layout['device']}: "
        f"data parallel {layout['data_parallel_size']}, "
        f"tensor parallel {layout['tensor_parallel_size']}, "
        f"expert parallel {layout['expert_parallel_size']}, ZeRO {layout['zero_stage']}, "
        f"{_micro_batches(layout)}",
        "",
        *_memory(result["memory_bytes"], result["largest_bytes"]),
        *_recompute(result.get("recompute", {})),
        "",
        *_exchanges(result["exchanges"]),
        "",
        *_step(result, unit),
        "",
        *_saving(result["checkpoint"], result["step"]["seconds"]),
    ]
    if "reading" in result:
        lines += ["", *_reading(result["reading"])]
    if "layouts" in result:
        lines += ["", *_layouts(result["layouts"], unit)]
    if "scaling" in result:
        for kind, points in result["scaling"].items():
            lines += ["", *_scaling(kind, points, unit)]
    return "\n".join(lines)


def _micro_batches(layout: dict[str, Any]) -> str:
    number, size = layout["accumulation_steps"], layout["micro_batch_size"]
    return f"{number} micro-batches of {size}" if number > 1 else f"one micro-batch of {size}"


def _memory(memory: dict[str, int], largest: dict[str, int]) -> list[str]:
    rows = [("memory per process", "at its peak", "largest")]
    for kind in {**largest, **memory}:
        if kind not in {"total", "device"}:
            most = in_bytes(largest[kind]) if kind in largest else ""
            rows.append((f"  {kind}", in_bytes(memory.get(kind, 0)), most))
    rows.append(("  total", in_bytes(memory["total"]), ""))
    rows.append(("  available", in_bytes(memory["device"]), ""))
    return aligned(rows)


def _recompute(modes: dict[str, dict[str, Any]]) -> list[str]:
    if not modes:
        return []
    rows = [("with model.recompute", "activations", "total", "step")]
    rows += [
        (
            f"  {mode}",
            in_bytes(each["activations"]),
            in_bytes(each["total"]),
            f"{each['seconds']:.3g} s",
        )
        for mode, each in modes.items()
    ]
    return ["", *aligned(rows)]


def _exchanges(exchanges: list[dict[str, Any]]) -> list[str]:
    if not any(each["processes"] > 1 for each in exchanges):
        return ["no communication"]
    rows = [("communication per step", "among", "of", "over the", "calls", "sent per process")]
    most = max(each["sent_bytes"] for each in exchanges)
    small = [0, 0]
    for each in exchanges:
        if each["processes"] == 1:
            continue
        if each["sent_bytes"] < EVERY * most:
            small[0] += each["calls"]
            small[1] += each["sent_bytes"]
            continue
        rows.append(
            (
                f"  {each['kind']}",
                f"{each['processes']} {each['axis']}",
                each["precision"],
                each["link"],
                f"{each['calls']:,}",
                in_bytes(each["sent_bytes"]),
            )
        )
    if small[0]:
        rows.append(("  small messages", "", "", "", f"{small[0]:,}", in_bytes(small[1])))
    return aligned(rows)


def _step(result: dict[str, Any], unit: str) -> list[str]:
    step, run = result["step"], result["run"]
    whole = step["seconds"]

    def part(name: str, seconds: float) -> tuple[str, str, str]:
        return f"  {name}", f"{seconds:.3g} s", f"{seconds / whole:.0%}"

    rows = [("step", f"{whole:.3g} s", "")]
    rows += [
        part(name, step[key])
        for name, key in (
            ("products", "products"),
            ("attention", "attention"),
            ("memory-bound", "memory"),
            ("waiting for host", "idle"),
        )
        if step[key]
    ]
    rows += [part(f"communication, {axis}", s) for axis, s in step["exchanges"].items()]
    if step["hidden_exchanges"]:
        rows.append(("  overlapped communication", f"{step['hidden_exchanges']:.3g} s", "beside"))
    rate = result[f"{unit}s_per_second"]
    mfu = "" if result["mfu"] is None else f"MFU {result['mfu']:.0%} of the peak FLOP rate"
    rows.append((f"{unit}s/s", f"{rate:,.0f}", mfu))
    rows.append(
        (
            f"{run['steps']:,} steps",
            duration(run["seconds"]),
            f"{run['device_hours']:,.0f} device hours",
        )
    )
    if "measured" in result:
        found = result["measured"]
        off = f"prediction off by {found['prediction_off_by']:+.0%}"
        rows.append(("measured", f"{found['step_seconds']:.3g} s", off))
    return aligned(rows)


def _saving(checkpoint: dict[str, Any], seconds: float) -> list[str]:
    rows = [
        ("checkpoint", in_bytes(checkpoint["bytes"]), f"stall {checkpoint['stall_seconds']:.3g} s"),
        (
            "mean time between failures",
            f"{checkpoint['failure_every_seconds'] / 3600:,.0f} hours",
            "",
        ),
        (
            "best checkpoint.every",
            f"{checkpoint['best_every_steps']:,}",
            f"{duration(checkpoint['best_interval_seconds'])}; {checkpoint['lost_share']:.2%} of "
            "the time is lost",
        ),
    ]
    if "every_steps" in checkpoint:
        every = checkpoint["every_steps"]
        rows.append(
            (
                "configured checkpoint.every",
                f"{every:,}",
                f"{duration(every * seconds)}; {checkpoint['lost_share_then']:.2%} of the time is "
                "lost",
            )
        )
    return aligned(rows)


def _reading(reading: dict[str, Any]) -> list[str]:
    """Memory and time for one process to evaluate or measure, whole or block by block."""
    fits = "" if reading["fits_whole"] else ", does not fit"
    million = duration(reading["seconds_per_million_tokens"])
    between = in_bytes(reading["between_blocks_bytes_per_million_tokens"])
    rows = [
        (f"evaluation in {reading['precision']}, one process", "whole", "block by block "
        "(--stream)"),
        ("  memory", in_bytes(reading["whole_bytes"]) + fits, in_bytes(reading["streamed_bytes"])),
        ("  weights in memory", in_bytes(reading["weights_bytes"]),
         in_bytes(reading["largest_part_bytes"])),
        ("  time to read the weights", *[duration(reading["weights_seconds"])] * 2),
        ("  time per million tokens", million, f"{million}, storing {between} between blocks"),
    ]  # fmt: skip
    return aligned(rows)


def _layouts(layouts: list[dict[str, Any]], unit: str) -> list[str]:
    if not layouts:
        return ["none of the layouts that were tried fits"]
    lines = ["fastest layouts"]
    for each in layouts:
        change = " ".join(each["change"]) or "unchanged"
        lines.append(
            f"  {each['units_per_second']:>12,.0f} {unit}s/s  {in_bytes(each['memory_bytes']):>8}  "
            f"{each['why']}"
        )
        lines.append(f"  {'':>12} {change}")
    return lines


def _scaling(kind: str, points: list[dict[str, Any]], unit: str) -> list[str]:
    names = {
        "weak": "weak scaling (same batch per GPU)",
        "strong": "strong scaling (same global batch)",
    }
    rows = [
        (names[kind], f"{unit}s/s", "efficiency", "memory", "largest cost besides matrix products")
    ]
    rows += [
        (
            f"  {point['processes']:,} processes",
            f"{point['units_per_second']:,.0f}",
            f"{point['efficiency']:.0%}",
            in_bytes(point["memory_bytes"]) + ("" if point["fits"] else ", does not fit"),
            point["why"],
        )
        for point in points
    ]
    return aligned(rows)


def figure(result: dict[str, Any]) -> str:
    """Draws throughput over the number of GPUs on logarithmic axes, with the ideal.

    Args:
        result: a plan with `scaling`.

    Returns:
        The text of an SVG file.
    """
    layout, unit = result["layout"], result["unit"]
    about = (
        f"Predicted, not measured: {result['parameters'] / 1000000.0:,.0f}M parameters on "
        f"{layout['device']}, tensor parallel {layout['tensor_parallel_size']}, expert parallel "
        f"{layout['expert_parallel_size']}, ZeRO {layout['zero_stage']}"
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
            f"{point['efficiency']:.0%} of the ideal, {in_bytes(point['memory_bytes'])} per "
            f"process{('' if point['fits'] else ', which does not fit')}; {point['why']}",
        )
        for point in points
    ]
    return curve_panel(
        title,
        f"{last['efficiency']:.0%} of {each:,.0f} {unit}s/s per GPU at {last['processes']} GPUs",
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
