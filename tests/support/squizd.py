"""Hand-made ``.squizd`` files, well-formed or not: for the golden corpus, hostile tests and fuzz seeds.

Everything is packed here and in ``squizd_items`` from ``spec/squizd.md``; nothing of the format's own code is used.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ingot.core.bytes import checksums
from ingot.core.parsing import cbor
from tests.support.squizd_items import Item, fnv

FLAGS = {b"ASTW": 1, b"TCAW": 2, b"INT4": 4, b"INT2": 32}
SPARSE, EAGLE, ANE_COREML = 8, 16, 64

Edit = Callable[[Any], Any]


@dataclass
class Section:
    """Blocks with their scale tables and directory, and where everything came to lie."""

    start: int
    body: bytearray = field(default_factory=bytearray)
    spans: list[tuple[int, int]] = field(default_factory=list)
    masks: list[int | None] = field(default_factory=list)
    blocks: dict[str, int] = field(default_factory=dict)
    places: dict[str, dict[str, Any]] = field(default_factory=dict)
    tables: list[tuple[int, int]] = field(default_factory=list)
    directory: int = 0

    @property
    def tail(self) -> int:
        return self.start + len(self.body)

    @property
    def behind(self) -> int:
        """Where the last layer ends."""
        return max([self.start, *(end for _, end in self.spans)])


def section(
    start: int, items: Sequence[Item], layers: int, tables: Edit | None = None, *, padded: bool = True
) -> Section:
    """Lay out blocks, masks and scale tables; ``tables`` may change the entries (id, scale, zero) of all tables.

    ``padded`` as files were earlier: every payload at a multiple of 64, not only a layer's first.
    """
    made = Section(start)
    for layer in range(layers):
        _layer(made, [item for item in items if item.layer == layer], padded)
    scaled = [item for item in items if item.scales is not None]
    first = [(item.tensor_id, *((1.0, 0.0) if item.second else item.entries[0])) for item in scaled]
    second = [(item.tensor_id | 1 << 63, *entry) for item in scaled if item.second for entry in item.entries]
    both = [entries for entries in (first, second) if entries]
    both = both if tables is None else tables(both)
    for entries in both:
        made.tables.append((made.tail, len(entries)))
        made.body += b"SCZT" + struct.pack("<I", len(entries))
        made.body += b"".join(struct.pack("<Qff", *entry) for entry in entries)
    done = 0
    for index, item in enumerate(scaled if both else []):
        location = made.places[item.name]
        location["first"] = [made.tables[0][0] + 8 + 16 * index, 1]
        if item.second:
            location["second"] = [made.tables[-1][0] + 8 + 16 * done, len(item.entries)]
            done += len(item.entries)
    return made


def _layer(made: Section, items: Sequence[Item], padded: bool) -> None:
    begun = made.tail
    for number, item in enumerate(items):
        made.body += bytes(-(made.tail + len(item.head)) % 64 if padded or not number else 0)
        begun = begun if number else made.tail
        made.blocks[item.name] = made.tail
        made.places[item.name] = {"layer": item.layer, "offset": made.tail}
        made.body += item.head + item.payload
    first: int | None = None
    for item in items:
        if item.mask:
            first = made.tail if first is None else first
            made.places[item.name]["mask"] = [made.tail, len(item.mask)]
            made.body += item.mask
    made.spans.append((begun, made.tail))
    made.masks.append(first)


def directory(made: Section, items: Sequence[Item], digest: str | None, edit: Edit | None, **fields: Any) -> None:
    """Append the directory; ``edit`` may change its map, or give other bytes for it."""
    tensors: dict[str, Any] = {}
    for item in items:
        entry: dict[str, Any] = {"shape": list(item.shape), "dtype": item.dtype, "codec": item.codec}
        location = dict(made.places[item.name])
        entry |= {key: location.pop(key) for key in ("layer", "offset")}
        if item.params:
            entry["params"] = dict(item.params)
        if item.scales is not None:
            entry["scales"] = item.scales
        if item.zeros:
            entry["zeros"] = True
        entry |= {key: location[key] for key in ("first", "second", "mask") if key in location}
        if digest is not None:
            entry["digests"] = {role: checksums.digest(digest, data) for role, data in item.parts.items()}
        tensors[item.name] = entry
    root: Any = {"version": 1, "tensors": tensors, **{key: value for key, value in fields.items() if value is not None}}
    root = root if edit is None else edit(root)
    data = root if isinstance(root, bytes) else cbor.dumps(root)
    made.directory = made.tail
    made.body += b"TDIR" + struct.pack("<Q", len(data)) + data


@dataclass
class Made:
    """A file, and where its sections are."""

    data: bytes
    main: Section
    draft: Section | None = None
    coreml: int = 0

    def patch(self, offset: int, form: str, *values: Any) -> bytes:
        """The file with other numbers at ``offset``; the checks over sparsity and draft metadata follow."""
        data = bytearray(self.data)
        struct.pack_into("<" + form, data, offset, *values)
        if 128 <= offset < 160:
            struct.pack_into("<I", data, 14, zlib.crc32(data[128:160]))
        if 160 <= offset < 192:
            struct.pack_into("<Q", data, 18, fnv(bytes(data[160:192])))
        return bytes(data)


@dataclass(kw_only=True)
class File:
    """What goes into a file. ``named``: it has a directory; the edits change directories and scale tables.

    ``sealed``: the directory ends with a digest of itself, the header and the layer index. ``earlier``: as files were
    before the directory went behind the appendices, with padding between the blocks of a layer.
    """

    items: Sequence[Item]
    layers: int | None = None
    named: bool = True
    flags: int | None = None
    metadata: Mapping[str, Any] | None = None
    digest: str | None = "crc32c"
    sealed: bool = False
    draft: Sequence[Item] = ()
    draft_named: bool = True
    coreml: bytes | None = None
    edit: Edit | None = None
    draft_edit: Edit | None = None
    tables: Edit | None = None
    earlier: bool = True

    def make(self) -> Made:
        count = self.layers if self.layers is not None else 1 + max((item.layer for item in self.items), default=0)
        main = section(256 + 32 * count, self.items, count, self.tables, padded=self.earlier)
        tables_end = main.tail
        if self.named:
            self._directory(main)
        late = b"" if self.earlier else bytes(main.body[tables_end - main.start :])
        if late:
            del main.body[tables_end - main.start :]
        body, draft = bytes(main.body), None
        if self.draft:
            start = main.tail + -main.tail % 64
            draft, _ = self._draft(start)
            body += bytes(start - main.tail) + b"EGDH" + struct.pack("<I", _draft_layers(self.draft)) + draft.body
        at = main.start + len(body)
        if self.coreml is not None:
            body += b"ANLX" + struct.pack("<Q", len(self.coreml)) + self.coreml
        if late:
            main.directory = main.start + len(body)
            body += late
        index = _index(main, main.tables[0][0] if main.tables else main.directory if self.earlier else 0)
        flags = _flags(self.items, self.draft, self.coreml) if self.flags is None else self.flags
        header = _header(flags, count, self.items, _draft_meta(self.draft, draft))
        data = header + index + body
        if self.sealed and self.named and self.digest is not None:
            at_map = main.directory + 12
            end = at_map + struct.unpack_from("<Q", data, main.directory + 4)[0]
            digits = len(self._stand_in().partition(":")[2].removeprefix("0x"))
            digest = checksums.digest(self.digest, data[at_map:end] + header + index)
            data = data[: end - digits] + digest[-digits:].encode() + data[end:]
        return Made(data, main, draft, at)

    def _stand_in(self) -> str:
        return "crc32c:0x00000000" if self.digest == "crc32c" else "sha256:" + "0" * 64

    def _directory(self, main: Section) -> None:
        """Append the directory. It states the digest of the draft head's, which depends on where that comes to lie."""
        fields: dict[str, Any] = {"metadata": self.metadata or None, "draft_digest": None}
        if self.coreml is not None:
            fields["coreml_digest"] = checksums.digest("sha256", self.coreml)
        tail = main.tail
        for _ in range(2):
            if self.draft and self.draft_named and self.digest is not None:
                end = main.tail if self.earlier else tail
                data = self._draft(end + -end % 64)[1]
                fields["draft_digest"] = checksums.digest(self.digest, data)
            if self.sealed and self.digest is not None:
                fields["ingot_digest"] = fields.pop("ingot_digest", self._stand_in())  # the last entry
            del main.body[tail - main.start :]
            directory(main, self.items, self.digest, self.edit, **fields)

    def _draft(self, start: int) -> tuple[Section, bytes]:
        """Return the section behind ``EGDH`` at ``start``, and its directory block."""
        made = section(start + 8, self.draft, 1, padded=self.earlier)
        if not self.draft_named:
            return made, b""
        directory(made, self.draft, self.digest, self.draft_edit)
        return made, bytes(made.body[made.directory - made.start :])


