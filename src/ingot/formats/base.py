"""The contract of a format: a reader that builds a catalog, a writer that takes parts as they come."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from ingot.core.checksums import HASHERS
from ingot.errors import IngotError, UsageError
from ingot.model.artifact import Artifact
from ingot.model.attachments import NOTHING, Attachments
from ingot.model.bytesource import Buffer, ByteSource, Target
from ingot.model.features import Flags
from ingot.model.report import Table
from ingot.model.spec import TensorSpec
from ingot.model.store import Store
from ingot.model.tensor import Tensor


@dataclass(slots=True)
class Catalog:
    """What a format's reader found: every tensor with its parts located and validated, no decoder attached.

    ``tensors`` keeps the file's order and may build its values on access, the same object each time. ``headers`` maps
    each file to the bytes of its header or manifest (for fingerprints); ``sources`` are to be closed with the
    checkpoint. ``notes`` are oddities that are read though the format's document asks for something else, ``remarks``
    what it does not forbid but is worth telling: pairs of rule and message. ``verify`` prints both; strictly the first
    are errors.
    ``check_whole`` compares a digest that covers the whole file, where there is one; it reads everything.
    ``check_files`` compares digests of whole files whose parts have their own: it yields an error for each that
    differs, and ``verify`` alone asks for it.
    ``attachments`` is what the file holds beside the weights; ``details`` makes the tables that ``inspect`` adds;
    ``features`` are those that decide on the kernels that could run the file, where its format knows such.
    ``manifest_digest`` tells whether the file has a digest of its header or manifest, which then was right; None where
    its format has no place for one, or covers the header otherwise. ``receipt`` is the text of the file's own
    (``model.receipt``), which is no metadata: nothing that is made of the file takes it along. ``called`` are names
    that recipes go by for tensors whose own tell nothing, as graphs have them.
    ``unread``: tensors or constants that the file holds and the reader could not express: name to reason.
    """

    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, Buffer] = field(default_factory=dict)
    sources: Sequence[ByteSource] = ()
    notes: Sequence[tuple[str, str]] = ()
    remarks: Sequence[tuple[str, str]] = ()
    attachments: Attachments = NOTHING
    details: Callable[[], Sequence[Table]] = tuple
    features: Flags | None = None
    check_whole: Callable[[], None] | None = None
    check_files: Callable[[], Iterable[IngotError]] = tuple
    manifest_digest: bool | None = None
    receipt: str | None = None
    called: Mapping[str, str] = field(default_factory=dict)
    unread: Mapping[str, str] = field(default_factory=dict)
    """Tensors or constants that the file holds and the reader could not express: name -> reason."""


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """What a writer may be asked: the digest to write (``crc32c``, ``sha256``, None), the size of a shard in bytes.

    ``compact`` asks formats that store pruned matrices in full size (``FullSize``) for what is left of them alone.
    ``beside`` tells whether there may be other files than the one named, ``base`` is the digest of the file that an
    overlay refers to.
    """

    digest: str | None = "crc32c"
    max_shard: int | None = None
    compact: bool = False
    beside: bool = True
    base: str | None = None

    def __post_init__(self) -> None:
        if self.digest is not None and self.digest not in HASHERS:
            raise UsageError(
                f"expected the digest {', '.join(HASHERS)} or none, found {self.digest!r}", rule="convert.digest"
            )


class FormatWriter(Protocol):
    """Writes tensors one after the other, in the order of the specs it was made with.

    Between ``begin`` and ``end``, ``write`` may be called any number of times per role; the bytes of one role come in
    order, roles may alternate. Bytes are the *stored* bytes (already compressed where the part says ``zstd``).
    """

    def begin(self, spec: TensorSpec) -> None: ...

    def write(self, role: str, data: Buffer) -> None: ...

    def end(self) -> dict[str, Any]:
        """Close the tensor; return a JSON-able record from which ``restore`` can take it back after a kill.

        The record has at least ``{"name": str, "blobs": [[file, offset, length, digest], ...]}`` with a ``crc32c``
        digest of the stored bytes, so that a resumed run can check that they are there.
        """
        ...

    def restore(self, record: Mapping[str, Any]) -> None:
        """Take a tensor back as written by an earlier run, instead of ``begin`` ... ``end``."""
        ...

    def finish(self) -> list[str]:
        """Complete and close all files; return their names."""
        ...

    def abort(self) -> None:
        """Close all files as they are."""
        ...


@runtime_checkable
class LateMetadata(Protocol):
    """A writer whose metadata may be completed while tensors are written.

    A delta's base and result are hashed in the pass that writes it, so their identities are known only at its end.
    """

    def amend(self, metadata: Mapping[str, Any]) -> None:
        """Replace the metadata that the writer was made with; any time before ``finish``."""
        ...


@runtime_checkable
class CarriesReceipt(Protocol):
    """A format whose files can be given a receipt while every byte of their tensors stays where it is."""

    def with_receipt(self, source: ByteSource, text: str) -> tuple[int, bytes]:
        """Return how many of the file's first bytes stay, and the bytes that follow them in one with this receipt."""


