"""Import it, and transformers opens the folders that Ingot writes (``spec/loading.md``).

    import ingot.hf
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained("folder")  # packed .zt, .squizd, MLX's safetensors
    model.save_pretrained("copy")  # packed layers as they are

Raises ``MissingExtraError`` where torch or transformers is not installed.
"""

from __future__ import annotations

from ingot.core.extras import require

EXTRA = "transformers"

for _package in ("torch", "transformers"):
    require(_package, EXTRA)
_quantizer = require("ingot.adapters.transformers_quantizer", EXTRA)
_quantizer.register()

IngotConfig = _quantizer.IngotConfig

__all__ = ["IngotConfig"]
