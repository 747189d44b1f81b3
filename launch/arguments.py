"""What the commands of `polyad` take from the command line."""

from pathlib import Path

from launch.parser import Parser, names, non_negative, positive, share


def prepare_arguments(parser: Parser) -> None:
    """Those of `polyad prepare`."""
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
        help="train:VOCAB_SIZE, words, words:VOCAB_SIZE or characters (of the train split), a "
        "tokenizer.json, a SentencePiece .model, a folder of one or of GPT-2's files, or a name of "
        "the Hugging Face hub, as gpt2",
    )
    add("--output", required=True, metavar="DIR", help="the folder to make")
    add("--validation-fraction", type=float, default=0.05, metavar="F", help="of all documents; "
        "of few text files by position, the last part")  # fmt: skip
    add("--test-fraction", type=float, default=0.05, metavar="F", help="the same")
    add("--validation-source", metavar="SOURCE", help="text that is the validation split instead")
    add("--test-source", metavar="SOURCE", help="text that is the test split instead")
    add("--text-key", default="text", metavar="KEY", help="of the text in .jsonl and .parquet")
    add(
        "--documents", choices=("files", "lines"), default="files", help="what a document of a "
        "text file is: all of it, or a line; default files"
    )  # fmt: skip
    add(
        "--format", dest="file_format", choices=("text",), help="read files as text, whatever "
        "their names end in"
    )  # fmt: skip
    add("--streaming", action="store_true", help="read a Hugging Face data set without a copy")
    add("--end-of-text", metavar="TOKEN", help="ends each document; default: a well-known one")
    add("--overwrite", action="store_true", help="replace prepared data that is in DIR")


def data_arguments(parser: Parser) -> None:
    """Those of `polyad data verify`."""
    add = parser.add_argument
    add("folders", nargs="+", metavar="DIR", help="made by polyad prepare; several of a mixture")
    add("--json", metavar="FILE", help="write the result there; - for standard output, alone")


def config_arguments(parser: Parser) -> None:
    """The configuration, and keys of it."""
    parser.add_argument("config", type=Path, metavar="CONFIG", help="a YAML file")
    override_arguments(parser)


def override_arguments(parser: Parser) -> None:
    """Keys of a configuration."""
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="a key of the file, as train.steps=100"
    )


def launch_arguments(parser: Parser) -> None:
    """Those of `polyad launch`."""
    from launch import options

    config_arguments(parser)
    options.launch_arguments(parser)


def evaluate_arguments(parser: Parser) -> None:
    """Those of `polyad evaluate`."""
    add = parser.add_argument
    add("path", type=Path, metavar="CHECKPOINT_OR_RUN", help="a run means its newest checkpoint")
    add("--data", metavar="DIR", help="prepared data; default: what the run was trained on")
    add("--split", choices=("validation", "test", "train"), default="validation")
    add("--json", metavar="FILE", help="write the result there; - for standard output, alone")
    add(
        "--compare", type=Path, metavar="CHECKPOINT_OR_RUN", help="compare routing with this one "
        "instead: per layer the share of tokens that get other experts, and the entropy ratio"
    )  # fmt: skip
    add(
        "--probe-tokens", type=positive, metavar="N", help="of --compare: about how many tokens, "
        "evenly over the split; default 65536"
    )  # fmt: skip
    add("--attack", choices=("word-swap",), help="replace words by AAA before the text is read")
    add("--rate", type=share, metavar="R", help="of --attack: share of the words, from 0 to 1")
    add("--seed", type=non_negative, metavar="S", help="of --attack: which words; default 0")
    add(
        "--leak", type=positive, metavar="N", help="of a graph without a mask: score about N "
        "tokens again from what is before each alone, and all with the mask"
    )  # fmt: skip
    override_arguments(parser)


def report_arguments(parser: Parser) -> None:
    """Those of `polyad report`."""
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="the folder of a run, finished or not")
    add("--output", type=Path, metavar="FILE", help="the page; default: report.html in the run")
    add(
        "--checkpoint", type=non_negative, metavar="STEP", help="weights to read text with; "
        "default: the newest"
    )  # fmt: skip
    add("--data", metavar="DIR", help="prepared data; default: what the run was trained on")
    add("--split", choices=("validation", "test", "train"), default="validation")
    add(
        "--layers", type=names, default=[], metavar="N,N,...", help="blocks whose experts are "
        "shown; default: the first, the middle and the last that have some"
    )  # fmt: skip
    add(
        "--experts", type=names, default=[], metavar="N,N,...", help="experts shown of each; with "
        "levels LEVEL.N; default: six, picked by what they do"
    )  # fmt: skip
    add("--top", type=positive, default=8, metavar="K", help="tokens shown of each; default 8")
    add(
        "--tokens", type=non_negative, metavar="N", help="about how many are read, evenly over the "
        "split; 0 reads none; default 250000"
    )  # fmt: skip
    add("--json", metavar="FILE", help="write the result there; - for standard output, alone")


