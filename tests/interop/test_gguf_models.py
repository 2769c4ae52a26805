"""A model as Hugging Face has it and as llama.cpp has it: one way, both ways, and read by transformers and gguf."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

import ingot
from ingot.core.numeric.dtypes import numpy_dtype
from ingot.errors import UsageError
from ingot.runtime.loading.transformers_tokenizer import load_tokenizer
from ingot.translate import tokenizer
from tests.support.entries import stored_entries

gguf = pytest.importorskip("gguf")

HEADS, KV, HIDDEN, INNER, VOCAB, LAYERS = 4, 2, 64, 96, 64, 2
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": INNER,
    "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV, "vocab_size": VOCAB,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "bos_token_id": 0, "eos_token_id": 0, "head_dim": HIDDEN // HEADS, "dtype": "bfloat16", "hidden_act": "silu",
}  # fmt: skip


def words() -> dict[str, Any]:
    """A byte-level tokenizer of single letters and a few merges."""
    letters = [chr(ord("a") + number) for number in range(26)] + ["\u0120"]
    merges = [["\u0120", "a"], ["t", "h"], ["th", "e"]]
    texts = ["<end>", *letters, *("".join(pair) for pair in merges)]
    return {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None,
        "added_tokens": [{"id": 0, "content": "<end>", "special": True, "single_word": False, "lstrip": False,
                          "rstrip": False, "normalized": False}],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                  "vocab": {text: number for number, text in enumerate(texts)}, "merges": merges},
    }  # fmt: skip


def weights(experts: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(5)

    def matrix(rows: int, cols: int = HIDDEN) -> Any:
        return (rng.standard_normal((rows, cols)) * 0.1).astype(ml_dtypes.bfloat16)

    def norm() -> Any:
        return (1 + rng.standard_normal(HIDDEN) * 0.1).astype(ml_dtypes.bfloat16)

    found = {"model.embed_tokens.weight": matrix(VOCAB)}
    for layer in range(LAYERS):
        start = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"{start}{name}.weight"] = norm()
        for name, rows in (("q", HIDDEN), ("k", HIDDEN // HEADS * KV), ("v", HIDDEN // HEADS * KV), ("o", HIDDEN)):
            found[f"{start}self_attn.{name}_proj.weight"] = matrix(rows)
        if experts:
            found[f"{start}block_sparse_moe.gate.weight"] = matrix(experts)
            for number in range(experts):
                for name, shape in (("w1", (INNER, HIDDEN)), ("w2", (HIDDEN, INNER)), ("w3", (INNER, HIDDEN))):
                    found[f"{start}block_sparse_moe.experts.{number}.{name}.weight"] = matrix(*shape)
        else:
            for name, shape in (("gate", (INNER, HIDDEN)), ("up", (INNER, HIDDEN)), ("down", (HIDDEN, INNER))):
                found[f"{start}mlp.{name}_proj.weight"] = matrix(*shape)
    return {**found, "model.norm.weight": norm(), "lm_head.weight": matrix(VOCAB)}


def folder(path: Path, tensors: dict[str, Any], **config: Any) -> Path:
    path.mkdir()
    ingot.save(path / "model.safetensors", tensors, {"format": "pt"})
    (path / "config.json").write_text(json.dumps({**CONFIG, **config}))
    (path / "tokenizer.json").write_text(json.dumps(words(), ensure_ascii=False))
    (path / "tokenizer_config.json").write_text(
        '{"bos_token": "<end>", "eos_token": "<end>", "chat_template": "{{ m }}"}'
    )
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return folder(tmp_path / "model", weights())


def stored(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    with ingot.open(path) as checkpoint:
        return {name: (tensor.dtype, tensor.shape, tensor.numpy().tobytes()) for name, tensor in checkpoint.items()}


def test_a_model_goes_to_gguf_and_comes_back(model: Path, tmp_path: Path) -> None:
    report = ingot.convert(model, tmp_path / "x.gguf")
    assert report.exact
    assert any("names of llama.cpp" in note for note in report.notes)
    ingot.convert(tmp_path / "x.gguf", tmp_path / "back", format="safetensors")
    assert stored(tmp_path / "back") == stored(model)
    for name in ("config.json", "tokenizer_config.json"):
        assert json.loads((tmp_path / "back" / name).read_text()) == json.loads((model / name).read_text())
    before, after = (Tokenizer.from_file(str(folder / "tokenizer.json")) for folder in (model, tmp_path / "back"))
    assert after.get_vocab() == before.get_vocab()
    for text in ("A b", "the  end\n", "", "ä 1234 日本"):
        assert after.encode(text).ids == before.encode(text).ids


def test_a_file_is_compared_with_a_folder_under_the_folder_s_names(model: Path, tmp_path: Path) -> None:
    ingot.convert(model, tmp_path / "m.gguf")
    ingot.convert(model, tmp_path / "other.gguf", "q8_0")
    assert ingot.compare(model, tmp_path / "m.gguf").same
    report = ingot.compare(tmp_path / "other.gguf", model)
    assert {item.name for item in report.tensors} == set(ingot.open(model))
    assert {item.status for item in report.tensors} <= {"identical", "equal", "differs"}
    assert not report.same


def test_the_package_reads_names_rows_and_numbers_as_llama_cpp_has_them(model: Path, tmp_path: Path) -> None:
    ingot.convert(model, tmp_path / "x.gguf")
    reader = gguf.GGUFReader(tmp_path / "x.gguf")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert {"token_embd.weight", "output.weight", "output_norm.weight", "blk.1.ffn_down.weight"} <= set(tensors)
    assert tensors["blk.0.attn_norm.weight"].tensor_type == gguf.GGMLQuantizationType.F32
    with ingot.open(model) as source:
        for part, heads in (("q", HEADS), ("k", KV)):
            rows = source[f"model.layers.1.self_attn.{part}_proj.weight"].numpy("f32")
            # convert_hf_to_gguf.py's own words
            wanted = rows.reshape(heads, 2, len(rows) // heads // 2, -1).swapaxes(1, 2).reshape(rows.shape)
            found = gguf.dequantize(tensors[f"blk.1.attn_{part}.weight"].data, gguf.GGMLQuantizationType.BF16)
            assert np.array_equal(found, wanted)
    fields = {key: reader.get_field(key).contents() for key in reader.fields if not key.startswith("GGUF.")}
    assert fields["llama.attention.head_count_kv"] == KV
    assert fields["llama.rope.dimension_count"] == HIDDEN // HEADS
    assert fields["llama.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-5)
    assert fields["tokenizer.ggml.model"] == "gpt2"
    assert fields["tokenizer.ggml.pre"] == "gpt-2"
    assert fields["tokenizer.ggml.tokens"][28:31] == ["\u0120a", "th", "the"]
    assert fields["tokenizer.ggml.merges"] == ["\u0120 a", "t h", "th e"]
    assert fields["tokenizer.ggml.token_type"][:2] == [3, 1]
    assert fields["tokenizer.ggml.token_type"][31:] == [5] * (VOCAB - 31)
    assert fields["tokenizer.chat_template"] == "{{ m }}"
    assert fields["general.file_type"] == 32


@pytest.mark.parametrize("recipe", ["f16", "bf16"])
def test_no_recipe_changes_what_llama_cpp_wants_in_f32(model: Path, tmp_path: Path, recipe: str) -> None:
    """It ends where it is to multiply by norms in f16."""
    ingot.convert(model, tmp_path / "x.gguf", recipe)
    ingot.convert(tmp_path / "x.gguf", tmp_path / "y.gguf", recipe)
    for name in ("x.gguf", "y.gguf"):
        with ingot.open(tmp_path / name) as made:
            assert made["token_embd.weight"].dtype == recipe
            assert {tensor.dtype for tensor in made.values() if len(tensor.shape) == 1} == {"f32"}


def test_a_file_without_files_of_ours_gets_those_that_it_stands_for(model: Path, tmp_path: Path) -> None:
    """As llama.cpp's own converter writes one."""
    ingot.convert(model, tmp_path / "x.gguf")
    with ingot.open(tmp_path / "x.gguf") as checkpoint:
        kept = {
            key: value
            for key, value in checkpoint.metadata.items()
            if "companion" not in key and "huggingface" not in key
        }
        ingot.save(tmp_path / "y.gguf", dict(checkpoint), {**kept, "general.license": "mit"})
    report = ingot.convert(tmp_path / "y.gguf", tmp_path / "back", format="safetensors")
    assert any("general.license" in note for note in report.notes)
    assert stored(tmp_path / "back") == stored(model)
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert {key: config[key] for key in CONFIG} == CONFIG
    made = json.loads((tmp_path / "back" / "tokenizer.json").read_text())
    assert made["model"] == words()["model"]
    assert made["pre_tokenizer"] == words()["pre_tokenizer"]
    assert made["added_tokens"] == words()["added_tokens"]
    settings = json.loads((tmp_path / "back" / "tokenizer_config.json").read_text())
    assert (settings["bos_token"], settings["chat_template"]) == ("<end>", "{{ m }}")


