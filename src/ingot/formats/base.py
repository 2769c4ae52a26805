"""The contract of a format: a reader that builds a catalog, a writer that takes parts as they come."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ingot.core.bytes.checksums import HASHERS
from ingot.errors import IngotError, UsageError
from ingot.model.artifact import Artifact
from ingot.model.attachments import NOTHING, Attachments
from ingot.model.bytesource import Buffer, ByteSource, Target
from ingot.model.features import Flags
from ingot.model.spec import TensorSpec
from ingot.model.store import Store
from ingot.model.tensor import Tensor
from ingot.naming.config import stored_config
from ingot.reporting.report import Table


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
    """Options of a writer: the digest to write (``crc32c``, ``sha256``, None), the size of a shard in bytes.

    If ``compact`` is set, formats that store pruned matrices in full size (``FormatTraits.full_size``) store the
    remaining rows or columns only. ``beside`` allows files besides the named one. ``base`` is the digest of the file
    that an overlay refers to.
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

    @abstractmethod
    def begin(self, spec: TensorSpec) -> None: ...

    @abstractmethod
    def write(self, role: str, data: Buffer) -> None: ...

    @abstractmethod
    def end(self) -> dict[str, Any]:
        """Close the tensor; return a JSON-able record from which ``restore`` can take it back after a kill.

        The record has at least ``{"name": str, "blobs": [[file, offset, length, digest], ...]}`` with a ``crc32c``
        digest of the stored bytes, so that a resumed run can check that they are there.
        """
        ...

    @abstractmethod
    def restore(self, record: Mapping[str, Any]) -> None:
        """Take a tensor back as written by an earlier run, instead of ``begin`` ... ``end``."""
        ...

    def amend(self, metadata: Mapping[str, Any]) -> None:
        """Replace the metadata that the writer was made with; any time before ``finish``.

        A delta's base and result are hashed in the pass that writes it, so their identities are known only at its end.
        Formats of deltas implement this.
        """
        raise TypeError(f"{type(self).__name__} takes no metadata after it was made")

    @abstractmethod
    def finish(self) -> list[str]:
        """Complete and close all files; return their names."""
        ...

    @abstractmethod
    def abort(self) -> None:
        """Close all files as they are."""
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
        The usual artifact is one file, in a folder too.
    attachments : tuple of str
        Kinds of attachments that the format carries.
    encodings : tuple of str
        Encodings in which parts can be written, the preferred one first; empty if parts are never compressed.
    containers : mapping
        Versions of the container, by number or name, to the formats that write them.
    folder : bool
        The artifact is a folder as a whole, not a file. See ``Format.has_sentinel``.
    tiers : tuple of str
        Names of files in the folder that hold the same model in another form: these are no second checkpoint.
    last_resort : bool
        The format is taken for a folder only if no other format finds anything: the same weights often lie there in a
        better one.
    exported : bool
        Files are programs that were exported from a checkpoint. If both lie in a folder, the checkpoint is meant.
    looks_inside : bool
        File names do not identify a folder of this format: ``Format.confirms`` reads a little. The format is asked
        before one that would open the same entry by its name.
    carries_receipt : bool
        A file can be given a receipt while every byte of its tensors stays where it is (``Format.with_receipt``).
    keeps_attributes : bool
        Attributes of tensors that no codec defines are stored.
    deduplicates : bool
        Equal parts are stored once; ``Format.size`` is that of a file in which no two are equal.
    overlays : bool
        Files may refer to parts of another file (``Format.overlay``).
    config_keys : tuple of str
        Keys of ``config.json`` that describe how tensors are packed. The writer writes them into the artifact's
        ``config.json``; a conversion into another format leaves them out.
    packed_codecs : tuple of str
        Codecs of packed layers, for folders whose purpose is packed layers beside dense tensors.
    word_forms : tuple of str
        Forms of packed words that are carried, for codecs that have several.
    merges : bool
        vLLM reads such folders, and multiplies by several matrices as one.
    dense_key : str
        Key of ``config.json`` that lists layers which stay dense; empty if the folder needs no list.
    how_to_quantize : str
        How dense weights become packed layers; empty if programs read a folder without packed layers too.
    group_sizes : tuple of int or None
        Sizes of groups that programs run, where groups must divide the columns; empty if any divisor will do. None if
        groups need not divide the columns.
    one_group : bool
        All layers of a folder have groups of one size.
    one_head : bool
        Loaders refuse a head if the embeddings are tied to it.
    fixed_scales : bool
        Operators take scales of the type of the values only, and perhaps only unsigned codes. A recipe that leaves the
        type of scales open gets that one, and symmetric codes get their zero point in the middle.
    full_size : bool
        Readers take pruned matrices in their full size only (``Format.compacted``).
    rounds_steps : bool
        Programs round the product of a code and its scale, and then the sum with an offset, each to the type of the
        scales. Others compute in f32 and round once.
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
    one_head: bool = False
    fixed_scales: bool = False
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
        """Return whether a folder is of this format whose names ``entry`` accepts; reads little.

        Called if ``traits.looks_inside`` is set.
        """
        return True

    def has_sentinel(self, store: Store) -> bool:
        """Return whether the file is there that marks a finished folder of this format; reads little.

        If it is, other weights in the folder are forms of the same model. If not, they are another checkpoint, and the
        caller has to choose.
        """
        return False

    def fallback_entry(self, names: Sequence[str], store: Store) -> str | None:
        """Return the entry file of a folder that no format claims, or None; reads little."""
        return None

    def fallback_folder(self, store: Store) -> str | None:
        """Return the folder, inside one that no format claims, that holds the weights; None by default."""
        return None

    @abstractmethod
    def read(self, store: Store, name: str, *, verify: bool = True) -> Catalog:
        """Validate the header or manifest of ``name`` completely and locate every tensor.

        Raises ``FormatError`` with a rule, ``IntegrityError`` or ``UnsupportedError``.
        """

    def read_config(self, store: Store) -> dict[str, Any]:
        """Return the folder's ``config.json``, completed by other files if the format defines that.

        Raises ``FormatError``.
        """
        return stored_config(store, "model.config")

    def activations(self, config: Mapping[str, Any]) -> Mapping[str, str]:
        """Return how ``config.json`` has inputs of layers, keys and values quantized: in a few words, by key."""
        return {}

    def original_name(self, name: str) -> str:
        """Return the name that a tensor had before writing programs compressed and renamed it."""
        return name

    # Deciding what can be written.

    @abstractmethod
    def refuses(self, spec: TensorSpec) -> str | None:
        """Return why this format cannot carry the tensor (codec, dtype, encoding); None if it can."""

    def for_attachments(self, attachments: Attachments) -> Format:
        """Return the format for an artifact with these attachments, which may decide what tensors fit.

        Raises ``UnsupportedError`` if an attachment is missing that the format needs.
        """
        return self

    def for_source(self, config: Mapping[str, Any]) -> Format:
        """Return the format for weights of a folder with this ``config.json``, which may decide what layouts fit."""
        return self

    def compacted(self) -> Format:
        """Return the format that takes pruned matrices without the dropped rows or columns."""
        return self

    def overlay(self, store: Store, name: str, target: str, digest: str | None) -> Format:
        """Return the format of a file called ``target`` that refers to parts of the file ``name`` in the same folder.

        ``digest`` is the kind of digest that identifies the file. Called if ``traits.overlays`` is set; raises what
        ``read`` raises.
        """
        raise NotImplementedError

    def base_identity(self) -> str | None:
        """Return what identifies the file to which an overlay refers; None if this is no format of an overlay."""
        return None

    def declared_dtype(self, name: str) -> str | None:
        """Return the element type that the target declares for a tensor of this name; None if it declares none."""
        return None

    def required_dtype(self, name: str, shape: tuple[int, ...]) -> str | None:
        """Return the element type that a tensor must have, which no recipe changes; None if it may have any."""
        return None

    def why_constant(self, name: str) -> str | None:
        """Return why the program that is written into keeps a tensor as it is; None if a recipe may change it."""
        return None

    def has_constant(self, name: str) -> bool:
        """Return whether the program has its own values for a tensor, which stay if none are written."""
        return False

    def dropped_settings(self, artifact: Artifact, settings: Mapping[str, str]) -> Sequence[str]:
        """Return the ``settings`` that the result does not state; they are the ``activations`` of the source."""
        return [f"{key} ({value})" for key, value in settings.items()]

    # Writing.

    def order(self, specs: Sequence[TensorSpec]) -> Sequence[int]:
        """Return the order in which the writer wants tensors, as indices into ``specs``: by default any order.

        Raises ``UnsupportedError`` if the format cannot carry these tensors together.
        """
        return range(len(specs))

    def metadata(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a checkpoint's metadata as this format can carry it: by default as it is."""
        return values

    def file_name(self, stem: str) -> str:
        """Return the name of the single file (or index) of an artifact called ``stem``."""
        return stem + self.suffixes[0]

    @abstractmethod
    def size(self, artifact: Artifact, options: WriteOptions) -> int:
        """Return the exact bytes of all files, or the most that they can be if ``knows_size`` says so.

        Unknown lengths of parts are counted as ``PartSpec.at_most``.
        """

    @abstractmethod
    def writer(self, target: Target, name: str, artifact: Artifact, options: WriteOptions) -> FormatWriter:
        """Start writing. ``name`` is the file to create (the index is named by the format if it shards)."""

    def with_receipt(self, source: ByteSource, text: str) -> tuple[int, bytes]:
        """Return how many of the file's first bytes stay, and the bytes that follow them in one with this receipt.

        Called if ``traits.carries_receipt`` is set.
        """
        raise NotImplementedError

    def commands(self, made: Made) -> Sequence[Sequence[str]]:
        """Return commands that run what was written, as lists of words; empty if no program runs it."""
        return ()


PROMPT = "Once upon a time"


@dataclass(frozen=True, slots=True)
class Made:
    """What was written: the folder, or the file, at ``path`` of this machine.

    ``first`` is the path of its first weight file. ``generates`` tells whether there lies beside the weights what a
    model needs that goes on with a text: config.json and a tokenizer.
    """

    path: str
    first: str
    folder: bool
    generates: bool
    metadata: Mapping[str, Any] = field(default_factory=dict)


def in_python(code: str, *texts: str) -> Sequence[str]:
    """Return the command that runs one line of Python, with ``texts`` in it as literals, in place of each ``{}``."""
    return "python", "-c", code.format(*(json.dumps(text, ensure_ascii=False) for text in texts))
