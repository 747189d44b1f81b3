"""The arguments of commands that prepare and verify data."""

from polyad.launch.parser import Parser
from polyad.launch.preparation import parts_arguments


def prepare_arguments(parser: Parser) -> None:
    """Those of `polyad prepare`."""
    add = parser.add_argument
    add(
        "--images",
        metavar="SOURCE",
        help="images in place of text: digits, hub:OWNER/NAME, or a folder of classes, a .zip or "
        ".tar of one, .tar files of WebDataset, .parquet files, a folder of `datasets`, or the "
        "files of MNIST or CIFAR",
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
        help="for --images: SOURCE is a folder, or a .zip or .tar of one, with a folder for each "
        "domain, and in these one for each class; the held-out share is taken from each domain",
    )
    add(
        "--accept",
        action="store_true",
        help="prepare although something looks like a mistake, such as files that are left out, a "
        "class without images or only one class; it is said all the same",
    )
    add(
        "--source",
        help="python-stdlib, python:PACKAGE, openwebtext, wikitext-103, hub:OWNER/NAME[:CONFIG], "
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
        metavar="F",
        help="share of all documents; of few text files a part of the text; default 0.05 where "
        "the source has no such split",
    )
    add(
        "--test-fraction",
        type=float,
        metavar="F",
        help="share for the test split, taken in the same way, with the same default",
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
