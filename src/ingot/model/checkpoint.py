"""A checkpoint: what ``ingot.open`` returns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any

from ingot.core.border import bordered
from ingot.core.dtypes import DTYPES
from ingot.core.names import layer_of, role_of
from ingot.core.suggest import did_you_mean
from ingot.errors import UsageError
from ingot.model.account import Omission
from ingot.model.attachments import NOTHING, Attachments
from ingot.model.bytesource import Range, Ranged
from ingot.model.features import Flags
from ingot.model.lazy import Many, as_many
from ingot.model.limits import require_room
from ingot.model.ranges import distant
from ingot.model.slices import Index
from ingot.model.tensor import Array, Tensor

Reopen = Callable[[], tuple[Callable[..., "Checkpoint"], tuple[Any, ...]]]
"""Returns a function and its arguments, all of which can be pickled, that open the same checkpoint again."""


class Checkpoint(Mapping[str, Tensor]):
    """A read-only mapping from tensor names to tensors, in file order; a context manager.

    It can be copied and pickled, for worker processes: the copy opens the same files again by their path, and is
    refused (``IntegrityError`` ``store.changed``) where they were written to or replaced since.

    Parameters
    ----------
    tensors : mapping
        May build its tensors on access; asking for one twice gives the same object.
    format : str
        Name of the format.
    location : str
        Path or URL it was opened from.
    metadata : mapping
        The file's own metadata (zTensor root attributes, safetensors ``__metadata__``).
    companions : mapping of file name to path
        Files that travel with a directory artifact: config.json, tokenizer files, ...
    on_close : callable
        Releases files and mappings. Arrays handed out before stay valid.
    io : str
        How bytes are read: ``mmap`` or ``pread``.
    attachments : Attachments
        What the artifact holds beside its weights.

    Attributes
    ----------
    importance : mapping of name to array
        What errors of a matrix's columns weigh where its values are to be stored as palettes: one f64 per column.
    check_whole : callable, optional
        Compares the digest over the whole file, where there is one; see ``require_whole``.
    check_unchanged : callable, optional
        Compares the files with what they were when they were opened; see ``require_unchanged``.
    features : Flags, optional
        Which kernels could run the file, where its format says so.
    stamps : callable, optional
        Returns what tells the opened files from others, JSON-able.
    views : tuple of (name, argument)
        What made this checkpoint of the one that was opened, in order, JSON-able: equal views of equal files are equal.
    unread : mapping of name to reason
        Tensors or constants that the opened file holds and its reader could not express.
    omissions : mapping of name to Omission
        Why views left out tensors of the opened file, by their names in the file.
    """

    reopen: Reopen | None = None
    """How a copy is opened, set by whoever opened this; without it copying is refused with ``checkpoint.copy``."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        *,
        format: str,
        location: str,
        metadata: Mapping[str, Any] | None = None,
        companions: Mapping[str, str] | None = None,
        on_close: Callable[[], None] | None = None,
        io: str = "mmap",
    ) -> None:
        self._tensors = tensors
        self.format = format
        self.location = location
        self.metadata: Mapping[str, Any] = dict(metadata or {})
        self.companions: Mapping[str, str] = dict(companions or {})
        self.io = io
        self.attachments: Attachments = NOTHING
        self.importance: Mapping[str, Array] = {}
        self.called: Mapping[str, str] = {}
        self.features: Flags | None = None
        self._on_close = on_close
        self.check_whole: Callable[[], None] | None = None
        self.check_unchanged: Callable[[], None] | None = None
        self.stamps: Callable[[], Any] | None = None
        self.views: tuple[tuple[str, Any], ...] = ()
        self.unread: Mapping[str, str] = {}
        self.omissions: Mapping[str, Omission] = {}
        self.origins: Callable[[str], tuple[str, ...]] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        if self.reopen is None:
            raise UsageError(
                "this checkpoint cannot be copied: open it again by its path",
                rule="checkpoint.copy",
                where=self.location,
            )
        return self.reopen()

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
        from ingot.model.html import checkpoint_html  # noqa: PLC0415 - few are looked at there

        return checkpoint_html(repr(self), self)

    @property
    def many(self) -> Many[Tensor]:
        """The tensors, for whoever goes over all of them and does not want each one made, or kept."""
        return as_many(self._tensors)

    @property
    def nbytes(self) -> int:
        """Stored bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.many.uncached())

    def require_whole(self) -> None:
        """Compare the digest over the whole file, where the format has one; a second call does nothing.

        Everything that reads all tensors asks this first. Raises ``IntegrityError`` with the format's rule.
        """
        if self.check_whole is not None:
            self.check_whole()

    def require_unchanged(self) -> None:
        """Refuse files that were written to since they were opened: what was read may be of two versions.

        Raises ``IntegrityError`` ``store.changed``.
        """
        if self.check_unchanged is not None:
            self.check_unchanged()

    def origins_of(self, name: str) -> tuple[str, ...]:
        """Return the names of the opened file's tensors of which the tensor ``name`` is made; itself without views."""
        return (name,) if self.origins is None else self.origins(name)

    def identity(self) -> list[Any]:
        """Return what tells this checkpoint from others, JSON-able: of the opened files, then of the views."""
        return [self.stamps() if self.stamps is not None else [], *(list(view) for view in self.views)]

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
        if self._on_close is not None:
            self._on_close()
            self._on_close = None

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
