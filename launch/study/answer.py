"""What a study answers: a sentence for each variant, made of its interval and of nothing else.

A sentence says better or worse where the interval of the difference leaves 0 out, and that no
difference is shown where it does not. One pair has no interval, so nothing is said of it. What
speaks for a method and what speaks against it is worded alike.
"""

import math
from collections.abc import Mapping
from typing import Any

UNCORRECTED = (
    "Each interval stands by itself: nothing is corrected for their number, and of twenty "
    "differences that are none, one would be called better or worse on average."
)
Difference = Mapping[str, Any]


def answers(result: Mapping[str, Any]) -> list[str]:
    """A sentence for each variant but the baseline, about the first score.

    Args:
        result: what `summarize` made, or `over_tasks`: then about the mean over tasks.
    """
    return [
        said
        for name, variant in result["variants"].items()
        if name != result["baseline"]
        for said in (_answer(result, name, variant), *_without_leak(result, name, variant))
    ]


def amount(value: float) -> str:
    """A number of tokens or images, as 410k or 2.62M."""
    if value < 1e4:
        return f"{value:,.0f}"
    value = float(f"{value:.3g}")
    if value >= 1e15:
        return "more than 1e15"
    power = int(math.log10(value) / 3)
    return f"{value / 1000**power:.3g}{' kMBT'[power]}"


def _answer(result: Mapping[str, Any], name: str, variant: Mapping[str, Any]) -> str:
    score, baseline = result["scores"][0], result["baseline"]
    named = name + (f" at {variant['point']}" if variant.get("point") else "")
    leaking = (result.get("about") or {}).get("leaking", ())
    if variant.get("leak") or name in leaking:
        named += ", whose tokens see later ones,"
    theirs = f"{baseline}, whose tokens see later ones" if baseline in leaking else baseline
    title = f"mean {score['title']} over tasks" if "tasks" in result else score["title"]
    if (found := variant["difference"]) is None:
        return f"{named}: no pair with {baseline} is finished"
    return f"{_verdict(result, named, theirs, found)}: {_numbers(found, title, score)}"


def _verdict(result: Mapping[str, Any], named: str, baseline: str, found: Difference) -> str:
    if found["pairs"] == 1:
        return f"{named} beside {baseline}, one pair: no interval"
    if not found["excludes_zero"]:
        return f"no difference between {named} and {baseline} is shown"
    better = (found["mean"] > 0) == result["higher_is_better"]
    return f"{named} is {'better' if better else 'worse'} than {baseline}"


def _numbers(found: Difference, title: str, score: Mapping[str, Any]) -> str:
    """The difference with its unit, interval and pairs."""
    unit, digits = f" {score['unit']}" if score["unit"] else "", score["digits"]
    said = f"{title} {found['mean']:+.{digits}f}{unit}"
    if found["pairs"] == 1:
        return said
    return f"{said}, {_interval(found, digits)}, {found['pairs']} pairs"


def _interval(found: Difference, digits: int) -> str:
    return f"95% interval {found['low']:+.{digits}f} to {found['high']:+.{digits}f}"


def _without_leak(result: Mapping[str, Any], name: str, variant: Mapping[str, Any]) -> list[str]:
    """The same of a variant whose tokens see later ones, without what those tell."""
    last = [*variant.get("leak", {}).values()][-1:]
    ways = {"masked": "with the mask", "prefix": "from the prefix"}
    score, baseline = result["scores"][0], result["baseline"]
    leaks = bool(result["variants"].get(baseline, {}).get("leak"))
    return [
        f"{_verdict(result, f'{name} {said}', f'{baseline} {said}' if leaks else baseline, found)}"
        f": {_numbers(found, score['title'], score)}"
        for leak in last
        for way, said in ways.items()
        if (found := leak[f"{way}_beside_baseline"]) is not None
    ]
