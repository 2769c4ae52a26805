"""Prepare a Squish directory for loading: choose the best complete tier, and build a tier on the first load."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ingot.core.runtime.progress import ProgressCallback
from ingot.errors import CodecError, ResourceError
from ingot.ext.squish.tiers.build import build
from ingot.ext.squish.tiers.choose import Choice, choose
from ingot.ext.squish.tiers.preferred_dtype import preferred_dtype
from ingot.ext.squish.tiers.reusable import reusable_tensors
from ingot.ext.squish.tiers.status import holds_tiers
from ingot.ext.squish.tiers.table import BF16, FOUR_BIT, TENSORS, THREE_BIT, Tier
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
    """Return the tier to load; on the first load, build a tier that later loads use.

    A tier is built only if ``choose`` returns the source arrays. Normally it is the bf16 tier. This tier is built only
    if the preferred type is bf16 or unknown, because it would round other types. Exception: for MLX and source arrays
    below 8 bits, it is the 4-bit or 3-bit tier. This tier must be able to store all tensors with exactly their values.

    No tier is built if ``cache`` is false, or if weights stay packed in torch. No tier is saved if the disk is full or
    read-only, or if the tier's type cannot represent a value. The source arrays are then loaded, and a note states why.

    Parameters
    ----------
    path : path
        A Squish directory.
    runtime, keep_packed, dtype
        Parameters of ``choose``.
    cache : bool
        Whether a tier may be built.
    progress : callable, optional

    Raises
    ------
    UsageError, IntegrityError
        Errors of ``choose`` and ``build``.
    """
    location = Location.parse(path)
    choice = choose(location, runtime, keep_packed=keep_packed, dtype=dtype)
    if choice.tier is not TENSORS or (keep_packed and runtime == "torch") or not cache:
        return choice
    try:
        first_tier = _first_tier(location, runtime, dtype)
        if first_tier is None:
            return choice
        build_report = build(
            location, first_tier.name, progress=progress, ungated=True
        )  # no gate: a packed tier has the values of the arrays
    except (ResourceError, CodecError) as error:  # no room, or values that the tier's type does not hold
        return replace(choice, notes=(*choice.notes, f"no faster tier was saved: {error}"))
    note = (
        f"first load: tier {first_tier.name} was built in {build_report.seconds:.1f} s"
        if build_report.built
        else "another process built it"
    )
    chosen = choose(location, runtime, keep_packed=keep_packed, dtype=dtype)
    return replace(chosen, notes=(*chosen.notes, note))


def _first_tier(location: Location, runtime: str, dtype: Any) -> Tier | None:
    """Return the tier that the first load builds; None if no tier is to be built."""
    if runtime == "mlx":
        for tier in (FOUR_BIT, THREE_BIT):
            reusable = reusable_tensors(location, tier)
            if reusable.names and not reusable.again:
                return tier
    return BF16 if preferred_dtype(location, dtype) in ("bf16", None) else None


class TierPreparer:
    """A model preparer for Squish directories: it chooses a tier, and builds one on the first load."""

    def applies(self, store: Store) -> bool:
        """Return whether the folder contains Squish arrays or a tier."""
        return holds_tiers(store)

    def prepare(self, location: Location, request: LoadRequest) -> PreparedModel:
        """Return the tier that the function ``prepare`` of this module chooses or builds. Raises its errors.

        If the request has no dtype but a ``model_dir``, the preferred dtype of that folder is used.
        """
        from ingot.ext.squish.tiers.prepare import prepare  # imports conversions, which other loads do not need

        dtype = request.dtype
        if dtype is None and request.model_dir is not None:
            dtype = preferred_dtype(request.model_dir)
        choice = prepare(location, request.runtime, keep_packed=request.keep_packed, cache=request.cache, dtype=dtype)
        reasons = [choice.why, *choice.notes, *(f"not {tier}: {reason}" for tier, reason in choice.skipped)]
        return PreparedModel(choice.location, choice.tier.name, "; ".join(reasons))
