"""The client of one repository of a registry, by the OCI distribution protocol (``spec/registries.md``)."""

from __future__ import annotations

import hashlib
import json
import re
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from http.client import HTTPException
from ipaddress import ip_address
from os import environ
from typing import Any
from urllib.parse import quote, urlencode, urljoin, urlsplit

from ingot.core.bytes import checksums
from ingot.errors import FormatError, IngotError, IntegrityError, ResourceError
from ingot.stores.registry.credentials import DOCKER_HUB, login_of
from ingot.stores.registry.manifest import ACCEPTED, MANIFEST, MAX_MANIFEST, Blob
from ingot.stores.remote import client as settings
from ingot.stores.remote.failures import missing, wrong_length
from ingot.stores.remote.http import PRINTABLE, Answer, Body, origin_of
from ingot.stores.remote.web import ERROR_BODY, StatusError, WebClient

PLAIN_HTTP = "INGOT_REGISTRY_HTTP"
"""The variable with the hosts, separated by commas, that are reached without TLS, besides this machine."""

_API = {DOCKER_HUB: "registry-1.docker.io"}
_PARAMETER = re.compile(r'(\w+)="([^"]*)"')
_CODE = re.compile(r"[A-Z_]{1,40}")
_MAX_TOKEN = 1 << 20
_COMMIT_SECONDS = 900.0  # a registry may move a large blob to its final place before it answers
_SAFE = "/:@"


