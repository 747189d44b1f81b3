"""`polyad convert` and `polyad generate`: commands that read a model's weights."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from polyad.launch.command import Argument, Json, command, positive
from polyad.launch.commands.options import Base, Best, Intervene, Weights, steering
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
    path: Annotated[Path, Argument("a checkpoint, a run, or a folder of weights", "CHECKPOINT")],
    *,
    prompt: Annotated[str, Argument("the text that is continued", "TEXT")],
    best: Best = False,
    base: Base = None,
    max_tokens: Annotated[int, Argument("the most new tokens; default 100", "N", positive)] = 100,
    temperature: Annotated[
        float, Argument("divides the logits; 0: always the likeliest token; default 1", "T")
    ] = 1.0,
    top_k: Annotated[
        int | None,
        Argument("choose among the K likeliest tokens; default: all", "K", positive),
    ] = None,
    top_p: Annotated[
        float,
        Argument(
            "choose among the fewest tokens with this probability in all, of those that --top-k "
            "leaves; default 1",
            "P",
        ),
    ] = 1.0,
    seed: Annotated[int, Argument("of the random choice; default 0", "N")] = 0,
    tokenizer: Annotated[
        str | None,
        Argument("a file or folder, as for polyad prepare; default: the checkpoint's", "PATH"),
    ] = None,
    precision: Annotated[Literal["fp32", "bf16"], Argument("default fp32")] = "fp32",
    no_cache: Annotated[bool, Argument("compute the whole window again for every token")] = False,
    steer: Annotated[
        Sequence[str],
        steering(
            "add X times an expert's gate column to what enters a block, also level=N of a "
            "hierarchy; may be given several times"
        ),
    ] = (),
    intervene: Intervene = (),
    trace: Annotated[
        Path | None,
        Argument(
            "write the experts of every token of the prompt and the text to a new file, with the "
            "columns of polyad experts trace (.parquet)",
            "FILE",
        ),
    ] = None,
    json: Json = None,
) -> None:
    """Continues a text with a checkpoint."""
    from polyad.launch.machine import prepare_environment

    prepare_environment()
    from polyad.parallel.checkpoint.finding import best_checkpoint, newest_of, read_newest
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
    tensors: Annotated[bool, Argument("a line for each tensor, too")] = False,
    json: Json = None,
) -> None:
    """Says what a folder of weights holds, and whether all of it is understood."""
    from polyad.launch.machine import prepare_environment

    prepare_environment()
    from polyad.parallel.checkpoint.finding import newest_of, read_newest
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
    "polyad convert exported runs/factorized --to polyad --factorize num_experts=[64]",
    "polyad convert runs/split runs/merged --to polyad --merge",
)
def convert(
    source: Annotated[Path, Argument("a checkpoint, a run, or a folder of weights", "SOURCE")],
    destination: Annotated[Path, Argument("the folder to make", "DESTINATION")],
    *,
    to: Annotated[
        Literal["huggingface", "polyad", "safetensors", "peft"],
        Argument(
            "a Hugging Face folder (dense models, and experts such as open models have), a "
            "checkpoint, any model's weights under Polyad's names, or the adapters of a run with "
            "adapt.lora for the library peft (decoders, dense GPT-2 and BERT)"
        ),
    ],
    merge: Annotated[
        bool,
        Argument(
            "make the adapters of a run with adapt.lora part of its weights, and feed-forwards "
            "that were split dense again"
        ),
    ] = False,
    upcycle: Annotated[
        str | None,
        Argument(
            "make a dense model a sparse mixture whose experts are copies of its feed-forwards; "
            "takes keys of model.feed_forward, for example placement=[1,3], noise=X (the standard "
            "deviation of what is added to each expert's weights, as a share of theirs) and seed=N",
            "num_experts=E,...",
            one_of="change",
        ),
    ] = None,
    split: Annotated[
        str | None,
        Argument(
            "make the units of a dense model's feed-forwards experts, in groups of equal size; "
            "takes keys of model.feed_forward of kind emoe, for example blocks=[8,10], "
            "by=clustering or random, seed=N, and section= of a Mixer",
            "num_experts=E,top_k=K,...",
            one_of="change",
        ),
    ] = None,
    factorize: Annotated[
        str | None,
        Argument(
            "make a dense model's feed-forwards the start of factorized experts, each with the "
            "nearest matrix that the rank allows; takes keys of model.feed_forward of kind mumoe, "
            "for example factorization=tr and rank=R (default: as many parameters as the dense "
            "layers), noise=X (the standard deviation of what sets experts apart, default 0.1), "
            "seed=N, and section= of a Mixer",
            "num_experts=[N],...",
            one_of="change",
        ),
    ] = None,
    linear_score: Annotated[
        bool,
        Argument(
            "make the attentive scores of sparse experts the linear scores that give the same "
            "logits",
            one_of="change",
        ),
    ] = False,
    weights: Weights = "trained",
    base: Base = None,
    json: Json = None,
) -> None:
    """Converts weights to a Hugging Face folder, plain safetensors, or a checkpoint."""
    from polyad.launch.machine import prepare_environment

    prepare_environment()
    from polyad.train.exchange.change import Change
    from polyad.train.exchange.convert import conversion_table, convert
    from polyad.train.exchange.experts import Splitting, Upcycling
    from polyad.train.exchange.factorize import Factorizing
    from polyad.train.exchange.linear_score import LinearScores

    check_json_path(json)
    change: Change | None = LinearScores() if linear_score else None
    for text, kind in ((upcycle, Upcycling), (split, Splitting), (factorize, Factorizing)):
        if text is not None:
            change = kind(text)
    with results(json) as show:
        result = convert(source, destination, to, change, weights, merge, base)
        show(result, conversion_table(result))
