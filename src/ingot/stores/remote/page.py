"""Pages of web servers, by urllib: obstore takes no answer without a length, and nginx's lists of folders have none."""

from __future__ import annotations

from collections.abc import Mapping
from http.client import HTTPException
from urllib.error import HTTPError
from urllib.request import (
    HTTPDefaultErrorHandler,
    HTTPErrorProcessor,
    HTTPHandler,
    HTTPRedirectHandler,
    HTTPSHandler,
    OpenerDirector,
    ProxyHandler,
    Request,
)

# No handler of ftp:, file: or data: is among them: a redirect to one leads nowhere.
_HANDLERS = (
    ProxyHandler,
    HTTPHandler,
    HTTPSHandler,
    HTTPRedirectHandler,
    HTTPDefaultErrorHandler,
    HTTPErrorProcessor,
)


def read_page(url: str, headers: Mapping[str, str], most: int, timeout: float) -> tuple[str, bytes]:
    """Return a page: its media type, and its first ``most`` bytes.

    Parameters
    ----------
    headers : mapping
        Sent to this address only, not to one that it redirects to.
    timeout : float
        Seconds without a byte.

    Raises
    ------
    urllib.error.HTTPError
        An answer with an error; an ``OSError``.
    OSError
        No answer, or half of one.
    """
    opener = OpenerDirector()
    for handler in _HANDLERS:
        opener.add_handler(handler())
    request = Request(url, headers={"User-Agent": "ingot"})  # noqa: S310 - the handlers decide
    for name, value in headers.items():
        request.add_unredirected_header(name, value)
    try:
        with opener.open(request, timeout=timeout) as answer:
            return answer.headers.get_content_type(), answer.read(most)
    except HTTPError as error:
        error.close()
        raise
    except HTTPException as error:
        raise OSError(type(error).__name__) from error
