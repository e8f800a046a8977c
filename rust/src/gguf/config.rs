//! A GGUF file's metadata → what `config.json` and `generation_config.json` would say of the model, in Hugging Face's words.
//!
//! Keys are those that llama.cpp's converter writes (`conversion/gemma.py`); what it leaves out is the family's, as llama.cpp
//! itself has it. Whether the sizes make sense is `config`'s business, as for any checkpoint.

use serde_json::{Map, Value as Json, json};

use super::{Gguf, Metadata, Type, Value, metadata::whole, names::ROPE_FREQS};
use crate::error::{Error, Result};

/// Most layers that lists are made for.
const MAX_LAYERS: u64 = 512;

/// Base of the sliding layers' frequencies where the file has none.
const SLIDING_THETA: f64 = 1e4;
/// The same of full layers.
const FULL_THETA: f64 = 1e6;

/// Texts of control tokens that end a turn. llama.cpp stops at them too, whatever ids the file names.
const ENDS: [&str; 3] = ["<end_of_turn>", "<turn|>", "<|tool_response>"];

/// The sizes that are copied as they are, with their keys after the architecture's name.
const SIZES: [(&str, &str); 5] = [
    ("hidden_size", "embedding_length"),
    ("num_hidden_layers", "block_count"),
    ("num_attention_heads", "attention.head_count"),
    ("max_position_embeddings", "context_length"),
    ("rms_norm_eps", "attention.layer_norm_rms_epsilon"),
];

/// The key that says what Hugging Face's `key` says, for errors.
pub(crate) fn key_of(metadata: &Metadata, key: &str) -> String {
    let others = [
        ("intermediate_size", "feed_forward_length"),
        ("num_key_value_heads", "attention.head_count_kv"),
        ("num_global_key_value_heads", "attention.head_count_kv"),
        ("head_dim", "attention.key_length"),
        ("global_head_dim", "attention.key_length"),
        ("sliding_window", "attention.sliding_window"),
        ("layer_types", "attention.sliding_window_pattern"),
        ("num_kv_shared_layers", "attention.shared_kv_layers"),
        ("hidden_size_per_layer_input", "embedding_length_per_layer_input"),
        ("final_logit_softcapping", "final_logit_softcapping"),
        ("num_experts", "expert_count"),
        ("top_k_experts", "expert_used_count"),
        ("moe_intermediate_size", "expert_feed_forward_length"),
    ];
    let found = SIZES.iter().chain(&others).find(|pair| pair.0 == key);
    match (found, metadata.text("general.architecture")) {
        (Some((_, own)), Ok(Some(architecture))) => format!("{architecture}.{own} ({key})"),
        _ => key.to_owned(),
    }
}

/// `config.json` and `generation_config.json`.
///
/// # Errors
/// `Config` naming the key; `Unsupported` for another architecture.
pub(crate) fn config(gguf: &Gguf) -> Result<(Map<String, Json>, Map<String, Json>)> {
    let keys = Keys { gguf, metadata: gguf.metadata(), architecture: gguf.architecture()? };
    let config = if keys.architecture == "gemma3" { keys.gemma3() } else { keys.gemma4() };
    Ok((config?, keys.generation()?))
}

/// The metadata of a model whose architecture is known.
struct Keys<'a> {
    gguf: &'a Gguf,
    metadata: &'a Metadata,
    architecture: &'a str,
}

