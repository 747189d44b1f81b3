"""The keys under `train:`."""

from typing import Annotated

from pydantic import Field

from polyad.model.config import Config
from polyad.parallel.zero import Precision

Count = Annotated[int, Field(ge=1, le=2**63 - 1)]


class TrainConfig(Config):
    """How much is trained on, and in which pieces."""

    steps: Count
    """Optimizer steps of the whole run."""
    global_batch_size: Count
    """Samples in an optimizer step, over all processes."""
    micro_batch_size: Count
    """Samples in one forward pass of one process; the rest is accumulated."""
    precision: Precision = "fp32"
    """Of weights and activations in forward and backward; master weights are always fp32."""
    tf32: bool = False
    """Whether a GPU may round the factors of fp32 matrix products to TF32 (10 bits of mantissa
    instead of 23), which is several times as fast. No by default: fp32 is for comparing with other
    layouts and machines, bf16 for speed. Nothing changes in bf16, or on a CPU."""
    ema: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Decay d of an exponential moving average of the weights, d average + (1 - d) weight after
    every step that is applied, as 0.9999; in fp32, from the first weights on. It is kept in
    checkpoints, for `polyad evaluate` and `convert`; training and its validation do not use it.
    null: none is kept."""
    max_skipped_steps: Count = 10
    """Steps in a row that may be skipped for a loss or gradient that is not finite."""
