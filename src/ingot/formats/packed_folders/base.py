"""What all dialects share: safetensors whose ``config.json`` says how layers are packed.

A dialect is a module with a subclass of ``Dialect`` that maps its names and keys to layouts, and back. It copies no
bytes and does no arithmetic on weights.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Protocol

from ingot.errors import FormatError, IngotError
from ingot.formats.base import Catalog, WriteOptions
from ingot.formats.packed_folders.config_keys import Table, location_of, require_known_keys
from ingot.formats.safetensors.format import SafetensorsFormat
from ingot.formats.safetensors.index import INDEX_SUFFIX, read_sharded
from ingot.formats.safetensors.pieces import Piece
from ingot.formats.safetensors.reader import read_single
from ingot.formats.safetensors.writer import SafetensorsWriter, files_size
from ingot.formats.shared.numbers import ConvertedSource
from ingot.model.artifact import Artifact
from ingot.model.bytesource import Target
from ingot.model.layouts.base import Layout, Shape
from ingot.model.layouts.dense import DATA, DenseLayout
from ingot.model.part import Part
from ingot.model.reading.lazy import Lazy
from ingot.model.spec import PartSpec, TensorSpec
from ingot.model.store import Store
from ingot.model.tensor import Tensor
from ingot.naming.config import CONFIG, MAX_CONFIG, parse_config, stored_config
from ingot.naming.names import role_of

WEIGHT = ".weight"
HUGGING_FACE = "quantization_config"
PACKING_KEYS = ("quantization", HUGGING_FACE, "compression_config")
"""Keys of ``config.json`` that some dialect says its packing by; none of them is true of another's files."""

PACKING_FILES = (
    "hf_quant_config.json",
    "quant_config.json",
    "quantization_config.json",
    "quantize_config.json",
    "quanto_qmap.json",
)
"""Files beside ``config.json`` in which programs describe how they packed a folder; they are true of that folder only.
"""

_SMALL_FLOATS = ("f8_", "f6_", "f4_")
_INTEGERS = ("i8", "u8", "i16", "u16", "i32", "u32")
_ROLES_WITH_CODES = ("head", "attention", "mlp", "ssm")
_HEAD = "lm_head"
_WITH_HEAD = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")

Entries = Mapping[str, Tensor]
"""What the headers of a folder's files name: dense tensors, in order."""
Config = Mapping[str, Any]
"""A folder's ``config.json``."""


class PackedLayout(Layout, Protocol):
    """A layout that knows its parts."""

    @property
    def dtype(self) -> str:
        """Logical element type."""
        ...

    def part_specs(self, shape: Shape) -> tuple[PartSpec, ...]:
        """Return the raw parts of a tensor of ``shape``, in order."""
        ...


@dataclass(frozen=True, slots=True)
class Layer:
    """Entries that are one tensor together.

    Parameters
    ----------
    name : str
        Of the tensor, which takes the place of the first entry in ``parts``.
    shape : tuple of int
    layout : PackedLayout
    parts : mapping of role to str
        The entry that each part is, by its key; in the order of the layout's parts.
    also : collection of str
        Further entries that belong to it and say nothing that the layout does not.
    made : mapping of role to function
        Parts whose bytes are those of their entry in another order: what makes them of these.
    """

    name: str
    shape: Shape
    layout: PackedLayout
    parts: Mapping[str, str]
    also: Collection[str] = ()
    made: Mapping[str, Callable[[bytes], bytes]] = field(default_factory=dict)


