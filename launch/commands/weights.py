"""`polyad convert` and `polyad generate`: commands that read a model's weights."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from polyad.launch.command import Argument, Json, command, positive
from polyad.launch.commands.options import (
    AnyWeights,
    Base,
    Best,
    Intervene,
    Precision,
    TokenizerFile,
    Weights,
    steering,
)
from polyad.launch.output import check_json_path, only_results_on_stdout, results, show


@command(
    "generate",
    "polyad generate runs/quickstart/run --prompt 'def ' --temperature 0.8 "
    "--top-k 50 --top-p 0.95 --seed 1",
    "polyad generate runs/quickstart/run --prompt 'def ' --steer layer=3,expert=2,strength=8",
    "polyad generate runs/quickstart/run --prompt 'def ' --intervene layer=3,expert=2,how=prune",
    "polyad generate runs/quickstart/run --prompt 'def ' --trace runs/written.parquet",
)
def generate(
    path: AnyWeights,
    *,
    prompt: Annotated[str, Argument("text to continue", "TEXT")],
    best: Best = False,
    base: Base = None,
    max_tokens: Annotated[
        int, Argument("maximum number of new tokens; default 100", "N", positive)
    ] = 100,
    temperature: Annotated[
        float,
        Argument("sampling temperature; 0 always picks the most likely token; default 1", "T"),
    ] = 1.0,
    top_k: Annotated[
        int | None,
        Argument("sample from the K most likely tokens; default: all", "K", positive),
    ] = None,
    top_p: Annotated[
        float,
        Argument(
            "nucleus sampling: sample from the smallest set of tokens with total probability P, "
            "among those that --top-k leaves; default 1",
            "P",
        ),
    ] = 1.0,
    seed: Annotated[int, Argument("random seed; default 0", "N")] = 0,
    tokenizer: TokenizerFile = None,
    precision: Precision = "fp32",
    no_cache: Annotated[
        bool,
        Argument("recompute the whole context for every token instead of caching keys and values"),
    ] = False,
    steer: Annotated[
        Sequence[str],
        steering(
            "add X times an expert's gate column to the input of a block (level=N in a "
            "hierarchy); may be repeated"
        ),
    ] = (),
    intervene: Intervene = (),
    trace: Annotated[
        Path | None,
        Argument(
            "write the experts of every token of the prompt and of the generated text to a new "
            ".parquet file, with the columns of polyad experts trace",
            "FILE",
        ),
    ] = None,
    json: Json = None,
) -> None:
    """Generates text with a checkpoint."""
    from polyad.launch.machine import prepare_environment

    prepare_environment()
    from polyad.parallel.checkpoint.load import best_checkpoint, newest_of, read_newest
    from polyad.train.evaluation.generate import Sampling, generate
    from polyad.train.experts.interventions import parse_intervention
    from polyad.train.experts.steering import parse_steering

    check_json_path(json)
    steerings = [parse_steering(text) for text in steer]
    interventions = [parse_intervention(text) for text in intervene]
    with only_results_on_stdout() as stdout:

        def write(text: str) -> None:
            if json != "-" and text:
                stdout.write(text)
                stdout.flush()

        result = read_newest(
            path,
            lambda chosen: generate(
                chosen,
                prompt,
                tokenizer=tokenizer,
                max_tokens=max_tokens,
                sampling=Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed),
                use_cache=not no_cache,
                precision=precision,
                steerings=steerings,
                interventions=interventions,
                base=base,
                write=write,
                trace=trace,
            ),
            best_checkpoint if best else newest_of,
        )
        speed = f"{len(result.token_ids)} tokens, {result.tokens_per_second:,.0f} tokens/s"
        print(f"\n{speed}, ended by {result.ended_by}", file=sys.stderr)
        for load in result.steering:
            print(load, file=sys.stderr)
        show(result, "", json, stdout)


@command("inspect", "polyad inspect exported", "polyad inspect exported --tensors")
def inspect(
    path: Annotated[Path, Argument("a checkpoint, a run, or a folder of weights", "FOLDER")],
    *,
    tensors: Annotated[bool, Argument("also print one line per tensor")] = False,
    json: Json = None,
) -> None:
    """Shows what a folder of weights contains, and whether Polyad understands all of it."""
    from polyad.launch.machine import prepare_environment

    prepare_environment()
    from polyad.parallel.checkpoint.load import newest_of, read_newest
    from polyad.train.exchange.inspect import inspect as inspected

    with results(json) as say:
        found = read_newest(path, inspected, newest_of)
        say(found, found.text(tensors))


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
    source: Annotated[Path, Argument("a checkpoint, a run, or a folder of weights", "SOURCE")],
    destination: Annotated[Path, Argument("folder to create", "DESTINATION")],
    *,
    to: Annotated[
        Literal["huggingface", "polyad", "safetensors", "peft"],
        Argument(
            "huggingface: a Hugging Face folder (dense models, and mixtures that an open model "
            "family has); polyad: a checkpoint; safetensors: the weights of any model under "
            "Polyad's names; peft: the adapters of a run with adapt.lora, for the peft library "
            "(decoders, dense GPT-2 and BERT)"
        ),
    ],
    merge: Annotated[
        bool,
        Argument(
            "merge the adapters of a run with adapt.lora into its weights, and turn feed-forwards "
            "that were split into experts back into dense ones"
        ),
    ] = False,
    upcycle: Annotated[
        str | None,
        Argument(
            "turn a dense model into a sparse mixture whose experts start as copies of its "
            "feed-forwards; accepts keys of model.feed_forward, for example placement=[1,3], as "
            "well as noise=X (standard deviation of noise added to each expert's weights, "
            "relative to that of the weights) and seed=N",
            "num_experts=E,...",
            one_of="change",
        ),
    ] = None,
    split: Annotated[
        str | None,
        Argument(
            "split the units of a dense model's feed-forwards into experts of equal size; accepts "
            "keys of model.feed_forward of kind emoe, for example blocks=[8,10], as well as "
            "by=clustering or by=random, seed=N, and section= for a Mixer",
            "num_experts=E,top_k=K,...",
            one_of="change",
        ),
    ] = None,
    weights: Weights = "trained",
    base: Base = None,
    json: Json = None,
) -> None:
    """Converts weights to Hugging Face, peft or plain safetensors format, or to a checkpoint."""
    from polyad.launch.machine import prepare_environment

    prepare_environment()
    from polyad.train.exchange.change import Change
    from polyad.train.exchange.convert import conversion_table, convert
    from polyad.train.exchange.experts import Splitting, Upcycling

    check_json_path(json)
    change: Change | None = None
    for text, kind in ((upcycle, Upcycling), (split, Splitting)):
        if text is not None:
            change = kind(text)
    with results(json) as show:
        result = convert(source, destination, to, change, weights, merge, base)
        show(result, conversion_table(result))
