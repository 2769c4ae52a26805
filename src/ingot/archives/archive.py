"""Archive a folder or file: plan the objects, encode them, and check that the files can be restored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any, BinaryIO

from ingot.archives.differences import Differences, with_external
from ingot.archives.options import ArchiveOptions
from ingot.archives.scan import PackedBytes, Scan, Scanner, changed_error
from ingot.artifacts.archive_layout import KEY, LAYOUT, MAX_LAYOUT, ArchiveLayout, check_names
from ingot.artifacts.archive_read import plan_reading, problems
from ingot.artifacts.archive_store import open_archive
from ingot.artifacts.open import find
from ingot.codecs.table import CODECS
from ingot.conversion.placement import plan_unchanged
from ingot.conversion.plan import PlanRequest, plan_conversion
from ingot.core.bytes.encodings import compress_frame
from ingot.core.options import takes
from ingot.core.runtime.progress import Progress
from ingot.engine.execute import Target, execute
from ingot.engine.resources import Resources
from ingot.engine.steps import ENCODED, Encode, Move, Repack
from ingot.engine.work import Plan, Step
from ingot.errors import FormatError, IntegrityError, UsageError
from ingot.formats.base import WriteOptions
from ingot.formats.detect import FORMATS
from ingot.library.cut import IGNORED, Segment, files_of, segments
from ingot.model import bytesource
from ingot.model.bytesource import MemorySource
from ingot.model.checkpoint import Checkpoint
from ingot.model.layouts.dense import DenseLayout
from ingot.model.part import Part
from ingot.model.store import OverwritePolicy, Store
from ingot.model.tensor import Tensor
from ingot.recipes.load import load_recipe
from ingot.reporting.report import Bytes, Count, Line, Ratio, Report, Texts, figures_of
from ingot.reporting.reportable import Reportable
from ingot.stores.files import temporary_source
from ingot.stores.local import LocalTarget
from ingot.stores.location import Location

_NAME = "archive.zt"
RECIPE = "lossless-max"
"""The preset that chooses the codec of each tensor."""


@dataclass(frozen=True, slots=True)
class Archived(Reportable):
    """The result of archiving.

    ``size`` is the size of the files in bytes, ``stored`` the size of the archive, and ``saved`` the difference as a
    fraction of ``size``. ``objects`` is the number of distinct tensors and ranges of other bytes; ``differences`` of
    them are stored as a difference to another object. ``duplicates`` is the number of repeated ranges that are stored
    only once, and ``duplicate_bytes`` their size. ``resumed`` is the number of objects that an interrupted run wrote.
    """

    source: str
    destination: str
    files: Count
    size: Bytes
    stored: Bytes
    saved: Ratio
    objects: Count
    differences: Count
    duplicates: Count
    duplicate_bytes: Bytes
    resumed: Count
    notes: Texts = ()

    def report(self) -> Report:
        """Return the figures and notes as a ``Report``."""
        words = "{destination}: {files} files of {size} archived in {stored}, {saved} off; restored and compared"
        lines = [Line(words)]
        if self.duplicates:
            lines.append(Line("{duplicates} duplicates of {duplicate_bytes} are stored once"))
        if self.differences:
            lines.append(Line("{differences} tensors are stored as differences to other versions of them"))
        if self.resumed:
            lines.append(Line("{resumed} objects are from an interrupted run"))
        return Report(figures_of(self), [*lines, Line("note: {item}", items="notes")])


@takes(ArchiveOptions, "archive")
def archive(options: ArchiveOptions) -> Archived:
    """Archive a folder with all of its files, or a single file, in one ``.zt`` file from which it is restored exactly.

    Each tensor is stored once, regardless of its name and file, in the smallest form that the preset ``lossless-max``
    gives it. Before the archive appears, all files are restored from it and compared with the SHA-256 of the originals.

    Returns
    -------
    Archived

    Raises
    ------
    UsageError
        ``archive.none``: there is nothing to archive; ``archive.within``: the archive would be in the archived folder;
        ``archive.suffix``; ``target.exists``, ``target.no-parent``, ``resume.changed``.
    FormatError
        ``archive.name``, ``archive.collision``: a file name that is impossible on other systems; ``archive.device``.
    IntegrityError
        ``store.changed``: the source changed while it was archived.
    ResourceError
        ``ram.ceiling``; disk full.

    Examples
    --------
    >>> report = ingot.archive("model", "model.zt")
    >>> report.files, report.saved > 0.3
    (5, True)
    """
    location = Location.parse(options.src)
    destination = Location.parse(options.out)
    if not destination.name.lower().endswith(".zt"):
        raise UsageError(
            "expected an archive's name that ends in .zt", rule="archive.suffix", where=destination.display
        )
    store, single = location.find_model(io="pread")
    if not single and store.contains_address(destination.url):
        raise UsageError(
            "expected an archive outside the folder to archive: choose another folder for it",
            rule="archive.within",
            where=destination.display,
        )
    if store.would_overwrite([single] if single else [], destination.url, folder=False):
        raise UsageError("the archive would replace its source", rule="archive.within", where=destination.display)
    names, notes = _names(store, single)
    with ExitStack() as stack:
        model = _opened(stack, store, single, names)
        base = None if options.against is None else _opened(stack, *find(Location.parse(options.against), "pread"))
        size = sum(source.size for source in model.files.values())
        progress = Progress(3 * size, options.progress)
        scans: list[Scan] = []

        def write(out: BinaryIO) -> None:
            scanner = Scanner(out, progress)
            if base is not None:
                for name, source in base.files.items():
                    scanner.add_base(name, source, base.parts[name])
            for name, source in model.files.items():
                scanner.add(name, source, model.parts[name])
            scans.append(scanner.finish())

        with closing(temporary_source(write)) as packed:
            (scan,) = scans
            plan, layout = _plan(scan, packed, folder=not single, options=options)
            replaced = OverwritePolicy(options.overwrite)
            with destination.stage(replaced, directory=False, resume=options.resume) as staging:
                check = _Check(layout, LocalTarget(staging.files), base, options, progress)
                sources = [*model.files.values(), *(base.files.values() if base is not None else ())]
                resources = Resources(options.max_ram, options.threads, progress)
                executed = execute(plan, (_Input(sources, layout),), Target(staging, _NAME, check), resources)
    return Archived(
        source=store.location_of(single),
        destination=destination.display,
        files=len(names),
        size=size,
        stored=executed.size,
        saved=1 - executed.size / size if size else 0.0,
        objects=len(layout.objects),
        differences=len(layout.bases),
        duplicates=scan.duplicates,
        duplicate_bytes=scan.duplicate_bytes,
        resumed=executed.resumed,
        notes=notes,
    )


@dataclass(frozen=True, slots=True)
class _Opened:
    """The open files of a folder, or a single open file, and the tensors and other byte ranges in each file."""

    store: Store
    single: str
    files: Mapping[str, bytesource.ByteSource]
    parts: Mapping[str, Sequence[Segment]]


def _opened(stack: ExitStack, store: Store, single: str, names: Sequence[str] = ()) -> _Opened:
    """Open the files ``names``, or all files by default; ``stack`` closes them."""
    names = names or ([single] if single else sorted(files_of(store, outside=True)))
    files = {name: stack.enter_context(closing(store.open(name))) for name in names}
    return _Opened(store, single, files, segments(store, names, folder=not single))


def _names(store: Store, single: str) -> tuple[list[str], list[str]]:
    """Return the names of the files, and notes about entries that are not archived.

    Raises ``FormatError`` ``archive.device`` for an entry that is not a file, a folder, or a link to one of them.
    """
    if single:
        check_names([single.rpartition("/")[2]], store.location_of(single))
        return [single], []
    names = sorted(files_of(store, outside=True))
    folders = {name.rpartition("/")[0] for name in names}
    inside = {"/".join(folder.split("/")[:depth]) for folder in folders for depth in range(1, folder.count("/") + 2)}
    empty: list[str] = []
    ignored: list[str] = []
    for entry in store.tree():
        top = next(
            (part for part in entry.rstrip("/").split("/") if part in IGNORED or part.endswith(".ingot-partial")), ""
        )
        if top:
            ignored.append(entry[: entry.index(top)] + top)
        elif entry.endswith("/"):
            empty.append(entry[:-1])
        elif entry not in names and entry not in inside:
            raise FormatError(
                "archive.device",
                "expected files, folders, and links to them; this is a device, or a link that leads nowhere: remove it",
                where=store.location_of(entry),
            )
    check_names(names, store.location)
    if not names:
        raise UsageError("expected files, but the folder has none", rule="archive.none", where=store.location)
    notes = [f"not archived: {', '.join(dict.fromkeys(ignored))}"] if ignored else []
    notes += [f"not archived: empty folders {', '.join(empty)}"] if empty else []
    return names, notes


def _plan(
    scan: Scan, packed: bytesource.ByteSource, *, folder: bool, options: ArchiveOptions
) -> tuple[Plan, ArchiveLayout]:
    """Return the plan that writes all objects, and the layout of the archive. The plan's first object is the layout."""
    format = FORMATS["zt"]
    tensors = {item.name: item for item in scan.objects if isinstance(item, Tensor)}
    checkpoint = Checkpoint(tensors, format="archive", location="")
    request = PlanRequest(load_recipe(RECIPE), options=WriteOptions(), workers=options.threads, measured=False)
    planned = plan_conversion(checkpoint, format, request)
    by_name = {step.spec.name: _restorable(step) for step in planned.steps}
    differences = Differences(scan)
    steps: list[Step] = []
    for index, item in enumerate(scan.objects):
        if isinstance(item, PackedBytes):
            tensor = item.tensor(packed)
            steps.append(Move(tensor, tensor.spec(), rule="bytes"))
        else:
            steps.append(differences.step(index) or by_name[item.name])
    files = scan.files if folder else [replace(scan.files[0], name=scan.files[0].name.rpartition("/")[2])]
    layout = with_external(
        ArchiveLayout(folder, [step.spec for step in steps], files, differences.bases),
        [item for item, _ in scan.external],
        "" if options.against is None else Location.parse(options.against).name,
    )
    tensor = _layout_tensor(layout)
    return (
        Plan(
            steps=[Move(tensor, tensor.spec(), rule="layout"), *steps],
            format=format,
            metadata={KEY: LAYOUT},
            options=WriteOptions(),
            measured=False,
        ),
        layout,
    )


