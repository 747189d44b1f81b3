"""Commands that remove experts or put others in their place, and measure what that costs.

Each runs in one process, or in each process that torchrun has started; rank 0 shows the result.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

from polyad.launch.command import (
    Argument,
    Overrides,
    command,
    share,
)
from polyad.launch.commands.held_out import (
    Found,
    Seed,
    Stored,
    Tokens,
    examined,
    measure_named,
    show_measured,
)
from polyad.launch.commands.options import CheckpointOrRun

Ranking = Literal["atlas", "reap", "mone", "frequency", "probability", "mean-norm", "random"]
"""What decides which experts stay."""


@command(
    "experts prune",
    "polyad experts prune runs/quickstart/run runs/smaller --by reap --keep 0.5",
    "polyad experts prune runs/quickstart/run runs/joined --by frequency --keep 0.5 --merge",
)
def prune(
    path: CheckpointOrRun,
    output: Annotated[Path, Argument("folder to create, in the same format", "OUTPUT")],
    overrides: Overrides,
    *,
    by: Annotated[
        Ranking,
        Argument(
            "how to choose the experts that stay: by the change in loss without each (atlas; one "
            "pass per expert), by a statistic of their use and outputs, by the mean probability "
            "that the router gives them, or at random"
        ),
    ],
    keep: Annotated[
        float, Argument("fraction of the experts of every layer to keep, below 1", "S", share)
    ],
    merge: Annotated[
        bool,
        Argument(
            "merge experts with similar mean outputs, weighted by --by, instead of removing experts"
        ),
    ] = False,
    calibrate: Annotated[
        str | None,
        Argument(
            "prepared data whose train split is used to choose the experts, such as examples of "
            "one domain; default: the data on which the cost is measured",
            "DIR",
        ),
    ] = None,
    tokens: Tokens = None,
    seed: Seed = 0,
    held: Stored,
) -> None:
    """Writes a sparse mixture with fewer experts, and reports what that costs.

    Compares the loss on held-out text with that of all experts, and of randomly chosen ones.
    """
    asked: dict[str, Any] = {"output": output, "by": by, "keep": keep, "merge": merge}
    asked |= {"calibrate": calibrate, "seed": seed}
    asked |= {} if tokens is None else {"tokens": tokens}

    def measure(checkpoint: Path) -> Found:
        from polyad.train.measures.removal import Removal

        return examined(checkpoint, Removal, held, overrides, **asked)

    show_measured("experts prune", path, held, {"overrides": overrides} | asked, measure)


@command(
    "experts splice",
    "polyad train configs/quickstart/gpt2.yaml data.path=runs/stdlib run.folder=runs/spliced "
    "distill.teacher=runs/quickstart/dense distill.blocks=normalized "
    "model.replaced='{blocks: [1], feed_forward: {kind: dense, hidden_size: 512}}'",
    "polyad experts splice runs/spliced",
)
def splice(
    path: CheckpointOrRun,
    overrides: Overrides,
    *,
    teacher: Annotated[
        Path | None,
        Argument(
            "the original model: a run, checkpoint or folder of weights; default: the run's "
            "distill.teacher, at the step from which distillation started",
            "PATH",
        ),
    ] = None,
    tokens: Tokens = None,
    held: Stored,
) -> None:
    """Measures how well replaced feed-forwards (model.replaced) stand in for the original ones.

    Reports the loss with the original feed-forwards, without any and with the replaced ones, in
    each of these blocks and in all together; how far their outputs are from the original ones; and
    how many experts are active.
    """
    asked: dict[str, Any] = {"teacher": teacher, "tokens": tokens}
    measure = measure_named("splice", held, overrides, **asked)
    show_measured("experts splice", path, held, {"overrides": overrides} | asked, measure)


@command("experts rewrite", "polyad experts rewrite runs/quickstart/run --move class=1,of=Young:0")
def rewrite(
    path: CheckpointOrRun,
    overrides: Overrides,
    *,
    move: Annotated[
        str,
        Argument(
            "the class C whose output is moved, in proportion to an image's use of the experts "
            "that training images of a subpopulation use (for example of=Young:0+Male:0); by: the "
            "factor, default: the number of experts",
            "class=C,of=A+B,by=N",
        ),
    ],
    held: Stored,
) -> None:
    """Edits the output for one class through its experts, in a model with a muMoE head.

    Reports accuracy and fairness before and after.
    """

    def measure(checkpoint: Path) -> Found:
        from polyad.train.measures.rewriting import Rewriting

        return examined(checkpoint, Rewriting, held, overrides, move=move)

    show_measured("experts rewrite", path, held, {"overrides": overrides, "move": move}, measure)
