"""The contract of a format: a reader that builds a catalog, and a writer that receives the parts in order."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from ingot.core.bytes.checksums import HASHERS
from ingot.core.bytes.encodings import ENCODED
from ingot.errors import IngotError, UnsupportedError, UsageError
from ingot.model.artifact import NO_ATTACHMENTS, Artifact, Attachments
from ingot.model.bytesource import Buffer, ByteSource, Target
from ingot.model.layouts.alternatives import alternatives
from ingot.model.layouts.base import Storable
from ingot.model.layouts.table import layout_of
from ingot.model.spec import PartSpec, TensorSpec
from ingot.model.stacks import Flags
from ingot.model.store import Store
from ingot.model.tensor import Tensor
from ingot.naming.config import stored_config
from ingot.reporting.report import Table


@dataclass(slots=True)
class Catalog:
    """The result of a format's reader: every tensor, its parts located and validated, without decoders.

    ``tensors`` keeps the order of the file. It may build a tensor on first access, and then always returns the same
    object. ``headers`` maps each file to the content of the file's header or manifest (for fingerprints). ``sources``
    are closed with the checkpoint.

    ``notes`` and ``remarks`` are pairs of a rule and a message; ``verify`` prints both. A note is a violation of the
    format's document that the reader tolerates; ``verify --strict`` counts it as an error. A remark is permitted but
    worth reporting.

    ``check_whole`` is set if the file contains a digest of itself; it reads the complete file and compares the digest.
    ``check_files`` compares the digests of complete files whose parts also have digests. It yields an error for each
    file that differs; only ``verify`` calls it.

    ``attachments`` are the data other than weights. ``details`` builds the tables that ``inspect`` adds. ``features``
    are the flags that select kernels, if the format stores such flags. ``manifest_digest`` is true if the header or
    manifest has a digest and the digest is correct. It is false if the header has no digest. It is None if the format
    cannot store a digest of the header, or protects the header in another way. ``receipt`` is the text of the file's
    receipt (``model.receipt``); it is not part of the metadata, and results do not inherit it. ``aliases`` map tensors
    with uninformative names, such as constants of graphs, to names that recipes can match.
    """

    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, Buffer] = field(default_factory=dict)
    sources: Sequence[ByteSource] = ()
    notes: Sequence[tuple[str, str]] = ()
    remarks: Sequence[tuple[str, str]] = ()
    attachments: Attachments = NO_ATTACHMENTS
    details: Callable[[], Sequence[Table]] = tuple
    features: Flags | None = None
    check_whole: Callable[[], None] | None = None
    check_files: Callable[[], Iterable[IngotError]] = tuple
    manifest_digest: bool | None = None
    receipt: str | None = None
    aliases: Mapping[str, str] = field(default_factory=dict)
    unread: Mapping[str, str] = field(default_factory=dict)
    """Tensors or constants that the file contains and the reader cannot express; each name maps to the reason."""


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """Options of a writer: the digest to write (``crc32c``, ``sha256`` or None) and the maximum size of a shard in
    bytes.

    If ``compact`` is set, formats that store pruned matrices in full size (``FormatTraits.full_size``) store the
    remaining rows or columns only. ``siblings`` allows the writer to create files besides the named file. ``base`` is
    the digest of the file to which an overlay refers. ``file_type`` is the ``general.file_type`` of a GGUF file if the
    caller names a mixture.
    """

    digest: str | None = "crc32c"
    max_shard: int | None = None
    compact: bool = False
    siblings: bool = True
    base: str | None = None
    file_type: int | None = None

    def __post_init__(self) -> None:
        if self.digest is not None and self.digest not in HASHERS:
            raise UsageError(
                f"expected the digest {', '.join(HASHERS)} or none, found {self.digest!r}", rule="convert.digest"
            )


class FormatWriter(Protocol):
    """A writer of tensors, one after the other, in the order of the specs that the constructor received.

    Between ``begin`` and ``end``, the caller may call ``write`` any number of times for each role. The bytes of a role
    come in order; roles may alternate. The bytes are *stored* bytes: they are compressed already if the part's encoding
    is ``zstd``.
    """

    @abstractmethod
    def begin(self, spec: TensorSpec) -> None: ...

    @abstractmethod
    def write(self, role: str, data: Buffer) -> None: ...

    @abstractmethod
    def end(self) -> dict[str, Any]:
        """Close the tensor and return a JSON-serializable record, with which ``restore`` accepts it in a resumed run.

        The record contains at least ``{"name": str, "blobs": [[file, offset, length, digest], ...]}``. The digest is
        the ``crc32c`` of the stored bytes, so that a resumed run can check that they are present.
        """
        ...

    @abstractmethod
    def restore(self, record: Mapping[str, Any]) -> None:
        """Accept a tensor that an earlier run wrote, instead of ``begin`` ... ``end``."""
        ...

    def amend(self, metadata: Mapping[str, Any]) -> None:
        """Replace the metadata that the constructor received, at any time before ``finish``.

        The pass that writes a delta also hashes its base and its result, so their identities are available only at the
        end. Writers of delta formats implement this method.
        """
        raise TypeError(f"{type(self).__name__} cannot replace its metadata")

    @abstractmethod
    def finish(self) -> list[str]:
        """Complete and close all files; return their names."""
        ...

    @abstractmethod
    def abort(self) -> None:
        """Close all files in their present state."""
        ...


@dataclass(frozen=True, slots=True)
class FormatTraits:
    """Facts about a format and about the programs that read it, as plain data.

    Parameters
    ----------
    digests : bool
        Digests of parts can be stored.
    shards : bool
        An artifact can be split into several files.
    shards_on_request : bool
        An artifact is split only if the caller requests it. In other formats, artifacts in folders are split at a
        default size.
    attachments : tuple of str
        Types of attachments that the format can store.
    encodings : tuple of str
        Encodings in which parts can be written, the preferred one first; empty if parts are never compressed.
    containers : mapping
        Versions of the container, by number or name, to the formats that write them.
    folder : bool
        The artifact is a complete folder, not a file. See ``Format.has_sentinel``.
    tiers : tuple of str
        Names of files in the folder that store another variant of the same model; they are not a second checkpoint.
    last_resort : bool
        The format applies to a folder only if no other format does: the folder often contains the same weights in a
        better format.
    exported : bool
        Files are programs that were exported from a checkpoint. If a folder contains both, the checkpoint is opened.
    looks_inside : bool
        File names do not identify a folder of this format: ``Format.confirms`` reads a little. The format takes
        precedence over a format that would open the same entry by its name.
    carries_receipt : bool
        A file can get a receipt without moving any byte of its tensors (``Format.with_receipt``).
    keeps_attributes : bool
        Attributes of tensors that no codec defines are stored.
    deduplicates : bool
        Equal parts are stored once; ``Format.size`` assumes that no two parts are equal.
    overlays : bool
        Files may refer to parts of another file (``Format.overlay``).
    config_keys : tuple of str
        Keys of ``config.json`` that describe how tensors are packed. The writer writes them into the artifact's
        ``config.json``; a conversion into another format leaves them out.
    packed_codecs : tuple of str
        Codecs of packed layers, for folders that consist of packed layers and dense tensors.
    word_forms : tuple of str
        Variants of packed integers that the format can store, for codecs with several variants.
    merges : bool
        vLLM reads folders of this format, and merges several matrices into one multiplication.
    dense_key : str
        Key of ``config.json`` that lists the dense layers; empty if the folder needs no list.
    how_to_quantize : str
        Advice on how dense weights become packed layers; empty if programs also read a folder without packed layers.
    group_sizes : tuple of int or None
        Group sizes that programs support, if groups must divide the columns; empty if any divisor is supported. None
        if groups need not divide the columns.
    one_group : bool
        All layers of a folder have the same group size.
    one_group_preferred : bool
        Some programs read only folders in which all layers have the same group size; presets use one group size.
    one_head : bool
        Loaders refuse a head if the embeddings are tied to it.
    fixed_scales : bool
        Operators need scales of the type of the values, and perhaps unsigned codes. If a recipe does not set the type
        of the scales, scales get the type of the values, and symmetric codes get the middle code as their zero point.
    f16_scales : bool
        Scales are always f16, so that a recipe with ``scales = "half"`` gets f16 for weights in bf16 too.
    full_size : bool
        Readers need pruned matrices in their full size (``Format.compacted``).
    rounds_steps : bool
        Programs round the product of a code and its scale to the type of the scales, and then the sum with an offset
        too. Programs of other formats compute in f32 and round once.
    """

    digests: bool = False
    shards: bool = False
    shards_on_request: bool = False
    attachments: tuple[str, ...] = ()
    encodings: tuple[str, ...] = ()
    containers: Mapping[str, str] = field(default_factory=dict)
    folder: bool = False
    tiers: tuple[str, ...] = ()
    last_resort: bool = False
    exported: bool = False
    looks_inside: bool = False
    carries_receipt: bool = False
    keeps_attributes: bool = False
    deduplicates: bool = False
    overlays: bool = False
    config_keys: tuple[str, ...] = ()
    packed_codecs: tuple[str, ...] = ()
    word_forms: tuple[str, ...] = ()
    merges: bool = False
    dense_key: str = ""
    how_to_quantize: str = ""
    group_sizes: tuple[int, ...] | None = None
    one_group: bool = False
    one_group_preferred: bool = False
    one_head: bool = False
    fixed_scales: bool = False
    f16_scales: bool = False
    full_size: bool = False
    rounds_steps: bool = False


class Format(ABC):
    """A container of tensors: how files are recognized, read, sized and written.

    ``traits`` states what the format can hold. Methods that are not abstract have defaults for a format without the
    feature in question.
    """

    name: str
    suffixes: tuple[str, ...]
    summary: str
    traits: FormatTraits = FormatTraits()

    # Recognizing and reading.

    @abstractmethod
    def claims(self, name: str, head: bytes) -> bool:
        """Return whether a file of this name that begins with ``head`` (up to 16 bytes) is of this format."""

    @abstractmethod
    def entry(self, names: Sequence[str]) -> str | None:
        """Return the file to open for a checkpoint of this format, given a folder's file names; None if there is none.

        Names of folders are listed too, with a slash at the end.
        """

    def confirms(self, store: Store) -> bool:
        """Return whether a folder whose file names ``entry`` accepted is of this format; reads at most headers.

        Called if ``traits.looks_inside`` is set.
        """
        return True

    def has_sentinel(self, store: Store) -> bool:
        """Return whether the file that marks a finished folder of this format is present; reads little.

        If the sentinel is present, other weights in the folder are variants of the same model. If it is absent, they
        are another checkpoint, and the caller has to choose.
        """
        return False

    def fallback_entry(self, names: Sequence[str], store: Store) -> str | None:
        """Return the file to open in a folder that no format claims; None by default. Reads at most headers."""
        return None

    def fallback_folder(self, store: Store) -> str | None:
        """Return the name of the inner folder that contains the weights; None if there is none.

        Called for a folder that no format claims.
        """
        return None

    @abstractmethod
    def read(self, store: Store, name: str, *, verify: bool = True) -> Catalog:
        """Validate the header or manifest of ``name`` completely and locate every tensor.

        Raises ``FormatError`` with a rule, ``IntegrityError`` or ``UnsupportedError``.
        """

    def read_config(self, store: Store) -> dict[str, Any]:
        """Return the folder's ``config.json``, completed by other files if the format defines such files.

        Raises ``FormatError``.
        """
        return stored_config(store, "model.config")

    def activations(self, config: Mapping[str, Any]) -> Mapping[str, str]:
        """Return how layers quantize their inputs, keys and values, according to ``config.json``.

        The result maps each setting to a short text.
        """
        return {}

    def original_name(self, name: str) -> str:
        """Return the name that a tensor had before a compression program renamed it."""
        return name

    # Deciding what can be written.

    @abstractmethod
    def why_unsupported(self, spec: TensorSpec) -> str | None:
        """Return why this format cannot store the tensor ``spec``, for example because of its codec; None if it can."""

    def for_attachments(self, attachments: Attachments) -> Format:
        """Return the format for an artifact with these attachments, which may restrict the tensors that it can store.

        Raises ``UnsupportedError`` if the format needs an attachment that is missing.
        """
        return self

    def for_source(self, config: Mapping[str, Any]) -> Format:
        """Return the format for weights of a folder with this ``config.json``; it may accept fewer layouts."""
        return self

    def for_activations(self, scheme: str) -> Format:
        """Return the format for a recipe whose layers quantize their inputs by this scheme (``Recipe.activations``).

        Raises ``UnsupportedError`` ``recipe.activations`` if a result of this format cannot declare it.
        """
        raise UnsupportedError(
            f"the recipe quantizes activations ({scheme}), which {self.name} cannot declare; use "
            "--format compressed-tensors, or a recipe for weights alone such as w8a16",
            rule="recipe.activations",
        )

    def compacted(self) -> Format:
        """Return the format that stores pruned matrices without the removed rows or columns."""
        return self

    def overlay(self, store: Store, name: str, target: str, digest: str | None) -> Format:
        """Return the format of a file called ``target`` that refers to parts of the file ``name`` in the same folder.

        ``digest`` is the digest algorithm that identifies the file. Called if ``traits.overlays`` is set; raises the
        errors of ``read``.
        """
        raise NotImplementedError

    def base_identity(self) -> str | None:
        """Return the identity of the file to which an overlay refers; None if this format is not an overlay."""
        return None

    def declared_dtype(self, name: str) -> str | None:
        """Return the element type that the target declares for a tensor of this name; None if it declares none."""
        return None

    def required_dtype(self, name: str, shape: tuple[int, ...]) -> str | None:
        """Return the element type that a tensor must have, which no recipe changes; None if it may have any."""
        return None

    def why_constant(self, name: str) -> str | None:
        """Return why the target program requires a tensor to stay unchanged; None if a recipe may change it."""
        return None

    def has_constant(self, name: str) -> bool:
        """Return whether the target program contains values for a tensor.

        If the tensor is not written, these values stay.
        """
        return False

    def dropped_settings(self, artifact: Artifact, settings: Mapping[str, str]) -> Sequence[str]:
        """Return texts of the ``settings`` that the result cannot declare.

        ``settings`` is the source's result of ``activations``.

        By default a result declares none of them.
        """
        return [f"{key} ({value})" for key, value in settings.items()]

    # Writing.

    def order(self, specs: Sequence[TensorSpec]) -> Sequence[int]:
        """Return the order in which the writer needs the tensors, as indices into ``specs``; the default is any order.

        Raises ``UnsupportedError`` if the format cannot store these tensors together.
        """
        return range(len(specs))

    def metadata(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a checkpoint's metadata in the form that this format can store; by default, they are unchanged."""
        return values

    def file_name(self, stem: str) -> str:
        """Return the name of the single file (or index) of an artifact called ``stem``."""
        return stem + self.suffixes[0]

    @abstractmethod
    def size(self, artifact: Artifact, options: WriteOptions) -> int:
        """Return the exact total size of all files in bytes, or an upper limit if ``knows_size`` returns false.

        Parts of unknown length count as ``PartSpec.at_most``.
        """

    @abstractmethod
    def writer(self, target: Target, name: str, artifact: Artifact, options: WriteOptions) -> FormatWriter:
        """Return a writer that creates the file ``name`` in ``target``.

        If the writer splits the artifact into shards, the format determines the names of the shards and their index.
        """

    def with_receipt(self, source: ByteSource, text: str) -> tuple[int, bytes]:
        """Return the number of bytes at the start of the file that a receipt leaves unchanged, and the new bytes after
        them.

        Called if ``traits.carries_receipt`` is set.
        """
        raise NotImplementedError

    def commands(self, artifact: WrittenArtifact) -> Sequence[Sequence[str]]:
        """Return the commands that run the written artifact, each as a list of arguments; empty if there is none."""
        return ()


