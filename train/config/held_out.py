"""Other data in the place of a run's, that its weights read: `--data`."""

import json

from polyad.data.config import DataConfig
from polyad.data.images.config import ImageDataConfig
from polyad.data.sequences.config import SequenceDataConfig
from polyad.train.config.run import RunConfig
from polyad.train.errors import ConfigError


def data_overrides(config: RunConfig, data: str) -> tuple[str, ...]:
    """`key=value` that puts a folder in the place of the data of a run.

    Args:
        config: the run's.
        data: the folder.

    Raises:
        ConfigError: data of its kind are in no folder.
    """
    if not isinstance(config.data, DataConfig | ImageDataConfig | SequenceDataConfig):
        raise ConfigError(f"--data: is not allowed with data.kind: {config.data.kind}")
    instead = ("data.mixture=null",) if isinstance(config.data, DataConfig) else ()
    return (f"data.path={json.dumps(data)}", *instead)
