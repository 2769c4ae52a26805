"""The presets hit what they claim, on the tensor names and shapes of real checkpoints."""

from __future__ import annotations

from importlib import resources

import pytest

from ingot.codecs.table import CODECS
from ingot.recipes.choice import Choice, Measured
from ingot.recipes.load import PRESETS, load_recipe
from ingot.recipes.recipe import Decision, Recipe, resolve

HIDDEN, INNER, KV, VOCAB, LAYERS = 288, 768, 96, 4096, 6

Checkpoint = dict[str, tuple[int, ...]]


def llama() -> Checkpoint:
    tensors: Checkpoint = {
        "lm_head.weight": (VOCAB, HIDDEN),
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    for layer in range(LAYERS):
        start = f"model.layers.{layer}."
        tensors |= {
            f"{start}input_layernorm.weight": (HIDDEN,),
            f"{start}mlp.down_proj.weight": (HIDDEN, INNER),
            f"{start}mlp.gate_proj.weight": (INNER, HIDDEN),
            f"{start}mlp.up_proj.weight": (INNER, HIDDEN),
            f"{start}post_attention_layernorm.weight": (HIDDEN,),
            f"{start}self_attn.k_proj.weight": (KV, HIDDEN),
            f"{start}self_attn.o_proj.weight": (HIDDEN, HIDDEN),
            f"{start}self_attn.q_proj.weight": (HIDDEN, HIDDEN),
            f"{start}self_attn.v_proj.weight": (KV, HIDDEN),
        }
    return tensors


def bert() -> Checkpoint:
    width, inner = 384, 1536
    tensors: Checkpoint = {
        "embeddings.LayerNorm.bias": (width,),
        "embeddings.LayerNorm.weight": (width,),
        "embeddings.position_embeddings.weight": (512, width),
        "embeddings.token_type_embeddings.weight": (2, width),
        "embeddings.word_embeddings.weight": (30522, width),
        "pooler.dense.bias": (width,),
        "pooler.dense.weight": (width, width),
    }
    for layer in range(LAYERS):
        start = f"encoder.layer.{layer}."
        for name, shape in {
            "attention.self.query": (width, width),
            "attention.self.key": (width, width),
            "attention.self.value": (width, width),
            "attention.output.dense": (width, width),
            "intermediate.dense": (inner, width),
            "output.dense": (width, inner),
        }.items():
            tensors[f"{start}{name}.weight"] = shape
            tensors[f"{start}{name}.bias"] = shape[:1]
        for name in ("attention.output.LayerNorm", "output.LayerNorm"):
            tensors[f"{start}{name}.weight"] = tensors[f"{start}{name}.bias"] = (width,)
    return tensors


def decisions(recipe: Recipe, tensors: Checkpoint, dtype: str = "bf16") -> dict[str, Decision]:
    return {name: resolve(recipe, name, shape, dtype, LAYERS) for name, shape in tensors.items()}


def bits_of(recipe: Recipe, tensors: Checkpoint) -> dict[str, int]:
    """Name to bits, of the tensors that the recipe quantizes."""
    found = decisions(recipe, tensors)
    return {name: one.choice.options["bits"] for name, one in found.items() if isinstance(one.choice, Choice)}


def quantized(tensors: Checkpoint) -> set[str]:
    """The matrices of attention and feed-forward: what Squish's document quantizes."""
    return {name for name, shape in tensors.items() if len(shape) == 2 and ("layers." in name or "encoder." in name)}


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_parses_and_says_what_it_is(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.name == name
    assert len(recipe.description) > 20
    assert load_recipe(name) is recipe


def test_every_preset_file_is_listed() -> None:
    folder = resources.files("ingot.recipes").joinpath("presets")
    assert {path.name for path in folder.iterdir()} == {f"{name}.toml" for name in PRESETS}


@pytest.mark.parametrize("preset", ["int8", "int4", "int3", "int2"])
@pytest.mark.parametrize("make", [llama, bert])
def test_integer_presets_take_the_large_matrices_and_leave_the_rest(preset: str, make: object) -> None:
    tensors = llama() if make is llama else bert()
    assert set(bits_of(load_recipe(preset), tensors)) == quantized(tensors)


@pytest.mark.parametrize(("preset", "bits"), [("int8", 8), ("int4", 4)])
def test_plain_presets(preset: str, bits: int) -> None:
    assert set(bits_of(load_recipe(preset), llama()).values()) == {bits}


@pytest.mark.parametrize(
    ("preset", "wide", "narrow", "outside"),
    [
        ("q8_0", "q8_0", "q8_0", "q8_0"),
        ("q6_k", "q6_k", "q8_0", "q8_0"),
        ("q5_k", "q5_k", "q5_1", "q8_0"),
        ("q4_k", "q4_k", "q5_0", "q8_0"),
        ("q4_0", "q4_0", "q4_0", "q8_0"),
        ("iq4_xs", "iq4_xs", "iq4_nl", "q8_0"),
    ],
)
def test_presets_of_ggml_take_another_type_where_blocks_do_not_fit(
    preset: str, wide: str, narrow: str, outside: str
) -> None:
    """Columns here are 288, which 32 divides, and 768, which 256 divides too."""
    tensors = llama()
    for name, one in decisions(load_recipe(preset), tensors).items():
        if name not in quantized(tensors) and "embed" not in name and "head" not in name:
            assert one.choice is None
            continue
        assert isinstance(one.choice, Choice)
        expected = outside if name not in quantized(tensors) else wide if tensors[name][1] == INNER else narrow
        assert one.choice.options["type"] == expected, name


def test_int8_is_vectro() -> None:
    choice = resolve(load_recipe("int8"), "model.layers.0.mlp.up_proj.weight", (INNER, HIDDEN), "bf16", LAYERS).choice
    assert isinstance(choice, Choice)
    encoder = CODECS[choice.codec].encoder((INNER, HIDDEN), "bf16", choice.options)
    sizes = {part.role: (part.dtype, part.length) for part in encoder.parts}
    assert sizes["scales"] == ("f32", 4 * INNER)
    assert sizes["packed_weight"][1] == INNER * HIDDEN
    assert set(sizes) == {"packed_weight", "scales"}


def test_int3_mixes() -> None:
    for name, bits in bits_of(load_recipe("int3"), llama()).items():
        edge = "layers.0." in name or "layers.5." in name
        assert bits == (4 if edge or "v_proj" in name or "o_proj" in name else 3), name


@pytest.mark.parametrize("make", [llama, bert])
def test_int2_mixes(make: object) -> None:
    tensors = llama() if make is llama else bert()
    for name, bits in bits_of(load_recipe("int2"), tensors).items():
        edge = ".0." in name or ".5." in name
        sensitive = any(word in name for word in ("v_proj", "o_proj", "value", "attention.output"))
        last = "down_proj" in name or (".output.dense" in name and not sensitive)
        assert bits == (4 if edge or sensitive else 3 if last else 2), name


def test_int2_hybrid_measures_all_but_the_edges() -> None:
    found = decisions(load_recipe("int2-hybrid"), llama())
    for name in llama():
        choice = found[name].choice
        if name not in quantized(llama()):
            assert choice is None
        elif "layers.0." in name or "layers.5." in name:
            assert isinstance(choice, Choice)
            assert choice.options["bits"] == 4
        else:
            assert isinstance(choice, Measured)
            assert (choice.pick, choice.min_snr_db) == ("accurate", 8.7)
            assert [way.options["bits"] for way in choice.candidates] == [2, 4]


def test_int2_hybrid_takes_the_bits_that_it_states() -> None:
    """In .zt; in .squizd a group has an entry of 16 bytes (design of its scale tables)."""
    recipe, shape = load_recipe("int2-hybrid"), (4096, 4096)
    choice = resolve(recipe, "model.layers.1.mlp.up_proj.weight", shape, "bf16", 4).choice
    assert isinstance(choice, Measured)
    stated = []
    for way in choice.candidates:
        encoder = CODECS[way.codec].encoder(shape, "bf16", way.options)
        stored = sum(part.length or 0 for part in encoder.parts)
        assert way.options["bits"] + 16 * 8 / way.options["group"] in (3, 5)
        stated.append(8 * stored / (4096 * 4096))
    assert stated == [2.5, 4.25]
    assert "3 and 5 bits" in recipe.description
    assert "2.5 and 4.25 in .zt" in recipe.description


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("transformer.h.3.attn.c_attn.weight", 4),
        ("transformer.h.3.attn.c_proj.weight", 4),
        ("transformer.h.3.mlp.c_fc.weight", 2),
        ("transformer.h.3.mlp.c_proj.weight", 3),
        ("gpt_neox.layers.3.attention.query_key_value.weight", 4),
        ("gpt_neox.layers.3.mlp.dense_4h_to_h.weight", 3),
        ("model.layers.3.block_sparse_moe.experts.1.w2.weight", 3),
        ("model.layers.3.block_sparse_moe.experts.1.w1.weight", 2),
        ("decoder.block.3.layer.2.DenseReluDense.wo.weight", 3),
        ("blk.3.attn_q.weight", 2),
        ("blk.3.attn_v.weight", 4),
        ("blk.3.ffn_down.weight", 3),
        ("layers.3.attention.wk.weight", 2),
        ("layers.3.attention.wo.weight", 4),
        ("backbone.layers.3.mixer.in_proj.weight", 4),
    ],
)
def test_int2_knows_other_namings(name: str, bits: int) -> None:
    assert bits_of(load_recipe("int2"), {name: (512, 512)}) == {name: bits}


