"""Token ids and class numbers of weights: which tokenizer and class names they refer to."""

import sys
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from polyad.data.files import parse_json, read_json
from polyad.data.text.dataset import PreparedData
from polyad.data.text.manifest import TOKENIZER_FILES
from polyad.data.text.tokenizers.files import VOCABULARY_FILE, load_tokenizer
from polyad.data.text.tokenizers.tokenizer import Tokenizer
from polyad.parallel.checkpoint.format import State
from polyad.parallel.checkpoint.load import Checkpoint
from polyad.parallel.families import GENERATION_FILE, FamilyWeights, Origin
from polyad.parallel.foreign import TheirWeights
from polyad.parallel.weights import Weights
from polyad.train.errors import ConfigError

SpecialTokens: TypeAlias = Literal["text", "parse"]
"""Whether special tokens that are written in a text are read as characters or as tokens."""


def ids_of_text(tokenizer: Tokenizer, text: str, special_tokens: SpecialTokens) -> list[int]:
    """Returns the ids of a text, after the token that begins a document if there is one.

    Args:
        tokenizer: the tokenizer.
        text: the text. Where it has special tokens that are read as characters, a line says so.
        special_tokens: how they are read.

    Raises:
        ConfigError: `special_tokens` is neither.
        DataError: the tokenizer cannot read special tokens in a text, or the text.
    """
    if special_tokens not in get_args(SpecialTokens):
        raise ConfigError(f"special_tokens: {special_tokens!r} is not allowed: text, parse")
    if special_tokens == "parse":
        tokenizer = tokenizer.parsing()
    elif count := len(tokenizer.special_words.findall(text)):
        print(
            f"polyad: special tokens in the text: {count}, read as characters; "
            "--special-tokens parse (special_tokens='parse') reads them as tokens",
            file=sys.stderr,
        )
    return tokenizer.begun(tokenizer.encode(text))


def check_tokenizer(key: str, data: PreparedData, weights: Weights, owner: str) -> None:
    """Checks that data was made with the weights' tokenizer, or one that gives each token the same
    id.

    Args:
        key: the key of the data and its value, for the error.
        data: prepared data.
        weights: weights; without a tokenizer they fit any data.
        owner: name of the weights' owner in the error.

    Raises:
        ConfigError: it was made with another tokenizer.
    """
    tokenizer, fingerprint = tokenizer_of(weights), data.manifest.tokenizer.fingerprint
    own = None if tokenizer is None else tokenizer.fingerprint
    if isinstance(weights, Checkpoint):
        own = weights.state.tokenizer_fingerprint
    if own in (None, fingerprint):
        return
    if tokenizer is None or not same_ids(tokenizer, data.tokenizer()):
        raise ConfigError(
            f"{key} was made with tokenizer {fingerprint[:12]}, the {owner} with "
            f"{str(own)[:12]}: their token ids mean different things"
        )


def same_ids(one: Tokenizer, other: Tokenizer) -> bool:
    """Whether two tokenizers have the same vocabulary; they may split text differently."""
    return one.end_of_text == other.end_of_text and one.vocabulary() == other.vocabulary()


def tokenizer_of(weights: Weights) -> Tokenizer | None:
    """Returns a model's tokenizer, the one beside its weights; None if there is none.

    Raises:
        ValueError: the tokenizer is damaged or cannot be read; has an `exit_status` of 2.
    """
    if not isinstance(weights, Checkpoint):
        folder = weights.files_folder
        names = {path.name for path in folder.iterdir()}
        has_one = bool(names & {*TOKENIZER_FILES, VOCABULARY_FILE})
        has_one = has_one or {"vocab.json", "merges.txt"} <= names
        return load_tokenizer(folder) if has_one else None
    fingerprint = weights.state.tokenizer_fingerprint
    for name in TOKENIZER_FILES:
        file = weights.small_file(name)
        if file is not None and file.is_file():
            tokenizer = load_tokenizer(file, weights.state.end_of_text)
            if fingerprint in (None, tokenizer.fingerprint):
                return tokenizer
    return None


