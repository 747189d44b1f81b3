"""What a configuration leaves to the data: the vocabulary, and whether the two belong together."""

from pathlib import Path

from data.dataset import PreparedData
from data.errors import DataError
from train.config import RunConfig
from train.errors import ConfigError


def open_data(path: str | None, tokenizer_fingerprint: str | None, owner: str) -> PreparedData:
    """Opens prepared data and checks that its tokenizer is the one the weights know.

    Args:
        path: the folder, from `data.path`.
        tokenizer_fingerprint: that of the weights; None if there are none yet.
        owner: who has those weights, for the error.

    Raises:
        DataError: it is missing, damaged, or made with another tokenizer.
    """
    if path is None:
        raise ConfigError("data.path: is missing; `polyad prepare` makes such a folder")
    try:
        prepared = PreparedData.open(Path(path))
    except DataError as error:
        raise ConfigError(f"data.path: {error}") from None
    theirs = prepared.manifest.tokenizer.fingerprint
    if tokenizer_fingerprint is not None and theirs != tokenizer_fingerprint:
        raise ConfigError(
            f"data.path: {path} was made with tokenizer {theirs[:12]}, the {owner} with "
            f"{tokenizer_fingerprint[:12]}: their token ids mean different things"
        )
    return prepared


def resolve(config: RunConfig, vocab_size: int) -> RunConfig:
    """Fills in what comes from the data.

    Args:
        config: the tree.
        vocab_size: of the data's tokenizer.

    Returns:
        The tree with `model.vocab_size` set.

    Raises:
        ConfigError: the model's vocabulary is smaller than the tokenizer's.
    """
    wanted = config.model.vocab_size
    if wanted is not None and wanted < vocab_size:
        raise ConfigError(
            f"model.vocab_size: {wanted} is less than the {vocab_size} tokens of the tokenizer of "
            f"data.path: {config.data.path}"
        )
    model = config.model.model_copy(update={"vocab_size": wanted or vocab_size})
    return config.model_copy(update={"model": model})