@pytest.mark.parametrize("make", [llama, bert])
def test_astc_takes_what_int4_takes(make: object) -> None:
    tensors = llama() if make is llama else bert()
    taken = {name: one.choice for name, one in decisions(load_recipe("astc"), tensors).items() if one.choice}
    assert set(taken) == quantized(tensors)
    assert {(choice.codec, choice.options["footprint"]) for choice in taken.values()} == {("astc", "6x6")}


@pytest.mark.parametrize(
    "preset", ["int8-fine", "int8", "int4", "int3", "int2", "bf16", "astc", "palette4-grouped", "sparse50"]
)
def test_what_is_no_weight_stays(preset: str) -> None:
    recipe = load_recipe(preset)
    name, shape = "model.layers.0.mlp.up_proj.weight", (512, 512)
    for dtype in ("i8", "u8", "i32", "bool", "f8_e4m3fn", "f4_e2m1fn", "complex64", "posit16"):
        assert resolve(recipe, name, shape, dtype, LAYERS).choice is None
    for other in ("model.layers.0.mlp.gate.e_score_correction_bias", "backbone.layers.0.mixer.A_log"):
        assert resolve(recipe, other, shape, "f32", LAYERS).choice is None
    for side in ("qzeros", "scales", "weight_scale", "weight_scale_inv"):
        assert resolve(recipe, f"model.layers.0.mlp.up_proj.{side}", shape, "f16", LAYERS).choice is None


