"""mistral.rs on the CPU. Its Python interface returns text; it has no logits of a prompt: KL is not measured."""

from __future__ import annotations

from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

import mistralrs
from worker import Output


def version() -> str:
    return f"mistralrs {version_of('mistralrs')}"


def compute(job: dict[str, Any]) -> Output:
    path = Path(job["path"])
    if job["container"] == "gguf":
        which = mistralrs.Which.GGUF(quantized_model_id=str(path.parent), quantized_filename=path.name)
    else:
        which = mistralrs.Which.Plain(model_id=str(path), dtype=mistralrs.ModelDType.F32)
    runner = mistralrs.Runner(which=which)
    prompt = runner.tokenize_text(job["text"], add_special_tokens=True, enable_thinking=None)
    if list(prompt) != list(job["prompt"]):
        raise ValueError(f"it reads the prompt as {list(prompt)[:8]}..., not as {job['prompt'][:8]}...")
    request = mistralrs.CompletionRequest(
        prompt=job["text"], model="default", max_tokens=job["count"], temperature=0.0, ignore_eos=True
    )
    answer = runner.send_completion_request(request)
    return Output(None, [], note="its Python interface returns no logits: text only", text=answer.choices[0].text)
