"""What `scaling.py` measured, for a person."""

from typing import Any

from polyad.launch.output import align
from polyad.train.console import in_bytes
from tests.benchmarks.turns import span

TITLES = {
    "weak": "weak scaling (same batch per GPU)",
    "strong": "strong scaling (same global batch)",
}
SMALL = 1e-4
"""Of the bytes: collectives that send less are one line together."""


def scaling_table(result: dict[str, Any]) -> str:
    """Aligned lines: throughput, where a step's time goes, and what is sent.

    Args:
        result: of `bench_scaling`.
    """
    unit = result["unit"]
    lines = [
        f"{result['config']}: {result['parameters']:,} parameters in {result['precision']}, "
        f"tensor parallel {result['tensor_parallel_size']}, "
        f"expert parallel {result['expert_parallel_size']}, ZeRO {result['zero_stage']}, on "
        + _machine(result)
    ]
    weak, strong = (result[kind] for kind in TITLES)
    points = [*weak, *strong[1:]]  # both begin with the first
    for kind in TITLES:
        lines += ["", *_throughput(kind, result[kind], unit)]
    lines += ["", *_parts(points)]
    lines += ["", *_exchanges(points)]
    lines += [f"left out: {each['variant']}: {each['why']}" for each in result["left_out"]]
    shared = sorted({point["processes"] for point in points if point["share_cores"]})
    lines += [
        f"{number} processes share {_cores(result)}: what they lose says nothing about the code"
        for number in shared
    ]
    return "\n".join(lines)


def _machine(result: dict[str, Any]) -> str:
    if result["device"] == "cuda":
        return str(result["device_name"])
    return f"{_cores(result)} of {result['device_name']}"


def _cores(result: dict[str, Any]) -> str:
    return f"{result['cores']} core{'s' if result['cores'] > 1 else ''}"


def _named(point: dict[str, Any]) -> str:
    return f"  {point['kind']} {point['processes']}"


def _throughput(kind: str, points: list[dict[str, Any]], unit: str) -> list[str]:
    columns = (
        "threads",
        "samples",
        "s a step",
        "x first",
        "90%",
        f"{unit}s/s",
        "efficiency",
        "90%",
    )
    rows: list[tuple[str, ...]] = [(TITLES[kind], *columns)]
    for number, point in enumerate(points):
        efficient = point["efficiency_interval"]
        between = tuple(100 * each for each in efficient) if efficient and number else None
        rows.append(
            (
                f"  {point['processes']} process{'es' if point['processes'] > 1 else ''}",
                str(point["threads"]),
                f"{point['global_batch_size']:,}",
                f"{point['seconds']:.4f}",
                f"{point['seconds_ratio']:.3f}",
                span(point["seconds_ratio_interval"] if number else None, 3),
                f"{point['units_per_second']:,.0f}",
                f"{point['efficiency']:.0%}",
                span(between, 0),
            )
        )
    return align(rows).splitlines()


def _parts(points: list[dict[str, Any]]) -> list[str]:
    columns = ("computing", "waiting", "moving", "longest wait", "beside", "step", "over plain")
    rows: list[tuple[str, ...]] = [("a step whose exchanges are noted, s", *columns)]
    for point in points:
        watched = point["watched"]
        parts = [watched[key]["mean"] for key in ("computing", "waiting", "moving")]
        parts += [watched["waiting"]["max"], watched["beside"]["mean"], watched["seconds"]]
        shown = (f"{each:.4f}" for each in parts)
        rows.append((_named(point), *shown, f"{watched['over_plain']:.2f}"))
    return align(rows).splitlines()


def _exchanges(points: list[dict[str, Any]]) -> list[str]:
    columns = ("among", "of", "calls", "sent by one", "waiting", "moving")
    rows: list[tuple[str, ...]] = [("exchanges of a step", *columns)]
    for point in points:
        several = [each for each in point["exchanges"] if each["processes"] != 1]
        most = max((each["sent_bytes"] for each in several), default=0)
        small = [each for each in several if each["sent_bytes"] < SMALL * most]
        for each in several:
            if each not in small:
                among = f"{each['processes'] or 'some'} {each['axis']}"
                rows.append(
                    (f"{_named(point)} {each['kind']}", among, each["precision"], *_sums([each]))
                )
        if small:
            rows.append((f"{_named(point)} small ones", "", "", *_sums(small)))
    return align(rows).splitlines() if len(rows) > 1 else ["no exchanges"]


def _sums(rows: list[dict[str, Any]]) -> tuple[str, ...]:
    calls, sent, waiting, moving = (
        sum(each[key] for each in rows) for key in ("calls", "sent_bytes", "waiting", "moving")
    )
    return f"{calls:,.0f}", in_bytes(sent), f"{waiting:.4f}", f"{moving:.4f}"
