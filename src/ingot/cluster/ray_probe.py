"""Whether a Ray cluster is named, and listens: Ray itself would try to connect for many minutes."""

from __future__ import annotations

import os
import socket

from ingot.errors import IngotError, ResourceError
from ingot.stores.local import LocalStore

WAIT = 10.0
"""Seconds for a connection, and for the first answer to it."""

# How a connection of HTTP/2, which Ray's servers speak, begins, and empty settings (RFC 9113, 3.4 and 6.5).
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
_HEAD, _SETTINGS = 9, 4

_CURRENT = "ray/ray_current_cluster"
_LARGEST = 1 << 12
_AUTO, _NONE = "auto", ("", "local")


def require_cluster(address: str | None) -> bool:
    """Return whether a cluster is named, and connect to it to see that it is one.

    Parameters
    ----------
    address : str, optional
        As ``ray.init`` takes it: host and port, ``ray://`` before them, ``auto``, ``local``. By default, and for
        ``auto``, the address of ``RAY_ADDRESS``, or of the file that ``ray start`` leaves.

    Raises
    ------
    ResourceError
        ``cluster.address``: nothing answers there within ``WAIT`` seconds, or not in HTTP/2; ``auto`` finds no address.
    """
    named, origin = _named(address)
    if named in _NONE:
        if address == _AUTO:
            raise refusal("found no address", address)
        return False
    target = _host_and_port(named)
    if target is None:  # an address of a scheme that only Ray can read
        return True
    try:
        with socket.create_connection(target, WAIT) as connection:
            speaks = os.environ.get("RAY_USE_TLS", "0") not in ("", "0") or _speaks(connection)
    except OSError as error:
        raise refusal(f"found none ({error})", named, origin) from error
    if not speaks:
        raise refusal("found something else", named, origin)
    return True


def refusal(reason: str, address: str | None, origin: str = "") -> ResourceError:
    """Return the error for an address without a cluster."""
    return ResourceError(
        f"expected a Ray cluster that answers{origin}, {reason}: start one by `ray start`, or give its --address",
        rule="cluster.address",
        where=address,
    )


def _named(address: str | None) -> tuple[str, str]:
    """Return the address that Ray takes, and words for its origin; nothing if Ray would start a cluster."""
    if address not in (None, "", _AUTO):
        return str(address), ""
    if variable := os.environ.get("RAY_ADDRESS", ""):
        return variable, ", as RAY_ADDRESS says"
    folder = LocalStore(os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp", "pread")  # noqa: S108 - as Ray
    try:
        text = folder.read(_CURRENT, _LARGEST, "cluster.address").decode()
    except (IngotError, UnicodeDecodeError):
        return "", ""
    return text.strip(), f", as {folder.location_of(_CURRENT)} says (`ray stop` removes it)"


def _host_and_port(address: str) -> tuple[str, int] | None:
    host, _, port = address.removeprefix("ray://").partition("/")[0].rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        return None
    return host.strip("[]"), int(port)


def _speaks(connection: socket.socket) -> bool:
    """Whether the other side answers with the settings of HTTP/2."""
    connection.sendall(_PREFACE)
    head = b""
    while len(head) < _HEAD:
        data = connection.recv(_HEAD - len(head))
        if not data:
            return False
        head += data
    return head[3] == _SETTINGS
