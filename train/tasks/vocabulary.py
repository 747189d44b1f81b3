"""Token ids and class numbers of weights: which tokenizer and class names they refer to."""

from pathlib import Path

from polyad.data.config import DataConfig
from polyad.data.errors import DataError
from polyad.data.json_reader import parse_json, read_json
from polyad.data.text.dataset import PreparedData
from polyad.data.text.manifest import TOKENIZER_FILES
from polyad.data.text.tokenizers.files import VOCABULARY_FILE, load_tokenizer
from polyad.data.text.tokenizers.tokenizer import Tokenizer
from polyad.parallel.checkpoint.format import State
from polyad.parallel.checkpoint.load import Checkpoint
from polyad.parallel.families import GENERATION_FILE, FamilyWeights, Origin
from polyad.parallel.weights import Weights
from polyad.train.errors import ConfigError


def open_data(path: str | None) -> PreparedData:
    """Opens the prepared data in the folder of `data.path`.

    Raises:
        ConfigError: it is missing or damaged.
    """
    if path is None:
        raise ConfigError(
            "data.path: is missing; create a folder of prepared data with `polyad prepare`"
        )
    try:
        return PreparedData.open(Path(path))
    except DataError as error:
        raise ConfigError(f"data.path: {error}") from None


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
    fingerprint = fingerprint_of(weights)
    data_fingerprint = data.manifest.tokenizer.fingerprint
    if fingerprint in (None, data_fingerprint):
        return
    tokenizer = tokenizer_of(weights)
    if tokenizer is None or not same_ids(tokenizer, data.tokenizer()):
        raise ConfigError(
            f"{key} was made with tokenizer {data_fingerprint[:12]}, the {owner} with "
            f"{str(fingerprint)[:12]}: their token ids mean different things"
        )


def data_named(config: DataConfig) -> str:
    """The key that names the data, with its value, for error messages."""
    if config.mixture is None:
        return f"data.path: {config.path}"
    return f"data.mixture: {', '.join(source.path for source in config.mixture)}"


def same_ids(one: Tokenizer, other: Tokenizer) -> bool:
    """Whether two tokenizers have the same vocabulary; they may split text differently."""
    return one.end_of_text == other.end_of_text and one.vocabulary() == other.vocabulary()


def tokenizer_of(weights: Weights) -> Tokenizer | None:
    """Returns a model's tokenizer, the one beside its weights; None if there is none.

    Raises:
        ValueError: the tokenizer is damaged or cannot be read; has an `exit_status` of 2.
    """
    if not isinstance(weights, Checkpoint):
        return _folder_tokenizer(weights.files_folder)
    fingerprint = weights.state.tokenizer_fingerprint
    for name in TOKENIZER_FILES:
        file = weights.small_file(name)
        if file is not None and file.is_file():
            tokenizer = load_tokenizer(file, weights.state.end_of_text)
            if fingerprint in (None, tokenizer.fingerprint):
                return tokenizer
    return None


def fingerprint_of(weights: Weights) -> str | None:
    """The fingerprint of a model's tokenizer; None if there is none."""
    if isinstance(weights, Checkpoint):
        return weights.state.tokenizer_fingerprint
    tokenizer = tokenizer_of(weights)
    return tokenizer.fingerprint if tokenizer else None


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
    model_size = weights.shapes()["token_embedding.weight"][0]
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
    config.json.

    Raises:
        ConfigError: the key has another form.
    """
    if isinstance(weights, FamilyWeights):
        origin = weights.origin()
    elif isinstance(weights, Checkpoint) and weights.state.huggingface is not None:
        origin = Origin.model_validate(weights.state.huggingface)
    else:
        return frozenset()
    place, tree = "config.json", origin.config
    if (content := origin.files.get(GENERATION_FILE)) is not None:
        place, tree = GENERATION_FILE, parse_json(content, GENERATION_FILE, error=ConfigError)
    value = tree.get("eos_token_id") if isinstance(tree, dict) else None
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(each) is int and each >= 0 for each in ids):
        raise ConfigError(
            f"{weights.folder}: {place}: eos_token_id: {value!r:.60} is not allowed; it must be a "
            "token id, a list of them, or null"
        )
    return frozenset(ids)


def _folder_tokenizer(folder: Path) -> Tokenizer | None:
    names = {path.name for path in folder.iterdir()}
    one = {*TOKENIZER_FILES, VOCABULARY_FILE}
    if not names & one and not {"vocab.json", "merges.txt"} <= names:
        return None
    return load_tokenizer(folder)


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
