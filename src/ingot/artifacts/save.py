"""Saving of arrays and tensors in a new artifact, which is published only when it is complete."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ingot.artifacts.destination import Destination, destination, stage
from ingot.codecs.table import CODECS
from ingot.core.border import bordered
from ingot.core.numeric.dtypes import dtype as resolve_dtype
from ingot.errors import IngotError, UnsupportedError, UsageError
from ingot.formats.base import Format, FormatWriter, WriteOptions
from ingot.model.artifact import Artifact
from ingot.model.checkpoint import Checkpoint
from ingot.model.layouts.base import OtherLayout
from ingot.model.layouts.dense import DenseLayout
from ingot.model.layouts.sparse import CsrLayout
from ingot.model.part import StoredReader
from ingot.model.sparse import FROM_SPARSE, SparseArrays
from ingot.model.spec import TensorSpec
from ingot.model.tensor import TO_NUMPY, Tensor, array_part
from ingot.stores.local import LocalTarget
from ingot.stores.location import AnyPath, Location

_CHUNK = 8 << 20
NO_ATTRIBUTES: Mapping[str, Mapping[str, Any]] = {}


@bordered
def save(
    path: AnyPath,
    tensors: Mapping[str, Any],
    metadata: Mapping[str, Any] | None = None,
    *,
    format: str | None = None,
    digest: str | None = "crc32c",
    overwrite: bool = False,
    attributes: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """Save named tensors.

    Parameters
    ----------
    path : path
        A file name with a format's suffix, or a folder.
    tensors : mapping of name to array or Tensor
        Arrays of NumPy, torch and other libraries are stored dense, bit for bit. Sparse arrays of ``scipy.sparse`` and
        torch are stored as ``sparse_csr`` or ``sparse_coo``. The parts of a ``Tensor`` (of an opened checkpoint or of
        ``Tensor.from_parts``) are copied unchanged. Sources may be in the file that is replaced.
    metadata : mapping, optional
        The metadata of the file; safetensors stores strings only.
    format : str, optional
        The format; by default according to the suffix, ``zt`` for folders.
    digest : {"crc32c", "sha256", None}
        The digest of each part, if the format stores digests.
    overwrite : bool
        Whether to replace a folder that contains a checkpoint and nothing else. A single file is always replaced, as
        safetensors does: the caller's values are newer.
    attributes : mapping of name to mapping, optional
        Further JSON-like attributes of tensors, in addition to those of their codecs. ``Tensor.params`` contains them
        when the file is read. Formats that cannot store them refuse them.

    Raises
    ------
    UsageError
        ``target.exists``, ``target.foreign``: a folder that must not be replaced. ``save.attributes``: attributes of a
        missing tensor, or with a name that the codec uses.
    UnsupportedError
        The format does not support a tensor or attributes.
    CodecError
        A sparse object with a position outside its shape.
    ResourceError
        Disk full, target not writable.

    Examples
    --------
    >>> ingot.save("new.zt", {"w": np.eye(2, dtype="f4")}, {"author": "me"})
    >>> ingot.open("new.zt").metadata["author"]
    'me'
    """
    _require_mapping("tensors", tensors, "names to arrays")
    _require_mapping("metadata", {} if metadata is None else metadata, "keys to values")
    target = destination(Location.parse(path), format)
    planned = plan_tensors(target.format, tensors, attributes or {})
    save_planned(target, planned, metadata or {}, digest=digest, overwrite=overwrite or not target.directory)


def _require_mapping(name: str, value: object, description: str) -> None:
    """Raise ``UsageError`` ``save.option`` if an argument is no mapping."""
    if not isinstance(value, Mapping):
        raise UsageError(
            f"expected {name} to be a mapping of {description}, found {type(value).__name__} {value!r:.80}",
            rule="save.option",
        )


def save_planned(
    target: Destination,
    planned: Sequence[tuple[Tensor, TensorSpec]],
    metadata: Mapping[str, Any],
    *,
    digest: str | None = "crc32c",
    overwrite: bool = False,
) -> None:
    """Write planned tensors; an existing target is replaced only with ``overwrite``. Raises the errors of ``save``."""
    options = WriteOptions(digest=digest)
    specs = [spec for _, spec in planned]
    with stage(target, overwrite=overwrite) as staging:
        size = target.format.size(Artifact(specs, target.format.metadata(metadata)), options)
        staging.require_room(size, target.display)
        writer = target.format.writer(LocalTarget(staging.files), target.name, Artifact(specs, metadata), options)
        staging.publish(write_tensors(writer, planned))


def plan_tensors(
    format: Format, tensors: Mapping[str, Any], attributes: Mapping[str, Mapping[str, Any]] = NO_ATTRIBUTES
) -> list[tuple[Tensor, TensorSpec]]:
    """Return tensors for values, each with its spec, in the order in which the format stores them.

    Raises ``UnsupportedError`` if the format does not support a tensor, and ``IntegrityError`` if the digest of a full
    file differs.
    """
    if isinstance(tensors, Checkpoint):
        tensors.require_whole()
    stray = next((name for name in attributes if name not in tensors), None)
    if stray is not None:
        raise UsageError(f"expected attributes of a tensor, found some of {stray!r:.80}", rule="save.attributes")
    if attributes and not format.traits.keeps_attributes:
        raise UnsupportedError(
            f"{format.name} has no place for attributes of tensors: save a .zt", rule="save.attributes"
        )
    planned = []
    for item in named_tensors(tensors):
        if item.name in attributes:
            item.params = _with_attributes(item, attributes[item.name])
        spec = item.spec()
        reason = format.why_unsupported(spec)
        if reason is not None:
            raise UnsupportedError(
                f"{format.name} cannot carry this tensor: {reason}", rule="save.unsupported", where=spec.name
            )
        planned.append((item, spec))
    return [planned[index] for index in format.order([spec for _, spec in planned])]


def named_tensors(tensors: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yield the values of ``tensors`` as ``Tensor`` objects with their names.

    Raises ``UsageError`` ``save.name``, and the errors of ``as_tensor`` with the name.
    """
    for name, value in tensors.items():
        if not isinstance(name, str):
            raise UsageError(f"expected text as a tensor's name, found {name!r}", rule="save.name")
        try:
            item = as_tensor(name, value)
        except IngotError as error:
            raise error if error.where == name else error.add_location(name) from None
        yield item


