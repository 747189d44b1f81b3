"""How few experts does a text need? (EMO, 2605.06663)

In each layer the experts with the highest mean routing probability over a few examples are kept.
The others are removed with their rows of the router, so that the next best experts replace them.
The loss of held-out text is measured for several shares of the experts, beside the whole model and
three choices of equally many random experts. For another domain, name its prepared data:

    python docs/recipes/subset.py runs/quickstart/run runs/domain
"""

import random
import sys

import pandas as pd

import polyad


def highest(statistics: pd.DataFrame, keep: float) -> dict[str, list[int]]:
    """Returns the experts of each layer with the highest probability."""
    return {
        module: of_layer.nlargest(round(keep * len(of_layer)), "probability")["expert"].tolist()
        for module, of_layer in statistics.groupby("module")
    }


def at_random(statistics: pd.DataFrame, keep: float, seed: int) -> dict[str, list[int]]:
    """Returns as many random experts of each layer."""
    return {
        module: random.Random(f"{module} {seed}").sample(
            range(len(of_layer)), round(keep * len(of_layer))
        )
        for module, of_layer in statistics.groupby("module")
    }


def without_others(statistics: pd.DataFrame, kept: dict[str, list[int]]) -> list[str]:
    """Returns interventions that remove all other experts."""
    return [
        f"layer={row.module.split('.')[1]},expert={row.expert},how=prune"
        for row in statistics.itertuples()
        if row.expert not in kept[row.module]
    ]


def subset(
    path: str,
    data: str | None = None,
    keep: tuple[float, ...] = (0.5, 0.25),
    examples: int = 4_096,
    tokens: int = 65_536,
    seed: int = 0,
) -> pd.DataFrame:
    """Returns the loss for each share of the experts; `keep` is 1 for the whole model."""
    run = polyad.load(path)
    statistics = run.read(data, "train", tokens=examples).statistics()
    text = run.read(data, tokens=tokens)

    def loss(kept: dict[str, list[int]]) -> float:
        with run.intervened(*without_others(statistics, kept)):
            return text.losses()["loss"].mean()

    lines = [{"keep": 1.0, "loss": text.losses()["loss"].mean()}]
    for share in keep:
        line = {"keep": share, "loss": loss(highest(statistics, share))}
        for number in range(1, 4):
            kept = at_random(statistics, share, seed + number)
            line[f"random {number}"] = loss(kept)
        lines.append(line)
    return pd.DataFrame(lines)


if __name__ == "__main__":
    print(subset(*sys.argv[1:]).to_string(index=False))
