//! llama.cpp's names of tensors → Hugging Face's, of a text-only checkpoint.
//!
//! The pairs are those of gguf-py's `tensor_mapping.py` and of what its converter renames by hand (`conversion/gemma.py`).

/// Tensors that a model has once.
const MODEL: [(&str, &str); 6] = [
    ("token_embd.weight", "model.embed_tokens.weight"),
    ("output_norm.weight", "model.norm.weight"),
    ("output.weight", "lm_head.weight"),
    ("per_layer_token_embd.weight", "model.embed_tokens_per_layer.weight"),
    ("per_layer_model_proj.weight", "model.per_layer_model_projection.weight"),
    ("per_layer_proj_norm.weight", "model.per_layer_projection_norm.weight"),
];

/// Tensors of a layer, after `blk.N.` and `model.layers.N.`.
const LAYER: [(&str, &str); 27] = [
    ("attn_norm.weight", "input_layernorm.weight"),
    ("attn_q.weight", "self_attn.q_proj.weight"),
    ("attn_q_norm.weight", "self_attn.q_norm.weight"),
    ("attn_k.weight", "self_attn.k_proj.weight"),
    ("attn_k_norm.weight", "self_attn.k_norm.weight"),
    ("attn_v.weight", "self_attn.v_proj.weight"),
    ("attn_output.weight", "self_attn.o_proj.weight"),
    ("post_attention_norm.weight", "post_attention_layernorm.weight"),
    ("ffn_norm.weight", "pre_feedforward_layernorm.weight"),
    ("ffn_gate.weight", "mlp.gate_proj.weight"),
    ("ffn_up.weight", "mlp.up_proj.weight"),
    ("ffn_down.weight", "mlp.down_proj.weight"),
    ("post_ffw_norm.weight", "post_feedforward_layernorm.weight"),
    ("layer_output_scale.weight", "layer_scalar"),
    ("inp_gate.weight", "per_layer_input_gate.weight"),
    ("proj.weight", "per_layer_projection.weight"),
    ("post_norm.weight", "post_per_layer_input_norm.weight"),
    ("ffn_gate_inp.weight", "router.proj.weight"),
    ("ffn_gate_inp.scale", "router.scale"),
    ("ffn_down_exps.scale", "router.per_expert_scale"),
    ("ffn_gate_up_exps.weight", "experts.gate_up_proj"),
    ("ffn_down_exps.weight", "experts.down_proj"),
    ("ffn_gate_exps.weight", "experts.gate_proj"),
    ("ffn_up_exps.weight", "experts.up_proj"),
    ("pre_ffw_norm_2.weight", "pre_feedforward_layernorm_2.weight"),
    ("post_ffw_norm_1.weight", "post_feedforward_layernorm_1.weight"),
    ("post_ffw_norm_2.weight", "post_feedforward_layernorm_2.weight"),
];

/// Factors of rotary frequencies: the config has what they say.
pub(crate) const ROPE_FREQS: &str = "rope_freqs.weight";

/// Hugging Face's name; `None` for a tensor that is read with the config or that no model of the family has.
pub(crate) fn hugging_face_name(name: &str) -> Option<String> {
    let of = |table: &[(&str, &'static str)], name: &str| {
        table.iter().find(|pair| pair.0 == name).map(|pair| pair.1)
    };
    match name.strip_prefix("blk.") {
        None => of(&MODEL, name).map(str::to_owned),
        Some(rest) => {
            let (layer, rest) = rest.split_once('.')?;
            let digits = !layer.is_empty() && layer.bytes().all(|byte| byte.is_ascii_digit());
            let found = of(&LAYER, rest).filter(|_| digits)?;
            Some(format!("model.layers.{layer}.{found}"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_the_model_and_of_its_layers_are_hugging_faces() {
        for (name, wanted) in [
            ("token_embd.weight", Some("model.embed_tokens.weight")),
            ("blk.17.ffn_norm.weight", Some("model.layers.17.pre_feedforward_layernorm.weight")),
            ("blk.0.layer_output_scale.weight", Some("model.layers.0.layer_scalar")),
            ("blk.3.ffn_down_exps.scale", Some("model.layers.3.router.per_expert_scale")),
            ("blk.x.ffn_norm.weight", None),
            ("blk..ffn_norm.weight", None),
            ("blk.0.attn_qkv.weight", None),
            ("rope_freqs.weight", None),
        ] {
            assert_eq!(hugging_face_name(name).as_deref(), wanted, "{name}");
        }
    }
}
