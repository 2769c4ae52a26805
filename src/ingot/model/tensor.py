"""A tensor: shape, logical dtype, a codec id with its parameters, and named parts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, ClassVar

import numpy as np

from ingot.core.border import bordered
from ingot.core.numeric.buffers import owns_memory
from ingot.core.numeric.dtypes import dtype as resolve_dtype
from ingot.core.registry import Registry
from ingot.errors import UnsupportedError, UsageError
from ingot.model.layouts.base import Layout
from ingot.model.layouts.table import layout_of
from ingot.model.part import Part, memory_part
from ingot.model.reading.limits import require_in_proportion
from ingot.model.reading.slices import Index, Reader, RunLayout, piece_of, read_piece
from ingot.model.sparse import TO_SPARSE, SparseArrays
from ingot.model.spec import PartSpec, TensorSpec

Array = np.ndarray[Any, np.dtype[Any]]

# Text only: adapters import model, never the other way round, and nothing is imported before somebody asks.
FRAMEWORKS: Registry[Callable[[Array, Any], Any]] = Registry(
    "framework",
    (
        ("np", "ingot.runtime.arrays.numpy:from_numpy"),
        ("pt", "ingot.runtime.arrays.torch:from_numpy"),
        ("mlx", "ingot.runtime.arrays.mlx:from_numpy"),
        ("jax", "ingot.runtime.arrays.jax:from_numpy"),
    ),
)
ON_DEVICE: Registry[Callable[[Tensor, Any, Any], Any]] = Registry(
    "framework", (("pt", "ingot.runtime.arrays.torch_device:decode_on_device"),)
)
"""What decodes a stored tensor on a device that has no kernels here; None where it is decoded here, and goes over."""
_CODECS: Registry[Any] = Registry("table", (("codecs", "ingot.codecs.table:CODECS"),))
TO_NUMPY: Registry[Callable[[Any], Array]] = Registry("framework", (("pt", "ingot.runtime.arrays.torch:to_numpy"),))


class Decoder(ABC):
    """The part of a codec that tensors use. Every codec derives from it; ``artifacts.open`` sets it.

    If ``elementwise`` is set, a tensor may be read in any runs of elements, not only in whole rows: its matrix may be
    taken as ``size x 1``.
    """

    elementwise: ClassVar[bool]

    @abstractmethod
    def decode(self, tensor: Tensor, dtype: str, out: Array | None = None) -> Array:
        """Return all values as an array of ``tensor.shape`` in ``dtype`` (a canonical name): in ``out``, if given."""

    @abstractmethod
    def reader(self, tensor: Tensor) -> Reader:
        """Return a sequential reader of the tensor's rows, from the first on."""

    def runs(self, tensor: Tensor, shape: tuple[int, ...]) -> RunLayout | None:
        """Return where runs of elements lie in the parts, for a tensor of ``shape`` that is made of such runs.

        None if that tensor has other parameters, or if runs have no known position.
        """
        return None

    def columns(self, tensor: Tensor, count: int) -> Mapping[str, int] | None:
        """Return the bytes of each part that ``count`` columns of a row take, the first columns or any later ones.

        0 for a part that belongs to whole rows, or to all of them. None if columns have no known position, if a tensor
        of so many columns has other parameters, or if its parts would begin within a byte, a word or a group that
        shares a scale.
        """
        return None

    def to_runs(self, tensor: Tensor) -> Tensor | None:
        """Return the tensor in a layout whose runs have known positions, its parts made as they are read; or None."""
        return None

    def sparse(self, tensor: Tensor, dtype: str) -> SparseArrays | None:
        """Return newly allocated arrays of the stored values and their positions, which are checked.

        None if the codec stores no positions. Raises the codec's rules.
        """
        return None


def require_writable(out: Array, where: str | None = None) -> None:
    """Refuse, by rule ``tensor.out``, a read-only array to decode into."""
    if not out.flags.writeable:
        raise UsageError(
            "expected a writable array to decode into, found a read-only one", rule="tensor.out", where=where
        )


def require_output(out: Array, shape: tuple[int, ...], dtype: str, where: str | None = None) -> None:
    """Refuse, by rule ``tensor.out``, what is not a whole tensor's output: of its shape and ``dtype``, in C order."""
    require_writable(out, where)
    dtype_of_out = resolve_dtype(out.dtype).name
    if out.shape != shape or dtype_of_out != dtype or not (out.flags.carray and out.dtype.isnative):
        order = "C order" if out.flags.carray and out.dtype.isnative else "another order of elements or bytes"
        raise UsageError(
            f"expected an array of shape {list(shape)} in {dtype}, aligned and in C order, to decode into; found "
            f"{list(out.shape)} in {dtype_of_out}, in {order}",
            rule="tensor.out",
            where=where,
        )


def part_of(array: Array) -> Part:
    """Wrap an array as a raw part in memory, of the storage type that its element type has in files."""
    row = resolve_dtype(array.dtype)
    return memory_part(array, row.storage, None if row.is_storage else row.name)


