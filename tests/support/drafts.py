"""Small draft heads in the published layout, for tests of what carries them."""

from __future__ import annotations

import numpy as np

from ingot.model.tensor import Array


def draft_head(
    layer: str = "midlayer.", vocab: int = 50, draft_vocab: int = 20, seed: int = 7, hidden: int = 16, target: int = 24
) -> dict[str, Array]:
    """Return a random EAGLE-3 head of some hidden size for a target of another; ``layer`` begins its layer's names."""
    rng = np.random.default_rng(seed)
    kv, inner = hidden // 2, 40
    targets = np.sort(rng.choice(vocab, draft_vocab, replace=False)).astype(np.int64)
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, 3 * target),
        f"{layer}self_attn.q_proj.weight": (hidden, 2 * hidden),
        f"{layer}self_attn.k_proj.weight": (kv, 2 * hidden),
        f"{layer}self_attn.v_proj.weight": (kv, 2 * hidden),
        f"{layer}self_attn.o_proj.weight": (hidden, hidden),
        f"{layer}mlp.gate_proj.weight": (inner, hidden),
        f"{layer}mlp.up_proj.weight": (inner, hidden),
        f"{layer}mlp.down_proj.weight": (hidden, inner),
        f"{layer}hidden_norm.weight": (hidden,),
        f"{layer}input_layernorm.weight": (hidden,),
        f"{layer}post_attention_layernorm.weight": (hidden,),
        "norm.weight": (hidden,),
        "lm_head.weight": (draft_vocab, hidden),
    }
    head: dict[str, Array] = {
        name: rng.normal(0, 0.05, shape).astype(np.float16) for name, shape in sorted(shapes.items())
    }
    mask = np.zeros(vocab, bool)
    mask[targets] = True
    return {**head, "d2t": targets - np.arange(draft_vocab), "t2d": mask}
