"""Apply a delta to weights in memory, in place and without a second copy of them; and take it back, bit for bit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

from ingot.codecs.delta import delta_codec
from ingot.codecs.table import CODECS
from ingot.core.buffers import recycling, scratch
from ingot.core.checksums import Blake3
from ingot.core.parallel import default_workers, ordered
from ingot.errors import FormatError, IngotError, IntegrityError, UsageError
from ingot.model.checkpoint import Checkpoint
from ingot.model.part import CHUNK
from ingot.model.tensor import Array, Tensor
from ingot.ops.delta_chain import Layer, Link, Route, link_of, next_stage
from ingot.ops.identity import TensorId, content_of, file_bytes, hex_of
from ingot.ops.open import Source, checkpoint_of, open_delta
from ingot.ops.save import as_tensor
from ingot.ops.state import address, element_type, like, shared_array
from ingot.ops.undo import TensorUndo
from ingot.ops.wdelta_parent import matching_order

SLAB = 1 << 19
_RECYCLED = 16 << 20
_MISSING = object()
PARENT = "wdelta"

State = MutableMapping[str, Any]


@dataclass(slots=True)
class Applied:
    """A delta that was applied to a state dict: what was done, and how to take it back.

    ``base_id`` and ``result_id`` are the identities that the delta states. ``nbytes`` is the memory that undoing takes.
    """

    delta: Checkpoint
    owned: bool
    base_id: str | None
    result_id: str | None
    tensors: int
    state: State = field(repr=False)
    undo: dict[str, TensorUndo] | None = field(default=None, repr=False)
    replaced: dict[str, Any] = field(default_factory=dict, repr=False)
    source: Source | None = field(default=None, repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes that the undo logs take; tensors that were replaced or removed are kept beside them."""
        return sum(undo.nbytes for undo in (self.undo or {}).values())

    def revert(self) -> None:
        """Give the state dict the values back that it had; see ``ingot.revert``."""
        revert(self.state, self)

    def close(self) -> None:
        """Let go of the delta and of what undoing needs; ``revert`` is not possible any more."""
        self.undo = None
        self.replaced = {}
        if self.owned:
            self.delta.close()


def apply_delta(
    state_dict: State,
    delta: str | PathLike[str] | Checkpoint,
    *,
    verify_base: bool = True,
    undo: bool = True,
    workers: int | None = None,
) -> Applied:
    """Turn the base's weights in ``state_dict`` into the fine-tune's, in place.

    Parameters
    ----------
    state_dict : mutable mapping of name to NumPy array or torch tensor
        The memory of its tensors is written to: C order, on the CPU. New, reshaped and retyped tensors are put in as
        new objects, removed ones leave the mapping.
    delta : path or Checkpoint
        An opened one must stay open until the delta is reverted or ``Applied.close`` was called; a digest of its whole
        file, as a ``.wdelta`` has, is checked only where a path is given.
    verify_base : bool
        Prove by its hash that the state dict holds the delta's base.
    undo : bool
        Keep what ``revert`` needs: a log that is small where little changed. Without it the differences are decoded,
        added and rounded in one go.
    workers : int, optional
        Threads; all processors this process may use by default.

    Returns
    -------
    Applied

    Raises
    ------
    IntegrityError
        ``delta.base``: names, shapes, element types or values are not those of the delta's base; nothing was changed.
    UnsupportedError
        ``delta.layout``: a tensor cannot be changed in place; ``delta.shared``: two names share memory otherwise than
        as one tensor.
    FormatError, CodecError, UsageError
        The delta is damaged. What was changed before that was seen is put back; without ``undo`` all parts of the
        delta are checked before anything is changed.
    """
    workers = default_workers() if workers is None else workers
    source = None
    if isinstance(delta, Checkpoint):
        opened = delta
    else:
        source = open_delta(delta)
        opened = checkpoint_of(source)
    try:
        with _whole(source):
            link = link_of(opened)
            job = _Apply(state_dict, link, workers)
            if verify_base:
                job.require_base()
        base, result = link.info.base.content, link.info.result.content
        applied = Applied(opened, source is not None, base, result, len(job.routes), state_dict, source=source)
        job.run(applied, undo=undo)
    except BaseException:
        if source is not None:
            opened.close()
        raise
    return applied


@contextmanager
def _whole(source: Source | None) -> Iterator[None]:
    """Check the digest of a delta's whole file beside what is done inside; that it is damaged is said before all else.

    Raises ``IntegrityError`` with the format's rule.
    """
    if source is None:
        yield
        return
    with ThreadPoolExecutor(1) as pool:
        checked = pool.submit(source.require_whole)
        try:
            yield
        finally:
            checked.result()


