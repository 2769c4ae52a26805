"""What the options of a conversion come to, for the recipe's measurements and for the writer."""

from __future__ import annotations

from dataclasses import replace

from ingot.core.memory import anonymous_in_use, parse_size
from ingot.core.parallel import default_workers
from ingot.engine.resources import RESERVE
from ingot.errors import UsageError
from ingot.formats.base import WriteOptions
from ingot.ops.convert.options import ConvertOptions
from ingot.ops.destination import Destination

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
            where=target.location,
        )
    usual = DEFAULT_SHARD if target.directory and not target.format.traits.shards_on_request else None
    size = usual if shard is None else parse_size(shard)
    compact, beside = options.prune_compact, target.directory
    return WriteOptions(
        digest=options.digest, max_shard=size, compact=compact, siblings=beside, base=target.format.base_identity()
    )
