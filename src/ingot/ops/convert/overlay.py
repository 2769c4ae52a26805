"""Overlays: a result that names what another file has instead of storing it again."""

from __future__ import annotations

from dataclasses import replace

from ingot.errors import UsageError
from ingot.ops.convert.options import ConvertOptions
from ingot.ops.destination import Destination
from ingot.stores.location import Location

_RULE = "convert.overlay"


def laid_over(place: Destination, options: ConvertOptions) -> Destination:
    """Return the destination with the format that refers to the file ``overlay``, where one is asked for.

    Raises
    ------
    UsageError
        ``convert.overlay``: the format has no such thing, or the base is not another file in the same folder, where
        readers look for it.
    FormatError, IntegrityError, UnsupportedError
        The base cannot be read.
    """
    if options.overlay is None:
        return place
    format = place.format
    if not format.traits.overlays or place.directory:
        raise UsageError(
            f"expected one file of a format that refers to others, such as x.zt with --container 2; found a "
            f"{'folder' if place.directory else 'file'} of format {format.name}",
            rule=_RULE,
            where=place.display,
        )
    base = Location.parse(options.overlay)
    store, name = base.find()
    if not name or place.url != store.url_of(place.name) or name == place.name:
        raise UsageError(
            "expected the base as another file in the folder of the overlay, where readers look for it; copy or link "
            "it there",
            rule=_RULE,
            where=base.display,
        )
    return replace(place, format=format.overlay(store, name, place.name, options.digest))
