"""Do cheap statistics predict which of a token's experts matter to it? (2606.10703)

At random tokens of each layer, the token's experts are ranked by a statistic of the expert. The
loss of the token is measured without its highest expert and without its lowest, each removed at
this token alone. A statistic predicts what matters if the first change is larger: in a paired
t-test, with p below 0.05 divided by the number of tests. The token's own routing weight and random
ranks are the controls. The script published with the paper removes the expert at every position
and ranks by means of router logits, so its numbers differ.

    python docs/recipes/audit.py runs/quickstart/run
"""

import sys

import pandas as pd
import torch
from scipy.stats import ttest_rel, wilcoxon

import polyad

STATISTICS = ("frequency", "mean_weight", "mean_norm", "reap", "mone")
CONTROLS = ("own_weight", "random")


def changes(path: str, positions: int = 200, tokens: int = 65_536, seed: int = 0) -> pd.DataFrame:
    """Removes every expert of random tokens, one at a time.

    Returns:
        A row for each token, layer and expert, with all statistics and the `change` of the loss.
    """
    text = polyad.load(path).read(tokens=tokens)
    trace = text.trace("loss")
    trace = trace[trace["loss"].notna()]  # tokens that are predicted
    places = trace[["window", "position"]].drop_duplicates().sort_values(["window", "position"])
    order = torch.randperm(len(places), generator=torch.Generator().manual_seed(seed))
    places = places.iloc[order[:positions].sort().values]
    places["token"] = range(len(places))
    statistics = text.statistics()
    experts = int(statistics["expert"].max()) + 1
    chance = torch.rand(len(places), experts, generator=torch.Generator().manual_seed(seed))
    rows = trace.merge(places).merge(statistics, on=["module", "expert"])
    rows = rows.sort_values(["module", "token", "slot"], ignore_index=True)
    rows["own_weight"] = rows["weight"]
    rows["random"] = chance[rows["token"].to_numpy(), rows["expert"].to_numpy()]
    rows["change"] = text.without(rows) - rows["loss"]
    return rows


def audit(rows: pd.DataFrame) -> pd.DataFrame:
    """Compares the changes without the highest and without the lowest expert of each token."""
    lines = []
    for (layer, module), of_layer in rows.groupby(["layer", "module"]):
        tokens = of_layer.groupby("token")
        for name in (*STATISTICS, *CONTROLS):
            high = of_layer.loc[tokens[name].idxmax(), "change"].to_numpy()
            low = of_layer.loc[tokens[name].idxmin(), "change"].to_numpy()
            test, difference = ttest_rel(high, low), high - low
            tests = rows["module"].nunique() * (len(STATISTICS) if name in STATISTICS else 1)
            lines.append(
                {
                    "layer": layer,
                    "module": module,
                    "ranked by": name,
                    "without highest": high.mean(),
                    "without lowest": low.mean(),
                    "d": difference.mean() / difference.std(ddof=1),
                    "p": test.pvalue,
                    "Wilcoxon": wilcoxon(difference).pvalue,
                    "predicts": test.pvalue < 0.05 / tests and high.mean() > low.mean(),
                }
            )
    return pd.DataFrame(lines)


if __name__ == "__main__":
    print(audit(changes(sys.argv[1])).to_string(index=False))
