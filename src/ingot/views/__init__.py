"""Views: a checkpoint made of a checkpoint, lazily and exactly.

Each function takes a checkpoint (what ``ingot.open`` returns, or another view) and returns one. Nothing is read until
somebody reads the result, and then only what it is made of. A view can be saved, compared, loaded, and pickled where
its checkpoint can; closing it closes that. See ``spec/views.md``.
"""

from __future__ import annotations

from ingot.views.attach import attach, describe, detach
from ingot.views.folding.rotate import rotate
from ingot.views.names import drop, rename, select
from ingot.views.pruning.prune import weakest_blocks
from ingot.views.rows import concatenate, permute, split, stack, take, unstack
from ingot.views.values import Pruning, prune, weigh

__all__ = [
    "Pruning",
    "attach",
    "concatenate",
    "describe",
    "detach",
    "drop",
    "permute",
    "prune",
    "rename",
    "rotate",
    "select",
    "split",
    "stack",
    "take",
    "unstack",
    "weakest_blocks",
    "weigh",
]
