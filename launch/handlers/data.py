"""What the commands do that prepare and verify data."""

import time
from argparse import Namespace
from typing import Any

from polyad.launch.output import check_json_path, only_results_on_stdout, show
from polyad.launch.parser import UsageError


def prepare(options: Namespace) -> None:
    """`polyad prepare`."""
    from polyad.launch.machine import prepare_environment

    prepare_environment()
    given = vars(options)
    of_images = {name: given.pop(name) for name in ("held_out", "domains")}
    images = given.pop("images")
    if images is not None:
        _prepare_images(images, of_images | {"accept": given.pop("accept")}, given)
        return
    if of_images["held_out"] is not None:
        raise UsageError(f"--held-out: {of_images['held_out']} means nothing without --images")
    if of_images["domains"]:
        raise UsageError("--domains: means nothing without --images")
    missing = [f"--{name}" for name in ("source", "tokenizer") if given[name] is None]
    if missing:
        raise UsageError(f"needs {' and '.join(missing)}, or --images for images")
    from polyad.launch.preparation import prepare_in_parts, take_parts

    in_parts = take_parts(given)
    if in_parts.parts is not None:
        prepare_in_parts(given, in_parts)
        return
    from polyad.data.text.prepare import prepare
    from polyad.launch.tables import prepared_table

    with only_results_on_stdout() as stdout:
        started = time.monotonic()
        manifest = prepare(**given)
        seconds = time.monotonic() - started
        stdout.write(prepared_table(manifest, options.output, seconds) + "\n")


def _prepare_images(source: str, of_images: dict[str, Any], given: dict[str, Any]) -> None:
    for name, value in given.items():
        if name not in ("output", "overwrite") and value not in _TEXT_DEFAULTS.get(name, (None,)):
            option = _TEXT_OPTIONS.get(name, name.replace("_", "-"))
            raise UsageError(f"--{option}: {value} is of text, and is not allowed with --images")
    from polyad.data.images.prepare import prepare_images, prepared_rows

    with only_results_on_stdout() as stdout:
        started = time.monotonic()
        manifest = prepare_images(
            source,
            given["output"],
            **of_images,
            overwrite=given["overwrite"],
        )
        rows = list(prepared_rows(manifest, given["output"], time.monotonic() - started))
        width = max(len(name) for name, _ in rows)
        stdout.write("".join(f"{name:{width}}  {value}\n" for name, value in rows))


_TEXT_OPTIONS = {"file_format": "format"}


_TEXT_DEFAULTS: dict[str, tuple[object, ...]] = {
    "text_key": ("text",),
    "documents": ("files",),
    "streaming": (False,),
    "begin": (False,),
    "join": (False,),
    "dry_run": (False,),
    "via": ("local",),
}


def data_verify(options: Namespace) -> None:
    """`polyad data verify`."""
    from polyad.launch.data import check_verified, data_table, verify_data

    check_json_path(options.json)
    with only_results_on_stdout() as stdout:
        result = verify_data(options.folders)
        show(result, data_table(result), options.json, stdout)
        check_verified(result)
