"""`state.json` of a checkpoint: the progress of its run. Imports no torch.

`polyad.train.state` says what the numbers mean; here they are checked to be possible.
"""

from typing import Annotated, Any

from pydantic import ConfigDict, Field, model_validator

from polyad.parallel.checkpoint.records import Count, Record

_YEAR_10000 = 253_402_300_800.0
Measured = Annotated[float, Field(allow_inf_nan=True)]
"""A number of a step; NaN or infinite if the step was not finite."""
Norm = Annotated[float, Field(gt=0)]
Seconds = Annotated[float, Field(ge=0)]


class StepRecord(Record):
    """The record of a step, as `metrics.jsonl` has it, with more keys than these."""

    model_config = ConfigDict(extra="allow")

    step: Annotated[Count, Field(ge=1)]
    loss: Measured
    grad_norm: Measured
    learning_rate: float
    step_seconds: Seconds
    mfu: float | None
    skipped: bool
    skipped_steps: Count

    @model_validator(mode="after")
    def _others(self) -> "StepRecord":
        for name, value in (self.__pydantic_extra__ or {}).items():
            if isinstance(value, list):
                good = name.count("/") != 1 and all(map(_is_number, value))
            elif isinstance(value, dict):
                good = "/" not in name
            else:
                good = _is_number(value)
            if not good:
                raise ValueError(f"{name!r:.60} is not what a record of a step has")
        return self


def _is_number(value: Any) -> bool:
    if isinstance(value, int):
        return abs(value) < 2**63
    return isinstance(value, float)


class State(Record):
    """The whole file. Checkpoints of older versions lack some keys, of newer ones have more.

    `polyad.train.state.TrainState` says what each of them is.
    """

    model_config = ConfigDict(extra="allow")

    step: Count = 0
    samples: Count = 0
    tokens: Count = 0
    """What language modelling counts; another task has a key of its own."""
    skipped_steps: Count = 0
    skipped_in_a_row: Count = 0
    recent_losses: tuple[float, ...] = ()
    recent_grad_norms: tuple[Norm, ...] = ()
    spikes: Count = 0
    spikes_in_a_row: Count = 0
    left_out: tuple[Count, ...] = ()
    unfinished: StepRecord | None = None
    best_score: float | None = None
    best_step: Count = 0
    validations_since_best: Count = 0
    first_loss: Measured | None = None
    seconds: Seconds = 0.0
    data_fingerprint: str = ""
    tokenizer_fingerprint: str | None = None
    end_of_text: str | None = None
    base_digest: str | None = None
    teacher_step: Count | None = None
    vocab_size: Count = 0
    world_size: Annotated[Count, Field(ge=1)] = 1
    versions: dict[str, str] = Field(default_factory=dict)
    saved_at: Annotated[float, Field(ge=0, lt=_YEAR_10000)] | None = None

    @model_validator(mode="after")
    def _agree(self) -> "State":
        if len(self.recent_losses) != len(self.recent_grad_norms):
            raise ValueError(
                f"recent_losses has {len(self.recent_losses)} numbers, recent_grad_norms "
                f"{len(self.recent_grad_norms)}"
            )
        if self.unfinished is not None and self.unfinished.step != self.step:
            raise ValueError(f"unfinished.step is {self.unfinished.step}, step is {self.step}")
        return self