@pytest.mark.parametrize("preset", ["palette8", "palette4-grouped", "palette4", "sparse50"])
@pytest.mark.parametrize("make", [llama, bert])
def test_palettes_and_masks_take_what_int4_takes(preset: str, make: object) -> None:
    tensors = llama() if make is llama else bert()
    taken = {name: one.choice for name, one in decisions(load_recipe(preset), tensors).items() if one.choice}
    assert set(taken) == quantized(tensors)
    assert {choice.codec for choice in taken.values()} == {"sparse_mask" if preset == "sparse50" else "palette"}


@pytest.mark.parametrize(
    "preset", ["int8-fine", "int8", "int4", "int3", "int2", "astc", "palette4", "palette8", "sparse50"]
)
def test_small_narrow_and_unknown_tensors_stay(preset: str) -> None:
    recipe = load_recipe(preset)
    name = "model.layers.0.mlp.up_proj.weight"
    assert resolve(recipe, name, (32, 64), "f32", LAYERS).choice is None
    assert resolve(recipe, name, (4096, 16), "f32", LAYERS).choice is None
    assert resolve(recipe, name, (4096,), "f32", LAYERS).choice is None
    assert resolve(recipe, "something.weight", (4096, 4096), "f32", LAYERS).choice is None
    assert resolve(recipe, name, (8, 4096, 64), "f32", LAYERS).choice is not None


PACKAGE = {
    "const_0_to_fp16": (64, 32, 3, 3),  # a convolution with its norm folded in
    "conv2_weight_to_fp16": (64, 32, 3, 3),
    "conv_seq_weight_to_fp16": (64, 64, 3),
    "linear_0_weight_0_to_fp16": (128, 64),
    "fc1_weight_to_fp16": (128, 64),
    "model_layers_3_self_attn_q_proj_weight_to_fp16": (128, 128),
    "lm_head_weight_to_fp16": (500, 128),
}
BESIDE = {
    "emb_weight_to_fp16": (500, 128),
    "model_embed_tokens_weight_to_fp16": (500, 128),
    "model_layers_3_input_layernorm_weight_to_fp16": (4096,),
    "fc1_bias_to_fp16": (4096,),
    "linear_0_bias_0_to_fp16": (4096,),
    "small_weight_to_fp16": (4, 8),
}


@pytest.mark.parametrize("preset", ["ane-m1", "ane-m4", "ane-m5", "ane-int8"])
@pytest.mark.parametrize("dtype", ["f16", "f32"])
def test_presets_for_the_engine_take_the_kernels_of_a_core_ml_package(preset: str, dtype: str) -> None:
    found = decisions(load_recipe(preset), PACKAGE | BESIDE, dtype)
    assert {name for name, one in found.items() if one.choice} == set(PACKAGE)
    for name, one in found.items():
        ways = one.choice.candidates if isinstance(one.choice, Measured) else [one.choice] if one.choice else []
        for way in ways:
            encoder = CODECS[way.codec].encoder(PACKAGE[name], dtype, way.options)
            assert {part.dtype for part in encoder.parts} <= {"u8", "i8", dtype, "f16"}


