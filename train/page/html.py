"""Parts of a page other than text: charts and tables in their frames."""

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from polyad.train.page.charts import Chart, Line
from polyad.train.page.template import render

FEW_ROWS = 20
"""Number of rows of a long table shown at first."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of numbers."""

    heads: Sequence[str]
    """The names of the columns."""
    rows: Sequence[Sequence[str]]
    names: int = 1
    """How many of the first columns are text."""
    by_class: bool = False
    """Whether rows are classes; there may be many, some of which are shown on demand."""

    def __html__(self) -> str:
        """The element in a page."""
        few = FEW_ROWS if self.by_class else len(self.rows)
        return render(
            "train/page/table.html", table=self, shown=self.rows[:few], others=self.rows[few:]
        )


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A chart or a table with its heading, and a caption below."""

    heading: str
    body: Chart | Table | Markup
    caption: str = ""
    legend: Sequence[Line] = ()
    """The lines in the legend."""
    wide: bool = False
    """Whether it takes a whole row of the grid."""

    def __html__(self) -> str:
        """The element in a page."""
        is_table = isinstance(self.body, Table)
        return render("train/page/figure.html", figure=self, is_table=is_table)