class Dialect(SafetensorsFormat):
    """A folder of safetensors with packed layers, which are read. Subclasses say which folders are theirs and what
    entries mean.

    """

    suffixes = ()
    traits = replace(SafetensorsFormat.traits, looks_inside=True, config_keys=(HUGGING_FACE,))
    keys: ClassVar[Table] = {}
    """What the reader does with each key of the dialect's object in ``config.json``."""
    side_files: ClassVar[Mapping[str, str]] = {}
    """Files in which old releases describe the packing, beside a ``config.json`` without; and the ``quant_method`` of
    one that states none."""
    companions: ClassVar[tuple[str, ...]] = ()
    """Ends of the names of entries that only mean something beside packed codes: scales, zero points, states."""

    @property
    def rules(self) -> str:
        """What rules of refusals begin with."""
        return self.name

    def refuses(self, spec: TensorSpec) -> str | None:
        """Everything: a dialect is only read, but for those that pack too."""
        return f"folders of {self.name} are only read: what its own package is to load, it has to write"

    @abstractmethod
    def claims_config(self, config: Config) -> bool:
        """Whether a ``config.json`` says that layers are packed this way."""

    @abstractmethod
    def layers(self, entries: Entries, config: Config) -> Sequence[Layer]:
        """Return the packed layers among the entries; whatever is in none stays dense.

        Raises ``FormatError`` or ``UnsupportedError`` by the dialect's own rules.
        """

    def quantization(self, config: Config) -> Config:
        """Return the object of ``config.json`` that describes the packed layers; empty if there is none."""
        return next((config[key] for key in self.traits.config_keys if isinstance(config.get(key), dict)), {})

    def check_keys(self, config: Config) -> None:
        """Raise ``UnsupportedError`` ``interop.config-key`` for a key that is refused or not in the table."""
        for key in self.traits.config_keys:
            if isinstance(config.get(key), dict):
                require_known_keys(config[key], self.keys, self.name, location_of(key))

    def remarks(self, entries: Entries, config: Config, layers: Sequence[Layer]) -> Sequence[tuple[str, str]]:
        """Return pairs of rule and message about a folder that is read although it contradicts itself."""
        return ()

    def check_layers(self, entries: Entries, config: Config, layers: Sequence[Layer]) -> Iterator[IngotError]:
        """Yield an error for each layer whose stored numbers contradict ``config.json``; reads them."""
        return iter(())

    def layers_in(self, catalog: Catalog, config: Config) -> Sequence[Layer]:
        """Return the packed layers of a folder; as ``layers``, where the files' metadata say nothing of them."""
        return self.layers(catalog.tensors, config)

    def stated(self, artifact: Artifact) -> Mapping[str, Any]:
        """Return what ``config.json`` says of an artifact's packed layers, by key; nothing where there are none."""
        return {}

    def activations(self, config: Config) -> Mapping[str, str]:
        """Return what ``config.json`` says of how inputs of layers, keys and values are quantized, in words by key."""
        return {}

    def dropped_settings(self, artifact: Artifact, said: Mapping[str, str]) -> Sequence[str]:
        """Return what is not kept of ``said``, the activations that the artifact's own ``config.json`` states."""
        now = self.activations(self.fitted(artifact).stated(artifact))
        return [f"{key} ({value})" for key, value in said.items() if now.get(key) != value]

    def source_config(self, artifact: Artifact) -> Config:
        """Return what the artifact's own ``config.json`` says of packing, where that is this dialect's; else nothing.

        Raises ``FormatError`` ``<rules>.config``.
        """
        config = {} if artifact.config is None else parse_config(artifact.config, f"{self.rules}.config", CONFIG)
        return self.quantization(config) if self.claims_config(config) else {}

    def fitted(self, artifact: Artifact) -> Dialect:
        """Return the dialect as it writes this artifact: where entries depend on what else is in the folder.

        Raises ``UnsupportedError`` for tensors that it cannot carry together.
        """
        return self

    def read_config(self, store: Store) -> dict[str, Any]:
        """Return the folder's ``config.json``, with what its part for text, or a file beside it, says of packing.

        Raises ``FormatError`` ``<rules>.config``.
        """
        config = self._main_config(store)
        file = self._side_file(store, config)
        if file is not None:
            rule = f"{self.rules}.config"
            stated = self.from_side_file(parse_config(store.read(file, MAX_CONFIG, rule), rule, file))
            config[HUGGING_FACE] = {"quant_method": self.side_files[file], **stated}
        return config

    def from_side_file(self, stated: dict[str, Any]) -> dict[str, Any]:
        """Return what a file beside ``config.json`` says, as ``quantization_config`` would."""
        return stated

    def _main_config(self, store: Store) -> dict[str, Any]:
        """Return ``config.json``; of a model of several parts, with what its part for text says of packing."""
        config = stored_config(store, f"{self.rules}.config")
        text = config.get("text_config")
        if not _describes_packing(config) and isinstance(text, dict) and isinstance(text.get(HUGGING_FACE), dict):
            config[HUGGING_FACE] = text[HUGGING_FACE]
        return config

    def _side_file(self, store: Store, config: Config) -> str | None:
        if _describes_packing(config):
            return None
        return next((file for file in self.side_files if store.exists(file)), None)

    def entry(self, names: Sequence[str]) -> str | None:
        """Return what safetensors would, where there is a ``config.json``."""
        return super().entry(names) if CONFIG in names else None

    def confirms(self, store: Store) -> bool:
        """Whether ``config.json`` says that layers are packed this way; or a file beside it does, and there are entries
        of such layers: a conversion may have left the file beside weights that are dense."""
        name = self.entry(store.names())
        if name is None or not self.claims_config(self.read_config(store)):
            return False
        if self._side_file(store, self._main_config(store)) is None:
            return True
        catalog = SafetensorsFormat().read(store, name)
        for source in catalog.sources:
            source.close()
        return any(key.endswith(self.companions) for key in catalog.tensors)

    def read(self, store: Store, name: str, *, verify: bool = True) -> Catalog:
        """Validate and locate; there are no digests to verify.

        Raises what safetensors and ``layers`` raise; ``UnsupportedError`` ``interop.config-key``; ``FormatError``
        ``<rules>.parts``: packed codes without their scales, or scales without their codes.
        """
        config = self.read_config(store) if CONFIG in store.names() else {}
        reader = read_sharded if name.lower().endswith(INDEX_SUFFIX) else read_single
        catalog = reader(store, name, verify=verify)
        entries = catalog.tensors
        if not self.claims_config(config):
            return catalog
        try:
            self.check_keys(config)
            layers = self.layers_in(catalog, config)
            tensors = _joined(entries, layers, self.rules)
            self.require_complete(entries, config, layers)
            remarks = (*catalog.remarks, *self.remarks(entries, config, layers))
            check = partial(self.check_layers, entries, config, layers)
            return replace(catalog, tensors=tensors, remarks=remarks, check_files=check)
        except BaseException:
            for source in catalog.sources:
                source.close()
            raise

    def require_complete(self, entries: Entries, config: Config, layers: Sequence[Layer]) -> None:
        """Raise ``FormatError`` ``<rules>.parts`` for codes or scales that belong to no layer: as a dense tensor they
        would be numbers without a meaning."""
        used = {key for layer in layers for key in (*layer.parts.values(), *layer.also)}
        for key in entries:
            if key in used:
                continue
            if self.companions and key.endswith(self.companions):
                raise FormatError(
                    f"{self.rules}.parts",
                    "expected the packed weight that this entry belongs to, found none; get the folder again, or "
                    "remove the entry if the layer is dense",
                    where=key,
                )
            if is_packed_weight(key, entries[key].dtype, entries[key].shape):
                raise FormatError(
                    f"{self.rules}.parts",
                    f"expected scales beside this packed weight ({entries[key].dtype} {list(entries[key].shape)}), "
                    "found none; get the folder again",
                    where=key,
                )

    def config_of(self, artifact: Artifact) -> bytes:
        """Return the ``config.json`` of an artifact: its own, with the keys that tell how tensors are packed.

        The same bytes where that is no change. JSON as transformers and mlx_lm read it: NaN and Infinity are kept.

        Raises ``FormatError`` ``<rules>.config``.
        """
        keys = self.stated(artifact)
        if artifact.config is None:
            return json.dumps(keys, indent=4).encode() if keys else b"{}"
        config = parse_config(artifact.config, f"{self.rules}.config", CONFIG)
        merged = {**_unpacked(config), **keys}
        return artifact.config if merged == config else (json.dumps(merged, indent=2) + "\n").encode()

    def size(self, artifact: Artifact, options: WriteOptions) -> int:
        """Exact bytes of all files, index and the writer's ``config.json`` included."""
        fitted = self.fitted(artifact)
        return files_size(self.file_name("model"), artifact, options, fitted) + len(fitted.config_of(artifact))

    def writer(self, target: Target, name: str, artifact: Artifact, options: WriteOptions) -> DialectWriter:
        """Start writing; raises ``UnsupportedError`` for what ``refuses`` names and for metadata that is not text."""
        return DialectWriter(target, name, artifact, options, self.fitted(artifact))


