"""Plugins: modules outside of Polyad that add tasks, models and measures to its registries.

    POLYAD_PLUGINS=lab.spectra,lab.models polyad train spectra.yaml

A module is imported before any configuration is read, and adds entries to the registries of
Polyad: `polyad.model.build.MODELS["mine"] = ModelKind(...)`,
`polyad.train.tasks.registry.TASKS["mine"] = ...`,
`polyad.train.measures.registry.MEASURES["mine"] = ...`.
Processes that a command starts find the variable too.
"""

import importlib
import os

from polyad.train.errors import ConfigError, one_line

VARIABLE = "POLYAD_PLUGINS"
"""Names of modules, separated by commas."""


def load_plugins() -> None:
    """Imports the modules that the environment names.

    Raises:
        ConfigError: one cannot be imported.
    """
    for name in filter(None, (part.strip() for part in os.environ.get(VARIABLE, "").split(","))):
        try:
            importlib.import_module(name)
        except Exception as error:  # importing a plugin may raise anything
            raise ConfigError(
                f"{VARIABLE}: {name}: cannot be imported: {type(error).__name__}: "
                f"{one_line(error)}; a module on the path of Python is needed (PYTHONPATH)"
            ) from None
