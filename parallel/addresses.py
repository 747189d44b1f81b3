"""Which addresses of this host the processes of a run listen on: as few as the others need."""

import ipaddress
import os
import socket

import psutil

STORE = "POLYAD_STORE"
"""The environment variable that names the file of a host's own store, in a folder of its own."""
LOOPBACK = "127.0.0.1"


def is_one_host() -> bool:
    """Whether all processes are on this host, as far as the environment tells."""
    world = os.environ.get("WORLD_SIZE", "1")
    return STORE in os.environ or world in ("1", os.environ.get("LOCAL_WORLD_SIZE"))


def stay_on_loopback() -> None:
    """Makes gloo and NCCL listen on loopback, if all processes are on this host.

    An interface that the environment names is left as it is.
    """
    if not is_one_host():
        return
    for name in psutil.net_if_addrs():
        if LOOPBACK in addresses_of(name):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")
            return


def listener(host: str, port: int) -> socket.socket | None:
    """A socket that listens on one address of this host alone.

    Args:
        host: an address, or a name.
        port: 0 takes a free one.

    Returns:
        None where it is not certain that the others come by this address: a name may be another
        address for them, unless an interface is named. Then torch listens on all.
    """
    address = _address_of(host)
    if address is None:
        return None
    listening = socket.socket(
        socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM
    )
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((address, port))
        listening.listen(socket.SOMAXCONN)
    except OSError:  # not of this host, as a service's of Kubernetes: torch says what is wrong
        listening.close()
        return None
    return listening


def _address_of(host: str) -> str | None:
    if host == "localhost":
        return LOOPBACK
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        if named_interface() is None:
            return None
    try:
        resolved = {str(each[4][0]) for each in socket.getaddrinfo(host, None)}
    except OSError:
        return None
    here = {address for name in psutil.net_if_addrs() for address in addresses_of(name)}
    found = [each for each in resolved & here if not ipaddress.ip_address(each).is_loopback]
    return found[0] if len(found) == 1 else None


def named_interface() -> str | None:
    """The network interface that the environment names for gloo, if it is one."""
    name = os.environ.get("GLOO_SOCKET_IFNAME")
    return name if name in psutil.net_if_addrs() else None


def addresses_of(interface: str) -> list[str]:
    """The IPv4 addresses of a network interface of this host; empty if there is none."""
    found = psutil.net_if_addrs().get(interface, [])
    return [each.address for each in found if each.family == socket.AF_INET]
