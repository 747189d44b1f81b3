"""The analyses by name: most are `polyad experts NAME`, the others `polyad NAME`.

A plugin adds one with the line `MEASURES[Mine.name] = Mine`, and `polyad experts NAME` runs it.
"""

from polyad.train.measures.atlas import Atlas
from polyad.train.measures.comparison import Comparison
from polyad.train.measures.measure import Analysis
from polyad.train.measures.removal import Removal
from polyad.train.measures.rewriting import Rewriting
from polyad.train.measures.robustness import Robustness
from polyad.train.measures.specialization import Specialization
from polyad.train.measures.splice import Splicing
from polyad.train.measures.steer import Steer
from polyad.train.measures.trace import Trace

MEASURES: dict[str, type[Analysis]] = {
    each.name: each
    for each in (
        *(Specialization, Atlas, Steer, Rewriting, Trace, Removal, Splicing),
        *(Comparison, Robustness),
    )
}
