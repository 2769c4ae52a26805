"""What went wrong with a request, in Ingot's words, which repeat neither addresses nor answers of servers."""

from __future__ import annotations

import re

from ingot.core.runtime.memory import format_size
from ingot.errors import IngotError, IntegrityError, ResourceError, UnsupportedError, UsageError
from ingot.stores.remote.pace import VARIABLE, minimum_rate

_STATUS = re.compile(r"status code: (\d{3})(?: ([A-Za-z -]+))?")
_CODE = re.compile(r"<Code>(\w{1,60})</Code>")


def missing(location: str) -> UsageError:
    """Return the error for a file that does not exist."""
    return UsageError("expected an existing file, found none", rule="store.missing", where=location)


def no_ranges(location: str) -> UnsupportedError:
    """Return the error for a server that does not answer ranges."""
    return UnsupportedError(
        "expected the range that was asked for, found a server that sends whole files or a page of its own: "
        "download the file first",
        rule="remote.no-ranges",
        where=location,
    )


def denied(text: str, location: str) -> ResourceError:
    """Return the error for credentials that a server refused; ``text`` may have an error code of S3 in it."""
    code = _CODE.search(text)
    label = f" ({code[1]})" if code else ""
    message = _DENIED.get(code[1] if code else "", _NO_ACCESS).format(code=label)
    return ResourceError(message, rule="store.denied", where=location)


def wrong_length(expected: int, location: str) -> IntegrityError:
    """Return the error for an answer with another number of bytes than was requested."""
    return IntegrityError(
        "remote.length",
        f"expected {expected} bytes, found another number of them in the server's answer",
        where=location,
    )


def too_slow(window: float, location: str) -> ResourceError:
    """Return the error for a server that sends less than the minimum rate."""
    return ResourceError(
        f"the server sent less than {format_size(minimum_rate())} a second for {window:g} seconds: try again later, or "
        f"set {VARIABLE} to fewer bytes per second",
        rule="remote.slow",
        where=location,
    )


def changed(location: str) -> IntegrityError:
    """Return the error for a file that changed since it was opened."""
    return IntegrityError(
        "store.changed",
        "expected the file as it was when it was opened first, found another version of it; open it again",
        where=location,
    )


def status_of(text: str) -> int:
    """Return the HTTP status in obstore's message; 0 if there is none."""
    match = _STATUS.search(text)
    return int(match[1]) if match else 0


def is_denied(text: str) -> bool:
    """Whether an answer with status 400 is about credentials: S3's to expired ones are. One to HEAD has no code."""
    code = _CODE.search(text)
    return code[1] in _DENIED if code else "performing HEAD" in text


_NO_ACCESS = "the server gives no access{code}: check the credentials, and whether they or a signed address expired"
_EXPIRED = "the credentials have expired{code}: renew them"
_SKEWED = "the server's clock and this machine's differ too much{code}: set the clock"
# Codes of S3's errors, which come with status 400 or 403:
# https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html
_DENIED = {
    "ExpiredToken": _EXPIRED,
    "TokenRefreshRequired": _EXPIRED,
    "InvalidToken": _NO_ACCESS,
    "RequestTimeTooSkewed": _SKEWED,
    "AuthorizationHeaderMalformed": "the server does not take the signature{code}: check the region (AWS_REGION)",
}
# Where machines and containers of a cloud ask for their credentials: obstore does, where the environment has none.
SERVICES = re.compile(r"//169\.254\.\d+\.\d+/|//metadata\.google\.internal/")
_NO_CREDENTIALS = "no credentials were found, or the service that gives them did not answer: see spec/remote.md"
# What obstore's message has in it, in this order: rule, message.
_FAILURES: tuple[tuple[str, str, str], ...] = (
    (SERVICES.pattern, "store.denied", _NO_CREDENTIALS),
    (
        r"status code: 3\d\d|redirect",
        "remote.redirect",
        (
            "expected the file, found a redirect that leads nowhere: to another kind of address, in a circle, or, of a "
            "bucket, to another region (AWS_REGION)"
        ),
    ),
    (r"status code: ", "remote.failed", "the server answered with {status}; try again later"),
    (r"timedout|timed out", "remote.stalled", "the server sent no byte for {stall:g} seconds"),
    (
        r"certificate",
        "remote.certificate",
        (
            "the server's certificate is not one that this machine trusts; check the address and the clock, or name a "
            "file with the certificate of its authority in SSL_CERT_FILE"
        ),
    ),
    (r"credential|token", "store.denied", _NO_CREDENTIALS),
    (
        "",
        "remote.failed",
        "the server cannot be reached, or broke the connection; check the address and the network",
    ),
)


def failed(error: Exception, text: str, location: str, stall: float) -> IngotError:
    """Return the error for a request that failed; ``text`` is the library's message, or ``status code: N``."""
    low = "timed out" if isinstance(error, TimeoutError) else text.lower()
    if "unexpectedrange" in low:
        return IntegrityError("remote.length", "expected the range that was asked for, found another", where=location)
    match = _STATUS.search(text)
    status = f"status {match[1]} {(match[2] or '').strip()}".strip() if match else ""
    rule, message = next(answer for sign, *answer in _FAILURES if re.search(sign, low))
    return ResourceError(message.format(status=status, stall=stall), rule=rule, where=location)
