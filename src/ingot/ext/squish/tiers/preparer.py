"""The model preparer of Squish directories, registered in the group ``ingot.model_preparers``."""

from __future__ import annotations

from ingot.ext.squish.tiers.status import holds_tiers
from ingot.ext.squish.tiers.wanted import wanted_dtype
from ingot.model.store import Store
from ingot.runtime.loading.preparers import LoadRequest, PreparedModel
from ingot.stores.location import Location


class TierPreparer:
    """Chooses the tier of a Squish directory; the first load builds the tier that later loads use."""

    def applies(self, store: Store) -> bool:
        """Return whether the folder contains Squish arrays or a tier."""
        return holds_tiers(store)

    def prepare(self, location: Location, request: LoadRequest) -> PreparedModel:
        """Choose a tier. Raises the errors of ``ops.squish.prepare.prepare``."""
        from ingot.ext.squish.tiers.prepare import prepare  # imports conversions, which other loads do not need

        dtype = request.dtype
        if dtype is None and request.model_dir is not None:
            dtype = wanted_dtype(request.model_dir)
        choice = prepare(location, request.runtime, keep_packed=request.keep_packed, cache=request.cache, dtype=dtype)
        reasons = [choice.why, *choice.notes, *(f"not {tier}: {reason}" for tier, reason in choice.skipped)]
        return PreparedModel(choice.location, choice.tier.name, "; ".join(reasons))
