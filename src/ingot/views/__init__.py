"""Views: checkpoints derived lazily from other checkpoints.

Each function takes a checkpoint (from ``ingot.open``, or another view) and returns a view, which is a checkpoint too. A
view reads only what its caller reads. It can be saved, compared and loaded, and pickled if its checkpoint can be.
Closing a view closes its checkpoint (``spec/views.md``).
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
