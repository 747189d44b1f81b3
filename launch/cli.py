"""`polyad`: finds what a command means and calls it; the work is done in the rooms below.

Nothing heavy is imported before a command is known to need it: `polyad --help` is to be quick.
How a command ends is said in `train/errors.py`.
"""

import errno
import os
import sys
import time
import traceback
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from launch.output import check_json_path, only_results_on_stdout, show
from launch.parser import Parser, UsageError, nearest, positive

OUTPUT_ERRORS = frozenset(
    {
        *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO),
        *(errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR, errno.EISDIR),
        *(errno.ENAMETOOLONG, errno.EEXIST, errno.ENOTEMPTY),
    }
)
"""What a file system refuses: the user's to mend, so one line and no traceback."""

RANK_ZERO_SPEAKS_FIRST = 2.0
"""Seconds another rank waits with its error: torchrun ends it if rank 0 has failed as well."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """One command of `polyad`."""

    summary: str
    example: str
    arguments: Callable[[Parser], None]
    """Declares its arguments."""
    handler: Callable[[Namespace], int | None]
    """Does it; None is success."""


def main() -> NoReturn:
    """Runs `sys.argv` and ends the process with the status."""
    status = run(sys.argv[1:])
    communication = sys.modules.get("parallel.comm")
    if communication is not None:
        # The interpreter's own shutdown may abort once gloo has run.
        communication.leave(status)
    sys.exit(status)


def run(argv: Sequence[str]) -> int:
    """Runs one command and says what went wrong.

    Args:
        argv: the command line without the program's name.

    Returns:
        The exit status, as `train/errors.py` lists them.
    """
    return guard(lambda: _dispatch(argv))


def guard(work: Callable[[], int]) -> int:
    """Turns however something ends into an exit status, and an error into its one line.

    Args:
        work: gives the status itself if it comes to its end.

    Returns:
        The exit status.
    """
    try:
        return work()
    except SystemExit as stop:  # argparse, after --help
        return int(stop.code or 0)
    except KeyboardInterrupt:
        if _is_main():
            _say("interrupted")
        return 130
    except BrokenPipeError:  # the reader of our output has gone, as in `polyad validate | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    except Exception as error:
        return _report(error)


def _dispatch(argv: Sequence[str]) -> int:
    words = 2 if " ".join(argv[:2]) in COMMANDS else 1  # two, as in `bench data`
    name = " ".join(argv[:words])
    if name in COMMANDS:
        command = COMMANDS[name]
        parser = Parser(name, command.summary, command.example)
        command.arguments(parser)
        return command.handler(parser.parse_intermixed_args(argv[words:])) or 0
    if name in {"-h", "--help"}:
        print(_overview())
        return 0
    if name == "--version":
        print(f"polyad {_version()}")
        return 0
    if not name:
        raise UsageError(f"a command is needed: {', '.join(COMMANDS)} (see `polyad --help`)")
    raise UsageError(f"unknown command {name!r}{nearest(name, COMMANDS)}")


def _report(error: Exception) -> int:
    status = getattr(error, "exit_status", None)
    if isinstance(status, int):
        _say(" ".join(str(error).split()))
        return status
    if isinstance(error, OSError) and error.errno in OUTPUT_ERRORS:
        where = f"{error.filename}: " if error.filename else ""
        _say(f"{where}{error.strerror}")
        return 1
    if _rank():  # often only the echo of rank 0's end, which torchrun then answers
        time.sleep(RANK_ZERO_SPEAKS_FIRST)
    traceback.print_exc()
    return 1


def _say(message: str) -> None:
    """One line on standard error, from rank 0; from another one only if rank 0 has none."""
    rank = _rank()
    if rank:
        time.sleep(RANK_ZERO_SPEAKS_FIRST)
        message = f"rank {rank}: {message}"
    print(f"polyad: error: {message}", file=sys.stderr, flush=True)


def _overview() -> str:
    width = max(len(name) for name in COMMANDS)
    commands = "\n".join(f"  {name:{width}}  {c.summary}" for name, c in COMMANDS.items())
    return f"""usage: polyad COMMAND ...

Trains mixture-of-experts transformers.

commands:
{commands}

`polyad COMMAND --help` explains one of them; `polyad --version` prints the version.