class ReadOnlyFormat(Format):
    """A format that Ingot reads and does not write.

    Subclasses set ``why_read_only`` and ``read_only_rule``: the message and the rule of the error. The message also
    names a format to write instead.
    """

    why_read_only: str
    read_only_rule: str

    def why_unsupported(self, spec: TensorSpec) -> str | None:
        """Return why no tensor can be written: there is no writer."""
        return self.why_read_only

    def metadata(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return no metadata, because nothing is written."""
        return {}

    def size(self, artifact: Artifact, options: WriteOptions) -> int:
        """Raise ``UnsupportedError`` with the format's rule: there is no writer."""
        raise UnsupportedError(self.why_read_only, rule=self.read_only_rule)

    def writer(self, target: Target, name: str, artifact: Artifact, options: WriteOptions) -> FormatWriter:
        """Raise ``UnsupportedError`` with the format's rule: there is no writer."""
        raise UnsupportedError(self.why_read_only, rule=self.read_only_rule)


PROMPT = "Once upon a time"


@dataclass(frozen=True, slots=True)
class WrittenArtifact:
    """A written artifact: a folder or a file at the local path ``path``.

    ``folder`` is true if the artifact is a folder. ``first`` is the path of the first weight file. ``generates`` is
    true if ``config.json`` and a tokenizer are present, so that a program can generate text.
    """

    path: str
    first: str
    folder: bool
    generates: bool
    metadata: Mapping[str, Any] = field(default_factory=dict)


def in_python(code: str, *texts: str) -> Sequence[str]:
    """Return the command that runs one line of Python, in which each ``{}`` becomes one of ``texts`` as a literal."""
    return "python", "-c", code.format(*(json.dumps(text, ensure_ascii=False) for text in texts))


RAW = "raw"
SUPPORTED = (RAW, *ENCODED)


def knows_size(format: Format, specs: Sequence[TensorSpec]) -> bool:
    """Return whether a format's ``size`` is exact to the byte; if not, it is an upper limit."""
    lengths = [part.length for spec in specs for part in spec.parts]
    return None not in lengths and (not format.traits.deduplicates or len(set(lengths)) == len(lengths))


def encoding_in(format: Format, encoding: str) -> str:
    """Return the encoding in which a format writes a part for which a recipe requests ``encoding``.

    If the format does not support ``encoding``, it is the format's preferred compression.
    """
    supported = format.traits.encodings
    return encoding if encoding == RAW or not supported or encoding in supported else supported[0]


def encoding_variants(format: Format, spec: TensorSpec) -> Iterator[TensorSpec]:
    """Yield the spec of a tensor, with compressed parts in encodings that the format supports.

    The first spec has the format's preferred encoding, and the next one has ``raw``.
    """
    if all(part.encoding == RAW for part in spec.parts) or any(part.encoding not in SUPPORTED for part in spec.parts):
        return
    for encoding in (encoding_in(format, ""), RAW):
        parts = tuple(part if part.encoding == RAW else _encoded(part, encoding) for part in spec.parts)
        variant = replace(spec, parts=parts)
        if encoding and format.why_unsupported(variant) is None:
            yield variant


def _encoded(part: PartSpec, encoding: str) -> PartSpec:
    if encoding == RAW:
        return replace(part, encoding=RAW, length=part.nbytes, uncompressed_length=None)
    return replace(part, encoding=encoding, length=None)


def layout_variants(format: Format, spec: TensorSpec) -> Iterator[tuple[Storable, TensorSpec]]:
    """Yield the other layouts of a tensor's values that a format supports, the most similar layout first.

    Each layout is paired with the spec of the tensor in this layout. The codec's ``repack`` decides which layouts
    preserve every value.
    """
    for layout in alternatives(layout_of(spec), spec):
        variant = with_layout(spec, layout)
        if format.why_unsupported(variant) is None:
            yield layout, variant


def with_layout(spec: TensorSpec, layout: Storable) -> TensorSpec:
    """Return the spec of a tensor whose values are written in another layout."""
    return replace(
        spec,
        dtype=layout.dtype,
        codec=layout.codec,
        parts=layout.part_specs(spec.shape),
        params=layout.attributes(),
    )
