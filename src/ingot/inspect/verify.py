"""Verify: is this file whole and well-formed?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import replace

from ingot.artifacts.attachments import check_package
from ingot.artifacts.destination import is_elsewhere
from ingot.artifacts.draft_head import check_head
from ingot.artifacts.open import Source, open_source
from ingot.artifacts.remarks import remarks
from ingot.codecs.sparse.blocks import ID as PRUNED
from ingot.codecs.sparse.blocks import stored_matrix
from ingot.codecs.table import CODECS
from ingot.core.options import takes
from ingot.core.runtime.memory import gc_paused
from ingot.core.runtime.progress import Progress, ProgressCallback
from ingot.errors import FormatError, IngotError, IntegrityError, ResourceError, UsageError
from ingot.inspect.findings import Finding, finding_of
from ingot.inspect.options import CheckedFile, VerifyOptions
from ingot.inspect.receipt import receipt_of
from ingot.inspect.seal import repair, seal_beside
from ingot.inspect.tensors import NO_DIGEST, check_tensor, check_tensors
from ingot.model.delta import delta_of
from ingot.model.reading.lazy import Many
from ingot.model.reading.limits import require_in_proportion
from ingot.model.tensor import Tensor
from ingot.runtimes.accepts import accepts
from ingot.runtimes.profile import RuntimeProfile
from ingot.runtimes.table import runtime_named
from ingot.stores.location import Location
from ingot.translate.completeness import defects_of
from ingot.translate.unknown import RULE as UNKNOWN
from ingot.translate.unopened import unopened_note

OPTIONAL = ("part.no-digest", "part.unknown-digest", "draft.nameless")
"""Notes on what a format leaves to the writer: no errors however strict the check."""
ByTensor = Callable[[Many[Tensor], Progress], Iterable[list[Finding]]]
"""Checks tensors, and tells what each gave, in order; of a rule that nobody wants to know it may say nothing."""


@takes(VerifyOptions, "verify")
def verify(options: VerifyOptions) -> list[Finding]:
    """Check structure, digests, and that every tensor decodes.

    ``strict`` reports as errors what the format's document asks for otherwise, and codecs not known here. What the
    document leaves to the writer, such as digests, stays a note. With ``runtime``, each reason for which that program
    would not load the file is an error too. ``io`` is pread by default, so that a file that
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
        ``verify.repair``: ``repair`` without ``origin``; what ``inspect.seal.repair`` raises; no such path,
        or nothing there that looks like a checkpoint; ``cluster.engine``; ``runtime.unknown``.
    IntegrityError, ResourceError, MissingExtraError
        Of workers, as ``cluster.driver.spread.ask``.
    """
    is_elsewhere(options.engine, options.address)  # refused before anything is fetched
    profile = None if options.runtime is None else runtime_named(options.runtime)
    if options.repair != (options.origin is not None):
        raise UsageError("expected --repair and --from (origin) together, found one of them", rule="verify.repair")
    location = Location.parse(options.path)
    mended = []
    if options.repair and options.origin is not None:
        for item in repair(location, Location.parse(options.origin)):
            message = f"fetched again, as they were not as sealed: {item.chunks} of its chunks"
            mended.append(Finding("note", "seal.repaired", item.file, message))
    try:
        source = open_source(location, io=options.io, max_decompressed=options.max_decompressed)
    except (FormatError, IntegrityError) as error:
        return [finding_of(error, location.display)]
    try:
        findings = examine(source, options.strict, options.progress, _by_tensor(options, location, source))
        loadable = [] if profile is None else runtime_findings(profile, source)
        return sorted([*findings, *loadable, *mended], key=lambda item: item.level != "error")
    finally:
        source.close()


def _by_tensor(options: VerifyOptions, location: Location, source: Source) -> ByTensor:
    """Return the check of tensors, here or by workers."""
    if not is_elsewhere(options.engine, options.address):
        return check_tensors

    def by_workers(tensors: Many[Tensor], state: Progress) -> Iterable[list[Finding]]:
        from ingot.cluster.driver.spread import Query, ask, files_of
        from ingot.cluster.pool import pool_of

        opened = CheckedFile(location.text, options.io, options.max_decompressed)
        files = files_of(opened, {"path": source.url}, source.identity())
        queries = [Query(number, name, tensors.passing(name).nbytes) for number, name in enumerate(tensors)]
        with closing(pool_of(options.engine, options.address)) as pool:
            return ask("verify", files, queries, pool, state)

    return by_workers


def tensors_of(source: Source) -> list[Tensor]:
    """Return all tensors of an opened artifact, in order."""
    with gc_paused():  # many small objects, none of them garbage
        return list(source.view().values())


def examine(
    source: Source, strict: bool = False, progress: ProgressCallback | None = None, by_tensor: ByTensor = check_tensors
) -> list[Finding]:
    """Check what was opened; ``verify`` is this for a path. ``by_tensor`` checks tensors alone."""
    path = source.location
    findings = [Finding("note", rule, path, message) for rule, message in source.catalog.notes]
    findings += _description(source)
    findings += _contents(source, progress, by_tensor)
    findings += _attachments(source)
    findings += [
        Finding("error", defect.rule, f"{path}: {defect.name}", defect.message)
        for defect in defects_of(source, source.view())
    ]
    findings += _whole(source)
    sealed = [*_sealed(source)]
    findings += [item for item in sealed if item is not None]
    if strict:
        findings = [item if item.rule in OPTIONAL else replace(item, level="error") for item in findings]
    shown = remarks(source)
    unopened = unopened_note(source)
    shown += [(UNKNOWN, unopened)] if unopened else []
    findings += [
        Finding("note", rule, path, text) for rule, text in source.catalog.remarks if (rule, text) not in shown
    ]
    if source.catalog.manifest_digest is False:
        message = "no digest of the header or manifest, as files of before it was written: damage there may go unseen"
        findings.append(Finding("note", "format.no-manifest-digest", path, message))
    if source.catalog.check_whole is not None:
        message = "one digest covers the file: a tensor that is read alone is not checked against it"
        findings.append(Finding("note", "format.whole-digest", path, message))
    elif not source.format.traits.digests and not (sealed and len(sealed) == len(source.catalog.headers)):
        message = f"{source.format.name} stores no digests: damage inside a tensor cannot be seen"
        findings.append(Finding("note", "format.no-digests", path, message))
    findings += [Finding("note", rule, path, message) for rule, message in shown]
    _, fault = receipt_of(source)
    findings += [] if fault is None else [Finding("note", fault[0], path, fault[1])]
    return sorted(findings, key=lambda item: item.level != "error")


def _contents(source: Source, progress: ProgressCallback | None, by_tensor: ByTensor) -> Iterator[Finding]:
    many = source.view().many
    try:
        require_in_proportion(_decoded(many.uncached()), source.location)
    except ResourceError as error:
        yield finding_of(error, source.location)
        return
    silent = None if source.format.traits.digests else NO_DIGEST
    total = sum(tensor.nbytes for tensor in many.uncached())
    for findings in by_tensor(many, Progress(total, progress)):
        yield from (item for item in findings if item.rule != silent)


def _decoded(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the tensors that will be decoded; blocks that pruning or a sparse difference drops are not decoded."""
    for tensor in tensors:
        codec = CODECS.get(tensor.codec)
        if codec is not None and codec.checks_stored:
            continue
        with suppress(IngotError):  # reported when this tensor is checked
            yield stored_matrix(tensor) if tensor.codec == PRUNED else tensor


