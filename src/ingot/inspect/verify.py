"""Verify that a checkpoint is complete and well-formed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import replace

from ingot.artifacts.adapter_files import RULE as ADAPTER
from ingot.artifacts.archive_read import problems
from ingot.artifacts.archive_store import ArchiveStore
from ingot.artifacts.attachments import check_package
from ingot.artifacts.destination import is_distributed
from ingot.artifacts.draft_head import check_head_or_none
from ingot.artifacts.open import Source, find, open_source
from ingot.artifacts.remarks import remarks
from ingot.codecs.sparse.blocks import ID as PRUNED
from ingot.codecs.sparse.blocks import stored_matrix
from ingot.codecs.table import CODECS
from ingot.core.options import takes
from ingot.core.runtime.memory import gc_paused
from ingot.core.runtime.progress import Progress, ProgressCallback
from ingot.errors import FormatError, IngotError, IntegrityError, ResourceError, UsageError
from ingot.inspect.adapters import adapter_findings
from ingot.inspect.findings import Finding, finding_of
from ingot.inspect.options import CheckedFile, VerifyOptions
from ingot.inspect.receipt import receipt_of
from ingot.inspect.seal import repair, seal_beside
from ingot.inspect.signature import check_signature
from ingot.inspect.tensors import NO_DIGEST, check_tensor, check_tensors
from ingot.model.delta import delta_of
from ingot.model.reading.lazy import TensorMap
from ingot.model.reading.limits import require_in_proportion
from ingot.model.tensor import Tensor
from ingot.runtimes.accepts import accepts
from ingot.runtimes.profile import RuntimeProfile
from ingot.runtimes.table import runtime_named
from ingot.stores.location import Location
from ingot.translate.completeness import defects_of
from ingot.translate.families import UNSUPPORTED
from ingot.translate.unsupported_families import unopened_note

OPTIONAL = ("part.no-digest", "part.unknown-digest", "draft.nameless")
"""Rules of notes on optional contents of a format, which a strict check does not turn into errors."""
CheckTensors = Callable[[TensorMap[Tensor], Progress], Iterable[list[Finding]]]
"""A function that checks tensors and yields the findings of each in order."""


@takes(VerifyOptions, "verify")
def verify(options: VerifyOptions) -> list[Finding]:
    """Check structure, digests, and that every tensor decodes.

    Every byte of every part is read, and the bytes of quantized and sparse tensors a second time to decode them in
    chunks. ``io`` is pread by default, so that a file that shrinks during the check gives a finding instead of a crash.
    ``progress`` counts stored bytes.

    With ``strict``, deviations from the format's specification and unknown codecs are errors; missing optional
    contents, such as digests, remain notes. With ``runtime``, each reason for which that program would not load the
    file is an error too. The tensors and settings of an adapter must fit together; with ``base``, every tensor that it
    changes must be in its base, with its shape. A compressed part that declares more than ``max_decompressed`` bytes is
    an error, and so is a ``signature`` that is not valid. If the ``engine`` has workers, they check the tensors; this
    process checks digests of full files, seals and attachments.

    Returns
    -------
    list of Finding
        Errors first. Without an error the checkpoint is complete and well-formed.

    Raises
    ------
    UsageError
        ``verify.repair``, ``verify.signature``: one of two options that belong together; ``signature.key``; the errors
        of ``inspect.seal.repair``; no such path, or no checkpoint at the path; ``cluster.engine``; ``runtime.unknown``;
        ``adapter.none``: ``base`` without an adapter.
    IntegrityError, ResourceError, MissingExtraError
        Errors of workers, see ``cluster.driver.spread.ask``.

    Examples
    --------
    >>> ingot.verify("int4.zt")
    []
    >>> ingot.verify("int4.zt", runtime="vllm")[0].level
    'error'
    """
    is_distributed(options.engine, options.address)  # raises for an invalid engine before anything is read
    profile = None if options.runtime is None else runtime_named(options.runtime)
    if options.repair != (options.origin is not None):
        raise UsageError("expected --repair and --from (origin) together, found one of them", rule="verify.repair")
    location = Location.parse(options.path)
    if (options.signature is None) != (options.public_key is None):
        message = "expected --signature and --public-key (public_key) together, found one of them"
        raise UsageError(message, rule="verify.signature")
    repaired: list[Finding] = []
    if options.repair and options.origin is not None:
        for item in repair(location, Location.parse(options.origin)):
            message = f"replaced {item.chunks} of its chunks, which differed from the seal"
            repaired.append(Finding("note", "seal.repaired", item.file, message))
    if options.signature is not None and options.public_key is not None:
        repaired.append(check_signature(location, options.signature, options.public_key))
    archived = _archive_findings(location, options)
    if archived and (options.base is not None or any(item.level == "error" for item in archived)):
        return [
            *archived,
            *repaired,
        ]  # damaged, or incomplete without another model, so that it does not open as a model
    try:
        source = open_source(location, io=options.io, max_decompressed=options.max_decompressed)
    except (FormatError, IntegrityError) as error:
        return [finding_of(error, location.display), *repaired]
    except UsageError as error:
        if not archived or not (error.rule or "").startswith("detect."):
            raise
        return [*archived, *repaired]  # the archive contains files that are no model, or several models
    try:
        check = _tensor_checker(options, location, source)
        findings = examine(source, options.strict, options.progress, check)
        findings += _canonical_findings(source) if options.canonical else []
        loadable = [] if profile is None else runtime_findings(profile, source)
        adapted = adapter_findings(source, options.base)
        errors = {(item.rule, item.message) for item in loadable if item.level == "error"}
        findings = [item for item in findings if (item.rule, item.message) not in errors]  # notes on the same fact
        if options.base is not None:
            findings = [item for item in findings if item.rule != ADAPTER]  # the caller named its base
        return sorted([*findings, *loadable, *adapted, *repaired, *archived], key=lambda item: item.level != "error")
    finally:
        source.close()


def _canonical_findings(source: Source) -> Iterator[Finding]:
    from ingot.inspect.manifest_id import canonical_findings  # imports a container's code

    return canonical_findings(source)


def _archive_findings(location: Location, options: VerifyOptions) -> list[Finding]:
    """Restore all files of an archive in memory; return an error for each file that differs from the original.

    If all files are equal, return a note. If it is not an archive, return an empty list.
    """
    store, _ = find(location, options.io)
    if not isinstance(store, ArchiveStore):
        return []
    if options.base is not None:
        if not store.layout.external:
            return []
        store.objects.use_base(*find(Location.parse(options.base), options.io))
    progress = Progress(store.layout.size, options.progress)
    findings = [finding_of(error, location.display) for error in problems(store, progress)]
    if not findings:
        message = f"all {len(store.layout.files)} files can be restored and have the SHA-256 of the originals"
        findings.append(Finding("note", "archive.whole", location.display, message))
    return findings


def _tensor_checker(options: VerifyOptions, location: Location, source: Source) -> CheckTensors:
    """Return a function that checks tensors in this process, or by workers if the engine has them."""
    if not is_distributed(options.engine, options.address):
        return check_tensors

    def check_by_workers(tensors: TensorMap[Tensor], state: Progress) -> Iterable[list[Finding]]:
        from ingot.cluster.driver.spread import Query, ask, files_of
        from ingot.cluster.pool import pool_of

        opened = CheckedFile(location.text, options.io, options.max_decompressed)
        files = files_of(opened, {"path": source.url}, source.identity())
        queries = [Query(index, name, tensors.get_uncached(name).nbytes) for index, name in enumerate(tensors)]
        with closing(pool_of(options.engine, options.address)) as pool:
            return ask("verify", files, queries, pool, state)

    return check_by_workers


def tensors_of(source: Source) -> list[Tensor]:
    """Return all tensors of an opened artifact, in order."""
    with gc_paused():  # many small objects, none of them garbage
        return list(source.view().values())


def examine(
    source: Source,
    strict: bool = False,
    progress: ProgressCallback | None = None,
    check: CheckTensors = check_tensors,
) -> list[Finding]:
    """Check an opened source like ``verify``; ``check`` is the function that checks the tensors."""
    path = source.location
    findings = [Finding("note", rule, path, message) for rule, message in source.catalog.notes]
    findings += _check_delta(source)
    findings += _check_tensors(source, progress, check)
    findings += _check_attachments(source)
    findings += [
        Finding("error", defect.rule, f"{path}: {defect.name}", defect.message)
        for defect in defects_of(source, source.view())
    ]
    findings += _check_files(source)
    sealed = [*_check_seals(source)]
    findings += [item for item in sealed if item is not None]
    if strict:
        findings = [item if item.rule in OPTIONAL else replace(item, level="error") for item in findings]
    shown = remarks(source)
    unopened = unopened_note(source)
    shown += [(UNSUPPORTED, unopened)] if unopened else []
    findings += [
        Finding("note", rule, path, text) for rule, text in source.catalog.remarks if (rule, text) not in shown
    ]
    if source.catalog.manifest_digest is False:
        message = "the header or manifest has no digest, as in files of older releases: damage there may go unseen"
        findings.append(Finding("note", "format.no-manifest-digest", path, message))
    if source.catalog.check_whole is not None:
        message = "one digest covers the file: reading a single tensor does not check it"
        findings.append(Finding("note", "format.whole-digest", path, message))
    elif not (source.format.traits.digests or isinstance(source.store, ArchiveStore) or _is_sealed(source, sealed)):
        name = source.format.name
        message = f"{name} stores no digests: damage inside a tensor cannot be seen; `ingot seal` adds them"
        findings.append(Finding("note", "format.no-digests", path, message))
    findings += [Finding("note", rule, path, message) for rule, message in shown]
    _, fault = receipt_of(source)
    findings += [] if fault is None else [Finding("note", fault[0], path, fault[1])]
    return sorted(findings, key=lambda item: item.level != "error")


def _is_sealed(source: Source, sealed: Sequence[Finding | None]) -> bool:
    """Return whether every file of the artifact has a seal; ``sealed`` are the results of ``_check_seals``."""
    return bool(sealed) and len(sealed) == len(source.catalog.headers)


def _check_tensors(source: Source, progress: ProgressCallback | None, check: CheckTensors) -> Iterator[Finding]:
    """Yield the findings on all tensors.

    If their decoded size is out of proportion to their stored size, they are not decoded, and one error is yielded.
    """
    tensors = source.view().tensor_map
    try:
        require_in_proportion(_decoded_tensors(tensors.uncached()), source.location)
    except ResourceError as error:
        yield finding_of(error, source.location)
        return
    ignored_rule = None if source.format.traits.digests else NO_DIGEST
    total = sum(tensor.nbytes for tensor in tensors.uncached())
    for findings in check(tensors, Progress(total, progress)):
        yield from (item for item in findings if item.rule != ignored_rule)


def _decoded_tensors(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the tensors to decode, without the blocks that pruning or a sparse difference omits."""
    for tensor in tensors:
        codec = CODECS.get(tensor.codec)
        if codec is not None and codec.checks_stored:
            continue
        with suppress(IngotError):  # the check of this tensor reports the error
            yield stored_matrix(tensor) if tensor.codec == PRUNED else tensor


