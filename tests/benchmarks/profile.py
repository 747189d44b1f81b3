"""Where the time of a step goes: `step.py --profile`.

Of a GPU the times of its kernels, each for the operation that launched it; of a CPU those of the
operations themselves. What is in no kernel and in no operation is a gap: the device waits.
"""

from collections.abc import Callable, Iterator
from typing import Any

from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

from tests.benchmarks.comparison import now

REGIONS = ("loss", "optimizer")
"""Names of `record_function` in the step; what runs inside counts for them, whatever it is."""
KINDS = ("products", "attention", "loss", "optimizer", "exchange", "other", "gaps")
_NAMES = {
    "attention": ("scaled_dot_product", "flash", "fmha", "efficient_attention"),
    "exchange": ("c10d", "nccl", "gloo"),
    "products": ("::mm", "addmm", "bmm", "grouped_mm", "::linear", "matmul", "experts_on_cpu"),
}
"""Parts of the names of operations, by kind; what has none of them is `other`."""
STEPS = 3


def time_by_kind(step: Callable[[], None], device: str) -> dict[str, float]:
    """Seconds of one step by kind.

    Args:
        step: The work, warmed up.
        device: `cpu` or `cuda`.

    Returns:
        Of each of `KINDS` the mean over a few steps. Together they are the step's time, which is a
        little longer than without a profiler.
    """
    activities = [ProfilerActivity.CPU]
    if device == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as recorded:
        began = now(device)
        for _ in range(STEPS):
            step()
        seconds = now(device) - began
    totals = dict.fromkeys(KINDS, 0.0)
    for kind, busy in _busy(recorded.events() or [], on_gpu=device == "cuda"):
        totals[kind] += busy
    totals = {kind: total / 1e6 / STEPS for kind, total in totals.items()}
    totals["gaps"] = max(0.0, seconds / STEPS - sum(totals.values()))
    return totals


def _busy(events: Any, *, on_gpu: bool) -> Iterator[tuple[str, float]]:
    """The kind of each operation, and the microseconds that it kept the device busy itself."""
    for event in events:
        if event.device_type != DeviceType.CPU or event.name in REGIONS:
            continue
        if on_gpu:
            busy = sum(kernel.duration for kernel in event.kernels)
        else:
            busy = event.self_cpu_time_total if "::" in event.name else 0.0
        if busy:
            yield kind_of(event), busy


def kind_of(event: Any) -> str:
    """One of `KINDS` but for the gaps: by the region around an operation, or else by its name.

    Args:
        event: Of the profiler: with a name and a `cpu_parent`.
    """
    around, names = event, []
    while around is not None:
        if around.name in REGIONS:
            return str(around.name)
        names.append(around.name)
        around = around.cpu_parent
    # An operation counts for the outermost one of a kind: attention multiplies, too.
    for name in reversed(names):
        for kind, parts in _NAMES.items():
            if any(part in name for part in parts):
                return kind
    return "other"


def profile_table(profiles: dict[str, dict[str, float]]) -> list[str]:
    """Lines for a person: a step's milliseconds by kind, and their share.

    Args:
        profiles: What `time_by_kind` gave, by variant.
    """
    lines = ["variant       " + "".join(f"{kind:>18}" for kind in KINDS)]
    for name, seconds in profiles.items():
        total = sum(seconds.values())
        cells = (f"{1e3 * seconds[kind]:,.1f} ms {seconds[kind] / total:4.0%}" for kind in KINDS)
        lines.append(f"{name:14}" + "".join(f"{cell:>18}" for cell in cells))
    return lines
