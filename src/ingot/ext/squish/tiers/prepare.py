"""From a directory to what is loaded: the best complete tier, built first where only the tensors are there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ingot.core.runtime.progress import ProgressCallback
from ingot.errors import CodecError, ResourceError
from ingot.ext.squish.tiers.build import build
from ingot.ext.squish.tiers.choose import Choice, choose
from ingot.ext.squish.tiers.kept import kept
from ingot.ext.squish.tiers.status import holds_tiers
from ingot.ext.squish.tiers.table import BF16, FOUR_BIT, TENSORS, THREE_BIT, Tier
from ingot.ext.squish.tiers.wanted import wanted_dtype
from ingot.model.store import Store
from ingot.runtime.loading.preparers import LoadRequest, PreparedModel
from ingot.stores.location import AnyPath, Location


def prepare(
    path: AnyPath,
    runtime: str = "torch",
    *,
    keep_packed: bool = False,
    cache: bool = True,
    dtype: Any = None,
    progress: ProgressCallback | None = None,
) -> Choice:
    """Choose a tier; on the first load, save the one that later loads are to take, and take that.

    This is the bf16 tier; for MLX, where the tensors have 4 or 3 bits in a layout that MLX takes as it is, the packed
    folder with as many. Where weights are wanted in another type than bf16, which that tier would round, none is built.

    A disk that is full or cannot be written to, or values that the tier's type does not hold, are no obstacle: the
    tensors are then decoded into memory, and a note says so.

    Parameters
    ----------
    path : path
        A Squish directory.
    runtime, keep_packed, dtype
        As for ``choose``.
    cache : bool
        Whether a tier may be built.
    progress : callable, optional

    Raises
    ------
    UsageError, IntegrityError
        Those of ``choose`` and ``build``.
    """
    location = Location.parse(path)
    choice = choose(location, runtime, keep_packed=keep_packed, dtype=dtype)
    if choice.tier is not TENSORS or (keep_packed and runtime == "torch") or not cache:
        return choice
    try:
        wanted = _first_tier(location, runtime, dtype)
        if wanted is None:
            return choice
        done = build(location, wanted.name, progress=progress, ungated=True)  # a packed one has the arrays' own values
    except (ResourceError, CodecError) as error:  # no room, or values that the tier's type does not hold
        return replace(choice, notes=(*choice.notes, f"no faster tier was saved: {error}"))
    note = (
        f"first load: tier {wanted.name} was built in {done.seconds:.1f} s"
        if done.built
        else "another process built it"
    )
    chosen = choose(location, runtime, keep_packed=keep_packed, dtype=dtype)
    return replace(chosen, notes=(*chosen.notes, note))


def _first_tier(location: Location, runtime: str, dtype: Any) -> Tier | None:
    """Return the tier that the first load builds; None where the tensors are best."""
    if runtime == "mlx":
        for tier in (FOUR_BIT, THREE_BIT):
            taken = kept(location, tier)
            if taken.names and not taken.again:
                return tier
    return BF16 if wanted_dtype(location, dtype) in ("bf16", None) else None


class TierPreparer:
    """Chooses the tier of a Squish directory; the first load builds the tier that later loads use."""

    def applies(self, store: Store) -> bool:
        """Return whether the folder contains Squish arrays or a tier."""
        return holds_tiers(store)

    def prepare(self, location: Location, request: LoadRequest) -> PreparedModel:
        """Choose a tier. Raises the errors of ``ext.squish.tiers.prepare.prepare``."""
        from ingot.ext.squish.tiers.prepare import prepare  # imports conversions, which other loads do not need

        dtype = request.dtype
        if dtype is None and request.model_dir is not None:
            dtype = wanted_dtype(request.model_dir)
        choice = prepare(location, request.runtime, keep_packed=request.keep_packed, cache=request.cache, dtype=dtype)
        reasons = [choice.why, *choice.notes, *(f"not {tier}: {reason}" for tier, reason in choice.skipped)]
        return PreparedModel(choice.location, choice.tier.name, "; ".join(reasons))
