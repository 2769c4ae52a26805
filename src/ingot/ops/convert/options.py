"""The options of a conversion beside source, destination and recipe, and what they come to."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import TypedDict

from ingot.core.memory import anonymous_rss, parse_size
from ingot.core.parallel import default_workers
from ingot.engine.drive import RESERVE
from ingot.errors import UsageError
from ingot.formats.base import WriteOptions
from ingot.model.checkpoint import Checkpoint
from ingot.model.tensor import Array
from ingot.ops.convert.importance import read_importance
from ingot.ops.convert.prune import PruneRequest
from ingot.ops.destination import Destination

AnyPath = str | PathLike[str]

DEFAULT_SHARD = 5_000_000_000
# What a thread takes that encodes a sample of a tensor, of the widest type, in the ways that a recipe lists.
_PER_SAMPLE = 40 << 20


class ConvertOptions(TypedDict, total=False):
    """Further options of ``convert``.

    allow_requantize : quantize tensors that are quantized already.
    strict_recipe : refuse a recipe with a rule that hits no tensor, and importance that nothing looks at.
    overwrite : replace a file that exists, or a folder that holds a checkpoint and nothing else.
    threads : encoding threads; all processors this process may use by default.
    io : how the source is read: ``pread`` (default: safe from a source that shrinks), ``mmap``, ``auto``.
    verify : check the source's digests (default True).
    digest : written per part where the format has digests: ``crc32c`` (default), ``sha256`` or None.
    max_shard : bytes (or text such as ``5GB``) per file where the format shards; 5 GB for folders by default.
    measure : measure the error of lossy tensors (default True).
    prune : leave out this share (0 to 1) of the blocks of channels of every feed-forward network.
    prune_block : channels per block (64).
    importance : a checkpoint with a vector per matrix, the norm of each input channel's activation, under the matrix's
        name: what errors of its columns weigh where a recipe makes palettes.
    activations : a checkpoint with a vector per feed-forward network to choose the blocks by, under the name of its
        down projection: the norm of each intermediate channel's activation. By the weights alone without.
    draft : a published EAGLE-3 draft head (file or folder) to put in, in place of the source's own.
    coreml : a Core ML package (folder ``X.mlpackage``) to put in, in place of the source's own.
    program : a Core ML package whose program the tensors are written into, in place of the source's own; for targets
        ``X.mlpackage``.
    """

    allow_requantize: bool
    strict_recipe: bool
    overwrite: bool
    threads: int | None
    io: str
    verify: bool
    digest: str | None
    max_shard: int | str | None
    measure: bool
    prune: float | None
    prune_block: int | None
    activations: AnyPath | None
    importance: AnyPath | None
    draft: AnyPath | None
    coreml: AnyPath | None
    program: AnyPath | None


def within(options: ConvertOptions, max_ram: int | str | None) -> ConvertOptions:
    """Return the options to plan with: no more threads than may measure samples under the ceiling, but one."""
    threads = options.get("threads")
    if max_ram is None or (threads is not None and threads < 1):
        return options
    room = parse_size(max_ram) - anonymous_rss() - RESERVE
    return {**options, "threads": max(1, min(threads or default_workers(), room // _PER_SAMPLE))}


def prune_request(options: ConvertOptions) -> PruneRequest:
    """Return what is asked of pruning."""
    return PruneRequest(
        options.get("prune"), options.get("prune_block"), options.get("activations"), options.get("threads")
    )


def importance_of(options: ConvertOptions, source: Checkpoint) -> Mapping[str, Array]:
    """Return what errors of columns weigh, by name of the matrix; errors as ``read_importance``."""
    path = options.get("importance")
    return {} if path is None else read_importance(path, source)


def write_options(options: ConvertOptions, place: Destination) -> WriteOptions:
    """Return what is asked of the writer; raises ``UsageError`` ``convert.shard``."""
    shard = options.get("max_shard")
    if shard is not None and not (place.directory and place.format.shards):
        raise UsageError(
            f"expected a folder as destination and a format that shards, found {place.path} and {place.format.name}",
            rule="convert.shard",
        )
    size = parse_size(shard) if shard is not None else DEFAULT_SHARD if place.directory else None
    return WriteOptions(digest=options.get("digest", "crc32c"), max_shard=size)
