"""Run one program on the results that the runner names: ``python worker.py MODULE``, in the program's own venv.

Reads a job per line of standard input, as JSON, and writes an answer per line after ``ANSWER ``. A job has ``path``,
``container``, ``tokens``, ``prompt``, ``count``, ``vocabulary`` and ``out``. The module has ``version()`` and
``compute(job)``, which returns an ``Output`` or raises ``NotRunError``. Log-probabilities go into the NumPy file
``out``. This module and the modules of programs import nothing of Ingot.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from dataclasses import dataclass
from typing import Any

import numpy as np


class NotRunError(Exception):
    """The program has no kernel for a result on this machine; the message says how far the result was checked."""


@dataclass
class Output:
    """What a program computed.

    ``logits`` are f32 [positions, vocabulary]: of each token of the job, or of the tokens at ``positions``. ``greedy``
    are the tokens that it generates after the prompt.
    """

    logits: np.ndarray
    greedy: list[int]
    positions: list[int] | None = None
    note: str = ""


def answer(module: Any, job: dict[str, Any]) -> dict[str, Any]:
    """Return the answer to a job."""
    try:
        output = module.compute(job)
    except NotRunError as reason:
        return {"not_run": str(reason)}
    except Exception as error:
        traceback.print_exc()
        return {"refused": f"{type(error).__name__}: {one_line(str(error))}"}
    np.save(job["out"], output.logits.astype(np.float32))
    positions = output.positions or list(range(len(output.logits)))
    return {"greedy": [int(token) for token in output.greedy], "positions": positions, "note": output.note}


def one_line(text: str, limit: int = 240) -> str:
    """Return a message without line breaks, and not longer than ``limit``."""
    text = " ".join(text.split())
    return text if len(text) <= limit else f"{text[:limit]}..."


def main() -> None:
    """Answer jobs until standard input ends."""
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # programs print to standard output, too
    module = importlib.import_module(sys.argv[1])
    channel.write(f"ANSWER {json.dumps({'version': module.version()})}\n")
    channel.flush()
    for line in sys.stdin:
        channel.write(f"ANSWER {json.dumps(answer(module, json.loads(line)))}\n")
        channel.flush()


if __name__ == "__main__":
    sys.modules["worker"] = sys.modules["__main__"]  # modules of programs import it by this name
    main()
    sys.stderr.flush()
    os._exit(0)  # threads of a program must not keep the process