class PackingDialect(Dialect):
    """A dialect whose packed layers are written too: ``traits.packed_codecs`` names their codecs."""

    @abstractmethod
    def refuses_layer(self, spec: TensorSpec) -> str | None:
        """Why a tensor of one of ``codecs`` cannot be a packed layer; None if it can."""

    @abstractmethod
    def layer_pieces(self, spec: TensorSpec) -> Sequence[Piece]:
        """Return the entries of a packed layer that is not refused."""

    def refuses(self, spec: TensorSpec) -> str | None:
        """Why this format cannot carry the tensor; None if it can."""
        if spec.codec in self.traits.packed_codecs:
            return self.refuses_layer(spec)
        reason = SafetensorsFormat.refuses(self, spec)
        if spec.codec == DenseLayout.codec:
            return reason or self._refuses_dense(spec)
        if reason is None:
            return None
        return f"its packed layers are {' or '.join(self.traits.packed_codecs)}, this tensor is {spec.codec}"

    def _refuses_dense(self, spec: TensorSpec) -> str | None:
        """Why programs would take a dense tensor for a part of a packed layer; None if they do not."""
        if self.companions and spec.name.endswith(self.companions):
            return "its name is that of a part of a packed layer"
        if is_packed_weight(spec.name, spec.dtype, spec.shape):
            return f"programs take a dense matrix of {spec.dtype} for the codes of a packed layer without scales"
        return None

    def pieces(self, spec: TensorSpec) -> Sequence[Piece]:
        """Return the entries that a tensor takes in a file."""
        return self.layer_pieces(spec) if spec.codec in self.traits.packed_codecs else super().pieces(spec)


