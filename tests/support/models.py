"""Tiny models of transformers with random weights, made in a moment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GPT2: dict[str, Any] = {
    "vocab_size": 64,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
BERT = {key: value for key, value in SMALL.items() if not key.startswith(("num_key", "bos", "eos"))}

KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", SMALL),
    "tied qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {**SMALL, "tie_word_embeddings": True}),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", GPT2),
    "bert": ("BertConfig", "BertModel", BERT),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {**SMALL, "num_local_experts": 4}),
}


def make(kind: str, folder: Path, dtype: str = "bfloat16", **values: Any) -> Path:
    """Save a model of that kind with random weights as transformers does; return its folder."""
    config_name, model_name, usual = KINDS[kind]
    config = getattr(transformers, config_name)(**{**usual, **values}, dtype=dtype)
    torch.manual_seed(7)
    model = getattr(transformers, model_name)(config).to(getattr(torch, dtype))
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:  # norms and biases begin as ones and zeros, which any mistake would keep
            torch.nn.init.normal_(parameter, 1.0 if name.endswith("weight") else 0.0, 0.1)
    model.save_pretrained(folder)
    return folder


def make_tokenizer(folder: Path, *, begins: bool = True) -> int:
    """Save a byte-level tokenizer, as tokenizer.json and tokenizer_config.json; return the size of its vocabulary.

    Runs of digits stay together and nothing is normalized, unlike in some classes of transformers. Where ``begins``,
    it puts ``<s>`` in front of every text, as those of Llama and Gemma do.
    """
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    merges = [("1", "2"), ("12", "3"), ("t", "h"), ("th", "e"), ("\u0120", "a"), ("i", "n")]
    names = ["<pad>", "<s>", "</s>", *letters, *(left + right for left, right in merges)]
    vocabulary = {name: number for number, name in enumerate(names)}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=merges))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(names[:3])
    if begins:
        made.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "TokenizersBackend",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "chat_template": "{% for message in messages %}[{{ message['content'] }}]{% endfor %}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return len(vocabulary)


def tokens() -> Any:
    return torch.tensor([[5, 9, 33, 60, 2, 17, 41, 8]])


def output_of(model: Any) -> Any:
    """Return the logits, or the last hidden state where there is no head."""
    with torch.inference_mode():
        output = model(tokens())
    return output.logits if hasattr(output, "logits") else output.last_hidden_state