def need_tokenizer(weights: Weights, given: str | None) -> Tokenizer:
    """Returns the tokenizer that a user names, or the weights' own; the model has all of its ids.

    Args:
        weights: the model's.
        given: a tokenizer.json, a SentencePiece .model or its folder; None: the weights' own.

    Raises:
        ConfigError: there is none, or it is not the weights' tokenizer; or the tokens that end a
            generated text are no ids.
        DataError: it cannot be read.
    """
    own = tokenizer_of(weights)
    state = weights.state if isinstance(weights, Checkpoint) else State()
    tokenizer = own
    if given is not None:
        tokenizer = load_tokenizer(given, state.end_of_text)
        fingerprint = state.tokenizer_fingerprint
        right = same_ids(own, tokenizer) if own else fingerprint in (None, tokenizer.fingerprint)
        if not right:
            raise ConfigError(
                f"--tokenizer {given}: is not the one that {weights.folder} was trained with: "
                f"their token ids mean different things"
            )
    if tokenizer is None:
        raise ConfigError(f"{weights.folder}: contains no tokenizer; name one with --tokenizer")
    model_size = weights.model_config().number("vocab_size")
    if tokenizer.vocab_size > model_size:
        raise ConfigError(
            f"{given or weights.folder}: the tokenizer has {tokenizer.vocab_size} tokens, the "
            f"model {model_size}"
        )
    if stops := {each for each in _named_stop_ids(weights) if each < model_size}:
        is_trained = isinstance(weights, Checkpoint) and weights.training_step > 0
        tokenizer.stop_ids = frozenset(stops | (tokenizer.stop_ids if is_trained else set()))
    return tokenizer


def _named_stop_ids(weights: Weights) -> frozenset[int]:
    """Returns the ids that end a text according to the folder of another library from which a
    model comes: as in transformers, those of generation_config.json, or without this file those of
    config.json."""
    if isinstance(weights, FamilyWeights | TheirWeights):
        origin = weights.origin()
    elif isinstance(weights, Checkpoint) and weights.state.huggingface is not None:
        origin = Origin.model_validate(weights.state.huggingface)
    else:
        return frozenset()
    tree: Any = origin.config
    if (content := origin.files.get(GENERATION_FILE)) is not None:
        tree = parse_json(content, GENERATION_FILE, error=ConfigError)
    value = tree.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(each) is int and each >= 0 for each in ids):
        raise ConfigError(f"{weights.folder}: eos_token_id: {value!r:.60} is no token id")
    return frozenset(ids)


CLASSES_FILE = "classes.json"
"""The file of a checkpoint with the names of its classes, in their order."""


def class_names_of(folder: Path) -> list[str] | None:
    """Returns the class names that a checkpoint was trained with; None if it has none.

    Raises:
        ConfigError: The file is damaged.
    """
    file = folder / CLASSES_FILE
    if not file.is_file():
        return None
    names = read_json(file, error=ConfigError)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{file}: is not a list of the names of classes")
    return names


def names_of(weights: Weights) -> list[str] | None:
    """Returns the class names of weights of any format; None if they do not record them."""
    named = weights.class_names if isinstance(weights, FamilyWeights) else None
    return class_names_of(weights.folder) if named is None else named


def differing(ours: list[str], theirs: list[str], owner: str) -> str:
    """Describes in words how two different lists of classes differ.

    Args:
        ours: the data's classes.
        theirs: the weights' classes.
        owner: name of the weights in the error.
    """
    if len(ours) != len(theirs):
        return f"{len(ours)} classes, the {owner} was trained with {len(theirs)}"
    first = next(n for n, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1])
    return (
        f"other classes than the {owner} was trained with: class {first} is {ours[first]!r}, "
        f"not {theirs[first]!r}"
    )
