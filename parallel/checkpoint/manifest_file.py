"""The form of `manifest.json`, in both versions; `manifest.py` says what it is for."""

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, model_validator

from polyad.parallel.checkpoint.records import Count, FormError, PlainName, Record, parsed


class _Head(Record):
    model_config = ConfigDict(extra="ignore")

    format: str
    version: Annotated[int, Field(ge=1)]


class _OldFile(Record):
    bytes: Count
    crc32: Annotated[int, Field(ge=0, lt=2**32)]

    @property
    def digests(self) -> tuple[int, ...]:
        return (self.crc32,)


class _File(Record):
    bytes: Count
    xxh3: tuple[Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")], ...]
    """The digest of each block."""

    @property
    def digests(self) -> tuple[str, ...]:
        return self.xxh3


class OldManifestFile(Record):
    """Version 1: one crc32 for a file."""

    format: str
    version: Literal[1]
    step: Count
    files: dict[PlainName, _OldFile]

    @property
    def block_bytes(self) -> int:
        """Version 1 has no blocks: a file is one."""
        return 0


class NewManifestFile(Record):
    """Version 2."""

    format: str
    version: Literal[2]
    step: Count
    block_bytes: Annotated[Count, Field(ge=1)]
    files: dict[PlainName, _File]
    xxh3: str
    """The digest of everything before it in the file."""

    @model_validator(mode="after")
    def _all_blocks(self) -> "NewManifestFile":
        for name, file in self.files.items():
            blocks = max(1, -(-file.bytes // self.block_bytes))
            if len(file.xxh3) != blocks:
                raise ValueError(
                    f"{name}: {len(file.xxh3)} digests for {file.bytes:,} bytes, {blocks} are "
                    f"needed"
                )
        return self


ManifestFile = OldManifestFile | NewManifestFile


def read_manifest(content: bytes, name: str, newest: int) -> tuple[int, ManifestFile | None]:
    """Reads a manifest of any version.

    Args:
        content: of the file.
        name: of the format.
        newest: version that is known.

    Returns:
        The version, and the manifest; None of a newer version.

    Raises:
        FormError: it is not a manifest.
    """
    head: _Head = parsed(_Head, content)
    if head.format != name:
        raise FormError(f"format: {head.format!r:.60}: {name!r} is needed")
    if head.version > newest:
        return head.version, None
    kind = OldManifestFile if head.version == 1 else NewManifestFile
    manifest: ManifestFile = parsed(kind, content)
    return head.version, manifest
