"""Base classes of packed folder formats: safetensors files and a ``config.json`` that describes how layers are packed.

A packed folder format is a module with a subclass of ``PackedFolderFormat``, which maps names and keys to layouts and
back. It copies no bytes and computes nothing with weights.
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
from ingot.formats.safetensors.header import read_single
from ingot.formats.safetensors.index import INDEX_SUFFIX, read_sharded
from ingot.formats.safetensors.pieces import FileEntry
from ingot.formats.safetensors.writer import SafetensorsWriter, files_size
from ingot.formats.shared.numbers import ConvertedSource
from ingot.model.artifact import Artifact
from ingot.model.bytesource import Target
from ingot.model.layouts.base import Layout, Shape
from ingot.model.layouts.dense import DATA, DenseLayout
from ingot.model.part import Part
from ingot.model.reading.lazy import LazyMap
from ingot.model.spec import PartSpec, TensorSpec
from ingot.model.store import Store
from ingot.model.tensor import Tensor
from ingot.naming.config import CONFIG, MAX_CONFIG, parse_config, stored_config
from ingot.naming.names import role_of

WEIGHT = ".weight"
HUGGING_FACE = "quantization_config"
PACKING_KEYS = ("quantization", HUGGING_FACE, "compression_config")
"""Keys of ``config.json`` that describe a packing; they must be removed if another format writes the folder."""

PACKING_FILES = (
    "hf_quant_config.json",
    "quant_config.json",
    "quantization_config.json",
    "quantize_config.json",
    "quanto_qmap.json",
)
"""Files besides ``config.json`` in which programs describe how they packed a folder; they apply to that
folder only."""

_SMALL_FLOATS = ("f8_", "f6_", "f4_")
_INTEGERS = ("i8", "u8", "i16", "u16", "i32", "u32")
_ROLES_WITH_CODES = ("head", "attention", "mlp", "ssm")
_HEAD = "lm_head"
_WITH_HEAD = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")

Entries = Mapping[str, Tensor]
"""The entries of the headers of a folder's files: dense tensors, in order."""
Config = Mapping[str, Any]
"""The contents of a folder's ``config.json``."""


class PackedLayout(Layout, Protocol):
    """The layout of a packed layer, which has an element type and parts."""

    @property
    def dtype(self) -> str:
        """Logical element type."""
        ...

    def part_specs(self, shape: Shape) -> tuple[PartSpec, ...]:
        """Return the raw parts of a tensor of ``shape``, in order."""
        ...


@dataclass(frozen=True, slots=True)
class Layer:
    """A packed tensor that consists of several entries.

    Parameters
    ----------
    name : str
        Name of the tensor, which takes the position of the first entry in ``parts``.
    shape : tuple of int
    layout : PackedLayout
    parts : mapping of role to str
        The key of the entry for each part, in the order of the layout's parts.
    extra : collection of str
        Further entries of the tensor, whose contents the layout already includes.
    converters : mapping of role to function
        Functions that convert the bytes of an entry, for parts that store them in another order.
    """

    name: str
    shape: Shape
    layout: PackedLayout
    parts: Mapping[str, str]
    extra: Collection[str] = ()
    converters: Mapping[str, Callable[[bytes], bytes]] = field(default_factory=dict)


