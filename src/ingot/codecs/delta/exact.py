"""``delta_exact``: bit-exact differences between two versions of a tensor (``spec/delta_exact.md``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

import numpy as np

from ingot.codecs.base import STEP
from ingot.codecs.cast import flat
from ingot.codecs.delta.base import DeltaCodec, DeltaEncoder, NeedsBase
from ingot.codecs.delta.exact_chunks import (
    CHUNK,
    ExactParams,
    apply_chunks,
    as_words,
    check_sizes,
    encode_chunks,
    params_for,
    params_of,
    refuse_option,
)
from ingot.core.numeric.dtypes import dtype as resolve_dtype
from ingot.core.numeric.dtypes import from_file
from ingot.errors import CodecError
from ingot.model.part import Part
from ingot.model.spec import PartSpec
from ingot.model.tensor import Array, Tensor

ID = "delta_exact"


@dataclass(frozen=True, kw_only=True)
class ExactEncoder(DeltaEncoder):
    """An encoder of independent chunks: the bytes of a chunk depend only on the two versions of its values."""

    layout: ExactParams
    params: Mapping[str, Any]
    parts: tuple[PartSpec, ...]
    step: int
    codec: str = ID
    fit_passes: int = 0
    single_chunk: bool = False
    lossless: bool = True

    def encode(self, base: Array, tuned: Array, start: int = 0) -> dict[str, Array]:
        return encode_chunks(self.layout, as_words(base, self.layout), as_words(tuned, self.layout))

    def rebuild(self, parts: Mapping[str, Array], base: Array, out: Array) -> None:
        """Write the fine-tune's rows to ``out``, from the parts that ``encode`` returned for them."""
        target = flat(out).view(self.layout.word)
        last = (target.size - 1) % self.layout.chunk + 1
        apply_chunks(self.layout, parts, as_words(base, self.layout), target, last=last, location="")


@dataclass(slots=True)
class _Open:
    """A chunk whose first elements were applied.

    ``parts`` are its encoded bytes, ``size`` its number of elements, and ``base`` the base's elements so far.
    """

    parts: dict[str, Array]
    size: int
    base: Array


