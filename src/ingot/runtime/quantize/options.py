"""The options of ``ingot quantize``. The command line derives from this module, so it imports nothing heavy."""

from __future__ import annotations

import re
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from ingot.artifacts.destination import CPU, MAX_RAM, OVERWRITE, PART, PROGRESS, RESUME
from ingot.core.options import OUT, OUTPUT, about, source
from ingot.errors import UsageError
from ingot.stores.location import AnyPath

if TYPE_CHECKING:
    from collections.abc import Callable

    from ingot.conversion.estimate import Estimate
    from ingot.core.runtime.progress import ProgressCallback

AUTO, FULL, GPTQ, IMPORTANCE, NONE = MODES = ("auto", "full", "gptq", "importance", "none")
"""Values of ``calibration``: the most exact that fits the time; statistics of inputs and gradients; of inputs;
importance of columns; no statistics.
"""
GRADES = (FULL, GPTQ, IMPORTANCE)
"""The values that collect statistics, the most exact first."""
_TIME = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(s|sec|m|min|h|d)?")
_SECONDS = {None: 1, "s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}


@dataclass(frozen=True, slots=True)
class QuantizeOptions:
    """Options of a quantization: the model, the result, and the program that will run it."""

    model: AnyPath = field(metadata=source("Folder or file in any format, or org/name.", metavar="MODEL"))
    out: AnyPath = field(metadata=about("The result: a folder, or a file such as model.gguf.", *OUTPUT, aliases=OUT))
    _: KW_ONLY
    runtime: str | None = field(
        default=None,
        metadata=about(
            "The program that runs the result: llama.cpp, ollama, vllm, sglang, transformers, mlx, onnxruntime, "
            "openvino, mistral.rs, coreml. It decides container and preset.",
            "--for",
            "--to",
            metavar="RUNTIME",
        ),
    )
    bits: int | None = field(
        default=None,
        metadata=about("Bits per weight, such as 4; default: the program's.", "--bits", "--q-bits"),
    )
    type: str | None = field(
        default=None,
        metadata=about(
            "A file type of llama.cpp, such as Q4_K_M, in upper or lower case; or f16, bf16.",
            "--type",
            "--outtype",
            "--dtype",
            metavar="NAME",
        ),
    )
    preset: str | None = field(default=None, metadata=about("A preset (see `ingot recipes`) or a TOML file."))
    calibration: AnyPath = field(
        default=AUTO,
        metadata=about(
            "auto (the best that fits --time), full (statistics of inputs and gradients), gptq (of inputs, by forward "
            "passes), importance (of columns, by forward passes), none (fast, but much less accurate at 4 bits and "
            "below), or a file of `ingot calibrate`.",
            metavar="MODE",
        ),
    )
    time: str | None = field(
        default=None,
        metadata=about(
            "With --calibration auto: the time limit of the run, such as 30m or 2h; default: no limit, but a question "
            "on a terminal if the run takes more than 10 minutes.",
            metavar="TIME",
        ),
    )
    device: Any = field(
        default=CPU,
        metadata=about(
            "Calibrate, round and measure --kl on this device of torch: cpu, cuda, cuda:N, mps or xpu.",
            metavar="DEVICE",
        ),
    )
    group_size: int | None = field(
        default=None,
        metadata=about(
            "Columns that share a scale, for presets of integers in groups.",
            "--group-size",
            "--q-group-size",
            metavar="N",
            minimum=1,
        ),
    )
    kl: AnyPath | None = field(
        default=None,
        metadata=about(
            "UTF-8 text: measure the KL divergence of the result from the model on it. Needs the extra transformers.",
            metavar="TEXT",
        ),
    )
    format: str | None = field(
        default=None, metadata=about("Container, if the program reads several.", "--format", "-f")
    )
    part: Literal["text", "mmproj"] | None = field(default=None, metadata=PART)
    max_ram: int | str | None = field(default=None, metadata=MAX_RAM)
    resume: bool = field(default=False, metadata=RESUME)
    overwrite: bool = field(default=False, metadata=OVERWRITE)
    allow_requantize: bool = field(
        default=False, metadata=about("Quantize a model that is quantized already; this loses more than once.")
    )
    progress: ProgressCallback | None = field(default=None, metadata=PROGRESS)
    announce: Callable[[Estimate], None] | None = field(
        default=None, metadata=about("Called with the estimate before work begins.", command=False)
    )
    confirm: Callable[[Estimate], bool] | None = field(
        default=None, metadata=about("Asked before work of more than 10 minutes.", command=False)
    )


def parse_time(text: str) -> float:
    """Return the seconds of a time such as ``30m``, ``90s`` or ``1.5h``; raises ``UsageError`` ``quantize.time``."""
    match = _TIME.fullmatch(text.strip().lower())
    if match is None:
        raise UsageError(f"expected a time such as 30m, 90s or 2h, found {text!r:.40}", rule="quantize.time")
    return float(match[1]) * _SECONDS[match[2]]