impl Keys<'_> {
    fn key(&self, key: &str) -> String {
        format!("{}.{key}", self.architecture)
    }

    fn count(&self, key: &str) -> Result<Option<u64>> {
        self.metadata.count(&self.key(key))
    }

    fn number(&self, key: &str) -> Result<Option<Json>> {
        Ok(self.metadata.number(&self.key(key))?.map(Json::Number))
    }

    fn wrong(&self, key: &str, reason: String) -> Error {
        self.metadata.wrong(&self.key(key), reason)
    }

    fn layers(&self) -> Result<usize> {
        let key = "block_count";
        match self.metadata.needed(&self.key(key))? {
            layers @ 1..=MAX_LAYERS => Ok(layers as usize),
            other => Err(self.wrong(key, format!("expected 1 to {MAX_LAYERS}, found {other}"))),
        }
    }

    fn has(&self, name: &str) -> bool {
        self.gguf.tensor(name).is_some()
    }

    /// What both families say alike.
    fn common(&self) -> Result<Map<String, Json>> {
        let mut config = Map::new();
        for (name, key) in SIZES {
            let value = self.number(key)?;
            let missing = || self.wrong(key, "expected a number, found none".into());
            config.insert(name.to_owned(), value.ok_or_else(missing)?);
        }
        let mut put = |name: &str, value: Json| config.insert(name.to_owned(), value);
        put("vocab_size", self.vocab_size()?.into());
        put("final_logit_softcapping", self.number("final_logit_softcapping")?.unwrap_or_default());
        put("hidden_activation", "gelu_pytorch_tanh".into());
        put("attention_bias", false.into());
        put("tie_word_embeddings", (!self.has("output.weight")).into());
        // The file has no such key; what it was made from was in bfloat16, as all published members are.
        put("dtype", "bfloat16".into());
        for (name, id) in [("bos_token_id", "bos"), ("pad_token_id", "padding")] {
            let id = self.metadata.count(&format!("tokenizer.ggml.{id}_token_id"))?;
            put(name, id.map_or(Json::Null, Json::from));
        }
        put("eos_token_id", self.ends()?.into());
        Ok(config)
    }

    fn gemma3(&self) -> Result<Map<String, Json>> {
        let mut config = self.common()?;
        let layers = self.layers()?;
        let head_dim = self.metadata.needed(&self.key("attention.key_length"))?;
        let heads = self.metadata.needed(&self.key("attention.head_count"))?;
        let window = self.count("attention.sliding_window")?.filter(|&window| window > 0);
        let types = if window.is_some() { self.layer_types(layers)? } else { vec![FULL; layers] };
        let mut put = |name: &str, value: Json| config.insert(name.to_owned(), value);
        put("model_type", "gemma3_text".into());
        put("architectures", json!(["Gemma3ForCausalLM"]));
        put("head_dim", head_dim.into());
        // 27B, the only one with 62 layers, is the only one whose scale is not that of its heads.
        let scalar = match (layers, self.count("embedding_length")?) {
            (62, Some(hidden)) if heads > 0 => hidden / heads,
            _ => head_dim,
        };
        put("query_pre_attn_scalar", scalar.into());
        put("attn_logit_softcapping", Json::Null);
        put("use_bidirectional_attention", false.into());
        put("intermediate_size", self.metadata.needed(&self.key("feed_forward_length"))?.into());
        put("num_key_value_heads", self.count("attention.head_count_kv")?.unwrap_or(heads).into());
        // Without sliding layers any window will do.
        put("sliding_window", window.unwrap_or(4096).into());
        put("layer_types", types.into());
        put("rope_parameters", json!({FULL: self.scaled_rope()?, SLIDING: self.sliding_rope()?}));
        Ok(config)
    }

    fn gemma4(&self) -> Result<Map<String, Json>> {
        let mut config = self.common()?;
        let layers = self.layers()?;
        let types = self.layer_types(layers)?;
        let shared = self.count("attention.shared_kv_layers")?.unwrap_or(0);
        let first_shared = layers.saturating_sub(shared.try_into().unwrap_or(layers));
        let full_dim = self.metadata.needed(&self.key("attention.key_length"))?;
        let head_dim = self.count("attention.key_length_swa")?.unwrap_or(full_dim);
        let (kv_heads, full_kv_heads) = self.kv_heads(&types)?;
        let (width, is_double) = self.mlp_width(layers, first_shared)?;
        // Values are keys where a full layer that owns its keys has no projection for them.
        let k_eq_v = types[..first_shared]
            .iter()
            .enumerate()
            .any(|(layer, &kind)| kind == FULL && !self.has(&format!("blk.{layer}.attn_v.weight")));
        let per_layer = self.count("embedding_length_per_layer_input")?.unwrap_or(0);
        let rows = self.gguf.tensor("per_layer_token_embd.weight").map(|(_, table)| table.shape[0]);
        let experts = self.count("expert_count")?.filter(|&experts| experts > 0);
        let mut put = |name: &str, value: Json| config.insert(name.to_owned(), value);
        put("model_type", "gemma4_text".into());
        put("architectures", json!(["Gemma4ForCausalLM"]));
        put("head_dim", head_dim.into());
        put("global_head_dim", full_dim.into());
        put("num_key_value_heads", kv_heads.into());
        put("num_global_key_value_heads", full_kv_heads.into());
        put("attention_k_eq_v", k_eq_v.into());
        put("intermediate_size", width.into());
        put("use_double_wide_mlp", is_double.into());
        put("num_kv_shared_layers", shared.into());
        put("hidden_size_per_layer_input", per_layer.into());
        put(
            "vocab_size_per_layer_input",
            rows.map_or_else(|| self.vocab_size(), |rows| Ok(rows as u64))?.into(),
        );
        put("sliding_window", self.metadata.needed(&self.key("attention.sliding_window"))?.into());
        put("layer_types", types.into());
        put(
            "rope_parameters",
            json!({FULL: self.proportional_rope()?, SLIDING: self.sliding_rope()?}),
        );
        put("enable_moe_block", experts.is_some().into());
        put("num_experts", experts.map_or(Json::Null, Json::from));
        for (name, key) in [
            ("top_k_experts", "expert_used_count"),
            ("moe_intermediate_size", "expert_feed_forward_length"),
        ] {
            put(
                name,
                self.count(key)?.filter(|_| experts.is_some()).map_or(Json::Null, Json::from),
            );
        }
        Ok(config)
    }

    /// The key, the length of the vocabulary, or the rows of the table: the converter cuts these to the vocabulary.
    fn vocab_size(&self) -> Result<u64> {
        if let Some(size) = self.count("vocab_size")? {
            return Ok(size);
        }
        if let Some(tokens) = self.metadata.list("tokenizer.ggml.tokens")? {
            return Ok(tokens.len() as u64);
        }
        match self.gguf.tensor("token_embd.weight") {
            Some((_, table)) => Ok(table.shape[0] as u64),
            None => Err(self
                .metadata
                .wrong("tokenizer.ggml.tokens", "expected a list, found none".into())),
        }
    }

    /// A list of what slides, or how many layers from one full one to the next.
    fn layer_types(&self, layers: usize) -> Result<Vec<&'static str>> {
        let key = "attention.sliding_window_pattern";
        let named = |slides| if slides { SLIDING } else { FULL };
        let every = |period: u64| {
            // 0: all layers slide.
            (1..=layers as u64)
                .map(|layer| named(period == 0 || !layer.is_multiple_of(period)))
                .collect()
        };
        match self.metadata.get(&self.key(key)) {
            None => Ok(every(6)),
            Some(Value::List(list)) if list.len() == layers => list
                .iter()
                .map(|item| match item {
                    Value::Bool(slides) => Ok(named(slides)),
                    other => whole(&other).map(|number| named(number != 0)).ok_or_else(|| {
                        self.wrong(
                            key,
                            "expected a boolean for each layer, found other values".into(),
                        )
                    }),
                })
                .collect(),
            Some(Value::List(list)) => Err(self.wrong(
                key,
                format!("expected a value for each of {layers} layers, found {}", list.len()),
            )),
            Some(other) => whole(&other).map(every).ok_or_else(|| {
                self.wrong(key, "expected a whole number or a list of booleans".into())
            }),
        }
    }

    /// Key and value heads of sliding and of full layers; the latter `None` where the file does not tell them apart.
    fn kv_heads(&self, types: &[&str]) -> Result<(u64, Option<u64>)> {
        let key = "attention.head_count_kv";
        let name = self.key(key);
        if !matches!(self.metadata.get(&name), Some(Value::List(_))) {
            return Ok((self.metadata.needed(&name)?, None));
        }
        let heads = self.metadata.counts(&name, types.len())?.unwrap_or_default();
        let of = |wanted: &str| {
            let mut found = heads.iter().zip(types).filter(|(_, kind)| **kind == wanted);
            let first = found.next().map(|(&heads, _)| heads);
            match found.find(|(heads, _)| Some(**heads) != first) {
                None => Ok(first),
                Some((other, _)) => Err(self.wrong(
                    key,
                    format!("expected one number for all {wanted} layers, found {other} beside {first:?}"),
                )),
            }
        };
        let (sliding, full) = (of(SLIDING)?, of(FULL)?);
        match sliding.or(full) {
            Some(heads) => Ok((heads, full)),
            None => Err(self.wrong(key, "expected a number for each layer, found none".into())),
        }
    }

    /// The width of the MLP, and whether it is double in layers from `first_shared` on.
    fn mlp_width(&self, layers: usize, first_shared: usize) -> Result<(u64, bool)> {
        let key = "feed_forward_length";
        let missing = || self.wrong(key, "expected a whole number, found none".into());
        let widths = self.metadata.counts(&self.key(key), layers)?.ok_or_else(missing)?;
        let (own, shared) = widths.split_at(first_shared);
        let width = own.first().or(shared.first()).copied().unwrap_or(0);
        let all =
            |widths: &[u64], wanted: Option<u64>| widths.iter().all(|&width| Some(width) == wanted);
        if own.is_empty() {
            // A drafter, or more shared layers than there are: `config` refuses both.
            return Ok((width, false));
        }
        let is_double = !shared.is_empty() && all(shared, width.checked_mul(2));
        if all(own, Some(width)) && (is_double || all(shared, Some(width))) {
            return Ok((width, is_double));
        }
        Err(self.wrong(
            key,
            format!("expected one width for layers before {first_shared} and the same or twice as much after them"),
        ))
    }

    fn sliding_rope(&self) -> Result<Json> {
        let theta = self.number("rope.freq_base_swa")?.unwrap_or(SLIDING_THETA.into());
        Ok(json!({"rope_type": "default", "rope_theta": theta}))
    }

    fn full_theta(&self) -> Result<Json> {
        Ok(self.number("rope.freq_base")?.unwrap_or(FULL_THETA.into()))
    }

    /// Gemma 3's full layers: linear scaling from 4B on.
    fn scaled_rope(&self) -> Result<Json> {
        let theta = self.full_theta()?;
        let kind = self.metadata.text(&self.key("rope.scaling.type"))?;
        let factor = match self.number("rope.scaling.factor")? {
            // Its older name.
            None => self.number("rope.scale_linear")?,
            found => found,
        };
        match (kind, factor) {
            (Some("none") | None, None) | (Some("none"), _) => {
                Ok(json!({"rope_type": "default", "rope_theta": theta}))
            }
            (Some("linear") | None, Some(factor)) => {
                Ok(json!({"rope_type": "linear", "rope_theta": theta, "factor": factor}))
            }
            (Some("linear"), None) => {
                Err(self.wrong("rope.scaling.factor", "expected a number, found none".into()))
            }
            (Some(other), _) => Err(Error::Unsupported {
                file: self.gguf.files[0].path.clone(),
                what: format!(
                    "`rope.scaling.type` {} (expected linear or none)",
                    super::shortened(other)
                ),
            }),
        }
    }

    /// Gemma 4's full layers: a part of the frequencies turns. The converter says which with a tensor that they are divided by, 1 or
    /// so much that nothing is left.
    fn proportional_rope(&self) -> Result<Json> {
        let theta = self.full_theta()?;
        let rope = |part: f64| json!({"rope_type": "proportional", "rope_theta": theta, "partial_rotary_factor": part});
        let Some((file, tensor)) = self.gguf.tensor(ROPE_FREQS) else { return Ok(rope(0.25)) };
        let blame = |reason: &str| Error::Tensor {
            file: file.path.clone(),
            name: ROPE_FREQS.to_owned(),
            reason: reason.to_owned(),
        };
        let &[count] = &*tensor.shape else { return Err(blame("expected one dimension")) };
        if tensor.kind != Type::F32 {
            return Err(blame("expected type F32"));
        }
        let (factors, _) = file.map.bytes()[tensor.range.clone()].as_chunks::<4>();
        let mut factors = factors.iter().map(|&bytes| f32::from_le_bytes(bytes)).peekable();
        let mut turning = 0_usize;
        while factors.next_if(|factor| factor.to_bits() == 1_f32.to_bits()).is_some() {
            turning += 1;
        }
        if factors.all(|factor| factor >= 1e29) {
            Ok(rope(turning as f64 / count as f64))
        } else {
            Err(blame("expected factors 1, then factors of at least 1e29"))
        }
    }

    /// Ids that end an answer: those the file names, and control tokens with a family's texts.
    fn ends(&self) -> Result<Vec<u64>> {
        let mut ids = Vec::new();
        for name in ["eos", "eot", "eom"] {
            ids.extend(self.metadata.count(&format!("tokenizer.ggml.{name}_token_id"))?);
        }
        if let Some(tokens) = self.metadata.list("tokenizer.ggml.tokens")? {
            let is_end =
                |token: &Value<'_>| matches!(token, Value::Text(text) if ENDS.contains(text));
            ids.extend(
                (0..).zip(tokens.iter()).filter(|(_, token)| is_end(token)).map(|(id, _)| id),
            );
        }
        let mut seen = std::collections::BTreeSet::new();
        ids.retain(|&id| seen.insert(id));
        Ok(ids)
    }

    fn generation(&self) -> Result<Map<String, Json>> {
        let mut generation = Map::new();
        generation.insert("eos_token_id".into(), self.ends()?.into());
        let key = "tokenizer.ggml.suppress_tokens";
        if let Some(list) = self.metadata.list(key)? {
            let ids: Option<Vec<_>> = list.iter().map(|id| whole(&id)).collect();
            let wrong =
                || self.metadata.wrong(key, "expected token ids, found other values".into());
            generation.insert("suppress_tokens".into(), ids.ok_or_else(wrong)?.into());
        }
        Ok(generation)
    }
}

