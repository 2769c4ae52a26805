"""A checkpoint: what ``ingot.open`` returns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, TypedDict, Unpack

from ingot.core.border import bordered
from ingot.core.numeric.dtypes import DTYPES
from ingot.core.suggest import did_you_mean
from ingot.errors import UsageError
from ingot.model.account import Omission
from ingot.model.attachments import NOTHING, Attachments
from ingot.model.bytesource import Range, Ranged
from ingot.model.features import Flags
from ingot.model.reading.lazy import Many, as_many
from ingot.model.reading.limits import require_room
from ingot.model.reading.ranges import distant
from ingot.model.reading.slices import Index
from ingot.model.tensor import Array, Tensor
from ingot.naming.names import layer_of, role_of


class CheckpointSource:
    """The files, or the other checkpoint, that a checkpoint reads.

    This base class is the source of tensors in memory: it has nothing to compare or to close, and cannot be copied.
    """

    __slots__ = ()

    @property
    def views(self) -> tuple[tuple[str, Any], ...]:
        """The names and JSON arguments of the views between the opened files and the checkpoint, in order."""
        return ()

    def identity(self) -> list[Any]:
        """Return JSON values that differ between sources with other files."""
        return []

    def origins_of(self, name: str) -> tuple[str, ...]:
        """Return the names of the opened file's tensors that the tensor ``name`` is made of."""
        return (name,)

    def require_whole(self) -> None:
        """Compare the digest over each whole file, if the format has one; raises ``IntegrityError``."""

    def require_unchanged(self) -> None:
        """Raise ``IntegrityError`` ``store.changed`` if a file was written to since it was opened."""

    def reopen(self) -> tuple[Callable[..., Checkpoint], tuple[Any, ...]] | None:
        """Return a function and arguments that open the same checkpoint again, all picklable; None if not possible."""
        return None

    def close(self) -> None:
        """Release files and mappings."""


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
        May build its tensors on access, the same object for each access.
    format : str
        Name of the format.
    location : str
        Path or URL of the opened file or folder.
    io : str
        How bytes are read: ``mmap`` or ``pread``.
    source : CheckpointSource, optional
        The files or the checkpoint to read. Arrays that were returned before the source was closed stay valid.
    metadata : mapping, optional
        The file's own metadata (zTensor root attributes, safetensors ``__metadata__``).
    companions : mapping of file name to path, optional
        Files that travel with a folder: config.json, tokenizer files, ...
    attachments : Attachments, optional
        Parts of the artifact that are not weights.
    importance : mapping of name to array, optional
        One f64 weight per column of a matrix, for errors of values that are stored as palettes.
    aliases : mapping of name to name, optional
        Names that recipes match instead of a tensor's own, which states nothing about its role.
    features : Flags, optional
        Conditions for the kernels that could run the file, if its format states them.
    unread : mapping of name to reason, optional
        Tensors or constants of the opened file that its reader could not express.
    omissions : mapping of name to Omission, optional
        Why views left out tensors of the opened file, by their names in the file.
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
        self.attachments = attributes.get("attachments", NOTHING)
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
        """Return what notebooks show: totals by codec."""
        from ingot.reporting.html import checkpoint_html  # noqa: PLC0415 - few are looked at there

        return checkpoint_html(repr(self), self)

    @property
    def many(self) -> Many[Tensor]:
        """The tensors, for whoever goes over all of them and does not want each one made, or kept."""
        return as_many(self._tensors)

    @property
    def nbytes(self) -> int:
        """Stored bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.many.uncached())

    @property
    def views(self) -> tuple[tuple[str, Any], ...]:
        """The names and JSON arguments of the views that made this checkpoint from the opened one, in order.

        Equal views of equal files are equal checkpoints.
        """
        return self.source.views

    def require_whole(self) -> None:
        """Compare the digest over the whole file, if the format has one; a second call reads nothing.

        Functions that read all tensors call it first. Raises ``IntegrityError`` with the format's rule.
        """
        self.source.require_whole()

    def require_unchanged(self) -> None:
        """Refuse files that were written to since they were opened: the values read may be of two versions.

        Raises ``IntegrityError`` ``store.changed``.
        """
        self.source.require_unchanged()

    def origins_of(self, name: str) -> tuple[str, ...]:
        """Return the names of the opened file's tensors that the tensor ``name`` is made of; itself without views."""
        return self.source.origins_of(name)

    def identity(self) -> list[Any]:
        """Return JSON values that differ between other checkpoints: of the opened files, then of the views."""
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
        dtype : optional
            One element type for all floating-point tensors; each tensor's own by default. Integers and booleans keep
            theirs.
        device : optional
            Passed to the framework.
        names : iterable of str, optional
            Only these; an unknown name raises ``UsageError``.
        out : mapping of name to NumPy array, optional
            Arrays to decode into, as ``Tensor.numpy(out=)`` takes them: say, what an earlier call returned. Tensors
            without one get memory of their own. For framework ``np`` only.

        Raises
        ------
        ResourceError
            ``decoded.limit``, ``ram.guard``: what is stored stands for more than may be decoded, or than there is room.
        IntegrityError
            A digest does not fit; that of a whole file, as a ``.wdelta`` has, is checked where all tensors are read.
        """
        chosen = list(self) if names is None else list(names)
        given = {} if out is None else out
        if given and framework != "np":
            raise UsageError(f"expected framework np with out, found {framework!r}", rule="tensor.out")
        unknown = [name for name in (*chosen, *given) if name not in self]
        if unknown:
            raise self.no_tensor(unknown[0])
        ready = (self[name] for name in chosen if name not in given)
        require_room(ready, self.location, retyped=dtype is not None)
        if names is None or set(chosen) == set(self):
            self.require_whole()
        self.read_ahead(chosen)
        return {name: _load(self[name], framework, dtype, device, given.get(name)) for name in chosen}

    def read_ahead(self, names: Iterable[str] | None = None) -> None:
        """Begin to read these tensors, by default all, where their bytes come from another machine.

        For whoever is going to read each of them once, soon, in this order: up to 1 GiB travels before they are asked
        for.
        """
        if self.io == "mmap":
            return
        runs: list[tuple[Ranged, list[Range]]] = []  # a file's again where others came in between: the order is kept
        for name in self if names is None else names:
            for part in self[name].parts.values():
                source = distant(part.source)
                if source is None:
                    continue
                if not runs or runs[-1][0] is not source:
                    runs.append((source, []))
                runs[-1][1].append((part.offset, part.length))
        for source, ranges in runs:
            source.expect(ranges)

    def get_slice(self, name: str) -> TensorSlice:
        """Return what safetensors' ``get_slice`` does: ``get_shape()``, ``get_dtype()``, and ``[rows, cols]``."""
        if name not in self:
            raise self.no_tensor(name)
        return TensorSlice(self[name])

    def layers(
        self, framework: str = "np", dtype: Any = None, device: Any = None
    ) -> Iterator[tuple[int | None, dict[str, Any]]]:
        """Yield ``(layer, {name: array})`` one transformer layer at a time, holding none of them itself.

        Tensors that belong to no layer come first, with layer None, except those that follow the layers in a forward
        pass (final norm, head), which come last, again with None.
        """
        self.require_whole()
        before, layers, after = group_by_layer(self)
        groups: list[tuple[int | None, list[str]]] = [(None, before), *sorted(layers.items()), (None, after)]
        for layer, names in groups:
            if names:
                yield layer, self.state_dict(framework, dtype, device, names)

    def no_tensor(self, name: str) -> UsageError:
        """Return the refusal of a name that is not here, with the nearest one that is."""
        return unknown_tensor(name, self, self.location)

    def close(self) -> None:
        """Release files and mappings; a second call does nothing."""
        if not self._closed:
            self._closed = True
            self.source.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class TensorSlice:
    """A tensor of which pieces are asked for, with the names that safetensors' ``PySafeSlice`` has."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        """Return the shape of the whole tensor."""
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        """Return the element type as a safetensors header spells it, or Ingot's name of one that has none there."""
        known = DTYPES.get(self._tensor.dtype)
        return (known.safetensors if known else None) or self._tensor.dtype

    def __getitem__(self, index: Index) -> Array:
        return self._tensor[index]


def many_of(tensors: Mapping[str, Tensor]) -> Many[Tensor]:
    """Return tensors for somebody who goes over all of them and keeps none."""
    return tensors.many if isinstance(tensors, Checkpoint) else as_many(tensors)


def unknown_tensor(name: str, known: Iterable[str], where: str) -> UsageError:
    """Return the refusal ``tensor.unknown`` of a name, with the nearest of the known ones."""
    return UsageError(f"no tensor named {name!r}{did_you_mean(name, known)}", rule="tensor.unknown", where=where)


def group_by_layer(names: Iterable[str]) -> tuple[list[str], dict[int, list[str]], list[str]]:
    """Split names into those before the layers, those of each layer, and those after (final norm and head)."""
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
    """Whether a tensor outside the layers is used after them: the head and its bias, the final norm."""
    if name.startswith("lm_head."):
        return True
    role = role_of(name)
    return role == "head" or (role == "norm" and "embed" not in name)


def _load(tensor: Tensor, framework: str, dtype: Any, device: Any, out: Any) -> Any:
    known = DTYPES.get(tensor.dtype)
    wanted = dtype if known is not None and known.is_float else None
    return tensor.to(framework, wanted, device) if out is None else tensor.numpy(wanted, out=out)
