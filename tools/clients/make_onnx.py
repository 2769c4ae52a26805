"""Write the graph of a model for ONNX Runtime: ``python make_onnx.py MODEL OUT.onnx``, from tokens to logits."""

from __future__ import annotations

import sys

import torch
from transformers import AutoModelForCausalLM

OPSET = 21
LENGTH = 8


class Logits(torch.nn.Module):
    """A model without a cache; the mask is an input of the model, because its own code for masks cannot be exported."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(input_ids.shape[1])
        later = positions[None, :] > positions[:, None]
        mask = later[None, None] * torch.finfo(torch.float32).min
        output = self.model(
            input_ids=input_ids, attention_mask=mask, position_ids=positions[None], use_cache=False
        )  # fmt: skip
        return output.logits


def make(path: str, out: str) -> None:
    """Export the model; constants have the names of its parameters."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    torch.onnx.export(
        Logits(model), (torch.zeros(1, LENGTH, dtype=torch.long),), out, input_names=["input_ids"],
        output_names=["logits"], dynamic_axes={"input_ids": {1: "length"}}, dynamo=False, opset_version=OPSET,
        do_constant_folding=False,
    )  # fmt: skip


if __name__ == "__main__":
    make(*sys.argv[1:])
