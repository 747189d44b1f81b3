"""Images of Parquet and Arrow are those that pyarrow reads, however they are stored."""

import io
import itertools
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from polyad.data.errors import DataError
from tests.data.images.test_prepare_images import prepared
from tests.helpers import images as made

FEATURES = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def rows_of(path):
    """Pixels and label of each row that has an image, as pyarrow and Pillow alone read them."""
    found = Counter()
    schema = pq.read_schema(path)
    name = "img" if "img" in schema.names else "image"
    wanted = f"{name}.bytes" if pa.types.is_struct(schema.field(name).type) else name
    for row in pq.ParquetFile(path).read([wanted, "label"]).to_pylist():
        image = row[name]
        content = image["bytes"] if isinstance(image, dict) else image
        if content is not None:
            pixels = np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))
            found[pixels.tobytes(), row["label"]] += 1
    return found


def indexed(data):
    found = Counter()
    for name in data.manifest.splits:
        split = data.split(name)
        for number in range(len(split)):
            found[split.decode(number).tobytes(), int(split.labels[number])] += 1
    return found


def table(rows, nulls=(), kind=FEATURES):
    """So many pictures; of some rows the image, or only its bytes, are missing."""
    images = []
    for row in range(rows):
        content = made.encoded(made.picture(row % 3, row), "PNG" if row % 2 else "JPEG")
        image = {"bytes": content, "path": f"{row}.png"}
        if row in nulls:
            image = None if row % 2 else {"bytes": None, "path": None}
        images.append(image if kind == FEATURES else image and image["bytes"])
    labels = pa.array([row % 3 for row in range(rows)], pa.int64())
    return pa.table({"image": pa.array(images, kind), "label": labels})


WRITERS = [
    dict(zip(("compression", "use_dictionary", "write_statistics", "data_page_version"), each,
             strict=True))
    for each in itertools.product(("none", "snappy", "zstd"), (True, False), (True, False),
                                  ("1.0", "2.0"))
]  # fmt: skip


@pytest.mark.parametrize("nulls", [(), (0,), (5, 6), (4, 11, 23)], ids=str)
def test_images_are_those_of_pyarrow_whatever_wrote_them(tmp_path, nulls):
    """A null without statistics shifted every image behind it, when page headers were read here."""
    for number, options in enumerate(WRITERS):
        path = tmp_path / f"{number}.parquet"
        pq.write_table(
            table(24, nulls),
            path,
            row_group_size=(7, 24)[number % 2],
            data_page_size=900,
            **options,
        )
        data = prepared(path, tmp_path / f"out {number}")
        assert indexed(data) == rows_of(path), options
        reason = {"rows without an image": len(nulls)} if nulls else {}
        assert data.manifest.left_out == reason


@pytest.mark.parametrize(
    "kind",
    [
        *(pa.binary(), pa.large_binary(), pa.dictionary(pa.int32(), pa.binary())),
        pa.struct([("path", pa.string()), ("bytes", pa.large_binary())]),
        pa.struct([pa.field("bytes", pa.binary(), False), pa.field("path", pa.int64())]),
    ],
    ids=str,
)
def test_columns_of_bytes_and_of_structs_are_images(tmp_path, kind):
    source = table(12, kind=FEATURES)
    images = source["image"].to_pylist()
    if pa.types.is_struct(kind):
        images = [{"bytes": each["bytes"], "path": 7 if "int64" in str(kind) else each["path"]}
                  for each in images]  # fmt: skip
    else:
        images = [each["bytes"] for each in images]
    coded = pa.types.is_dictionary(kind)
    column = pa.array(images, kind.value_type if coded else kind)
    column = column.dictionary_encode() if coded else column
    pq.write_table(source.set_column(0, "image", column), tmp_path / "a.parquet")
    data = prepared(tmp_path / "a.parquet", tmp_path / "out")
    assert indexed(data) == rows_of(tmp_path / "a.parquet")


def test_each_file_has_columns_of_its_own(tmp_path):
    """Columns of the last file were taken for those of all."""
    first = table(9)
    pq.write_table(first, tmp_path / "train-0.parquet", compression="none")
    other = first.rename_columns(["img", "label"]).select(["label", "img"])
    pq.write_table(other, tmp_path / "train-1.parquet")
    data = prepared(tmp_path, tmp_path / "out")
    expected = rows_of(tmp_path / "train-0.parquet") + rows_of(tmp_path / "train-1.parquet")
    assert indexed(data) == expected


@pytest.mark.parametrize(
    ("column", "said"),
    [
        (pa.array(["a.png"] * 6), "the column image holds string, not images"),
        (pa.array([1] * 6), "the column image holds int64, not images"),
        (pa.array([[b"x"]] * 6), "holds list<.*> *, not images"),
        (
            pa.array([{"bytes": None, "path": "a.png"}] * 6, FEATURES),
            r"no training images, but rows with the path of an image but without its bytes: 6",
        ),
    ],
    ids=["paths", "numbers", "lists", "only paths"],
)
def test_tables_without_images_are_one_line(tmp_path, column, said):
    pq.write_table(pa.table({"image": column, "label": [0, 1] * 3}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=said) as caught:
        prepared(tmp_path / "a.parquet", tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
def test_arrow_files_are_read_as_pyarrow_reads_them(tmp_path, compression):
    """A compressed file has no image where its buffers are in memory."""
    source = table(30, (3, 10))
    (tmp_path / "saved").mkdir()
    for number in (0, 1):
        options = pa.ipc.IpcWriteOptions(compression=compression)
        path = tmp_path / "saved" / f"data-{number}.arrow"
        with pa.ipc.new_stream(path, source.schema, options=options) as writer:
            for at in (0, 13):
                writer.write_table(source.slice(at, 13))
    data = prepared(tmp_path / "saved", tmp_path / "out")
    pq.write_table(source.slice(0, 26), tmp_path / "same.parquet")
    one = rows_of(tmp_path / "same.parquet")
    assert indexed(data) == one + one
