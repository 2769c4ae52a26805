"""Writing of adapters in the file formats of PEFT, llama.cpp and mlx_lm."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import numpy as np

from ingot.adapters.gguf import ALPHA, gguf_metadata, gguf_tensors
from ingot.adapters.mlx import mlx_tensors
from ingot.adapters.peft import peft_config, peft_tensors
from ingot.adapters.record import Change, Factor, LowRank
from ingot.artifacts.adapter_files import CONFIG
from ingot.artifacts.destination import Destination, destination, stage
from ingot.artifacts.save import write_tensors
from ingot.codecs.table import CODECS
from ingot.core.files.atomic import Staging
from ingot.core.numeric.dtypes import DTYPES, cast, file_bytes
from ingot.errors import UnsupportedError
from ingot.formats.base import WriteOptions
from ingot.formats.gguf.metadata import to_gguf_metadata, with_values
from ingot.model.artifact import Artifact
from ingot.model.bytesource import DerivedSource
from ingot.model.layouts.dense import DATA, DenseLayout
from ingot.model.part import Part
from ingot.model.tensor import Tensor
from ingot.stores.local import LocalTarget
from ingot.stores.location import Location

PEFT = "peft"
GGUF = "gguf"
MLX = "mlx"
_FILES = {PEFT: "adapter_model.safetensors", MLX: "adapters.safetensors"}
_DTYPES = ("f32", "f16", "bf16")


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """The contents of an adapter's files: tensors, the metadata of the weight file, and the config.

    The config is None for an adapter that is a single file.
    """

    tensors: Sequence[tuple[str, Factor]]
    metadata: Mapping[str, Any]
    config: Mapping[str, Any] | None
    notes: Sequence[str] = ()


def peft_files(changes: Mapping[str, Sequence[Change]], base: str | None) -> AdapterFiles:
    """Return a PEFT adapter; raise ``UnsupportedError`` ``adapter.unsupported`` if PEFT cannot express a change."""
    return AdapterFiles([*peft_tensors(changes)], {"format": "pt"}, peft_config(changes, base))


def gguf_files(changes: Mapping[str, Sequence[Change]], arch: str, base: str | None) -> AdapterFiles:
    """Return a GGUF adapter of the architecture ``arch`` for changes keyed by llama.cpp's tensor names.

    The format has one alpha. If a module's scale needs another alpha, one of its factors is multiplied by the ratio.

    Raises ``UnsupportedError`` ``adapter.unsupported``: DoRA, biases, new values, or a scale that f32 cannot represent.
    """
    low_ranks = [item for items in changes.values() for item in items if isinstance(item, LowRank)]
    with np.errstate(over="ignore"):
        alpha = _most_common([float(np.float32(item.scale * item.rank)) for item in low_ranks])
    if not np.isfinite(alpha):
        raise UnsupportedError(
            "the scale times the rank is more than f32 can hold, the type in which GGUF adapters store it; merge the "
            "adapter into its base (ingot merge)",
            rule="adapter.unsupported",
            where=base,
        )
    metadata = to_gguf_metadata(gguf_metadata(arch, alpha, base))
    types: dict[str, tuple[str, Any]] = {ALPHA: ("f32", alpha)}
    if base:
        types["general.base_model.count"] = ("u32", 1)
    folded = sum(float(np.float32(item.scale * item.rank)) != alpha for item in low_ranks)
    return AdapterFiles([*gguf_tensors(changes, alpha)], with_values(metadata, types), None, _folded_note(folded))


def mlx_files(changes: Mapping[str, Sequence[Change]], base: str | None) -> AdapterFiles:
    """Return an MLX adapter.

    The format has one rank and one scale for all modules. Smaller ranks are padded with zeros, and other scales are
    multiplied into ``lora_b``.

    Raises ``UnsupportedError`` ``adapter.unsupported``: biases, new values, transposed weights, or DoRA in only part of
    the modules.
    """
    low_ranks = [item for items in changes.values() for item in items if isinstance(item, LowRank)]
    is_dora = {item.magnitude is not None for item in low_ranks}
    if len(is_dora) > 1:
        raise UnsupportedError(
            "MLX adapters have DoRA for all modules or for none; merge the adapter into its base (ingot merge)",
            rule="adapter.unsupported",
            where=base,
        )
    scale = _most_common([item.scale for item in low_ranks])
    rank = max((item.rank for item in low_ranks), default=0)
    padded = {
        name: [item.with_rank(rank) if isinstance(item, LowRank) else item for item in items]
        for name, items in changes.items()
    }
    config = {
        "fine_tune_type": "dora" if True in is_dora else "lora",
        "num_layers": 1 + max((_layer_of(name) for name in changes), default=0),
        "lora_parameters": {
            "rank": rank,
            "scale": scale,
            "dropout": 0.0,
            "keys": [name.removesuffix(".weight") for name in changes],
        },
        **({"model": base} if base else {}),
    }
    notes = [*_folded_note(sum(item.scale != scale for item in low_ranks))]
    small = sum(item.rank != rank for item in low_ranks)
    if small:
        notes.append(
            f"{small} modules of a smaller rank are padded with zeros to rank {rank}: MLX has one rank for all"
        )
    return AdapterFiles([*mlx_tensors(padded, scale)], {"format": "mlx"}, config, notes)


def _folded_note(count: int) -> list[str]:
    return [f"the scales of {count} modules differ from the others and are multiplied into lora_b"] if count else []


def _most_common(values: Sequence[float]) -> float:
    return Counter(values).most_common(1)[0][0] if values else 1.0


def _layer_of(name: str) -> int:
    numbers = [int(part) for part in name.split(".") if part.isdigit()]
    return numbers[0] if numbers else 0


def adapter_destination(out: Location, program: str) -> Destination:
    """Return the destination of an adapter.

    Raises ``UnsupportedError`` ``adapter.unsupported``: a folder for llama.cpp, or a file for PEFT or MLX.
    """
    target = destination(out, GGUF if program == GGUF else "safetensors")
    if (program == GGUF and target.directory) or (program != GGUF and not target.directory):
        expected = "a file name that ends in .gguf" if program == GGUF else "a folder"
        _refuse_target(expected, target.display)
    return target if program == GGUF else replace(target, name=_FILES[program])


def stage_adapter(target: Destination, *, overwrite: bool) -> Staging:
    """Return the staging folder of an adapter; raises the errors of ``stage``."""
    return stage(target, overwrite=overwrite, names=(CONFIG,))


def write_files(files: AdapterFiles, program: str, out: Location, *, overwrite: bool) -> tuple[str, int]:
    """Write an adapter atomically; return its location and the size of its tensors in bytes.

    Raises the errors of ``adapter_destination``, ``stage`` and of the format's writer.
    """
    target = adapter_destination(out, program)
    tensors = [_tensor(name, factor) for name, factor in files.tensors]
    specs = [tensor.spec() for tensor in tensors]
    order = target.format.order(specs)
    planned = [(tensors[index], specs[index]) for index in order]
    artifact = Artifact([spec for _, spec in planned], files.metadata)
    options = WriteOptions(digest=None)
    with stage_adapter(target, overwrite=overwrite) as staging:
        staging.require_room(target.format.size(artifact, options), target.display)
        folder = LocalTarget(staging.files)
        names = write_tensors(target.format.writer(folder, target.name, artifact, options), planned)
        if files.config is not None:
            sink = folder.create(CONFIG)
            try:
                sink.write_at(0, json.dumps(files.config, indent=2, sort_keys=True).encode())
            finally:
                sink.close()
            names = [*names, CONFIG]
        staging.publish(names)
    return target.display, sum(tensor.nbytes for tensor in tensors)


def _refuse_target(expected: str, location: str) -> NoReturn:
    raise UnsupportedError(f"expected {expected} for this form of adapter", rule="adapter.unsupported", where=location)


def _tensor(name: str, factor: Factor) -> Tensor:
    """Return a factor as a dense tensor whose bytes are computed when they are read."""
    dtype = factor.dtype if factor.dtype in _DTYPES else "f32"
    row = DTYPES[dtype]
    source = _FactorSource(factor, dtype)
    part = Part(row.storage, source.size, source, type=None if row.is_storage else row.name, where=name)
    codec = CODECS[DenseLayout.codec]
    return Tensor(name, factor.shape, row.name, codec.id, {DATA: part}, {}, codec)


class _FactorSource(DerivedSource):
    """The bytes of a factor, computed at the first read and released after the last."""

    mapped = False

    def __init__(self, factor: Factor, dtype: str) -> None:
        self._factor = factor
        self._dtype = dtype
        self._bytes: memoryview | None = None
        self.name = factor.name
        self.size = int(np.prod(factor.shape)) * DTYPES[dtype].bits // 8

    def view(self, offset: int, length: int) -> memoryview:
        if self._bytes is None:
            self._bytes = memoryview(file_bytes(cast(self._factor.values(), self._dtype))).cast("B")
        data = self._bytes[offset : offset + length]
        if offset + length == self.size:
            self._bytes = None
        return data

    def readinto(self, offset: int, out: memoryview) -> None:
        out[:] = self.view(offset, out.nbytes)

    def changed(self) -> bool:
        return False

    def close(self) -> None:
        """Do nothing: the adapter closes its files."""
