"""Checkpoints: the mappings of names to tensors that ``ingot.open`` returns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, TypedDict, Unpack

from ingot.core.border import bordered
from ingot.core.numeric.dtypes import DTYPES
from ingot.core.registry import Registry, did_you_mean
from ingot.errors import UsageError
from ingot.model.account import Omission
from ingot.model.artifact import NO_ATTACHMENTS, Attachments
from ingot.model.bytesource import Range, RangedSource
from ingot.model.reading.lazy import TensorMap, as_tensor_map
from ingot.model.reading.limits import require_room
from ingot.model.reading.ranges import remote_source
from ingot.model.reading.slices import Index
from ingot.model.stacks import Flags
from ingot.model.tensor import Array, Tensor, framework_name
from ingot.naming.names import layer_of, role_of

# a name only, because the module imports this package; it is imported on first use
_VIEWS: Registry[Any] = Registry("view", (("adapters", "ingot.adapters.view:with_adapters"),))


class CheckpointSource:
    """The files, or the checkpoint, that a checkpoint reads.

    This base class is the source of tensors in memory. It has no files to compare or close and cannot be copied.
    """

    __slots__ = ()

    @property
    def views(self) -> tuple[tuple[str, Any], ...]:
        """Names and JSON arguments of the views that were applied to the opened files, in order."""
        return ()

    def identity(self) -> list[Any]:
        """Return JSON values that identify the files; sources of different files have different values."""
        return []

    def origins_of(self, name: str) -> tuple[str, ...]:
        """Return the names of the tensors in the opened file from which the tensor ``name`` is computed."""
        return (name,)

    def require_whole(self) -> None:
        """Compare the digest of each full file if the format stores one. Raises ``IntegrityError``."""

    def require_unchanged(self) -> None:
        """Raise ``IntegrityError`` ``store.changed`` if a file was written to since it was opened."""

    def reopen(self) -> tuple[Callable[..., Checkpoint], tuple[Any, ...]] | None:
        """Return a picklable function and its arguments that open the same checkpoint again; None if not possible."""
        return None

    def close(self) -> None:
        """Close the files and release their mappings."""


class Attributes(TypedDict, total=False):
    """Optional attributes of a checkpoint, which ``Checkpoint`` describes; a view may replace them."""

    metadata: Mapping[str, Any]
    companions: Mapping[str, str]
    attachments: Attachments
    importance: Mapping[str, Array]
    aliases: Mapping[str, str]
    features: Flags | None
    unread: Mapping[str, str]
    omissions: Mapping[str, Omission]


class Checkpoint(Mapping[str, Tensor]):
    """A read-only mapping from tensor names to tensors, in file order; a context manager.

    It can be copied and pickled, for worker processes. The copy opens the same files by their path, and raises
    ``IntegrityError`` ``store.changed`` if they were written to or replaced since.

    Parameters
    ----------
    tensors : mapping
        The tensors. A mapping may build them on access; repeated accesses must return the same object.
    format : str
        Name of the format.
    location : str
        Path or URL of the opened file or folder.
    io : str
        The method of reading bytes: ``mmap`` or ``pread``.
    source : CheckpointSource, optional
        The files or the checkpoint to read. Arrays that were returned before the source was closed stay valid.
    metadata : mapping, optional
        The metadata of the file (zTensor root attributes, safetensors ``__metadata__``).
    companions : mapping of file name to path, optional
        Further files of the model folder, such as config.json and tokenizer files.
    attachments : Attachments, optional
        Parts of the artifact that are not weights.
    importance : mapping of name to array, optional
        One f64 weight per column of a matrix; encoders of palettes weight errors by them.
    aliases : mapping of name to name, optional
        Names that recipes match instead of tensor names that do not identify the tensor's role.
    features : Flags, optional
        The feature flags of the file, if its format has any. They determine the kernels that can run the file.
    unread : mapping of name to reason, optional
        Tensors or constants of the opened file that its reader does not support.
    omissions : mapping of name to Omission, optional
        The reasons why views left out tensors of the opened file, by their names in the file.

    Examples
    --------
    >>> checkpoint = ingot.open("int4.zt")
    >>> sorted(checkpoint)[0], checkpoint.metadata["format"]
    ('lm_head.weight', 'pt')
    >>> checkpoint.state_dict(dtype="f32")["model.norm.weight"].dtype
    dtype('float32')
    >>> [layer for layer, arrays in checkpoint.layers()][:3]
    [None, 0, 1]
    >>> checkpoint.close()
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        *,
        format: str,
        location: str,
        io: str = "mmap",
        source: CheckpointSource | None = None,
        **attributes: Unpack[Attributes],
    ) -> None:
        unknown = attributes.keys() - Attributes.__annotations__.keys()
        if unknown:
            raise TypeError(f"Checkpoint() has no parameter {', '.join(sorted(unknown))}")
        self._tensors = tensors
        self.format = format
        self.location = location
        self.io = io
        self.source = source or CheckpointSource()
        self.metadata: Mapping[str, Any] = dict(attributes.get("metadata") or {})
        self.companions: Mapping[str, str] = dict(attributes.get("companions") or {})
        self.attachments = attributes.get("attachments", NO_ATTACHMENTS)
        self.importance = attributes.get("importance", {})
        self.aliases = attributes.get("aliases", {})
        self.features = attributes.get("features")
        self.unread = attributes.get("unread", {})
        self.omissions = attributes.get("omissions", {})
        self._closed = False

    def __reduce__(self) -> tuple[Any, ...]:
        reopen = self.source.reopen()
        if reopen is None:
            raise UsageError(
                "this checkpoint cannot be copied: open it again by its path",
                rule="checkpoint.copy",
                where=self.location,
            )
        return reopen

    @bordered
    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __repr__(self) -> str:
        return f"Checkpoint({self.location!r}, format={self.format}, {len(self)} tensors)"

    def _repr_html_(self) -> str:
        """Return the HTML that notebooks show: a title, and a table with the totals of each codec and element type.

        The columns are the numbers of tensors and elements, the stored bytes, and the stored bits per element.
        """
        from ingot.reporting.html import table_html, text_of  # noqa: PLC0415 - notebooks only
        from ingot.reporting.report import Column, Table  # noqa: PLC0415

        totals: dict[tuple[str, str], list[int]] = {}
        for tensor in self.tensor_map.uncached():
            sums = totals.setdefault((tensor.codec, tensor.dtype), [0, 0, 0])
            sums[:] = sums[0] + 1, sums[1] + tensor.size, sums[2] + tensor.nbytes
        columns = (
            Column("", "text", "codec"),
            Column("", "text", "dtype"),
            Column("", "count", "tensors"),
            Column("", "count", "elements"),
            Column("", "bytes", "stored"),
            Column("", "bits", "bits"),
        )
        rows = [(*group, *sums, 8 * sums[2] / max(sums[1], 1)) for group, sums in totals.items()]
        return f"<pre>{text_of(repr(self))}</pre>{table_html(Table('', columns, rows))}"

    @property
    def tensor_map(self) -> TensorMap[Tensor]:
        """The tensors as a mapping that can be iterated without creating or caching every tensor."""
        return as_tensor_map(self._tensors)

    @property
    def nbytes(self) -> int:
        """The number of stored bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensor_map.uncached())

    @property
    def views(self) -> tuple[tuple[str, Any], ...]:
        """Names and JSON arguments of the views that were applied to the opened checkpoint, in order.

        Equal views of equal files yield equal checkpoints.
        """
        return self.source.views

    def require_whole(self) -> None:
        """Compare the digest of the full file if the format stores one; a second call reads nothing.

        Functions that read all tensors call this method first. Raises ``IntegrityError`` with the format's rule.
        """
        self.source.require_whole()

    def require_unchanged(self) -> None:
        """Raise ``IntegrityError`` ``store.changed`` if a file was written to since it was opened.

        If it raises, the values that were read may belong to two versions of the file.
        """
        self.source.require_unchanged()

    def origins_of(self, name: str) -> tuple[str, ...]:
        """Return the names of the tensors in the opened file from which the tensor ``name`` is computed."""
        return self.source.origins_of(name)

    def identity(self) -> list[Any]:
        """Return JSON values that identify the checkpoint: first of the opened files, then of the views."""
        return [self.source.identity(), *(list(view) for view in self.views)]

    @bordered
    def state_dict(
        self,
        framework: str = "np",
        dtype: Any = None,
        device: Any = None,
        names: Iterable[str] | None = None,
        *,
        out: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return decoded tensors by name.

        Parameters
        ----------
        framework : {"np", "pt", "mlx", "jax"}
            ``numpy`` and ``torch`` are other names of ``np`` and ``pt``.
        dtype : optional
            The element type of all floating-point results; by default the element type of each tensor. Integer and
            boolean tensors keep their type.
        device : optional
            The device, as the framework names it.
        names : iterable of str, optional
            The tensors to decode, by default all. An unknown name raises ``UsageError``.
        out : mapping of name to NumPy array, optional
            Arrays to decode into, with the requirements of ``Tensor.numpy(out=)``; for example the result of an earlier
            call. Tensors without an array are decoded into new memory. Only for framework ``np``.

        Raises
        ------
        ResourceError
            ``decoded.limit``, ``ram.guard``: the decoded size is out of proportion or exceeds the free memory.
        IntegrityError
            A digest differs. The digest of a full file (``.wdelta``) is checked only if all tensors are read.
        """
        framework = framework_name(framework)
        if isinstance(names, str):
            raise UsageError(
                f"expected names to be a list of tensor names, found the text {names!r}", rule="tensor.names"
            )
        selected = list(self) if names is None else list(names)
        outputs = {} if out is None else out
        if outputs and framework != "np":
            raise UsageError(f"expected framework np with out, found {framework!r}", rule="tensor.out")
        unknown = [name for name in (*selected, *outputs) if name not in self]
        if unknown:
            raise self.no_tensor(unknown[0])
        ready = (self[name] for name in selected if name not in outputs)
        require_room(ready, self.location, retyped=dtype is not None)
        if names is None or set(selected) == set(self):
            self.require_whole()
        self.read_ahead(selected)
        return {name: _load(self[name], framework, dtype, device, outputs.get(name)) for name in selected}

    def read_ahead(self, names: Iterable[str] | None = None) -> None:
        """Start to read tensors whose bytes are on another machine, by default all.

        Call it before reading each of these tensors once, in this order. Up to 1 GiB is read in advance.
        """
        if self.io == "mmap":
            return
        runs: list[tuple[RangedSource, list[Range]]] = []  # in order, because a source may follow others again
        for name in self if names is None else names:
            for part in self[name].parts.values():
                source = remote_source(part.source)
                if source is None:
                    continue
                if not runs or runs[-1][0] is not source:
                    runs.append((source, []))
                runs[-1][1].append((part.offset, part.length))
        for source, ranges in runs:
            source.expect(ranges)

    def get_slice(self, name: str) -> TensorSlice:
        """Return an object like a slice of safetensors, with ``get_shape()``, ``get_dtype()`` and ``[rows, cols]``."""
        if name not in self:
            raise self.no_tensor(name)
        return TensorSlice(self[name])

    def layers(
        self, framework: str = "np", dtype: Any = None, device: Any = None
    ) -> Iterator[tuple[int | None, dict[str, Any]]]:
        """Yield ``(layer, {name: array})`` for each transformer layer in order; the arrays are not cached.

        Tensors outside the layers have the layer None. The final norm and the head come last, because they follow the
        layers in a forward pass. All other tensors outside the layers come first.
        """
        self.require_whole()
        before, layers, after = group_by_layer(self)
        groups: list[tuple[int | None, list[str]]] = [(None, before), *sorted(layers.items()), (None, after)]
        for layer, names in groups:
            if names:
                yield layer, self.state_dict(framework, dtype, device, names)

    def no_tensor(self, name: str) -> UsageError:
        """Return the error for an unknown tensor name; it suggests the most similar name."""
        return unknown_tensor(name, self, self.location)

    @bordered
    def with_adapters(self, adapters: Iterable[Any]) -> Checkpoint:
        """Return a view with the changes of LoRA adapters added, which are computed when a tensor is read.

        Closing the view closes this checkpoint.

        Parameters
        ----------
        adapters : iterable of path, (path, weight) or "PATH:WEIGHT"
            PEFT or MLX folders, or GGUF adapters of this base; ``spec/adapters.md`` describes the values.

        Raises
        ------
        UnsupportedError
            ``adapter.base``, ``adapter.shape``: an adapter belongs to another base; ``adapter.method``, ...
        """
        view: Checkpoint = _VIEWS["adapters"](self, list(adapters))
        return view

    def close(self) -> None:
        """Release files and mappings; a second call does nothing."""
        if not self._closed:
            self._closed = True
            self.source.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class TensorSlice:
    """A tensor that is read in slices, with the method names of safetensors' ``PySafeSlice``."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        """Return the shape of the full tensor."""
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        """Return the element type as safetensors headers spell it, or Ingot's name if safetensors has no such type."""
        row = DTYPES.get(self._tensor.dtype)
        return (row.safetensors if row else None) or self._tensor.dtype

    def __getitem__(self, index: Index) -> Array:
        return self._tensor[index]


