"""Which classes of tokens do a few hidden units of an expert reveal? (2604.02178)

A probe reads the k units whose means differ most. Half of the windows train, a quarter choose the
best expert, a quarter score it: where it is chosen, the best of 1,024 experts of noise has 0.8.

    python docs/recipes/probe.py runs/quickstart/run
"""

import itertools
import random
import sys

import numpy as np
import pandas as pd
from sklearn import linear_model, metrics

import polyad


def draw(label: pd.Series, part: pd.Series, samples: int, chance) -> pd.Series | None:
    """Draws tokens of each part, half of them of the class; None: there are too few."""
    drawn = []
    for number, size in enumerate((samples // 4, samples // 8, samples // 8)):
        kinds = [np.flatnonzero((part == number) & (label == kind)) for kind in (True, False)]
        if min(map(len, kinds)) < size:
            return None
        drawn += [chance.choice(kind, size, replace=False) for kind in kinds]
    return label.iloc[np.concatenate(drawn)]


def probe(hidden: np.ndarray, label: np.ndarray, part: np.ndarray, k: int) -> list[float]:
    """Fits a probe; returns its F1 on the tokens for choosing, and on those for scoring."""
    means = [hidden[(part == 0) & (label == kind)].mean(0) for kind in (True, False)]
    hidden = hidden[:, np.argsort(-np.abs(means[0] - means[1]), kind="stable")[:k]]
    model = linear_model.LogisticRegression(class_weight="balanced", max_iter=1000)
    predicted = model.fit(hidden[part == 0], label[part == 0]).predict(hidden)
    return [metrics.f1_score(label[part == each], predicted[part == each]) for each in (1, 2)]


def probes(path: str, units=(1, 8), samples=400, candidates=8, tokens=65_536, seed=0):
    """Returns F1 of every probe, by layer, class, expert and k; also with shuffled labels."""
    text, lines = polyad.load(path).read(tokens=tokens), []
    classes = text.classes()
    classes["part"] = np.maximum(pd.factorize(classes["window"], sort=True)[0] % 4 - 1, 0)
    trace = text.trace().merge(classes, on=["window", "position"])
    for number, (module, rows) in enumerate(trace.groupby("module", sort=False, observed=True)):
        order, chosen = list(range(trace["expert"].max() + 1)), {}
        random.Random(f"{seed} {module}").shuffle(order)
        for row, kind in enumerate(("characters", "place", "frequency")):
            for column, name in enumerate(classes[kind].cat.categories):
                some = chosen[f"{kind}: {name}"] = []
                for expert in order:
                    own = rows[rows["expert"] == expert]
                    chance = np.random.default_rng([seed, number, expert, row, column])
                    label = draw(own[kind] == name, own["part"], samples, chance)
                    if label is not None and len(some) < candidates:
                        some.append((expert, label))
        used = rows.loc[sorted({i for each in chosen.values() for _, y in each for i in y.index})]
        hidden = pd.DataFrame(text.hidden(used), index=used.index)
        for title, some in chosen.items():
            done = len(lines) // (2 * len(units))
            chance = np.random.default_rng([seed, trace["module"].nunique(), done])
            for expert, label in some:
                x, part = hidden.loc[label.index].to_numpy(), used["part"].loc[label.index]
                mixed = label.groupby(part).transform(chance.permutation)
                for y, k in itertools.product((label, mixed), units):
                    f1 = probe(x, y.to_numpy(), part.to_numpy(), k)
                    lines.append((module, title, k, y is mixed, expert, *f1))
    names = "module class k shuffled expert choosing f1"
    return pd.DataFrame(lines, columns=names.split())


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """Returns F1 of the best expert and the mean of all; shuffled: what labels by chance give."""
    group = table.groupby(["module", "class", "k", "shuffled"])
    return table.loc[group["choosing"].idxmax()].assign(mean=group["f1"].mean().array)


if __name__ == "__main__":
    print(summary(probes(sys.argv[1])).to_string(index=False))