@runtime_checkable
class LooksInside(Protocol):
    """A format that reads into a folder to recognise it, because file names do not tell.

    It is asked before a format that would open the same entry by its name.
    """

    def confirms(self, store: Store) -> bool:
        """Whether the folder whose names ``entry`` has taken is of this format; reads little."""
        ...


@runtime_checkable
class LastResort(Protocol):
    """A format that is taken for a folder's only where no other finds anything in it: the same weights often lie there
    in a better one."""

    last_resort: bool


@runtime_checkable
class Marked(Protocol):
    """A format of folders in which one file, the sentinel, marks a finished artifact.

    Other weights beside a marked artifact are forms of the same model. Beside one without a mark they are another
    checkpoint, and whoever opens the folder has to choose.
    """

    def marked(self, store: Store) -> bool:
        """Whether the sentinel is there; reads little."""
        ...


@runtime_checkable
class HoldsTiers(Protocol):
    """A format of a folder that may hold other forms of the same model: these are no second checkpoint.

    ``tiers`` are the names of their files.
    """

    tiers: tuple[str, ...]


@runtime_checkable
class ConfigKeys(Protocol):
    """A format whose tensors are packed as ``config.json`` says.

    Its writer writes the artifact's ``config`` with these keys. They are left out where a folder of this format is
    converted into another.
    """

    config_keys: tuple[str, ...]

    def activations(self, config: Mapping[str, Any]) -> Mapping[str, str]:
        """Return what a ``config.json`` of this format says of how inputs of layers, keys and values are quantized:
        in a few words, by key."""
        ...


@runtime_checkable
class ReadsConfig(Protocol):
    """A format of folders whose ``config.json`` another file may complete."""

    def read_config(self, store: Store) -> dict[str, Any]:
        """Return ``config.json`` with what the other file adds."""
        ...


@runtime_checkable
class EvenGroups(Protocol):
    """A format in whose layers groups divide the columns.

    ``even_groups``: the sizes that its programs run; empty where each divisor of the columns will do.
    ``one_group``: all layers of a folder have groups of one size.
    """

    even_groups: tuple[int, ...]
    one_group: bool


@runtime_checkable
class FitsSource(Protocol):
    """A format in which settings of the source's ``config.json`` decide what layouts fit."""

    def for_source(self, config: Mapping[str, Any]) -> Format:
        """Return the format for weights of a folder with this ``config.json``."""
        ...


@runtime_checkable
class TellsUnsaid(Protocol):
    """A format that writes a ``config.json`` and may keep in it what another said of activations."""

    def unsaid(self, artifact: Artifact, said: Mapping[str, str]) -> Sequence[str]:
        """Return what is not kept of ``said``, which are the ``activations`` of the artifact's ``config``."""
        ...


@runtime_checkable
class Packs(Protocol):
    """A format whose packed layers are of some codecs, beside dense tensors."""

    codecs: tuple[str, ...]


@runtime_checkable
class PacksFolder(Packs, Protocol):
    """A format of folders whose purpose is packed layers.

    ``merges``: vLLM reads such folders, and multiplies by several matrices as one. ``dense_key`` is the key of
    ``config.json`` that lists layers which stay dense; empty if the folder needs no list. ``how_to_quantize`` says how
    dense weights become packed layers; empty if a folder without any is what the programs of the format read too.
    """

    merges: bool
    dense_key: str
    how_to_quantize: str


@runtime_checkable
class StatesDtypes(Protocol):
    """A format in which what is to be written states the element types of tensors."""

    def dtype_of(self, name: str) -> str | None:
        """Return the element type that a tensor of this name has there; None where nothing says."""
        ...


@runtime_checkable
class KeepsAttributes(Protocol):
    """What a format has beside ``Format`` if it stores attributes of tensors that no codec knows."""

    keeps_attributes: bool


@runtime_checkable
class OneHead(Protocol):
    """A format whose loaders refuse a head where the embeddings are tied to it."""

    one_head: bool


@runtime_checkable
class SplitsOnRequest(Protocol):
    """A format with ``shards`` whose usual artifact is one file, in a folder too."""

    splits_on_request: bool


@runtime_checkable
class Renamed(Protocol):
    """A format whose writing programs rename the tensors that they compress."""

    def original(self, name: str) -> str:
        """Return the name that a tensor had before it was compressed; its own where it was not renamed."""
        ...


