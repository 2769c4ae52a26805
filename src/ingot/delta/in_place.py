"""Change weights in memory by a delta: everything is checked first, and restored after a failure."""

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
from ingot.core.runtime.parallel import check_cancelled, ordered
from ingot.delta.parent import matching_order
from ingot.delta.state import address, as_framework, element_type, same_stored, shared_array, tied_names
from ingot.delta.undo import TensorUndo
from ingot.engine.delta_chain import Link, next_stage
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
    """The changes that an application made to a state dict.

    ``undo`` are the undo logs by tensor name; None if none were recorded. ``replaced`` are the previous objects of
    names whose object was replaced, added or removed.
    """

    undo: dict[str, TensorUndo] | None
    replaced: dict[str, Any] = field(default_factory=dict)


def restore_objects(state: State, replaced: Mapping[str, Any]) -> None:
    """Put the objects of ``replaced`` back into the state dict, and delete names that it did not have."""
    for name, value in replaced.items():
        if value is _MISSING:
            state.pop(name, None)
        else:
            state[name] = value


class Application:
    """One application of a delta: everything is checked before anything is changed."""

    def __init__(self, state: State, link: Link, workers: int) -> None:
        self._state = state
        self._link = link
        self._workers = workers
        self._arrays = {name: shared_array(name, value) for name, value in state.items()}
        before = self._before()
        self.routes = dict(next_stage(before, link, 1))  # not lazy, because each array needs one chain
        changes = link.info.tensors
        self._fitted = [name for name in self.routes if name in changes and changes[name].fitted]
        unchanged = [name for name, change in changes.items() if change.op == "same"]
        in_place = {name: route for name, route in self.routes.items() if name not in self._fitted}
        self._tied = tied_names(self._arrays, in_place, unchanged)
        self._promised: str | None = None
        self._digests: dict[str, str] = {}

    def _before(self) -> dict[str, PatchChain]:
        """Return the tensors of the state dict as chains without patches, by name.

        A name that the delta does not mention is left out if it shares its memory with a name that the delta mentions.
        """
        named = {**self._link.info.tensors, **dict.fromkeys(self._link.info.removed)}
        addresses = {address(array) for name, array in self._arrays.items() if name in named}
        routes = {}
        for name, array in self._arrays.items():
            if name in named or address(array) not in addresses or self._link.info.base.content is None:
                routes[name] = PatchChain(as_tensor(name, array), 0)
        return routes

    def require_base(self) -> None:
        """Raise ``IntegrityError`` ``delta.base`` if the hash of the arrays is not that of the delta's base."""
        identity = self._link.info.base
        if identity.content is not None:
            names = [*(name for name in self._link.info.tensors if name in self._arrays), *self._link.info.removed]
            ids = _ids({name: self._arrays[name] for name in names}, self._workers)
            expected = identity.content
            actual = content_of(ids)
            self._digests = {name: ids[name].digest for name in names if self._is_unchanged(name)}
        elif PARENT in identity.hashes:
            base = {name: as_tensor(name, array) for name, array in self._arrays.items()}
            expected = identity.hashes[PARENT]
            actual = "another hash, in every order"
            if matching_order(base, list(self._link.checkpoint), expected) is not None:
                actual = expected
        else:
            raise UsageError(
                "the delta does not say what its base is; pass verify_base=False to trust yours",
                rule="delta.no-identity",
                where=self._link.location,
            )
        if actual != expected:
            raise IntegrityError(
                "delta.base",
                f"these weights are not the delta's base: expected {expected}, found {actual}",
                where=self._link.location,
            )

    def _is_unchanged(self, name: str) -> bool:
        """Return whether the delta neither changes nor replaces the base's tensor ``name``."""
        route = self.routes.get(name)
        return route is not None and not route.layers and not route.first_stage

    def prove_result(self, verify: bool, *, required: bool) -> None:
        """Set whether ``run`` compares the result with the identity stated in the delta.

        It does if ``verify`` is true and the comparison is possible: the delta states a result, and no changed tensor
        keeps another element type. Raises ``UsageError`` ``delta.no-result`` if ``required`` is true, but ``run`` will
        not compare.
        """
        promised = self._link.info.result.content
        routes = self.routes.items()
        changed = [(name, route.dtype) for name, route in routes if route.layers and name not in self._fitted]
        retyped = next((name for name, dtype in changed if element_type(self._arrays[name]) != dtype), None)
        if verify and promised is not None and retyped is None:
            self._promised = promised
        elif required:
            reason = "it does not state its result" if promised is None else f"{retyped!r} keeps its element type"
            raise UsageError(f"nothing to verify against: {reason}", rule="delta.no-result", where=self._link.location)

    def _require_result(self, *, undo: bool) -> None:
        """Raise ``IntegrityError`` ``delta.result`` if the result differs from the identity stated in the delta.

        Tensors that were not hashed yet are hashed first. Does nothing unless ``prove_result`` requested the check.
        """
        if self._promised is None:
            return
        unhashed = {name: self._arrays[name] for name in self.routes if name not in self._digests}
        digests = {**self._digests, **{name: item.digest for name, item in _ids(unhashed, self._workers).items()}}
        ids = {name: TensorId(route.dtype, route.shape, digests[name]) for name, route in self.routes.items()}
        actual = content_of(ids)
        if actual != self._promised:
            consequence = "nothing was changed" if undo else "the weights were changed: load them again"
            raise IntegrityError(
                "delta.result",
                f"the result is not the one that the delta states: expected {self._promised}, found {actual}; "
                f"{consequence}",
                where=self._link.location,
            )

    def run(self, *, undo: bool) -> Changed:
        """Apply the delta. If an error occurs and ``undo`` is true, restore all weights before it is raised."""
        excluded = {*self._tied, *self._fitted}
        changed = [route for name, route in self.routes.items() if route.layers and name not in excluded]
        if not undo:
            for route in changed:
                _check_parts(route.layers[0].tensor)
        new = self._new_tensors()  # before any change of memory that they may share
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
            restore_objects(self._state, replaced)
            with ExitStack() as stack:  # a failure for one tensor does not stop the others
                for name, item in undos.items() if undo else ():
                    stack.callback(item.revert, self._arrays[name])
            raise
        return Changed(undos if undo else None, replaced)

    def _new_tensors(self) -> dict[str, Any]:
        """Return new objects for new, retyped or reshaped tensors; tied tensors stay tied."""
        objects: dict[str, Any] = {}
        first: dict[tuple[Any, ...], str] = {}
        for name in (*self._fitted, *(name for name, route in self.routes.items() if route.first_stage)):
            route = self.routes[name]
            array = self._arrays.get(name)
            location = name if array is None else address(array)
            first_name = first.setdefault((location, route.dtype, route.shape), name)
            if first_name != name and same_stored(_stored(self.routes[first_name]), _stored(route)):
                objects[name] = objects[first_name]
                if first_name in self._digests:
                    self._digests[name] = self._digests[first_name]
            else:
                objects[name] = self._owned(route)
        return objects

    def _owned(self, route: PatchChain) -> Any:
        """Return a new tensor with the values of a chain, as an object of the state dict's framework."""
        array = route.origin.numpy() if route.first_stage else _compute(route)
        if self._promised is not None:
            running = Blake3()
            running.update(file_bytes(np.ascontiguousarray(array)))
            self._digests[route.name] = hex_of(running)
        return as_framework(self._state, array if array.flags.writeable else array.copy())

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
            raise error.add_location(f"{self._link.location}: {route.name}") from None
        if running is not None:
            self._digests[route.name] = hex_of(running)

    def _apply(self, route: PatchChain, matrix: Array, undo: TensorUndo, keep: bool, running: Blake3 | None) -> None:
        layer = route.layers[0]
        rows = len(matrix)
        applier = layer.codec.applier(layer.tensor, route.origin.dtype)
        for start in range(0, rows, undo.step):
            check_cancelled()
            chunk = matrix[start : start + undo.step]
            if keep:
                result = scratch(chunk.shape, chunk.dtype)
                applier.apply(chunk, result)
                undo.replace(chunk, result)
            else:
                applier.apply(chunk, chunk)
            if running is not None:
                running.update(file_bytes(chunk))
        applier.finish()


def _stored(route: PatchChain) -> Tensor:
    """Return the tensor of the last delta in a chain; without deltas, the chain's origin."""
    return route.layers[-1].tensor if route.layers else route.origin


def _compute(route: PatchChain) -> Array:
    """Return all values of a tensor after its chain of patches."""
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
        check_cancelled()
        chunk = matrix[start : start + undo.step]
        undo.change(chunk, reader)
        if running is not None:
            running.update(file_bytes(chunk))
    reader.finish()


def _undo_of(route: PatchChain, array: Array) -> TensorUndo:
    rows, cols = route.matrix()
    return TensorUndo(
        route.layers[0].tensor, array.shape, (rows, cols), max(1, UNDO_CHUNK // max(cols, 1)), array.dtype
    )


def _check_parts(tensor: Tensor) -> None:
    """Check a delta's tensor and the digests of its parts; each part is read once."""
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
    """Return the ``TensorId`` of each array by name."""

    def identify(name: str) -> tuple[str, TensorId]:
        running = Blake3()
        array = arrays[name]
        running.update(file_bytes(array))
        return name, TensorId(element_type(array), array.shape, hex_of(running))

    return dict(ordered(identify, arrays, workers))
