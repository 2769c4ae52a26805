"""Tiny models of several parts with the files that images need, and the embeddings of an image by transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.tiny_wrappers import WRAPPERS, write_wrapper

MEAN, DEVIATION = (0.48, 0.45, 0.41), (0.27, 0.26, 0.28)
BREAK, BREAK_ID = "[IMG_BREAK]", 319
PIXTRAL = "llava/pixtral"
_SIDES = {"gemma3": 28, "smolvlm": 28, "idefics3": 28, "internvl": 28, "llama4": 56, "lfm2_vl": 512}
"""Sides of images that llama.cpp does not resize, in pixels; 112 or 128 for the others, by the patches."""
_PIXTRAL = WRAPPERS["llava"]._replace(
    vision=WRAPPERS["mistral3"].vision,
    outer={**WRAPPERS["llava"].outer, "vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
)
IMAGE_MODELS = (*(name for name in WRAPPERS if name != "llava"), PIXTRAL)


def write_image_model(name: str, path: Path) -> Any:
    """Save a random model of several parts with a tokenizer and an image processor, and return it.

    Needs the packages torch and transformers.
    """
    model_type = name.partition("/")[0]
    model = write_wrapper(model_type, path, wrapper=_PIXTRAL if name == PIXTRAL else None)
    (path / "preprocessor_config.json").write_text(json.dumps({"image_mean": MEAN, "image_std": DEVIATION}))
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokenizer["added_tokens"].append({"id": BREAK_ID, "content": BREAK, "special": True, **flags})
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    return model


def random_image(name: str) -> Any:
    """Return a square image for a model of ``IMAGE_MODELS``, u8 [height, width, 3]."""
    side = _SIDES.get(name, 128 if name.startswith("qwen3") else 112)
    return np.random.default_rng(3).integers(0, 256, (side, side, 3), dtype=np.uint8)


def embeddings(name: str, model: Any, image: Any) -> Any:
    """Return the embeddings that transformers gives the text model for an image, in llama.cpp's order, f32."""
    import torch

    pixels = ((image / 255.0 - MEAN) / DEVIATION).astype(np.float32).transpose(2, 0, 1)
    with torch.inference_mode():
        if name == "llama4":
            return _by_columns(_llama4(model, torch.tensor(pixels)[None]))
        output = getattr(model, "model", model).get_image_features(**_inputs(name, model, torch.tensor(pixels)))
        rows = _flat(output.pooler_output)
        deep = [_flat(item) for item in getattr(output, "deepstack_features", None) or ()]
        values = torch.cat([rows, *deep], -1).numpy()
        if name not in ("mistral3", PIXTRAL):
            return values
        row = model.get_input_embeddings().weight[BREAK_ID].numpy()
        count = round(len(values) ** 0.5)
        lines = [np.concatenate([line, row[None]]) for line in values.reshape(count, count, -1)]
        return np.concatenate(lines)[:-1]


def _flat(value: Any) -> Any:
    value = value[0] if isinstance(value, list | tuple) else value
    return value.reshape(-1, value.shape[-1])


def _by_columns(rows: Any) -> Any:
    count = round(len(rows) ** 0.5)
    return rows.reshape(count, count, -1).swapaxes(0, 1).reshape(len(rows), -1).numpy()


def _llama4(model: Any, pixels: Any) -> Any:
    output = model.get_image_features(pixels)
    hidden = output.last_hidden_state if output.pooler_output is None else output.pooler_output
    rows = hidden.reshape(-1, hidden.shape[-1])
    width = model.multi_modal_projector.linear_1.in_features
    return model.multi_modal_projector(rows) if rows.shape[-1] == width else rows


def _inputs(name: str, model: Any, pixels: Any) -> dict[str, Any]:
    """Return the arguments of ``get_image_features`` for one image, f32 [3, height, width]."""
    import torch

    size = model.config.vision_config.patch_size
    size = size[0] if isinstance(size, list | tuple) else size
    _, height, width = pixels.shape
    rows, columns = height // size, width // size
    if name.startswith("qwen"):
        blocks = pixels[None].repeat(2, 1, 1, 1).reshape(1, 2, 3, rows // 2, 2, size, columns // 2, 2, size)
        patches = blocks.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(rows * columns, -1)
        return {"pixel_values": patches, "image_grid_thw": torch.tensor([[1, rows, columns]])}
    if name == "lfm2_vl":
        patches = pixels.reshape(3, rows, size, columns, size).permute(1, 3, 2, 4, 0).reshape(1, rows * columns, -1)
        mask = torch.ones(1, rows * columns, dtype=torch.long)
        shapes = torch.tensor([[rows, columns]])
        return {"pixel_values": patches, "spatial_shapes": shapes, "pixel_attention_mask": mask}
    if name in ("mistral3", PIXTRAL):
        return {"pixel_values": pixels[None], "image_sizes": torch.tensor([[height, width]])}
    return {"pixel_values": pixels[None, None] if name in ("smolvlm", "idefics3") else pixels[None]}