@runtime_checkable
class FullSize(Protocol):
    """What a format has beside ``Format`` if others read pruned matrices from it only in their full size."""

    full_size: bool

    def compacting(self) -> Format:
        """Return the format that takes pruned matrices without what is dropped, as whoever asks for it wants them."""
        ...


@runtime_checkable
class Overlays(Protocol):
    """A format whose files may refer to parts of another file."""

    def over(self, store: Store, name: str, target: str, digest: str | None) -> Overlay:
        """Return the format of a file called ``target`` that refers to parts of the file ``name`` beside it.

        ``digest`` is the kind of digest by which the file is known again. Errors as of ``read``.
        """
        ...


@runtime_checkable
class Exempting(Protocol):
    """What a format has beside ``Format`` if its programs take some tensors in one element type only."""

    def exempt(self, name: str, shape: tuple[int, ...]) -> str | None:
        """Return the element type that a tensor must have, which no recipe changes; None if any that it carries."""
        ...


@runtime_checkable
class KeepsConstants(Protocol):
    """A format of programs that keep some of their constants as they are, whatever a recipe says."""

    def why_kept(self, name: str) -> str | None:
        """Return why the program keeps a tensor as it is; None if a recipe may change it."""
        ...

    def holds(self, name: str) -> bool:
        """Whether the program has values of its own for a tensor, which stay where none are written."""
        ...


@runtime_checkable
class Exported(Protocol):
    """A format of programs, which lie beside the checkpoint that they were made of: the weights are meant then."""

    exported: bool


@runtime_checkable
class FixedScales(Protocol):
    """A format of operators whose scales are of the type of the values, and whose codes may have to be unsigned.

    Recipes that leave the type of scales open get that one, and symmetric codes their zero point in the middle.
    """

    fixed_scales: bool


@runtime_checkable
class Fitting(Protocol):
    """A format in which an attachment decides what tensors fit: Core ML writes those that its program uses."""

    def fit(self, attachments: Attachments) -> Format:
        """Return the format for an artifact with these attachments.

        Raises ``UnsupportedError`` where one is missing that the format needs.
        """
        ...


@runtime_checkable
class Compresses(Protocol):
    """A format whose parts may be compressed: ``encodings`` are those that it writes, the preferred one first."""

    encodings: tuple[str, ...]


@runtime_checkable
class Containers(Protocol):
    """A format whose container has several versions: the formats that write them, by the version's number or name."""

    containers: Mapping[str, str]


@runtime_checkable
class StoresOnce(Protocol):
    """A format that stores equal parts once; its ``size`` is that of a file in which no two are equal."""

    stores_once: bool


class Format(Protocol):
    """A container.

    ``digests`` tells whether it can store digests of parts, ``shards`` whether it can be split into several files,
    ``attachments`` which kinds of attachments it carries. One whose artifact is a folder as a whole has an attribute
    ``folder = True``; see ``Marked`` for other weights in such a folder.
    """

    name: str
    suffixes: tuple[str, ...]
    summary: str
    digests: bool
    shards: bool
    attachments: tuple[str, ...]

    def claims(self, name: str, head: bytes) -> bool:
        """Whether a file of this name that begins with ``head`` (up to 16 bytes) is of this format."""
        ...

    def entry(self, names: Sequence[str]) -> str | None:
        """Of a folder's file names, the one to open for a checkpoint of this format; None if there is none.

        Folders in it are listed too, with a slash at the end.
        """
        ...

    def refuses(self, spec: TensorSpec) -> str | None:
        """Why this format cannot carry the tensor (codec, dtype, encoding); None if it can."""
        ...

    def order(self, specs: Sequence[TensorSpec]) -> Sequence[int]:
        """Return the order in which the writer wants tensors, as indices into ``specs``.

        Raises ``UnsupportedError`` where the format cannot carry these tensors together.
        """
        ...

    def read(self, store: Store, name: str, *, verify: bool = True) -> Catalog:
        """Validate the header or manifest of ``name`` completely and locate every tensor.

        Raises ``FormatError`` with a rule, ``IntegrityError`` or ``UnsupportedError``.
        """
        ...

    def metadata(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a checkpoint's metadata as this format can carry it: itself, or values as JSON text."""
        ...

    def file_name(self, stem: str) -> str:
        """Name of the single file (or index) for an artifact called ``stem``."""
        ...

    def size(self, artifact: Artifact, options: WriteOptions) -> int:
        """Exact bytes of all files, or the most that they can be where ``knows_size`` says so: unknown lengths of parts
        are counted as ``PartSpec.at_most``."""
        ...

    def writer(self, target: Target, name: str, artifact: Artifact, options: WriteOptions) -> FormatWriter:
        """Start writing. ``name`` is the file to create (the index is named by the format if it shards)."""
        ...


@runtime_checkable
class Overlay(Format, Protocol):
    """A format of files that refer to one base, which ``identity`` tells from others."""

    identity: str