def test_int8_for_the_engine_has_a_scale_per_output_channel_of_the_weights_type() -> None:
    choice = resolve(load_recipe("ane-int8"), "conv2_weight", (64, 32, 3, 3), "f32", 0).choice
    assert isinstance(choice, Choice)
    for dtype, size in (("f16", 2), ("f32", 4)):
        encoder = CODECS[choice.codec].encoder((64, 32, 3, 3), dtype, choice.options)
        assert {part.role: part.length for part in encoder.parts} == {
            "packed_weight": 64 * 32 * 9,
            "scales": 64 * size,
        }


def test_keep_keeps_and_lossless_is_exact_on_everything() -> None:
    for dtype in ("f32", "i64", "bool", "f8_e5m2"):
        assert resolve(load_recipe("keep"), "a", (3,), dtype, 0) == Decision(None, "no rule", None)
        choice = resolve(load_recipe("lossless"), "a", (3,), dtype, 0).choice
        assert isinstance(choice, Measured)
        assert choice.pick == "smallest"
        assert not choice.changes_values
        assert Choice("dense") in choice.candidates


def test_tca_tbe_takes_bf16_matrices() -> None:
    recipe = load_recipe("tca-tbe")
    for name, one in decisions(recipe, llama()).items():
        assert (one.choice is None) == ("norm" in name), name
    choice = resolve(recipe, "a", (3, 4), "bf16", 0).choice
    assert isinstance(choice, Measured)
    assert choice.pick == "smallest"
    assert choice.candidates == (Choice("tca_tbe"),)
    assert resolve(recipe, "a", (64, 64), "f32", 0).choice is None


def test_bf16_takes_every_wider_float() -> None:
    for name, one in decisions(load_recipe("bf16"), llama(), "f32").items():
        assert isinstance(one.choice, Choice), name
        assert one.choice.options == {"dtype": "bf16"}


@pytest.mark.parametrize(("preset", "claim"), [("int8", 8.01), ("int4", 4.25), ("int3", 3.40), ("int2", 2.96)])
def test_bits_per_weight_are_those_of_the_description(preset: str, claim: float) -> None:
    """Over the quantized matrices of Llama-3-8B: 32 layers, hidden 4096, inner 14336, 1024 keys and values."""
    recipe = load_recipe(preset)
    assert f"{claim:.2f} bits per weight" in recipe.description.replace("\n", " ")
    shapes = {
        "self_attn.q_proj": (4096, 4096),
        "self_attn.k_proj": (1024, 4096),
        "self_attn.v_proj": (1024, 4096),
        "self_attn.o_proj": (4096, 4096),
        "mlp.gate_proj": (14336, 4096),
        "mlp.up_proj": (14336, 4096),
        "mlp.down_proj": (4096, 14336),
    }
    stored = weights = 0
    for layer in range(32):
        for name, shape in shapes.items():
            choice = resolve(recipe, f"model.layers.{layer}.{name}.weight", shape, "bf16", 32).choice
            assert isinstance(choice, Choice)
            encoder = CODECS[choice.codec].encoder(shape, "bf16", choice.options)
            stored += sum(part.length or 0 for part in encoder.parts)
            weights += shape[0] * shape[1]
    assert round(8 * stored / weights, 2) == claim


def test_squish_int8_packs_196_of_the_338_tensors_of_qwen25_15b() -> None:
    """The document says 249 and 89; its own list of what stays (embedding, norms, biases) leaves 28 x 7 matrices."""
    shapes = {"self_attn.q_proj": (1536, 1536), "self_attn.k_proj": (256, 1536), "self_attn.v_proj": (256, 1536),
              "self_attn.o_proj": (1536, 1536), "mlp.gate_proj": (8960, 1536), "mlp.up_proj": (8960, 1536),
              "mlp.down_proj": (1536, 8960)}  # fmt: skip
    names = {"model.embed_tokens.weight": (151936, 1536), "model.norm.weight": (1536,)}
    for layer in (f"model.layers.{index}." for index in range(28)):
        names |= {f"{layer}{name}.weight": shape for name, shape in shapes.items()}
        names |= {
            f"{layer}{name}.bias": shape[:1]
            for name, shape in shapes.items()
            if name.endswith(("q_proj", "k_proj", "v_proj"))
        }
        names |= {f"{layer}{name}_layernorm.weight": (1536,) for name in ("input", "post_attention")}
    assert len(names) == 338
    recipe = load_recipe("squish-int8")
    found = [resolve(recipe, name, shape, "bf16", 28).choice for name, shape in names.items()]
    assert sum(isinstance(choice, Choice) and choice.codec == "affine" for choice in found) == 196
