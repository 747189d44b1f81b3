"""A figure of the table of experts and classes.

Shapes: S experts of a level, Y classes.
"""

import math

import numpy as np

from polyad.train.experts.by_class import FEW_CLASSES, LevelByClass
from polyad.train.experts.information import Matrix
from polyad.train.page.charts import Line
from polyad.train.page.html import Figure
from polyad.train.page.matrices import NARROW_COLUMNS, Cell, matrix_chart
from polyad.train.page.template import number

MOST_EXPERTS = 64
"""Maximum number of experts of a level that are drawn as a matrix."""
HEADING = "Share of each expert"
STRONGEST_LIFT = 4.0
"""The lift at full color; its inverse has the opposite full color."""


def level_matrix(level: LevelByClass, heading: str = HEADING, *, by_expert: bool) -> Figure | None:
    """Draws the table of experts and classes; None if it would be too large.

    Args:
        level: experts of a layer, and classes.
        heading: heading of the figure.
        by_expert: whether to group classes by the expert that gets most of them; else they keep
            their order.
    """
    if len(level.groups) > FEW_CLASSES or len(level.experts) > MOST_EXPERTS:
        return None
    share_S, share_SY = level.share_S, level.share_SY
    order = _sorted_by_expert(share_SY) if by_expert else range(len(level.groups))
    cells = [
        [
            Cell(f"{100 * share_S[s]:.1f}%", f"expert {expert}: of all {100 * share_S[s]:.2f}%"),
            *(
                _cell(
                    *(expert, level.groups[y]),
                    *(float(share_SY[s, y]), float(share_S[s]), float(level.counts_SY[s, y])),
                )
                for y in order
            ),
        ]
        for s, expert in enumerate(level.experts)
    ]
    rows = [f"expert {expert}" for expert in level.experts]
    columns = ["all", *(level.groups[y] for y in order)]
    return Figure(
        heading=heading,
        body=matrix_chart(rows, columns, cells, title="Experts and classes"),
        caption=f"Each column adds up to 100%. Full colour: {STRONGEST_LIFT:g} times the expert's "
        "share of all tokens or more, or the same factor less.",
        legend=[
            Line(label="more than its share of all tokens", values=(), colour="var(--accent)"),
            Line(label="less", values=(), colour="var(--second)"),
        ],
        wide=len(level.groups) >= NARROW_COLUMNS,
    )


def _sorted_by_expert(share_SY: Matrix) -> list[int]:
    """Sorts classes by the expert that gets most of each, and then by how much it gets."""
    known_SY = np.nan_to_num(share_SY)
    return [int(y) for y in np.lexsort((-known_SY.max(0), known_SY.argmax(0)))]


def _cell(expert: str, group: str, share: float, share_of_all: float, count: float) -> Cell:
    if math.isnan(share) or share_of_all == 0:
        return Cell("–", f"expert {expert}, {group}: no token")
    lift = share / share_of_all
    octaves = math.log2(lift) if lift > 0 else -math.inf
    return Cell(
        f"{100 * share:.1f}%",
        f"expert {expert}, {group}: {number(count)} tokens, {100 * share:.2f}%, lift {lift:.2f}",
        min(1.0, abs(octaves) / math.log2(STRONGEST_LIFT)),
        "var(--accent)" if octaves >= 0 else "var(--second)",
    )
