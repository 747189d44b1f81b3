"""Hostfiles: which lines are hosts, and which hosts a run gets."""

from pathlib import Path

import pytest

from polyad.launch.via.hostfile import HostSlots, chosen_hosts, read_hostfile
from polyad.launch.via.hosts import LaunchError
from tests.launch.via.test_hosts import SHELL

ONE_LINE = [text for text in SHELL if "\n" not in text]
THREE = [HostSlots("a", 2), HostSlots("b", 2), HostSlots("c", 2)]


def hostfile(folder: Path, text: str) -> Path:
    path = folder / "hosts"
    path.write_text(text)
    return path


def test_lines_are_hosts_slots_and_comments(tmp_path: Path) -> None:
    text = "# ours\nnode-1 slots=8\n\n  10.0.0.2\tslots=8  # the new one\nfe80::1\n"
    assert read_hostfile(hostfile(tmp_path, text)) == [
        *(HostSlots("node-1", 8), HostSlots("10.0.0.2", 8), HostSlots("fe80::1", None)),
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["names no host"]),
        ("# nothing\n", ["names no host"]),
        ("a slots=8\nb slots=two\n", ["line 2", "'slots=two'", "slots=N"]),
        ("a slots=0\n", ["line 1", "slots=0", "1 to 1024"]),
        ("a slots=2000\n", ["slots=2000"]),
        ("a 8\n", ["line 1", "'8'"]),
        ("a slots=2 port=22\n", ["'slots=2 port=22'"]),
        ("a:8\n", ["line 1", "'a:8' is not a host"]),
        ("a slots=2\na slots=2\n", ["line 2", "'a'", "second time"]),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, text: str, words: list[str]) -> None:
    with pytest.raises(LaunchError) as caught:
        read_hostfile(hostfile(tmp_path, text))
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    assert all(word in message for word in ["--hostfile", *words]), message


@pytest.mark.parametrize(
    "host", ["-oProxyCommand=id", "user@host", "a,b", "[::1]", "a_b", *ONE_LINE]
)
def test_a_name_that_a_shell_or_ssh_would_read_is_no_host(tmp_path: Path, host: str) -> None:
    with pytest.raises(LaunchError):
        read_hostfile(hostfile(tmp_path, f"{host} slots=2\n"))


def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"--hostfile: .*none cannot be read: No such file"):
        read_hostfile(tmp_path / "none")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(LaunchError, match="is not text"):
        read_hostfile(tmp_path / "bytes")


@pytest.mark.parametrize(
    ("nodes", "processes", "expected"),
    [
        (None, None, (["a", "b", "c"], 2)),
        (2, None, (["a", "b"], 2)),
        (None, 1, (["a", "b", "c"], 1)),
    ],
)
def test_a_run_gets_the_first_hosts(
    nodes: int | None, processes: int | None, expected: tuple[list[str], int]
) -> None:
    assert chosen_hosts(THREE, Path("hosts"), nodes, processes) == expected


@pytest.mark.parametrize(
    ("hosts", "nodes", "processes", "words"),
    [
        (THREE, 4, None, ["--nodes: 4", "3 hosts"]),
        (THREE, None, 3, ["--processes-per-node: 3", "a 2 slots"]),
        ([*THREE, HostSlots("d", 4)], None, None, ["d has 4 slots and a 2", "equal"]),
        ([*THREE, HostSlots("d", None)], None, None, ["--processes-per-node: is missing", "d"]),
    ],
)
def test_hosts_that_are_too_few_or_unequal_are_refused(
    hosts: list[HostSlots], nodes: int | None, processes: int | None, words: list[str]
) -> None:
    with pytest.raises(LaunchError) as caught:
        chosen_hosts(hosts, Path("hosts"), nodes, processes)
    assert all(word in str(caught.value) for word in words), caught.value


def test_unequal_hosts_may_have_as_many_processes_as_the_smallest() -> None:
    assert chosen_hosts([*THREE, HostSlots("d", 4)], Path("hosts"), None, 2)[1] == 2
    assert chosen_hosts([*THREE, HostSlots("d", 4)], Path("hosts"), 3, None)[1] == 2
