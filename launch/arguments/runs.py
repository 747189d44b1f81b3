"""The arguments of commands about runs, checkpoints, and the machines that they take."""

from pathlib import Path

from polyad.launch.parser import Parser, positive

PLANNED = {"imbalance": 1.0, "storage": 2.0, "failures": 50_000.0}
"""What `polyad plan` assumes unless it is told."""


def config_arguments(parser: Parser) -> None:
    """The configuration, and keys of it."""
    parser.add_argument(
        "config",
        type=Path,
        metavar="CONFIG",
        help="a YAML file, or the name of one that comes with Polyad: gpt2/124m",
    )
    override_arguments(parser)


def override_arguments(parser: Parser) -> None:
    """Keys of a configuration."""
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="a key of the file, for example train.steps=100",
    )


def launch_arguments(parser: Parser) -> None:
    """Those of `polyad launch`."""
    from polyad.launch.via import options

    config_arguments(parser)
    options.launch_arguments(parser)


def validate_arguments(parser: Parser) -> None:
    """Those of `polyad validate`."""
    config_arguments(parser)
    add = parser.add_argument
    add(
        "--processes",
        type=positive,
        metavar="N",
        help="how many will run it; default: WORLD_SIZE, or 1",
    )
    add(
        "--json", metavar="FILE", help="write the description to FILE as JSON; - is standard output"
    )
    add(
        "--without-data",
        action="store_true",
        help="for a machine without the data; set model.vocab_size",
    )


def schema_arguments(parser: Parser) -> None:
    """Those of `polyad schema`."""
    parser.add_argument(
        "kind",
        nargs="?",
        choices=("run", "study"),
        default="run",
        help="of a file for `polyad train`, or for `polyad study`",
    )


def doctor_arguments(parser: Parser) -> None:
    """Those of `polyad doctor`."""
    from polyad.launch.via import options

    parser.add_argument(
        "config", type=Path, nargs="?", metavar="CONFIG", help="a run's file, to look at its data"
    )
    override_arguments(parser)
    options.launch_arguments(parser)
    parser.add_argument(
        "--json", metavar="FILE", help="write the result to FILE as JSON; - is standard output"
    )


def verify_layout_arguments(parser: Parser) -> None:
    """Those of `polyad verify-layout`."""
    config_arguments(parser)
    add = parser.add_argument
    add(
        "--processes",
        type=positive,
        metavar="N",
        help="of this machine; default: those that torchrun has started",
    )
    add("--json", metavar="FILE", help="write the result to FILE as JSON; - is standard output")


def plan_arguments(parser: Parser) -> None:
    """Those of `polyad plan`."""
    config_arguments(parser)
    add = parser.add_argument
    add("--nodes", type=positive, default=1, metavar="N", help="hosts; default 1")
    add(
        "--processes-per-node",
        type=positive,
        default=8,
        metavar="P",
        help="processes on each, one for a GPU; default 8",
    )
    add(
        "--device",
        default="a100-80gb",
        metavar="NAME",
        help="a100-80gb, h100, h200 or b200, in nodes as their maker sells them; cpu-here times "
        "every operation on this machine; default a100-80gb",
    )
    add(
        "--imbalance",
        type=float,
        default=PLANNED["imbalance"],
        metavar="X",
        help="rows of experts that the busiest process gets, over the mean of all; default 1",
    )
    add(
        "--storage",
        type=float,
        default=PLANNED["storage"],
        metavar="GB",
        help="GB a second that a node writes to the folder of checkpoints; default 2",
    )
    add(
        "--failures",
        type=float,
        default=PLANNED["failures"],
        metavar="HOURS",
        help="hours between two failures of one GPU with its share of a node; default 50,000",
    )
    add("--search", action="store_true", help="look for the fastest layouts of as many GPUs, too")
    add(
        "--figure",
        type=Path,
        metavar="FILE",
        help="predict up to 1,024 GPUs, too, and draw that into FILE, as .svg",
    )
    add(
        "--check",
        type=positive,
        metavar="STEPS",
        help="with cpu-here: do so many steps as well, and say how far off the prediction is",
    )
    add("--json", metavar="FILE", help="write the result to FILE as JSON; - is standard output")


def checkpoint_arguments(parser: Parser) -> None:
    """Those of `polyad checkpoint list` and `verify`."""
    add = parser.add_argument
    add("folder", type=Path, metavar="FOLDER", help="a run, its checkpoints folder, or one of them")
    add("--json", metavar="FILE", help="write the result to FILE as JSON; - is standard output")


def checkpoint_delete_arguments(parser: Parser) -> None:
    """Those of `polyad checkpoint delete`."""
    add = parser.add_argument
    add("folders", type=Path, nargs="+", metavar="FOLDER", help="one checkpoint: .../step-NNNNNNNN")
    add(
        "--even-the-last-good",
        action="store_true",
        help="delete it although no good checkpoint of that run is left then",
    )
    add("--json", metavar="FILE", help="write the result to FILE as JSON; - is standard output")
