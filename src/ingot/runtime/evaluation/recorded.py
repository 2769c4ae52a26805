"""Store the logits of a model in a file, so that it runs only once although several models are compared with it."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from ingot.core.border import require
from ingot.runtime.loading.transformers_config import EXTRA


class RecordedLogits:
    """Logits for the windows of a text, f32 [windows, predictions, vocabulary], in an unnamed file in ``folder``.

    The file takes disk space but no memory. ``close`` deletes it.
    """

    def __init__(self, folder: str | Path) -> None:
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - closed by ``close``
        self._shape: tuple[int, ...] = ()

    @staticmethod
    def size(windows: int, predictions: int, vocabulary: int) -> int:
        """Return the number of bytes of the logits of ``windows`` windows."""
        return windows * predictions * vocabulary * 4

    def write(self, first: int, logits: Any) -> None:
        """Store the logits of consecutive windows; ``first`` is the index of the first window."""
        values = np.ascontiguousarray(logits.cpu().numpy(), np.float32)
        self._shape = values.shape[1:]
        self._file.seek(self.size(first, *self._shape))
        self._file.write(values.reshape(-1).view(np.uint8).data)

    def read(self, first: int, count: int) -> Any:
        """Return the logits of ``count`` windows, from the window with the index ``first`` on, as a tensor."""
        values = np.empty((count, *self._shape), np.float32)
        self._file.seek(self.size(first, *self._shape))
        self._file.readinto(values.reshape(-1).view(np.uint8).data)
        return require("torch", EXTRA).from_numpy(values)

    def close(self) -> None:
        """Delete the file."""
        self._file.close()
