"""The keys under `monitor:`."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from polyad.model.config import Config


class MonitorConfig(Config):
    """What is watched while a run goes on, and what is done about it."""

    spike_action: Literal["none", "warn", "skip", "rewind"] = "warn"
    """What a loss or gradient norm far above the recent ones leads to. warn: a line. skip: the step
    changes nothing. rewind: back to the last checkpoint, and on without that batch."""
    spike_threshold: Annotated[float, Field(gt=0)] = 10.0
    """How far above the median is a spike, in standard deviations by the median distance."""
    spike_window: Annotated[int, Field(ge=8, le=100_000)] = 128
    """Steps that the median is over; a checkpoint keeps two numbers of each."""
    spike_warmup: Annotated[int, Field(ge=8)] = 64
    """Steps in the window before anything is judged."""
    max_skips: Annotated[int, Field(ge=1)] = 10
    """Spikes in a row that are skipped; one more ends the run."""
    max_rewinds: Annotated[int, Field(ge=1)] = 10
    """How often a run goes back to a checkpoint in its whole life; once more ends it."""

    stall_minutes: Annotated[float, Field(ge=0, le=7 * 24 * 60)] = 15.0
    """Minutes without any progress after which a process is named as stalled, with its stack, and
    the run ends. Longer than the longest time without a collective, as in compiling or in writing
    a checkpoint, and shorter than `parallel.timeout_minutes`. 0 watches nothing."""
    stragglers: Annotated[int, Field(ge=0)] = 100
    """Steps between two looks for processes that all others wait for, which are named with their
    host; 0: none. A look waits for the device once."""
    grace_seconds: Annotated[float, Field(gt=0, le=86_400)] = 25.0
    """Seconds from a signal to the end of the process, saved or not: less than what the scheduler
    allows before it kills it, and torchrun (30, unless `polyad launch` tells it more)."""

    @model_validator(mode="after")
    def _warmup_fits_the_window(self) -> "MonitorConfig":
        if self.spike_warmup > self.spike_window:
            raise ValueError(
                f"monitor.spike_warmup: {self.spike_warmup} is more than monitor.spike_window: "
                f"{self.spike_window}, which would never hold so many"
            )
        return self
