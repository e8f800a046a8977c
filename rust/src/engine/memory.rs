//! The memory that a checkpoint will need, from config.json or a GGUF file's header alone: weights, cache, and what a step works in.
//!
//! Weights and cache are counted as the loaders count them; what a step works in is an estimate from its widest parts. Nothing here
//! reads a weight or touches a device.

mod weights;

use std::{collections::HashMap, path::PathBuf};

use weights::Count;

use super::{
    check_range,
    load::{MAX_CONTEXT, format_of},
};
use crate::{
    aten::DType,
    checkpoint::Place,
    config::{Config, KeyValues as Plan, LayerPlan, LayerType},
    error::{Error, Result},
    fast,
    kernels::{GROUP_SIZE, KeyValues},
    weights::Stored,
};

/// Most sequences that are believed.
const MAX_SLOTS: usize = 1 << 16;

/// How steps run, as far as memory asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Runs {
    /// Transformers' calls on a whole prompt.
    Exact,
    /// Kernels of our own, a prompt in chunks.
    Fast,
    /// Compiled programs with rings for `slots` sequences; `largest`: most tokens of a launch.
    Compiled { slots: usize, largest: usize },
}

/// The form of projections and of the head; tables and norms are in the model's element type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Format {
    /// The model's element type.
    Dense,
    /// One byte, and a float32 factor an output row; for kernels of our own a factor of two bytes for 32 columns.
    Int8,
    /// Half a byte, and a bfloat16 factor for 32 columns; also the tables where config.json says that they are packed.
    Int4,
}

/// What is asked.
pub(crate) struct Question {
    pub(crate) folders: Vec<PathBuf>,
    /// Positions the cache shall hold; at most the checkpoint's `max_position_embeddings` are used.
    pub(crate) context: usize,
    /// Element type to run in; `None` means the one config.json names, or bfloat16.
    pub(crate) dtype: Option<DType>,
    /// `None`: as the server decides for a CPU, fast for quantized weights in bfloat16.
    pub(crate) runs: Option<Runs>,
    /// `None`: in fast mode as the file has them, if there are kernels for that, dense elsewhere.
    pub(crate) format: Option<Format>,
}

/// Bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Needed {
    pub(crate) weights: u64,
    pub(crate) cache: u64,
    /// An estimate: activations of the widest part of a step.
    pub(crate) working: u64,
    /// The context these are for.
    pub(crate) context: usize,
    pub(crate) format: &'static str,
}

impl Question {
    /// The answer.
    ///
    /// # Errors
    /// What config.json or a GGUF file's header gets wrong, naming the key; `Input` for a context that no engine has.
    pub(crate) fn answer(&self) -> Result<Needed> {
        check_range("context", self.context, 1..=MAX_CONTEXT)?;
        let places = Place::open_all(&self.folders)?;
        let config = Config::from_places(&places)?;
        let dtype = self.dtype.or(config.dtype).unwrap_or(DType::Bf16);
        let is_quantized = config.is_quantized;
        let runs = self.runs.unwrap_or(if is_quantized && dtype == DType::Bf16 {
            Runs::Fast
        } else {
            Runs::Exact
        });
        if runs == Runs::Fast && dtype != DType::Bf16 {
            return Err(Error::Input(format!(
                "expected bfloat16 for fast arithmetic, found {}",
                dtype.name()
            )));
        }
        let bits = config.schemes.iter().filter(|scheme| scheme.has_groups_of(GROUP_SIZE));
        let format = self.format.unwrap_or(match bits.map(|scheme| scheme.num_bits).min() {
            Some(4) if runs == Runs::Fast => Format::Int4,
            Some(_) if runs == Runs::Fast => Format::Int8,
            _ => Format::Dense,
        });
        if let Runs::Compiled { slots, largest } = runs {
            check_range("slots", slots, 1..=MAX_SLOTS)?;
            check_range("spare", largest, 1..=MAX_CONTEXT)?;
        }
        let context = self.context.min(config.max_position_embeddings);
        let element = dtype.bytes() as u128;
        let sizes = Sizes { config: &config, element, runs, context };
        let as_stored = runs == Runs::Fast && self.format.is_none();
        let weights = Count {
            config: &config,
            element,
            format,
            runs,
            stored: if as_stored { Stored::by_name(&places) } else { HashMap::new() },
            has_gguf: places.iter().any(|place| place.gguf.is_some()),
        };
        let kept = weights.weights();
        Ok(Needed {
            weights: within(kept.bytes),
            cache: within(sizes.cache()),
            working: within(sizes.working()),
            context,
            format: match format {
                _ if runs == Runs::Fast => format_of(kept.bits, dtype),
                Format::Dense => dtype.name(),
                Format::Int8 => "int8",
                Format::Int4 => "int4",
            },
        })
    }
}

