"""Addresses of other machines, taken apart; what is secret in them stays in this process.

A name and password before the host, and what follows a question mark (signed addresses), go into requests and nowhere
else: ``public`` is what messages, plans and journals have. An address that was used once is known here by its public
form, so that a file beside another one is found with the same credentials.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from urllib.parse import quote, unquote, urlsplit

from ingot.errors import UsageError

_NO_TEXT = re.compile("[\ud800-\udfff]")  # bytes that are no UTF-8: no request has such
_PORT = re.compile(r"[^\s/?#@\\]+\Z")


@dataclass(frozen=True, slots=True)
class Address:
    """One address: ``host`` (with the port; a bucket), ``path`` decoded and without slashes at its ends.

    ``folder`` tells whether it ended in a slash. ``user`` and ``query`` are secret.
    """

    scheme: str
    host: str
    path: str
    folder: bool = False
    user: str = field(default="", repr=False)
    query: str = field(default="", repr=False)

    @property
    def origin(self) -> str:
        """Scheme and host: whom credentials are for."""
        return f"{self.scheme}://{self.host}"

    @property
    def public(self) -> str:
        """The address without its secrets."""
        return f"{self.origin}/{quote(self.path)}".rstrip("/")

    @property
    def parent(self) -> Address:
        """The folder that the address lies in."""
        return replace(self, path=self.path.rpartition("/")[0], folder=True)

    @property
    def last(self) -> str:
        """The last name of the path."""
        return self.path.rpartition("/")[2]

    def within(self, name: str) -> Address:
        """Return the address of what is called ``name`` in this folder."""
        return replace(self, path=f"{self.path}/{name}".strip("/"), folder=False)


_USERS: dict[str, str] = {}  # by origin
_QUERIES: dict[str, str] = {}  # by public address


def address_of(text: str) -> Address:
    """Take an address apart.

    Raises ``UsageError`` ``store.url`` for one without a host, with a name that leads elsewhere, or a fragment.
    """
    try:
        parts = urlsplit(text)
    except ValueError:
        parts = urlsplit("")
    user, _, host = parts.netloc.rpartition("@")
    path = unquote(parts.path, errors="surrogateescape").lstrip("/")
    pieces = path.removesuffix("/").split("/") if path else []
    sound = _PORT.match(host) and not any(piece in ("", ".", "..") or "\0" in piece for piece in pieces)
    sound = sound and not _NO_TEXT.search(path)
    if not sound or parts.fragment or any("%2f" in piece.lower() for piece in parts.path.split("/")):
        raise UsageError(
            "expected an address as SCHEME://host/folder/file, with %23 and %3F for # and ? in names",
            rule="store.url",
            where=shown(text),
        )
    found = Address(parts.scheme.lower(), host, path.strip("/"), path.endswith("/") or not path, user, parts.query)
    return _remembered(found)


def shown(text: str) -> str:
    """Return an address for a message, as far as it is not secret."""
    scheme, colon, rest = text.partition("://")
    host = re.split(r"[/?#]", rest, maxsplit=1)[0]
    rest = rest[host.rfind("@") + 1 :] if "@" in host else rest
    return f"{scheme}{colon}{re.split(r'[?#]', rest, maxsplit=1)[0]}"[:200]


def _remembered(address: Address) -> Address:
    """Keep the secrets of an address, or find those of one that was given without."""
    if address.user:
        _USERS[address.origin] = address.user
    if address.query:
        _QUERIES[address.public] = _QUERIES[address.parent.public] = address.query
    return replace(
        address,
        user=address.user or _USERS.get(address.origin, ""),
        query=address.query or _QUERIES.get(address.public, _QUERIES.get(address.parent.public, "")),
    )
