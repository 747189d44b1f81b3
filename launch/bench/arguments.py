"""The arguments of the commands of `polyad bench`."""

from pathlib import Path

from polyad.launch.arguments.runs import override_arguments
from polyad.launch.parser import Parser, non_negative, positive

TEXT = {"source": "python-stdlib", "tokenizer": "train:8192", "megabytes": 8.0}
"""What `polyad bench data` reads unless it is told."""


def bench_data_arguments(parser: Parser) -> None:
    """Those of `polyad bench data`."""
    add = parser.add_argument
    add(
        "--source",
        default=TEXT["source"],
        help="where the text is from, as for polyad prepare",
    )
    add("--tokenizer", default=TEXT["tokenizer"], help="train:VOCAB_SIZE or a tokenizer.json")
    add(
        "--megabytes",
        type=float,
        default=TEXT["megabytes"],
        metavar="N",
        help="size of the text; default 8",
    )
    add("--repeats", type=positive, default=5, metavar="N", help="timed runs of each; default 5")
    add(
        "--config",
        type=Path,
        metavar="CONFIG",
        help="whose batches are loaded, and whose model trains; default: 8 x 1,024 tokens, and "
        "GPT-2 124M on 2 x 256",
    )
    add(
        "--consumption",
        type=float,
        metavar="TOKENS",
        help="tokens a second that training takes; default: measured",
    )
    add(
        "--images",
        nargs="?",
        const="",
        metavar="DIR",
        help="the loader of images in place of text: a folder of classes; without DIR images that "
        "are made",
    )
    add("--randaugment", action="store_true", help="for --images: with torchvision's RandAugment")
    add("--json", metavar="FILE", help="write the result to FILE as JSON; - is standard output")
    override_arguments(parser)


def bench_checkpoint_arguments(parser: Parser) -> None:
    """Those of `polyad bench checkpoint`."""
    add = parser.add_argument
    add(
        "--folder",
        type=Path,
        default=Path(),
        metavar="DIR",
        help="a folder on the disk to measure; default: this one",
    )
    add("--repeats", type=positive, default=5, metavar="N", help="runs of everything; default 5")
    add(
        "--steps",
        type=positive,
        default=3,
        metavar="N",
        help="training steps in each run; default 3",
    )
    add("--batch-size", type=positive, default=1, metavar="B", help="samples of a step; default 1")
    add(
        "--sequence-length",
        type=positive,
        default=128,
        metavar="T",
        help="tokens of a sample; default 128",
    )
    add("--json", metavar="FILE", help="write the result to FILE as JSON; - is standard output")


def bench_step_arguments(parser: Parser) -> None:
    """Those of `polyad bench step`."""
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--precision", choices=("fp32", "bf16"), help="default: both")
    add(
        "--batch-size", type=positive, metavar="B", help="samples of a step; default 2, on a GPU 16"
    )
    add(
        "--sequence-length",
        type=positive,
        metavar="T",
        help="tokens of a sample; default 256, on a GPU 1024",
    )
    add("--repeats", type=positive, metavar="N", help="timed steps; default 15, on a GPU 20")
    add("--compile", action="store_true", help="compile the blocks of both with torch.compile")
    add(
        "--feed-forward",
        choices=("mumoe-cp", "mumoe-tr", "smoe-16", "smoe-64"),
        help="256 factorized experts, or sparse ones of the same active width, beside our dense "
        "step; default: dense beside transformers'",
    )
    add(
        "--profile",
        action="store_true",
        help="say where a step's time goes: products, attention, loss, optimizer, exchange, gaps",
    )
    add("--json", metavar="FILE", help="write the result to FILE as JSON; - is standard output")


def bench_plan_arguments(parser: Parser) -> None:
    """Those of `polyad bench plan`."""
    parser.add_argument(
        "--json", metavar="FILE", help="write the result to FILE as JSON; - is standard output"
    )


def bench_flips_arguments(parser: Parser) -> None:
    """Those of `polyad bench flips`."""
    parser.add_argument(
        "--steps", type=positive, default=150, help="training steps before the flips; default 150"
    )
    parser.add_argument(
        "--json", metavar="FILE", help="write the result to FILE as JSON; - is standard output"
    )