def _check_delta(source: Source) -> Iterator[Finding]:
    """Yield an error for each difference between a delta's tensors and the list in its description."""
    tensors = source.catalog.tensors
    location = source.location
    try:
        info = delta_of(source.catalog.metadata, location)
    except FormatError as error:
        yield finding_of(error, location)
        return
    if info is None:
        return
    mismatched = [name for name, change in info.tensors.items() if (change.op != "same") != (name in tensors)]
    for name in sorted([*mismatched, *(name for name in tensors if name not in info.tensors)]):
        message = "the delta lists this tensor but does not contain it, or contains it but does not list it"
        yield Finding("error", "delta.tensor", f"{location}: {name}", message)


def _check_attachments(source: Source) -> Iterator[Finding]:
    """Yield findings on the tensors of a draft head, on their relations, and on the zip of a Core ML package.

    The package is not unpacked.
    """
    attached = source.view().attachments
    if attached.draft is not None:
        findings = [item for tensor in attached.draft.values() for item in check_tensor(tensor)]
        yield from (replace(item, where=f"draft head: {item.where}") for item in findings)
        try:
            if check_head_or_none(attached.draft) is None:
                message = "the draft head has no tensor names, so that its tensors were not checked against each other"
                yield Finding("note", "draft.nameless", "draft head", message)
        except IngotError as error:
            yield finding_of(error.add_location("draft head"), "draft head")
    if attached.coreml is not None:
        try:
            check_package(attached.coreml)
        except IngotError as error:
            yield finding_of(error, "Core ML package")


