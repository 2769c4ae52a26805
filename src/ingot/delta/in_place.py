"""Changing weights in memory by a delta: all of it is looked at before anything changes, and put back if it fails."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ingot.artifacts.identity import TensorId, content_of
from ingot.artifacts.save import as_tensor
from ingot.codecs.base import empty
from ingot.codecs.delta.base import delta_codec
from ingot.codecs.table import CODECS
from ingot.core.bytes.checksums import Blake3, hex_of
from ingot.core.numeric.buffers import recycling, scratch
from ingot.core.numeric.dtypes import file_bytes
from ingot.core.runtime.parallel import go_on, ordered
from ingot.delta.chain import Link, next_stage
from ingot.delta.parent import matching_order
from ingot.delta.state import address, element_type, like, same_stored, shared_array, tied_names
from ingot.delta.undo import TensorUndo
from ingot.engine.patch_step import PatchChain
from ingot.errors import IngotError, IntegrityError, UsageError
from ingot.model.part import CHUNK
from ingot.model.tensor import Array, Tensor

UNDO_CHUNK = 1 << 19
_RECYCLED = 16 << 20
_MISSING = object()
PARENT = "wdelta"

State = MutableMapping[str, Any]


@dataclass(frozen=True, slots=True)
class Changed:
    """What a run changed: undo logs by name, None without; and what the state dict held where it holds others now."""

    undo: dict[str, TensorUndo] | None
    replaced: dict[str, Any] = field(default_factory=dict)


def put_back(state: State, replaced: Mapping[str, Any]) -> None:
    """Give the mapping the objects back that it had."""
    for name, value in replaced.items():
        if value is _MISSING:
            state.pop(name, None)
        else:
            state[name] = value


class Application:
    """One application: everything is looked at before anything is changed."""

    def __init__(self, state: State, link: Link, workers: int) -> None:
        self._state = state
        self._link = link
        self._workers = workers
        self._arrays = {name: shared_array(name, value) for name, value in state.items()}
        before = self._before()
        self.routes = dict(next_stage(before, link, 1))  # an array each is there already
        changes = link.info.tensors
        self._fitted = [name for name in self.routes if name in changes and changes[name].fitted]
        stays = [name for name, change in changes.items() if change.op == "same"]
        in_place = {name: route for name, route in self.routes.items() if name not in self._fitted}
        self._tied = tied_names(self._arrays, in_place, stays)
        self._promised: str | None = None
        self._digests: dict[str, str] = {}

    def _before(self) -> dict[str, PatchChain]:
        """Return the state dict as stage 0. A name that only repeats another's tensor counts where the delta has it."""
        named = {**self._link.info.tensors, **dict.fromkeys(self._link.info.removed)}
        known = {address(array) for name, array in self._arrays.items() if name in named}
        routes = {}
        for name, array in self._arrays.items():
            if name in named or address(array) not in known or self._link.info.base.content is None:
                routes[name] = PatchChain(as_tensor(name, array), 0)
        return routes

    def require_base(self) -> None:
        """Raise ``IntegrityError`` ``delta.base`` unless the arrays' hash is that of the delta's base."""
        expected = self._link.info.base
        if expected.content is not None:
            names = [*(name for name in self._link.info.tensors if name in self._arrays), *self._link.info.removed]
            ids = _ids({name: self._arrays[name] for name in names}, self._workers)
            wanted = expected.content
            actual = content_of(ids)
            self._digests = {name: ids[name].digest for name in names if self._stays(name)}
        elif PARENT in expected.hashes:
            base = {name: as_tensor(name, array) for name, array in self._arrays.items()}
            wanted = expected.hashes[PARENT]
            actual = "another one, in every order"
            if matching_order(base, list(self._link.checkpoint), wanted) is not None:
                actual = wanted
        else:
            raise UsageError(
                "the delta does not say what its base is; pass verify_base=False to trust yours",
                rule="delta.no-identity",
                where=self._link.location,
            )
        if actual != wanted:
            raise IntegrityError(
                "delta.base",
                f"these weights are not what the delta was made from: expected {wanted}, found {actual}",
                where=self._link.location,
            )

    def _stays(self, name: str) -> bool:
        """Whether a tensor of the base is one of the result as it is."""
        route = self.routes.get(name)
        return route is not None and not route.layers and not route.first_stage

    def prove_result(self, wanted: bool, *, asked: bool) -> None:
        """Say before ``run`` whether the result is to be compared with what the delta states, as far as that can be.

        Raises ``UsageError`` ``delta.no-result`` where it was ``asked`` for and cannot be.
        """
        promised = self._link.info.result.content
        routes = self.routes.items()
        changed = [(name, route.dtype) for name, route in routes if route.layers and name not in self._fitted]
        retyped = next((name for name, dtype in changed if element_type(self._arrays[name]) != dtype), None)
        if wanted and promised is not None and retyped is None:
            self._promised = promised
        elif asked:
            why = "it does not say what its result is" if promised is None else f"{retyped!r} keeps its element type"
            raise UsageError(f"nothing to verify against: {why}", rule="delta.no-result", where=self._link.location)

    def _require_result(self, *, undo: bool) -> None:
        """Compare what was made with what the delta states; what was not hashed on the way is hashed now."""
        if self._promised is None:
            return
        rest = {name: self._arrays[name] for name in self.routes if name not in self._digests}
        digests = {**self._digests, **{name: item.digest for name, item in _ids(rest, self._workers).items()}}
        ids = {name: TensorId(route.dtype, route.shape, digests[name]) for name, route in self.routes.items()}
        actual = content_of(ids)
        if actual != self._promised:
            left = "nothing was changed" if undo else "the weights were changed: load them anew"
            raise IntegrityError(
                "delta.result",
                f"the result is not the one that the delta promises: expected {self._promised}, found {actual}; {left}",
                where=self._link.location,
            )

    def run(self, *, undo: bool) -> Changed:
        """Change everything, or nothing."""
        kept_out = {*self._tied, *self._fitted}
        changed = [route for name, route in self.routes.items() if route.layers and name not in kept_out]
        if not undo:
            for route in changed:
                _check_parts(route.layers[0].tensor)
        new = self._new_tensors()  # before anything changes that they may share memory with
        undos = {route.name: _undo_of(route, self._arrays[route.name]) for route in changed}
        replaced: dict[str, Any] = {}
        try:
            with recycling(_RECYCLED):
                for _ in ordered(lambda route: self._change(route, undos[route.name], undo), changed, self._workers):
                    pass
            self._require_result(undo=undo)
            for name in (*self._link.info.removed, *new):
                if name in new or name in self._state:
                    replaced[name] = self._state.get(name, _MISSING)
            self._exchange(new)
        except BaseException:
            put_back(self._state, replaced)
            with ExitStack() as stack:  # one that cannot be put back keeps no other from it
                for name, item in undos.items() if undo else ():
                    stack.callback(item.revert, self._arrays[name])
            raise
        return Changed(undos if undo else None, replaced)

    def _new_tensors(self) -> dict[str, Any]:
        """Return new objects for tensors that are new or of another element type or shape; tied ones stay tied."""
        objects: dict[str, Any] = {}
        first: dict[tuple[Any, ...], str] = {}
        for name in (*self._fitted, *(name for name, route in self.routes.items() if route.first_stage)):
            route, array = self.routes[name], self._arrays.get(name)
            location = name if array is None else address(array)
            other = first.setdefault((location, route.dtype, route.shape), name)
            if other != name and same_stored(_stored(self.routes[other]), _stored(route)):
                objects[name] = objects[other]
                if other in self._digests:
                    self._digests[name] = self._digests[other]
            else:
                objects[name] = self._owned(route)
        return objects

    def _owned(self, route: PatchChain) -> Any:
        """Return a new tensor as what the state dict holds."""
        array = route.origin.numpy() if route.first_stage else _made(route)
        if self._promised is not None:
            running = Blake3()
            running.update(file_bytes(np.ascontiguousarray(array)))
            self._digests[route.name] = hex_of(running)
        return like(self._state, array if array.flags.writeable else array.copy())

    def _exchange(self, new: Mapping[str, Any]) -> None:
        for name in self._link.info.removed:
            self._state.pop(name, None)
        for name, value in new.items():
            self._state[name] = value

    def _change(self, route: PatchChain, undo: TensorUndo, keep: bool) -> None:
        layer = route.layers[0]
        rows, cols = undo.matrix
        matrix = self._arrays[route.name].reshape(rows, cols)
        running = Blake3() if self._promised is not None else None
        try:
            if keep and not layer.codec.exact:
                _add(matrix, layer.tensor, undo, running)
            else:
                self._apply(route, matrix, undo, keep, running)
        except IngotError as error:
            raise error.at(f"{self._link.location}: {route.name}") from None
        if running is not None:
            self._digests[route.name] = hex_of(running)

    def _apply(self, route: PatchChain, matrix: Array, undo: TensorUndo, keep: bool, running: Blake3 | None) -> None:
        layer = route.layers[0]
        rows = len(matrix)
        applier = layer.codec.applier(layer.tensor, route.origin.dtype)
        for start in range(0, rows, undo.step):
            go_on()
            piece = matrix[start : start + undo.step]
            if keep:
                result = scratch(piece.shape, piece.dtype)
                applier.apply(piece, result)
                undo.replace(piece, result)
            else:
                applier.apply(piece, piece)
            if running is not None:
                running.update(file_bytes(piece))
        applier.finish()


