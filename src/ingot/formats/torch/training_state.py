"""Divide the entries of a trainer's checkpoint into weights of the model, with their names, and training state."""

from __future__ import annotations

from collections.abc import Collection, Mapping

_HOLDERS = ("app", "state_dict", "model_state_dict", "model", "module")
"""Keys under which trainers save the state dict of the model. They are not part of a tensor's name."""
_TRAINING = (
    *("optimizer", "optim", "optimizers", "optimizer_state", "optimizer_states", "optimizer_state_dict", "optim_state"),
    *("lr_scheduler", "lr_schedulers", "scheduler", "opt_param_scheduler", "dataloader", "train_state", "rng_state"),
    *("rng_states", "trainer", "callbacks", "loops", "scaler", "grad_scaler", "ema", "rerun_state_machine"),
)
"""First keys of paths that lead to training state."""


class TrainingState:
    """The entries of a checkpoint, divided into weights and training state.

    ``weights`` maps keys of entries to names of tensors; ``training`` lists the keys of all other entries.

    Parameters
    ----------
    paths : mapping of str to tuple of str
        For each entry, the keys under which the saved nested state dict contains it, from the outermost key on.
    """

    def __init__(self, paths: Mapping[str, tuple[str, ...]]) -> None:
        self.weights: dict[str, str] = {}
        self.training: list[str] = []
        inner = {key: _without_holders(path) for key, path in paths.items()}
        for key, path in inner.items():
            if _is_training(path):
                self.training.append(key)
            else:
                self.weights[key] = ".".join(path)

    def remarks(self, location: str, tensors: Collection[str], other_values: int) -> list[tuple[str, str]]:
        """Return a remark on the contents that are left out, if there are any.

        ``tensors`` are the keys of training state; ``other_values`` is the number of values that are not tensors.
        """
        parts = []
        if tensors:
            first = ", ".join(sorted(tensors)[:3])
            parts.append(f"{len(tensors)} entries of the optimizer or of the trainer ({first}, ...)"[:300])
        if other_values:
            parts.append(f"{other_values} values that are not tensors, such as counters")
        return [("torchfile.left-out", f"{location} also contains {' and '.join(parts)}: left out")] if parts else []


def _without_holders(path: tuple[str, ...]) -> tuple[str, ...]:
    while len(path) > 1 and path[0] in _HOLDERS and not _is_training(path):
        path = path[1:]
    return path


def _is_training(path: tuple[str, ...]) -> bool:
    first, _, remaining = path[0].partition(".")
    is_named = first in _TRAINING and (bool(remaining) or len(path) > 1 or first != "ema")
    is_chained = first.startswith("chained_") or (first == "optimizer" and not remaining)
    return is_named or is_chained
