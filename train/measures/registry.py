"""The measures of experts by their names, in the order of a page."""

from polyad.train.measures.knockout import KnockOuts
from polyad.train.measures.measure import Measure
from polyad.train.measures.specialization import Specialization

MEASURES: dict[str, type[Measure]] = {each.name: each for each in (Specialization, KnockOuts)}
