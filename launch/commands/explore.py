"""`polyad explore`: a text and its experts, on a page of this machine."""

from pathlib import Path
from typing import Annotated

from polyad.launch.command import Argument, command, non_negative, positive
from polyad.launch.commands.options import (
    AnyWeights,
    Base,
    Best,
    Precision,
    Split,
    TokenizerFile,
    Weights,
)


@command(
    "explore",
    "polyad explore runs/quickstart/run",
    "polyad explore runs/quickstart/run --data runs/stdlib --tokens 50000",
    "polyad explore runs/quickstart/run --with runs/quickstart/run/checkpoints/step-00000100",
)
def explore(
    path: AnyWeights,
    *,
    other: Annotated[
        Path | None,
        Argument(
            "a second checkpoint, which reads the same text side by side",
            "CHECKPOINT",
            flag="--with",
        ),
    ] = None,
    port: Annotated[int, Argument("port on 127.0.0.1; default: a free one", "N", non_negative)] = 0,
    data: Annotated[
        str | None,
        Argument(
            "prepared text, for each expert's top contexts and for interventions with how=mean",
            "DIR",
        ),
    ] = None,
    tokens: Annotated[
        int,
        Argument("approximate number of tokens to read from --data; default 50000", "N", positive),
    ] = 50_000,
    split: Split = "validation",
    top: Annotated[
        int,
        Argument(
            "for a muMoE, where every token uses all experts: how many to show per token and "
            "level; default 4",
            "K",
            positive,
        ),
    ] = 4,
    best: Best = False,
    weights: Weights = "trained",
    base: Base = None,
    tokenizer: TokenizerFile = None,
    precision: Precision = "fp32",
) -> None:
    """Serves a local web page that shows the experts of every token of text that you type.

    The address, which is printed once, contains a random access token. Requests from other machines
    are not answered. Press Ctrl-C to stop.
    """
    from polyad.launch.machine import prepare_environment

    prepare_environment()
    from polyad.train.errors import ConfigError

    try:
        from polyad.train.explore.server import Explored, serve
    except ModuleNotFoundError as error:
        if error.name not in ("starlette", "uvicorn"):
            raise
        raise ConfigError(
            f"explore: {error.name} is not installed: pip install 'polyad[explore]', or in a clone "
            f"pip install -c constraints.txt -e '.[explore]'"
        ) from None
    import threading

    from polyad.launch.output import only_results_on_stdout
    from polyad.train.explore.cards import Cards
    from polyad.train.loading import load

    lock = threading.Lock()
    with only_results_on_stdout() as stdout:

        def opened(chosen: Path) -> Explored:
            run = load(
                chosen,
                weights=weights,
                best=best,
                precision=precision,
                tokenizer=tokenizer,
                base=base,
            )
            run.check_shown()
            if data is None:
                return Explored(run=run, cards=None)
            held_out = run.open_data(data)
            return Explored(run=run, cards=Cards(held_out, run.model, split, tokens, lock))

        def say(address: str) -> None:
            stdout.write(f"{address}\n")
            stdout.flush()

        models = [opened(each) for each in (path, other) if each is not None]
        serve(models, port=port, top=top, lock=lock, say=say)
