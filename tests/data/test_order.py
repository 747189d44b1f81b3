"""The order of an epoch is made once on a node and mapped."""

import multiprocessing
import os
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest

from polyad.data import order
from polyad.data.files import node_folder
from polyad.data.order import EpochOrders
from polyad.data.text.samples import TrainingSamples

SAMPLES = 1000


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """A node's temporary folder of this test's own, where even small orders are files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(order, "SMALL", 0)
    return tmp_path / f"polyad-{os.getuid()}" / "orders"


class Build:
    """Makes orders, and notes each time in a file."""

    def __init__(self, notes: Path, seconds: float = 0.0) -> None:
        self.notes, self.seconds = notes, seconds

    def __call__(self, epoch: int) -> dict[str, np.ndarray]:
        with self.notes.open("a") as file:
            file.write(f"{epoch}\n")
        time.sleep(self.seconds)
        return {"numbers": np.random.default_rng(epoch).permutation(SAMPLES)}

    def made(self) -> list[int]:
        return [int(line) for line in self.notes.read_text().split()]


def wait_for(path: Path) -> None:
    for _ in range(500):
        if path.exists():
            return
        time.sleep(0.01)
    raise AssertionError(f"no {path}")


def read(build: Build, found: "multiprocessing.Queue") -> None:
    order.SMALL = 0
    arrays, place = EpochOrders(build, SAMPLES, "a")(7)
    found.put((int(arrays["numbers"][place]), isinstance(arrays["numbers"], np.memmap)))


@pytest.mark.slow
def test_processes_of_a_node_make_an_epoch_once_and_map_it(tmp_path):
    build, context = Build(tmp_path / "notes", seconds=0.5), multiprocessing.get_context("spawn")
    found = context.Queue()
    processes = [context.Process(target=read, args=(build, found)) for _ in range(4)]
    for process in processes:
        process.start()
    expected = int(np.random.default_rng(0).permutation(SAMPLES)[7])
    assert [found.get(timeout=60) for _ in processes] == [(expected, True)] * 4
    for process in processes:
        process.join()
    assert build.made() == [0]


def test_the_next_epoch_is_there_before_it_begins(tmp_path, place):
    build = Build(tmp_path / "notes")
    orders = EpochOrders(build, SAMPLES, "a")
    orders(0)
    orders(SAMPLES // 2)
    assert build.made() == [0]
    orders(SAMPLES // 2 + 1)
    (folder,) = place.glob("*-0")
    wait_for(folder.with_name(folder.name[:-1] + "1"))
    arrays, first = orders(SAMPLES)
    assert build.made() == [0, 1]
    assert first == 0
    assert np.array_equal(arrays["numbers"], np.random.default_rng(1).permutation(SAMPLES))


def test_epochs_that_are_over_and_orders_long_unused_are_deleted(tmp_path, place):
    orders, other = (EpochOrders(Build(tmp_path / "notes"), SAMPLES, key) for key in "ab")
    other(0)
    (unused,) = place.glob("*-0")
    (place / ".new-of-a-process-that-was-killed").mkdir()
    for path in (unused, place / ".new-of-a-process-that-was-killed"):
        os.utime(path, (0, time.time() - 8 * 24 * 3600))
    for epoch in range(4):
        arrays, _ = orders(epoch * SAMPLES)
    assert sorted(path.name.split("-")[1] for path in place.glob("*-*")) == ["2", "3"]
    assert len(set(arrays["numbers"].tolist())) == SAMPLES
    # What was deleted stays mapped where it is in use, and is made again where it is not.
    assert other(3)[0]["numbers"][3] == np.random.default_rng(0).permutation(SAMPLES)[3]


def test_an_order_of_which_files_were_taken_is_made_again(tmp_path, place):
    build = Build(tmp_path / "notes")
    arrays, _ = EpochOrders(build, SAMPLES, "a")(7)
    expected = arrays["numbers"].tolist()
    (file,) = place.glob("*-0/numbers.npy")
    file.unlink()
    arrays, _ = EpochOrders(build, SAMPLES, "a")(7)
    assert arrays["numbers"].tolist() == expected
    assert build.made() == [0, 0]
    assert file.is_file()
    assert not list(place.glob(".old-*"))


def test_another_run_has_another_order(tmp_path):
    build = Build(tmp_path / "notes")
    for identity in (("text", 1), ("text", 2), ("text", 1)):
        EpochOrders(build, SAMPLES, identity)(0)
    assert build.made() == [0, 0]


@pytest.mark.parametrize("fault", ["a file", "belongs to another user"])
def test_without_such_a_folder_each_process_makes_its_own(tmp_path, place, fault, monkeypatch):
    if fault == "a file":
        place.parent.write_text("")
    else:
        node_folder("orders")
        owner = os.getuid()
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        place.parent.rename(tmp_path / f"polyad-{owner + 1}")
        monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    build = Build(tmp_path / "notes")
    arrays, _ = EpochOrders(build, SAMPLES, "a")(3)
    assert not isinstance(arrays["numbers"], np.memmap)
    assert build.made() == [0]


def test_samples_from_files_are_those_from_memory(prepared, monkeypatch, place):
    stream = prepared.split("train")
    mapped = TrainingSamples(stream, 64, 5)
    count = 2 * mapped.samples_per_epoch + 3
    from_files = [mapped[number] for number in range(count)]
    assert list(place.glob("*-2"))
    monkeypatch.setattr(order, "SMALL", 10**9)
    from_memory = TrainingSamples(stream, 64, 5)
    for number in range(count):
        assert (from_memory[number] == from_files[number]).all()
        assert from_memory.documents(number) == mapped.documents(number)