def test_experts_are_stacked_and_taken_apart(tmp_path: Path) -> None:
    tensors = weights(experts=3)
    model = folder(tmp_path / "moe", tensors, model_type="mixtral", num_local_experts=3, num_experts_per_tok=2)
    ingot.convert(model, tmp_path / "x.gguf")
    with ingot.open(tmp_path / "x.gguf") as checkpoint:
        assert checkpoint["blk.1.ffn_down_exps.weight"].shape == (3, HIDDEN, INNER)
        assert checkpoint["blk.1.ffn_gate_inp.weight"].dtype == "f32"
        assert checkpoint.metadata["llama.expert_count"] == 3
    ingot.convert(tmp_path / "x.gguf", tmp_path / "back", format="safetensors")
    assert stored(tmp_path / "back") == stored(model)


def test_gemma_s_norms_are_one_more_there(tmp_path: Path) -> None:
    tensors = weights()
    del tensors["lm_head.weight"]
    model = folder(tmp_path / "gemma", tensors, model_type="gemma", tie_word_embeddings=True)
    ingot.convert(model, tmp_path / "x.gguf")
    with ingot.open(tmp_path / "x.gguf") as checkpoint:
        norm = tensors["model.norm.weight"].astype(np.float32)
        assert np.array_equal(checkpoint["output_norm.weight"].numpy(), norm + np.float32(1))
        assert np.array_equal(
            checkpoint["blk.0.attn_q.weight"].numpy(), tensors["model.layers.0.self_attn.q_proj.weight"]
        )
    ingot.convert(tmp_path / "x.gguf", tmp_path / "back", format="safetensors")
    assert stored(tmp_path / "back") == stored(model)


