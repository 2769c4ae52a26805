"""transformers on the CPU in float32, with the packages that its readers of packed folders need."""

from __future__ import annotations

import importlib.util
from importlib.metadata import version as version_of
from typing import Any

import torch
import transformers
from worker import NotRunError, Output

_PACKAGES = {"compressed-tensors": "compressed_tensors", "bitsandbytes": "bitsandbytes", "gptq": "gptqmodel"}
_PACKAGES["awq"] = _PACKAGES["gptq"]


def version() -> str:
    packages = (name for name in ("compressed-tensors", "gptqmodel", "bitsandbytes") if _has(name.replace("-", "_")))
    return ", ".join(f"{name} {version_of(name)}" for name in ("transformers", *packages))


def _has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def compute(job: dict[str, Any]) -> Output:
    package = _PACKAGES.get(job["container"])
    if package is not None and not _has(package):
        raise NotRunError(f"the package {package} is not installed")
    try:
        return _run(job, torch.float32)
    except ImportError as error:
        if "requires a GPU" not in str(error):
            raise
        raise NotRunError(f"configuration accepted; {error}") from error
    except RuntimeError as error:
        if "same dtype" not in str(error):
            raise
    output = _run(job, "auto")
    output.note = "in bfloat16, into which it decodes for any dtype"
    return output


def _run(job: dict[str, Any], dtype: Any) -> Output:
    model = transformers.AutoModelForCausalLM.from_pretrained(job["path"], dtype=dtype).eval()
    # Without gradients bitsandbytes uses a CPU kernel that needs rows of whole blocks of 64.
    with torch.set_grad_enabled(job["container"] == "bitsandbytes"):

        def logits(tokens: list[int]) -> torch.Tensor:
            return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].detach().float()

        text = list(job["prompt"])
        for _ in range(job["count"]):
            text.append(int(logits(text)[-1].argmax()))
        return Output(logits(job["tokens"]).numpy(), text[len(job["prompt"]) :])
