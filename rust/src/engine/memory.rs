//! The memory that a checkpoint will need, from config.json alone: weights by format, cache, and what a step works in.
//!
//! Weights and cache are counted as the loaders count them; what a step works in is an estimate from its widest parts. Nothing here
//! opens a weight or touches a device.

use std::path::PathBuf;

use super::{check_range, load::MAX_CONTEXT};
use crate::{
    aten::DType,
    checkpoint::Place,
    config::{Config, KeyValues as Plan, LayerPlan, LayerType},
    error::{Error, Result},
    fast,
    kernels::{GROUP_SIZE, KeyValues},
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
    /// `None`: four or eight bits where fast mode has kernels for what config.json says, dense elsewhere.
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
    /// What config.json gets wrong, naming the key; `Input` for a context that no engine has.
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
        let sizes =
            Sizes { config: &config, element: dtype.bytes() as u128, format, runs, context };
        Ok(Needed {
            weights: within(sizes.weights()),
            cache: within(sizes.cache()),
            working: within(sizes.working()),
            context,
            format: match format {
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
    format: Format,
    runs: Runs,
    context: usize,
}

impl Sizes<'_> {
    /// `[rows, columns]` as a projection of the format.
    fn matrix(&self, rows: usize, columns: usize) -> u128 {
        let (rows, all) = (rows as u128, rows as u128 * columns as u128);
        match self.format {
            Format::Int8 if self.runs == Runs::Fast && columns.is_multiple_of(GROUP_SIZE) => {
                all + 2 * all / GROUP_SIZE as u128
            }
            Format::Int8 => all + 4 * rows,
            Format::Int4 if columns.is_multiple_of(GROUP_SIZE) => {
                all / 2 + 2 * all / GROUP_SIZE as u128
            }
            Format::Dense | Format::Int4 => all * self.element,
        }
    }

    /// The same, of something that config.json may leave out when it has projections packed.
    fn matrix_if(&self, is_packed: bool, rows: usize, columns: usize) -> u128 {
        if self.format != Format::Dense && self.runs == Runs::Fast && !is_packed {
            return rows as u128 * columns as u128 * self.element;
        }
        self.matrix(rows, columns)
    }

    /// A table that rows are looked up in.
    fn table(&self, rows: usize, columns: usize) -> u128 {
        let all = rows as u128 * columns as u128;
        let bits = match self.format {
            Format::Int4 => 4,
            Format::Int8 => 8,
            Format::Dense => 0,
        };
        let scheme = self.config.schemes.iter().find(|scheme| scheme.num_bits == bits);
        match scheme {
            // As it is in its file.
            Some(scheme) if self.config.packs.tables && self.runs == Runs::Fast => {
                all * bits as u128 / 8 + 2 * all / scheme.group_size.unwrap_or(columns) as u128
            }
            _ => all * self.element,
        }
    }

    fn weights(&self) -> u128 {
        let Config { vocab_size: vocab, hidden_size: hidden, .. } = *self.config;
        let mut bytes = self.table(vocab, hidden) + hidden as u128 * self.element;
        // A second form of the table multiplies, unless the one that is looked up in can.
        let is_packed = self.config.packs.tables && self.format != Format::Dense;
        let compiled = matches!(self.runs, Runs::Compiled { .. });
        if !self.config.tie_word_embeddings || compiled || is_packed {
            bytes += self.matrix(vocab, hidden);
        }
        let per_layer = self.config.hidden_size_per_layer_input;
        if per_layer > 0 {
            let width = self.config.layers.len() * per_layer;
            bytes += self.table(self.config.vocab_size_per_layer_input, width)
                + self.matrix(width, hidden)
                + per_layer as u128 * self.element;
        }
        bytes + self.config.layers.iter().map(|layer| self.layer(layer)).sum::<u128>()
    }

    fn layer(&self, layer: &LayerPlan) -> u128 {
        let (hidden, heads) = (self.config.hidden_size, self.config.num_attention_heads);
        let (dim, width) = (layer.head_dim, layer.intermediate_size);
        let (q, kv) = (heads * dim, layer.num_key_value_heads * dim);
        let mut norms = 4 * hidden + dim + usize::from(self.config.traits.has_layer_scalar);
        let mut bytes = self.matrix(q, hidden)
            + self.matrix(hidden, q)
            + 2 * self.matrix(width, hidden)
            + self.matrix(hidden, width);
        if let Plan::Own { k_eq_v } = layer.key_values {
            norms += dim;
            bytes += self.matrix(kv, hidden) * if k_eq_v { 1 } else { 2 };
        }
        let per_layer = self.config.hidden_size_per_layer_input;
        if per_layer > 0 {
            norms += hidden;
            bytes += self.matrix(per_layer, hidden) + self.matrix(hidden, per_layer);
        }
        if let Some(plan) = self.config.experts {
            let (experts, width) = (plan.num_experts, plan.moe_intermediate_size);
            // Three norms and the router's factors of columns, and its factors of experts.
            norms += 4 * hidden + experts;
            let packs = self.config.packs;
            let matrix = |rows, columns| self.matrix_if(packs.experts, rows, columns);
            let one = 2 * matrix(width, hidden) + matrix(hidden, width);
            bytes += self.matrix_if(packs.router, experts, hidden) + experts as u128 * one;
        }
        bytes + norms as u128 * self.element
    }

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
