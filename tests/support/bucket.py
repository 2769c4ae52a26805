"""Answers as an object store by S3's requests gives them: listing, uploads in one or several pieces, deletion."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import lru_cache
from hashlib import md5
from urllib.parse import unquote
from xml.sax.saxutils import escape

Answer = tuple[int, dict[str, str], bytes]
"""Status, headers, body."""


class Bucket:
    """Objects (name to bytes) that requests may change; the bytes of one are for the server to answer with.

    Those in ``old`` are listed as of a year before the others.
    """

    def __init__(self, files: dict[str, bytes], old: Collection[str]) -> None:
        self.files, self.old = files, old
        self.uploads: dict[str, dict[int, bytes]] = {}

    def copy(self, key: str, source: str) -> Answer:
        """Put the bytes of ``source``, a key as a URL has it, under another key."""
        data = self.files.get(unquote(source))
        if data is None:
            return 404, {}, _error("NoSuchKey")
        self.files[key] = data
        return 200, {}, _xml("CopyObjectResult", f"<ETag>{escape(etag(data))}</ETag>")

    def answer(self, method: str, key: str, query: Mapping[str, str], body: bytes) -> Answer:
        """Return the answer to a request, but for the bytes of an object that is there."""
        if method == "GET" and not key:
            return 200, {"Content-Type": "application/xml"}, _listed(self.files, query, self.old)
        if method in ("GET", "HEAD"):
            return 404, {}, _error("NoSuchKey") if method == "GET" else b""
        if "uploadId" in query or "uploads" in query:
            return self._in_pieces(method, key, query, body)
        return self._changed(method, key, query, body)

    def _changed(self, method: str, key: str, query: Mapping[str, str], body: bytes) -> Answer:
        """Delete objects, or take a whole one."""
        if method == "DELETE":
            self.files.pop(key, None)
            return 204, {}, b""
        if method == "PUT":
            self.files[key] = body
            return 200, {"ETag": etag(body)}, b""
        if method == "POST" and "delete" in query:
            return 200, {}, self._deleted(body)
        return 501, {}, b""

    def _in_pieces(self, method: str, key: str, query: Mapping[str, str], body: bytes) -> Answer:
        """Begin an upload in pieces, take one, put them together, or drop them."""
        if method == "POST" and "uploads" in query:
            upload = f"upload-{len(self.uploads)}"
            self.uploads[upload] = {}
            return 200, {}, _xml("InitiateMultipartUploadResult", f"<UploadId>{upload}</UploadId>")
        if method == "PUT" and "partNumber" in query:
            self.uploads[query["uploadId"]][int(query["partNumber"])] = body
            return 200, {"ETag": etag(body)}, b""
        if method == "POST":
            parts = self.uploads.pop(query["uploadId"])
            self.files[key] = b"".join(parts[number] for number in sorted(parts))
            text = f"<ETag>{escape(etag(self.files[key]))}</ETag>"
            return 200, {}, _xml("CompleteMultipartUploadResult", text)
        if method == "DELETE":
            self.uploads.pop(query["uploadId"], None)
            return 204, {}, b""
        return 501, {}, b""

    def _deleted(self, body: bytes) -> bytes:
        keys = [unquote(piece.partition("</Key>")[0]) for piece in body.decode().split("<Key>")[1:]]
        for key in keys:
            self.files.pop(key, None)
        return _xml("DeleteResult", "".join(f"<Deleted><Key>{escape(key)}</Key></Deleted>" for key in keys))


@lru_cache(maxsize=64)
def etag(data: bytes) -> str:
    """Return the tag of a version, as S3 has it."""
    return f'"{md5(data, usedforsecurity=False).hexdigest()}"'


def _xml(root: str, text: str) -> bytes:
    return f'<?xml version="1.0"?><{root} xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{text}</{root}>'.encode()


def _error(code: str) -> bytes:
    return f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>{code}</Message></Error>'.encode()


def _listed(files: Mapping[str, bytes], query: Mapping[str, str], old: Collection[str]) -> bytes:
    """Return a ``ListBucketResult``, all names in one page."""
    prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
    pieces, folders = [], dict[str, None]()
    for name in sorted(files):
        if not name.startswith(prefix):
            continue
        head, found, _ = name[len(prefix) :].partition(delimiter) if delimiter else ("", "", "")
        if found:
            folders[prefix + head + delimiter] = None
            continue
        about = f"<ETag>{escape(etag(files[name]))}</ETag><Size>{len(files[name])}</Size>"
        year = 2022 if name in old else 2023
        pieces.append(
            f"<Contents><Key>{escape(name)}</Key><LastModified>{year}-11-14T22:13:20.000Z</LastModified>{about}"
            "<StorageClass>STANDARD</StorageClass></Contents>"
        )
    common = "".join(f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>" for name in folders)
    count = len(pieces) + len(folders)
    text = f"<Name>b</Name><KeyCount>{count}</KeyCount><IsTruncated>false</IsTruncated>{''.join(pieces)}{common}"
    return _xml("ListBucketResult", text)
