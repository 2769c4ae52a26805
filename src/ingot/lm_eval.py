"""``python -m ingot.lm_eval``: lm-evaluation-harness with the model ``ingot``.

    python -m ingot.lm_eval run --model ingot --model_args path=./packed,keep_packed=True --tasks lambada_openai

All other arguments are those of the harness.
"""

from __future__ import annotations

import sys

from ingot.core.border import require
from ingot.errors import IngotError

EXTRA = "eval"


def register() -> None:
    """Register the model name ``ingot`` with the harness in this process.

    Raises
    ------
    MissingExtraError
        The harness, torch or transformers is not installed.
    """
    for package in ("torch", "transformers", "lm_eval"):
        require(package, EXTRA)
    require("ingot.runtime.evaluation.lm_eval", EXTRA)


def main() -> int:
    """Run the harness's command line; return the exit code."""
    try:
        register()
        require("lm_eval.__main__", EXTRA).cli_evaluate()
    except IngotError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
