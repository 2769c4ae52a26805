"""Execution of plans: staging, journal, memory budget, pipeline, digests of full files, and the final publication."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from json import dumps
from typing import Any, Protocol

from ingot.core.files.atomic import Staging
from ingot.core.numeric.stats import ErrorStats
from ingot.core.runtime.parallel import Workers
from ingot.engine.data import step_data
from ingot.engine.journal import Journal, fingerprint, is_intact
from ingot.engine.pipeline import Begin, End, HashSelector, Pipeline, Sink, TensorSink, hash_nothing, write_chunks
from ingot.engine.resources import Resources, choose_chunks
from ingot.engine.work import ChunkPlan, CompletedStep, Plan, Step
from ingot.errors import CodecError, IngotError, IntegrityError, UnsupportedError
from ingot.formats.base import Catalog, FormatWriter
from ingot.model import bytesource
from ingot.model.layouts.dense import DenseLayout
from ingot.model.reading.lazy import as_tensor_map
from ingot.model.reading.limits import require_in_proportion
from ingot.model.spec import TensorSpec
from ingot.model.store import Store
from ingot.model.tensor import Tensor
from ingot.stores.local import LocalTarget

RULE = "written.unreadable"
EMPTY = "written.empty"
_REPORT = "nothing was published; this is a defect of Ingot, please report it"


def require_readable(plan: Plan, store: Store, name: str, files: Sequence[str], location: str) -> None:
    """Raise ``IntegrityError`` ``written.unreadable`` unless the finished files contain exactly the planned tensors.

    Raises ``UnsupportedError`` ``written.empty`` if no weight file was written.

    Parameters
    ----------
    plan : Plan
    store : Store
        The folder with the finished files, companions included.
    name : str
        The weight file that the plan was to create.
    files : sequence of str
        The weight files that were created: ``name``, or an index and shards.
    location : str
        The destination, for error messages.
    """
    if not files:
        raise UnsupportedError(
            f"{plan.format.name} has a file per tensor, and there is no tensor to write: choose another format",
            rule=EMPTY,
            where=location,
        )
    entry = name if name in files else plan.format.entry(sorted(files)) or name
    try:
        catalog = plan.format.read(store, entry)
    except IngotError as error:
        raise _failure(location, f"the reader of {plan.format.name} refuses the finished file: {error}") from error
    try:
        _compare(plan, catalog, location)
    finally:
        for source in catalog.sources:
            source.close()


def _compare(plan: Plan, catalog: Catalog, location: str) -> None:
    specs = plan.specs
    format = plan.format
    tensors = as_tensor_map(catalog.tensors)
    for spec in specs:
        if spec.name not in tensors:
            raise _failure(location, f"the finished file lacks the tensor {spec.name!r:.200}")
        difference = _difference(tensors.get_uncached(spec.name), spec)
        if difference:
            raise _failure(location, f"the tensor {spec.name!r:.200} has {difference}")
    if len(tensors) == len(specs):
        return
    planned_names = {spec.name for spec in specs}
    for name in tensors:
        if name not in planned_names and not format.has_constant(name):
            raise _failure(location, f"the finished file has a tensor that was not planned: {name!r:.200}")


def _difference(tensor: Tensor, spec: TensorSpec) -> str:
    """Return a text that says how a written tensor differs from its plan ``spec``, or an empty text.

    The dtype is compared only for dense tensors: formats of packed layers state it once for the folder, or as the dtype
    of the scales. Part sizes are compared only if the tensor has the planned layout. A format may store equal numbers
    in another layout, for example a scale per row as equal scales of blocks.
    """
    if (tensor.shape, tensor.codec) != (spec.shape, spec.codec):
        return f"shape and codec {(tensor.shape, tensor.codec)}, planned {(spec.shape, spec.codec)}"
    if spec.codec == DenseLayout.codec and tensor.dtype != spec.dtype:
        return f"dtype {tensor.dtype}, planned {spec.dtype}"
    if _without_dtype(tensor.params) != _without_dtype(spec.params):
        return ""
    for part in spec.parts:
        stored = tensor.parts.get(part.role)
        if stored is None:
            return f"no part {part.role!r}"
        if part.nbytes is not None and stored.dtype == part.dtype and stored.nbytes != part.nbytes:
            return f"{stored.nbytes} bytes in its part {part.role!r}, planned {part.nbytes}"
    return ""


def _without_dtype(params: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in params.items() if key != "dtype"}


def _failure(location: str, message: str) -> IntegrityError:
    return IntegrityError(RULE, f"{message}; {_REPORT}", where=location)


class Input(Protocol):
    """An opened artifact that a plan reads from."""

    def identity(self) -> Any:
        """Return JSON values that identify the input."""
        ...

    def require_whole(self) -> None:
        """Check the digest of the full file, if the file has one and the input was opened with digest checks."""
        ...

    def require_unchanged(self) -> None:
        """Raise ``IntegrityError`` if a file was written to since it was opened."""
        ...


class Observer:
    """Methods that ``execute`` calls during a run: to hash values, to check the results, to explain errors.

    The base class observes nothing.
    """

    def points(self, step: Step) -> Sequence[int]:
        """Return the points of a step at which a digest of the values is required.

        ``RESULT`` is the point of the patched values, for example. If one worker runs the step, it computes the digest
        (``CompletedStep.digest``). Several workers that share a step do not.
        """
        return ()

    def hash_selector(self, plan: Plan, resumed: int) -> AbstractContextManager[HashSelector]:
        """Return a context manager for the run of the plan; its value selects the hashes of each step.

        The first ``resumed`` steps were written by an earlier run and are not executed. Steps of other workers are not
        hashed here.
        """
        return _without_hashes()

    def conclude(self, completed: Sequence[CompletedStep]) -> Mapping[str, Any] | None:
        """Check the completed steps before anything is published; return metadata that depends on their results.

        Raises an error to refuse the result.
        """
        return None

    def explain(self, error: CodecError) -> None:
        """Raise a more precise error if the observer finds the cause of ``error``, which ended the run; else return."""


@contextmanager
def _without_hashes() -> Iterator[HashSelector]:
    yield hash_nothing


NULL_OBSERVER = Observer()


@dataclass(frozen=True)
class Target:
    """The destination of a plan's files.

    Parameters
    ----------
    staging : Staging
        The folder in which the files are written until they are published.
    name : str
        The name of the weight file.
    copy_companions : callable
        Receives the folder and the names of the written files; copies companions there and returns their names.
    kept_bytes : mapping of name to int
        For each file into which other processes have written tensors, the number of leading bytes to preserve.
    scattered : bool
        Whether tensors are stored on other machines and need no space here.
    reads : callable
        Receives the store into which this process wrote; returns the store from which the finished files can be read.
    """

    staging: Staging
    name: str
    copy_companions: Callable[[bytesource.Target, Sequence[str]], Sequence[str]] = lambda target, written: ()
    kept_bytes: Mapping[str, int] = field(default_factory=dict)
    scattered: bool = False
    reads: Callable[[Store], Store] = lambda written: written


@dataclass(frozen=True, slots=True)
class Executed:
    """The published result: completed steps in order, names of weight files and companions, and bytes of the weights.

    The first ``resumed`` steps are from an earlier run.
    """

    completed: Sequence[CompletedStep]
    files: Sequence[str]
    companions: Sequence[str]
    size: int
    resumed: int


def execute(
    plan: Plan, inputs: Sequence[Input], target: Target, resources: Resources, observer: Observer = NULL_OBSERVER
) -> Executed:
    """Run all steps and publish the complete result.

    Tensors of an interrupted run of the same plan in the staging folder are checked and reused. Nothing is published if
    a source was written to during the run, or if the digest of a full file differs.

    Parameters
    ----------
    plan : Plan
    inputs : sequence of Input
        All artifacts that the plan reads. Their identities and the plan determine the bytes of the result.
    target : Target
    resources : Resources
    observer : Observer, optional

    Raises
    ------
    UsageError
        ``resume.changed``: the interrupted run had another plan or source.
    CodecError, FormatError, IntegrityError, ResourceError
        Nothing exists under the final name then.
    """
    staging = target.staging
    decoded = (tensor for step in plan.steps if (tensor := step.decodes) is not None)
    require_in_proportion(decoded, staging.location)
    chunk_plans, budget, recycled = choose_chunks(plan, resources)
    with Workers(1, "ingot-whole") as checker:
        run = _Run(plan, target, resources, observer)
        checked = checker.submit(_require_whole, inputs)
        run.prepare([source.identity() for source in inputs])
        files = run.write(chunk_plans, (budget, recycled), checked.result)
    companions = list(target.copy_companions(run.files, files))
    for source in inputs:
        source.require_unchanged()
    written = run.files.store()
    require_readable(plan, target.reads(written), target.name, files, staging.location)
    size = sum(written.stat(name).size for name in files)
    staging.publish([*files, *(name for name in companions if name not in files)])
    return Executed(run.completed, files, companions, size, run.resumed)


def _require_whole(inputs: Sequence[Input]) -> None:
    for source in inputs:
        source.require_whole()


class _Run:
    """The execution of a plan whose files are written to a staging folder."""

    def __init__(self, plan: Plan, target: Target, resources: Resources, observer: Observer) -> None:
        self._plan = plan
        self._target = target
        self._resources = resources
        self._observer = observer
        self.files = LocalTarget(target.staging.files, late=not target.scattered)
        self.completed: list[CompletedStep] = []
        self.resumed = 0

    def prepare(self, identities: Sequence[Any]) -> None:
        """Restore the records of an earlier run, and check the disk space for the other tensors."""
        plan = self._plan
        staging = self._target.staging
        self._journal = Journal(LocalTarget(staging.folder, late=True), self._fingerprint(identities))
        records = self._intact(self._journal.earlier()) if staging.resuming else []
        self.resumed = len(records)
        ends = _ends(records)
        self.files.cut(ends | {name: max(size, ends.get(name, 0)) for name, size in self._target.kept_bytes.items()})
        self._writer = self._restored(records)
        if not self._target.scattered:
            staging.require_room(plan.min_size)
        self._journal.start(records)

    def _fingerprint(self, identities: Sequence[Any]) -> str:
        plan = self._plan
        settings = {
            "format": plan.format.name,
            "name": ascii(self._target.name),
            "options": asdict(plan.options),
            "metadata": sha256(
                dumps(plan.metadata, default=ascii).encode()
            ).hexdigest(),  # the metadata of a delta is large
        }
        return fingerprint(identities, settings, map(step_data, plan.steps))

    def write(
        self, chunk_plans: Sequence[ChunkPlan], memory: tuple[int, int], checked: Callable[[], object]
    ) -> list[str]:
        """Run the remaining steps; return the names of the finished files.

        ``memory`` contains the number of bytes for chunks in flight, and the number of bytes of recycled memory.
        ``checked`` waits until the digests of the sources were checked, and raises an error if one differs.
        """
        plan = self._plan
        writer = self._writer
        resources = self._resources
        start = self.resumed
        try:
            with self._observer.hash_selector(plan, start) as hash_selector:
                with Pipeline(
                    plan.steps[start:],
                    chunk_plans[start:],
                    workers=resources.workers,
                    budget=memory[0],
                    measured=plan.measured,
                    recycled=memory[1],
                    hash_selector=hash_selector,
                ) as pipeline:
                    self._drive(pipeline)
                checked()
                metadata = self._observer.conclude(self.completed)
            if metadata is not None:
                writer.amend(metadata)
            return writer.finish()
        except BaseException as error:
            writer.abort()
            if isinstance(error, CodecError):
                self._observer.explain(error)
            raise
        finally:
            self._journal.close()

    def _drive(self, pipeline: Pipeline) -> None:
        """Write the chunks of the pipeline."""
        pending = self._resources.workers + 2

        def opened(event: Begin) -> Sink:
            written = event.running.written
            step = event.step
            if written is not None:
                return _Restored(self._writer, written)
            return TensorSink(
                self._writer, step.spec, compress=step.compress_parts, pool=pipeline.pool, pending=pending
            )

        write_chunks(pipeline, opened, self._finished, self._resources.progress.advance)

    def _finished(self, event: End, record: dict[str, Any], error: ErrorStats) -> None:
        nbytes = sum(blob[2] for blob in record["blobs"])
        notes = event.running.notes()
        params = dict(event.step.spec.params)  # includes parameters from fit passes, which the plan lacks
        self._journal.append(
            {"written": record, "nbytes": nbytes, "error": error.sums(), "params": params, "notes": notes}, nbytes
        )
        self.completed.append(CompletedStep(event.step, nbytes, error, notes))
        if event.step.encoder is not None:
            event.step.encoder.forget()

    def _intact(self, earlier: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the leading records of an earlier run that match the plan and whose bytes are complete and intact."""
        intact = list[dict[str, Any]]()
        written = self.files.store()
        for record, step in zip(earlier, self._plan.steps, strict=False):
            if record["written"]["name"] != step.spec.name or not is_intact(record["written"], written):
                break
            intact.append(record)
        return intact

    def _restored(self, records: list[dict[str, Any]]) -> FormatWriter:
        """Return a writer that continues after the tensors of ``records``, which are already in the files."""
        plan = self._plan
        if not records:
            return plan.format.writer(self.files, self._target.name, plan.artifact, plan.options)
        learnt = [replace(spec, params=record["params"]) for record, spec in zip(records, plan.specs, strict=False)]
        artifact = replace(plan.artifact, tensors=[*learnt, *plan.specs[len(records) :]])
        writer = plan.format.writer(self.files, self._target.name, artifact, plan.options)
        for record, step, spec in zip(records, plan.steps, learnt, strict=False):
            writer.restore(record["written"])
            error = ErrorStats(**record["error"])
            self.completed.append(CompletedStep(replace(step, spec=spec), record["nbytes"], error, record["notes"]))
            self._resources.progress.advance(step.in_bytes)
        return writer


class _Restored:
    """A sink for a tensor that is already in the file; it passes the tensor's record to the writer, and no bytes."""

    def __init__(self, writer: FormatWriter, record: dict[str, Any]) -> None:
        self._writer = writer
        self._record = record

    def write(self, parts: Mapping[str, Any]) -> None:
        assert not parts

    def close(self) -> dict[str, Any]:
        self._writer.restore(self._record)
        return self._record


def _ends(records: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return for each file the end of its last tensor in ``records``: an offset in bytes."""
    ends: dict[str, int] = {}
    for record in records:
        for name, offset, length, _ in record["written"]["blobs"]:
            ends[name] = max(ends.get(name, 0), offset + length)
    return ends
