"""The measures of experts by name, in the order of a page.

A plugin adds one with the line `MEASURES[Mine.name] = Mine`. Then `polyad experts NAME`
runs it, `polyad report` includes it, and a study with `measures: [NAME]` compares its numbers.
"""

from polyad.train.measures.measure import Measure
from polyad.train.measures.specialization import Specialization
from polyad.train.measures.splice import Splicing

MEASURES: dict[str, type[Measure]] = {each.name: each for each in (Specialization, Splicing)}
