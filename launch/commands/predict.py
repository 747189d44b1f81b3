"""`polyad predict`: the labels of texts and images that are in no data set."""

from collections.abc import Sequence
from typing import Annotated

from polyad.launch.command import Argument, Json, UsageError, command
from polyad.launch.commands.options import AnyWeights, Base, Best, Precision, TokenizerFile, Weights
from polyad.launch.output import results


@command(
    "predict",
    "polyad predict runs/quickstart-images/run --image photo.jpg --json -",
)
def predict(
    path: AnyWeights,
    *,
    text: Annotated[
        Sequence[str],
        Argument("text to label; may be repeated", "TEXT", one_of="input", repeated=True),
    ] = (),
    pair: Annotated[
        Sequence[str],
        Argument(
            "second text of each --text, in the same order, for a model that was trained on pairs",
            "TEXT",
            repeated=True,
        ),
    ] = (),
    file: Annotated[
        str | None,
        Argument(
            "a .csv, .tsv, .jsonl or .parquet file with the columns of the training data (labels "
            "are not read), or a .txt file with one text per line",
            "FILE",
            one_of="input",
        ),
    ] = None,
    image: Annotated[
        Sequence[str],
        Argument(
            "image file, or folder of images; may be repeated",
            "IMAGE",
            one_of="input",
            repeated=True,
        ),
    ] = (),
    best: Best = False,
    weights: Weights = "trained",
    base: Base = None,
    tokenizer: TokenizerFile = None,
    precision: Precision = "fp32",
    json: Json = None,
) -> None:
    """Labels new texts or images with a classifier, and says how probable each class is.

    For example --text 'A film to remember.' --text 'Two lost hours.', or --file reviews.csv. Prints
    the most probable classes of each input; --json has all of them. A model that was trained
    on numbers gives a number, one that chooses among texts the number of the right one, from 0.
    """
    if not (text or file or image):
        raise UsageError("needs an input: --text, --file or --image")
    if pair and len(pair) != len(text):
        raise UsageError(f"--pair: given {len(pair)} times, --text {len(text)} times")
    from polyad.launch.machine import prepare_environment

    prepare_environment()
    from polyad.train.loading import load

    with results(json) as show:
        run = load(
            path, weights=weights, best=best, precision=precision, tokenizer=tokenizer, base=base
        )
        predictor = run.predictor()
        if file is not None:
            found = predictor.file(file)
        else:
            found = predictor.images(image) if image else predictor.texts(text, pair)
        show(found, found.text())
