"""Apply a delta to weights in memory, in place and without a second copy, and revert it bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ingot.artifacts.adapter_files import refuse_adapter
from ingot.artifacts.open import Source, open_delta
from ingot.core.border import bordered
from ingot.core.runtime.parallel import Workers, default_workers, ordered
from ingot.delta.in_place import Application, State, restore_objects
from ingot.delta.state import shared_array
from ingot.delta.undo import TensorUndo
from ingot.engine.delta_chain import link_of
from ingot.errors import UsageError
from ingot.model.checkpoint import Checkpoint
from ingot.model.tensor import Array
from ingot.stores.location import AnyPath, Location


@dataclass(slots=True)
class Applied:
    """A delta that was applied to a state dict, with the data for ``revert``.

    ``base_id`` and ``result_id`` are the identities stated in the delta. ``nbytes`` is the memory of the undo logs.
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
        """The number of bytes of the undo logs, without tensors that were replaced or removed."""
        return sum(undo.nbytes for undo in (self.undo or {}).values())

    def revert(self) -> None:
        """Restore the values that the state dict had before the delta, as ``ingot.revert`` does."""
        revert(self.state, self)

    def close(self) -> None:
        """Release the delta and the undo data; ``revert`` is impossible afterwards."""
        self.undo = None
        self.replaced = {}
        if self.owned:
            self.delta.close()


@bordered
def apply_delta(
    state_dict: State,
    delta: AnyPath | Checkpoint,
    *,
    verify_base: bool = True,
    verify: bool | None = None,
    undo: bool = True,
    workers: int | None = None,
) -> Applied:
    """Turn the base's weights in ``state_dict`` into the fine-tune's, in place.

    Parameters
    ----------
    state_dict : mutable mapping of name to NumPy array or torch tensor
        The memory of its tensors is written to: C order, on the CPU. New, reshaped and retyped tensors become new
        objects, and removed tensors are deleted from the mapping.
    delta : path or Checkpoint
        An opened checkpoint must stay open until the delta is reverted or ``Applied.close`` is called.
    verify_base : bool
        Check by hash that the state dict is the delta's base.
    verify : bool, optional
        Check by hash, while tensors change, that the result is the one stated in the delta. The default is True if the
        delta states a result, the base is checked, and no tensor keeps an element type other than the fine-tune's.
    undo : bool
        Record data for ``revert``, in a log that is small if few bits change. Without a log, differences are decoded,
        added and rounded in one step.
    workers : int, optional
        Threads; by default all processors that this process may use.

    Returns
    -------
    Applied

    Raises
    ------
    IntegrityError
        ``delta.base``: names, shapes, element types or values are not those of the delta's base; nothing was changed.
        ``delta.result``: the result is not the one stated in the delta. The previous weights were restored; without
        ``undo`` the caller must load them again.
    UnsupportedError
        ``delta.layout``: a tensor cannot be changed in place.
    FormatError, CodecError, UsageError
        ``delta.shared``: two names share memory, but the delta treats them as different tensors. Other rules: the delta
        is damaged. Changes made before this was detected are undone. Without ``undo``, all parts of the delta are
        checked before anything is changed.

    Examples
    --------
    >>> report = ingot.diff("model", "tuned.safetensors", "tuned.zt")
    >>> weights = ingot.numpy.load_file("model")
    >>> applied = ingot.apply_delta(weights, "tuned.zt")
    >>> bool(weights["model.norm.weight"][0] == ingot.open("tuned.safetensors")["model.norm.weight"][0])
    True
    """
    workers = default_workers() if workers is None else workers
    if isinstance(delta, Checkpoint):
        return _applied(state_dict, delta, None, (verify_base, verify), undo, workers)
    source = open_delta(Location.parse(delta))
    try:
        refuse_adapter(source)
    except BaseException:
        source.close()
        raise
    return _applied(state_dict, source.view(), source, (verify_base, verify), undo, workers)


def _applied(
    state: State, delta: Checkpoint, source: Source | None, proofs: tuple[bool, bool | None], undo: bool, workers: int
) -> Applied:
    """Apply an opened delta to ``state``; ``proofs`` are the options ``verify_base`` and ``verify``.

    ``source`` is the delta's source if this call opened it, else None. It is closed if an error occurs.
    """
    verify_base, verify = proofs
    try:
        with _checking_file(delta):
            link = link_of(delta)
            job = Application(state, link, workers)
            if verify_base:
                job.require_base()
            job.prove_result(verify_base if verify is None else verify, required=verify is True)
        changed = job.run(undo=undo)
    except BaseException:
        if source is not None:
            delta.close()
        raise
    return Applied(
        delta,
        source is not None,
        link.info.base.content,
        link.info.result.content,
        len(job.routes),
        state,
        changed.undo,
        changed.replaced,
        source,
    )


@contextmanager
def _checking_file(delta: Checkpoint) -> Iterator[None]:
    """Compare a delta's file with the digest of the full file in a second thread while this context runs.

    Raises ``IntegrityError`` with the format's rule if they differ, even if the context itself raised another error.
    """
    with Workers(1) as pool:
        checked = pool.submit(delta.require_whole)
        try:
            yield
        finally:
            checked.result()


@bordered
def revert(state_dict: State, applied: Applied) -> None:
    """Restore the values that ``state_dict`` had before ``applied``, bit for bit.

    Revert several deltas in reverse order.

    Raises
    ------
    UsageError
        ``delta.reverted``: it was already reverted or closed, or applied without ``undo``. ``delta.not-applied``: the
        tensors are not as the delta left them, for example because a later delta was not reverted. Nothing was changed.
    IntegrityError
        ``store.changed``: the delta's file was modified in the meantime. Nothing was changed.

    Examples
    --------
    >>> report = ingot.diff("model", "tuned.safetensors", "tuned.zt")
    >>> weights = ingot.numpy.load_file("model")
    >>> applied = ingot.apply_delta(weights, "tuned.zt")
    >>> ingot.revert(weights, applied)
    >>> bool(weights["model.norm.weight"][0] == ingot.open("model")["model.norm.weight"][0])
    True
    """
    if applied.undo is None:
        raise UsageError(
            "expected a delta that can be reverted; this delta was reverted, closed, or applied with undo=False",
            rule="delta.reverted",
        )
    undo = applied.undo
    if applied.source is not None:
        applied.source.require_unchanged()
    arrays = dict(ordered(lambda name: (name, _changed(state_dict, name, undo[name])), undo))
    for _ in ordered(lambda name: undo[name].revert(arrays[name]), undo):
        pass
    restore_objects(state_dict, applied.replaced)
    applied.close()


def _changed(state: State, name: str, undo: TensorUndo) -> Array:
    array = shared_array(name, state[name]) if name in state else None
    if array is None or not undo.matches(array):
        raise UsageError(
            "this tensor is not as the delta left it; revert later changes first",
            rule="delta.not-applied",
            where=name,
        )
    return array
