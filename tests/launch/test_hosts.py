"""Names that reach other programs are checked, words of commands are quoted."""

import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyad.launch.agent import LaunchError, command_line, endpoint, host_name, plain_name
from polyad.launch.launch import interface_variables
from tests.helpers.refusals import line_of

SHELL = ("a;b", "a b", "$(id)", "`id`", "a|b", "a&b", "a>b", "a\nb", "a'b", 'a"b', "a\\b", "a*", "")
ARGUMENTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"))


REFUSED = {
    "--local-addr": (
        lambda name: host_name(name, "--local-addr"),
        *("-oProxyCommand=id", "-host", ".a", "no_de", "ä", "a" * 254, "１"),
        *("node1\n", "fe80::1%eth0;id", "::g", "node:1"),
    ),
    "--rdzv-endpoint": (
        lambda text: endpoint(text, "--rdzv-endpoint"),
        *("node:", "node:0", "node:65536", "node:port", "node:1;id", "node:-1", "node: 1"),
        *("node:1\n", ":29400", "-x:29400", "fd00::1", "[node]:1", "[::1", "[::1]x:1"),
        *("a b:1", "node:１"),
    ),
    "--rdzv-id": (
        lambda name: plain_name(name, "--rdzv-id"),
        *("-x", "a" * 65, "a/b", "a,b", "a=b", "a#b", "a%j"),
    ),
    "--interface": (interface_variables, "-x", "eth0,eth1", "=eth0", "^eth0", "a" * 16),
}
"""What makes use of a name, and names that are more than one; so is what a shell would read."""


@pytest.mark.parametrize(
    ("option", "call", "name"),
    [
        (option, call, name)
        for option, (call, *names) in REFUSED.items()
        for name in (*SHELL, *names)
    ],
)
def test_what_is_no_name_is_refused_by_its_option(option, call, name):
    assert line_of(LaunchError, call, name).startswith(f"{option}: ")


@pytest.mark.parametrize(
    "name", ["localhost", "node-1.cluster.example", "10.77.0.1", "fd00::1", "::1", "7"]
)
def test_a_host_name_passes(name):
    assert host_name(name, "--local-addr") == name


@pytest.mark.parametrize(
    ("text", "full"),
    [
        ("node-1", "node-1:29400"),
        ("10.0.0.1:65535", "10.0.0.1:65535"),
        ("[fd00::1]", "[fd00::1]:29400"),
        ("[::1]:29500", "[::1]:29500"),
    ],
)
def test_an_endpoint_has_a_host_and_a_port(text, full):
    assert endpoint(text, "--rdzv-endpoint") == full


def test_an_interface_is_handed_to_gloo_and_nccl():
    assert interface_variables(None) == {}
    # NCCL reads a bare name as a prefix.
    names = {"GLOO_SOCKET_IFNAME": "ib0.1", "NCCL_SOCKET_IFNAME": "=ib0.1"}
    assert interface_variables("ib0.1") == names


@given(texts=st.lists(ARGUMENTS, min_size=1, max_size=4), value=ARGUMENTS)
@settings(max_examples=60, deadline=None)
def test_any_text_comes_through_a_shell_unchanged(texts, value):
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
