"""Compare ``--arithmetic`` with the programs: ``python tools/clients/measure_arithmetic.py [PRESET ...]``.

Prints for each preset and model KL(source || result), with the result's logits computed by the program, by Ingot with
the program's arithmetic, and by Ingot from decoded values. Needs mlx-lm, and xllamacpp on PYTHONPATH.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
from pathlib import Path
from typing import Any

import reference
import torch
from run import ROOT, SKIPPED, TOKENS

from ingot.runtime.loading.transformers import load_model
from ingot.runtime.quantize.options import QuantizeOptions
from ingot.runtime.quantize.run import quantize

PRESETS = {
    "llama.cpp": ("q4_0", "Q8_0", "Q4_K_M", "IQ4_XS", "IQ2_XS"),
    "mlx": ("mlx-4bit", "mlx-8bit", "w4a16", "mlx-nvfp4"),
}
MODULES = {"llama.cpp": "run_llama", "mlx": "run_mlx"}


def logits_of(path: Path, model_dir: Path, tokens: list[int], arithmetic: Any) -> Any:
    """Return the log-probabilities of a result, by Ingot."""
    model = load_model(path, dtype="f32", keep_packed=False, cache=False, model_dir=model_dir, arithmetic=arithmetic)
    with torch.inference_mode():
        return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].double().log_softmax(-1).numpy()


def main() -> None:
    """Print the figures."""
    models = ROOT.parent / "shared" / "models"
    for name, path in (("base", models / "base"), ("divisible", ROOT / "build" / "clients" / "divisible")):
        tokens = reference.tokens_of(path, models / "heldout_prose.txt", SKIPPED + TOKENS)[SKIPPED:]
        source = logits_of(path, path, tokens, None)
        for program, presets in PRESETS.items():
            for preset in [item for item in presets if not sys.argv[1:] or item in sys.argv[1:]]:
                with tempfile.TemporaryDirectory() as folder:
                    out = Path(folder) / ("model.gguf" if program == "llama.cpp" else "model")
                    quantize(QuantizeOptions(path, out, runtime=program, preset=preset, calibration="none"))
                    job = {"path": str(out), "tokens": tokens, "prompt": tokens[:8], "count": 1}
                    client = importlib.import_module(MODULES[program]).compute(job).logits
                    computed = logits_of(out, path, tokens, program)
                    exact = logits_of(out, path, tokens, None)
                figures = [reference.divergence(source, item) for item in (client, computed, exact)]
                noise = [reference.divergence(exact, item) for item in (client, computed)]
                share = figures[1] / figures[0] - 1
                print(
                    f"{program} {preset} {name}: program {figures[0]:.5f}, arithmetic {figures[1]:.5f} ({share:+.1%}), "
                    f"decoded {figures[2]:.5f}; to decoded: program {noise[0]:.2e}, arithmetic {noise[1]:.2e}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