class RegistryClient(WebClient):
    """Reads and writes the blobs and manifests of one repository.

    A key is a path below the host, as in ``RangeClient``. Blobs never change. Credentials are looked up when the
    registry requires them, and are sent only to the registry and its token server.

    Parameters
    ----------
    host : str
        The host, with its port if the address states one.
    repository : str
    login : str
        ``name:password`` from the address. If it is empty, ``credentials.login_of`` determines the login.
    writing : bool
        Whether to request the right to push.
    """

    def __init__(self, host: str, repository: str, login: str = "", *, writing: bool = False) -> None:
        scheme = "http" if _is_plain(host) else "https"
        super().__init__(f"{scheme}://{_API.get(host, host)}", {}, immutable=True)
        self._host = host
        self._repository = repository
        self._login = login
        self._actions = "pull,push" if writing else "pull"

    def blob_key(self, digest: str) -> str:
        """Return the key of a blob."""
        return f"v2/{self._repository}/blobs/{digest}"

    def manifest(self, reference: str) -> tuple[bytes, str]:
        """Return the bytes of a manifest, and their digest.

        Parameters
        ----------
        reference : str
            A tag or a digest.

        Raises
        ------
        UsageError
            ``store.missing``.
        IntegrityError
            ``registry.digest``: the digest of the bytes differs from ``reference``, or from the registry's header.
        FormatError
            ``registry.manifest``: more than 4 MiB.
        ResourceError
            The errors of ``RangeClient.open``; ``registry.credentials``.
        """
        key = f"v2/{self._repository}/manifests/{reference}"
        return self._with_retries(key, lambda: self._manifest(key, reference))

    def blob(self, blob: Blob, limit: int) -> bytes:
        """Return the bytes of a small blob, after comparing size and digest.

        Raises ``FormatError`` ``registry.manifest`` above ``limit``, ``IntegrityError`` ``registry.size`` or
        ``registry.digest``, and the errors of ``open``.
        """
        location = self._locate(self.blob_key(blob.digest))
        if blob.size > limit:
            raise FormatError("registry.manifest", f"expected at most {limit} bytes, found {blob.size}", where=location)
        if not blob.size:
            return b""
        opened = self.open(self.blob_key(blob.digest), limit)
        blob.check_size(opened.stamp.size, location)
        blob.check(checksums.digest("sha256", opened.head), location)
        return opened.head

    def has(self, blob: Blob) -> bool:
        """Return whether the repository has a blob.

        Raises ``IntegrityError`` ``registry.size`` if it has one of this digest and another size.
        """
        key = self.blob_key(blob.digest)
        size = self._with_retries(key, lambda: self._size(key))
        if size is not None:
            blob.check_size(size, self._locate(key))
        return size is not None

    def upload(self, blob: Blob, chunks: Callable[[], Iterable[bytes | memoryview]]) -> None:
        """Upload a blob by one request, and check that the repository then has it.

        Parameters
        ----------
        blob : Blob
        chunks : callable
            Returns all bytes in chunks. It is called again if the upload is repeated.

        Raises
        ------
        IntegrityError
            ``store.changed``: the bytes no longer have the digest; ``registry.size``, ``registry.digest``.
        ResourceError
            ``registry.refused``, ``registry.upload``, and the errors of ``RangeClient.open``.
        """
        key = self.blob_key(blob.digest)
        self._with_retries(key, lambda: self._put_blob(key, blob, chunks))
        if not self.has(blob):
            raise IntegrityError("registry.digest", "the registry lost the uploaded bytes", where=self._locate(key))

    def put_manifest(self, reference: str, data: bytes) -> str:
        """Store a manifest under a tag, read it back to compare it, and return its digest.

        Raises ``IntegrityError`` ``registry.digest``, ``ResourceError`` ``registry.refused``, and the errors of
        ``manifest``.
        """
        key = f"v2/{self._repository}/manifests/{reference}"
        self._with_retries(key, lambda: self._put_manifest(key, data))
        stored, digest = self.manifest(reference)
        if stored != data:
            raise IntegrityError(
                "registry.digest", "the registry returns another manifest than was stored", where=self._locate(key)
            )
        return digest

    def _manifest(self, key: str, reference: str) -> tuple[bytes, str]:
        location = self._locate(key)
        with self._request(key, {"Accept": ACCEPTED}) as answer:
            if answer.status != 200:
                raise StatusError(answer.status, answer.read(ERROR_BODY))
            data = answer.read(MAX_MANIFEST + 1)
            length = answer.headers.get("Content-Length")
            declared = answer.headers.get("Docker-Content-Digest") or ""
        if len(data) > MAX_MANIFEST:
            raise FormatError("registry.manifest", f"expected at most {MAX_MANIFEST} bytes", where=location)
        if length is not None and length != str(len(data)):
            raise wrong_length(len(data), location)
        digest = checksums.digest("sha256", data)
        expected = reference if reference.startswith("sha256:") else declared
        if expected.startswith("sha256:"):
            checksums.check(expected, digest, "registry.digest", location, subject="the bytes of the manifest")
        return data, digest

    def _size(self, key: str) -> int | None:
        with self._send("HEAD", self._url(key), {}) as answer:
            answer.read(ERROR_BODY)
            if answer.status == 404:
                return None
            if answer.status != 200:
                raise StatusError(answer.status)
            length = answer.headers.get("Content-Length") or ""
        if not re.fullmatch(r"\d{1,18}", length, re.ASCII):
            raise wrong_length(0, self._locate(key))
        return int(length)

    def _put_blob(self, key: str, blob: Blob, chunks: Callable[[], Iterable[bytes | memoryview]]) -> None:
        running = hashlib.sha256()

        def body() -> Iterable[bytes | memoryview]:
            nonlocal running
            running = hashlib.sha256()
            for chunk in chunks():
                running.update(chunk)
                yield chunk

        with self._send("POST", self._url(f"v2/{self._repository}/blobs/uploads/"), {}) as answer:
            if answer.status != 202:
                raise StatusError(answer.status, answer.read(ERROR_BODY))
            answer.read(ERROR_BODY)
            target = self._upload_target(answer.headers.get("Location"))
        target += ("&" if urlsplit(target).query else "?") + urlencode({"digest": blob.digest})
        headers = {"Content-Type": "application/octet-stream", "Content-Length": str(blob.size)}
        with self._send("PUT", target, headers, body, _COMMIT_SECONDS) as answer:
            if f"sha256:{running.hexdigest()}" != blob.digest:
                message = "the file changed while it was uploaded; push it again"
                raise IntegrityError("store.changed", message, where=self._locate(key))
            if answer.status != 201:
                raise StatusError(answer.status, answer.read(ERROR_BODY))
            answer.read(ERROR_BODY)

    def _put_manifest(self, key: str, data: bytes) -> None:
        headers = {"Content-Type": MANIFEST, "Content-Length": str(len(data))}
        with self._send("PUT", self._url(key), headers, lambda: [data]) as answer:
            if answer.status != 201:
                raise StatusError(answer.status, answer.read(ERROR_BODY))
            answer.read(ERROR_BODY)

    def _upload_target(self, location: str | None) -> str:
        """Return the address for the bytes of an upload, which must be on the registry's host."""
        target = urljoin(f"{self.location}/", quote((location or "").strip(), safe=PRINTABLE))
        try:
            is_same = bool(location) and origin_of(target) == origin_of(self.location)
        except (KeyError, ValueError):
            is_same = False
        if not is_same:
            raise ResourceError(
                "the registry names another server for the upload: check its settings (the host name, TLS)",
                rule="registry.upload",
                where=self.location,
            )
        return target

    def _url(self, key: str) -> str:
        return f"{self.location}/{quote(key, safe=_SAFE)}"

    def _request(self, key: str, headers: Mapping[str, str]) -> Answer:
        return self._send("GET", self._url(key), headers)

    def _send(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: Body | None = None,
        seconds: float | None = None,
    ) -> Answer:
        """Send a request and return the answer. If the registry requires credentials, send it again with them."""
        timeout = seconds or settings.STALL
        answer = self._connections.request(method, url, headers, self._headers, timeout, body)
        if answer.status != 401 or answer.origin != origin_of(self.location):
            return answer  # a server that a redirect leads to gets no credentials
        with answer, suppress(OSError, HTTPException):
            answer.read(ERROR_BODY)
        self._headers = self._authorization(answer.headers.get("WWW-Authenticate") or "")
        return self._connections.request(method, url, headers, self._headers, timeout, body)

    def _authorization(self, challenge: str) -> dict[str, str]:
        """Return the header that answers a challenge: a bearer token, or name and password."""
        login = self._login or login_of(self._host)
        basic = {"Authorization": f"Basic {b64encode(login.encode()).decode()}"} if login else {}
        if not challenge.lower().startswith("bearer"):
            return basic
        parameters = dict(_PARAMETER.findall(challenge))
        realm = parameters.get("realm", "")
        if not realm.startswith("https://") and not (realm.startswith("http://") and _is_plain(self._host)):
            raise ResourceError(
                "the registry asks for credentials at an address without TLS", rule="registry.realm", where=self._host
            )
        query = {"service": parameters.get("service", ""), "scope": f"repository:{self._repository}:{self._actions}"}
        url = quote(realm, safe=PRINTABLE) + ("&" if urlsplit(realm).query else "?") + urlencode(query)
        with self._connections.request("GET", url, {}, basic, settings.STALL) as answer:
            data = answer.read(_MAX_TOKEN)
            if answer.status != 200:
                raise StatusError(answer.status)
        fields: Any = None
        with suppress(ValueError, RecursionError):
            fields = json.loads(data)
        fields = fields if isinstance(fields, dict) else {}
        token = fields.get("token") or fields.get("access_token")
        if not isinstance(token, str) or not token.isascii() or not token.isprintable():
            raise ResourceError("the token server gave no token", rule="registry.realm", where=self._host)
        return {"Authorization": f"Bearer {token}"}

    def _locate(self, key: str) -> str:
        return f"oci://{self._host}/{self._repository}: {key.removeprefix(f'v2/{self._repository}/')}"

    def explain(self, error: Exception, key: str) -> IngotError:
        location = self._locate(key)
        status = error.status if isinstance(error, StatusError) else 0
        if status in (401, 403):
            return ResourceError(
                f"the registry gives no access: log in (`docker login {self._host}`), or check your rights",
                rule="store.denied",
                where=location,
            )
        if status in (404, 410):
            return missing(location)
        if isinstance(error, StatusError) and 400 <= status < 500:
            code = _error_code(error.body)
            return ResourceError(
                f"the registry refused with status {status}{code}: check its settings and limits",
                rule="registry.refused",
                where=location,
            )
        return super().explain(error, key)


def _is_plain(host: str) -> bool:
    """Return whether a registry is reached without TLS: on this machine, or if the environment names it."""
    name = urlsplit(f"//{host}").hostname or ""
    if host in environ.get(PLAIN_HTTP, "").split(","):
        return True
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"


def _error_code(body: bytes) -> str:
    """Return a space and the error code of a registry's answer in parentheses; empty if it contains no code."""
    with suppress(ValueError, LookupError, TypeError, RecursionError):
        code = json.loads(body)["errors"][0]["code"]
        if _CODE.fullmatch(code):
            return f" ({code})"
    return ""
