"""A real llama.cpp opens what Ingot writes, and computes what transformers does; it refuses what Ingot refuses.

Needs the package xllamacpp: ``pip install xllamacpp``, or its folder in PYTHONPATH.
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
pytest.importorskip("gguf")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="the package xllamacpp is not installed"),
]

PROGRAM = Path(__file__).with_name("xllamacpp_program.py")
ROWS = model_folder.ROWS
SMALL = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": ROWS, "max_position_embeddings": 128, "head_dim": 16, "bos_token_id": None,
    "eos_token_id": 259, "pad_token_id": 257,
}  # fmt: skip
SPARSE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {
    "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "moe_intermediate_size": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16, "v_head_dim": 16,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "mixtral": {"num_local_experts": 4},
    "qwen2": {},
    "qwen2_moe": {**SPARSE, "shared_expert_intermediate_size": 32, "tie_word_embeddings": False},
    "qwen3": {},
    "qwen3_moe": {**SPARSE, "norm_topk_prob": True},
    "gemma": {},
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3_text": {"query_pre_attn_scalar": 16},
    "phi3": {},
    "starcoder2": {},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v2": {**LATENT, "q_lora_rank": None, "topk_method": "greedy", "n_group": 1, "topk_group": 1},
    "deepseek_v3": {**LATENT, "q_lora_rank": 32, "n_group": 2, "topk_group": 1, "num_nextn_predict_layers": 0},
}
PROMPT = [5, 9, 2, 30, 11, 7, 40, 200, 256, 31]


def ask(kind: str, path: Path, **job: Any) -> Any:
    """Return llama.cpp's answer.

    Its server at times ends or hangs while it starts, on a machine that has more to do than it can: it is asked three
    times.
    """
    command = [sys.executable, str(PROGRAM), json.dumps({"kind": kind, "path": str(path), **job})]
    errors = ""
    for _ in range(3):
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        except subprocess.TimeoutExpired:
            continue
        lines = [line for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
        if lines:
            return json.loads(lines[-1].removeprefix("ANSWER "))
        errors = done.stderr
    raise AssertionError(f"no answer: {errors[-2000:]}")


def log_probabilities(path: Path, prompt: Any = PROMPT) -> np.ndarray[Any, Any]:
    (choice,) = ask("completions", path, prompt=prompt, tokens=ROWS)["choices"]
    found = np.full(ROWS, np.nan)
    for token in choice["logprobs"]["content"][0]["top_logprobs"]:
        found[token["id"]] = token["logprob"]
    return found


def saved(kind: str, path: Path, **more: Any) -> Path:
    """Save a random model with a tokenizer beside it."""
    config = transformers.AutoConfig.for_model(kind, **{**SMALL, **MODELS[kind], **more})
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, mean=float(name.endswith("norm.weight") and "gemma" not in kind), std=0.1)
    model.save_pretrained(path)
    (path / "tokenizer.json").write_text(json.dumps(model_folder.tokenizer()))
    (path / "tokenizer_config.json").write_text(json.dumps(model_folder.SETTINGS))
    return path


@pytest.mark.parametrize("kind", MODELS)
def test_logits_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    source = saved(kind, tmp_path / "m")
    ingot.convert(source, tmp_path / "x.gguf")
    found = log_probabilities(tmp_path / "x.gguf")
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    with torch.inference_mode():
        wanted = model(torch.tensor([PROMPT])).logits[0, -1].log_softmax(-1).numpy()
    assert np.isfinite(found).all()
    assert np.abs(found - wanted).max() < 0.02


@pytest.mark.parametrize("rows", [ROWS, 300])
@pytest.mark.parametrize("more", [0, 12])
def test_a_vocabulary_of_another_size_than_the_embedding(rows: int, more: int, tmp_path: Path) -> None:
    words = model_folder.tokenizer(f"<new{number}>" for number in range(more))
    config = {**model_folder.CONFIG, "vocab_size": rows}
    source = model_folder.write(tmp_path / "m", config, model_folder.tensors(rows=rows), words)
    ingot.convert(source, tmp_path / "x.gguf")
    answer = ask("completions", tmp_path / "x.gguf", prompt="the cat")
    assert answer["usage"]["prompt_tokens"] == len(["th", "e", " ", "c", "a", "t"])


def test_tokens_around_a_text(tmp_path: Path) -> None:
    """The token that begins a text by the tokenizer's own template, and the one that ends it."""
    steps = [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}},
             {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}]  # fmt: skip
    settings = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    for number, (processor, count) in enumerate(((None, 6), ({"single": steps}, 8))):
        words = model_folder.tokenizer(processor=processor and {"type": "TemplateProcessing", "pair": [], **processor})
        source = model_folder.write(tmp_path / f"{number}", words=words, settings=settings)
        ingot.convert(source, tmp_path / f"{number}.gguf")
        answer = ask("completions", tmp_path / f"{number}.gguf", prompt="the cat")
        assert answer["usage"]["prompt_tokens"] == count


def test_llama_cpp_opens_no_file_with_names_of_transformers(tmp_path: Path) -> None:
    source = model_folder.write(tmp_path / "m")
    ingot.convert(source, tmp_path / "x.gguf", keep_names=True)
    assert "refused" in ask("load", tmp_path / "x.gguf")
    ingot.convert(source, tmp_path / "y.gguf")
    assert ask("load", tmp_path / "y.gguf") == {"loaded": True}


