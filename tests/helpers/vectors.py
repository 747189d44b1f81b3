"""An external task: generated vectors are classified by a perceptron.

A plugin: `POLYAD_PLUGINS=tests.helpers.vectors`. The last lines of this file register it.

Shapes: B samples, D numbers of a vector, H hidden units, C classes.
"""

import hashlib
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.utils.data import Dataset

from polyad.data.config import DataSettings
from polyad.data.sampler import held_out_batches
from polyad.model.build import MODELS, ModelKind
from polyad.model.initialization import normal
from polyad.model.layers import Linear
from polyad.model.output import ModelOutput, RoutingStats
from polyad.model.settings import ModelSettings
from polyad.parallel import comm
from polyad.train.errors import ConfigError
from polyad.train.tasks.registry import TASKS
from polyad.train.tasks.task import Predictor, Score, Scoring, Sections, Task, Unit

VECTORS = {"train": 1000, "validation": 300, "test": 101}
"""Vectors of each split."""


class PerceptronConfig(ModelSettings):
    kind: Literal["perceptron"] = "perceptron"
    inputs: Annotated[int, Field(ge=1)] = 8
    hidden_size: Annotated[int, Field(ge=1)] = 16
    classes: Annotated[int, Field(ge=2)] | None = None
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0

    def from_data(self) -> dict[str, int | None]:
        return {"classes": self.classes}

    def random_sample(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        vector_D = torch.randn(self.inputs, generator=generator)
        return vector_D, torch.randint(self.number("classes"), (), generator=generator)


class Perceptron(nn.Module):
    def __init__(self, config: PerceptronConfig) -> None:
        super().__init__()
        self.hidden = Linear(config.inputs, config.hidden_size, normal(0.3))
        self.dropout = nn.Dropout(config.dropout)
        self.head = Linear(config.hidden_size, config.number("classes"), normal(0.3))

    def forward(self, vectors_BD: Tensor) -> ModelOutput:
        hidden_BH = self.dropout(torch.relu(self.hidden(vectors_BD.to(self.hidden.weight.dtype))))
        return ModelOutput(self.head(hidden_BH), ())


class VectorData(DataSettings):
    kind: Literal["vectors"] = "vectors"
    classes: Annotated[int, Field(ge=2)] = 4
    spread: Annotated[float, Field(gt=0)] = 0.5
    """Standard deviation around the center of a class, whose numbers have deviation 1."""


class VectorBatch(NamedTuple):
    vectors_BD: Tensor
    labels_B: Tensor


class Vectors(Dataset[VectorBatch]):
    """Vector g of a split: a function of (seed, split, g)."""

    def __init__(self, settings: VectorData, inputs: int, split: str, seed: int) -> None:
        self._settings, self._split, self._seed = settings, split, seed
        generator = torch.Generator().manual_seed(12345)
        self._centers_CD = torch.randn(settings.classes, inputs, generator=generator)

    def __len__(self) -> int:
        return VECTORS[self._split]

    def __getitem__(self, number: int) -> VectorBatch:
        key = hashlib.sha256(f"{self._seed}/{self._split}/{number}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(key[:4], "big"))
        label = torch.randint(self._settings.classes, (), generator=generator)
        center_D = self._centers_CD[label]
        noise_D = torch.randn(center_D.shape, generator=generator)
        return VectorBatch(center_D + self._settings.spread * noise_D, label)


class VectorTask(Task[VectorBatch]):
    data_settings = VectorData
    unit = Unit("vector", "vec")
    scores = (Score("accuracy", "accuracy", 4), Score("loss", "loss", 4, "nats a vector"))
    validation_score: ClassVar[str] = "validation_accuracy"
    higher_is_better: ClassVar[bool] = True

    def __init__(self, sections: Sections) -> None:
        assert isinstance(sections.data, VectorData)
        if not isinstance(sections.model, PerceptronConfig):
            raise ConfigError(
                f"data.kind: vectors is not allowed with model.kind: {sections.model.kind}"
            )
        self._settings, self._seed = sections.data, sections.seed
        self.model = sections.model.model_copy(update={"classes": sections.data.classes})

    @classmethod
    def open(cls, sections: Sections) -> "VectorTask":
        return cls(sections)

    @property
    def place(self) -> str:
        return f"data.classes: {self._settings.classes}"

    @property
    def fingerprint(self) -> str:
        tree = self._settings.model_dump_json(exclude={"num_workers"})
        return hashlib.sha256(tree.encode()).hexdigest()

    @property
    def samples(self) -> Dataset[Any]:
        return self._split("train")

    @property
    def samples_per_epoch(self) -> int:
        return VECTORS["train"]

    def losses(
        self, model: Predictor, batch: VectorBatch
    ) -> tuple[Tensor, tuple[RoutingStats, ...]]:
        logits_BC, routing = model(batch.vectors_BD)
        return model.cross_entropy(logits_BC, batch.labels_B), routing

    @property
    def has_validation(self) -> bool:
        return True

    def validate(self, scoring: Scoring) -> dict[str, float]:
        found = self.score(scoring, "validation")
        return {"validation_accuracy": found["accuracy"], "validation_loss": found["loss"]}

    @torch.no_grad()
    def score(self, scoring: Scoring, split: str) -> dict[str, Any]:
        model, world = scoring.model, scoring.world
        total = torch.zeros(3, dtype=torch.float64, device=world.device)
        rank, ranks = world.data_parallel_rank, world.data_parallel_size
        place = rank, ranks, world.device, scoring.report
        for batch in held_out_batches(self._split(split), scoring.batch_size, *place):
            (vectors_BD, labels_B), own_B = batch.batch, batch.own_B
            logits_BC, _ = model(vectors_BD)
            losses_B = model.cross_entropy(logits_BC, labels_B)
            right_B = logits_BC.argmax(-1) == labels_B
            total += torch.stack(
                [losses_B[own_B].double().sum(), right_B[own_B].sum(), own_B.sum()]
            )
        loss, right, count = comm.sum_over_samples(total, world).tolist()
        return {"accuracy": right / count, "loss": loss / count, "vectors_scored": int(count)}

    def units_of(self, split: str) -> int:
        return VECTORS[split]

    def _split(self, name: str) -> Vectors:
        return Vectors(self._settings, self.model.inputs, name, self._seed)  # type: ignore[attr-defined]


MODELS["perceptron"] = ModelKind(PerceptronConfig, Perceptron)
TASKS["vectors"] = VectorTask