class DialectWriter(SafetensorsWriter):
    """A safetensors writer that ends with ``config.json``: the artifact's, with the dialect's keys."""

    def __init__(self, target: Target, name: str, artifact: Artifact, options: WriteOptions, dialect: Dialect) -> None:
        super().__init__(target, name, artifact, options, dialect)
        self._config = dialect.config_of(artifact)

    def finish(self) -> list[str]:
        """Complete all files; return the names."""
        names = super().finish()
        sink = self._target.create(CONFIG)
        sink.write_at(0, self._config)
        sink.truncate(len(self._config))
        sink.close()
        return [*names, CONFIG]


def _describes_packing(config: Config) -> bool:
    return any(config.get(key) is not None for key in PACKING_KEYS)


def _unpacked(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config without what it says of packing; configs within it likewise."""
    return {
        key: _unpacked(value) if key.endswith("_config") and isinstance(value, dict) else value
        for key, value in config.items()
        if key not in PACKING_KEYS
    }


def _joined(entries: Entries, layers: Sequence[Layer], dialect: str) -> Lazy[Tensor]:
    """Return the tensors of the files, the entries of each layer taken together."""
    first = {next(iter(layer.parts.values())): layer for layer in layers}
    taken = {key for layer in layers for key in (*layer.parts.values(), *layer.also)}
    places: dict[str, Layer | None] = {}
    for key in entries:
        layer = first.get(key)
        if layer is None and key in taken:
            continue
        name = key if layer is None else layer.name
        if name in places:
            raise FormatError(f"{dialect}.parts", "expected each tensor once, found it dense and packed", where=name)
        places[name] = layer

    def make(name: str) -> Tensor:
        layer = places[name]
        return entries[name] if layer is None else _packed(entries, layer, dialect)

    return Lazy(places, make)


def _packed(entries: Entries, layer: Layer, dialect: str) -> Tensor:
    parts = {}
    for spec in layer.layout.part_specs(layer.shape):
        stored = entries[layer.parts[spec.role]].parts[DATA]
        make = layer.made.get(spec.role)
        if make is not None:
            source = ConvertedSource(partial(_made, make, stored), spec.length or 0, stored.source.name)
            parts[spec.role] = Part(
                spec.dtype, source.size, source, type=spec.type, where=stored.where, occupies=stored.length
            )
            continue
        if stored.length != spec.length:
            raise FormatError(
                f"{dialect}.shape",
                f"expected {spec.length} bytes for {spec.role} of {list(layer.shape)}, found {stored.length}",
                where=layer.parts[spec.role],
            )
        parts[spec.role] = Part(
            spec.dtype, stored.length, stored.source, stored.offset, type=spec.type, where=stored.where
        )
    layout = layer.layout
    return Tensor(layer.name, layer.shape, layout.dtype, layout.codec, parts, layout.attributes())


def _made(make: Callable[[bytes], bytes], stored: Part) -> bytes:
    return make(bytes(stored.view()))


def is_packed_weight(name: str, dtype: str, shape: Sequence[int]) -> bool:
    """Whether a tensor that belongs to no layer can only be the codes of one: dense weights have other types."""
    if len(shape) < 2 or 0 in shape:
        return False
    if dtype.startswith(_SMALL_FLOATS):
        return True
    return dtype in _INTEGERS and (name.endswith(WEIGHT) or role_of(name) in _ROLES_WITH_CODES)


def tied_head(artifact: Artifact) -> list[str]:
    """Return the module of the head where no tensor is its own: what is tied is as dense as the embeddings are.

    A loader that has a list of what is dense asks it alone: transformers takes all other layers for packed.
    """
    config = {} if artifact.config is None else parse_config(artifact.config, "model.config", CONFIG)
    kinds = config.get("architectures")
    speaks = isinstance(kinds, list) and any(str(kind).endswith(_WITH_HEAD) for kind in kinds)
    head = any(spec.name.endswith(_HEAD + WEIGHT) for spec in artifact.tensors)
    return [_HEAD] if speaks and not head and config.get("tie_word_embeddings") is not False else []


def taken_together(entries: Entries, stem: str, suffixes: Collection[str], rule: str) -> dict[str, Tensor]:
    """Return the entries ``stem + suffix`` by suffix; raises ``FormatError`` with ``rule`` where one is missing."""
    for suffix in suffixes:
        if stem + suffix not in entries:
            raise FormatError(rule, f"expected {stem + suffix!r} beside the packed weight, found none", where=stem)
    return {suffix: entries[stem + suffix] for suffix in suffixes}
