//! `config.json` and `generation_config.json`, or what a GGUF file says in their place → [`Config`], with one [`LayerPlan`] a layer.
//!
//! Keys keep Hugging Face's names. Facts that follow from several keys (which layers own a cache, head
//! sizes of full layers) are derived once, here, so that model code never looks at a key twice. Nothing
//! here touches a tensor.

mod documents;
mod experts;
mod family;
mod layers;
mod quantization;
mod rope;

pub(crate) use experts::ExpertsPlan;
pub(crate) use family::{NormForm, Traits};
pub(crate) use quantization::{Packs, Scheme};

use std::path::Path;

use documents::Documents;
use family::Family;
use layers::{layer_plans, layer_types};
use rope::rope_parameters;
use serde_json::{Map, Value};

use crate::{
    aten::DType,
    checkpoint::Place,
    error::{Error, Result},
    json::Keys,
};

/// Upper bounds on sizes, several times what the largest member of the family has (31B: 60 layers,
/// hidden 5,376, MLP 21,504, vocabulary 262,144), so that a broken file cannot ask for absurd memory.
const MAX_LAYERS: usize = 512;
const MAX_WIDTH: usize = 1 << 18;
const MAX_VOCAB: usize = 1 << 22;
const MAX_POSITIONS: usize = 1 << 24;

/// Which keys a layer's attention sees (config key `layer_types`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LayerType {
    /// `sliding_attention`: the last `sliding_window` positions, the query's own included.
    Sliding,
    /// `full_attention`: every position up to the query's own.
    Full,
}

impl LayerType {
    /// Both types, in the order of [`LayerType::index`].
    pub(crate) const ALL: [Self; 2] = [Self::Sliding, Self::Full];

    /// The value in `layer_types` and the key in `rope_parameters`.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Sliding => "sliding_attention",
            Self::Full => "full_attention",
        }
    }

    /// Position in per-type arrays.
    pub(crate) const fn index(self) -> usize {
        match self {
            Self::Sliding => 0,
            Self::Full => 1,
        }
    }
}

/// Where a layer's keys and values come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KeyValues {
    /// The layer projects and caches its own.
    Own {
        /// V is the raw K projection; there is no `v_proj` (`attention_k_eq_v`, full layers only).
        k_eq_v: bool,
    },
    /// The layer reads those of layer `producer`, the last owner of the same type.
    Shared {
        /// Index of the layer that owns the cache.
        producer: usize,
    },
}

/// All that one decoder layer needs to know about itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LayerPlan {
    /// Sliding or full attention.
    pub(crate) layer_type: LayerType,
    /// Width of a head.
    pub(crate) head_dim: usize,
    /// Key/value heads.
    pub(crate) num_key_value_heads: usize,
    /// Width of the MLP; double on KV-shared layers of models with `use_double_wide_mlp`.
    pub(crate) intermediate_size: usize,
    /// Own cache or another layer's.
    pub(crate) key_values: KeyValues,
}

/// Rotary position embedding of one layer type (`rope_parameters`).
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Rope {
    /// Base of the frequencies.
    pub(crate) rope_theta: f64,
    /// Frequencies that turn; the other `head_dim / 2 - rotated` are zero ("proportional").
    pub(crate) rotated: usize,
    /// Divides every frequency.
    pub(crate) factor: f64,
}

/// A text model of the family, as its files describe it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Config {
    /// Rows of `embed_tokens`.
    pub(crate) vocab_size: usize,
    /// Width of the residual stream.
    pub(crate) hidden_size: usize,
    /// Query heads.
    pub(crate) num_attention_heads: usize,
    /// Added to the mean of squares in every norm.
    pub(crate) rms_norm_eps: f64,
    /// Keys a sliding layer sees, the query's own included.
    pub(crate) sliding_window: usize,
    /// Positions the model was trained for.
    pub(crate) max_position_embeddings: usize,
    /// Width of the per-layer input; 0 when the model has none.
    pub(crate) hidden_size_per_layer_input: usize,
    /// Rows of `embed_tokens_per_layer`.
    pub(crate) vocab_size_per_layer_input: usize,
    /// Logits are squashed to ± this.
    pub(crate) final_logit_softcapping: Option<f64>,
    /// What differs from member to member in every layer.
    pub(crate) traits: Traits,
    /// Element type the checkpoint asks to be run in.
    pub(crate) dtype: Option<DType>,
    /// One plan a layer.
    pub(crate) layers: Vec<LayerPlan>,
    /// The experts of every layer; `None` for models without.
    pub(crate) experts: Option<ExpertsPlan>,
    /// Rope by [`LayerType::index`]; `None` for a type no layer has.
    pub(crate) rope: [Option<Rope>; 2],
    /// Ids that end a turn.
    pub(crate) eos_token_ids: Vec<i64>,
    /// Ids that are never chosen (`suppress_tokens` of `generation_config.json`; 12B has two).
    pub(crate) suppress_tokens: Vec<i64>,
    /// The embedding table is the head too; false where the checkpoint has a head of its own.
    pub(crate) tie_word_embeddings: bool,
    /// What is packed like projections, where anything is.
    pub(crate) packs: Packs,
    /// How weights may be packed, in any of the folders; none where nothing is quantized so.
    pub(crate) schemes: Vec<Scheme>,
    /// Whether weights are stored in few bits, in any way.
    pub(crate) is_quantized: bool,
}

