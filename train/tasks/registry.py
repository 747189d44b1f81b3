"""The tasks by kind of data, as chosen by `data.kind`."""

from typing import Any

from polyad.train.tasks.images import AttributeClassification, ImageClassification
from polyad.train.tasks.language import LanguageModelling, MaskedLanguageModelling
from polyad.train.tasks.sequences import SequenceTask
from polyad.train.tasks.task import Sections, Task

TASKS: dict[str, type[Task[Any]]] = {
    "text": LanguageModelling,
    "masked_text": MaskedLanguageModelling,
    "images": ImageClassification,
    "attributes": AttributeClassification,
    "sequences": SequenceTask,
}


def open_task(sections: Sections) -> Task[Any]:
    """Opens the data of a configuration; see `Task.open`."""
    return TASKS[sections.data.kind].open(sections)