def _description(source: Source) -> Iterator[Finding]:
    """Compare what a delta says of itself with the tensors that are there."""
    catalog = source.catalog
    where = source.location
    try:
        info = delta_of(catalog.metadata, where)
    except FormatError as error:
        yield finding_of(error, where)
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
    attached = source.view().attachments
    if attached.draft is not None:
        findings = [item for tensor in attached.draft.values() for item in check_tensor(tensor)]
        yield from (replace(item, where=f"draft head: {item.where}") for item in findings)
        try:
            if check_head(attached.draft) is None:
                message = "a draft head without names: its tensors were checked one by one, not against each other"
                yield Finding("note", "draft.nameless", "draft head", message)
        except IngotError as error:
            yield finding_of(error.at("draft head"), "draft head")
    if attached.coreml is not None:
        try:
            check_package(attached.coreml)
        except IngotError as error:
            yield finding_of(error, "Core ML package")


def _whole(source: Source) -> Iterator[Finding]:
    """Compare the digest over the whole file, and those of whole files beside it, where the format has such."""
    for found in source.catalog.check_files():
        yield finding_of(found, source.location)
    if source.catalog.check_whole is not None:
        try:
            source.catalog.check_whole()
        except IngotError as error:
            yield finding_of(error, source.location)


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
            yield finding_of(error, where)
            continue
        told = (
            f"not as sealed: {len(bad)} of its chunks, the first from byte {bad[0] * seal.chunks.size} on"
            if bad
            else ""
        )
        yield Finding("error", "seal.digest-mismatch", where, told) if bad else None


def runtime_findings(profile: RuntimeProfile, source: Source) -> list[Finding]:
    """Return an error for each reason for which the program would not load the artifact; if there is none, a note."""
    answer = accepts(profile, source)
    if not answer.accepted:
        return [Finding("error", reason.rule, reason.location, reason.message) for reason in answer.reasons]
    untested = ", ".join(scheme.name for scheme in answer.untested)
    tried = f"; not run with this program: {untested}" if untested else ""
    return [Finding("note", "runtime.loads", source.location, f"{profile.label} would load this{tried}")]