def _restorable(step: Step) -> Step:
    """Return ``step`` if the tensor's stored bytes can be restored from its result; else a step that copies them."""
    tensor = step.tensor
    same_part = isinstance(step, Move | Repack) and step.spec.codec == tensor.codec
    values = (
        isinstance(step, Encode)
        and step.exact
        and step.action == ENCODED
        and tensor.codec == DenseLayout.codec
        and step.spec.dtype == tensor.dtype
        and CODECS[step.spec.codec].lossless
    )
    dense = isinstance(step, Encode) and tensor.codec == step.spec.codec == DenseLayout.codec and step.exact
    if same_part or values or dense:
        return step
    return plan_unchanged(tensor, FORMATS["zt"], step.rule)


def _layout_tensor(layout: ArchiveLayout) -> Tensor:
    """Return the layout as a tensor of bytes, which becomes the first object of the archive.

    The stored bytes are one zstd frame, so that a reader finds their end without the manifest. Raises ``UsageError``
    ``archive.entries`` if the layout has more than ``MAX_LAYOUT`` bytes.
    """
    raw = layout.encoded()
    if len(raw) > MAX_LAYOUT:
        raise UsageError(
            f"expected fewer files and tensors, found a layout of {len(raw)} bytes: archive the folders separately",
            rule="archive.entries",
        )
    frame = compress_frame(raw, 19)
    part = Part("u8", len(frame), MemorySource(frame, LAYOUT), encoding="zstd", uncompressed_length=len(raw))
    return Tensor(LAYOUT, (len(raw),), "u8", DenseLayout.codec, {"data": part})


