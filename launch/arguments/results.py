"""The arguments of commands that take a checkpoint or a study."""

from pathlib import Path

from polyad.launch.arguments.runs import override_arguments
from polyad.launch.parser import Parser, duration, names, non_negative, positive, share


def evaluate_arguments(parser: Parser) -> None:
    """Those of `polyad evaluate`."""
    add = parser.add_argument
    add("path", type=Path, metavar="CHECKPOINT_OR_RUN", help="a run means its newest checkpoint")
    add("--data", metavar="DIR", help="prepared data; default: what the run was trained on")
    _best_argument(parser)
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
        help="for --compare and --knockout: about how many tokens or images are read, evenly; "
        "default 65536",
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
        "--knockout",
        action="store_true",
        help="what each expert of a language model is for: the change of the loss without it, for "
        "classes of tokens by characters, position and frequency",
    )
    add(
        "--layers",
        type=names,
        default=[],
        metavar="N,N,...",
        help="for --knockout: blocks whose experts are left out, or all; default: the first, the "
        "middle and the last block that has experts",
    )
    add(
        "--experts",
        type=names,
        default=[],
        metavar="N,N,...",
        help="for --knockout: experts of each of these that are left out; with levels LEVEL.N; "
        "default: all",
    )
    _steer_argument(
        parser,
        "for --knockout: also measure, for the same classes, the change of the loss when X times "
        "an expert's gate column is added to what enters a block (level=N of a hierarchy), and "
        "that of the predicted probability; may be given several times, all act at once; leaves "
        "out these experts alone unless --layers or --experts names others",
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
        "shown, or all; default: the first, the middle and the last block that has experts",
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
    add(
        "--knockout",
        action="store_true",
        help="of text: show of each expert also the change of the loss without it, of about 65536 "
        "tokens; takes a few times as long as reading them once for each expert shown",
    )
    add("--json", metavar="FILE", help="write the result to FILE as JSON; - is standard output")


def study_arguments(parser: Parser) -> None:
    """Those of `polyad study`."""
    add = parser.add_argument
    add(
        "study",
        type=Path,
        metavar="STUDY",
        help="a YAML file; the same command again continues the study. Or a results.json that a "
        "study wrote: it is shown again, without its runs",
    )
    add(
        "--dry-run",
        action="store_true",
        help="print what it will train and what is finished; start nothing",
    )
    add(
        "--jobs",
        type=positive,
        default=1,
        metavar="N",
        help="train N runs at a time, each with its share of this machine's cores; default 1",
    )
    add(
        "--budget",
        type=duration,
        metavar="TIME",
        help="do what fits into TIME, as 3h, 90m, 45s or 1h30m: the most informative pairs first, "
        "and the rest at another start",
    )
    add(
        "--beside",
        metavar="VARIANT",
        help="compare what is finished with this variant in place of the baseline; start nothing, "
        "and leave the study as it is, also while it is going on",
    )
    add("--markdown", action="store_true", help="print the tables as Markdown")
    add("--figure", type=Path, metavar="FILE", help="draw the comparison into FILE, as .svg")
    add(
        "--page",
        type=Path,
        metavar="FILE",
        help="write all of the result into FILE as one .html page: what was asked, what the "
        "intervals say, figure, tables, and how it was made; also where a run fails or is stopped",
    )
    add("--json", metavar="FILE", help="write the result to FILE as JSON; - is standard output")


def _steer_argument(parser: Parser, about: str) -> None:
    parser.add_argument(
        "--steer",
        action="append",
        default=[],
        metavar="layer=N,expert=N,strength=X",
        help=about,
    )


def _best_argument(parser: Parser) -> None:
    parser.add_argument(
        "--best",
        action="store_true",
        help="of a run with checkpoint.keep_best: the checkpoint of its best validation in place "
        "of the newest",
    )


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
    change(
        "--linear-score",
        action="store_true",
        help="make the attentive scores of sparse experts the linear scores that give the same "
        "logits",
    )
    _weights_argument(parser)
    _base_argument(parser)
    add("--json", metavar="FILE", help="write the result to FILE as JSON; - is standard output")


def generate_arguments(parser: Parser) -> None:
    """Those of `polyad generate`."""
    add = parser.add_argument
    add("path", type=Path, metavar="CHECKPOINT", help="a checkpoint, a run, or a folder of weights")
    add("--prompt", required=True, metavar="TEXT", help="the text that is continued")
    _best_argument(parser)
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
    _steer_argument(
        parser,
        "add X times an expert's gate column to what enters a block, also level=N of a "
        "hierarchy; may be given several times",
    )
    add("--json", metavar="FILE", help="write the result to FILE as JSON; - is standard output")
