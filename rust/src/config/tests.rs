//! What config.json says of a model, from E2B's own and from broken ones.

use super::*;

/// E2B's text config, shortened to what the loader reads.
fn e2b() -> Value {
    serde_json::json!({
        "model_type": "gemma4_text", "vocab_size": 262_144, "vocab_size_per_layer_input": 262_144,
        "hidden_size": 1536, "hidden_size_per_layer_input": 256, "intermediate_size": 6144,
        "num_hidden_layers": 35, "num_attention_heads": 8, "num_key_value_heads": 1,
        "num_global_key_value_heads": null, "head_dim": 256, "global_head_dim": 512,
        "num_kv_shared_layers": 20, "use_double_wide_mlp": true, "attention_k_eq_v": false,
        "rms_norm_eps": 1e-6, "sliding_window": 512, "max_position_embeddings": 131_072,
        "final_logit_softcapping": 30.0, "dtype": "bfloat16", "eos_token_id": 1,
        "layer_types": (0..35).map(|i| if i % 5 == 4 { "full_attention" } else
            { "sliding_attention" }).collect::<Vec<_>>(),
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25,
                "rope_theta": 1_000_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0}}
    })
}

fn parse(json: &Value) -> Result<Config> {
    Config::from_json(Path::new("config.json"), json.as_object().unwrap(), None)
}

fn with(key: &str, value: Value) -> Value {
    let mut json = e2b();
    json[key] = value;
    json
}

#[test]
fn e2b_has_twelve_sliding_and_three_full_owners_and_two_producers() {
    let config = parse(&e2b()).unwrap();
    let owners = |t| config.layers.iter().take(15).filter(|l| l.layer_type == t).count();
    assert_eq!((owners(LayerType::Sliding), owners(LayerType::Full)), (12, 3));
    assert_eq!(config.first_shared_layer(), 15);
    for layer in &config.layers[15..] {
        let producer = if layer.layer_type == LayerType::Full { 14 } else { 13 };
        assert_eq!(layer.key_values, KeyValues::Shared { producer });
        assert_eq!(layer.intermediate_size, 12_288);
    }
    assert_eq!(config.layers[0].intermediate_size, 6144);
    assert_eq!(config.layers[4].head_dim, 512);
    assert_eq!(config.rope[1], Some(Rope { rope_theta: 1e6, rotated: 64, factor: 1.0 }));
}

#[test]
fn the_saved_form_of_full_layers_means_the_same_as_the_hub_form() {
    let mut saved = e2b();
    let keys = saved.as_object_mut().unwrap();
    keys.remove("global_head_dim");
    keys.remove("num_global_key_value_heads");
    let own: Map<_, _> = (0..35)
        .filter(|i| i % 5 == 4)
        .map(|i| (i.to_string(), serde_json::json!({"head_dim": 512})))
        .collect();
    keys.insert("per_layer_config".into(), Value::Object(own));
    assert_eq!(parse(&saved).unwrap(), parse(&e2b()).unwrap());
}

#[test]
fn global_kv_heads_count_only_when_k_equals_v() {
    let mut json = with("num_global_key_value_heads", 4.into());
    assert_eq!(parse(&json).unwrap().layers[4].num_key_value_heads, 1);
    json["attention_k_eq_v"] = true.into();
    let config = parse(&json).unwrap();
    assert_eq!(config.layers[4].num_key_value_heads, 4);
    assert_eq!(config.layers[4].key_values, KeyValues::Own { k_eq_v: true });
    assert_eq!(config.layers[3].key_values, KeyValues::Own { k_eq_v: false });
}

#[test]
fn the_last_layer_is_always_full() {
    let config = parse(&with("layer_types", vec!["sliding_attention"; 35].into()));
    // No full layer before the shared ones: transformers calls that a config error too.
    assert!(config.unwrap_err().to_string().contains("num_kv_shared_layers"));
    let mut json = with("layer_types", Value::Null);
    json["num_kv_shared_layers"] = 0.into();
    let config = parse(&json).unwrap();
    assert_eq!(config.layers[34].layer_type, LayerType::Full);
    assert_eq!(config.layers[5].layer_type, LayerType::Full);
}

#[test]
fn absurd_and_missing_keys_are_named() {
    for (key, value) in [
        ("num_hidden_layers", Value::from(1_000_000_000_000_i64)),
        ("num_hidden_layers", 0.into()),
        ("hidden_size", (-1).into()),
        ("hidden_size", 1.5.into()),
        ("vocab_size", "many".into()),
        ("num_key_value_heads", 3.into()),
        ("head_dim", 7.into()),
        ("rms_norm_eps", "tiny".into()),
        ("layer_types", vec!["full_attention"].into()),
        ("layer_types", vec!["spiral_attention"; 35].into()),
        ("num_kv_shared_layers", 36.into()),
        ("rope_parameters", serde_json::json!({"full_attention": {"rope_theta": 1e6}})),
        ("dtype", "int3".into()),
        ("eos_token_id", vec![262_144].into()),
        ("sliding_window", Value::Null),
    ] {
        let text = parse(&with(key, value.clone())).unwrap_err().to_string();
        let named = if key == "rope_parameters" { "sliding_attention" } else { key };
        assert!(text.contains(named), "{key}={value}: {text}");
    }
    let mut json = e2b();
    json.as_object_mut().unwrap().remove("hidden_size");
    assert!(parse(&json).unwrap_err().to_string().contains("hidden_size"));
}

#[test]
fn what_is_not_supported_is_refused_by_name() {
    for (key, value, name) in [
        ("model_type", Value::from("llama"), "llama"),
        ("quantization_config", serde_json::json!({"quant_method": "x"}), "quantized"),
        ("hidden_activation", "silu".into(), "silu"),
        ("num_kv_shared_layers", 35.into(), "drafter"),
        ("use_bidirectional_attention", "all".into(), "embedding model"),
    ] {
        let error = parse(&with(key, value)).unwrap_err();
        assert!(matches!(error, Error::Unsupported { .. }), "{error}");
        assert!(error.to_string().contains(name), "{error}");
    }
}

#[test]
fn a_text_config_inside_a_multimodal_one_is_found() {
    let json = serde_json::json!({"model_type": "gemma4", "text_config": e2b(),
        "eos_token_id": [1, 106]});
    let config = parse(&json).unwrap();
    assert_eq!(config.eos_token_ids, [1, 106]);
    assert_eq!(config.hidden_size, 1536);
}