@pytest.mark.parametrize(
    ("kind", "name"),
    [("qwen3", "blk.0.attn_output.bias"), ("llama", "blk.0.attn_norm.bias"), ("gemma", "output.weight"),
     ("llama", "blk.0.attn_q_norm.weight"), ("llama", "blk.0.attn_k.k_scale")],
)  # fmt: skip
def test_what_is_lost_is_what_llama_cpp_refuses(kind: str, name: str, tmp_path: Path) -> None:
    """It opens no file with a tensor that its graph does not use."""
    ingot.convert(saved(kind, tmp_path / "m"), tmp_path / "x.gguf")
    with ingot.open(tmp_path / "x.gguf") as checkpoint:
        more = {name: np.ones((ROWS, 64) if name == "output.weight" else 64, np.float32)}
        ingot.save(tmp_path / "y.gguf", {**checkpoint, **more}, checkpoint.metadata)
    assert "refused" in ask("load", tmp_path / "y.gguf")


def test_a_scale_of_activations_is_no_obstacle(tmp_path: Path) -> None:
    ingot.convert(saved("llama", tmp_path / "m"), tmp_path / "x.gguf")
    with ingot.open(tmp_path / "x.gguf") as checkpoint:
        more = {"blk.0.ffn_up.input_scale": np.ones(1, np.float32)}
        ingot.save(tmp_path / "y.gguf", {**checkpoint, **more}, checkpoint.metadata)
    assert ask("load", tmp_path / "y.gguf") == {"loaded": True}


@pytest.mark.parametrize("differs", [False, True])
def test_a_sliding_window_is_not_looked_at(differs: bool, tmp_path: Path) -> None:
    """What the note on ``sliding_window`` says: texts longer than the window get other logits."""
    prompt = [number % 250 for number in range(7, 47)]
    source = saved("mistral", tmp_path / "m", sliding_window=8 if differs else 64)
    report = ingot.convert(source, tmp_path / "x.gguf")
    assert any("sliding_window" in note for note in report.notes)
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    with torch.inference_mode():
        wanted = model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1).numpy()
    distance = np.abs(log_probabilities(tmp_path / "x.gguf", prompt) - wanted).max()
    assert (distance > 0.1) if differs else (distance < 0.02)


WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(chr(97 + number) for number in range(26))]
TEXTS = ["a b c", "z y x w v"]


def bert(path: Path, kind: str, **files: Any) -> Path:
    config = transformers.BertConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=len(WORDS),
        max_position_embeddings=64, num_labels=1,
    )  # fmt: skip
    torch.manual_seed(6)
    model = getattr(transformers, kind)(config).eval()
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, mean=float(name.endswith("LayerNorm.weight")), std=0.2)
    model.save_pretrained(path)
    package = pytest.importorskip("tokenizers")
    words = package.Tokenizer(package.models.WordPiece({text: n for n, text in enumerate(WORDS)}, unk_token="[UNK]"))
    words.normalizer, words.pre_tokenizer = (
        package.normalizers.BertNormalizer(),
        package.pre_tokenizers.BertPreTokenizer(),
    )
    words.add_special_tokens(WORDS[:5])
    words.post_processor = package.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    words.save(str(path / "tokenizer.json"))
    names = {f"{role}_token": f"[{role.upper()}]" for role in ("cls", "sep", "pad", "unk", "mask")}
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer", **names}))
    for name, value in files.items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text(json.dumps(value))
    return path


@pytest.mark.parametrize("mode", ["mean", "cls", "lasttoken"])
def test_vectors_of_texts(mode: str, tmp_path: Path) -> None:
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for number, (kind, path) in enumerate(
            [("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")]
        )
    ]
    files = {"modules.json": modules, "1_Pooling/config.json": {"pooling_mode": mode}}
    source = bert(tmp_path / "m", "BertModel", **files)
    ingot.convert(source, tmp_path / "x.gguf")
    answer = ask("embeddings", tmp_path / "x.gguf", texts=TEXTS)
    model, words = transformers.AutoModel.from_pretrained(source), transformers.AutoTokenizer.from_pretrained(source)
    for item, text in zip(answer["data"], TEXTS, strict=True):
        with torch.inference_mode():
            hidden = model(**words(text, return_tensors="pt")).last_hidden_state[0].numpy()
        wanted = {"mean": hidden.mean(0), "cls": hidden[0], "lasttoken": hidden[-1]}[mode]
        wanted = wanted / np.linalg.norm(wanted)
        assert np.abs(np.array(item["embedding"]) - wanted).max() < 5e-3


def test_a_classifier_ranks_as_transformers_does(tmp_path: Path) -> None:
    source = bert(tmp_path / "m", "BertForSequenceClassification")
    ingot.convert(source, tmp_path / "x.gguf")
    answer = ask("rerank", tmp_path / "x.gguf", query="a q", texts=TEXTS)
    found = {item["index"]: item["relevance_score"] for item in answer["results"]}
    model = transformers.AutoModelForSequenceClassification.from_pretrained(source)
    words = transformers.AutoTokenizer.from_pretrained(source)
    for number, text in enumerate(TEXTS):
        inputs = words("a q", text, return_tensors="pt")
        inputs["token_type_ids"] = torch.zeros_like(inputs["input_ids"])  # llama.cpp has one type of tokens
        with torch.inference_mode():
            wanted = model(**inputs).logits[0, 0].item()
        assert abs(found[number] - wanted) < 0.02