class PackedFolderFormat(SafetensorsFormat):
    """A folder of safetensors with packed layers that Ingot can read.

    Subclasses define which folders they recognize, and how they interpret the entries.
    """

    suffixes = ()
    traits = replace(SafetensorsFormat.traits, looks_inside=True, config_keys=(HUGGING_FACE,))
    keys: ClassVar[Table] = {}
    """For each key of the format's object in ``config.json``, whether the reader uses, ignores or refuses the key."""
    side_files: ClassVar[Mapping[str, str]] = {}
    """Files in which old releases describe the packing instead of ``config.json``, with their ``quant_method``."""
    companions: ClassVar[tuple[str, ...]] = ()
    """Suffixes of entries that mean nothing without packed codes: scales, zero points, states."""

    @property
    def rules(self) -> str:
        """The first part of the format's error rules, before the dot."""
        return self.name

    def why_unsupported(self, spec: TensorSpec) -> str | None:
        """Return why the format cannot be written; formats that can be written override this."""
        return f"Ingot only reads folders of {self.name}; write them with the package of {self.name}"

    @abstractmethod
    def claims_config(self, config: Config) -> bool:
        """Return whether ``config.json`` declares layers of this format."""

    @abstractmethod
    def layers(self, entries: Entries, config: Config) -> Sequence[Layer]:
        """Return the packed layers; entries that belong to none are dense tensors.

        Raises ``FormatError`` or ``UnsupportedError`` with the format's rules.
        """

    def quantization(self, config: Config) -> Config:
        """Return the object of ``config.json`` that describes the packed layers; empty if it is missing."""
        return next((config[key] for key in self.traits.config_keys if isinstance(config.get(key), dict)), {})

    def check_keys(self, config: Config) -> None:
        """Raise ``UnsupportedError`` ``interop.config-key`` for a key that is refused or not in the table."""
        for key in self.traits.config_keys:
            if isinstance(config.get(key), dict):
                require_known_keys(config[key], self.keys, self.name, location_of(key))

    def remarks(self, entries: Entries, config: Config, layers: Sequence[Layer]) -> Sequence[tuple[str, str]]:
        """Return pairs of rule and message about contradictions in a folder that can still be read."""
        return ()

    def check_layers(self, entries: Entries, config: Config, layers: Sequence[Layer]) -> Iterator[IngotError]:
        """Yield an error for each layer whose values contradict ``config.json``; the values are read."""
        return iter(())

    def layers_in(self, catalog: Catalog, config: Config) -> Sequence[Layer]:
        """Return the packed layers of a folder. Override this if the metadata of the files describes the layers."""
        return self.layers(catalog.tensors, config)

    def packing_config(self, artifact: Artifact) -> Mapping[str, Any]:
        """Return the keys of ``config.json`` for an artifact's packed layers; empty without packed layers."""
        return {}

    def activations(self, config: Config) -> Mapping[str, str]:
        """Return a short text on how layers quantize their inputs, keys and values, for each key of ``config.json``."""
        return {}

    def dropped_settings(self, artifact: Artifact, settings: Mapping[str, str]) -> Sequence[str]:
        """Return the texts of the source's activation ``settings`` that the written artifact does not declare."""
        written = self.activations(self.for_artifact(artifact).packing_config(artifact))
        return [f"{key} ({value})" for key, value in settings.items() if written.get(key) != value]

    def source_config(self, artifact: Artifact) -> Config:
        """Return the packing described in the source's ``config.json``; empty if another format packed it.

        Raises ``FormatError`` ``<rules>.config``.
        """
        config = {} if artifact.config is None else parse_config(artifact.config, f"{self.rules}.config", CONFIG)
        return self.quantization(config) if self.claims_config(config) else {}

    def for_artifact(self, artifact: Artifact) -> PackedFolderFormat:
        """Return the format for writing this artifact; it may depend on all tensors of the folder.

        Raises ``UnsupportedError`` for tensors that the format cannot store together.
        """
        return self

    def read_config(self, store: Store) -> dict[str, Any]:
        """Return the folder's ``config.json``, completed from ``text_config`` or a side file if these describe the
        packing.

        Raises ``FormatError`` ``<rules>.config``.
        """
        config = self._main_config(store)
        file = self._side_file(store, config)
        if file is not None:
            rule = f"{self.rules}.config"
            contents = self.from_side_file(parse_config(store.read(file, MAX_CONFIG, rule), rule, file))
            config[HUGGING_FACE] = {"quant_method": self.side_files[file], **contents}
        return config

    def from_side_file(self, contents: dict[str, Any]) -> dict[str, Any]:
        """Convert the contents of a side file to a ``quantization_config``."""
        return contents

    def _main_config(self, store: Store) -> dict[str, Any]:
        """Return ``config.json``; a description of the packing in its ``text_config`` is copied to the top level."""
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
        """Return the file to open, as ``SafetensorsFormat`` does, if there is a ``config.json``."""
        return super().entry(names) if CONFIG in names else None

    def confirms(self, store: Store) -> bool:
        """Return whether the folder's layers have this format, according to ``config.json`` or a side file.

        A conversion may leave an obsolete side file in a folder of dense weights. If there is a side file, packed
        layers must therefore exist too.
        """
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
        """Return the catalog; there are no digests to verify.

        Raises the errors of safetensors and of ``layers``; ``UnsupportedError`` ``interop.config-key``; ``FormatError``
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
            tensors = _join_layers(entries, layers, self.rules)
            self.require_complete(entries, config, layers)
            remarks = (*catalog.remarks, *self.remarks(entries, config, layers))
            check = partial(self.check_layers, entries, config, layers)
            return replace(catalog, tensors=tensors, remarks=remarks, check_files=check)
        except BaseException:
            for source in catalog.sources:
                source.close()
            raise

    def require_complete(self, entries: Entries, config: Config, layers: Sequence[Layer]) -> None:
        """Raise ``FormatError`` ``<rules>.parts`` for codes or scales that belong to no layer.

        As dense tensors they would be meaningless.
        """
        used = {key for layer in layers for key in (*layer.parts.values(), *layer.extra)}
        for key in entries:
            if key in used:
                continue
            if self.companions and key.endswith(self.companions):
                raise FormatError(
                    f"{self.rules}.parts",
                    "expected the packed weight that this entry belongs to, but it is missing; get the folder again, "
                    "or "
                    "remove the entry if the layer is dense",
                    where=key,
                )
            if is_packed_weight(key, entries[key].dtype, entries[key].shape):
                raise FormatError(
                    f"{self.rules}.parts",
                    f"expected scales of this packed weight ({entries[key].dtype} {list(entries[key].shape)}), "
                    "but they are missing; get the folder again",
                    where=key,
                )

    def config_of(self, artifact: Artifact) -> bytes:
        """Return the artifact's ``config.json`` with the keys that describe how tensors are packed.

        If no key changes, the bytes do not change. NaN and Infinity are preserved, because transformers and mlx_lm
        accept them in JSON.

        Raises ``FormatError`` ``<rules>.config``.
        """
        keys = self.packing_config(artifact)
        if artifact.config is None:
            return json.dumps(keys, indent=4).encode() if keys else b"{}"
        config = parse_config(artifact.config, f"{self.rules}.config", CONFIG)
        merged = {**_without_packing(config), **keys}
        return artifact.config if merged == config else (json.dumps(merged, indent=2) + "\n").encode()

    def size(self, artifact: Artifact, options: WriteOptions) -> int:
        """Return the exact number of bytes of all files, including the index and the written ``config.json``."""
        fitted = self.for_artifact(artifact)
        return files_size(self.file_name("model"), artifact, options, fitted) + len(fitted.config_of(artifact))

    def writer(self, target: Target, name: str, artifact: Artifact, options: WriteOptions) -> PackedFolderWriter:
        """Return a writer of the folder's safetensors files and its ``config.json``.

        Raises ``UnsupportedError`` for tensors that ``why_unsupported`` rejects and for metadata that is not text.
        """
        return PackedFolderWriter(target, name, artifact, options, self.for_artifact(artifact))


class WritablePackedFolderFormat(PackedFolderFormat):
    """A packed folder format that can also be written; ``traits.packed_codecs`` names the codecs of its layers."""

    @abstractmethod
    def why_layer_unsupported(self, spec: TensorSpec) -> str | None:
        """Return why a tensor of one of ``packed_codecs`` cannot be a packed layer; None if it can."""

    @abstractmethod
    def layer_entries(self, spec: TensorSpec) -> Sequence[FileEntry]:
        """Return the entries of a supported packed layer."""

    def why_unsupported(self, spec: TensorSpec) -> str | None:
        """Return why this format cannot store the tensor; None if it can."""
        if spec.codec in self.traits.packed_codecs:
            return self.why_layer_unsupported(spec)
        reason = SafetensorsFormat.why_unsupported(self, spec)
        if spec.codec == DenseLayout.codec:
            return reason or self._why_dense_unsupported(spec)
        if reason is None:
            return None
        return f"its packed layers are {' or '.join(self.traits.packed_codecs)}, this tensor is {spec.codec}"

    def _why_dense_unsupported(self, spec: TensorSpec) -> str | None:
        """Return why programs would read a dense tensor as part of a packed layer; None if they would not."""
        if self.companions and spec.name.endswith(self.companions):
            return "its name has the suffix of a part of a packed layer"
        if is_packed_weight(spec.name, spec.dtype, spec.shape):
            return f"programs mistake a dense matrix of {spec.dtype} for the codes of a packed layer"
        return None

    def file_entries(self, spec: TensorSpec) -> Sequence[FileEntry]:
        """Return the entries of a tensor in a file."""
        return self.layer_entries(spec) if spec.codec in self.traits.packed_codecs else super().file_entries(spec)


class PackedFolderWriter(SafetensorsWriter):
    """A safetensors writer that also writes the artifact's ``config.json`` with the keys of the packing."""

    def __init__(
        self, target: Target, name: str, artifact: Artifact, options: WriteOptions, format: PackedFolderFormat
    ) -> None:
        super().__init__(target, name, artifact, options, format)
        self._config = format.config_of(artifact)

    def finish(self) -> list[str]:
        """Complete all files and return their names."""
        names = super().finish()
        sink = self._target.create(CONFIG)
        sink.write_at(0, self._config)
        sink.truncate(len(self._config))
        sink.close()
        return [*names, CONFIG]


