"""Layer and role of tensor names, on the names of the checkpoints that people have."""

from __future__ import annotations

import pytest

from ingot.naming.names import ROLES, layer_of, role_of

CASES = [
    # Llama, Mistral, Qwen, Gemma, Phi
    ("model.embed_tokens.weight", None, "embedding"),
    ("model.layers.0.self_attn.q_proj.weight", 0, "attention"),
    ("model.layers.17.self_attn.o_proj.weight", 17, "attention"),
    ("model.layers.0.self_attn.q_proj.bias", 0, "bias"),
    ("model.layers.0.self_attn.q_norm.weight", 0, "norm"),
    ("model.layers.0.self_attn.rotary_emb.inv_freq", 0, "other"),
    ("model.layers.0.self_attn.qkv_proj.weight", 0, "attention"),
    ("model.layers.0.mlp.gate_proj.weight", 0, "mlp"),
    ("model.layers.0.mlp.gate_up_proj.weight", 0, "mlp"),
    ("model.layers.9.mlp.down_proj.weight", 9, "mlp"),
    ("model.layers.0.input_layernorm.weight", 0, "norm"),
    ("model.layers.0.post_attention_layernorm.weight", 0, "norm"),
    ("model.layers.0.pre_feedforward_layernorm.weight", 0, "norm"),
    ("model.norm.weight", None, "norm"),
    ("lm_head.weight", None, "head"),
    ("lm_head.bias", None, "bias"),
    ("model.final_layernorm.weight", None, "norm"),
    ("layers.3.attention.wq.weight", 3, "attention"),
    ("layers.3.feed_forward.w1.weight", 3, "mlp"),
    ("tok_embeddings.weight", None, "embedding"),
    ("output.weight", None, "head"),
    ("model.language_model.layers.3.self_attn.k_proj.weight", 3, "attention"),
    # GPT-2, GPT-J, GPT-NeoX, Falcon, OPT, Bloom, MPT
    ("wte.weight", None, "embedding"),
    ("transformer.wpe.weight", None, "embedding"),
    ("h.0.attn.c_attn.weight", 0, "attention"),
    ("h.0.attn.bias", 0, "bias"),
    ("h.11.attn.masked_bias", 11, "bias"),
    ("transformer.h.11.mlp.c_proj.weight", 11, "mlp"),
    ("h.0.ln_1.weight", 0, "norm"),
    ("h.0.ln_2.bias", 0, "norm"),
    ("ln_f.weight", None, "norm"),
    ("transformer.h.2.mlp.fc_in.weight", 2, "mlp"),
    ("gpt_neox.embed_in.weight", None, "embedding"),
    ("embed_out.weight", None, "head"),
    ("gpt_neox.layers.4.attention.query_key_value.weight", 4, "attention"),
    ("gpt_neox.layers.4.attention.dense.weight", 4, "attention"),
    ("gpt_neox.layers.4.mlp.dense_h_to_4h.weight", 4, "mlp"),
    ("transformer.h.0.self_attention.dense.weight", 0, "attention"),
    ("transformer.h.0.ln_attn.weight", 0, "norm"),
    ("transformer.h.0.ln_mlp.bias", 0, "norm"),
    ("transformer.word_embeddings.weight", None, "embedding"),
    ("transformer.word_embeddings_layernorm.weight", None, "norm"),
    ("model.decoder.layers.1.fc2.weight", 1, "mlp"),
    ("model.decoder.layers.1.self_attn_layer_norm.weight", 1, "norm"),
    ("model.decoder.embed_positions.weight", None, "embedding"),
    ("transformer.blocks.0.attn.Wqkv.weight", 0, "attention"),
    ("transformer.blocks.0.ffn.up_proj.weight", 0, "mlp"),
    # BERT and kin
    ("bert.embeddings.word_embeddings.weight", None, "embedding"),
    ("embeddings.position_embeddings.weight", None, "embedding"),
    ("embeddings.token_type_embeddings.weight", None, "embedding"),
    ("embeddings.position_ids", None, "embedding"),
    ("embeddings.LayerNorm.weight", None, "norm"),
    ("embeddings.LayerNorm.bias", None, "norm"),
    ("bert.embeddings.LayerNorm.gamma", None, "norm"),
    ("encoder.layer.0.attention.self.query.weight", 0, "attention"),
    ("encoder.layer.0.attention.self.query.bias", 0, "bias"),
    ("encoder.layer.5.attention.output.dense.weight", 5, "attention"),
    ("encoder.layer.5.attention.output.LayerNorm.weight", 5, "norm"),
    ("encoder.layer.5.intermediate.dense.weight", 5, "mlp"),
    ("encoder.layer.5.output.dense.weight", 5, "mlp"),
    ("encoder.layer.5.output.LayerNorm.bias", 5, "norm"),
    ("pooler.dense.weight", None, "head"),
    ("cls.predictions.decoder.weight", None, "head"),
    ("cls.predictions.transform.dense.weight", None, "head"),
    ("cls.seq_relationship.weight", None, "head"),
    ("classifier.0.weight", None, "head"),
    ("qa_outputs.weight", None, "head"),
    ("0.auto_model.encoder.layer.2.output.dense.weight", 2, "mlp"),
    ("distilbert.transformer.layer.0.attention.q_lin.weight", 0, "attention"),
    ("distilbert.transformer.layer.0.ffn.lin1.weight", 0, "mlp"),
    ("distilbert.transformer.layer.0.sa_layer_norm.weight", 0, "norm"),
    ("albert.encoder.albert_layer_groups.0.albert_layers.0.ffn_output.weight", 0, "mlp"),
    ("albert.encoder.albert_layer_groups.0.albert_layers.0.full_layer_layer_norm.weight", 0, "norm"),
    # ViT, CLIP
    ("blocks.0.attn.qkv.weight", 0, "attention"),
    ("blocks.0.mlp.fc1.weight", 0, "mlp"),
    ("blocks.0.norm1.weight", 0, "norm"),
    ("blocks.0.ls1.gamma", 0, "other"),
    ("blocks.0.adaLN_modulation.1.weight", 0, "other"),
    ("transformer_blocks.4.norm1.linear.weight", 4, "other"),
    ("patch_embed.proj.weight", None, "embedding"),
    ("pos_embed", None, "embedding"),
    ("cls_token", None, "embedding"),
    ("head.weight", None, "head"),
    ("vit.encoder.layer.1.layernorm_before.weight", 1, "norm"),
    ("vit.embeddings.patch_embeddings.projection.weight", None, "embedding"),
    ("visual.transformer.resblocks.3.attn.in_proj_weight", 3, "attention"),
    ("visual.transformer.resblocks.3.attn.in_proj_bias", 3, "bias"),
    ("vision_model.encoder.layers.1.self_attn.out_proj.weight", 1, "attention"),
    ("text_projection.weight", None, "head"),
    # T5
    ("shared.weight", None, "embedding"),
    ("encoder.block.2.layer.0.SelfAttention.q.weight", 2, "attention"),
    ("encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight", 0, "embedding"),
    ("encoder.block.2.layer.1.DenseReluDense.wi_0.weight", 2, "mlp"),
    ("decoder.block.2.layer.1.EncDecAttention.o.weight", 2, "attention"),
    ("decoder.block.2.layer.2.layer_norm.weight", 2, "norm"),
    ("encoder.final_layer_norm.weight", None, "norm"),
    # Mixture of experts
    ("model.layers.0.block_sparse_moe.gate.weight", 0, "router"),
    ("model.layers.0.block_sparse_moe.experts.3.w1.weight", 0, "mlp"),
    ("model.layers.1.mlp.gate.weight", 1, "router"),
    ("model.layers.1.mlp.gate.e_score_correction_bias", 1, "bias"),
    ("model.layers.1.mlp.experts.255.gate_proj.weight", 1, "mlp"),
    ("model.layers.1.mlp.shared_experts.down_proj.weight", 1, "mlp"),
    ("model.layers.1.mlp.shared_expert_gate.weight", 1, "router"),
    ("model.layers.1.mlp.router.weight", 1, "router"),
    ("model.layers.1.feed_forward.router.weight", 1, "router"),
    ("model.layers.1.mlp.experts.gate_up_proj", 1, "mlp"),
    ("model.layers.1.mlp.experts.gate_up_proj_bias", 1, "bias"),
    ("model.layers.1.mlp.experts.down_proj_scales", 1, "other"),
    ("model.layers.3.self_attn.kv_a_proj_with_mqa.weight", 3, "attention"),
    ("model.layers.3.self_attn.kv_a_layernorm.weight", 3, "norm"),
    ("model.layers.3.mlp.down_proj.weight_scale_inv", 3, "other"),
    ("model.layers.61.embed_tokens.weight", 61, "embedding"),
    ("model.layers.61.shared_head.head.weight", 61, "head"),
    # State-space and RWKV
    ("backbone.embeddings.weight", None, "embedding"),
    ("backbone.layers.0.mixer.in_proj.weight", 0, "ssm"),
    ("backbone.layers.0.mixer.out_proj.weight", 0, "ssm"),
    ("backbone.layers.0.mixer.x_proj.weight", 0, "other"),
    ("backbone.layers.0.mixer.conv1d.weight", 0, "conv"),
    ("backbone.layers.0.mixer.conv1d.bias", 0, "bias"),
    ("backbone.layers.0.mixer.A_log", 0, "other"),
    ("backbone.layers.0.mixer.D", 0, "other"),
    ("backbone.layers.0.mixer.norm.weight", 0, "norm"),
    ("backbone.norm_f.weight", None, "norm"),
    ("model.layers.2.mamba.in_proj.weight", 2, "ssm"),
    ("model.layers.2.linear_attn.in_proj_qkvz.weight", 2, "attention"),
    ("blocks.0.att.key.weight", 0, "attention"),
    ("blocks.0.att.gate.weight", 0, "attention"),
    ("blocks.0.ffn.key.weight", 0, "mlp"),
    ("emb.weight", None, "embedding"),
    # Quantized checkpoints' side arrays
    ("model.layers.0.self_attn.q_proj.qzeros", 0, "other"),
    ("model.layers.0.self_attn.q_proj.scales", 0, "other"),
    ("model.layers.0.self_attn.q_proj.weight_scale", 0, "other"),
    ("model.layers.0.self_attn.q_proj.qweight", 0, "attention"),
    ("model.layers.0.self_attn.q_proj.biases", 0, "other"),
    # GGUF and Flax
    ("blk.7.attn_q.weight", 7, "attention"),
    ("blk.7.ffn_gate.weight", 7, "mlp"),
    ("blk.7.ffn_gate_inp.weight", 7, "router"),
    ("blk.7.ffn_gate_exps.weight", 7, "mlp"),
    ("blk.7.attn_norm.weight", 7, "norm"),
    ("token_embd.weight", None, "embedding"),
    ("output_norm.weight", None, "norm"),
    ("encoder/layer_3/attention/self/query/kernel", 3, "attention"),
    ("encoder/layer_3/output/LayerNorm/scale", 3, "norm"),
    # Convolutional networks: stages are no layers
    ("layer1.0.conv1.weight", None, "conv"),
    ("layer1.0.bn1.running_mean", None, "norm"),
    ("fc.weight", None, "head"),
    ("feature_extractor.conv_layers.0.conv.weight", None, "conv"),
    # A model whose own name holds a role word
    ("embedder.layers.0.self_attn.q_proj.weight", 0, "attention"),
    ("layernorm_model.layers.0.mlp.fc1.weight", 0, "mlp"),
    # Nothing known
    ("", None, "other"),
    ("weight", None, "other"),
    ("0.weight", None, "other"),
    ("a\nb.ü", None, "other"),
    ("model.layers.weight", None, "other"),
]


