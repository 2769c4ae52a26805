"""Kernel units: a tensor packed for a Neural Engine, group by group of output channels, and what is in such a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import numpy as np

from ingot.core.atomic import atomic_write
from ingot.core.dtypes import numpy_dtype
from ingot.core.oserrors import read_error
from ingot.core.paths import local_path
from ingot.errors import UnsupportedError, UsageError
from ingot.model.tensor import Array, Tensor
from ingot.ops.ane.assume import parse_assumptions
from ingot.ops.ane.plan import form_of_tensor
from ingot.ops.open import open as open_checkpoint
from ingot.targets.ane.activation import ActivationLut, fit_lut
from ingot.targets.ane.bits import unpack_lsb
from ingot.targets.ane.chips import Chip, load_chip
from ingot.targets.ane.descriptor import slots, streams
from ingot.targets.ane.form import INTEGER, PALETTE, SPARSE
from ingot.targets.ane.gates import Decision, decide
from ingot.targets.ane.kernel_format import kernel_format
from ingot.targets.ane.pack import KernelWeight, pack_unit
from ingot.targets.ane.unit import SECTIONS, aligned, groups, is_unit
from ingot.targets.ane.unit_read import KernelUnit, read_unit

_HEAD = 16


@dataclass(frozen=True, slots=True)
class KernelReport:
    """What was packed: the file, its bytes, the form it is packed in, and why."""

    path: str
    tensor: str
    chip: str
    form: str
    decision: Decision
    nbytes: int


def pack_kernel(
    path: str | PathLike[str],
    name: str,
    out: str | PathLike[str],
    chip: str = "m1",
    *,
    bias: str | None = None,
    activation: str | ActivationLut | None = None,
    assume: Sequence[str] = (),
    overwrite: bool = False,
) -> KernelReport:
    """Pack one tensor of a checkpoint into a kernel unit at ``out``; a weight that folds is packed as dense fp16.

    Parameters
    ----------
    path, name
        Checkpoint and tensor, output channels first; ``bias`` is another tensor, one value per channel.
    activation : str or ActivationLut, optional
        A function whose table goes in, fitted as ``ingot lut`` does; or the table.
    assume : sequence of str
        As ``ingot.plan`` takes them.
    overwrite : bool
        Replace a file that exists.

    Raises
    ------
    UsageError
        ``target.exists``,
        ``tensor.unknown``, ``ane.layout``, ``ane.budget``, ``ane.function``, ``ane.chip``, ``ane.assume``.
    UnsupportedError
        ``ane.refused``: the chip refuses the form that the tensor has.
    """
    known = load_chip(chip)
    assumptions = parse_assumptions(assume, [known.name])
    known = assumptions.apply(known)
    with open_checkpoint(path) as checkpoint:
        for wanted in (name, bias):
            if wanted is not None and wanted not in checkpoint:
                raise checkpoint.no_tensor(wanted)
        tensor = checkpoint[name]
        if len(tensor.shape) < 2:
            raise UsageError("expected a matrix or convolution, output channels first", rule="ane.layout", where=name)
        form = form_of_tensor(tensor)
        decision = decide(form, known, assumptions.conditions(name))
        if decision.outcome == "refused":
            raise UnsupportedError(
                f"expected a form that {known.name} has, found {form.label}: {decision.reason}; see `ingot plan`",
                rule="ane.refused",
                where=name,
            )
        weight = (_stored(tensor, known) if decision.streams else None) or _dense(tensor)
        extra = _halves(checkpoint[bias], bias, tensor.shape[0]) if bias is not None else None
    lut = fit_lut(activation).lut if isinstance(activation, str) else activation
    packed = KernelWeight(
        weight.shape, weight.values, weight.bits, weight.codebooks, weight.mask, weight.scale, extra, lut
    )
    data = pack_unit(packed, known)
    atomic_write(out, data, overwrite=overwrite)
    return KernelReport(fspath(out), name, known.name, kernel_format(packed.kernel_format).name, decision, len(data))


def _dense(tensor: Tensor) -> KernelWeight:
    return KernelWeight(tensor.shape, _finite(tensor.numpy("f16"), tensor.name), 16)


def _finite(values: Array, where: str) -> Array:
    if not np.isfinite(values).all():
        raise UsageError("expected values that float16 holds, found larger ones or NaN", rule="ane.layout", where=where)
    return values


def _halves(tensor: Tensor, name: str, channels: int) -> Array:
    if tensor.shape != (channels,):
        raise UsageError(f"expected a bias of [{channels}], found {list(tensor.shape)}", rule="ane.layout", where=name)
    return _finite(tensor.numpy("f16"), name)


def _stored(tensor: Tensor, chip: Chip) -> KernelWeight | None:
    """Return the weight with the codes or indices that are stored; None where the unit has no place for them."""
    form = form_of_tensor(tensor)
    if form.kind == SPARSE:
        return _sparse(tensor)
    if form.kind == INTEGER and not form.zero_point:
        return _integers(tensor)
    return _palette(tensor, tensor.params) if form.kind == PALETTE else None


def _bytes(tensor: Tensor, role: str) -> Array:
    return np.frombuffer(tensor.parts[role].view(), np.uint8)


def _integers(tensor: Tensor) -> KernelWeight | None:
    params = tensor.params
    if params.get("signed") is not True or params.get("packing") not in ("rows_lsb", "rows_msb", "flat_lsb"):
        return None
    tensor.numpy()  # the codec's own checks of sizes and digests
    codes = _bytes(tensor, "packed_weight").view(np.int8).reshape(tensor.shape)
    scales = _floats(tensor, "scales")
    scale = np.broadcast_to(scales.reshape(-1), tensor.shape[:1]) if scales.size in (1, tensor.shape[0]) else None
    if scale is None:
        return None
    return KernelWeight(tensor.shape, codes, 8, scale=_finite(scale.astype(np.float16), tensor.name))


def _floats(tensor: Tensor, role: str) -> Array:
    part = tensor.parts[role]
    return _bytes(tensor, role).view(numpy_dtype(part.type or part.dtype)).astype(np.float32)


def _palette(tensor: Tensor, params: Mapping[str, Any], mask: Array | None = None) -> KernelWeight | None:
    shape, bits, vector = tensor.shape, params["bits"], params.get("vector_size", 1)
    groups = list(params.get("groups", ()))
    if (vector > 1 and params.get("vector_axis", 0) != 0) or any(count != 1 for count in groups[1:]):
        return None
    tensor.numpy()  # as above
    books = groups[0] if groups else 1
    stored = tensor.parts["codebook"].dtype
    table = _bytes(tensor, "codebook").view({"i8": np.int8, "u8": np.uint8}[stored]) if stored in ("i8", "u8") else None
    halves = _finite(_floats(tensor, "codebook").astype(np.float16), tensor.name) if table is None else table
    scale = None
    if "codebook_scales" in tensor.parts:
        scales = np.repeat(_floats(tensor, "codebook_scales"), shape[0] // books)
        scale = _finite(scales.astype(np.float16), tensor.name)
    count, role = tensor.size // vector, "indices" if mask is None else "nonzeros"
    kept = count if mask is None else int(np.count_nonzero(mask))
    indices = unpack_lsb(_bytes(tensor, role), bits, kept)
    if mask is not None:
        spread = np.zeros(count, np.uint8)
        spread[mask.reshape(-1)] = indices
        indices = spread
    values = indices.reshape(shape[0] // vector, -1)
    kept_rows = None if mask is None else mask.reshape(values.shape)
    return KernelWeight(shape, values, bits, halves.reshape(books, 1 << bits, vector), kept_rows, scale)


def _sparse(tensor: Tensor) -> KernelWeight | None:
    inner = tensor.params["inner"]
    values = tensor.numpy("f16")
    mask = np.unpackbits(_bytes(tensor, "mask"), count=tensor.size, bitorder="little").astype(np.bool_)
    if inner["codec"] == "palette":
        return _palette(tensor, inner["params"], mask)
    if inner["codec"] != "dense":
        return None
    return KernelWeight(tensor.shape, _finite(values, tensor.name), 16, mask=mask.reshape(tensor.shape))


@dataclass(frozen=True, slots=True)
class UnitReport:
    """What ``ingot inspect`` tells of a kernel unit: sizes in bytes; ``tiles`` are padded sizes of the weight tiles.

    ``word`` is the KernelCfg register; ``streams`` are the coefficient streams that its sections need, with their
    registers (table 25.4); ``slots`` what the ten words of -1 in a record are for, as B25 names them.
    """

    path: str
    nbytes: int
    version: int
    target: str
    kernel_format: int
    form: str
    shape: tuple[int, ...]
    density: float
    ocg: int
    groups: int
    copies: int
    tiles: tuple[int, ...]
    word: int
    streams: Mapping[str, Mapping[str, int]]
    slots: Sequence[str]
    sections: Mapping[str, Mapping[str, int]]
    records: Sequence[Sequence[int]]


def is_kernel_file(path: str | PathLike[str]) -> bool:
    """Whether a path is a file that begins as a kernel unit does."""
    place = local_path(path)
    try:
        if not place.is_file():  # a pipe would wait for ever
            return False
        with place.open("rb") as file:
            return is_unit(file.read(_HEAD))
    except OSError:
        return False  # whoever opens it next says why


def load_kernel(path: str | PathLike[str]) -> KernelUnit:
    """Read and check a kernel unit; errors as ``targets.ane.unit_read.read_unit``."""
    try:
        data = local_path(path).read_bytes()
    except OSError as error:
        raise read_error(error, fspath(path)) from error
    return read_unit(data, fspath(path))


def inspect_kernel(path: str | PathLike[str]) -> UnitReport:
    """Read and check a kernel unit, and describe it."""
    unit = load_kernel(path)
    header, mask = unit.header, unit.weight.mask
    ends = {name: header.sections[name] for name in SECTIONS}
    starts: dict[int, int] = {}
    for index, (tile, _, _) in enumerate(groups(header)):
        starts.setdefault(tile, int(unit.records[index, 0]))
    stops = [*list(starts.values())[1:], aligned(ends["weights"].length)]
    sizes = {tile: stop - starts[tile] for tile, stop in zip(starts, stops, strict=True)}
    return UnitReport(
        path=fspath(path),
        nbytes=Path(fspath(path)).stat().st_size,
        version=header.version,
        target=header.target,
        kernel_format=header.kernel_format,
        form=kernel_format(header.kernel_format).name,
        shape=header.shape,
        density=1.0 if mask is None else float(np.count_nonzero(mask) / mask.size),
        ocg=header.ocg,
        groups=len(unit.records),
        copies=header.copies,
        tiles=tuple(sizes.get(tile, 0) for tile in range(header.tiles)),
        word=header.word,
        streams={
            stream.name: {"enable": stream.enable, "base": stream.base, "relocation": stream.relocation}
            for section, stream in streams().items()
            if ends[section].length
        },
        slots=slots(),
        sections={
            name: {
                "offset": item.offset,
                "length": item.length,
                "count": item.count,
                "type": item.typeno,
                "bits": item.bits,
            }
            for name, item in ends.items()
        },
        records=unit.records.tolist(),
    )