const FULL: &str = "full_attention";
const SLIDING: &str = "sliding_attention";

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{super::tests::Writer, *};

    fn of(writer: &Writer) -> Map<String, Json> {
        config(&writer.open().unwrap()).unwrap().0
    }

    fn refusal(writer: &Writer) -> String {
        config(&writer.open().unwrap()).unwrap_err().to_string()
    }

    /// What the file of Gemma 3 270M has.
    fn gemma3() -> Writer {
        Writer::default()
            .text("general.architecture", "gemma3")
            .number("gemma3.context_length", 32_768)
            .number("gemma3.embedding_length", 640)
            .number("gemma3.block_count", 18)
            .number("gemma3.feed_forward_length", 2048)
            .number("gemma3.attention.head_count", 4)
            .number("gemma3.attention.head_count_kv", 1)
            .float("gemma3.attention.layer_norm_rms_epsilon", 1e-6)
            .number("gemma3.attention.key_length", 256)
            .float("gemma3.rope.freq_base", 1e6)
            .number("gemma3.attention.sliding_window", 512)
            .number("tokenizer.ggml.eos_token_id", 1)
            .number("tokenizer.ggml.bos_token_id", 2)
            .number("tokenizer.ggml.padding_token_id", 0)
            .texts("tokenizer.ggml.tokens", &["<pad>", "<eos>", "<bos>", "<end_of_turn>"])
    }

    /// A short E2B: layers 0 to 2 own their keys, the last of each three is full.
    fn gemma4(widths: [i32; 6]) -> Writer {
        let widths = widths.map(|width| width.to_le_bytes().to_vec());
        let slides = [1, 1, 0, 1, 1, 0].map(|slides| vec![slides]);
        Writer::default()
            .text("general.architecture", "gemma4")
            .number("gemma4.context_length", 131_072)
            .number("gemma4.embedding_length", 1536)
            .number("gemma4.block_count", 6)
            .list("gemma4.feed_forward_length", 5, &widths)
            .number("gemma4.attention.head_count", 8)
            .float("gemma4.attention.layer_norm_rms_epsilon", 1e-6)
            .number("gemma4.attention.key_length", 512)
            .number("gemma4.attention.key_length_swa", 256)
            .number("gemma4.attention.sliding_window", 512)
            .number("gemma4.attention.shared_kv_layers", 3)
            .number("gemma4.embedding_length_per_layer_input", 256)
            .float("gemma4.final_logit_softcapping", 30.0)
            .float("gemma4.rope.freq_base", 1e6)
            .float("gemma4.rope.freq_base_swa", 1e4)
            .list("gemma4.attention.sliding_window_pattern", 7, &slides)
            .number("gemma4.vocab_size", 262_144)
            .tensor(
                "rope_freqs.weight",
                &[4],
                0,
                &[1_f32, 1e30, 1e30, 1e30].map(f32::to_le_bytes).concat(),
            )
    }

    fn e2b() -> Writer {
        gemma4([6144, 6144, 6144, 12_288, 12_288, 12_288])
            .number("gemma4.attention.head_count_kv", 1)
            .tensor("blk.2.attn_v.weight", &[1, 1], 0, &[0; 4])
    }

    #[test]
    fn gemma_3_270m_is_what_its_config_says() {
        let types: Vec<_> = (1..=18).map(|i| if i % 6 == 0 { FULL } else { SLIDING }).collect();
        let wanted = json!({
            "model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"],
            "hidden_size": 640, "num_hidden_layers": 18, "num_attention_heads": 4,
            "max_position_embeddings": 32_768, "rms_norm_eps": 1e-6, "vocab_size": 4,
            "final_logit_softcapping": null, "hidden_activation": "gelu_pytorch_tanh",
            "attention_bias": false, "tie_word_embeddings": true, "dtype": "bfloat16",
            "bos_token_id": 2, "pad_token_id": 0, "eos_token_id": [1, 3], "head_dim": 256,
            "query_pre_attn_scalar": 256, "attn_logit_softcapping": null,
            "use_bidirectional_attention": false, "intermediate_size": 2048,
            "num_key_value_heads": 1, "sliding_window": 512, "layer_types": types,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}},
        });
        assert_eq!(Json::Object(of(&gemma3())), wanted);
    }

    #[test]
    fn larger_gemma_3_scale_their_full_layers_and_27b_its_scores() {
        let large = gemma3()
            .text("gemma3.rope.scaling.type", "linear")
            .float("gemma3.rope.scaling.factor", 8.0);
        let rope = &of(&large)["rope_parameters"]["full_attention"];
        assert_eq!(rope, &json!({"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}));
        let bytes = gemma3().open().unwrap().files[0].map.bytes().to_vec();
        let at = bytes.windows(18).position(|w| w == b"gemma3.block_count").unwrap() + 18 + 4;
        let mut bytes = bytes;
        bytes[at] = 62;
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), bytes).unwrap();
        let large = config(&Gguf::open(&[file.path().to_owned()]).unwrap()).unwrap().0;
        assert_eq!(large["query_pre_attn_scalar"], 160);
        let yarn = gemma3().text("gemma3.rope.scaling.type", "yarn");
        assert!(refusal(&yarn).contains("yarn (expected linear"), "{}", refusal(&yarn));
    }

    #[test]
    fn gemma_4_says_what_differs_from_layer_to_layer() {
        let config = of(&e2b());
        for (key, value) in [
            ("model_type", json!("gemma4_text")),
            ("head_dim", json!(256)),
            ("global_head_dim", json!(512)),
            ("num_key_value_heads", json!(1)),
            ("num_global_key_value_heads", Json::Null),
            ("attention_k_eq_v", json!(false)),
            ("intermediate_size", json!(6144)),
            ("use_double_wide_mlp", json!(true)),
            ("num_kv_shared_layers", json!(3)),
            ("hidden_size_per_layer_input", json!(256)),
            ("vocab_size", json!(262_144)),
            ("final_logit_softcapping", json!(30.0)),
            ("enable_moe_block", json!(false)),
            ("layer_types", json!([SLIDING, SLIDING, FULL, SLIDING, SLIDING, FULL])),
            (
                "rope_parameters",
                json!({
                    FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
                    SLIDING: {"rope_type": "default", "rope_theta": 1e4}
                }),
            ),
        ] {
            assert_eq!(config[key], value, "{key}");
        }
        let heads = [8, 8, 2, 8, 8, 2].map(|heads: i32| heads.to_le_bytes().to_vec());
        let large = gemma4([9; 6])
            .list("gemma4.attention.head_count_kv", 5, &heads)
            .number("gemma4.expert_count", 128)
            .number("gemma4.expert_used_count", 8)
            .number("gemma4.expert_feed_forward_length", 704);
        let config = of(&large);
        for (key, value) in [
            ("num_key_value_heads", json!(8)),
            ("num_global_key_value_heads", json!(2)),
            ("attention_k_eq_v", json!(true)),
            ("use_double_wide_mlp", json!(false)),
            ("enable_moe_block", json!(true)),
            ("num_experts", json!(128)),
            ("top_k_experts", json!(8)),
            ("moe_intermediate_size", json!(704)),
        ] {
            assert_eq!(config[key], value, "{key}");
        }
    }

    #[test]
    fn what_no_member_of_the_family_says_is_refused_by_its_key() {
        let heads = [8, 4, 2, 8, 8, 2].map(|heads: i32| heads.to_le_bytes().to_vec());
        for (writer, key) in [
            (Writer::default(), "general.architecture"),
            (Writer::default().text("general.architecture", "llama"), "`llama`"),
            (Writer::default().text("general.architecture", "gemma4"), "gemma4.embedding_length"),
            (gemma4([9, 9, 8, 9, 9, 9]), "head_count_kv"),
            (
                gemma4([9, 9, 8, 9, 9, 9]).number("gemma4.attention.head_count_kv", 1),
                "gemma4.feed_forward_length",
            ),
            (
                gemma4([9; 6]).list("gemma4.attention.head_count_kv", 5, &heads),
                "gemma4.attention.head_count_kv",
            ),
            (e2b().text("gemma4.expert_count", "many"), "gemma4.expert_count"),
            (e2b().text("tokenizer.ggml.eos_token_id", "1"), "tokenizer.ggml.eos_token_id"),
            (e2b().number("tokenizer.ggml.suppress_tokens", 1), "tokenizer.ggml.suppress_tokens"),
        ] {
            assert!(refusal(&writer).contains(key), "{key}: {}", refusal(&writer));
        }
    }

    proptest! {
        #[test]
        fn any_bytes_of_a_models_header_changed_are_refused_or_make_a_config(
            changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
        ) {
            let heads = [8, 8, 2, 8, 8, 2].map(|heads: i32| heads.to_le_bytes().to_vec());
            let writer = gemma4([9; 6]).list("gemma4.attention.head_count_kv", 5, &heads);
            let mut bytes = writer.bytes();
            for (index, byte) in changes {
                let at = index.index(bytes.len());
                bytes[at] = byte;
            }
            let file = tempfile::NamedTempFile::new().unwrap();
            std::fs::write(file.path(), bytes).unwrap();
            if let Ok(gguf) = Gguf::open(&[file.path().to_owned()])
                && let Ok((config, _)) = config(&gguf)
            {
                let layers = config["num_hidden_layers"].as_u64().unwrap();
                prop_assert_eq!(config["layer_types"].as_array().unwrap().len() as u64, layers);
            }
        }
    }

    #[test]
    fn answers_end_at_the_ids_the_file_names_and_at_the_familys_control_tokens() {
        let tokens = ["<eos>", "a", "<turn|>", "<|tool_response>"];
        let writer = e2b()
            .number("tokenizer.ggml.eos_token_id", 2)
            .number("tokenizer.ggml.eot_token_id", 1)
            .texts("tokenizer.ggml.tokens", &tokens)
            .list("tokenizer.ggml.suppress_tokens", 5, &[vec![7, 0, 0, 0]]);
        let generation = config(&writer.open().unwrap()).unwrap().1;
        assert_eq!(
            Json::Object(generation),
            json!({"eos_token_id": [2, 1, 3], "suppress_tokens": [7]})
        );
    }
}
