"""The callback of transformers' ``Trainer`` that saves each step as an exact delta (``ingot.hf.DeltaCheckpoint``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.distributed.tensor import DTensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ingot.core.border import bordered
from ingot.errors import UnsupportedError, UsageError
from ingot.runtime.training.step_files import RULE, State, StepFolder, copy_state


class DeltaCheckpoint(TrainerCallback):
    """Saves the weights of each step as an exact delta, with a full file every ``full_every`` saves.

    Only weights are saved: no state of the optimizer, which ``Trainer`` saves in its own checkpoints. Each file appears
    complete or not at all, so that every saved step can be restored after the process was killed.

    Parameters
    ----------
    folder : path-like
        The folder of the steps; it is created.
    every : int
        Save after each step whose number is a multiple of ``every``.
    full_every : int
        The number of saves from one full file to the next.
    against : "step" or "base"
        The step to which a delta refers. For ``step``, it is the step saved before; a copy of its weights stays in main
        memory. Restoring then reads all deltas since the last full file. For ``base``, it is the step of the last full
        file, which is read from disk for each save. Restoring then reads one delta.
    overwrite : bool
        Whether a run may remove saved steps that are later than the step at which the run starts.

    Raises
    ------
    UsageError
        ``steps.option``: an invalid argument.
    """

    @bordered
    def __init__(
        self,
        folder: str | Path,
        *,
        every: int = 1,
        full_every: int = 100,
        against: str = "step",
        overwrite: bool = False,
    ) -> None:
        if every < 1 or full_every < 1 or against not in ("step", "base"):
            raise UsageError(
                "expected every and full_every of at least 1, and against 'step' or 'base'; found "
                f"{every}, {full_every}, {against!r}",
                rule="steps.option",
            )
        self._steps = StepFolder(folder)
        self._every = every
        self._full_every = full_every
        self._against = against
        self._overwrite = overwrite
        self._saves = 0
        self._parent = 0
        self._base: State | Path | None = None
        self._shared: dict[str, str] = {}
        self._last: int | None = None

    @staticmethod
    def saved_steps(folder: str | Path) -> list[int]:
        """Return the steps of a folder that can be restored."""
        return StepFolder(folder).steps()

    @staticmethod
    def restore(folder: str | Path, step: int) -> State:
        """Return the state dict of a step, bit for bit.

        Raises ``UsageError`` ``steps.folder`` if the folder lacks the step, ``FormatError`` or ``IntegrityError`` if a
        file is damaged.
        """
        return StepFolder(folder).restore(step)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **_: Any
    ) -> None:
        """Save the weights before the first step in full."""
        if getattr(args, "deepspeed", None) or getattr(args, "fsdp", None):
            raise _sharded_error()
        if not state.is_world_process_zero:
            return
        self._require_room(state.global_step)
        self._saves = 0
        self._save(state.global_step, model)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **_: Any
    ) -> None:
        """Save the weights after a step."""
        if state.is_world_process_zero and state.global_step % self._every == 0:
            self._save(state.global_step, model)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **_: Any
    ) -> None:
        """Save the weights after the last step, if they are not yet saved, and release the copy in memory."""
        if state.is_world_process_zero and self._last != state.global_step:
            self._save(state.global_step, model)
        self._base = None

    def _require_room(self, step: int) -> None:
        """Remove the saved steps from ``step`` on.

        Raises ``UsageError`` ``steps.folder`` if there are later steps and ``overwrite`` is false.
        """
        files = self._steps.files()
        later = [number for number in files if number > step]
        if later and not self._overwrite:
            raise UsageError(
                f"training starts at step {step}, but the folder has step {max(later)}; choose another folder, or pass "
                "overwrite=True to remove later steps",
                rule=RULE,
                where=str(self._steps.folder),
            )
        if files:
            self._steps.remove_from(step)

    def _save(self, step: int, model: Any) -> None:
        weights = model.state_dict()
        if any(isinstance(value, DTensor) or getattr(value, "is_meta", False) for value in weights.values()):
            raise _sharded_error()
        is_full = self._base is None or self._saves % self._full_every == 0
        state, shared = copy_state(weights, self._base if is_full and isinstance(self._base, dict) else None)
        if is_full or shared != self._shared or self._base is None:
            path = self._steps.save_full(step, state, shared)
            self._saves = 0
        else:
            path = self._steps.save_delta(step, state, self._parent, self._base)
        if self._against == "step":
            self._base = state
            self._parent = step
        elif path.suffix == ".safetensors":
            self._base = path
            self._parent = step
        self._shared = shared
        self._saves += 1
        self._last = step


def _sharded_error() -> UnsupportedError:
    return UnsupportedError(
        "the weights are divided among processes (FSDP or DeepSpeed): save the trainer's own checkpoints, which "
        "ingot.open reads",
        rule="steps.sharded",
    )