def test_llama_3_s_rotary_scaling_is_a_tensor_there(tmp_path: Path) -> None:
    rope_utils, configs = (
        pytest.importorskip(f"transformers.{name}") for name in ("modeling_rope_utils", "models.llama")
    )
    scaling = {
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }  # fmt: skip
    model = folder(tmp_path / "model", weights(), rope_parameters=scaling)
    report = ingot.convert(model, tmp_path / "x.gguf")
    assert not any("rope" in note for note in report.notes)
    config = configs.LlamaConfig(**{**CONFIG, "rope_parameters": dict(scaling)})
    scaled, _ = rope_utils.ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    size = HIDDEN // HEADS
    plain = 1 / 10000.0 ** (np.arange(0, size, 2) / size)
    with ingot.open(tmp_path / "x.gguf") as checkpoint:
        factors = checkpoint["rope_freqs.weight"]
        assert (factors.dtype, factors.shape) == ("f32", (size // 2,))
        assert np.allclose(plain / factors.numpy(), scaled.numpy(), rtol=1e-5)
        assert factors.numpy().min() == 1
        assert factors.numpy().max() == 8
    ingot.convert(tmp_path / "x.gguf", tmp_path / "back", format="safetensors")
    assert stored(tmp_path / "back") == stored(model)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["rope_parameters"] == scaling


def test_rows_move_in_blocks_and_come_back_from_them(model: Path, tmp_path: Path) -> None:
    """Packed integers are put in order as they lie: nothing is decoded."""
    ingot.convert(model, tmp_path / "q", recipe="int4", format="zt")
    ingot.convert(tmp_path / "q", tmp_path / "x.gguf")
    with ingot.open(tmp_path / "q") as source, ingot.open(tmp_path / "x.gguf") as made:
        rows = source["model.layers.0.self_attn.q_proj.weight"]
        found = made["blk.0.attn_q.weight"]
        assert (rows.codec, found.codec) == ("affine", "ggml_blocks")
        wanted = rows.numpy("f32").reshape(HEADS, 2, -1, HIDDEN).swapaxes(1, 2).reshape(rows.shape)
        assert np.array_equal(found.numpy("f32"), wanted)
    report = ingot.convert(tmp_path / "x.gguf", tmp_path / "back", format="mlx")
    assert "repacked" in {item.action for item in report.tensors}
    with ingot.open(tmp_path / "q") as source, ingot.open(tmp_path / "back") as made:
        for name in source:
            assert np.array_equal(source[name].numpy("f32"), made[name].numpy("f32")), name


@pytest.mark.parametrize("words", ["gptq", "awq", "compressed-tensors"])
def test_rows_of_words_move_packed(model: Path, tmp_path: Path, words: str) -> None:
    """Words of several rows or columns are put in order as integers too."""
    rule = 'roles = ["attention"]\ncodec = "affine"\noptions = { bits = 4, group = 32, scales = "f16" }'
    (tmp_path / "r.toml").write_text(f'name = "n"\ndescription = "n"\n[[rules]]\nlabel = "n"\n{rule}\n')
    ingot.convert(model, tmp_path / "q", tmp_path / "r.toml")
    ingot.convert(tmp_path / "q", tmp_path / "words", format=words)
    for source, target in (("q", "x.gguf"), ("words", "y.gguf")):
        ingot.convert(tmp_path / source, tmp_path / target)
    with ingot.open(tmp_path / "x.gguf") as wanted, ingot.open(tmp_path / "y.gguf") as made:
        for part in ("q", "k", "v"):
            name = f"blk.1.attn_{part}.weight"
            assert made[name].params["type"] == "q4_0"
            assert bytes(made[name].parts["blocks"].view()) == bytes(wanted[name].parts["blocks"].view())


def as_nvfp4(model: Path, tmp_path: Path, second: str) -> None:
    """Write the model to ``packed`` with q and up as NVFP4, whose scales are multiplied or divided by a second one."""
    options = f'{{ table = "f4_e2m1fn", group = 16, scales = "f8_e4m3fn", second = "{second}" }}'
    rule = f'match = ["*self_attn.q_proj.weight", "*up_proj.weight"]\ncodec = "scaled_codebook"\noptions = {options}'
    (tmp_path / "nvfp4.toml").write_text(f'name = "n"\ndescription = "n"\n[[rules]]\nlabel = "n"\n{rule}\n')
    ingot.convert(model, tmp_path / "packed", tmp_path / "nvfp4.toml")


def test_second_scales_of_nvfp4_are_tensors_of_their_own_there(model: Path, tmp_path: Path) -> None:
    """As llama.cpp has them; the package's own decoder gives the values, and everything comes back as it was."""
    as_nvfp4(model, tmp_path, "multiply")
    ingot.convert(tmp_path / "packed", tmp_path / "modelopt", format="modelopt")
    report = ingot.convert(tmp_path / "modelopt", tmp_path / "m.gguf")
    assert report.actions["repacked"] == 2 * LAYERS
    read = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    up = read["blk.0.ffn_up.weight"]
    assert up.tensor_type == gguf.GGMLQuantizationType.NVFP4
    values = gguf.quants.dequantize(up.data, up.tensor_type) * read["blk.0.ffn_up.scale"].data
    with ingot.open(tmp_path / "packed") as packed:
        tensor = packed["model.layers.0.mlp.up_proj.weight"]
        assert np.allclose(values, tensor.numpy("f32"), rtol=1e-6)
    ingot.convert(tmp_path / "m.gguf", tmp_path / "back", format="modelopt")
    wanted, found = (stored_entries(tmp_path / name) for name in ("modelopt", "back"))
    packed_names = [name for name in wanted if "scale" in name or name.endswith(("q_proj.weight", "up_proj.weight"))]
    assert len(packed_names) == 6 * LAYERS
    assert all(found[name] == wanted[name] for name in packed_names)


def test_scales_that_are_divided_are_multiplied_by_a_reciprocal_there(model: Path, tmp_path: Path) -> None:
    """compressed-tensors' NVFP4: indices and scales are the same, values in the tensor's own type, and that is told."""
    as_nvfp4(model, tmp_path, "divide")
    ingot.convert(tmp_path / "packed", tmp_path / "divided", format="compressed-tensors")
    report = ingot.convert(tmp_path / "divided", tmp_path / "m.gguf")
    assert report.actions["repacked"] == 2 * LAYERS
    read = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    up = read["blk.0.ffn_up.weight"]
    values = gguf.quants.dequantize(up.data, up.tensor_type) * read["blk.0.ffn_up.scale"].data
    with ingot.open(tmp_path / "divided") as packed, ingot.open(tmp_path / "m.gguf") as made:
        tensor = packed["model.layers.0.mlp.up_proj.weight"]
        kind = numpy_dtype(tensor.dtype)
        assert np.array_equal(values.astype(np.float32).astype(kind), tensor.numpy())
        rounded = not np.array_equal(values, tensor.numpy("f32"))
        assert rounded <= any("up_proj.weight" in note for note in report.notes)
        assert "blk.0.ffn_up.scale" in made


def test_names_stay_if_that_is_asked_for(model: Path, tmp_path: Path) -> None:
    report = ingot.convert(model, tmp_path / "x.gguf", keep_names=True)
    assert any("llama.cpp does not open" in note for note in report.notes)
    with ingot.open(tmp_path / "x.gguf") as checkpoint:
        assert "model.norm.weight" in checkpoint


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"num_attention_heads": 3}, "model.shape"),
        ({"hidden_size": "64"}, "architecture.config"),
        ({"num_hidden_layers": 0}, "architecture.config"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(model: Path, tmp_path: Path, change: dict[str, Any], rule: str) -> None:
    (model / "config.json").write_text(json.dumps({**CONFIG, **change}))
    with pytest.raises(ingot.IngotError) as caught:
        ingot.convert(model, tmp_path / "x.gguf")
    assert caught.value.rule == rule


def test_sentencepiece_s_tokens_keep_their_order_of_merges() -> None:
    texts = ["<unk>", "<s>", "<0x41>", "\u2581", "a", "b", "\u2581a", "ab", "\u2581ab"]
    merges = ["\u2581 a", "a b", "\u2581a b"]
    words = tokenizer.to_metadata(
        {
            "added_tokens": [{"id": 1, "content": "<s>", "special": True}],
            "model": {
                "type": "BPE",
                "byte_fallback": True,
                "unk_token": "<unk>",
                "merges": merges,
                "vocab": {text: number for number, text in enumerate(texts)},
            },
        }
    )
    assert not words.dropped
    assert words.typed["tokenizer.ggml.token_type"][1] == [2, 3, 6, 1, 1, 1, 1, 1, 1]
    assert words.typed["tokenizer.ggml.scores"][1] == [0, 0, 0, 0, 0, 0, -0.0, -1, -2]
    files, _ = tokenizer.to_files({key: value for key, (_, value) in words.typed.items()})
    assert [" ".join(pair) for pair in files["tokenizer.json"]["model"]["merges"]][:2] == merges[:2]


@pytest.mark.slow
def test_transformers_gives_the_same_tokens_and_logits(model: Path, tmp_path: Path) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    ingot.convert(model, tmp_path / "x.gguf")
    ingot.convert(tmp_path / "x.gguf", tmp_path / "back", format="safetensors")
    tokens = torch.tensor([[5, 9, 2, 30, 11, 7]])

    def logits(path: Path, **more: Any) -> Any:
        loaded = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **more)
        with torch.no_grad():
            return loaded(tokens).logits.numpy()

    wanted = logits(model)
    assert np.array_equal(logits(tmp_path / "back"), wanted)
    if find_spec("accelerate"):  # which transformers wants for a GGUF file of its own
        assert np.allclose(logits(tmp_path, gguf_file="x.gguf"), wanted, atol=1e-5)
    here, there = (transformers.AutoTokenizer.from_pretrained(path) for path in (model, tmp_path / "back"))
    assert here("the a th")["input_ids"] == there("the a th")["input_ids"]


