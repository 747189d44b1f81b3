"""Names that reach other programs are checked, words of commands are quoted; hostfiles."""

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyad.launch.via.agent import Rendezvous
from polyad.launch.via.command import interface_variables
from polyad.launch.via.hosts import (
    HostSlots,
    LaunchError,
    chosen_hosts,
    command_line,
    endpoint,
    host_name,
    plain_name,
    read_hostfile,
)
from polyad.launch.via.remote import look
from polyad.launch.via.ssh_hosts import _answer

SHELL = ("a;b", "a b", "$(id)", "`id`", "a|b", "a&b", "a>b", "a\nb", "a'b", 'a"b', "a\\b", "a*", "")
ARGUMENTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"))


@pytest.mark.parametrize(
    "name", ["localhost", "node-1", "node-1.cluster.example", "10.77.0.1", "a" * 63, "7"]
)
def test_a_host_name_passes(name: str) -> None:
    assert host_name(name, "--local-addr") == name


@pytest.mark.parametrize(
    "name",
    [
        *(*SHELL, "-oProxyCommand=id", "-host", "host-", "a..b", ".a", "a."),
        *("no_de", "ä", "a" * 64),
        *(".".join(["a" * 60] * 5), "node1\n", "fe80::1%eth0;id", "fe80::1%eth0", "::g", "１"),
    ],
)
def test_another_host_name_is_refused_by_option_and_value(name: str) -> None:
    with pytest.raises(LaunchError, match=r"^--local-addr: ") as caught:
        host_name(name, "--local-addr")
    assert repr(name) in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "full"),
    [
        ("node-1", "node-1:29400"),
        ("node-1:1", "node-1:1"),
        ("10.0.0.1:65535", "10.0.0.1:65535"),
        ("[fd00::1]", "[fd00::1]:29400"),
        ("[::1]:29500", "[::1]:29500"),
    ],
)
def test_an_endpoint_has_a_host_and_a_port(text: str, full: str) -> None:
    assert endpoint(text, "--rdzv-endpoint") == full


@pytest.mark.parametrize(
    "text",
    [
        *("node:", "node:0", "node:65536", "node:port", "node:1;id", "node:-1", "node: 1"),
        *("node:1\n", ":29400", "-x:29400", "fd00::1", "[node]:1", "[::1", "[::1]x:1"),
        *("a b:1", "node:１", *SHELL),
    ],
)
def test_another_endpoint_is_refused(text: str) -> None:
    with pytest.raises(LaunchError, match=r"^--rdzv-endpoint: ") as caught:
        Rendezvous(endpoint=text)
    assert len(str(caught.value).splitlines()) == 1


def test_an_address_without_brackets_is_named_whole() -> None:
    with pytest.raises(LaunchError, match=r"--rdzv-endpoint: '::1' .*brackets.*\[::1\]:29400"):
        Rendezvous(endpoint="::1")


@pytest.mark.parametrize("name", [*SHELL, "-x", "a" * 65, "a/b", "a,b", "a=b", "a#b", "a%j"])
def test_a_name_that_stands_unquoted_has_no_special_characters(name: str) -> None:
    with pytest.raises(LaunchError, match=r"^--partition: "):
        plain_name(name, "--partition")
    with pytest.raises(LaunchError, match=r"^--rdzv-id: "):
        Rendezvous(id=name)


def test_an_interface_is_handed_to_gloo_and_nccl() -> None:
    assert interface_variables(None) == {}
    # NCCL reads a bare name as a prefix.
    assert interface_variables("ib0.1") == {
        "GLOO_SOCKET_IFNAME": "ib0.1",
        "NCCL_SOCKET_IFNAME": "=ib0.1",
    }
    for name in (*SHELL, "-x", "eth0,eth1", "=eth0", "^eth0", "a" * 16):
        with pytest.raises(LaunchError, match=r"^--interface: "):
            interface_variables(name)


@given(texts=st.lists(ARGUMENTS, min_size=1, max_size=4), value=ARGUMENTS)
@settings(max_examples=60, deadline=None)
def test_any_text_comes_through_a_shell_unchanged(texts: list[str], value: str) -> None:
    words = ["printf", r"%s\0", *texts]
    line = command_line(words, {"EXTRA": value})
    subprocess.run(["bash", "-n", "-c", line], check=True)
    done = subprocess.run(["bash", "-c", line], check=True, capture_output=True)
    assert done.stdout.decode().split("\0")[:-1] == words[2:]
    shown = subprocess.run(
        ["bash", "-c", command_line(["bash", "-c", 'printf %s "$EXTRA"'], {"EXTRA": value})],
        **{"check": True, "capture_output": True},
    )
    assert shown.stdout.decode() == value


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("", "it ended without an answer"),
        ("\n \n", "it ended without an answer"),
        ("Welcome to node-1", "it answered 'Welcome to node-1'"),
        ("[1]", "it answered '[1]'"),
        ('{"name": "a"}', """it answered '{"name": "a"}'"""),
        ("[" * 100_000, "it answered '"),
    ],
)
def test_a_host_whose_answer_is_none_says_why(said: str, why: str) -> None:
    answer = str(_answer(said))
    assert answer.startswith(why)
    assert len(answer) < 250


def test_an_answer_may_follow_what_a_login_prints() -> None:
    answer = look("localhost", 29400, ["none.yaml"])
    assert _answer(f"Welcome\n{json.dumps(asdict(answer))}\n") == answer


def test_a_host_answers_without_importing_what_trains() -> None:
    """Each start asks all hosts twice; torch alone would take seconds each time."""
    code = "import sys, polyad.launch.via.remote; print({'torch', 'pydantic'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "set()\n"


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
        ("a slots=2\na slots=2\n", ["line 2", "'a'", "listed twice"]),
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
        (THREE, None, 3, ["--processes-per-node: 3", "a only 2 slots"]),
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
