"""Tensors: a shape, a logical element type, the id and the parameters of a codec, and named parts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, ClassVar

import numpy as np

from ingot.core.border import bordered
from ingot.core.numeric.buffers import owns_memory
from ingot.core.numeric.dtypes import DTYPES, numpy_dtype
from ingot.core.numeric.dtypes import dtype as resolve_dtype
from ingot.core.registry import Registry
from ingot.errors import MissingExtraError, UnsupportedError, UsageError
from ingot.model.layouts.base import Layout
from ingot.model.layouts.dense import DenseLayout
from ingot.model.layouts.table import layout_of
from ingot.model.part import Part, memory_part
from ingot.model.reading.limits import require_in_proportion
from ingot.model.reading.slices import Index, Reader, RunLayout, read_selection, selection_of
from ingot.model.sparse import TO_SPARSE, SparseArrays
from ingot.model.spec import PartSpec, TensorSpec

Array = np.ndarray[Any, np.dtype[Any]]
_DLPACK_CPU = (1, 0)  # kDLCPU, and the number of the device

# names only, because these modules import this package; they are imported on first use
FRAMEWORKS: Registry[Callable[[Array, Any], Any]] = Registry(
    "framework",
    (
        ("np", "ingot.runtime.arrays.numpy:from_numpy"),
        ("pt", "ingot.runtime.arrays.torch:from_numpy"),
        ("mlx", "ingot.runtime.arrays.mlx:from_numpy"),
        ("jax", "ingot.runtime.arrays.jax:from_numpy"),
    ),
)
_FRAMEWORK_ALIASES = {"numpy": "np", "torch": "pt"}
ON_DEVICE: Registry[Callable[[Tensor, Any, Any], Any]] = Registry(
    "framework", (("pt", "ingot.runtime.arrays.torch_device:decode_on_device"),)
)
"""Functions by framework that decode a packed tensor on the target device. They return None for a tensor that must be
decoded on the CPU and copied."""
_CODECS: Registry[Any] = Registry("table", (("codecs", "ingot.codecs.table:CODECS"),))
TO_NUMPY: Registry[Callable[[Any], Array]] = Registry("framework", (("pt", "ingot.runtime.arrays.torch:to_numpy"),))


def framework_name(framework: str) -> str:
    """Return the short name of a framework: ``np`` for numpy, ``pt`` for torch, other names unchanged."""
    return _FRAMEWORK_ALIASES.get(framework, framework)


class Decoder(ABC):
    """The methods of a codec that tensors call; the base class of codecs. ``artifacts.open`` attaches it to tensors.

    If ``elementwise`` is set, any run of elements of a tensor may be read, not only full rows. The tensor may then be
    read as a matrix of ``size`` rows and one column.
    """

    elementwise: ClassVar[bool]

    @abstractmethod
    def decode(self, tensor: Tensor, dtype: str, out: Array | None = None) -> Array:
        """Return all values as an array of ``tensor.shape`` in ``dtype`` (a canonical name); fills ``out`` if given."""

    @abstractmethod
    def reader(self, tensor: Tensor) -> Reader:
        """Return a sequential reader of the tensor's rows, starting at the first row."""

    def runs(self, tensor: Tensor, shape: tuple[int, ...]) -> RunLayout | None:
        """Return the positions of runs of elements in the parts, so that a tensor of ``shape`` can be assembled.

        Returns None if the assembled tensor needs other parameters, or if the positions of runs are unknown.
        """
        return None

    def columns(self, tensor: Tensor, count: int) -> Mapping[str, int] | None:
        """Return the number of bytes of ``count`` consecutive columns of a row in each part, by role.

        The value is 0 for a part that has no separate bytes for columns. The result is None if positions of columns are
        unknown, if a tensor of ``count`` columns needs other parameters, or if its parts would begin within a byte, a
        word or a group.
        """
        return None

    def to_runs(self, tensor: Tensor) -> Tensor | None:
        """Return the tensor in a layout whose runs have known positions; its parts are computed on access.

        Returns None if the codec has no such layout.
        """
        return None

    def sparse(self, tensor: Tensor, dtype: str) -> SparseArrays | None:
        """Return new arrays of the stored values and their checked positions.

        Returns None if the codec stores no positions. Raises ``CodecError`` with the codec's rules.
        """
        return None


def require_writable(out: Array, location: str | None = None) -> None:
    """Raise ``UsageError`` ``tensor.out`` if an output array is read-only."""
    if not out.flags.writeable:
        raise UsageError(
            "expected a writable array to decode into, found a read-only one", rule="tensor.out", where=location
        )