def _describes_packing(config: Config) -> bool:
    return any(config.get(key) is not None for key in PACKING_KEYS)


def _without_packing(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``config`` without keys that describe a packing, also in nested configurations."""
    return {
        key: _without_packing(value) if key.endswith("_config") and isinstance(value, dict) else value
        for key, value in config.items()
        if key not in PACKING_KEYS
    }


def _join_layers(entries: Entries, layers: Sequence[Layer], rules: str) -> LazyMap[Tensor]:
    """Return the tensors of a folder: a packed tensor per layer, and a dense tensor per remaining entry."""
    first = {next(iter(layer.parts.values())): layer for layer in layers}
    used = {key for layer in layers for key in (*layer.parts.values(), *layer.extra)}
    layer_by_name: dict[str, Layer | None] = {}
    for key in entries:
        layer = first.get(key)
        if layer is None and key in used:
            continue
        name = key if layer is None else layer.name
        if name in layer_by_name:
            raise FormatError(f"{rules}.parts", "expected each tensor once, found it dense and packed", where=name)
        layer_by_name[name] = layer

    def build(name: str) -> Tensor:
        layer = layer_by_name[name]
        return entries[name] if layer is None else _packed_tensor(entries, layer, rules)

    return LazyMap(layer_by_name, build)


def _packed_tensor(entries: Entries, layer: Layer, rules: str) -> Tensor:
    parts = {}
    for spec in layer.layout.part_specs(layer.shape):
        stored = entries[layer.parts[spec.role]].parts[DATA]
        convert = layer.converters.get(spec.role)
        if convert is not None:
            source = ConvertedSource(partial(_convert, convert, stored), spec.length or 0, stored.source.name)
            parts[spec.role] = Part(
                spec.dtype, source.size, source, type=spec.type, where=stored.where, occupies=stored.length
            )
            continue
        if stored.length != spec.length:
            raise FormatError(
                f"{rules}.shape",
                f"expected {spec.length} bytes for {spec.role} of {list(layer.shape)}, found {stored.length}",
                where=layer.parts[spec.role],
            )
        parts[spec.role] = Part(
            spec.dtype, stored.length, stored.source, stored.offset, type=spec.type, where=stored.where
        )
    layout = layer.layout
    return Tensor(layer.name, layer.shape, layout.dtype, layout.codec, parts, layout.attributes())


def _convert(convert: Callable[[bytes], bytes], stored: Part) -> bytes:
    return convert(bytes(stored.view()))


def is_packed_weight(name: str, dtype: str, shape: Sequence[int]) -> bool:
    """Return whether a tensor outside of layers must be packed codes, because dense weights never have its type."""
    if len(shape) < 2 or 0 in shape:
        return False
    if dtype.startswith(_SMALL_FLOATS):
        return True
    return dtype in _INTEGERS and (name.endswith(WEIGHT) or role_of(name) in _ROLES_WITH_CODES)


def tied_head(artifact: Artifact) -> list[str]:
    """Return a list with the module name of a tied head; empty if the head has a tensor or is not tied.

    A tied head is dense, because it is the embeddings. It must nevertheless be in the list of dense modules, because
    transformers assumes that all modules outside of the list are packed.
    """
    config = {} if artifact.config is None else parse_config(artifact.config, "model.config", CONFIG)
    architectures = config.get("architectures")
    has_head = isinstance(architectures, list) and any(str(name).endswith(_WITH_HEAD) for name in architectures)
    is_stored = any(spec.name.endswith(_HEAD + WEIGHT) for spec in artifact.tensors)
    return [_HEAD] if has_head and not is_stored and config.get("tie_word_embeddings") is not False else []


def require_entries(entries: Entries, stem: str, suffixes: Collection[str], rule: str) -> dict[str, Tensor]:
    """Return the entries ``stem + suffix`` by suffix.

    Raises ``FormatError`` with ``rule`` if an entry is missing.
    """
    for suffix in suffixes:
        if stem + suffix not in entries:
            raise FormatError(
                rule, f"expected the entry {stem + suffix!r} of this packed weight, but it is missing", where=stem
            )
    return {suffix: entries[stem + suffix] for suffix in suffixes}