class _Input:
    """The source files as an input of ``execute``."""

    def __init__(self, files: Sequence[bytesource.ByteSource], layout: ArchiveLayout) -> None:
        self._files = files
        self._layout = layout

    def identity(self) -> Any:
        """Return the digest of the layout, which contains the digests of all files."""
        return sha256(self._layout.encoded()).hexdigest()

    def require_whole(self) -> None:
        """Do nothing: the scan has read all files."""

    def require_unchanged(self) -> None:
        """Raise ``IntegrityError`` ``store.changed`` if a file was written to since it was opened."""
        for source in self._files:
            if source.changed():
                raise changed_error(source.name)


class _Check:
    """A check before publication: restores all files from the finished archive and compares them."""

    def __init__(
        self,
        layout: ArchiveLayout,
        target: LocalTarget,
        base: _Opened | None,
        options: ArchiveOptions,
        progress: Progress,
    ) -> None:
        self._layout = layout
        self._base = base
        self._target = target
        self._options = options
        self._progress = progress

    def __call__(self, target: bytesource.Target, written: Sequence[str]) -> Sequence[str]:
        """Raise ``IntegrityError`` ``archive.unrestorable`` for the first difference; return no companion names."""
        opened = open_archive(self._target.store(), _NAME)
        if opened is None or opened[1].layout.files != tuple(self._layout.files):
            raise _unrestorable("the finished archive has another layout than planned", _NAME)
        catalog, archived = opened
        if self._base is not None:
            archived.objects.use_base(self._base.store, self._base.single)
        try:
            options = self._options
            reading = plan_reading(archived.objects, archived.layout.files, options.max_ram, options.threads)
            for problem in problems(archived, self._progress, reading):
                raise _unrestorable(problem.message, problem.where or _NAME)
        finally:
            for source in catalog.sources:
                source.close()
        return []


def _unrestorable(message: str, location: str) -> IntegrityError:
    return IntegrityError(
        "archive.unrestorable",
        f"{message}; nothing was published; this is a defect of Ingot, please report it",
        where=location,
    )