def revert(state_dict: State, applied: Applied) -> None:
    """Give ``state_dict`` the values back that it had before ``applied``, bit for bit; several in reverse order.

    Raises
    ------
    UsageError
        ``delta.reverted``: it was reverted or closed already, or applied without ``undo``. ``delta.not-applied``: the
        tensors are not as the delta left them; a later one was not reverted, say. Nothing was changed.
    IntegrityError
        ``store.changed``: the delta's file was written to meanwhile. Nothing was changed.
    """
    if applied.undo is None:
        raise UsageError(
            "expected a delta that can be taken back; this one was reverted, closed, or applied with undo=False",
            rule="delta.reverted",
        )
    undo = applied.undo
    if applied.source is not None:
        applied.source.require_unchanged()
    arrays = dict(ordered(lambda name: (name, _changed(state_dict, name, undo[name])), undo))
    for _ in ordered(lambda name: undo[name].revert(arrays[name]), undo):
        pass
    _put_back(state_dict, applied.replaced)
    applied.close()


def _changed(state: State, name: str, undo: TensorUndo) -> Array:
    array = shared_array(name, state[name]) if name in state else None
    if array is None or not undo.holds(array):
        raise UsageError(
            "this tensor is not as the delta left it; revert what was applied later first",
            rule="delta.not-applied",
            where=name,
        )
    return array


def _put_back(state: State, replaced: Mapping[str, Any]) -> None:
    for name, value in replaced.items():
        if value is _MISSING:
            state.pop(name, None)
        else:
            state[name] = value


class _Apply:
    """One application: everything is looked at before anything is changed."""

    def __init__(self, state: State, link: Link, workers: int) -> None:
        self._state, self._link, self._workers = state, link, workers
        self._arrays = {name: shared_array(name, value) for name, value in state.items()}
        before = self._before()
        self.routes = next_stage(before, link, 1)
        same = [name for name, change in link.info.tensors.items() if change.op == "same"]
        self._tied = _tied(self._arrays, self.routes, same)

    def _before(self) -> dict[str, Route]:
        """Return the state dict as stage 0. A name that only repeats another's tensor counts where the delta has it."""
        named = {**self._link.info.tensors, **dict.fromkeys(self._link.info.removed)}
        known = {address(array) for name, array in self._arrays.items() if name in named}
        found = {}
        for name, array in self._arrays.items():
            if name in named or address(array) not in known or self._link.info.base.content is None:
                found[name] = Route(as_tensor(name, array), 0)
        return found

    def require_base(self) -> None:
        """Raise ``IntegrityError`` ``delta.base`` unless the arrays' hash is that of the delta's base."""
        expected = self._link.info.base
        if expected.content is not None:
            names = [*(name for name in self._link.info.tensors if name in self._arrays), *self._link.info.removed]
            wanted, found = expected.content, _content({name: self._arrays[name] for name in names}, self._workers)
        elif PARENT in expected.hashes:
            base = {name: as_tensor(name, array) for name, array in self._arrays.items()}
            wanted, found = expected.hashes[PARENT], "another one, in every order"
            if matching_order(base, list(self._link.checkpoint), wanted) is not None:
                found = wanted
        else:
            raise UsageError(
                "the delta does not say what its base is; pass verify_base=False to trust yours",
                rule="delta.no-identity",
                where=self._link.location,
            )
        if found != wanted:
            raise IntegrityError(
                "delta.base",
                f"these weights are not what the delta was made from: expected {wanted}, found {found}",
                where=self._link.location,
            )

    def run(self, applied: Applied, *, undo: bool) -> None:
        """Change everything, or nothing."""
        changed = [route for name, route in self.routes.items() if route.layers and name not in self._tied]
        new = {name: self._owned(route) for name, route in self.routes.items() if route.born}
        if not undo:
            for route in changed:
                _check_parts(route.layers[0].tensor)
        undos = {route.name: _undo_of(route, self._arrays[route.name]) for route in changed}
        replaced: dict[str, Any] = {}
        try:
            with recycling(_RECYCLED):
                for _ in ordered(lambda route: self._change(route, undos[route.name], undo), changed, self._workers):
                    pass
            for name in (*self._link.info.removed, *new):
                if name in new or name in self._state:
                    replaced[name] = self._state.get(name, _MISSING)
            self._exchange(new)
        except BaseException:
            _put_back(self._state, replaced)
            with ExitStack() as stack:  # one that cannot be put back keeps no other from it
                for name, item in undos.items() if undo else ():
                    stack.callback(item.revert, self._arrays[name])
            raise
        applied.replaced = replaced
        if undo:
            applied.undo = undos

    def _owned(self, route: Route) -> Any:
        """Return a new tensor as what the state dict holds."""
        array = route.origin.numpy()
        return like(self._state, array if array.flags.writeable else array.copy())

    def _exchange(self, new: Mapping[str, Any]) -> None:
        for name in self._link.info.removed:
            self._state.pop(name, None)
        for name, value in new.items():
            self._state[name] = value

    def _change(self, route: Route, undo: TensorUndo, keep: bool) -> None:
        layer = route.layers[0]
        rows, cols = undo.matrix
        matrix = self._arrays[route.name].reshape(rows, cols)
        try:
            if keep and not layer.codec.exact:
                _add(matrix, layer.tensor, undo)
                return
            applier = layer.codec.applier(layer.tensor, route.origin.dtype)
            for start in range(0, rows, undo.step):
                piece = matrix[start : start + undo.step]
                if keep:
                    result = scratch(piece.shape, piece.dtype)
                    applier.apply(piece, result)
                    undo.replace(piece, result)
                else:
                    applier.apply(piece, piece)
            applier.finish()
        except IngotError as error:
            raise error.at(f"{self._link.location}: {route.name}") from None


