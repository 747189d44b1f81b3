"""JSON Schemas of configurations, with which editors complete and check them."""

from typing import Any

from polyad.model.config import Config

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def schema_of(kind: type[Config], title: str) -> dict[str, Any]:
    """The schema of a file, with what every key means.

    Rules between keys are not in it: `polyad validate` knows them.

    Args:
        kind: of the file's tree.
        title: of the schema.
    """
    plain: dict[str, Any] = _plain(kind.model_json_schema())
    return {"$schema": DIALECT} | plain | {"title": title}


def _plain(node: Any) -> Any:
    """Without what would refuse good files, or names that pydantic makes up.

    Sections are of one of several kinds, one of which holds where the file names none: a section of
    keys that two kinds have is of any of them, not of one.
    """
    if isinstance(node, list):
        return [_plain(each) for each in node]
    if not isinstance(node, dict):
        return node
    plain = {
        ("anyOf" if key == "oneOf" else key): _plain(value)
        for key, value in node.items()
        if key != "discriminator"
    }
    if "properties" in plain:  # a key of ours may be called `title`
        plain["properties"] = {name: _untitled(each) for name, each in plain["properties"].items()}
    return plain


def _untitled(node: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in node.items() if key != "title"}