class ExactApplier:
    """A sequential applier that accepts any number of rows per call.

    It buffers a few chunks. If rows end within a chunk, it also buffers the base's elements of the chunk, and decodes
    the chunk again in the next call. Calls are fastest if they begin at multiples of ``step`` elements.
    """

    def __init__(self, tensor: Tensor, params: ExactParams) -> None:
        self._tensor = tensor
        self._params = params
        self._sizes_reader = tensor.parts["sizes"].reader()
        self._reader = tensor.parts["planes"].reader()
        self.step = params.chunk
        self._sizes: Array | None = None
        self._next = 0  # the index of the next chunk
        self._remaining = tensor.size  # elements that are not yet written
        self._open: _Open | None = None

    def apply(self, base: Array, out: Array) -> None:
        params = self._params
        name = self._tensor.name
        if out.dtype != base.dtype or out.shape != base.shape:
            raise CodecError(
                "delta_exact.base",
                f"expected an output of {base.dtype} {list(base.shape)}, found {out.dtype} {list(out.shape)}",
                where=name,
            )
        old = as_words(base, params, name)
        new = flat(out).view(params.word)
        if old.size > self._remaining:
            raise CodecError(
                "delta_exact.base", f"expected at most {self._remaining} more elements, found {old.size}", where=name
            )
        while old.size:
            if self._open is None and (count := self._run(old.size)):
                self._apply(self._read(params.chunks(count)), old[:count], new[:count], (count - 1) % params.chunk + 1)
            else:
                count = self._continue(old, new)
            self._remaining -= count
            old = old[count:]
            new = new[count:]

    def finish(self) -> None:
        """Check the digests, and that the sizes add up."""
        self._all_sizes()
        self._reader.finish()

    def _run(self, count: int) -> int:
        """Return the number of next elements that form complete chunks and are applied by one call.

        It is 0 if the next chunk is not complete.
        """
        chunk = self._params.chunk
        full = min(count // chunk * chunk, max(STEP // chunk, 1) * chunk)
        return full or (count if count == self._remaining else 0)

    def _continue(self, old: Array, new: Array) -> int:
        """Apply the next elements of a chunk that extends beyond ``old``; return their number.

        Its earlier elements are applied again, because a chunk can only be decoded completely.
        """
        if self._open is None:
            size = min(self._params.chunk, self._remaining)
            self._open = _Open(self._read(1), size, np.empty(0, self._params.word))
        opened = self._open
        before = opened.base.size
        count = min(opened.size - before, old.size)
        opened.base = np.concatenate([opened.base, old[:count]])
        result = np.empty(opened.base.size, old.dtype)
        self._apply(opened.parts, opened.base, result, opened.size)
        new[:count] = result[before:]
        if opened.base.size == opened.size:
            self._open = None
        return count

    def _apply(self, parts: dict[str, Array], old: Array, new: Array, last: int) -> None:
        apply_chunks(self._params, parts, old, new, last=last, location=self._tensor.name)

    def _read(self, chunks: int) -> dict[str, Array]:
        sizes = self._all_sizes()[self._next : self._next + chunks]
        planes = np.empty(int(sizes.sum(dtype=np.uint64)), np.uint8)
        self._reader.readinto(planes.data)
        self._next += chunks
        return {"sizes": sizes, "planes": planes}

    def _all_sizes(self) -> Array:
        if self._sizes is None:
            raw = np.empty(self._tensor.parts["sizes"].nbytes, np.uint8)
            self._sizes_reader.readinto(raw.data)
            self._sizes_reader.finish()
            self._sizes = from_file(raw, "u32")
            nbytes = self._tensor.parts["planes"].nbytes
            check_sizes(self._params, self._sizes, self._tensor.size, nbytes, self._tensor.name)
        return self._sizes


class ExactDelta(DeltaCodec):
    """The codec of bit-exact differences."""

    id = ID
    exact = True
    elementwise = True

    def check(self, tensor: Tensor) -> None:
        """Check parameters, parts and shape of ``tensor``; rules ``delta_exact.params``, ``.part-missing``, ``.dtype``,
        ``.size``.
        """
        _checked(tensor)

    def encoder(self, shape: tuple[int, ...], dtype: str, options: Mapping[str, Any]) -> ExactEncoder:
        """Return the encoder. Option ``chunk``: elements of a chunk, a power of two (2**17)."""
        unknown = sorted(set(options) - {"chunk"})
        if unknown:
            raise refuse_option("the option chunk", unknown[0])
        layout = params_for(dtype, options.get("chunk", CHUNK))
        size = prod(shape)
        parts = (
            PartSpec("sizes", "u32", 4 * layout.chunks(size)),
            PartSpec("planes", "u8", None, limit=layout.limit(size)),
        )
        return ExactEncoder(layout=layout, params=layout.attributes(size), parts=parts, step=layout.chunk)

    def applier(self, tensor: Tensor, dtype: str) -> ExactApplier:
        """Return a sequential applier; raise ``delta_exact.base`` for a base with another element type."""
        params = _checked(tensor)
        if resolve_dtype(dtype).name != params.dtype:
            raise CodecError("delta_exact.base", f"expected a base of {params.dtype}, found {dtype}", where=tensor.name)
        return ExactApplier(tensor, params)


class ExactCodec(NeedsBase):
    """Bit-exact differences: they can be stored and checked, but not decoded without their base."""

    id: ClassVar[str] = ID
    rule: ClassVar[str] = "delta_exact.base"
    holds: ClassVar[str] = "differences, which mean nothing without their base"

    def check(self, tensor: Tensor) -> None:
        """Check parameters, parts and shape of ``tensor``; rules ``delta_exact.params``, ``.part-missing``, ``.dtype``,
        ``.size``.
        """
        _checked(tensor)


def _checked(tensor: Tensor) -> ExactParams:
    params = params_of(tensor)
    chunks = params.chunks(tensor.size)
    sizes = _part(tensor, "sizes", "u32")
    planes = _part(tensor, "planes", "u8")
    limit = params.limit(tensor.size)
    if sizes.nbytes != 4 * chunks or not chunks <= planes.nbytes <= limit:
        raise CodecError(
            "delta_exact.size",
            f"expected {4 * chunks} bytes of sizes and {chunks} to {limit} of planes, found {sizes.nbytes} and "
            f"{planes.nbytes}",
            where=tensor.name,
        )
    return params


def _part(tensor: Tensor, role: str, storage: str) -> Part:
    part = tensor.parts.get(role)
    if part is None:
        raise CodecError(
            "delta_exact.part-missing",
            f"expected parts sizes and planes, found {list(tensor.parts)}",
            where=tensor.name,
        )
    if part.dtype != storage or part.type not in (None, storage):
        raise CodecError(
            "delta_exact.dtype",
            f"expected {storage} in part {role!r}, found {part.type or part.dtype}",
            where=tensor.name,
        )
    return part
