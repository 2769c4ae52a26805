"""Importing this module lets transformers load the folders that Ingot writes (``spec/loading.md``).

    import ingot.hf
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained("folder")  # packed .zt, .squizd, MLX's safetensors
    model.save_pretrained("copy")  # packed layers stay packed
    ingot.hf.use_kv_cache(model, "int4")  # keys and values in packed blocks
    ingot.hf.use_adapters(model, ["style"])  # LoRA beside the layers; [] restores the base
    Trainer(..., callbacks=[ingot.hf.DeltaCheckpoint("steps")])  # each step as an exact delta (``spec/training.md``)

Raises ``MissingExtraError`` if torch or transformers is not installed.
"""

from __future__ import annotations

from ingot.core.border import require
from ingot.runtime.loading.serving import KV_CACHES, PACKED

EXTRA = "transformers"

for _package in ("torch", "transformers"):
    require(_package, EXTRA)
_quantizer = require("ingot.runtime.loading.transformers_quantizer", EXTRA)
_quantizer.register()

_adapters = require("ingot.runtime.layers.adapters", EXTRA)

IngotConfig = _quantizer.IngotConfig
DeltaCheckpoint = require("ingot.runtime.training.delta_checkpoint", EXTRA).DeltaCheckpoint
clear_adapter_cache = require("ingot.runtime.layers.adapter_cache", EXTRA).clear_adapter_cache
use_adapters = _adapters.use_adapters
use_kv_cache = KV_CACHES[PACKED].use_kv_cache

__all__ = ["DeltaCheckpoint", "IngotConfig", "clear_adapter_cache", "use_adapters", "use_kv_cache"]