def _check_files(source: Source) -> Iterator[Finding]:
    """Yield an error for each digest over a full file that does not match."""
    for fault in source.catalog.check_files():
        yield finding_of(fault, source.location)
    if source.catalog.check_whole is not None:
        try:
            source.catalog.check_whole()
        except IngotError as error:
            yield finding_of(error, source.location)


def _check_seals(source: Source) -> Iterator[Finding | None]:
    """Yield an error for each sealed file that differs from its seal, and None for each file that matches its seal."""
    for name in source.catalog.headers:
        location = source.store.location_of(name)
        try:
            seal = seal_beside(source.store, name)
            if seal is None:
                continue
            file = source.store.open(name)
            try:
                seal.require_size(file.size, location)
                damaged = seal.damaged_chunks(file)
            finally:
                file.close()
        except IngotError as error:
            yield finding_of(error, location)
            continue
        if not damaged:
            yield None
            continue
        first = damaged[0] * seal.chunks.size
        message = (
            f"chunks that differ from the seal: {len(damaged)}, the first at byte {first}; "
            "--repair --from PATH takes them from an undamaged copy"
        )
        yield Finding("error", "seal.digest-mismatch", location, message)


def runtime_findings(profile: RuntimeProfile, source: Source) -> list[Finding]:
    """Return an error for each reason why the program would not load the artifact; a note if there is none."""
    answer = accepts(profile, source)
    if not answer.accepted:
        return [Finding("error", reason.rule, reason.location, reason.message) for reason in answer.reasons]
    untested = ", ".join(scheme.name for scheme in answer.untested)
    tried = f"; the project did not run it with: {untested}" if untested else ""
    return [Finding("note", "runtime.loads", source.location, f"{profile.label} would load this{tried}")]
