"""The offsets in the weight files of a package to write; they follow from the specs.

Numbers keep the order of the package that provides the program, so that a package with unchanged tensors stays the
same. Arrays of fewer than ten elements are in the program, as coremltools writes them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ingot.errors import UnsupportedError
from ingot.formats.coreml.blob import HEADER, METADATA, Blob, align
from ingot.formats.coreml.carry import PlannedOp, Stored, plan_operations
from ingot.formats.coreml.mil import Operation
from ingot.formats.coreml.site import LeftError, Site, Slot
from ingot.formats.coreml.template import Template
from ingot.formats.coreml.values import BlobRef, Value
from ingot.model.layouts.dense import DenseLayout
from ingot.model.layouts.table import layout_of
from ingot.model.spec import TensorSpec

INLINE_BELOW = 10
FEEDS = "the program computes other constants from it"
IOS16 = 6
IOS18 = 8
Key = tuple[int, str]


@dataclass(slots=True)
class Entry:
    """An array of a tensor in the package to write, and its location.

    ``key`` is the index of the operation (-1 for an unchanged operation) and the key of the parameter. ``values`` are
    the references to the array in an unchanged operation. ``offset`` is that of the array's metadata; None if the array
    is in the program, and then ``data`` are its contents. ``copied`` is set for a blob of an unchanged operation that
    contains no part of the tensor. ``share`` identifies arrays that were one blob and may share a blob again;
    ``reused`` is true if this array uses the offset of another. ``fixed`` is set for a part that is not written,
    because its numbers do not change.
    """

    key: Key
    stored: Stored
    values: tuple[Value, ...] = ()
    copied: tuple[Blob, bytes] | None = None
    inline: bool = False
    offset: int | None = None
    data: bytes = b""
    share: tuple[object, ...] = ()
    reused: bool = False
    fixed: Slot | None = None

    @property
    def nbytes(self) -> int:
        """The number of bytes that the array takes in a weight file or in the program."""
        return self.copied[0].length if self.copied else self.stored.type.nbytes(self.stored.count)


@dataclass(slots=True)
class TensorPlan:
    """The plan for writing a tensor into the program.

    ``operations`` replace the operations of ``site``; if empty, the present operations stay.
    """

    site: Site
    spec: TensorSpec
    file: str
    operations: tuple[PlannedOp, ...]
    entries: list[Entry]

    def entry(self, role: str) -> Entry:
        """Return the entry of a part; raises ``KeyError`` if the plan has no such entry."""
        for entry in self.entries:
            if entry.stored.role == role and not entry.copied:
                return entry
        raise KeyError(role)


@dataclass(frozen=True, slots=True)
class OtherBlob:
    """A blob that belongs to no tensor, which is copied from offset ``old`` to offset ``new``."""

    file: str
    old: int
    new: int
    blob: Blob
    raw: bytes


@dataclass(slots=True)
class FileEnd:
    """The end of a weight file: the next free position, and the number of blobs before it."""

    end: int = HEADER
    count: int = 0

    def take(self, nbytes: int) -> int:
        """Reserve space for a blob of ``nbytes`` at the end; return the offset of its metadata."""
        offset = align(self.end)
        self.end = offset + METADATA + nbytes
        self.count += 1
        return offset


def opset_number(template: Template, site: Site) -> int:
    """Return the number of the opset that the tensor's function declares: 7 for ``CoreML7``; 0 for any other name."""
    text = template.program.opsets.get(site.last.function, "").removeprefix("CoreML")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 4 else 0


def why_unsupported(template: Template, site: Site | None, spec: TensorSpec) -> str | None:
    """Return why a program cannot contain this tensor; None if it can."""
    if site is None:
        return "the program has no constant of this name"
    if (site.shape, site.dtype) != (spec.shape, spec.dtype):
        return f"the program has {site.dtype} {list(site.shape)} under this name, found {spec.dtype} {list(spec.shape)}"
    if is_kept(site, spec):
        return None
    if site.feeds:
        return FEEDS
    return _opset_reason(opset_number(template, site), spec)


