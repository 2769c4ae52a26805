"""Opening of adapters in the file formats of PEFT, llama.cpp and mlx_lm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ingot.adapters import gguf, mlx, peft
from ingot.adapters.record import Adapter, Change, LowRank, Replacement
from ingot.artifacts.adapter_files import CONFIG, has_adapter_file_name, recognise
from ingot.artifacts.open import find, open_source_in_store
from ingot.core.border import bordered
from ingot.errors import FormatError, IngotError, UnsupportedError, UsageError
from ingot.model.checkpoint import Checkpoint
from ingot.model.store import Store
from ingot.naming.config import MAX_CONFIG, parse_config
from ingot.stores.location import AnyPath, Location

RULE = "adapter.none"
SMALLEST = float(np.finfo(np.float32).smallest_normal)
LARGEST = float(np.finfo(np.float32).max)


@bordered
def open_adapter(path: AnyPath, *, io: str = "auto", verify: bool = True) -> Adapter:
    """Open an adapter: a PEFT or MLX folder, the weight file in a PEFT or MLX folder, or a GGUF adapter.

    Headers and the config are read and checked. Factors are read when they are needed.

    Raises
    ------
    UsageError
        ``adapter.none``: the path is not an adapter; the errors of ``ingot.open``.
    UnsupportedError
        ``adapter.method``, ``adapter.config``.
    FormatError
        ``adapter.config``, ``adapter.tensors``, ``adapter.rank``; the errors of the format.
    """
    location = Location.parse(path)
    store, name = find(location, io)
    source = open_source_in_store(store, name, verify=verify, requested_io=io)
    try:
        return adapter_from(source.view(), store, location.display)
    except BaseException:
        source.close()
        raise


def adapter_from(checkpoint: Checkpoint, store: Store, location: str) -> Adapter:
    """Return the adapter in an opened checkpoint, whose folder is ``store``; raise the errors of ``open_adapter``."""
    description = recognise(checkpoint, checkpoint.metadata, store)
    if description is None:
        raise UsageError(
            "expected an adapter (a PEFT or MLX folder, or a GGUF adapter), found weights of a model",
            rule=RULE,
            where=location,
        )
    try:
        config, changes = _changes(description.program, checkpoint, store)
        _require_effects(changes)
    except IngotError as error:
        raise error if location in (error.where or "") else error.add_location(location) from None
    return Adapter(
        location, description.program.lower(), _method(changes), changes, config, description.base, checkpoint.source
    )


def _changes(
    program: str, checkpoint: Checkpoint, store: Store
) -> tuple[Mapping[str, Any], Mapping[str, Sequence[Change]]]:
    if program == "GGUF":
        return checkpoint.metadata, gguf.read_changes(checkpoint)
    if not store.exists(CONFIG):
        message = f"expected {CONFIG} beside the weights, which has the adapter's rank and scale"
        if has_adapter_file_name(checkpoint):
            raise FormatError(peft.CONFIG_RULE, message)
        raise UnsupportedError(message, rule=peft.CONFIG_RULE)
    config = parse_config(store.read(CONFIG, MAX_CONFIG, peft.CONFIG_RULE), peft.CONFIG_RULE, CONFIG)
    read = mlx.read_changes if program == "MLX" else peft.read_changes
    return config, read(checkpoint, config)


def _require_effects(changes: Mapping[str, Sequence[Change]]) -> None:
    """Raise ``FormatError`` if the factors of a change have no effect or its scale is not representable in f32.

    ``adapter.config``: the scale is 0 or infinite in f32; ``adapter.rank``: the rank is 0.
    """
    for name, items in changes.items():
        for item in items:
            if isinstance(item, LowRank) and not item.rank:
                raise FormatError(peft.RANK_RULE, "expected factors of rank 1 or more, found rank 0", where=name)
            scale = 1.0 if isinstance(item, Replacement) else item.scale
            if not SMALLEST <= abs(scale) <= LARGEST:
                raise FormatError(
                    peft.CONFIG_RULE,
                    f"expected a scale that f32 can hold and that is not 0, found {scale:g}",
                    where=name,
                )


def _method(changes: Mapping[str, Sequence[Change]]) -> str:
    low_ranks = [item for items in changes.values() for item in items if isinstance(item, LowRank)]
    if any(item.magnitude is not None for item in low_ranks):
        return "dora"
    return "lora" if low_ranks else "full"