impl Config {
    /// Reads the first of `places` that says what the model is: a folder with config.json, and its `generation_config.json` if there is
    /// one, or a GGUF model; of the others only how weights are packed there.
    ///
    /// # Errors
    /// `Io`, `Format`, `Config` naming the key, `Unsupported` naming the feature.
    pub(crate) fn from_places(places: &[Place]) -> Result<Self> {
        let mut config: Option<Self> = None;
        for place in places {
            let Some(documents) = Documents::of(place)? else { continue };
            match &mut config {
                None => config = Some(documents.config()?),
                // Tables may be packed in another folder than the projections.
                Some(config) => {
                    let root = documents.root();
                    config.schemes.extend(schemes_of(&root)?);
                    config.packs = packs(&root)?.map_or(config.packs, |more| config.packs | more);
                    config.is_quantized |= documents.is_quantized()?;
                }
            }
        }
        let missing = || {
            Error::Input(format!(
                "expected a folder with config.json or a GGUF file, found none in {}",
                Place::names(places)
            ))
        };
        config.ok_or_else(missing)
    }

    /// `file` and the path in `generation` are only named in errors.
    fn from_json(
        file: &Path,
        top: &Map<String, Value>,
        generation: Option<(&Path, &Map<String, Value>)>,
    ) -> Result<Self> {
        let root = Keys::new(file, top);
        let text = root.object("text_config")?.unwrap_or_else(|| root.clone());
        let family = Family::of(&root, &text)?;

        let size = |key| family.size(&text, key);
        let types = layer_types(family, &text, size("num_hidden_layers")?)?;
        let layers = layer_plans(family, &text, &types)?;
        let config = Self {
            vocab_size: size("vocab_size")?,
            hidden_size: size("hidden_size")?,
            num_attention_heads: size("num_attention_heads")?,
            rms_norm_eps: text.number_or("rms_norm_eps", 1e-6, 0.0..=1.0)?,
            sliding_window: size("sliding_window")?,
            max_position_embeddings: size("max_position_embeddings")?,
            // Absent, transformers would take 256: a guess that no file should leave open. 0 and null mean none, and
            // Gemma 3 and 12B's classes know no such key.
            hidden_size_per_layer_input: if family == Family::Gemma3
                || text.text("model_type")? == Some("gemma4_unified_text")
            {
                0
            } else if text.has("hidden_size_per_layer_input") {
                text.count_or("hidden_size_per_layer_input", 0, MAX_WIDTH)?
            } else {
                return Err(text.wrong(
                    "hidden_size_per_layer_input",
                    "expected a width, or 0 for none; the key is absent".into(),
                ));
            },
            vocab_size_per_layer_input: text.count_or(
                "vocab_size_per_layer_input",
                0,
                MAX_VOCAB,
            )?,
            final_logit_softcapping: text.number("final_logit_softcapping", 1e-3..=1e6)?,
            traits: family.traits(&text)?,
            dtype: dtype(&root, &text)?,
            experts: experts::experts(&text)?,
            rope: rope_parameters(family, &text, &layers)?,
            eos_token_ids: eos_token_ids(&root, &text, generation)?
                .unwrap_or_else(|| family.eos_token_ids()),
            suppress_tokens: match generation {
                Some((file, json)) => {
                    Keys::new(file, json).ids("suppress_tokens")?.unwrap_or_default()
                }
                None => Vec::new(),
            },
            is_quantized: false,
            tie_word_embeddings: ties_embeddings(&root, &text)?,
            packs: packs(&root)?.unwrap_or_default(),
            schemes: schemes_of(&root)?,
            layers,
        };
        config.check(&text)?;
        Ok(config)
    }