def _opset_reason(opset: int, spec: TensorSpec) -> str | None:
    """Return why an opset has no operations for a tensor; None if it has some."""
    if opset < IOS16 and spec.codec != DenseLayout.codec:
        return f"opset CoreML{opset} has no compressed constants; convert the model for iOS 16 or later"
    try:
        plan_operations(spec, ios18=opset >= IOS18)
    except LeftError as reason:
        return f"{reason} (the program has opset CoreML{opset})"
    return None


def is_kept(site: Site, spec: TensorSpec) -> bool:
    """Return whether ``spec`` stores the tensor as the program does, so that its operations can stay."""
    parts = {part.role: (part.dtype, part.length, part.encoding) for part in spec.parts}
    slots = {role: (slot.dtype, slot.length, "raw") for role, slot in site.slots.items()}
    if site.layout.codec != spec.codec or parts != slots:
        return False
    return isinstance(site.layout, DenseLayout) or site.layout == layout_of(spec)


class Layout:
    """The offsets of all numbers, assigned tensor by tensor.

    Raises ``UnsupportedError``: ``coreml.tensor``, a tensor that the program cannot contain; ``coreml.tensor-missing``,
    a constant of the program without a tensor; ``coreml.reference-unknown``, references to weights that cannot be
    updated.
    """

    def __init__(self, template: Template, specs: Sequence[TensorSpec]) -> None:
        self.template = template
        self.sites = {site.name: site for site in template.sites}
        for spec in specs:
            reason = why_unsupported(template, self.sites.get(spec.name), spec)
            if reason is not None:
                raise UnsupportedError(reason, rule="coreml.tensor", where=spec.name)
        missing = {site.name for site in template.sites if not site.inline} - {spec.name for spec in specs}
        if missing:
            raise UnsupportedError(
                "expected a tensor for every constant of the program, but this constant has none",
                rule="coreml.tensor-missing",
                where=min(missing),
            )
        require_known_references(template)
        self.files = {name: FileEnd() for name in sorted(template.weights.files)}
        self.plans: list[TensorPlan] = []
        self.other_blobs: dict[tuple[str, int], OtherBlob] = {}
        self._shared: dict[tuple[object, ...], Entry] = {}
        self.unused = self._unused(specs)
        self._waiting = self._left_of(specs)

    def _unused(self, specs: Sequence[TensorSpec]) -> list[Operation]:
        """Return the operations that only replaced operations use, and that must therefore be removed."""
        replaced = [site for spec in specs if not is_kept(site := self.sites[spec.name], spec)]
        changed = {id(site) for site in replaced}
        stays = {id(site.last) for site in self.sites.values()}
        for site in self.sites.values():
            if id(site) not in changed:
                stays |= {id(operation) for operation in site.shared}
        chosen = {id(item): item for site in replaced for item in site.shared if id(item) not in stays}
        removed = [operation for site in replaced for operation in site.operations]
        while True:
            counts = Counter(
                (item.function, name)
                for item in (*removed, *chosen.values())
                for name in item.inputs.values()
                if isinstance(name, str)
            )
            uses = self.template.program.uses
            still_used = [
                key
                for key, item in chosen.items()
                if any(
                    uses[item.function][output.name] != counts[item.function, output.name] for output in item.outputs
                )
            ]
            if not still_used:
                return list(chosen.values())
            for key in still_used:
                del chosen[key]

    def _left_of(self, specs: Sequence[TensorSpec]) -> list[tuple[str, int]]:
        """Return file and offset of each blob that belongs to no tensor, in file order."""
        covered = {id(value) for operation in self.unused for value in operation.values}
        for spec in specs:
            covered |= {id(value) for operation in self.sites[spec.name].operations for value in operation.values}
        remaining = {
            (value.blob.file, value.blob.offset)
            for value in self.template.program.values()
            if value.blob is not None and id(value) not in covered
        }
        return sorted(remaining)

    def place_other_blobs(self, file: str | None = None, before: int = 0) -> list[OtherBlob]:
        """Assign new offsets to blobs that belong to no tensor and that were before an offset of a file.

        Without a file, assign new offsets to all remaining blobs of this kind.
        """
        now = [blob_key for blob_key in self._waiting if file is None or (blob_key[0] == file and blob_key[1] < before)]
        self._waiting = [blob_key for blob_key in self._waiting if blob_key not in set(now)] if now else self._waiting
        placed = []
        for name, old in now:
            blob, raw = self.template.weights.files[name].blob_of_any_type(old)
            item = OtherBlob(name, old, self.files[name].take(blob.length), blob, raw)
            self.other_blobs[name, old] = item
            placed.append(item)
        return placed

    def plan(self, spec: TensorSpec) -> TensorPlan:
        """Return the plan for writing a tensor, without assigning offsets."""
        site = self.sites[spec.name]
        file = site.first_offset[0] or next(iter(self.files), "")
        if is_kept(site, spec):
            return TensorPlan(site, spec, file, (), self._unchanged_entries(site))
        operations = plan_operations(spec, ios18=opset_number(self.template, site) >= IOS18)
        entries = [
            Entry(
                (index, item.key),
                item,
                inline=item.count < INLINE_BELOW or not file,
                share=(*site.shares, index, item.key) if site.shares else (),
            )
            for index, operation in enumerate(operations)
            for item in operation.stored
        ]
        return TensorPlan(site, spec, file, operations, entries)

    def _unchanged_entries(self, site: Site) -> list[Entry]:
        """Return an unchanged tensor's arrays in the order of their blobs.

        These include blobs of its operations that contain no part of the tensor.
        """
        entries: list[tuple[int, Entry]] = []
        part_values: set[int] = set()
        for role, slot in site.slots.items():
            stored = Stored(role, slot.type, slot.dims, role, slot.dtype, spread=slot.spread)
            if site.is_fixed(slot):
                entries.append((-1, Entry((-1, role), stored, fixed=slot)))
                continue
            part_values |= {id(value) for value in slot.values}
            blob = slot.values[0].blob
            offset = blob.offset if blob else -1
            entries.append((offset, Entry((-1, role), stored, slot.values, inline=blob is None, share=_shared(blob))))
        for operation in site.operations:
            for value in operation.values:
                if value.blob is not None and id(value) not in part_values:
                    file = self.template.weights.file(value)
                    type, dims = value.shaped()
                    key = f"blob {value.blob.offset} {len(entries)}"
                    stored = Stored(key, type, dims)
                    entry = Entry((-1, key), stored, (value,), file.blob_of_any_type(value.blob.offset))
                    entries.append((value.blob.offset, entry))
        return [entry for _, entry in sorted(entries, key=lambda item: item[0])]

    def assign_offsets(self, plan: TensorPlan) -> None:
        """Assign the next offsets to a tensor; arrays that shared a blob share it again if their sizes are equal."""
        for entry in plan.entries:
            if entry.inline or entry.fixed is not None:
                continue
            shared = self._shared.get(entry.share) if entry.share else None
            if shared is not None and (shared.stored.type, shared.stored.dims) == (
                entry.stored.type,
                entry.stored.dims,
            ):
                entry.offset = shared.offset
                entry.reused = True
            else:
                entry.offset = self.files[plan.file].take(entry.nbytes)
        self.remember(plan)

    def part(self, plan: TensorPlan, entry: Entry) -> None:
        """Assign a separate offset to an array whose contents differ from those of the shared blob."""
        entry.offset = self.files[plan.file].take(entry.nbytes)
        entry.reused = False

    def remember(self, plan: TensorPlan) -> None:
        """Let later arrays share blobs with the arrays of a tensor whose offsets are assigned."""
        for entry in plan.entries:
            if entry.share and entry.offset is not None:
                self._shared.setdefault(entry.share, entry)


def _shared(blob: BlobRef | None) -> tuple[object, ...]:
    return () if blob is None else (blob.file, blob.offset)


def require_known_references(template: Template) -> None:
    """Raise an error if a program has references to weight files at positions that Ingot does not know.

    Offsets change when weights are written, and a reference that is not updated would mean other numbers.
    """
    prefix = b"@model_path/"
    references = sum(1 for value in template.program.values() if value.blob is not None)
    if template.model.count(prefix) != references:
        raise UnsupportedError(
            f"expected {references} references to weights, found {template.model.count(prefix)}: some are at positions "
            "that "
            "Ingot does not support, so that it cannot write this package",
            rule="coreml.reference-unknown",
        )
