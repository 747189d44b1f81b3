"""The arguments of the commands of `polyad`."""

from pathlib import Path

from launch.parser import Parser, names, non_negative, positive, share
from launch.preparation import parts_arguments


def prepare_arguments(parser: Parser) -> None:
    """Those of `polyad prepare`."""
    add = parser.add_argument
    add(
        "--images",
        metavar="SOURCE",
        help="images in place of text: digits, hub:OWNER/NAME, or a folder of classes, a .zip of "
        "one, .tar files, .parquet files, a folder of `datasets`, or the files of MNIST or CIFAR",
    )
    add(
        "--held-out",
        type=float,
        metavar="F",
        help="for --images: share of the training images that become the validation split; "
        "default: 0.01 where the data set has no validation split beside a test",
    )
    add(
        "--domains",
        action="store_true",
        help="for --images: SOURCE is a folder, or a .zip of one, with a folder for each domain, "
        "and in these one for each class; the held-out share is taken from each domain",
    )
    add(
        "--source",
        help="python-stdlib, openwebtext, wikitext-103, hub:OWNER/NAME[:CONFIG], "
        "hub:FOLDER[:CONFIG] (a local copy), arrow:FOLDER (save_to_disk), or a .txt, .jsonl or "
        ".parquet file or folder",
    )
    add(
        "--tokenizer",
        help="train:VOCAB_SIZE, words, words:VOCAB_SIZE, characters or wordpiece:VOCAB_SIZE (of "
        "the train split), a tokenizer.json, a SentencePiece .model, BERT's vocab.txt, a folder of "
        "one or of GPT-2's files, or a name of the Hugging Face hub, such as gpt2",
    )
    add("--output", required=True, metavar="DIR", help="the folder to make")
    add(
        "--validation-fraction",
        type=float,
        default=0.05,
        metavar="F",
        help="share of all documents; of few text files a part of the text; default 0.05",
    )
    add(
        "--test-fraction",
        type=float,
        default=0.05,
        metavar="F",
        help="share for the test split, taken in the same way; default 0.05",
    )
    add(
        "--validation-source",
        metavar="SOURCE",
        help="text that is the validation split, in place of a share",
    )
    add("--test-source", metavar="SOURCE", help="text that is the test split, in place of a share")
    add(
        "--text-key",
        default="text",
        metavar="KEY",
        help="key or column of the text in .jsonl and .parquet; default text",
    )
    add(
        "--documents",
        choices=("files", "lines"),
        default="files",
        help="what one document of a text file is: the file, or a line of it; default files",
    )
    add(
        "--format",
        dest="file_format",
        choices=("text",),
        help="read files as text, whatever their names end in",
    )
    add("--streaming", action="store_true", help="read a Hugging Face data set without a copy")
    add(
        "--end-of-text",
        metavar="TOKEN",
        help="token that ends each document; default: the tokenizer's, such as <|endoftext|>",
    )
    add("--overwrite", action="store_true", help="replace prepared data that is in DIR")
    parts_arguments(parser)


def data_arguments(parser: Parser) -> None:
    """Those of `polyad data verify`."""
    add = parser.add_argument
    add(
        "folders",
        nargs="+",
        metavar="DIR",
        help="a folder that polyad prepare made; a mixture has several",
    )
    add("--json", metavar="FILE", help="write the result to FILE as JSON; - is standard output")


def config_arguments(parser: Parser) -> None:
    """The configuration, and keys of it."""
    parser.add_argument("config", type=Path, metavar="CONFIG", help="a YAML file")
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
    from launch.via import options

    config_arguments(parser)
    options.launch_arguments(parser)


