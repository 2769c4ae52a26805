"""Converted adapters run in llama.cpp (xllamacpp) and in mlx_lm, and give the logits of PEFT.

Needs the packages peft, xllamacpp and mlx-lm; each test is skipped without its packages.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from tests.support import model_folder

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:::peft"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
needs_llama_cpp = pytest.mark.skipif(
    importlib.util.find_spec("xllamacpp") is None or importlib.util.find_spec("gguf") is None,
    reason="the package xllamacpp or gguf is not installed",
)

Array = np.ndarray[Any, np.dtype[Any]]
PROGRAM = Path(__file__).with_name("xllamacpp_program.py")
ROWS = model_folder.ROWS
PROMPT = [5, 9, 2, 30, 11, 7, 40, 200, 256, 31]
SMALL = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": ROWS, "max_position_embeddings": 128, "head_dim": 16, "bos_token_id": None,
    "eos_token_id": 259, "pad_token_id": 257, "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]
PATTERNS = {"use_rslora": True, "rank_pattern": {"q_proj": 2, "layers.1.*v_proj": 3}, "alpha_pattern": {"k_proj": 3}}
FUSED = {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"target_modules": LINEAR}),
    "llama-patterns": ("llama", {"target_modules": LINEAR, **PATTERNS}),
    "llama-embedding": ("llama", {"target_modules": ["embed_tokens", "q_proj"]}),
    "qwen3": ("qwen3", {"target_modules": LINEAR}),
    "experts": ("qwen3_moe", FUSED),
}


def adapted(folder: Path, case: str) -> Array:
    """Write ``base`` and ``adapter`` in f32; return the logits of PEFT for the last token of the prompt."""
    family, config = CASES[case]
    sizes = {**SMALL, **(EXPERTS if family == "qwen3_moe" else {})}
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(family, **sizes), dtype=torch.float32
    )
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, mean=float(name.endswith("norm.weight")), std=0.1)
    model.save_pretrained(folder / "base")
    (folder / "base" / "tokenizer.json").write_text(json.dumps(model_folder.tokenizer()))
    (folder / "base" / "tokenizer_config.json").write_text(json.dumps(model_folder.SETTINGS))
    adapter = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, **config))
    for parameter in adapter.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1)
    adapter.save_pretrained(folder / "adapter", save_embedding_layers=False)
    return logits_of(adapter)


def logits_of(model: Any) -> Array:
    with torch.inference_mode():
        logits: Array = model.eval()(torch.tensor([PROMPT])).logits[0, -1].numpy()
    return logits


def log_softmax(logits: Array) -> Array:
    shifted = logits.astype(np.float64) - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def llama_cpp(path: Path, adapters: list[Path]) -> Array:
    """Return the log probabilities that llama.cpp computes with adapters, keys and values in f32."""
    job = {
        "kind": "completions", "path": str(path), "prompt": PROMPT, "tokens": ROWS,
        "adapters": [str(item) for item in adapters], "exact": True,
    }  # fmt: skip
    errors = ""
    for _ in range(3):  # the server at times ends while it starts, if the machine is busy
        done = subprocess.run(
            [sys.executable, str(PROGRAM), json.dumps(job)], capture_output=True, text=True, check=False, timeout=60
        )
        lines = [line for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
        if lines:
            (choice,) = json.loads(lines[-1].removeprefix("ANSWER "))["choices"]
            values = np.full(ROWS, np.nan)
            for token in choice["logprobs"]["content"][0]["top_logprobs"]:
                values[token["id"]] = token["logprob"]
            return values
        errors = done.stderr
    raise AssertionError(errors[-2000:])


@needs_llama_cpp
@pytest.mark.parametrize("case", CASES)
def test_llama_cpp_gives_the_logits_of_peft(tmp_path: Path, case: str) -> None:
    expected = log_softmax(adapted(tmp_path, case))
    ingot.convert(tmp_path / "base", tmp_path / "base.gguf")
    ingot.convert_adapter(tmp_path / "adapter", tmp_path / "adapter.gguf", base=tmp_path / "base")
    result = llama_cpp(tmp_path / "base.gguf", [tmp_path / "adapter.gguf"])
    assert np.abs(result - expected).max() < 1e-3
    assert np.abs(llama_cpp(tmp_path / "base.gguf", []) - expected).max() > 0.01


@needs_llama_cpp
def test_a_gguf_base_determines_the_same_adapter(tmp_path: Path) -> None:
    adapted(tmp_path, "llama")
    ingot.convert(tmp_path / "base", tmp_path / "base.gguf")
    for name in ("base", "base.gguf"):
        ingot.convert_adapter(tmp_path / "adapter", tmp_path / f"by-{name}.gguf", base=tmp_path / name)
    assert (tmp_path / "by-base.gguf").read_bytes() == (tmp_path / "by-base.gguf.gguf").read_bytes()


@needs_llama_cpp
@pytest.mark.parametrize("case", ["llama", "llama-patterns", "experts"])
def test_a_gguf_base_merges_as_the_folder_does(tmp_path: Path, case: str) -> None:
    adapted(tmp_path, case)
    ingot.convert(tmp_path / "base", tmp_path / "base.gguf")
    ingot.merge(tmp_path / "base.gguf", tmp_path / "adapter", tmp_path / "first.gguf")
    ingot.merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "second.gguf")
    with ingot.open(tmp_path / "first.gguf") as first, ingot.open(tmp_path / "second.gguf") as second:
        for name, tensor in first.items():
            assert np.array_equal(tensor.numpy(), second[name].numpy()), name


@pytest.mark.parametrize("case", ["llama", "llama-patterns", "qwen3", "experts"])
def test_mlx_lm_gives_the_logits_of_peft(tmp_path: Path, case: str) -> None:
    mx = pytest.importorskip("mlx.core")
    mlx_lm = pytest.importorskip("mlx_lm")
    expected = adapted(tmp_path, case)
    ingot.convert_adapter(tmp_path / "adapter", tmp_path / "mlx", base=tmp_path / "base")
    config = tmp_path / "base" / "config.json"  # mlx_lm reads the keys of earlier versions of transformers
    config.write_text(json.dumps({"num_experts": 4, "rope_theta": 10000.0, **json.loads(config.read_text())}))
    model, _ = mlx_lm.load(str(tmp_path / "base"), adapter_path=str(tmp_path / "mlx"))
    result = np.array(model(mx.array([PROMPT]))[0, -1].astype(mx.float32))
    assert np.abs(result - expected).max() < 1e-3


@needs_llama_cpp
@pytest.mark.parametrize("case", ["llama", "llama-patterns", "llama-embedding"])
def test_a_round_trip_gives_peft_the_same_logits(tmp_path: Path, case: str) -> None:
    expected = adapted(tmp_path, case)
    base = tmp_path / "base"
    ingot.convert_adapter(tmp_path / "adapter", tmp_path / "adapter.gguf", base=base)
    ingot.convert_adapter(tmp_path / "adapter.gguf", tmp_path / "again", base=base)
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    result = logits_of(peft.PeftModel.from_pretrained(model, tmp_path / "again"))
    assert np.abs(result - expected).max() < 1e-3
