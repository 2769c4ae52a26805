"""Parsed remote addresses, whose secrets stay in this process.

A user name and password before the host, and the query of a signed address, are sent in requests only. Messages, plans
and journals contain ``Address.public``. This module stores the secrets of each address by its public form, so that
other files of the same folder are read with the same credentials.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from urllib.parse import quote, unquote, urlsplit

from ingot.errors import UsageError

_NO_TEXT = re.compile("[\ud800-\udfff]")  # bytes that are not UTF-8 cannot be sent in a request
_PORT = re.compile(r"[^\s/?#@\\]+\Z")


@dataclass(frozen=True, slots=True)
class Address:
    """A parsed remote address: scheme, host, path, and the user's secrets.

    ``host`` is a host with its port, or a bucket. ``path`` is decoded and has no slashes at its ends; ``folder`` is set
    if the address ended in a slash. ``user`` and ``query`` are secret.
    """

    scheme: str
    host: str
    path: str
    folder: bool = False
    user: str = field(default="", repr=False)
    query: str = field(default="", repr=False)

    @property
    def origin(self) -> str:
        """The scheme and host, to which credentials are restricted."""
        return f"{self.scheme}://{self.host}"

    @property
    def public(self) -> str:
        """The address without its secrets."""
        return f"{self.origin}/{quote(self.path)}".rstrip("/")

    @property
    def parent(self) -> Address:
        """The folder that contains this file or folder."""
        return replace(self, path=self.path.rpartition("/")[0], folder=True)

    @property
    def last(self) -> str:
        """The last component of ``path``: the name of the file or folder."""
        return self.path.rpartition("/")[2]

    def within(self, name: str) -> Address:
        """Return the address of the file or folder ``name`` in this folder."""
        return replace(self, path=f"{self.path}/{name}".strip("/"), folder=False)


_USERS: dict[str, str] = {}  # by origin
_QUERIES: dict[str, str] = {}  # by public address


def address_of(text: str) -> Address:
    """Parse an address, and add secrets of earlier addresses to it.

    Raises ``UsageError`` ``store.url`` if it has no host, a name such as ``..``, or a fragment.
    """
    try:
        parts = urlsplit(text)
    except ValueError:
        parts = urlsplit("")
    user, _, host = parts.netloc.rpartition("@")
    path = unquote(parts.path, errors="surrogateescape").lstrip("/")
    names = path.removesuffix("/").split("/") if path else []
    valid = _PORT.match(host) and not any(name in ("", ".", "..") or "\0" in name for name in names)
    valid = valid and not _NO_TEXT.search(path)
    if not valid or parts.fragment or "%2f" in parts.path.lower():
        raise UsageError(
            "expected an address as SCHEME://host/folder/file, with %23 and %3F for # and ? in names",
            rule="store.url",
            where=without_secrets(text),
        )
    is_folder = path.endswith("/") or not path
    return _with_secrets(Address(parts.scheme.lower(), host, path.strip("/"), is_folder, user, parts.query))


def without_secrets(text: str) -> str:
    """Return an address for a message, without user, password and query; the text need not be a valid address."""
    scheme, colon, after = text.partition("://")
    host = re.split(r"[/?#]", after, maxsplit=1)[0]
    public = after[host.rfind("@") + 1 :] if "@" in host else after
    return f"{scheme}{colon}{re.split(r'[?#]', public, maxsplit=1)[0]}"[:200]


def _with_secrets(address: Address) -> Address:
    """Store the secrets of an address; add stored secrets to an address without any."""
    if address.user:
        _USERS[address.origin] = address.user
    if address.query:
        _QUERIES[address.public] = _QUERIES[address.parent.public] = address.query
    return replace(
        address,
        user=address.user or _USERS.get(address.origin, ""),
        query=address.query or _QUERIES.get(address.public, _QUERIES.get(address.parent.public, "")),
    )
