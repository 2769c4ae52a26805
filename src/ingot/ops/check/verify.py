"""Verify: is this file whole and well-formed?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from os import PathLike
from typing import TYPE_CHECKING

import numpy as np

from ingot.codecs.base import ChecksStored, Codec
from ingot.codecs.dense.codec import require_bool
from ingot.codecs.sparse.blocks import ID as PRUNED
from ingot.codecs.sparse.blocks import stored_matrix
from ingot.codecs.table import CODECS
from ingot.core import checksums
from ingot.core.dtypes import DTYPES
from ingot.core.gcpause import gc_paused
from ingot.core.options import takes
from ingot.core.parallel import ordered_together
from ingot.core.progress import Progress, ProgressCallback
from ingot.engine.bulk import groups, whole
from ingot.engine.chunks import chunks, matrix_of, weight
from ingot.errors import CodecError, FormatError, IngotError, IntegrityError, ResourceError, UsageError
from ingot.model.delta import delta_of
from ingot.model.layouts.dense import DenseLayout
from ingot.model.lazy import Many, as_many
from ingot.model.limits import require_in_proportion
from ingot.model.part import Part
from ingot.model.report import Figure, Line, Report, table_of
from ingot.model.tensor import Tensor
from ingot.ops.attachments import check_package
from ingot.ops.check.options import VerifyOptions
from ingot.ops.check.receipt import receipt_of
from ingot.ops.check.seal import repair, seal_beside
from ingot.ops.convert.draft import check_head
from ingot.ops.open import Source, checkpoint_of, open_source
from ingot.ops.options import is_elsewhere
from ingot.ops.remarks import remarks
from ingot.stores.table import location_of

if TYPE_CHECKING:
    from ingot.ops.cluster.spread import Opened

_CHUNK = 4 << 20
OPTIONAL = ("part.no-digest", "part.unknown-digest", "draft.nameless")
"""Notes on what a format leaves to the writer: no errors however strict the check."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that ``verify`` has to say.

    ``level`` is ``error`` (the file is damaged or breaks a rule) or ``note`` (allowed, but worth knowing). ``rule``
    is the rule's name on the spec page, ``where`` the file, tensor and part.
    """

    level: str
    rule: str
    where: str
    message: str


ByTensor = Callable[[Many[Tensor], Progress, str | None], Iterable[list[Finding]]]
"""Checks tensors, and tells what each gave, in order; of a rule that nobody wants to know it may say nothing."""
_NO_DIGEST = "part.no-digest"


def verify_report(path: str | PathLike[str], findings: Sequence[Finding]) -> Report:
    """Return what ``verify`` found, and whether the file is whole."""
    errors = sum(item.level == "error" for item in findings)
    figures = [
        Figure("path", location_of(path)),
        Figure("ok", not errors, "flag"),
        Figure("errors", errors, "count", data=False),
        Figure("notes", len(findings) - errors, "count", data=False),
        Figure("told", [finding_text(item) for item in findings], "texts", data=False),
    ]
    notes = ", {notes} note(s)" if len(findings) > errors else ""
    verdict = "{errors} error(s)" if errors else "ok"
    lines = [Line("{item}", each="told"), Line(f"{{path}}: {verdict}{notes}")]
    return Report(figures, lines, [table_of("findings", findings, Finding)])


def finding_text(item: Finding) -> str:
    """Return a finding as one line."""
    return f"{item.level}: {item.where}: {item.message} [{item.rule}]"


@takes(VerifyOptions, "verify")
def verify(options: VerifyOptions) -> list[Finding]:
    """Check structure, digests, and that every tensor decodes.

    ``strict`` reports as errors what the format's document asks for otherwise, and codecs not known here. What the
    document leaves to the writer, such as digests, stays a note. ``io`` is pread by default, so that a file that
    shrinks meanwhile is a finding and not a crash. A compressed part that states more than ``max_decompressed`` is an
    error. ``progress`` counts stored bytes. With an ``engine`` of many workers those check the tensors, and this
    process all else: digests of whole files and seals, and what lies beside the weights.

    Returns
    -------
    list of Finding
        Errors first. No error: the file is whole. Reads every byte of every part, and those of quantized and sparse
        tensors once more to decode them, in pieces.

    Raises
    ------
    UsageError
        ``verify.repair``: ``repair`` without ``origin``; what ``ops.check.seal.repair`` raises; no such path,
        or nothing there that looks like a checkpoint; ``cluster.engine``.
    IntegrityError, ResourceError, MissingExtraError
        Of workers, as ``ops.cluster.spread.spread``.
    """
    is_elsewhere(options.engine, options.address)  # refused before anything is fetched
    if options.repair != (options.origin is not None):
        raise UsageError("expected --repair and --from (origin) together, found one of them", rule="verify.repair")
    mended = []
    if options.repair and options.origin is not None:
        for item in repair(options.path, options.origin):
            message = f"fetched again, as they were not as sealed: {item.chunks} of its chunks"
            mended.append(Finding("note", "seal.repaired", item.file, message))
    try:
        source = open_source(options.path, io=options.io, max_decompressed=options.max_decompressed)
    except (FormatError, IntegrityError) as error:
        return [_finding(error, location_of(options.path))]
    try:
        return [*examine(source, options.strict, options.progress, _elsewhere(options, source)), *mended]
    finally:
        source.close()


def _elsewhere(options: VerifyOptions, source: Source) -> ByTensor:
    """Return who checks tensors."""
    if not is_elsewhere(options.engine, options.address):
        return _here

    def by_workers(tensors: Many[Tensor], state: Progress, silent: str | None) -> Iterable[list[Finding]]:
        from ingot.engine.cluster.pool import pool_of
        from ingot.ops.cluster.spread import Inquiry, Wanted, spread

        inquiry = Inquiry(_opened, _tensor, replace(options, progress=None), {"path": source.url}, source.identity())
        wanted = [Wanted(number, tensors.passing(name).nbytes) for number, name in enumerate(tensors)]
        with closing(pool_of(options.engine, options.address)) as pool:
            return spread(inquiry, wanted, pool, state)

    return by_workers


@contextmanager
def _opened(options: VerifyOptions) -> Iterator[Opened[Tensor]]:
    """Open the tensors again, in a worker."""
    from ingot.ops.cluster.spread import Opened

    with closing(open_source(options.path, io=options.io, max_decompressed=options.max_decompressed)) as source:
        yield Opened(_tensors(source), source.identity())


def _tensors(source: Source) -> list[Tensor]:
    with gc_paused():  # many small objects, none of them garbage
        return list(checkpoint_of(source).values())


def _here(tensors: Many[Tensor], state: Progress, silent: str | None) -> Iterator[list[Finding]]:
    """Check tensors in this process."""
    many, telling = tensors.bulk, silent != _NO_DIGEST

    def check(item: Tensor | list[str]) -> Iterator[tuple[str, int, list[Finding]]]:
        if isinstance(item, Tensor):
            yield item.name, item.nbytes, _tensor(item)
        elif many is not None:
            notes = many.undigested(item) if telling else [False] * len(item)
            for name, nbytes, good, note in zip(item, many.sizes(item), whole(many, item), notes, strict=True):
                if not good:
                    yield name, nbytes, _tensor(tensors.passing(name))
                else:
                    yield name, nbytes, [_no_digest(f"{name}/{role}") for role in many.parts] if note else []

    items = (tensors.passing(item) if isinstance(item, str) else item for item in groups(many, tensors))
    for found in ordered_together(lambda item: [*check(item)], items, _weight):
        for name, nbytes, findings in found:
            state.advance(nbytes, name)
            yield findings


def _weight(item: Tensor | list[str]) -> int:
    """As ``ordered_together`` weighs: small tensors are light, also many of them."""
    return weight(item) if isinstance(item, Tensor) else 0


def _no_digest(where: str) -> Finding:
    return Finding("note", _NO_DIGEST, where, "no digest: damage inside this part cannot be seen")


def examine(
    source: Source, strict: bool = False, progress: ProgressCallback | None = None, by_tensor: ByTensor = _here
) -> list[Finding]:
    """Check what was opened; ``verify`` is this for a path. ``by_tensor`` checks tensors alone."""
    path = source.location
    findings = [Finding("note", rule, path, message) for rule, message in source.catalog.notes]
    findings += _description(source)
    findings += _contents(source, progress, by_tensor)
    findings += _attachments(source)
    findings += _whole(source)
    sealed = [*_sealed(source)]
    findings += [item for item in sealed if item is not None]
    if strict:
        findings = [item if item.rule in OPTIONAL else replace(item, level="error") for item in findings]
    findings += [Finding("note", rule, path, message) for rule, message in source.catalog.remarks]
    if source.catalog.manifest_digest is False:
        message = "no digest of the header or manifest, as files of before it was written: damage there may go unseen"
        findings.append(Finding("note", "format.no-manifest-digest", path, message))
    if source.catalog.check_whole is not None:
        message = "one digest covers the file: a tensor that is read alone is not checked against it"
        findings.append(Finding("note", "format.whole-digest", path, message))
    elif not source.format.digests and not (sealed and len(sealed) == len(source.catalog.headers)):
        message = f"{source.format.name} stores no digests: damage inside a tensor cannot be seen"
        findings.append(Finding("note", "format.no-digests", path, message))
    findings += [Finding("note", rule, path, message) for rule, message in remarks(source)]
    _, fault = receipt_of(source)
    findings += [] if fault is None else [Finding("note", fault[0], path, fault[1])]
    return sorted(findings, key=lambda item: item.level != "error")


def _contents(source: Source, progress: ProgressCallback | None, by_tensor: ByTensor) -> Iterator[Finding]:
    many = checkpoint_of(source).many
    with gc_paused():  # many small objects, none of them garbage
        kinds, counts = many.counted()
    if len(kinds) == len(many) and many.bulk is None:
        many = as_many(dict(zip(many, kinds, strict=True)))  # they are there
    try:
        decoded, of_each = _decoded(kinds, counts)
        require_in_proportion(decoded, source.location, of_each)
    except ResourceError as error:
        yield _finding(error, source.location)
        return
    silent = None if source.format.digests else _NO_DIGEST
    total = sum(count * tensor.nbytes for tensor, count in zip(kinds, counts, strict=True))
    for findings in by_tensor(many, Progress(total, progress), silent):
        yield from (item for item in findings if item.rule != silent)


def _decoded(tensors: Sequence[Tensor], counts: Sequence[int]) -> tuple[list[Tensor], list[int]]:
    """Return what will be decoded, and how many like it: what pruning or a sparse difference leaves out is no work,
    however large it is."""
    found: list[Tensor] = []
    of_each: list[int] = []
    stored = dict[str, bool]()  # asked once: protocols are slow to ask for
    for tensor, count in zip(tensors, counts, strict=True):
        if tensor.codec not in stored:
            stored[tensor.codec] = isinstance(CODECS.get(tensor.codec), ChecksStored)
        if stored[tensor.codec]:
            continue
        with suppress(IngotError):  # said when the tensor's turn comes
            found.append(stored_matrix(tensor) if tensor.codec == PRUNED else tensor)
            of_each.append(count)
    return found, of_each


def _description(source: Source) -> Iterator[Finding]:
    """Compare what a delta says of itself with the tensors that are there."""
    catalog, where = source.catalog, source.location
    try:
        info = delta_of(catalog.metadata, where)
    except FormatError as error:
        yield _finding(error, where)
        return
    if info is None:
        return
    held = catalog.tensors
    odd = [name for name, change in info.tensors.items() if (change.op != "same") != (name in held)]
    for name in sorted([*odd, *(name for name in held if name not in info.tensors)]):
        message = "the delta lists this tensor and does not hold it, or the other way round"
        yield Finding("error", "delta.tensor", f"{where}: {name}", message)


def _attachments(source: Source) -> Iterator[Finding]:
    """Check a draft head's tensors alone and against each other, and a package's zip without unpacking it."""
    attached = checkpoint_of(source).attachments
    if attached.draft is not None:
        findings = [item for tensor in attached.draft.values() for item in _tensor(tensor)]
        yield from (replace(item, where=f"draft head: {item.where}") for item in findings)
        try:
            if check_head(attached.draft) is None:
                message = "a draft head without names: its tensors were checked one by one, not against each other"
                yield Finding("note", "draft.nameless", "draft head", message)
        except IngotError as error:
            yield _finding(error.at("draft head"), "draft head")
    if attached.coreml is not None:
        try:
            check_package(attached.coreml)
        except IngotError as error:
            yield _finding(error, "Core ML package")


def _whole(source: Source) -> Iterator[Finding]:
    """Compare the digest over the whole file, and those of whole files beside it, where the format has such."""
    for found in source.catalog.check_files():
        yield _finding(found, source.location)
    if source.catalog.check_whole is not None:
        try:
            source.catalog.check_whole()
        except IngotError as error:
            yield _finding(error, source.location)


def _sealed(source: Source) -> Iterator[Finding | None]:
    """Compare each file that has a seal beside it; a finding for each that differs, None for each that does not."""
    for name in source.catalog.headers:
        where = source.store.location_of(name)
        try:
            seal = seal_beside(source.store, name)
            if seal is None:
                continue
            file = source.store.open(name)
            try:
                seal.require_size(file.size, where)
                bad = seal.bad(file)
            finally:
                file.close()
        except IngotError as error:
            yield _finding(error, where)
            continue
        told = (
            f"not as sealed: {len(bad)} of its chunks, the first from byte {bad[0] * seal.chunks.size} on"
            if bad
            else ""
        )
        yield Finding("error", "seal.digest-mismatch", where, told) if bad else None


def _tensor(tensor: Tensor) -> list[Finding]:
    """Check one tensor: its codec's rules, its parts' digests, and the values of parts that a decoder relies on."""
    findings: list[Finding] = []
    codec = CODECS.get(tensor.codec)
    try:
        if codec is not None:
            codec.check(tensor)
        for role, part in tensor.parts.items():
            findings += _part(part, f"{tensor.name}/{role}", _spare_bits(tensor))
        stored = tensor
        if codec is not None and tensor.codec == PRUNED:
            stored = stored_matrix(tensor)  # what was dropped is no work, however large it claims to be
            codec = CODECS[stored.codec]
        plain = codec is not None and codec.elementwise and codec.lossless  # any bytes are values
        if codec is not None and not plain and tensor.dtype in DTYPES:
            findings += _decodes(codec, stored)
    except (IngotError, MemoryError) as error:
        findings.append(_finding(error, tensor.name))
    if codec is None:
        findings.append(
            Finding(
                "note",
                "codec.unknown",
                tensor.name,
                f"codec {tensor.codec!r} is not known here; parts were checked only",
            )
        )
    return findings


def _spare_bits(tensor: Tensor) -> int:
    """Return the bits behind the last element of dense values that are packed below a byte."""
    row = DTYPES.get(tensor.dtype)
    return 0 if row is None or tensor.codec != DenseLayout.codec or row.bits >= 8 else -tensor.size * row.bits % 8


def _part(part: Part, where: str, spare: int) -> list[Finding]:
    """Read a part for its digest, and for bytes that are no values: in bools, and ``spare`` bits at the end."""
    buffer = memoryview(bytearray(min(_CHUNK, part.nbytes)))
    last = 0
    if part.dtype != "bool" and part.length and part.read_whole(buffer):
        last = buffer[-1]
    else:
        last = _read_part(part, where, buffer)
    if last >> (8 - spare):
        raise CodecError("dense.spare-bits", f"expected zeros in the last {spare} bits, found others", where=where)
    digest = part.digest or getattr(part.source, "digest", None)  # of what it is made of
    if digest is None:
        return [_no_digest(where)]
    if digest.startswith("crc32c:"):  # which reading it has proven
        return []
    if checksums.known(digest, "part.digest", where) is None:
        told = f"digest {digest[:40]!r} is of an algorithm not known here"
        return [Finding("note", "part.unknown-digest", where, told)]
    return []


def _read_part(part: Part, where: str, buffer: memoryview) -> int:
    """Read a part piece by piece; return its last byte, 0 of none."""
    reader, last = part.reader(chunks=True), 0
    for start in range(0, part.nbytes, _CHUNK):
        piece = buffer[: min(_CHUNK, part.nbytes - start)]
        reader.readinto(piece)
        last = piece[-1]
        if part.dtype == "bool":
            require_bool(np.frombuffer(piece, np.uint8), DTYPES["bool"], where)
    reader.finish()
    return last


def _decodes(codec: Codec, tensor: Tensor) -> list[Finding]:
    """Run the decoder over all rows in chunks: index values, scales."""
    matrix = matrix_of(tensor)
    odd = 0
    if isinstance(codec, ChecksStored):
        pieces = codec.stored(tensor)
    else:
        pieces = chunks(tensor, matrix, max(1, _CHUNK // max(matrix[1], 1)))
    for rows in pieces:
        if DTYPES[tensor.dtype].is_float and rows.size:
            with np.errstate(invalid="ignore"):  # ml_dtypes warns of signalling NaNs
                odd += int(rows.size - np.count_nonzero(np.isfinite(rows.astype(np.float32))))
    if odd and not codec.lossless:
        return [Finding("error", "codec.non-finite", tensor.name, f"{odd} values decode to NaN or infinity")]
    return []


def _finding(error: BaseException, where: str) -> Finding:
    if isinstance(error, IngotError):
        return Finding("error", error.rule or "error", error.where or where, error.message)
    return Finding("error", "memory", where, "not enough memory to check this tensor")
