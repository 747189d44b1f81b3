"""Which experts does one text use more than another, and what does forcing them do? (2509.09660)

SteerMoE's Delta of an expert is the share of the first text's tokens that use it, minus that of the
second text, over their train splits. Experts with the largest Delta are forced at every token (at
most top-K in a layer) and those with the smallest are avoided; the loss of both texts' validation
splits is compared with that for equally many random experts. A change that random experts make as
well is not an effect of the contrast.

    python docs/recipes/contrast.py runs/quickstart/run runs/yaml
"""

import random
import sys
from collections import Counter

import pandas as pd

import polyad


def use(run: polyad.Run, data: str | None, tokens: int) -> pd.Series:
    """Returns the share of a train split's tokens that use each expert, by layer and expert."""
    trace = run.read(data, "train", tokens=tokens).trace()
    count = len(trace[["window", "position"]].drop_duplicates())
    return trace.groupby(["layer", "expert"]).size() / count


def delta(run: polyad.Run, other: str, tokens: int = 65_536) -> pd.DataFrame:
    """Returns the use of each expert by both texts, those with the largest difference first."""
    shares = {"first": use(run, None, tokens), "second": use(run, other, tokens)}
    table = pd.DataFrame(shares).fillna(0).reset_index()
    table["delta"] = table["first"] - table["second"]
    return table.sort_values("delta", key=lambda delta: -delta.abs(), kind="stable")


def interventions(experts: pd.DataFrame, top_k: int, force: int, avoid: int) -> list[str]:
    """Forces the first experts with a positive delta, and avoids the first with a negative one."""
    left, forced, found = {"force": force, "avoid": avoid}, Counter[int](), []
    for row in experts.itertuples():
        how = "force" if row.delta > 0 else "avoid"
        if row.delta and left[how] and not (how == "force" and forced[row.layer] == top_k):
            forced[row.layer] += how == "force"
            left[how] -= 1
            found.append(f"layer={row.layer},expert={row.expert},how={how}")
    return found


def at_random(experts: pd.DataFrame, top_k: int, moved: list[str], seed: str) -> list[str]:
    """Forces and avoids as many random experts."""
    counts = Counter(each.rpartition("=")[2] for each in moved)
    order = list(range(len(experts)))
    random.Random(seed).shuffle(order)
    shuffled = experts.iloc[order]
    forced = interventions(shuffled.assign(delta=1.0), top_k, counts["force"], 0)
    names = [f"layer={row.layer},expert={row.expert},how=force" for row in shuffled.itertuples()]
    rest = shuffled[[name not in forced for name in names]]
    return forced + interventions(rest.assign(delta=-1.0), top_k, 0, counts["avoid"])


def contrast(
    path: str, other: str, force: int = 5, avoid: int = 0, tokens: int = 65_536, seed: int = 0
) -> tuple[pd.DataFrame, list[str], pd.DataFrame]:
    """Returns the use of experts, the interventions, and the losses of both texts."""
    run = polyad.load(path)
    experts, top_k = delta(run, other, tokens), int(run.read(tokens=1).trace()["slot"].max()) + 1
    moved = interventions(experts, top_k, force, avoid)
    changes = {"unchanged": [], "moved": moved}
    for number in range(3):
        changes[f"random {number}"] = at_random(experts, top_k, moved, f"{seed} {number}")
    texts, losses = [run.read(data, tokens=tokens) for data in (None, other)], {}
    for name, each in changes.items():
        with run.intervened(*each):
            losses[name] = [text.losses()["loss"].mean() for text in texts]
    return experts, moved, pd.DataFrame(losses, index=["first", "second"]).T


if __name__ == "__main__":
    for table in contrast(*sys.argv[1:]):
        print(table.to_string() if isinstance(table, pd.DataFrame) else table, end="\n\n")