def require_output(out: Array, shape: tuple[int, ...], dtype: str, location: str | None = None) -> None:
    """Raise ``UsageError`` ``tensor.out`` unless an output array is writable, in C order, with the shape and dtype."""
    require_writable(out, location)
    dtype_of_out = resolve_dtype(out.dtype).name
    if out.shape != shape or dtype_of_out != dtype or not (out.flags.carray and out.dtype.isnative):
        order = "C order" if out.flags.carray and out.dtype.isnative else "another order of elements or bytes"
        raise UsageError(
            f"expected an array of shape {list(shape)} in {dtype}, aligned and in C order, to decode into; found "
            f"{list(out.shape)} in {dtype_of_out}, in {order}",
            rule="tensor.out",
            where=location,
        )


def _is_float(target: np.dtype[Any]) -> bool:
    """Return whether an element type of NumPy is a floating-point type of Ingot in the machine's byte order."""
    return target.isnative and any(row.is_float and row.numpy == target.name for row in DTYPES.values())


def array_part(array: Array) -> Part:
    """Return an array as a raw part in memory, with the storage type that files use for the array's element type."""
    row = resolve_dtype(array.dtype)
    return memory_part(array, row.storage, None if row.is_storage else row.name)


@dataclass(slots=True, eq=False)
class Tensor:
    """A logical array and its stored form.

    Parameters
    ----------
    name : str
    shape : tuple of int
    dtype : str
        Logical element type: a name of ``core.numeric.dtypes``, or an unsupported type as spelled in the file.
    codec : str
        Codec id (zTensor's object ``format``).
    parts : mapping of role to Part
    params : mapping
        The stored attributes of the tensor: codec parameters and further attributes of the file. JSON-like values.
    decoder : Decoder or None
        The codec; None if Ingot does not support it. The parts can still be moved then.
    origin : Tensor or None
        The original tensor, if a view changed values to create this tensor. Errors are measured against it.
    decoded_from : str
        The codec that a view decodes to compute this tensor; empty if the parts are stored parts.
    source_bits : float
        Stored bits per element of the source, if a view computes new values: rounded, rotated or scaled. 0 if the
        values are the stored ones.
    stored_like : Tensor or None
        The tensor whose codec and element type a conversion uses for these f32 values if no rule of a recipe matches.

    Examples
    --------
    >>> tensor = ingot.open("int4.zt")["model.layers.0.mlp.up_proj.weight"]
    >>> tensor.codec, tensor.shape, tensor.nbytes, tensor.params["bits"]
    ('affine', (512, 192), 52224, 4)
    >>> tensor.numpy("f32").dtype, tensor[16:32].shape, np.asarray(tensor).ndim
    (dtype('float32'), (16, 192), 2)
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
    stored_like: Tensor | None = field(default=None, repr=False)

    @classmethod
    def from_parts(
        cls, layout: Layout, parts: Mapping[str, Part | Array], shape: tuple[int, ...], name: str = "tensor"
    ) -> Tensor:
        """Return a tensor with the given parts; no value is decoded or encoded.

        Parameters
        ----------
        layout : Layout
            The layout of the parts, such as an ``AffineLayout``. Its class determines the codec.
        parts : mapping of role to Part or array
            Arrays are stored in C order with their element type. Packed codes are bytes (u8) or words.
        shape : tuple of int
            The shape of the decoded values.
        name : str

        Raises
        ------
        CodecError
            The codec's rules (``affine.size``, ``affine.parts``, ...): parts, layout and shape do not match.
        UnsupportedError
            ``codec.unknown``: no codec has this layout.
        """
        codecs = _CODECS["codecs"]
        if layout.codec not in codecs:
            raise UnsupportedError(f"no codec {layout.codec[:80]!r}", rule="codec.unknown", where=name)
        stored_parts = {role: part if isinstance(part, Part) else array_part(part) for role, part in parts.items()}
        attributes = layout.attributes()
        dtype = getattr(layout, "dtype", None) or attributes.get("dtype", "f32")
        tensor = cls(name, tuple(shape), str(dtype), layout.codec, stored_parts, attributes, codecs[layout.codec])
        codecs[layout.codec].check(tensor)
        return tensor

    @property
    def nbytes(self) -> int:
        """The number of stored bytes of all parts."""
        total = 0
        for part in self.parts.values():  # a loop is faster than sum() with a generator, and this runs per tensor
            total += part.length
        return total

    @property
    def stored_bits(self) -> float:
        """The stored bits per element; if a view computed the values, the stored bits of the source."""
        return self.source_bits or 8 * self.nbytes / max(self.size, 1)

    @property
    def occupies(self) -> int:
        """The number of bytes of all parts in their files."""
        return sum(part.length if part.occupies is None else part.occupies for part in self.parts.values())

    @property
    def size(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """The shape as (rows, columns): the last dimension is the columns, the others are flattened into rows."""
        return (prod(self.shape[:-1]), self.shape[-1]) if self.shape else (1, 1)

    @property
    def part_dtypes(self) -> dict[str, str]:
        """Storage type of each part by its role."""
        return {role: part.dtype for role, part in self.parts.items()}

    @property
    def part_nbytes(self) -> dict[str, int | None]:
        """Decoded bytes of each part by its role."""
        return {role: part.nbytes for role, part in self.parts.items()}

    @property
    def layout(self) -> Layout:
        """The layout of the parts, read from ``params``. Raises ``CodecError`` for invalid parameters."""
        return layout_of(self)

    def spec(self) -> TensorSpec:
        """Return the spec for writing this tensor with unchanged parts."""
        parts = tuple(
            PartSpec(role, part.dtype, part.length, part.type, part.encoding, part.uncompressed_length)
            for role, part in self.parts.items()
        )
        return TensorSpec(self.name, self.shape, self.dtype, self.codec, parts, dict(self.params))

    def private(self) -> Tensor:
        """Return a copy of this tensor with memory that no other tensor shares, so that decoded arrays are writable.

        Arrays that are views of a mapped file become views of a copy-on-write mapping.
        """
        return replace(self, parts={role: part.private() for role, part in self.parts.items()})

    @bordered
    def prefetch(self) -> bool:
        """Ask the system to read the tensor's bytes into its cache, and return at once.

        Returns whether all bytes are in local files, on a system with such a request. Values are the same in any case.
        """
        requested = [part.prefetch() for part in self.parts.values()]
        return all(requested)

    @bordered
    def evict(self) -> bool:
        """Ask the system to drop the tensor's bytes from its cache, such as after a copy to a device.

        Pages that also contain bytes of other tensors stay. Later reads read the file again. Arrays of this tensor stay
        valid. Returns whether all bytes are in local files, on a system with such a request.
        """
        requested = [part.evict() for part in self.parts.values()]
        return all(requested)

    @bordered
    def numpy(self, dtype: Any = None, *, out: Array | None = None, copy: bool = False) -> Array:
        """Return the decoded values as a NumPy array of ``shape``.

        Decoding into an ``out`` that was used before is up to twice as fast as decoding into new memory, because the
        system clears every new page.

        Parameters
        ----------
        dtype : optional
            Any spelling of an element type; by default the tensor's element type. With the default, a raw dense tensor
            of a mapped file is returned without a copy, read-only.
        out : optional
            The array to fill and to return. It has the shape ``shape`` and is writable, aligned and in C order; its
            element type is the default of ``dtype``. After an error its contents are undefined.
        copy : bool
            Whether to return writable memory that is shared with no file and no other array.

        Raises
        ------
        UnsupportedError
            No decoder for this codec or dtype.
        UsageError
            ``tensor.out``: ``out`` has another shape or type, is read-only, or is not in C order.
        IntegrityError, FormatError, CodecError
            The parts are damaged or do not match.
        ResourceError
            ``decoded.limit``: the decoded size is out of proportion to the stored size.
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
        """Return part of the values, equal to ``numpy()[index]``, for integers, slices and at most one ellipsis.

        Only the rows that the index selects are decoded, and little more is read (``spec/operations.md``, "Pieces of
        tensors"). For ``sparse_coo`` and parts in zstd, the rows before them are decoded too. Parts of up to 8 MiB are
        read and checked in full. For larger parts the chunks that contain the range are checked if the file has
        digests of chunks; files that Ingot writes have them.

        Raises
        ------
        UsageError
            ``tensor.index``: another type of index, or an index out of range.
        IntegrityError
            ``part.digest-mismatch``: a chunk that was read is damaged.
        """
        decoder = self.decoder
        rows = selection_of(self.shape, index, elementwise=False)
        if decoder is None or rows.shape == self.shape:
            values: Array = self.numpy()[rows.inner]
            return values
        selection = selection_of(self.shape, index, elementwise=decoder.elementwise)
        parts = {role: part.by_ranges() for role, part in self.parts.items()}
        reader = decoder.reader(replace(self, parts=parts))
        return read_selection(reader, selection, self.shape, self.dtype, elementwise=decoder.elementwise)

    def __len__(self) -> int:
        """Return the length of the first dimension. Raises ``TypeError`` for a tensor without dimensions."""
        if not self.shape:
            raise TypeError("len() of a tensor without dimensions")
        return self.shape[0]

    def __bool__(self) -> bool:
        """Return True for every tensor, also for one without elements."""
        return True

    def __iter__(self) -> Iterator[Array]:
        """Iterate over the first dimension. All values are decoded once."""
        if not self.shape:
            raise TypeError("iteration over a tensor without dimensions")
        return iter(self.numpy())

    @bordered
    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        """Return the decoded values for ``numpy.asarray`` and other functions of NumPy.

        Between floating-point types, values are decoded as ``numpy(dtype)`` does; NumPy does all other casts.

        Parameters
        ----------
        dtype : optional
            The element type; by default the tensor's element type.
        copy : bool, optional
            True returns writable memory that is shared with no file and no other array. False raises ``ValueError``
            if the values are not stored as they are in memory.
        """
        target = None if dtype is None else np.dtype(dtype)
        if copy is False and not self._is_view_of_parts(target):
            raise ValueError(f"{self.name}: decoding makes a new array; call with copy=None or copy=True")
        row = DTYPES.get(self.dtype)
        is_float_cast = target is not None and _is_float(target) and row is not None and row.is_float
        decoded_dtype = target if is_float_cast else None
        values = self.numpy(decoded_dtype, copy=bool(copy))
        return values if target is None else values.astype(target, copy=False)

    def _is_view_of_parts(self, target: np.dtype[Any] | None) -> bool:
        """Return whether ``numpy`` returns the stored bytes as an array of ``target``, without a copy."""
        row = DTYPES.get(self.dtype)
        if self.codec != DenseLayout.codec or row is None or row.bits < 8:
            return False
        part = self.parts.get("data")
        is_mapped = part is not None and part.encoding == "raw" and part.source.mapped
        return is_mapped and (target is None or target == numpy_dtype(row.name))  # f64 equals None

    @bordered
    def __dlpack__(self, **options: Any) -> Any:
        """Return a DLPack capsule of the decoded values on the CPU, for ``from_dlpack`` and ``torch.as_tensor``.

        The memory is writable, and changes to it affect neither the file nor other reads of this tensor. NumPy exports
        its own element types, torch the others. The options are those of the array API standard.

        Raises
        ------
        BufferError
            The element type needs torch (bf16, 8-bit floats), which is not installed.
        """
        row = DTYPES.get(self.dtype)
        if row is None or hasattr(np, row.numpy):
            return self.private().numpy().__dlpack__(**options)
        try:
            values = self.torch()
        except MissingExtraError as error:
            raise BufferError(
                f"{self.name}: DLPack capsules of {self.dtype} need torch; install it, or call numpy('f32')"
            ) from error
        return values.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return the device of the DLPack capsule: the CPU."""
        return _DLPACK_CPU

    @bordered
    def torch(self, dtype: Any = None, device: Any = "cpu", *, copy: bool = False) -> Any:
        """Return the decoded values as a ``torch.Tensor``, writable.

        Changes to it affect neither the file nor other reads of this tensor. On the CPU, without a change of dtype, a
        raw dense tensor of a mapped file is a copy-on-write mapping. ``copy=True`` copies into new memory at once, so
        that later changes of the file cannot affect it.
        """
        return self.to("pt", dtype, device, copy=copy)

    @bordered
    def to(self, framework: str, dtype: Any = None, device: Any = None, *, copy: bool = False) -> Any:
        """Return the decoded values as an array of ``framework``: ``np``, ``pt``, ``mlx`` or ``jax``.

        ``numpy`` and ``torch`` are other names of ``np`` and ``pt``.

        ``copy`` has the same meaning as in ``numpy``; without it only ``np`` may return a view of the file, which is
        read-only. With ``pt`` and a device other than the CPU, quantized matrices are copied packed and decoded on the
        device, to the same bits.
        """
        framework = framework_name(framework)
        convert = FRAMEWORKS.get_or_refuse(framework)
        if device is not None and framework in ON_DEVICE:
            placed = ON_DEVICE[framework](self, dtype, device)
            if placed is not None:
                return placed
        tensor = self if copy or framework == "np" else self.private()
        return convert(tensor.numpy(dtype, copy=copy), device)

    @bordered
    def sparse(self, framework: str = "scipy", dtype: Any = None) -> Any:
        """Return the stored values of a sparse tensor and their positions as a sparse object; zeros are not filled in.

        Parameters
        ----------
        framework : {"scipy", "torch"}
            ``sparse_csr`` gives a ``scipy.sparse.csr_array`` or a ``torch.sparse_csr`` tensor, ``sparse_coo`` a
            ``coo_array`` or a ``torch.sparse_coo`` tensor. Positions are in row-major order; the memory is new.
        dtype : optional
            Element type; by default the tensor's element type. SciPy supports no floats of 16 bits or less.

        Raises
        ------
        UnsupportedError
            ``tensor.sparse``: another codec. ``adapter.dtype``, ``adapter.layout``: the framework does not support it.
        CodecError, IntegrityError, FormatError
            The parts are damaged or do not match.
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