def _with_attributes(tensor: Tensor, attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tensor's attributes with further attributes, which must not change the meaning of its parts."""
    layout = tensor.layout
    reserved = next((key for key in attributes if key == "dtype" or key in layout.attributes()), None)
    if reserved is None:
        params = {**tensor.params, **attributes}
        changed = replace(tensor, params=params)
        try:
            if tensor.decoder is not None:
                CODECS[tensor.codec].check(changed)
            if isinstance(layout, OtherLayout) or changed.layout == layout:
                return params
        except IngotError as error:
            raise UsageError(
                f"expected attributes that codec {tensor.codec} passes over: {error.message}",
                rule="save.attributes",
                where=tensor.name,
            ) from error
    raise UsageError(
        f"expected attributes that codec {tensor.codec} does not use, found {reserved or sorted(attributes)!r:.80}",
        rule="save.attributes",
        where=tensor.name,
    )


def write_tensors(writer: FormatWriter, planned: Sequence[tuple[Tensor, TensorSpec]]) -> list[str]:
    """Write all tensors in order and return the names of the finished files."""
    try:
        for item, spec in planned:
            writer.begin(spec)
            _copy(item, writer)
            writer.end()
        return writer.finish()
    except BaseException:
        writer.abort()
        raise


def _copy(item: Tensor, writer: FormatWriter) -> None:
    for role, part in item.parts.items():
        reader = StoredReader(part)
        for start in range(0, part.length, _CHUNK):
            size = min(_CHUNK, part.length - start)
            if part.source.mapped and not part.digest:
                writer.write(role, part.source.view(part.offset + start, size))
            else:
                data = np.empty(size, np.uint8)
                reader.readinto(data.data)
                writer.write(role, data.data)
        if part.digest:
            reader.finish()


def as_tensor(name: str, value: Any) -> Tensor:
    """Return a tensor, an array or a sparse object as a tensor; arrays become parts in memory."""
    if isinstance(value, Tensor):
        return Tensor(name, value.shape, value.dtype, value.codec, value.parts, value.params, value.decoder)
    arrays = None if isinstance(value, np.ndarray) else _sparse_arrays(value)
    if arrays is not None:
        return _sparse_tensor(name, arrays)
    array = as_numpy(value)
    row = resolve_dtype(array.dtype)
    if row.bits < 8:
        raise UnsupportedError(
            f"{row.name} arrays hold one element a byte and would have to be packed; move such tensors as parts",
            where=name,
        )
    parts = {"data": array_part(array)}
    return Tensor(name, array.shape, row.name, DenseLayout.codec, parts, decoder=CODECS[DenseLayout.codec])


def _sparse_arrays(value: Any) -> SparseArrays | None:
    """Return the arrays of a sparse object of another library; None for any other object.

    Only libraries whose module is already imported are considered.
    """
    libraries = (FROM_SPARSE[module] for module in FROM_SPARSE if module in sys.modules)
    return next((arrays for library in libraries if (arrays := library(value)) is not None), None)


def _sparse_tensor(name: str, arrays: SparseArrays) -> Tensor:
    """Return sparse arrays as a tensor. Raises ``CodecError`` if positions are outside the shape."""
    layout = arrays.layout
    values = array_part(arrays.values)
    positions = [np.ascontiguousarray(indices).view(np.uint64) for indices in arrays.positions]
    if isinstance(layout, CsrLayout):
        parts = {"values": values, "indices": array_part(positions[1]), "indptr": array_part(positions[0])}
    else:
        parts = {"values": values, "coords": array_part(np.concatenate([np.empty(0, np.uint64), *positions]))}
    codec = CODECS[layout.codec]
    tensor = Tensor(name, arrays.shape, layout.dtype, layout.codec, parts, decoder=codec)
    codec.sparse(tensor, layout.dtype)
    return tensor


def as_numpy(value: Any) -> np.ndarray[Any, np.dtype[Any]]:
    """Return an array of any framework as a NumPy array, without a copy if the framework permits.

    Torch tensors are recognized only if torch is already imported.
    """
    if isinstance(value, np.ma.MaskedArray):
        raise UsageError(
            "expected a value for each element, found a masked array: no format keeps the mask; take its filled()",
            rule="save.masked",
        )
    if isinstance(value, np.ndarray):
        return value
    if "torch" in sys.modules and isinstance(value, sys.modules["torch"].Tensor):
        return TO_NUMPY["pt"](value)
    try:
        return np.asarray(value)
    except ValueError as error:
        raise UsageError(f"expected an array or what NumPy can make one of: {error}", rule="save.value") from error
