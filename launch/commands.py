"""The commands of `polyad`: for each its summary, arguments and handler."""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass

from polyad.launch.arguments import data as data_arguments
from polyad.launch.arguments import results as result_arguments
from polyad.launch.arguments import runs as run_arguments
from polyad.launch.handlers import data, results, runs
from polyad.launch.parser import Parser


@dataclass(frozen=True, kw_only=True)
class Command:
    """One command of `polyad`."""

    summary: str
    example: str
    arguments: Callable[[Parser], None]
    """Declares its arguments."""
    handler: Callable[[Namespace], int | None]
    """Runs the command; returns its exit status, None for success."""


COMMANDS: dict[str, Command] = {
    "prepare": Command(
        summary="Turns text into tokens: .bin and .idx files, a tokenizer and manifest.json.",
        example="polyad prepare --source python-stdlib --tokenizer train:8192 "
        "--output runs/stdlib\n"
        "polyad prepare --source configs --format text --tokenizer characters --output runs/parts "
        "--parts 4 --processes 2\n"
        "polyad prepare --source configs --format text --tokenizer words --output runs/array "
        "--parts 100 --via slurm --time 1:00:00 --dry-run",
        arguments=data_arguments.prepare_arguments,
        handler=data.prepare,
    ),
    "train": Command(
        summary="Trains in this process, or as a process of torchrun; run it again to continue.",
        example="polyad train configs/quickstart/gpt2.yaml data.path=runs/stdlib train.steps=20\n"
        "torchrun --nproc-per-node 2 -m polyad.launch train configs/quickstart/gpt2.yaml "
        "data.path=runs/stdlib",
        arguments=run_arguments.config_arguments,
        handler=runs.train,
    ),
    "launch": Command(
        summary="Checks a run, then trains it in P processes of this machine, or of N hosts.",
        example="polyad launch configs/quickstart/gpt2-smoe.yaml --processes-per-node 2 "
        "data.path=runs/stdlib\n"
        "polyad launch configs/gpt2/124m.yaml --nodes 2 --processes-per-node 4 --via torchrun "
        "--rdzv-endpoint node-1:29400 data.path=runs/stdlib\n"
        "polyad launch configs/gpt2/124m.yaml --nodes 2 --processes-per-node 4 --via slurm "
        "--gpus-per-node 4 --time 24:00:00 data.path=runs/stdlib --dry-run",
        arguments=run_arguments.launch_arguments,
        handler=runs.launch,
    ),
    "evaluate": Command(
        summary="Scores a checkpoint on held-out data, or compares the routing of two checkpoints.",
        example="polyad evaluate runs/quickstart/run --split test evaluation.stride=128\n"
        "polyad evaluate runs/quickstart/run/checkpoints/step-00000100 --json - > result.json\n"
        "polyad evaluate runs/quickstart/run --attack word-swap --rate 0.1 --seed 1\n"
        "polyad evaluate runs/quickstart/run --compare "
        "runs/quickstart/run/checkpoints/step-00000100\n"
        "polyad evaluate runs/quickstart/run --knockout --layers 0,3",
        arguments=result_arguments.evaluate_arguments,
        handler=results.evaluate,
    ),
    "validate": Command(
        summary="Checks a run without starting it, and prints what it will do and cost.",
        example="polyad validate configs/gpt2/124m.yaml --processes 8 --without-data "
        "model.vocab_size=50257",
        arguments=run_arguments.validate_arguments,
        handler=runs.validate,
    ),
    "schema": Command(
        summary="Prints the JSON Schema of a configuration, for editors.",
        example="polyad schema > polyad.schema.json\npolyad schema study > study.schema.json",
        arguments=run_arguments.schema_arguments,
        handler=runs.schema,
    ),
    "doctor": Command(
        summary="Checks these hosts for what would break a run or slow it down.",
        example="polyad doctor --processes-per-node 2\n"
        "polyad doctor configs/quickstart/gpt2.yaml --processes-per-node 2 data.path=runs/stdlib",
        arguments=run_arguments.doctor_arguments,
        handler=runs.doctor,
    ),
    "verify-layout": Command(
        summary="Compares a layout with one process: losses, every gradient, and a checkpoint.",
        example="polyad verify-layout configs/gpt2/124m-smoe-16.yaml --processes 2 "
        "parallel.expert_parallel_size=2",
        arguments=run_arguments.verify_layout_arguments,
        handler=runs.verify_layout,
    ),
    "plan": Command(
        summary="Predicts memory, communication and time of a run on GPUs, and the best layout.",
        example="polyad plan configs/gpt2/124m.yaml --processes-per-node 8 --device h100 "
        "model.vocab_size=50257\n"
        "polyad plan configs/gpt2/124m-smoe-64.yaml --nodes 2 --search model.vocab_size=50257 "
        "model.num_layers=4\n"
        "polyad plan configs/quickstart/gpt2-smoe.yaml --device cpu-here --processes-per-node 2 "
        "--check 3 data.path=runs/stdlib",
        arguments=run_arguments.plan_arguments,
        handler=runs.plan,
    ),
    "report": Command(
        summary="Draws a run as a page: curves, expert load, the tokens each expert gets most of.",
        example="polyad report runs/quickstart/run\n"
        "polyad report runs/quickstart/run --layers 0,3 --experts 2,5 --top 12 --output page.html",
        arguments=result_arguments.report_arguments,
        handler=results.report,
    ),
    "study": Command(
        summary="Trains variants of a run over several seeds, and compares them in pairs.",
        example="polyad study configs/studies/mumoe.yaml --dry-run\n"
        "polyad study configs/studies/mumoe.yaml --markdown",
        arguments=result_arguments.study_arguments,
        handler=results.study,
    ),
    "checkpoint list": Command(
        summary="Lists the checkpoints of a run: step, size, and whether one is damaged.",
        example="polyad checkpoint list runs/quickstart/run",
        arguments=run_arguments.checkpoint_arguments,
        handler=runs.checkpoint_list,
    ),
    "checkpoint verify": Command(
        summary="Reads every byte of checkpoints; exit status 2 if one is damaged.",
        example="polyad checkpoint verify runs/quickstart/run --json -\n"
        "polyad checkpoint verify runs/quickstart/run/checkpoints/step-00000100",
        arguments=run_arguments.checkpoint_arguments,
        handler=runs.checkpoint_verify,
    ),
    "checkpoint delete": Command(
        summary="Deletes checkpoints, but not the last good one of a run.",
        example="polyad checkpoint delete runs/quickstart/run/checkpoints/step-00000100",
        arguments=run_arguments.checkpoint_delete_arguments,
        handler=runs.checkpoint_delete,
    ),
    "data verify": Command(
        summary="Reads every byte of prepared data; exit status 2 if a file is damaged.",
        example="polyad data verify runs/stdlib\npolyad data verify runs/stdlib --json -",
        arguments=data_arguments.data_arguments,
        handler=data.data_verify,
    ),
    "generate": Command(
        summary="Continues a text with a checkpoint.",
        example="polyad generate runs/quickstart/run --prompt 'def ' --temperature 0.8 "
        "--top-k 50 --top-p 0.95 --seed 1\n"
        "polyad generate runs/quickstart/run --prompt 'def ' --steer layer=3,expert=2,strength=8",
        arguments=result_arguments.generate_arguments,
        handler=results.generate,
    ),
    "convert": Command(
        summary="Converts weights to a Hugging Face folder, plain safetensors, or a checkpoint.",
        example="polyad convert runs/quickstart/run plain --to safetensors\n"
        "polyad convert runs/quickstart/dense exported --to huggingface\n"
        "polyad convert exported runs/again --to polyad\n"
        "polyad convert exported runs/upcycled --to polyad --upcycle num_experts=8,top_k=2\n"
        "polyad convert exported runs/split --to polyad --split num_experts=16,top_k=8,blocks=[3]\n"
        "polyad convert exported runs/factorized --to polyad --factorize num_experts=[64]\n"
        "polyad convert runs/split runs/merged --to polyad --merge",
        arguments=result_arguments.convert_arguments,
        handler=results.convert,
    ),
}