def study_arguments(parser: Parser) -> None:
    """Those of `polyad study`."""
    add = parser.add_argument
    add("study", type=Path, metavar="STUDY", help="a YAML file; the same again goes on")
    add("--dry-run", action="store_true", help="what it will train, and what stands; starts none")
    add("--markdown", action="store_true", help="the tables for a page instead of a terminal")
    add("--figure", type=Path, metavar="FILE", help="draw the comparison there, as .svg")
    add("--json", metavar="FILE", help="write the result there; - for standard output, alone")


def convert_arguments(parser: Parser) -> None:
    """Those of `polyad convert`."""
    add = parser.add_argument
    add("source", type=Path, metavar="SOURCE", help="a checkpoint, a run, or a folder of weights")
    add("destination", type=Path, metavar="DESTINATION", help="the folder to make")
    add(
        "--to",
        choices=("huggingface", "polyad", "safetensors"),
        required=True,
        help="a Hugging Face folder (dense models), a checkpoint, or any model's weights under "
        "Polyad's names",
    )
    add(
        "--upcycle",
        metavar="num_experts=E,...",
        help="make a dense model a sparse mixture whose experts are copies of its feed-forwards; "
        "takes keys of model.feed_forward, as placement=[1,3], noise=X (the standard deviation of "
        "what is added to each expert's weights, as a share of theirs) and seed=N",
    )
    add("--json", metavar="FILE", help="write the result there; - for standard output, alone")


def generate_arguments(parser: Parser) -> None:
    """Those of `polyad generate`."""
    add = parser.add_argument
    add("path", type=Path, metavar="CHECKPOINT", help="a checkpoint, a run, or a folder of weights")
    add("--prompt", required=True, metavar="TEXT", help="what is continued")
    add("--max-tokens", type=positive, default=100, metavar="N", help="at most; default 100")
    add("--temperature", type=float, default=1.0, metavar="T", help="0: always the likeliest token")
    add("--top-k", type=positive, metavar="K", help="among the K likeliest tokens; default: all")
    add(
        "--top-p", type=float, default=1.0, metavar="P", help="among the fewest tokens with this "
        "probability in all, of what --top-k leaves; default 1"
    )  # fmt: skip
    add("--seed", type=int, default=0, metavar="N", help="of the choice; default 0")
    add(
        "--tokenizer",
        metavar="PATH",
        help="a file or folder, as of prepare; default: the checkpoint's",
    )
    add("--precision", choices=("fp32", "bf16"), default="fp32", help="default fp32")
    add("--no-cache", action="store_true", help="run the whole window for every token")
    add(
        "--steer",
        action="append",
        default=[],
        metavar="layer=N,expert=N,strength=X",
        help="add X times an expert's gate column to what enters a block, also level=N of a "
        "hierarchy; may be given several times",
    )
    add("--json", metavar="FILE", help="write the result there; - for standard output, alone")


def validate_arguments(parser: Parser) -> None:
    """Those of `polyad validate`."""
    config_arguments(parser)
    add = parser.add_argument
    add(
        "--processes", type=positive, metavar="N", help="that will run it; default: WORLD_SIZE or 1"
    )
    add("--json", metavar="FILE", help="write the description there; - for standard output, alone")
    add("--without-data", action="store_true", help="where the data is not; set model.vocab_size")


def checkpoint_arguments(parser: Parser) -> None:
    """Those of `polyad checkpoint list` and `verify`."""
    add = parser.add_argument
    add("folder", type=Path, metavar="FOLDER", help="a run, its checkpoints folder, or one of them")
    add("--json", metavar="FILE", help="write the result there; - for standard output, alone")


def checkpoint_delete_arguments(parser: Parser) -> None:
    """Those of `polyad checkpoint delete`."""
    add = parser.add_argument
    add("folders", type=Path, nargs="+", metavar="FOLDER", help="one checkpoint: .../step-NNNNNNNN")
    add(
        "--even-the-last-good",
        action="store_true",
        help="though no good one is left of that run then",
    )
    add("--json", metavar="FILE", help="write the result there; - for standard output, alone")