    /// Rules that tie keys to each other.
    fn check(&self, text: &Keys<'_>) -> Result<()> {
        for (index, layer) in self.layers.iter().enumerate() {
            if !self.num_attention_heads.is_multiple_of(layer.num_key_value_heads) {
                return Err(text.wrong(
                    "num_key_value_heads",
                    format!(
                        "expected a divisor of num_attention_heads {}, found {} in layer {index}",
                        self.num_attention_heads, layer.num_key_value_heads
                    ),
                ));
            }
            if !layer.head_dim.is_multiple_of(2) {
                return Err(text.wrong(
                    "head_dim",
                    format!("expected an even number, found {} in layer {index}", layer.head_dim),
                ));
            }
        }
        if self.hidden_size_per_layer_input > 0 && self.vocab_size_per_layer_input < self.vocab_size
        {
            return Err(text.wrong(
                "vocab_size_per_layer_input",
                format!(
                    "expected at least vocab_size {}, found {}",
                    self.vocab_size, self.vocab_size_per_layer_input
                ),
            ));
        }
        for (key, ids) in
            [("eos_token_id", &self.eos_token_ids), ("suppress_tokens", &self.suppress_tokens)]
        {
            if let Some(id) = ids.iter().find(|&&id| id < 0 || id >= self.vocab_size as i64) {
                return Err(text.wrong(
                    key,
                    format!("expected ids below vocab_size {}, found {id}", self.vocab_size),
                ));
            }
        }
        Ok(())
    }

    /// Index of the first layer that only reads other layers' caches; the layer count without sharing.
    pub(crate) fn first_shared_layer(&self) -> usize {
        self.layers
            .iter()
            .position(|layer| matches!(layer.key_values, KeyValues::Shared { .. }))
            .unwrap_or(self.layers.len())
    }
}

/// How weights may be packed by this config.json.
fn schemes_of(root: &Keys<'_>) -> Result<Vec<Scheme>> {
    match quantization_of(root)? {
        Some(quantization) => quantization::schemes(&quantization),
        None => Ok(Vec::new()),
    }
}

/// `quantization_config`; it may stand at the top or in `text_config`.
fn quantization_of<'a>(root: &Keys<'a>) -> Result<Option<Keys<'a>>> {
    let text = root.object("text_config")?;
    let nested = text.map(|text| text.object("quantization_config")).transpose()?.flatten();
    Ok(root.object("quantization_config")?.or(nested))
}

/// What is packed beside projections; `None` where nothing is.
fn packs(root: &Keys<'_>) -> Result<Option<Packs>> {
    quantization_of(root)?.map(|quantization| quantization::packs(&quantization)).transpose()
}

/// Transformers' default, for the whole family, is true.
fn ties_embeddings(root: &Keys<'_>, text: &Keys<'_>) -> Result<bool> {
    const KEY: &str = "tie_word_embeddings";
    for keys in [root, text] {
        if keys.is_set(KEY) {
            return keys.flag(KEY);
        }
    }
    Ok(true)
}

fn dtype(root: &Keys<'_>, text: &Keys<'_>) -> Result<Option<DType>> {
    for (keys, key) in
        [(text, "dtype"), (root, "dtype"), (text, "torch_dtype"), (root, "torch_dtype")]
    {
        if let Some(name) = keys.text(key)? {
            return [DType::Bf16, DType::F16, DType::F32]
                .into_iter()
                .find(|dtype| dtype.name() == name)
                .map(Some)
                .ok_or_else(|| {
                    keys.wrong(
                        key,
                        format!("expected bfloat16, float16 or float32, found `{name}`"),
                    )
                });
        }
    }
    Ok(None)
}

/// `generation_config.json` knows best; a `text_config` may say just `1`.
fn eos_token_ids(
    root: &Keys<'_>,
    text: &Keys<'_>,
    generation: Option<(&Path, &Map<String, Value>)>,
) -> Result<Option<Vec<i64>>> {
    if let Some((file, json)) = generation
        && let Some(ids) = Keys::new(file, json).ids("eos_token_id")?
    {
        return Ok(Some(ids));
    }
    match root.ids("eos_token_id")? {
        Some(ids) => Ok(Some(ids)),
        None => text.ids("eos_token_id"),
    }
}

#[cfg(test)]
mod tests;
