"""The addresses of this host on which a run's processes listen: as few as the others need."""

import ipaddress
import os
import socket

import psutil

STORE = "POLYAD_STORE"
"""The environment variable with the path of a host's own store, in a folder of its own."""
LOOPBACK = "127.0.0.1"


def is_one_host() -> bool:
    """Returns whether all processes are on this host, according to the environment."""
    world = os.environ.get("WORLD_SIZE", "1")
    return STORE in os.environ or world in ("1", os.environ.get("LOCAL_WORLD_SIZE"))


def stay_on_loopback() -> None:
    """Makes gloo and NCCL listen on loopback, if all processes are on this host.

    An interface that the environment names is not changed.
    """
    if not is_one_host():
        return
    for name in psutil.net_if_addrs():
        if LOOPBACK in addresses_of(name):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")
            return


def listener(host: str, port: int) -> socket.socket | None:
    """Opens a socket that listens on one address of this host only.

    Args:
        host: an address, or a name.
        port: the port; 0 for a free one.

    Returns:
        None if it is not certain that the others use this address: a name may resolve to another
        address for them, unless an interface is named. torch then listens on all addresses.
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
    except OSError:  # not on this host, such as a Kubernetes service: torch reports the error
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
    """Returns the network interface that the environment names for gloo, if it is a single one."""
    name = os.environ.get("GLOO_SOCKET_IFNAME")
    return name if name in psutil.net_if_addrs() else None


def addresses_of(interface: str) -> list[str]:
    """Returns the IPv4 addresses of a network interface of this host; empty if there is none."""
    found = psutil.net_if_addrs().get(interface, [])
    return [each.address for each in found if each.family == socket.AF_INET]
