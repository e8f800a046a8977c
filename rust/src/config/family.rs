//! The models of the family: which one config.json describes, what it leaves open, and what no member can run.
//!
//! A member is data: a few facts that the one model reads ([`Traits`]). Which keys say them differs, and that is known
//! here, in `layers` and in `rope`.

use super::{MAX_LAYERS, MAX_POSITIONS, MAX_VOCAB, MAX_WIDTH};
use crate::{
    error::{Error, Result},
    json::Keys,
};

/// Values of `model_type` in a text config that are known, for errors.
const KNOWN: &str = "gemma3_text, gemma4_text or gemma4_unified_text";

/// Sizes that `Gemma3TextConfig` of transformers 5.24 has where config.json is silent. The published files of 4B and
/// larger rely on them; those of Gemma 4 say everything.
const GEMMA3_SIZES: [(&str, usize); 9] = [
    ("vocab_size", 262_208),
    ("hidden_size", 2304),
    ("intermediate_size", 9216),
    ("num_hidden_layers", 26),
    ("num_attention_heads", 8),
    ("num_key_value_heads", 4),
    ("head_dim", 256),
    ("sliding_window", 4096),
    ("max_position_embeddings", 131_072),
];

/// A generation of models, whose config.json has keys of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Family {
    /// `gemma3_text`.
    Gemma3,
    /// `gemma4_text` and `gemma4_unified_text`.
    Gemma4,
}

/// How the weight of a norm is meant, and in which operation the root is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NormForm {
    /// Gemma 3: stored around 0, multiplies as 1 + w; `rsqrt`.
    OnePlus,
    /// Gemma 4: multiplies as it is; a power.
    Plain,
}

/// What the members of the family do differently in every layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Traits {
    /// All norms that have a weight.
    pub(crate) norm_form: NormForm,
    /// Values are normed too, without a weight.
    pub(crate) norms_values: bool,
    /// Multiplies the scores; `None` where the weights of `q_norm` and `k_norm` carry the temperature.
    pub(crate) attention_scale: Option<f64>,
    /// The layer's output is multiplied by a number of its own.
    pub(crate) has_layer_scalar: bool,
}

impl Family {
    /// The member that `text` describes; a `text_config` may leave its `model_type` to the file it stands in.
    ///
    /// # Errors
    /// `Unsupported` naming what config.json asks for and this version cannot run.
    pub(super) fn of(root: &Keys<'_>, text: &Keys<'_>) -> Result<Self> {
        let unsupported = |what: String| Error::Unsupported { file: root.file().to_owned(), what };
        let model_type = match (text.text("model_type")?, root.text("model_type")?) {
            (Some(own), _) => own,
            (None, Some("gemma3")) => "gemma3_text",
            (None, _) => "gemma4_text",
        };
        let family = match model_type {
            "gemma3_text" => Self::Gemma3,
            "gemma4_text" | "gemma4_unified_text" => Self::Gemma4,
            _ => {
                return Err(unsupported(format!("model_type `{model_type}` (expected {KNOWN})")));
            }
        };
        if text.flag("attention_bias")? {
            return Err(unsupported("bias in attention (`attention_bias`: true)".into()));
        }
        if let Some(activation) = text.text("hidden_activation")?
            && activation != "gelu_pytorch_tanh"
        {
            return Err(unsupported(format!(
                "hidden_activation `{activation}` (expected gelu_pytorch_tanh)"
            )));
        }
        match family {
            Self::Gemma3 => {
                if text.flag("use_bidirectional_attention")? {
                    return Err(unsupported(
                        "an embedding model (`use_bidirectional_attention`: true)".into(),
                    ));
                }
                if text.is_set("attn_logit_softcapping") {
                    return Err(unsupported(
                        "a soft cap on attention scores (`attn_logit_softcapping`)".into(),
                    ));
                }
            }
            Self::Gemma4 => {
                if text.text("use_bidirectional_attention")? == Some("all") {
                    return Err(unsupported(
                        "an embedding model (`use_bidirectional_attention`: all)".into(),
                    ));
                }
            }
        }
        Ok(family)
    }

