"""Errors for failed requests; their messages contain no secrets and no answers of servers."""

from __future__ import annotations

import re

from ingot.core.runtime.memory import format_size
from ingot.errors import IngotError, IntegrityError, ResourceError, UnsupportedError, UsageError
from ingot.stores.remote.pace import VARIABLE, minimum_rate

_STATUS = re.compile(r"status code: (\d{3})(?: ([A-Za-z -]+))?")
_CODE = re.compile(r"<Code>(\w{1,60})</Code>")


def missing(location: str) -> UsageError:
    """Return the error for a file that does not exist."""
    return UsageError("this file does not exist", rule="store.missing", where=location)


def no_ranges(location: str) -> UnsupportedError:
    """Return the error for a server that does not support requests for ranges."""
    return UnsupportedError(
        "the server does not send the requested range, but the full file or another page: download the file first",
        rule="remote.no-ranges",
        where=location,
    )


def denied(text: str, location: str) -> ResourceError:
    """Return the error for credentials that a server refused; ``text`` may contain an error code of S3."""
    code = _CODE.search(text)
    label = f" ({code[1]})" if code else ""
    message = _DENIED.get(code[1] if code else "", _NO_ACCESS).format(code=label)
    return ResourceError(message, rule="store.denied", where=location)


def wrong_length(expected: int, location: str) -> IntegrityError:
    """Return the error for an answer whose number of bytes differs from the request."""
    return IntegrityError(
        "remote.length",
        f"expected {expected} bytes, found a different number in the server's answer",
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
        "the file has changed since it was opened; open it again",
        where=location,
    )


def status_of(text: str) -> int:
    """Return the HTTP status in obstore's message; 0 if it contains none."""
    match = _STATUS.search(text)
    return int(match[1]) if match else 0


def is_denied(text: str) -> bool:
    """Return whether an answer with status 400 means refused credentials; S3 answers so if they expired.

    An answer to HEAD has no error code, and counts as refused credentials.
    """
    code = _CODE.search(text)
    return code[1] in _DENIED if code else "performing HEAD" in text


_NO_ACCESS = "the server gives no access{code}: check the credentials, and whether they or a signed address expired"
_EXPIRED = "the credentials have expired{code}: renew them"
_SKEWED = "the server's clock and this machine's differ too much{code}: set the clock"
# Error codes of S3, sent with status 400 or 403:
# https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html
_DENIED = {
    "ExpiredToken": _EXPIRED,
    "TokenRefreshRequired": _EXPIRED,
    "InvalidToken": _NO_ACCESS,
    "RequestTimeTooSkewed": _SKEWED,
    "AuthorizationHeaderMalformed": "the server refuses the signature{code}: check the region (AWS_REGION)",
}
# Services that give credentials to machines of a cloud; obstore calls them if the environment has no credentials.
SERVICES = re.compile(r"//169\.254\.\d+\.\d+/|//metadata\.google\.internal/")
_NO_CREDENTIALS = "no credentials were found, or the service that gives them did not answer: see spec/remote.md"
# rows: pattern of obstore's message, rule, message; the first matching row applies
_FAILURES: tuple[tuple[str, str, str], ...] = (
    (SERVICES.pattern, "store.denied", _NO_CREDENTIALS),
    (
        r"status code: 3\d\d|redirect",
        "remote.redirect",
        (
            "the server answered with a redirect that cannot be followed: to an address that is not http(s), in a "
            "circle, or for a bucket to another region (AWS_REGION)"
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
    """Return the error for a failed request; ``text`` is the library's message, or ``status code: N``."""
    low = "timed out" if isinstance(error, TimeoutError) else text.lower()
    if "unexpectedrange" in low:
        return IntegrityError("remote.length", "the server sent a range that was not requested", where=location)
    match = _STATUS.search(text)
    status = f"status {match[1]} {(match[2] or '').strip()}".strip() if match else ""
    rule, message = next(answer for sign, *answer in _FAILURES if re.search(sign, low))
    return ResourceError(message.format(status=status, stall=stall), rule=rule, where=location)