def squizd(items: Sequence[Item], **fields: Any) -> Made:
    """Return a file; ``fields`` are those of ``File``."""
    return File(items=items, **fields).make()


def _draft_layers(draft: Sequence[Item]) -> int:
    return int(any(item.name.startswith("midlayer.") for item in draft))


def _draft_meta(draft: Sequence[Item], made: Section | None) -> bytes:
    if made is None:
        return bytes(32)
    vocab = next((item.shape[0] for name in ("d2t", "lm_head.weight") for item in draft if item.name == name), 0)
    start = made.start - 8
    return struct.pack("<QQII8x", start, made.tail - start, _draft_layers(draft), vocab)


def _index(main: Section, scales: int) -> bytes:
    return b"".join(
        struct.pack("<IQQQI", layer, start, end - start, scales if mask is None else mask, 0)
        for layer, ((start, end), mask) in enumerate(zip(main.spans, main.masks, strict=True))
    )


def _flags(items: Sequence[Item], draft: Sequence[Item], coreml: bytes | None) -> int:
    flags = 0
    for item in items:
        flags |= FLAGS.get(item.head[:4], 0) | (SPARSE if item.mask else 0)
    flags &= ~4 if flags & 32 else -1
    return flags | (EAGLE if draft else 0) | (ANE_COREML if coreml is not None else 0)


def _header(flags: int, layers: int, items: Sequence[Item], draft: bytes) -> bytes:
    sparse = bytes(32)
    if any(item.mask for item in items):
        shares: dict[int, list[float]] = {}
        for item in items:
            if item.mask:
                blocks = -(-item.params["channels"] // item.params["block"])
                kept = int.from_bytes(item.mask, "little").bit_count()
                shares.setdefault(item.layer, []).append(1 - kept / blocks)
        means = [sum(some) / len(some) for some in shares.values()]
        block = next(item.params["block"] for item in items if item.mask)
        sparse = struct.pack("<IIIf16x", 1, block, len(means), sum(means) / len(means))
    crc = zlib.crc32(sparse) if any(sparse) else 0
    check = fnv(draft) if any(draft) else 0
    fixed = struct.pack("<4sHIHHIQ102x", b"SQZD", 1, flags, layers, 0, crc, check)
    return fixed + sparse + draft + bytes(64)