def bench_layer_arguments(parser: Parser) -> None:
    """Those of `polyad bench layer`."""
    add = parser.add_argument
    add(
        "--kind",
        choices=("smoe", "mumoe", "emoe"),
        default="smoe",
        help="kind of layer; default smoe",
    )
    add(
        "--tokens",
        type=positive,
        metavar="N",
        help="tokens of a forward pass; default 4096; mumoe and emoe 1024",
    )
    add(
        "--experts",
        type=positive,
        nargs="+",
        metavar="E",
        help="number of experts; default 16; emoe 64; mumoe takes several, default 64 256 2048",
    )
    add(
        "--top-k",
        type=positive,
        metavar="K",
        help="smoe and emoe: experts of a token; default 2; emoe 16",
    )
    add(
        "--width",
        type=positive,
        metavar="D",
        help="width of a token; default 256; mumoe and emoe 768",
    )
    add(
        "--hidden",
        type=positive,
        metavar="F",
        help="inner width of one expert; default 1024; of mumoe's and emoe's experts together, and "
        "of their dense MLP, 3072",
    )
    add("--precision", choices=("fp32", "bf16"), help="default: both")
    add(
        "--load",
        choices=("uniform", "skewed"),
        help="smoe: skewed sends half of the tokens to one expert; default: both",
    )
    add(
        "--expert-parallel",
        type=positive,
        metavar="P",
        help="smoe: processes of this machine that share the experts, each with N tokens of its "
        "own and --threads, default 1; default: one process",
    )
    add("--repeats", type=positive, metavar="N", help="timed runs of each; default 7")
    add(
        "--threads",
        type=positive,
        metavar="N",
        help="threads of each variant; default: PyTorch's own",
    )
    add("--device", choices=("cpu", "cuda"), help="default cpu")
    add(
        "--compile",
        action="store_true",
        default=None,
        help="mumoe: compile every variant with torch.compile",
    )
    add("--json", metavar="FILE", help="write the result to FILE as JSON; - is standard output")


def bench_routing_arguments(parser: Parser) -> None:
    """Those of `polyad bench routing`."""
    add = parser.add_argument
    add(
        "--tokens",
        type=positive,
        nargs="+",
        metavar="T",
        help="tokens of the block's one sequence, one length after the other; "
        "default 512 2048 8192",
    )
    add(
        "--model-tokens",
        type=positive,
        nargs="+",
        metavar="T",
        help="tokens of the whole model's one sequence; default 512",
    )
    add(
        "--layers",
        type=non_negative,
        metavar="L",
        help="blocks of the whole model; 0: no whole model; default 12, which takes 8 GiB in fp32",
    )
    add(
        "--vocab-size",
        type=positive,
        metavar="V",
        help="vocabulary of the whole model; default 50257",
    )
    add("--width", type=positive, metavar="D", help="width of a token; default 768")
    add("--heads", type=positive, metavar="A", help="heads of attention; default 12")
    add("--experts", type=positive, metavar="E", help="number of experts; default 16")
    add("--top-k", type=positive, metavar="K", help="experts of a token; default 2")
    add("--hidden", type=positive, metavar="F", help="inner width of one expert; default 4 D")
    add("--precision", choices=("fp32", "bf16"), help="default: both")
    add("--repeats", type=positive, metavar="N", help="timed runs of each; default 5")
    add(
        "--threads",
        type=positive,
        metavar="N",
        help="threads of each variant; default: PyTorch's own",
    )
    add("--device", choices=("cpu", "cuda"), help="default cpu")
    add("--compile", action="store_true", help="compile every block with torch.compile")
    add("--json", metavar="FILE", help="write the result to FILE as JSON; - is standard output")


def bench_scaling_arguments(parser: Parser) -> None:
    """Those of `polyad bench scaling`."""
    add = parser.add_argument
    add(
        "config",
        nargs="?",
        metavar="CONFIG",
        help="a YAML file; default: the quickstart's dense GPT-2, which then needs no data",
    )
    override_arguments(parser)
    add(
        "--processes",
        type=_number_or_key,
        nargs="+",
        action="append",
        metavar="P",
        help="numbers of processes of this machine; default 1 2 4",
    )
    add("--repeats", type=positive, default=7, metavar="N", help="turns of each; default 7")
    add(
        "--steps",
        type=positive,
        default=1,
        metavar="N",
        help="timed steps of a turn, beside one whose collectives are noted; default 1",
    )
    add(
        "--threads",
        type=positive,
        metavar="N",
        help="threads of each process; default: the cores divided by the processes",
    )
    add("--json", metavar="FILE", help="write the result to FILE as JSON; - is standard output")


def _number_or_key(text: str) -> int | str:
    """A key that stands behind the numbers is one of the configuration."""
    return text if "=" in text else positive(text)