example:
  polyad prepare --source python-stdlib --tokenizer train:8192 --output runs/stdlib
  polyad launch configs/quickstart/gpt2.yaml --processes-per-node 2 data.path=runs/stdlib"""


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("polyad")
    except PackageNotFoundError:
        return "(not installed)"


def _is_main() -> bool:
    return _rank() == 0


def _rank() -> int:
    text = os.environ.get("RANK", "0")
    return int(text) if text.isdecimal() else 0


def _prepare_arguments(parser: Parser) -> None:
    add = parser.add_argument
    add(
        "--source",
        required=True,
        help="python-stdlib, openwebtext, wikitext-103, hub:OWNER/NAME[:CONFIG], "
        "hub:FOLDER[:CONFIG] (a local copy), arrow:FOLDER (save_to_disk), or a .txt, .jsonl or "
        ".parquet file or folder",
    )
    add(
        "--tokenizer",
        required=True,
        help="train:VOCAB_SIZE, words or words:VOCAB_SIZE (of the train split), a tokenizer.json, "
        "a SentencePiece .model, or GPT-2's folder",
    )
    add("--output", required=True, metavar="DIR", help="the folder to make")
    add("--validation-fraction", type=float, default=0.05, metavar="F", help="of all documents")
    add("--test-fraction", type=float, default=0.05, metavar="F", help="of all documents")
    add("--validation-source", metavar="SOURCE", help="text that is the validation split instead")
    add("--test-source", metavar="SOURCE", help="text that is the test split instead")
    add("--text-key", default="text", metavar="KEY", help="of the text in .jsonl and .parquet")
    add("--streaming", action="store_true", help="read a Hugging Face data set without a copy")
    add("--end-of-text", metavar="TOKEN", help="ends each document; default: a well-known one")
    add("--overwrite", action="store_true", help="replace prepared data that is in DIR")


def _prepare(options: Namespace) -> None:
    from data.prepare import prepare
    from launch.tables import prepared_table

    with only_results_on_stdout() as stdout:
        started = time.monotonic()
        manifest = prepare(**vars(options))
        seconds = time.monotonic() - started
        stdout.write(prepared_table(manifest, options.output, seconds) + "\n")


def _config_arguments(parser: Parser) -> None:
    parser.add_argument("config", type=Path, metavar="CONFIG", help="a YAML file")
    _override_arguments(parser)


def _override_arguments(parser: Parser) -> None:
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="a key of the file, as train.steps=100"
    )


def _train(options: Namespace) -> None:
    from launch.machine import end_with_launcher, prepare_environment
    from launch.tables import trained_table

    end_with_launcher()
    prepare_environment()
    from parallel import comm
    from train.pretrain import main as train

    with only_results_on_stdout() as stdout:
        state = train(options.config, options.overrides)
        if _is_main():
            stdout.write(trained_table(state, options.config, options.overrides) + "\n")
        comm.shutdown()


def _launch_arguments(parser: Parser) -> None:
    from launch.options import launch_arguments

    _config_arguments(parser)
    launch_arguments(parser)


def _launch(options: Namespace) -> None:
    from launch.options import launch_from

    launch_from(options)


def _evaluate_arguments(parser: Parser) -> None:
    add = parser.add_argument
    add("path", type=Path, metavar="CHECKPOINT_OR_RUN", help="a run means its newest checkpoint")
    add("--data", metavar="DIR", help="prepared data; default: what the run was trained on")
    add("--split", choices=("validation", "test", "train"), default="validation")
    add("--json", metavar="FILE", help="write the result there; - for standard output, alone")
    _override_arguments(parser)


def _evaluate(options: Namespace) -> None:
    from launch.machine import prepare_environment

    prepare_environment()
    from parallel import comm
    from train.evaluate import evaluate, result_table

    check_json_path(options.json)
    with only_results_on_stdout() as stdout:
        result = evaluate(
            options.path,
            data=options.data,
            split=options.split,
            overrides=tuple(options.overrides),
        )
        if _is_main():
            show(result, result_table(result), options.json, stdout)
        comm.shutdown()


def _convert_arguments(parser: Parser) -> None:
    add = parser.add_argument
    add("source", type=Path, metavar="SOURCE", help="a checkpoint, a run, or a GPT-2 folder")
    add("destination", type=Path, metavar="DESTINATION", help="the folder to make")
    add("--to", choices=("huggingface", "polyad"), required=True, help="the format to write")
    add("--json", metavar="FILE", help="write the result there; - for standard output, alone")


def _convert(options: Namespace) -> None:
    from launch.machine import prepare_environment

    prepare_environment()
    from train.convert import conversion_table, convert

    with only_results_on_stdout() as stdout:
        result = convert(options.source, options.destination, options.to)
        show(result, conversion_table(result), options.json, stdout)


def _generate_arguments(parser: Parser) -> None:
    add = parser.add_argument
    add("path", type=Path, metavar="CHECKPOINT", help="a checkpoint, a run, or a GPT-2 folder")
    add("--prompt", required=True, metavar="TEXT", help="what is continued")
    add("--max-tokens", type=positive, default=100, metavar="N", help="at most; default 100")
    add("--temperature", type=float, default=1.0, metavar="T", help="0: always the likeliest token")
    add("--top-p", type=float, default=1.0, metavar="P", help="among tokens of this probability")
    add("--seed", type=int, default=0, metavar="N", help="of the choice; default 0")
    add("--tokenizer", metavar="PATH", help="a tokenizer.json; default: the checkpoint's")
    add("--precision", choices=("fp32", "bf16"), default="fp32", help="default fp32")
    add("--no-cache", action="store_true", help="run the whole window for every token")
    add("--json", metavar="FILE", help="write the result there; - for standard output, alone")


def _generate(options: Namespace) -> None:
    from launch.machine import prepare_environment

    prepare_environment()
    from train.generate import Sampling, generate

    with only_results_on_stdout() as stdout:

        def write(text: str) -> None:
            if options.json != "-" and text:
                stdout.write(text)
                stdout.flush()

        result = generate(
            options.path,
            options.prompt,
            tokenizer=options.tokenizer,
            max_tokens=options.max_tokens,
            sampling=Sampling(
                temperature=options.temperature, top_p=options.top_p, seed=options.seed
            ),
            use_cache=not options.no_cache,
            precision=options.precision,
            write=write,
        )
        speed = f"{len(result['token_ids'])} tokens, {result['tokens_per_second']:,.0f} tokens/s"
        print(f"\n{speed}, ended by {result['ended_by']}", file=sys.stderr)
        show(result, "", options.json, stdout)


def _validate_arguments(parser: Parser) -> None:
    _config_arguments(parser)
    add = parser.add_argument
    add(
        "--processes", type=positive, metavar="N", help="that will run it; default: WORLD_SIZE or 1"
    )
    add("--json", metavar="FILE", help="write the description there; - for standard output, alone")
    add("--without-data", action="store_true", help="where the data is not; set model.vocab_size")


def _validate(options: Namespace) -> None:
    from parallel.comm import environment_world_size
    from train.describe import describe_run, description_table

    check_json_path(options.json)
    with only_results_on_stdout() as stdout:
        description = describe_run(
            options.config,
            options.overrides,
            options.processes or environment_world_size(),
            with_data=not options.without_data,
        )
        show(description, description_table(description), options.json, stdout)


def _bench_data_arguments(parser: Parser) -> None:
    add = parser.add_argument
    add("--source", default="python-stdlib", help="of the text, as for prepare")
    add("--tokenizer", default="train:8192", help="train:VOCAB_SIZE or a tokenizer.json")
    add("--megabytes", type=float, default=8.0, metavar="N", help="of text; default 8")
    add("--repeats", type=positive, default=5, metavar="N", help="timed runs of each; default 5")
    add("--sequence-length", type=positive, default=1024, metavar="T", help="default 1024")
    add("--micro-batch-size", type=positive, default=8, metavar="B", help="default 8")
    add("--num-workers", type=int, default=0, metavar="N", help="loader processes; default 0")
    add("--consumption", type=float, metavar="TOKENS", help="a second, that training takes")
    add("--json", metavar="FILE", help="write the result there; - for standard output, alone")


def _bench_data(options: Namespace) -> None:
    from launch.bench.data import bench_data, data_table

    arguments = dict(vars(options))
    json_path = arguments.pop("json")
    with only_results_on_stdout() as stdout:
        result = bench_data(**arguments)
        show(result, data_table(result), json_path, stdout)


def _bench_step_arguments(parser: Parser) -> None:
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--precision", choices=("fp32", "bf16"), help="default: both")
    add("--batch-size", type=positive, metavar="B", help="samples; default 2, on a GPU 16")
    add("--sequence-length", type=positive, metavar="T", help="default 256, on a GPU 1024")
    add("--repeats", type=positive, metavar="N", help="timed steps; default 5, on a GPU 20")
    add("--compile", action="store_true", help="the blocks of both through torch.compile")
    add("--json", metavar="FILE", help="write the result there; - for standard output, alone")


def _bench_step(options: Namespace) -> None:
    from launch.machine import prepare_environment

    prepare_environment()
    from launch.bench.step import bench_step, step_table

    check_json_path(options.json)
    with only_results_on_stdout() as stdout:
        result = bench_step(
            device=options.device,
            precisions=(options.precision,) if options.precision else ("fp32", "bf16"),
            batch_size=options.batch_size,
            sequence_length=options.sequence_length,
            repeats=options.repeats,
            compiled=options.compile,
        )
        show(result, step_table(result), options.json, stdout)


COMMANDS: dict[str, Command] = {
    "prepare": Command(
        summary="Turns text into tokens: .bin and .idx files, a tokenizer and manifest.json.",
        example="polyad prepare --source python-stdlib --tokenizer train:8192 --output runs/stdlib",
        arguments=_prepare_arguments,
        handler=_prepare,
    ),
    "train": Command(
        summary="Trains in this process, or in those of torchrun; goes on where the run stands.",
        example="polyad train configs/quickstart/gpt2.yaml data.path=runs/stdlib train.steps=20\n"
        "torchrun --nproc-per-node 2 -m launch train configs/quickstart/gpt2.yaml "
        "data.path=runs/stdlib",
        arguments=_config_arguments,
        handler=_train,
    ),
    "launch": Command(
        summary="Checks a run, then trains it in P processes of this machine, or of N hosts.",
        example="polyad launch configs/quickstart/gpt2.yaml --processes-per-node 2 "
        "data.path=runs/stdlib\n"
        "polyad launch configs/gpt2/124m.yaml --nodes 2 --processes-per-node 4 --via torchrun "
        "--rdzv-endpoint node-1:29400\n"
        "polyad launch configs/gpt2/124m.yaml --nodes 2 --processes-per-node 4 --via slurm "
        "--gpus-per-node 4 --time 24:00:00 --dry-run",
        arguments=_launch_arguments,
        handler=_launch,
    ),
    "evaluate": Command(
        summary="Scores prepared text: loss, perplexity per token and word, bits per byte.",
        example="polyad evaluate runs/quickstart/run --split test evaluation.stride=128\n"
        "polyad evaluate runs/quickstart/run/checkpoints/step-00000100 --json - > result.json",
        arguments=_evaluate_arguments,
        handler=_evaluate,
    ),
    "validate": Command(
        summary="Checks a run without starting it, and says what it will do and cost.",
        example="polyad validate configs/gpt2/124m.yaml --processes 8 --without-data "
        "model.vocab_size=50257",
        arguments=_validate_arguments,
        handler=_validate,
    ),
    "bench data": Command(
        summary="Times encoding beside the tokenizers library, and the loader.",
        example="polyad bench data --consumption 400 --json data.json",
        arguments=_bench_data_arguments,
        handler=_bench_data,
    ),
    "bench step": Command(
        summary="Times a training step of GPT-2 124M beside transformers' GPT-2.",
        example="polyad bench step --precision bf16 --json step.json\n"
        "polyad bench step --device cuda --precision bf16 --batch-size 32 --compile",
        arguments=_bench_step_arguments,
        handler=_bench_step,
    ),
    "generate": Command(
        summary="Continues a text with a checkpoint.",
        example="polyad generate runs/quickstart/run --prompt 'def ' --temperature 0.8 "
        "--top-p 0.95 --seed 1",
        arguments=_generate_arguments,
        handler=_generate,
    ),
    "convert": Command(
        summary="Weights to a Hugging Face folder, or from one to a checkpoint.",
        example="polyad convert runs/quickstart/run exported --to huggingface\n"
        "polyad convert gpt2 runs/gpt2-start --to polyad",
        arguments=_convert_arguments,
        handler=_convert,
    ),
}
