"""Measure what deltas of a language model cost in perplexity, and render ``spec/deltas-quality.md`` and its plot.

    python tools/delta_table.py MODELS [NAME...]   measures all rows, or those named; MODELS holds base/, finetune/,
                                                   heldout_prose.txt, heldout_code.txt, and statistics.safetensors of
                                                   finetune/ if there is no need to take them anew
    python tools/delta_table.py                    renders the page from bench/delta_quality.json, which is committed

Measuring needs the package ``tokenizers`` and, for the peer's rows, ``deltatensors==0.2.0``'s figures in the JSON file.
Protocol: the first 96 x 256 tokens of each text, each window scored by itself, exp of the mean loss, in float32. KL is
KL(fine-tune || patched base), nats a token, mean over the same tokens.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from delta_plot import svg

ROOT = Path(__file__).resolve().parent.parent
FIGURES = ROOT / "bench" / "delta_quality.json"
PAGE = ROOT / "spec" / "deltas-quality.md"
PLOT = PAGE.with_suffix(".svg")
WINDOWS, WINDOW = 96, 256
RUNS: Mapping[str, Mapping[str, Any]] = {
    "int1": {"strategy": "int1"},
    "auto, share 0.067": {"strategy": "auto", "target_size": 0.067},
    "auto, share 0.094 (1.5 bits)": {"strategy": "auto", "target_size": 0.094},
    "low-rank, 32": {"strategy": "low-rank"},
    # As many singular vectors as Delta-CoMe's mix of 8, 3 and 2 bits has at the size of int1, of the wider matrices.
    "low-rank, 83": {"strategy": "low-rank", "options": {"rank": 83}},
    "low-rank, 96": {"strategy": "low-rank", "options": {"rank": 96}},
    "auto, share 0.15": {"strategy": "auto", "target_size": 0.15},
    "int2": {"strategy": "int2"},
    "int3": {"strategy": "int3"},
    "int4": {"strategy": "int4"},
    "auto, share 0.3": {"strategy": "auto", "target_size": 0.3},
    "exact": {"strategy": "exact"},
    "int8": {"strategy": "int8"},
}
CALIBRATED = {
    f"{name}, calibrated": RUNS[name]
    for name in (
        "int1",
        "auto, share 0.067",
        "auto, share 0.094 (1.5 bits)",
        "auto, share 0.15",
        "low-rank, 32",
        "low-rank, 83",
        "int2",
        "int3",
        "int4",
        "auto, share 0.3",
    )
}


def measure(models: Path, names: Sequence[str]) -> dict[str, Any]:
    """Make these deltas, patch the base with each, and score the results; all other figures stay."""
    import ingot

    figures: dict[str, Any] = json.loads(FIGURES.read_text("utf-8"))
    texts = _tokens(models)
    rows = [row for row in figures["rows"] if row["name"] not in names]
    weights = sum(path.stat().st_size for path in (models / "finetune").glob("*.safetensors"))
    with tempfile.TemporaryDirectory() as folder:
        statistics = models / "statistics.safetensors"
        if not statistics.exists() and any(name in CALIBRATED for name in names):
            statistics = Path(folder) / "statistics.safetensors"
            ingot.calibrate(models / "finetune", statistics)
        wanted = _logits(models, models / "finetune", texts)
        for name in names:
            delta, tuned = Path(folder) / "delta.zt", Path(folder) / "tuned.zt"
            more = {"calibration": statistics, **CALIBRATED[name]} if name in CALIBRATED else RUNS[name]
            ingot.diff(models / "base", models / "finetune", delta, overwrite=True, **more)
            ingot.patch(models / "base", [delta], tuned, overwrite=True)
            size = delta.stat().st_size
            row = {"name": name, "bytes": size, "share": size / weights, **_score(models, tuned, texts, wanted)}
            print(row, flush=True)
            rows = sorted([*rows, row], key=lambda row: row["share"])
            figures["rows"] = rows
            FIGURES.write_text(json.dumps(figures, indent=1) + "\n", "utf-8")
    return figures


def _tokens(models: Path) -> dict[str, Any]:
    tokenizer = import_module("tokenizers").Tokenizer.from_file(str(models / "base" / "tokenizer.json"))
    found = {}
    for kind in ("prose", "code"):
        ids = tokenizer.encode((models / f"heldout_{kind}.txt").read_text("utf-8")).ids[: WINDOWS * WINDOW]
        found[kind] = np.array(ids, np.int64).reshape(WINDOWS, WINDOW)
    return found


def _score(models: Path, path: Path, texts: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, float]:
    found: dict[str, float] = {}
    for kind, logits in _logits(models, path, texts).items():
        total = divergence = 0.0
        for tokens, own, other in zip(texts[kind], logits, wanted[kind], strict=True):
            mine, theirs = _log_softmax(own[:-1]), _log_softmax(other[:-1])
            total -= float(np.take_along_axis(mine, tokens[1:, None], axis=-1).sum())
            divergence += float((np.exp(theirs) * (theirs - mine)).sum())
        count = texts[kind].size - len(texts[kind])
        found |= {kind: math.exp(total / count), f"kl_{kind}": divergence / count}
    return found


def _logits(models: Path, path: Path, texts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model's logits of each text: f32 [windows, window, vocabulary]."""
    import ingot
    from ingot.demo.llama import Llama

    config = json.loads((models / "base" / "config.json").read_text("utf-8"))
    with ingot.open(path) as checkpoint:
        model = Llama(config, {name: tensor.numpy("f32") for name, tensor in checkpoint.items()})
    return {
        kind: np.concatenate([model.logits(tokens[start : start + 4]) for start in range(0, len(tokens), 4)])
        for kind, tokens in texts.items()
    }