@dataclass(slots=True, eq=False)
class Tensor:
    """A logical array and how it is stored.

    Parameters
    ----------
    name : str
    shape : tuple of int
    dtype : str
        Logical element type: canonical name from ``core.numeric.dtypes``, or an unknown type as the file spells it.
    codec : str
        Codec id (zTensor's object ``format``).
    parts : mapping of role to Part
    params : mapping
        The object's attributes as stored: codec parameters and whatever else the file says. JSON-like values.
    decoder : Decoder or None
        None for a codec that Ingot does not know; the parts can still be moved.
    origin : Tensor or None
        What a view that changes values made this tensor of: errors are measured against it. None elsewhere.
    decoded_from : str
        The codec whose numbers a view decodes for this tensor; empty where its parts are those that are stored.
    source_bits : float
        Bits that an element is stored in where a view computes other numbers: rounded, turned, or with something
        folded in. 0 where the numbers are those that are stored.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    codec: str
    parts: Mapping[str, Part]
    params: Mapping[str, Any] = field(default_factory=dict)
    decoder: Decoder | None = field(default=None, repr=False)
    origin: Tensor | None = field(default=None, repr=False)
    decoded_from: str = field(default="", repr=False)
    source_bits: float = field(default=0.0, repr=False)

    @classmethod
    def from_parts(
        cls, layout: Layout, parts: Mapping[str, Part | Array], shape: tuple[int, ...], name: str = "tensor"
    ) -> Tensor:
        """Return a tensor made of parts that are there already: no value is decoded or encoded.

        Parameters
        ----------
        layout : Layout
            How the parts are to be read, such as an ``AffineLayout``; its class names the codec.
        parts : mapping of role to Part or array
            Arrays are taken in C order, in their own element type; packed codes are bytes (u8) or words.
        shape : tuple of int
            Of the values.
        name : str

        Raises
        ------
        CodecError
            By the codec's own rules (``affine.size``, ``affine.parts``, ...): parts, layout and shape do not fit.
        UnsupportedError
            ``codec.unknown``: no codec has this layout.
        """
        codecs = _CODECS["codecs"]
        if layout.codec not in codecs:
            raise UnsupportedError(f"no codec {layout.codec[:80]!r}", rule="codec.unknown", where=name)
        held = {role: part if isinstance(part, Part) else part_of(part) for role, part in parts.items()}
        attributes = layout.attributes()
        dtype = getattr(layout, "dtype", None) or attributes.get("dtype", "f32")
        tensor = cls(name, tuple(shape), str(dtype), layout.codec, held, attributes, codecs[layout.codec])
        codecs[layout.codec].check(tensor)
        return tensor

    @property
    def nbytes(self) -> int:
        """Stored bytes of all parts."""
        total = 0
        for part in self.parts.values():  # asked of every tensor, several times
            total += part.length
        return total

    @property
    def stored_bits(self) -> float:
        """Bits that an element is stored in: of what its number was computed from, where a view computed it."""
        return self.source_bits or 8 * self.nbytes / max(self.size, 1)

    @property
    def occupies(self) -> int:
        """Bytes that all parts take in their files."""
        return sum(part.length if part.occupies is None else part.occupies for part in self.parts.values())

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """The shape as rows x columns: the last dimension is the columns, all others together the rows."""
        return (prod(self.shape[:-1]), self.shape[-1]) if self.shape else (1, 1)

    @property
    def part_dtypes(self) -> dict[str, str]:
        """Storage type of each part by its role."""
        return {role: part.dtype for role, part in self.parts.items()}

    @property
    def part_nbytes(self) -> dict[str, int | None]:
        """Decoded bytes of each part by its role; None where only the bytes tell."""
        return {role: part.nbytes for role, part in self.parts.items()}

    @property
    def layout(self) -> Layout:
        """How the values lie in the parts, read from ``params``; raises what ``layout_of`` raises."""
        return layout_of(self)

    def spec(self) -> TensorSpec:
        """Return the spec of this tensor with its stored bytes as they are."""
        parts = tuple(
            PartSpec(role, part.dtype, part.length, part.type, part.encoding, part.uncompressed_length)
            for role, part in self.parts.items()
        )
        return TensorSpec(self.name, self.shape, self.dtype, self.codec, parts, dict(self.params))

    def private(self) -> Tensor:
        """Return this tensor over memory of its own: what it decodes to may be changed and no other read sees it.

        Arrays that are views of a mapped file become views of a copy-on-write mapping.
        """
        return replace(self, parts={role: part.private() for role, part in self.parts.items()})

    @bordered
    def numpy(self, dtype: Any = None, *, out: Array | None = None, copy: bool = False) -> Array:
        """Return the decoded values as a NumPy array of ``shape``.

        Decoding into an ``out`` that was written to before is up to twice as fast as into memory of its own: the
        system clears every fresh page first.

        Parameters
        ----------
        dtype : optional
            Any spelling of an element type; the tensor's own by default. With its own dtype a raw dense tensor of a
            mapped file comes back without a copy, read-only.
        out : optional
            The array to decode into and to return: of ``shape``, writable, aligned, in C order; its element type is
            the default of ``dtype``. After an error its contents are undefined.
        copy : bool
            Return writable memory that nothing else refers to, no file either.

        Raises
        ------
        UnsupportedError
            No decoder for this codec or dtype.
        UsageError
            ``tensor.out``: ``out`` has another shape or type, or cannot be written to in C order.
        IntegrityError, FormatError, CodecError
            The parts are damaged or do not fit together.
        ResourceError
            ``decoded.limit``: they are few bytes that stand for very many.
        """
        if self.decoder is None:
            raise UnsupportedError(
                f"no decoder for codec {self.codec!r}; its parts {list(self.parts)} can be read one by one and moved",
                rule="codec.unknown",
                where=self.name,
            )
        require_in_proportion([self], self.name)
        if out is None:
            values = self.decoder.decode(self, self.dtype if dtype is None else resolve_dtype(dtype).name)
            return values.copy() if copy and not owns_memory(values) else values
        name = resolve_dtype(out.dtype if dtype is None else dtype).name
        require_output(out, self.shape, name, self.name)
        self.decoder.decode(self, name, out)
        return out

    @bordered
    def __getitem__(self, index: Index) -> Array:
        """Return a piece of the values, as ``numpy()[index]``: integers, slices and at most one ellipsis.

        Only the rows that the index lies in are decoded, and little else is read (``spec/operations.md``, "Pieces of
        tensors"); of ``sparse_coo`` and of parts in zstd, what comes before them. What is read is checked as a whole
        tensor is: parts of up to 8 MiB are read whole, of larger ones the chunks touched,
        where the file has digests of these (what Ingot writes has).

        Raises
        ------
        UsageError
            ``tensor.index``: another kind of index, or one out of range.
        IntegrityError
            ``part.digest-mismatch``: a chunk that was touched is damaged.
        """
        decoder = self.decoder
        whole = piece_of(self.shape, index, elementwise=False)
        if decoder is None or whole.shape == self.shape:
            values: Array = self.numpy()[whole.inner]
            return values
        piece = piece_of(self.shape, index, elementwise=decoder.elementwise)
        parts = {role: part.by_ranges() for role, part in self.parts.items()}
        reader = decoder.reader(replace(self, parts=parts))
        return read_piece(reader, piece, self.shape, self.dtype, elementwise=decoder.elementwise)

    @bordered
    def torch(self, dtype: Any = None, device: Any = "cpu", *, copy: bool = False) -> Any:
        """Return the decoded values as a ``torch.Tensor``, writable.

        What is written to it reaches neither the file nor another read of this tensor: on the CPU, with its own dtype,
        a raw dense tensor of a mapped file is a copy-on-write mapping. ``copy=True`` copies into fresh memory at once,
        which no later change of the file can reach.
        """
        return self.to("pt", dtype, device, copy=copy)

    @bordered
    def to(self, framework: str, dtype: Any = None, device: Any = None, *, copy: bool = False) -> Any:
        """Return the decoded values as an array of ``framework``: ``np``, ``pt``, ``mlx`` or ``jax``.

        ``copy`` as for ``numpy``; without it only ``np`` may give a view of the file, which is read-only. For ``pt``
        quantized matrices go to a device other than the CPU packed, and are decoded there, with the same bits.
        """
        convert = FRAMEWORKS.get_or_refuse(framework)
        if device is not None and framework in ON_DEVICE:
            placed = ON_DEVICE[framework](self, dtype, device)
            if placed is not None:
                return placed
        tensor = self if copy or framework == "np" else self.private()
        return convert(tensor.numpy(dtype, copy=copy), device)

    @bordered
    def sparse(self, framework: str = "scipy", dtype: Any = None) -> Any:
        """Return the stored values of a sparse tensor, and where they belong, as a sparse object; nothing is decoded.

        Parameters
        ----------
        framework : {"scipy", "torch"}
            ``sparse_csr`` gives a ``scipy.sparse.csr_array`` or a ``torch.sparse_csr`` tensor, ``sparse_coo`` a
            ``coo_array`` or a ``torch.sparse_coo`` tensor; positions in row-major order, memory of its own.
        dtype : optional
            Element type; the tensor's own by default. SciPy has none of 16 bits or less.

        Raises
        ------
        UnsupportedError
            ``tensor.sparse``: another codec; ``adapter.dtype``, ``adapter.layout``: the framework has no such object.
        CodecError, IntegrityError, FormatError
            The parts are damaged or do not fit together.
        """
        convert = TO_SPARSE.get_or_refuse(framework)
        name = self.dtype if dtype is None else resolve_dtype(dtype).name
        arrays = None if self.decoder is None else self.decoder.sparse(self, name)
        if arrays is None:
            raise UnsupportedError(
                f"expected a tensor of codec sparse_csr or sparse_coo, found {self.codec}; numpy() decodes it",
                rule="tensor.sparse",
                where=self.name,
            )
        return convert(arrays)

    def __repr__(self) -> str:
        shape = list(self.shape)
        return f"Tensor({self.name!r}, shape={shape}, dtype={self.dtype}, codec={self.codec}, nbytes={self.nbytes})"