def evaluate_arguments(parser: Parser) -> None:
    """Those of `polyad evaluate`."""
    add = parser.add_argument
    add("path", type=Path, metavar="CHECKPOINT_OR_RUN", help="a run means its newest checkpoint")
    add("--data", metavar="DIR", help="prepared data; default: what the run was trained on")
    add(
        "--best",
        action="store_true",
        help="of a run with checkpoint.keep_best: the checkpoint of its best validation in place "
        "of the newest",
    )
    add("--split", choices=("validation", "test", "train"), default="validation")
    add("--json", metavar="FILE", help="write the result to FILE as JSON; - is standard output")
    add(
        "--compare",
        type=Path,
        metavar="CHECKPOINT_OR_RUN",
        help="compare routing with this one "
        "in place of scoring: per layer the share of tokens that get other experts, and the "
        "entropy ratio",
    )
    add(
        "--probe-tokens",
        type=positive,
        metavar="N",
        help="for --compare: about how many tokens or images are read, evenly; default 65536",
    )
    add(
        "--attack",
        choices=("word-swap", "gaussian-noise"),
        help="replace words of a text by AAA, or add noise to images, before they are read",
    )
    add(
        "--rate",
        type=share,
        metavar="R",
        help="for --attack: share of the words, or standard deviation of the noise on pixels from "
        "0 to 1; from 0 to 1",
    )
    add(
        "--seed",
        type=non_negative,
        metavar="S",
        help="for --attack: which words are replaced, or which noise; default 0",
    )
    add(
        "--leak",
        type=positive,
        metavar="N",
        help="for a graph of tokens without a mask: score "
        "about N tokens again from only what stands before each, and all tokens with the mask",
    )
    add(
        "--robustness",
        nargs=2,
        metavar=("SET", "PATH"),
        help="of a model of ImageNet: score a published set of other images in place of the split: "
        "c, a, r, o, v2 or sketch and its folder, or real and its file real.json",
    )
    add(
        "--specialization",
        action="store_true",
        help="how experts divide the work: entropies of the gates, and what experts tell about "
        "classes, of text about classes of tokens; of images also for how many classes each expert "
        "matters, by leaving it out",
    )
    add(
        "--rewrite",
        metavar="class=C,of=A+B,by=N",
        help="of a model with a muMoE head: move the output of a class by the experts that "
        "training images of a subpopulation use, as of=Young:0+Male:0; accuracy and fairness "
        "before and after; by: the number of experts, if it is missing",
    )
    _weights_argument(parser)
    _base_argument(parser)
    override_arguments(parser)


def report_arguments(parser: Parser) -> None:
    """Those of `polyad report`."""
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="the folder of a run, finished or not")
    add("--output", type=Path, metavar="FILE", help="the page; default: report.html in the run")
    add(
        "--checkpoint",
        type=non_negative,
        metavar="STEP",
        help="weights to read the data with; default: the best of a run with checkpoint.keep_best, "
        "else the newest",
    )
    add(
        "--best",
        action="store_true",
        help="only the checkpoint of the best validation will do, of a run with "
        "checkpoint.keep_best",
    )
    add("--data", metavar="DIR", help="prepared data; default: what the run was trained on")
    add("--split", choices=("validation", "test", "train"), default="validation")
    add(
        "--layers",
        type=names,
        default=[],
        metavar="N,N,...",
        help="blocks whose experts are "
        "shown; default: the first, the middle and the last block that has experts",
    )
    add(
        "--experts",
        type=names,
        default=[],
        metavar="N,N,...",
        help="experts shown of each block; with "
        "levels LEVEL.N; default: six, by how often they have a token and by load",
    )
    add(
        "--top",
        type=positive,
        default=8,
        metavar="K",
        help="tokens shown of each expert, and samples with the largest loss; default 8",
    )
    add(
        "--tokens",
        type=non_negative,
        metavar="N",
        help="about how many tokens are read, evenly over the split; 0 reads none; default 250000, "
        "of labelled sequences all",
    )
    add("--json", metavar="FILE", help="write the result to FILE as JSON; - is standard output")


def study_arguments(parser: Parser) -> None:
    """Those of `polyad study`."""
    add = parser.add_argument
    add(
        "study",
        type=Path,
        metavar="STUDY",
        help="a YAML file; the same command again continues the study",
    )
    add(
        "--dry-run",
        action="store_true",
        help="print what it will train and what is finished; start nothing",
    )
    add("--markdown", action="store_true", help="print the tables as Markdown")
    add("--figure", type=Path, metavar="FILE", help="draw the comparison into FILE, as .svg")
    add("--json", metavar="FILE", help="write the result to FILE as JSON; - is standard output")


def _weights_argument(parser: Parser) -> None:
    parser.add_argument(
        "--weights",
        choices=("trained", "ema"),
        default="trained",
        help="of a checkpoint: those that were trained, or their moving average, which a run with "
        "train.ema keeps; default trained",
    )