def _stored(route: PatchChain) -> Tensor:
    """Return the delta's tensor that a route ends with."""
    return route.layers[-1].tensor if route.layers else route.origin


def _made(route: PatchChain) -> Array:
    """Return all values of a route."""
    out = empty(route.shape, route.dtype, route.name)
    flat = out.reshape(-1)
    start = 0
    for rows in route.chunks():
        flat[start : start + rows.size] = rows.reshape(-1)
        start += rows.size
    return out


def _add(matrix: Array, tensor: Tensor, undo: TensorUndo, running: Blake3 | None) -> None:
    reader = CODECS[tensor.codec].reader(tensor)
    for start in range(0, len(matrix), undo.step):
        go_on()
        piece = matrix[start : start + undo.step]
        undo.change(piece, reader)
        if running is not None:
            running.update(file_bytes(piece))
    reader.finish()


def _undo_of(route: PatchChain, array: Array) -> TensorUndo:
    rows, cols = route.matrix()
    return TensorUndo(
        route.layers[0].tensor, array.shape, (rows, cols), max(1, UNDO_CHUNK // max(cols, 1)), array.dtype
    )


def _check_parts(tensor: Tensor) -> None:
    """Check a delta's tensor, and the digests of the parts that have one: these are read once."""
    delta_codec(tensor.codec).check(tensor)
    for part in tensor.parts.values():
        if part.encoding == "raw" and (part.digest is None or not part.verify):
            continue
        reader = part.reader()
        buffer = memoryview(bytearray(min(CHUNK, part.nbytes)))
        for start in range(0, part.nbytes, CHUNK):
            reader.readinto(buffer[: part.nbytes - start])
        reader.finish()


def _ids(arrays: Mapping[str, Array], workers: int) -> dict[str, TensorId]:
    """Return the lines of arrays in a content id, by name."""

    def one(name: str) -> tuple[str, TensorId]:
        running = Blake3()
        array = arrays[name]
        running.update(file_bytes(array))
        return name, TensorId(element_type(array), array.shape, hex_of(running))

    return dict(ordered(one, arrays, workers))
