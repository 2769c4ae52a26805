"""A folder with the weights of training steps: full files, and exact deltas to an earlier step.

Names state the chain: ``step-00000010.safetensors`` is full, ``step-00000011.from-00000010.zt`` is a delta to step 10.
Each file appears complete under its name in one rename, so that a process may be killed at any moment.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ingot.artifacts.open import open as open_checkpoint
from ingot.artifacts.save import save
from ingot.delta.apply import apply_delta
from ingot.delta.diff import diff
from ingot.errors import FormatError, IngotError, UsageError
from ingot.model.checkpoint import Checkpoint
from ingot.model.delta import delta_of

RULE = "steps.folder"
_FULL = re.compile(r"step-(\d{8,12})\.safetensors")
_DELTA = re.compile(r"step-(\d{8,12})\.from-(\d{8,12})\.zt")
_SHARED = "ingot.shared"

State = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class StepFile:
    """One file of the folder. ``parent`` is the step that a delta refers to; None for a full file."""

    path: Path
    step: int
    parent: int | None


class StepFolder:
    """The steps in a folder.

    Parameters
    ----------
    folder : path-like
        Created with the first step.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def files(self) -> dict[int, StepFile]:
        """Return the file of each step; a full file takes precedence over a delta. No file is opened."""
        files: dict[int, StepFile] = {}
        for path in sorted(self.folder.iterdir()) if self.folder.is_dir() else []:
            if (match := _FULL.fullmatch(path.name)) is not None:
                files[int(match[1])] = StepFile(path, int(match[1]), None)
            elif (match := _DELTA.fullmatch(path.name)) is not None and int(match[2]) < int(match[1]):
                files.setdefault(int(match[1]), StepFile(path, int(match[1]), int(match[2])))
        return files

    def steps(self) -> list[int]:
        """Return the steps that can be restored: the headers of all files of their chains are complete."""
        files = self.files()
        complete: set[int] = set()
        for step in sorted(files):
            parent = files[step].parent
            if (parent is None or parent in complete) and _is_complete(files[step]):
                complete.add(step)
        return sorted(complete)

    def chain(self, step: int) -> list[StepFile]:
        """Return the files from which a step is restored: a full file, then deltas in the order in which they are
        applied.

        Raises ``UsageError`` ``steps.folder``: the folder has no such step, or a file of its chain is missing.
        """
        files = self.files()
        chain: list[StepFile] = []
        current: int | None = step
        while current is not None:
            if current not in files:
                reason = f"the folder has no step {current}"
                raise UsageError(
                    reason if current == step else f"{reason}, to which step {chain[-1].step} is a delta",
                    rule=RULE,
                    where=str(self.folder),
                )
            chain.append(files[current])
            current = files[current].parent
        return chain[::-1]

    def restore(self, step: int) -> State:
        """Return the tensors of a step, bit for bit as they were saved; tied names share one tensor.

        Each delta checks that it is applied to its base, and that the result is the step that was saved.

        Raises
        ------
        UsageError
            ``steps.folder``.
        FormatError, IntegrityError
            A file is damaged.
        """
        full, *deltas = self.chain(step)
        with open_checkpoint(full.path) as checkpoint:
            checkpoint.require_whole()
            state: State = checkpoint.state_dict("pt")
            state = {name: value.clone() for name, value in state.items()}
            shared = _shared_of(checkpoint)
        for item in deltas:
            apply_delta(state, item.path, verify=True, undo=False)
        return {**state, **{name: state[source] for name, source in shared.items() if source in state}}

    def save_full(self, step: int, state: State, shared: Mapping[str, str]) -> Path:
        """Save all tensors of a step. ``shared`` maps a name to another name whose tensor it shares."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"step-{step:08}.safetensors"
        save(path, state, {_SHARED: json.dumps(dict(shared))} if shared else None)
        return path

    def save_delta(self, step: int, state: State, parent: int, base: State | Path) -> Path:
        """Save the exact difference to the step ``parent``, whose tensors are ``base``.

        A tensor whose difference would take more bytes than itself is stored in full, so that the file is at most a
        little larger than the tensors.
        """
        path = self.folder / f"step-{step:08}.from-{parent:08}.zt"
        diff(base, state, path, "exact", allow_larger=True, overwrite=True, measure=False)
        return path

    def remove_from(self, step: int) -> None:
        """Remove the steps from ``step`` on, the last step first, so that all remaining steps can be restored at any
        moment.
        """
        paths = [path for path in self.folder.iterdir() if (name := _step_of(path.name)) is not None and name >= step]
        for path in sorted(paths, reverse=True):
            path.unlink()


def _step_of(name: str) -> int | None:
    match = _FULL.fullmatch(name) or _DELTA.fullmatch(name)
    return None if match is None else int(match[1])


def _shared_of(checkpoint: Checkpoint) -> dict[str, str]:
    try:
        shared = json.loads(checkpoint.metadata.get(_SHARED, "{}"))
    except (ValueError, TypeError, RecursionError):
        shared = None
    if not isinstance(shared, dict) or not all(isinstance(name, str) for name in shared.values()):
        raise FormatError(RULE, f"expected names in the metadata {_SHARED}", where=checkpoint.location)
    return shared


def _is_complete(item: StepFile) -> bool:
    try:
        with open_checkpoint(item.path) as checkpoint:
            return (delta_of(checkpoint.metadata, str(item.path)) is None) == (item.parent is None)
    except (IngotError, OSError):
        return False


def copy_state(state: Mapping[str, Any], into: State | None = None) -> tuple[State, dict[str, str]]:
    """Return copies of the tensors in main memory, and a map from a name to another name whose tensor it shares.

    If ``into`` has a tensor with the name, shape and type, the values are copied into it; otherwise into a new tensor.
    """
    copies: State = {}
    shared: dict[str, str] = {}
    names: dict[tuple[Any, ...], str] = {}
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            continue
        key = (str(value.device), value.data_ptr(), tuple(value.shape), value.stride(), value.dtype)
        if value.numel() and key in names:
            shared[name] = names[key]
            continue
        names[key] = name
        target = None if into is None else into.get(name)
        if target is None or target.shape != value.shape or target.dtype != value.dtype:
            target = torch.empty(value.shape, dtype=value.dtype)
        copies[name] = target.copy_(value.detach())
    return copies, shared