    /// A size of the text config that no member can do without.
    ///
    /// # Errors
    /// `Config` naming the key when it is wrong, null, or absent where transformers has no default that a published model
    /// relies on.
    pub(super) fn size(self, text: &Keys<'_>, key: &str) -> Result<usize> {
        let max = match key {
            "num_hidden_layers" => MAX_LAYERS,
            "vocab_size" => MAX_VOCAB,
            "sliding_window" | "max_position_embeddings" => MAX_POSITIONS,
            _ => MAX_WIDTH,
        };
        let default = GEMMA3_SIZES.iter().find(|(name, _)| *name == key);
        match (self, default) {
            // Null is no silence: transformers refuses it, or takes it for no window at all.
            (Self::Gemma3, Some(&(_, size))) if !text.has(key) => Ok(size),
            _ => text.size(key, max),
        }
    }

    /// Ids that end a turn where no file says so.
    pub(super) fn eos_token_ids(self) -> Vec<i64> {
        match self {
            Self::Gemma3 => vec![1],
            Self::Gemma4 => Vec::new(),
        }
    }

    /// # Errors
    /// `Config` naming the key.
    pub(super) fn traits(self, text: &Keys<'_>) -> Result<Traits> {
        Ok(match self {
            Self::Gemma3 => Traits {
                norm_form: NormForm::OnePlus,
                norms_values: false,
                attention_scale: Some(
                    text.number_or("query_pre_attn_scalar", 256.0, 1e-6..=1e9)?.powf(-0.5),
                ),
                has_layer_scalar: false,
            },
            Self::Gemma4 => Traits {
                norm_form: NormForm::Plain,
                norms_values: true,
                attention_scale: None,
                has_layer_scalar: true,
            },
        })
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::{Value, json};

    use super::{
        super::{Config, KeyValues, LayerType, Rope},
        *,
    };

    fn parse(json: &Value) -> Result<Config> {
        Config::from_json(Path::new("config.json"), json.as_object().unwrap(), None)
    }

    /// The published config.json of 4B, shortened to what the loader reads.
    fn four_b() -> Value {
        json!({"model_type": "gemma3", "eos_token_id": [1, 106], "torch_dtype": "bfloat16",
            "text_config": {"model_type": "gemma3_text", "hidden_size": 2560,
                "intermediate_size": 10_240, "num_hidden_layers": 34, "sliding_window": 1024,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"}},
            "vision_config": {"model_type": "siglip_vision_model"}})
    }

    fn with(key: &str, value: Value) -> Value {
        let mut json = four_b();
        json["text_config"][key] = value;
        json
    }

    #[test]
    fn what_the_published_file_of_gemma_3_4b_leaves_open_is_what_transformers_takes() {
        let config = parse(&four_b()).unwrap();
        assert_eq!((config.vocab_size, config.num_attention_heads), (262_208, 8));
        assert_eq!((config.sliding_window, config.max_position_embeddings), (1024, 131_072));
        assert_eq!((config.hidden_size_per_layer_input, config.final_logit_softcapping), (0, None));
        assert_eq!(config.eos_token_ids, [1, 106]);
        for (index, layer) in config.layers.iter().enumerate() {
            let full = index % 6 == 5;
            assert_eq!(layer.layer_type == LayerType::Full, full, "layer {index}");
            assert_eq!((layer.head_dim, layer.num_key_value_heads), (256, 4));
            assert_eq!(layer.intermediate_size, 10_240);
            assert_eq!(layer.key_values, KeyValues::Own { k_eq_v: false });
        }
        let rope = |rope_theta, factor| Some(Rope { rope_theta, rotated: 128, factor });
        assert_eq!(config.rope, [rope(1e4, 1.0), rope(1e6, 8.0)]);
        let traits = Traits {
            norm_form: NormForm::OnePlus,
            norms_values: false,
            attention_scale: Some(1.0 / 16.0),
            has_layer_scalar: false,
        };
        assert_eq!(config.traits, traits);
    }

    #[test]
    fn a_silent_gemma_3_config_ends_at_the_token_that_transformers_ends_at() {
        let mut json = four_b();
        json["eos_token_id"] = Value::Null;
        assert_eq!(parse(&json).unwrap().eos_token_ids, [1]);
        json["text_config"]["model_type"] = "gemma4_text".into();
        assert!(parse(&json).unwrap_err().to_string().contains("num_key_value_heads"));
    }

    #[test]
    fn a_text_config_without_a_model_type_is_of_the_file_it_stands_in() {
        let mut json = four_b();
        json["text_config"].as_object_mut().unwrap().remove("model_type");
        assert_eq!(parse(&json).unwrap(), parse(&four_b()).unwrap());
    }

    #[test]
    fn the_saved_form_of_gemma_3_means_the_same_as_the_published_one() {
        let mut saved = four_b();
        let text = saved["text_config"].as_object_mut().unwrap();
        text.remove("rope_scaling");
        text.insert(
            "rope_parameters".into(),
            json!({"sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}}),
        );
        assert_eq!(parse(&saved).unwrap(), parse(&four_b()).unwrap());
        let mut published = four_b();
        published["text_config"]["rope_theta"] = 1e6.into();
        published["text_config"]["rope_local_base_freq"] = 1e4.into();
        published["text_config"]["sliding_window_pattern"] = 6.into();
        assert_eq!(parse(&published).unwrap(), parse(&four_b()).unwrap());
    }

    #[test]
    fn keys_of_gemma_4_mean_nothing_in_gemma_3() {
        for (key, value) in [
            ("global_head_dim", json!(512)),
            ("num_kv_shared_layers", json!(20)),
            ("hidden_size_per_layer_input", json!(256)),
            ("attention_k_eq_v", json!(true)),
            ("use_double_wide_mlp", json!(true)),
        ] {
            assert_eq!(parse(&with(key, value)).unwrap(), parse(&four_b()).unwrap(), "{key}");
        }
    }

    #[test]
    fn the_last_layer_of_gemma_3_is_of_the_type_that_the_config_says() {
        let config = parse(&with("sliding_window_pattern", 4.into())).unwrap();
        assert_eq!(config.layers[3].layer_type, LayerType::Full);
        assert_eq!(config.layers[33].layer_type, LayerType::Sliding);
        let types = vec!["sliding_attention"; 34];
        let config = parse(&with("layer_types", types.into())).unwrap();
        assert_eq!(config.layers[33].layer_type, LayerType::Sliding);
        assert_eq!(config.rope[1], None);
    }

    #[test]
    fn what_gemma_3_cannot_mean_is_named() {
        for (key, value, named) in [
            ("query_pre_attn_scalar", json!(0), "query_pre_attn_scalar"),
            ("query_pre_attn_scalar", json!("256"), "query_pre_attn_scalar"),
            ("sliding_window_pattern", json!(0), "sliding_window_pattern"),
            ("sliding_window", Value::Null, "sliding_window"),
            ("vocab_size", Value::Null, "vocab_size"),
            ("head_dim", json!(-256), "head_dim"),
            ("num_key_value_heads", json!(3), "num_key_value_heads"),
            ("use_bidirectional_attention", json!("all"), "use_bidirectional_attention"),
            ("per_layer_config", json!({"1": {"head_dim": 128}}), "per_layer_config"),
            ("rope_scaling", json!(8), "rope_scaling"),
            ("rope_scaling", json!({"type": "linear", "factor": 8.0}), "rope_scaling.rope_type"),
            ("rope_scaling", json!({"rope_type": "linear"}), "rope_scaling.factor"),
            ("rope_scaling", json!({"rope_type": "linear", "factor": 0}), "rope_scaling.factor"),
            ("rope_theta", json!(0), "rope_theta"),
            ("rope_local_base_freq", json!([]), "rope_local_base_freq"),
            ("rope_parameters", json!({"rope_theta": 1e6}), "rope_parameters.sliding_attention"),
            (
                "rope_parameters",
                json!({"full_attention": {"rope_type": "default", "partial_rotary_factor": 0.5}}),
                "partial_rotary_factor",
            ),
        ] {
            let error = parse(&with(key, value.clone())).unwrap_err();
            assert!(matches!(error, Error::Config { .. }), "{key}={value}: {error}");
            assert!(error.to_string().contains(named), "{key}={value}: {error}");
        }
        for (key, value, named) in [
            ("use_bidirectional_attention", json!(true), "embedding model"),
            ("attn_logit_softcapping", json!(50.0), "attn_logit_softcapping"),
            ("rope_scaling", json!({"rope_type": "yarn", "factor": 8.0}), "yarn"),
            ("model_type", json!("gemma3n_text"), "expected gemma3_text, gemma4_text"),
        ] {
            let error = parse(&with(key, value)).unwrap_err();
            assert!(matches!(error, Error::Unsupported { .. }), "{key}: {error}");
            assert!(error.to_string().contains(named), "{key}: {error}");
        }
    }
}