def _log_softmax(logits: Any) -> Any:
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))


def render(figures: Mapping[str, Any]) -> str:
    """Return the page."""
    tuned = figures["finetune"]
    lines = [
        "# Quality of lossy deltas",
        "",
        "Rendered by `tools/delta_table.py` from `bench/delta_quality.json`. A Llama model of 7.67 M parameters in",
        "bf16 and its fine-tune on Python source; 98.7 % of the values differ, the difference's norm is 0.173 of the",
        "base's. Perplexity on held-out text, the first 96 x 256 tokens of each; a gap is that of the patched base",
        "minus that of the fine-tune. KL is KL(fine-tune || patched base) in nats per token over the same tokens; rows",
        "without it were measured before this column was added. A share is the size of the delta's file divided by",
        "that of the fine-tune's. `calibrated` uses statistics of 96 samples of the fine-tune itself",
        "([deltas.md](deltas.md)) and no text.",
        "",
        f"![Perplexity gap on code against the size of the delta]({PLOT.name})",
        "",
        "| Delta | Share | Prose | Code | Gap prose | Gap code | KL prose | KL code |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    lines += [_line("base, no delta", 0.0, figures["base"], tuned)]
    lines += [_line(row["name"], row["share"], row, tuned) for row in figures["rows"]]
    lines += [_line("fine-tune", 1.0, tuned, tuned), ""]
    return "\n".join([*lines, *figures["notes"], ""])


def _line(name: str, share: float, row: Mapping[str, float], tuned: Mapping[str, float]) -> str:
    gaps = [f"{row[kind] - tuned[kind]:+.3f}" for kind in ("prose", "code")]
    far = [f"{row[key]:.5f}" if key in row else "" for key in ("kl_prose", "kl_code")]
    return f"| {name} | {share:.4f} | {row['prose']:.3f} | {row['code']:.3f} | {' | '.join([*gaps, *far])} |"


def main() -> int:
    """Measure where a folder is given; render."""
    if len(sys.argv) > 1:
        figures = measure(Path(sys.argv[1]), sys.argv[2:] or [*RUNS, *CALIBRATED])
    else:
        figures = json.loads(FIGURES.read_text("utf-8"))
    PAGE.write_text(render(figures), "utf-8")
    PLOT.write_text(svg(figures), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