def tensor_map_of(tensors: Mapping[str, Tensor]) -> TensorMap[Tensor]:
    """Return tensors as a mapping that can be iterated without creating or caching every tensor."""
    return tensors.tensor_map if isinstance(tensors, Checkpoint) else as_tensor_map(tensors)


def unknown_tensor(name: str, names: Iterable[str], location: str) -> UsageError:
    """Return the error ``tensor.unknown`` for a name; it suggests the most similar of ``names``."""
    return UsageError(f"no tensor named {name!r}{did_you_mean(name, names)}", rule="tensor.unknown", where=location)


def group_by_layer(names: Iterable[str]) -> tuple[list[str], dict[int, list[str]], list[str]]:
    """Return the names before the layers, the names of each layer, and the names after them (final norm, head)."""
    before: list[str] = []
    layers: dict[int, list[str]] = {}
    after: list[str] = []
    for name in names:
        layer = layer_of(name)
        if layer is not None:
            layers.setdefault(layer, []).append(name)
        elif _follows_layers(name):
            after.append(name)
        else:
            before.append(name)
    return before, layers, after


def _follows_layers(name: str) -> bool:
    """Return whether a tensor outside the layers is used after them: the head, its bias or the final norm."""
    if name.startswith("lm_head."):
        return True
    role = role_of(name)
    return role == "head" or (role == "norm" and "embed" not in name)


def _load(tensor: Tensor, framework: str, dtype: Any, device: Any, out: Any) -> Any:
    row = DTYPES.get(tensor.dtype)
    target_dtype = dtype if row is not None and row.is_float else None
    return tensor.to(framework, target_dtype, device) if out is None else tensor.numpy(target_dtype, out=out)