def test_known_names() -> None:
    found = [(name, layer_of(name), role_of(name)) for name, _, _ in CASES]
    assert found == CASES


# What the dots said is lost in these; none is taken for a matrix of attention or mlp that is not one.
LOST = {
    "embed_out.weight",
    "cls.seq_relationship.weight",
    "transformer_blocks.4.norm1.linear.weight",
    "model.layers.61.shared_head.head.weight",
    "blk.7.ffn_gate.weight",
    "blk.7.ffn_gate_exps.weight",
    "token_embd.weight",
    "feature_extractor.conv_layers.0.conv.weight",
}
FLAT = [case for case in CASES if case[0].endswith((".weight", ".bias"))]


@pytest.mark.parametrize("tail", ["", "_to_fp16", "_to_fp16_palettized"])
@pytest.mark.parametrize("head", ["", "main/"])
def test_names_as_core_ml_programs_have_them(head: str, tail: str) -> None:
    for name, layer, role in FLAT:
        flat = head + name.replace(".", "_") + tail
        if name in LOST:
            assert role_of(flat) not in ("attention", "mlp", "ssm"), name
        else:
            assert (layer_of(flat), role_of(flat)) == (layer, role), name


def test_names_of_core_ml_programs_that_say_nothing() -> None:
    assert role_of("const_0_to_fp16") == role_of("linear_0_weight_0_to_fp16") == "other"
    assert role_of("model_layers_3_mlp_gate_weight_to_fp16") == "router"


def test_every_role_occurs_in_the_cases() -> None:
    assert {role for _, _, role in CASES} == set(ROLES)


@pytest.mark.parametrize(
    "name", ["layers." + "9" * 5000, "layers.1234567.w", "layers.٣.w", "my_layers.3.w", "layers.3a.w", "layers.-1.w"]
)
def test_numbers_that_are_no_layers(name: str) -> None:
    assert layer_of(name) is None


@pytest.mark.parametrize("word", ["norm", "head_", "router", "layers.", "embed", ".", "gate_up_proj_", "_weight"])
def test_hostile_names_end_quickly(word: str) -> None:
    assert role_of(word * 200_000 + ".x") == "other"
    assert role_of(word * 150 + ".x") in ROLES