def _add(matrix: Array, tensor: Tensor, undo: TensorUndo) -> None:
    reader = CODECS[tensor.codec].reader(tensor)
    for start in range(0, len(matrix), undo.step):
        undo.change(matrix[start : start + undo.step], reader)
    reader.finish()


def _undo_of(route: Route, array: Array) -> TensorUndo:
    rows, cols = route.matrix()
    return TensorUndo(route.layers[0].tensor, array.shape, (rows, cols), max(1, SLAB // max(cols, 1)), array.dtype)


def _check_parts(tensor: Tensor) -> None:
    """Check a delta's tensor, and the digests of the parts that have one: these are read once."""
    delta_codec(tensor.codec).check(tensor)
    for part in tensor.parts.values():
        if part.encoding == "raw" and (part.digest is None or not part.verify):
            continue
        reader, buffer = part.reader(), memoryview(bytearray(min(CHUNK, part.nbytes)))
        for start in range(0, part.nbytes, CHUNK):
            reader.readinto(buffer[: part.nbytes - start])
        reader.finish()


def _tied(arrays: Mapping[str, Array], routes: Mapping[str, Route], same: Iterable[str]) -> set[str]:
    """Return the names whose memory is that of another name with the same difference: it is to be added once.

    ``same`` are those that the delta states to stay as they are: they share no memory with what is changed.
    """
    first: dict[tuple[int, int], str] = {}
    tied = set()
    for name, route in routes.items():
        if not route.layers or not arrays[name].nbytes:
            continue
        place = address(arrays[name])
        if place not in first:
            first[place] = name
        elif _same_layer(routes[first[place]].layers[-1], route.layers[-1]):
            tied.add(name)
        else:
            raise _shared(name, first[place])
    places = [(*place, name, True) for place, name in first.items()]
    places += [(*address(arrays[name]), name, False) for name in same if arrays[name].nbytes]
    ends = {True: (0, ""), False: (0, "")}  # of what is changed, of what stays: furthest so far, and whose it is
    for start, stop, name, changes in sorted(places):
        for other in (True, False) if changes else (True,):
            if start < ends[other][0]:
                raise _shared(name, ends[other][1])
        ends[changes] = max(ends[changes], (stop, name))
    return tied


def _same_layer(one: Layer, other: Layer) -> bool:
    left, right = one.tensor, other.tensor
    if left.codec != right.codec or left.parts.keys() != right.parts.keys() or dict(left.params) != dict(right.params):
        return False
    return all(bytes(part.view()) == bytes(right.parts[role].view()) for role, part in left.parts.items())


def _shared(name: str, other: str) -> FormatError:
    return FormatError(
        "delta.shared", f"expected memory of its own, or the difference of {other[:200]!r}, whose it is", where=name
    )


def _content(arrays: Mapping[str, Array], workers: int) -> str:
    def one(name: str) -> tuple[str, TensorId]:
        running, array = Blake3(), arrays[name]
        running.update(file_bytes(array))
        return name, TensorId(element_type(array), array.shape, hex_of(running))

    return content_of(dict(ordered(one, arrays, workers)))
