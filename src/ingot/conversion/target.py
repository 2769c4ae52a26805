"""What the options of a conversion come to, for the recipe's measurements and for the writer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ingot.artifacts.destination import Destination
from ingot.artifacts.equal_tensors import alike, equal_values
from ingot.conversion.options import ConvertOptions
from ingot.core.runtime.memory import anonymous_in_use, parse_size
from ingot.core.runtime.parallel import default_workers
from ingot.engine.resources import RESERVE
from ingot.errors import UsageError
from ingot.formats.base import WriteOptions
from ingot.model.account import Omission
from ingot.model.tensor import Tensor
from ingot.naming.names import role_of
from ingot.stores.location import Location

DEFAULT_SHARD = 5_000_000_000
# What a thread takes that encodes a sample of a tensor, of the widest type, in the ways that a recipe lists.
_PER_SAMPLE = 40 << 20


def within(options: ConvertOptions) -> ConvertOptions:
    """Return the options to plan with: no more threads than may measure samples under the ceiling, but one."""
    if options.max_ram is None:
        return options
    room = parse_size(options.max_ram) - anonymous_in_use() - RESERVE
    return replace(options, threads=max(1, min(options.threads or default_workers(), room // _PER_SAMPLE)))


def write_options(options: ConvertOptions, target: Destination) -> WriteOptions:
    """Return what is asked of the writer; raises ``UsageError`` ``convert.shard``."""
    shard = options.max_shard
    if shard is not None and not (target.directory and target.format.traits.shards):
        raise UsageError(
            f"expected a folder as destination and a format that shards, found format {target.format.name}",
            rule="convert.shard",
            where=target.display,
        )
    usual = DEFAULT_SHARD if target.directory and not target.format.traits.shards_on_request else None
    size = usual if shard is None else parse_size(shard)
    compact, beside = options.prune_compact, target.directory
    return WriteOptions(
        digest=options.digest, max_shard=size, compact=compact, siblings=beside, base=target.format.base_identity()
    )


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


_HEAD = "lm_head.weight"
_KEY = "tie_word_embeddings"


@dataclass(frozen=True, slots=True)
class Tied:
    """What is to be done: leave out the tensors in ``without``, or say in the config that nothing is tied."""

    without: Mapping[str, Omission] = field(default_factory=dict)
    untie: bool = False
    note: str = ""


def untangle(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Tied:
    """Decide for a checkpoint; reads a head and its embeddings where the config ties them."""
    inner = config.get("text_config")
    if config.get(_KEY) is not True and not (isinstance(inner, Mapping) and inner.get(_KEY) is True):
        return Tied()
    head = next((name for name in tensors if name == _HEAD or name.endswith(f".{_HEAD}")), None)
    if head is None:
        return Tied()
    embeddings = [name for name in tensors if role_of(name) == "embedding" and alike(tensors[name], tensors[head])]
    same = next((name for name in embeddings if equal_values(tensors[name], tensors[head])), None)
    if same is not None:
        reason = f"the values of {same}, to which config.json ties it: {_KEY}"
        return Tied({head: Omission(reason, superseded=True)})
    return Tied(untie=True, note=f"config.json now says {_KEY} false: {head} has values of its own")