def test_a_file_runs_as_the_folder_that_it_was_made_from(model: Path, tmp_path: Path) -> None:
    ingot.convert(model, tmp_path / "x.gguf")
    for path in (tmp_path / "x.gguf", tmp_path):  # the file, and the folder that it lies in
        loaded, wanted = ingot.load_model(path, dtype="f32"), ingot.load_model(model, dtype="f32")
        tokens = load_tokenizer(path)("the end of the", return_tensors="pt").input_ids
        assert tokens.tolist() == load_tokenizer(model)("the end of the", return_tensors="pt").input_ids.tolist()
        with torch.inference_mode():
            assert torch.equal(loaded(tokens).logits, wanted(tokens).logits)
        assert Path(loaded.config.name_or_path).exists()
    assert load_tokenizer(model)("the").input_ids == load_tokenizer(model / "model.safetensors")("the").input_ids


def test_a_file_with_another_folder_s_config(model: Path, tmp_path: Path) -> None:
    ingot.convert(model, tmp_path / "x.gguf")
    other = tmp_path / "other"
    other.mkdir()
    values = json.loads((model / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**values, "rms_norm_eps": 0.5}))
    assert ingot.load_model(tmp_path / "x.gguf", model_dir=other).config.rms_norm_eps == 0.5


def test_a_narrower_type_needs_no_leave(model: Path, tmp_path: Path) -> None:
    """Whoever takes a model from llama.cpp wants bf16; only a second quantization has to be asked for twice."""
    ingot.convert(model, tmp_path / "x.gguf", "q8_0")
    report = ingot.convert(tmp_path / "x.gguf", tmp_path / "back", "bf16", format="safetensors")
    assert not report.exact
    with pytest.raises(UsageError) as caught:
        ingot.convert(tmp_path / "x.gguf", tmp_path / "again", "int4")
    assert caught.value.rule == "convert.requantize"