/// No file that is believed describes more than this.
fn within(bytes: u128) -> u64 {
    u64::try_from(bytes).unwrap_or(u64::MAX)
}

/// Bytes, in 128 bits: the largest sizes that config.json may have, multiplied, are more than 64 hold.
struct Sizes<'a> {
    config: &'a Config,
    /// Bytes of an element of the model's type.
    element: u128,
    runs: Runs,
    context: usize,
}

impl Sizes<'_> {
    fn cache(&self) -> u128 {
        let owners = self.config.layers.iter().filter(|l| matches!(l.key_values, Plan::Own { .. }));
        owners.map(|layer| self.rings(layer)).sum()
    }

    /// Keys and values of one layer.
    fn rings(&self, layer: &LayerPlan) -> u128 {
        let (heads, dim) = (layer.num_key_value_heads as u128, layer.head_dim);
        let (window, sliding) =
            (self.config.sliding_window, layer.layer_type == LayerType::Sliding);
        let plain = |rows: usize| 2 * heads * dim as u128 * rows as u128 * self.element;
        match self.runs {
            Runs::Exact if sliding => plain((2 * window).min(self.context)),
            Runs::Exact => plain(self.context),
            Runs::Fast => {
                let chunk = fast::DEFAULT_CHUNK.min(self.context);
                let rows = if sliding { self.context.min(window + chunk) } else { self.context };
                heads * KeyValues::bytes_of(rows, dim) as u128
            }
            Runs::Compiled { slots, .. } if sliding => slots as u128 * plain(window),
            Runs::Compiled { slots, largest } => slots as u128 * plain(self.context + largest),
        }
    }

    /// A token's values in the widest part of a layer: in float32 what is normed or weighted, in the model's type what is
    /// multiplied.
    fn working(&self) -> u128 {
        let tokens = match self.runs {
            Runs::Exact => self.context,
            Runs::Fast => fast::DEFAULT_CHUNK.min(self.context),
            Runs::Compiled { largest, .. } => largest,
        };
        let (hidden, heads) = (self.config.hidden_size, self.config.num_attention_heads);
        let widest = |of: &dyn Fn(&LayerPlan) -> usize| {
            self.config.layers.iter().map(of).max().unwrap_or_default()
        };
        let inner = widest(&|layer| 3 * layer.intermediate_size);
        let attention = widest(&|layer| 4 * (heads + layer.num_key_value_heads) * layer.head_dim);
        let experts = self.config.experts.map_or(0, |plan| {
            let of_one = 3 * plan.moe_intermediate_size + 2 * hidden;
            let each = if matches!(self.runs, Runs::Compiled { .. }) {
                plan.num_experts
            } else {
                plan.top_k_experts
            };
            each * of_one
        });
        let stream =
            6 * hidden + 3 * self.config.layers.len() * self.config.hidden_size_per_layer_input;
        let of_token = (stream + inner.max(attention).max(experts)) as u128 * self.element;
        let pairs = tokens as u128 * self.context as u128;
        let scores = match self.runs {
            // Scores and shares in float32, and the mask.
            Runs::Compiled { .. } => pairs * (heads as u128 * 8 + 1),
            // A mask, and what sdpa makes of it.
            Runs::Exact => pairs * (1 + self.element),
            Runs::Fast => 0,
        };
        // Of one row, or a decode step's.
        let rows = if let Runs::Compiled { slots, .. } = self.runs { slots } else { 1 };
        let logits = (rows * self.config.vocab_size) as u128 * (4 + self.element);
        tokens as u128 * of_token + scores + logits
    }
}
