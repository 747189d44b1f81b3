"""Commands that read a model's weights without a data set: text, labels, other formats."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from polyad.launch.command import (
    Json,
    Positive,
    UsageError,
    check_json_path,
    command,
    only_results_on_stdout,
    results,
    show,
)
from polyad.launch.commands.options import (
    AnyWeights,
    Base,
    Best,
    Intervene,
    Precision,
    TokenizerFile,
    Weights,
)


@command(
    "generate",
    "polyad generate runs/quickstart/run --prompt 'def ' --temperature 0.8 "
    "--top-k 50 --top-p 0.95 --seed 1",
    "polyad generate runs/quickstart/run --prompt 'def ' --intervene layer=3,expert=2,how=prune",
)
def generate(
    path: AnyWeights,
    *,
    prompt: str,
    best: Best = False,
    base: Base = None,
    max_tokens: Positive = 100,
    temperature: float = 1.0,
    top_k: Positive | None = None,
    top_p: float = 1.0,
    seed: int = 0,
    tokenizer: TokenizerFile = None,
    special_tokens: Literal["text", "parse"] = "text",
    precision: Precision = "fp32",
    intervene: Intervene = (),
    json: Json = None,
) -> None:
    """Generates text with a checkpoint.

    Args:
        prompt (TEXT): text to continue.
        max_tokens: maximum number of new tokens; default 100.
        temperature (T): sampling temperature; 0 always picks the most likely token; default 1.
        top_k (K): sample from the K most likely tokens; default: all.
        top_p (P): nucleus sampling: sample from the smallest set of tokens with total probability
            P, among those that --top-k leaves; default 1.
        seed: random seed; default 0.
        special_tokens: whether special tokens in the prompt, such as <|im_start|>, are read as
            their characters (text) or as tokens (parse); default text.
    """
    from polyad.train.evaluation.generate import Sampling
    from polyad.train.experts.interventions import parse_intervention
    from polyad.train.loading import continuation_of, load

    check_json_path(json)
    interventions = [parse_intervention(text) for text in intervene]
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    with only_results_on_stdout() as stdout:

        def write(text: str) -> None:
            if json != "-" and text:
                stdout.write(text)
                stdout.flush()

        values = continuation_of(
            load(path, best=best, base=base, tokenizer=tokenizer, precision=precision),
            prompt,
            special_tokens=special_tokens,
            max_tokens=max_tokens,
            sampling=sampling,
            interventions=interventions,
            write=write,
        )
        speed = "{tokens_per_second:,.0f} tokens/s, ended by {ended_by}".format(**values)
        print(f"\n{len(values['token_ids'])} tokens, {speed}", file=sys.stderr)
        show(values, "", json, stdout)


@command("predict", "polyad predict runs/quickstart-images/run --image photo.jpg --json -")
def predict(
    path: AnyWeights,
    *,
    text: Sequence[str] = (),
    pair: Sequence[str] = (),
    file: str | None = None,
    image: Sequence[str] = (),
    best: Best = False,
    weights: Weights = "trained",
    base: Base = None,
    tokenizer: TokenizerFile = None,
    precision: Precision = "fp32",
    json: Json = None,
) -> None:
    """Labels new texts or images, with probabilities of the classes.

    For example --text 'A film to remember.' --text 'Two lost hours.', or --file reviews.csv. Prints
    the most probable classes of each input; --json has all of them. A model that was trained
    on numbers gives a number, one that chooses among texts the number of the right one, from 0.

    Args:
        text (TEXT): text to label; may be repeated.
        pair (TEXT): second text of each --text, in the same order, for a model that was trained on
            pairs.
        file (FILE): a .csv, .tsv, .jsonl or .parquet file with the columns of the training data;
            labels are not read.
        image (IMAGE): image file, or folder of images; may be repeated.
    """
    if sum(map(bool, (text, file, image))) != 1:
        raise UsageError("predict: one of the options --text, --file and --image is needed")
    if pair and len(pair) != len(text):
        raise UsageError(f"--pair: given {len(pair)} times, --text {len(text)} times")
    from polyad.train.loading import load, predictor_of

    with results(json) as show:
        run = load(
            path, weights=weights, best=best, precision=precision, tokenizer=tokenizer, base=base
        )
        predictor = predictor_of(run)
        if file is not None:
            predictions = predictor.file(file)
        else:
            predictions = predictor.images(image) if image else predictor.texts(text, pair)
        show(predictions, predictions.text())


@command("inspect", "polyad inspect exported", "polyad inspect exported --json -")
def inspect(path: AnyWeights, *, json: Json = None) -> None:
    """Shows what a folder of weights contains.

    Also whether Polyad understands all of it; --json has every tensor.
    """
    from polyad.parallel.checkpoint.load import newest_of, read_newest
    from polyad.train.describe import inspect, inspection_table

    with results(json) as show:
        result = read_newest(path, inspect, newest_of)
        show(result, inspection_table(result))


@command(
    "convert",
    "polyad convert runs/quickstart/run plain --to safetensors",
    "polyad convert runs/quickstart/dense exported --to huggingface",
    "polyad convert exported runs/again --to polyad",
    "polyad convert exported runs/upcycled --to polyad --upcycle num_experts=8,top_k=2",
    "polyad convert exported runs/split --to polyad --split num_experts=16,top_k=8,blocks=[3]",
    "polyad convert runs/split runs/merged --to polyad --merge",
)
def convert(
    source: AnyWeights,
    destination: Path,
    *,
    to: Literal["huggingface", "polyad", "safetensors", "peft"],
    merge: bool = False,
    upcycle: str | None = None,
    split: str | None = None,
    weights: Weights = "trained",
    base: Base = None,
    json: Json = None,
) -> None:
    """Converts weights: Hugging Face, peft, safetensors, checkpoint.

    Args:
        source (SOURCE): a checkpoint, a run, or a folder of weights.
        destination (DESTINATION): folder to create.
        to: huggingface: a Hugging Face folder (dense models, and mixtures that an open model
            family has); polyad: a checkpoint; safetensors: the weights of any model under
            Polyad's names; peft: the adapters of a run with adapt.lora, for the peft library
            (decoders, dense GPT-2 and BERT).
        merge: merge the adapters of a run with adapt.lora into its weights, and turn feed-forwards
            that were split into experts back into dense ones.
        upcycle (num_experts=E,...): turn a dense model into a sparse mixture whose experts start
            as copies of its feed-forwards; accepts keys of model.feed_forward, for example
            placement=[1,3], as well as noise=X (standard deviation of noise added to each expert's
            weights, relative to that of the weights) and seed=N.
        split (num_experts=E,top_k=K,...): split the units of a dense model's feed-forwards into
            experts of equal size; accepts keys of model.feed_forward of kind emoe, for example
            blocks=[8,10], as well as by=clustering or by=random, seed=N, and section= for a Mixer.
    """
    if upcycle is not None and split is not None:
        raise UsageError("--split: is not allowed with --upcycle")
    from polyad.train.exchange.change import Change, Splitting, Upcycling
    from polyad.train.exchange.convert import conversion_table, convert

    check_json_path(json)
    change: Change | None = None
    for text, kind in ((upcycle, Upcycling), (split, Splitting)):
        if text is not None:
            change = kind(text)
    with results(json) as show:
        result = convert(source, destination, to, change, weights, merge, base)
        show(result, conversion_table(result))