def _base_argument(parser: Parser) -> None:
    parser.add_argument(
        "--base",
        type=Path,
        metavar="PATH",
        help="of a checkpoint of adapters: where their base is; it has to have the same numbers; "
        "default: checkpoint.init_from of the checkpoint's configuration",
    )


def convert_arguments(parser: Parser) -> None:
    """Those of `polyad convert`."""
    add = parser.add_argument
    add("source", type=Path, metavar="SOURCE", help="a checkpoint, a run, or a folder of weights")
    add("destination", type=Path, metavar="DESTINATION", help="the folder to make")
    add(
        "--to",
        choices=("huggingface", "polyad", "safetensors", "peft"),
        required=True,
        help="a Hugging Face folder (dense models), a checkpoint, any model's weights under "
        "Polyad's names, or the adapters of a run with adapt.lora for the library peft (dense "
        "GPT-2 and BERT)",
    )
    add(
        "--merge",
        action="store_true",
        help="make the adapters of a run with adapt.lora part of its weights, and feed-forwards "
        "that were split dense again",
    )
    change = parser.add_mutually_exclusive_group().add_argument
    change(
        "--upcycle",
        metavar="num_experts=E,...",
        help="make a dense model a sparse mixture whose experts are copies of its feed-forwards; "
        "takes keys of model.feed_forward, for example placement=[1,3], noise=X (the standard "
        "deviation of what is added to each expert's weights, as a share of theirs) and seed=N",
    )
    change(
        "--split",
        metavar="num_experts=E,top_k=K,...",
        help="make the units of a dense model's feed-forwards experts, in groups of equal size; "
        "takes keys of model.feed_forward of kind emoe, for example blocks=[8,10], "
        "by=clustering or random, seed=N, and section= of a Mixer",
    )
    change(
        "--factorize",
        metavar="num_experts=[N],...",
        help="make a dense model's feed-forwards the start of factorized experts, each with the "
        "nearest matrix that the rank allows; takes keys of model.feed_forward of kind mumoe, for "
        "example factorization=tr and rank=R (default: as many parameters as the dense layers), "
        "noise=X (the standard deviation of what sets experts apart, default 0.1), seed=N, and "
        "section= of a Mixer",
    )
    _weights_argument(parser)
    _base_argument(parser)
    add("--json", metavar="FILE", help="write the result to FILE as JSON; - is standard output")


def generate_arguments(parser: Parser) -> None:
    """Those of `polyad generate`."""
    add = parser.add_argument
    add("path", type=Path, metavar="CHECKPOINT", help="a checkpoint, a run, or a folder of weights")
    add("--prompt", required=True, metavar="TEXT", help="the text that is continued")
    _base_argument(parser)
    add(
        "--max-tokens",
        type=positive,
        default=100,
        metavar="N",
        help="the most new tokens; default 100",
    )
    add(
        "--temperature",
        type=float,
        default=1.0,
        metavar="T",
        help="divides the logits; 0: always the likeliest token; default 1",
    )
    add(
        "--top-k",
        type=positive,
        metavar="K",
        help="choose among the K likeliest tokens; default: all",
    )
    add(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="choose among the fewest tokens with "
        "this probability in all, of those that --top-k leaves; default 1",
    )
    add("--seed", type=int, default=0, metavar="N", help="of the random choice; default 0")
    add(
        "--tokenizer",
        metavar="PATH",
        help="a file or folder, as for polyad prepare; default: the checkpoint's",
    )
    add("--precision", choices=("fp32", "bf16"), default="fp32", help="default fp32")
    add("--no-cache", action="store_true", help="compute the whole window again for every token")
    add(
        "--steer",
        action="append",
        default=[],
        metavar="layer=N,expert=N,strength=X",
        help="add X times an expert's gate column to what enters a block, also level=N of a "
        "hierarchy; may be given several times",
    )
    add("--json", metavar="FILE", help="write the result to FILE as JSON; - is standard output")


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
    from launch.via import options

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
        default=1.0,
        metavar="X",
        help="rows of experts that the busiest process gets, over the mean of all; default 1",
    )
    add(
        "--storage",
        type=float,
        default=2.0,
        metavar="GB",
        help="GB a second that a node writes to the folder of checkpoints; default 2",
    )
    add(
        "--failures",
        type=float,
        default=50_000.0,
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
