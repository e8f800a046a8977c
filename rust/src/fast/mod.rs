//! Gemma 4 for a CPU, on plain slices: the mathematics of [`crate::model`], in few passes over memory and without ATen.
//!
//! Weights are multiplied as they are stored, sums and the residual stream are float32, and what a product takes in is bfloat16,
//! as are keys and values. One sequence at a time. A token gets the same bits alone and as part of a prompt,
//! however that is cut and on any number of threads.

mod experts;
mod layer;
mod parts;
mod rope;

use std::{ops::Range, sync::Arc};

use half::bf16;

use layer::{Buffers, Layer, Step};
pub(crate) use parts::Parts;
use rope::RotaryEmbedding;

use crate::{
    aten::Tensor,
    checkpoint::Place,
    config::{Config, KeyValues as Plan, LayerType, NormForm},
    error::{Error, Result},
    kernels::{
        InstructionSet, Kernels, KeyValues, Matrix, Product, best, each_row, multiply, norm,
        norm_in_place, scale_add,
    },
    model::is_unused_kv,
    weights::{Form, Sizes, Table, Weights},
};

/// Tokens of a prompt that go through the layers together, unless asked for otherwise: enough to read weights rarely, and
/// few enough for their activations to stay in cache.
pub(crate) const DEFAULT_CHUNK: usize = 512;

/// Which tokens' last hidden states are wanted.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Keep {
    None,
    Last,
    All,
}

/// Weights and cache of one sequence.
pub(crate) struct Fast {
    kernels: Arc<Kernels>,
    embed_tokens: Table,
    embed_scale: f32,
    per_layer_input: Option<PerLayerInput>,
    layers: Vec<Layer>,
    first_shared_layer: usize,
    /// By [`LayerType::index`].
    rope: [Option<RotaryEmbedding>; 2],
    norm: Vec<f32>,
    eps: f32,
    lm_head: Matrix, // [vocab, hidden]
    final_logit_softcapping: Option<f32>,
    /// Ids that are never chosen.
    suppress_tokens: Vec<usize>,
    hidden_size: usize,
    chunk: usize,
    /// By layer; empty where another layer's are read. One for each key and value head.
    cache: Vec<Vec<KeyValues>>,
    buffers: Buffers,
    sizes: Sizes,
    bits: usize,
    parts: Parts,
}

/// A vector for each layer and token (gemma4.md 2.3): a table of its own plus a projection of the embedding.
struct PerLayerInput {
    embed_tokens_per_layer: Table, // [vocab, layers · P]
    scale: f32,
    per_layer_model_projection: Matrix, // [layers · P, hidden]
    projection_scale: f32,
    per_layer_projection_norm: Vec<f32>, // [P]
}

/// What to compute with.
#[derive(Clone, Copy, Debug)]
pub(crate) struct How {
    /// Positions the cache holds.
    pub(crate) context: usize,
    /// Tokens of a prompt that go through the layers together.
    pub(crate) chunk: usize,
    pub(crate) threads: usize,
    /// `None`: the fastest of this machine.
    pub(crate) instructions: Option<InstructionSet>,
}

impl Fast {
    /// Loads the checkpoint in `places`; `like` is a bfloat16 tensor on the CPU.
    ///
    /// # Errors
    /// What the checkpoint gets wrong, naming file, key or tensor; `Input` for instructions that are not there.
    pub(crate) fn load(
        config: &Config,
        places: &[Place],
        how: How,
        like: &Tensor,
        on_layer: &mut dyn FnMut(usize, usize) -> Result<()>,
    ) -> Result<Self> {
        let kernels = Arc::new(Kernels::new(how.threads, how.instructions)?);
        let mut weights = Weights::open(places, like.alias()?, Form::EXACT)?
            .packed_by(&config.schemes)
            .with_kernels(Arc::clone(&kernels));
        let (count, hidden) = (config.layers.len(), config.hidden_size);
        let vocabulary = [config.vocab_size, hidden];
        let embed_tokens = weights.take_table("model.embed_tokens.weight", vocabulary)?;
        let per_layer_input = PerLayerInput::load(config, &mut weights)?;
        let mut layers = Vec::with_capacity(count);
        for layer_idx in 0..count {
            layers.push(Layer::load(layer_idx, config, &mut weights)?);
            on_layer(layer_idx + 1, count)?;
        }
        let norm = norm_weight(&mut weights, "model.norm.weight", hidden, config)?;
        let lm_head = if weights.has("lm_head.weight") {
            weights.take_stored("lm_head.weight", vocabulary)?
        } else if let Table::Dense(matrix) = &embed_tokens {
            Matrix::Bf16(matrix.clone())
        } else {
            weights.take_stored("model.embed_tokens.weight", vocabulary)?
        };
        let first_shared_layer = config.first_shared_layer();
        weights.check_all_taken(|name| is_unused_kv(name, first_shared_layer..count))?;

        let chunk = how.chunk.min(how.context);
        let cache = config.layers.iter().map(|layer| match layer.key_values {
            Plan::Shared { .. } => Ok(Vec::new()),
            Plan::Own { .. } => {
                // The oldest that a chunk's first token sees must still be there when its last one is written.
                let rows = match layer.layer_type {
                    LayerType::Sliding => how.context.min(config.sliding_window + chunk),
                    LayerType::Full => how.context,
                };
                (0..layer.num_key_value_heads)
                    .map(|_| KeyValues::new(rows, layer.head_dim))
                    .collect()
            }
        });
        let rope = LayerType::ALL.map(|layer_type| {
            let layer = config.layers.iter().find(|layer| layer.layer_type == layer_type)?;
            let rope = config.rope[layer_type.index()].as_ref()?;
            Some(RotaryEmbedding::new(rope, layer.head_dim))
        });
        Ok(Self {
            cache: cache.collect::<Result<_>>()?,
            kernels,
            embed_tokens,
            embed_scale: scale(hidden),
            per_layer_input,
            layers,
            first_shared_layer,
            rope,
            norm,
            eps: config.rms_norm_eps as f32,
            lm_head,
            final_logit_softcapping: config.final_logit_softcapping.map(|cap| cap as f32),
            suppress_tokens: config.suppress_tokens.iter().map(|&id| id as usize).collect(),
            hidden_size: hidden,
            chunk,
            sizes: weights.sizes(),
            bits: weights.bits(),
            buffers: Buffers::default(),
            parts: Parts::default(),
        })
    }

    /// Bytes of the weights, as they are kept.
    pub(crate) fn sizes(&self) -> &Sizes {
        &self.sizes
    }

    /// Fewest bits of a weight's value as it is multiplied.
    pub(crate) fn bits(&self) -> usize {
        self.bits
    }

    /// Bytes of the cache.
    pub(crate) fn cache_bytes(&self) -> u64 {
        self.cache.iter().flatten().map(|one| one.bytes() as u64).sum()
    }

    /// The instructions it runs with.
    pub(crate) fn instructions(&self) -> InstructionSet {
        self.kernels.set
    }

    /// Time and bytes of each part of the steps since [`Fast::forget_parts`].
    pub(crate) fn parts(&self) -> &Parts {
        &self.parts
    }

    pub(crate) fn forget_parts(&mut self) {
        self.parts = Parts::default();
    }

    /// Reads `ids` at positions from `start` on; the likeliest id after the last of them. `go_on` is asked between chunks; `None`
    /// when it says no.
    ///
    /// # Errors
    /// `Internal` when a thread failed.
    pub(crate) fn next(
        &mut self,
        ids: &[i64],
        start: usize,
        go_on: &mut dyn FnMut() -> bool,
    ) -> Result<Option<i64>> {
        let Some(hidden) = self.run(ids, start, Keep::Last, go_on)? else { return Ok(None) };
        let is_allowed = |id: usize| !self.suppress_tokens.contains(&id);
        // The soft cap changes no order.
        let found = best(&self.kernels, &hidden, &self.lm_head, 1, &is_allowed)?;
        self.parts.end("head", self.lm_head.bytes());
        match found.first() {
            Some(&(id, _)) => Ok(Some(id as i64)),
            None => Err(Error::Internal("no logit is a number".into())),
        }
    }

    /// Reads `ids` at positions from `start` on; logits of the last of them, or of all, `[kept, vocab]`.
    ///
    /// # Errors
    /// `Internal` when a thread failed.
    pub(crate) fn logits(&mut self, ids: &[i64], start: usize, all: bool) -> Result<Vec<f32>> {
        let keep = if all { Keep::All } else { Keep::Last };
        let hidden = self.run(ids, start, keep, &mut || true)?.unwrap_or_default();
        let kept = hidden.len() / self.hidden_size;
        let mut logits = vec![0.0; kept * self.lm_head.shape()[0]];
        multiply(&self.kernels, &hidden, &mut [Product::whole(&self.lm_head, &mut logits)])?;
        if let Some(cap) = self.final_logit_softcapping {
            for logit in &mut logits {
                *logit = (*logit / cap).tanh() * cap;
            }
        }
        Ok(logits)
    }

    /// The kept tokens' last hidden states after the final norm, `[kept, hidden]`; `None` when `go_on` said no between chunks.
    fn run(
        &mut self,
        ids: &[i64],
        start: usize,
        keep: Keep,
        go_on: &mut dyn FnMut() -> bool,
    ) -> Result<Option<Vec<bf16>>> {
        let mut kept = Vec::new();
        let chunks = ids.len().div_ceil(self.chunk);
        for (index, ids) in ids.chunks(self.chunk).enumerate() {
            let keep = if keep == Keep::Last && index + 1 < chunks { Keep::None } else { keep };
            if index > 0 && !go_on() {
                return Ok(None);
            }
            kept.extend(self.run_chunk(ids, start + index * self.chunk, keep)?);
        }
        Ok(Some(kept))
    }

    fn run_chunk(&mut self, ids: &[i64], start: usize, keep: Keep) -> Result<Vec<bf16>> {
        self.parts.begin();
        let tokens = ids.len();
        let hidden = self.hidden_size;
        let mut h = vec![0.0; tokens * hidden];
        let mut x = vec![bf16::ZERO; tokens * hidden];
        let (kernels, eps) = (&*self.kernels, self.eps);
        let (set, table) = (kernels.set, &self.embed_tokens);
        let input_layernorm = &self.layers[0].input_layernorm;
        let scale = self.embed_scale;
        each_row(kernels, tokens, (&mut h, hidden), (&mut x, hidden), &|token, h, x| {
            table.read(ids[token] as usize, 0..hidden, x);
            for (h, x) in h.iter_mut().zip(&mut *x) {
                // Rounded, as transformers does: this is what the projection below takes in.
                *x = bf16::from_f32(x.to_f32() * scale);
                *h = x.to_f32();
            }
        })?;
        // The layers that only read other layers' caches get theirs when they run, for the tokens that are left.
        let input = self.per_layer_input.as_ref();
        let first_shared = self.first_shared_layer;
        let per_layer_inputs = |tokens: (&[i64], &[bf16]), layers: Range<usize>| match input {
            None => Ok(Vec::new()),
            Some(input) => input.of(kernels, tokens, layers, eps),
        };
        let mut per_layer = per_layer_inputs((ids, &x), 0..first_shared)?;
        let embedded = match keep {
            Keep::None => Vec::new(),
            Keep::Last => x[(tokens - 1) * hidden..].to_vec(),
            Keep::All => x.clone(),
        };
        each_row(kernels, tokens, (&mut x, hidden), (&mut [(); 0], 0), &|token, x, _| {
            norm(set, &h[token * hidden..(token + 1) * hidden], Some(input_layernorm), eps, x);
        })?;
        self.parts.end("embedding", input.map_or(0, |input| input.bytes(first_shared)));

        let mut step = Step::new(start, tokens, &self.rope);
        for layer_idx in 0..self.layers.len() {
            if layer_idx == first_shared {
                if keep == Keep::None {
                    return Ok(Vec::new());
                }
                if keep == Keep::Last && tokens > 1 {
                    h.drain(..h.len() - hidden);
                    x.drain(..x.len() - hidden);
                    step = Step::new(start + tokens - 1, 1, &self.rope);
                }
                let kept = &ids[ids.len() - step.tokens..];
                let shared = first_shared..self.layers.len();
                let bytes = input.map_or(0, |input| input.bytes(shared.len()));
                per_layer = per_layer_inputs((kept, &embedded), shared)?;
                self.parts.end("embedding", bytes);
            }
            let next_norm =
                self.layers.get(layer_idx + 1).map_or(&self.norm, |l| &l.input_layernorm);
            let how = (kernels, &mut self.parts);
            let layer = &self.layers[layer_idx];
            let first = if layer_idx < first_shared { 0 } else { first_shared };
            let inputs = (&*per_layer, first);
            let state = (&step, &mut *self.cache, &mut self.buffers);
            layer.forward(how, (&mut h, &mut x), inputs, state, next_norm)?;
        }
        Ok(match keep {
            Keep::None => Vec::new(),
            Keep::Last => x.split_off(x.len() - hidden),
            Keep::All => x,
        })
    }
}

impl PerLayerInput {
    /// `None` for models without (`hidden_size_per_layer_input` 0).
    fn load(config: &Config, weights: &mut Weights) -> Result<Option<Self>> {
        let width = config.hidden_size_per_layer_input;
        if width == 0 {
            return Ok(None);
        }
        let (layers, hidden) = (config.layers.len(), config.hidden_size);
        let table = [config.vocab_size_per_layer_input, layers * width];
        let projection = "model.per_layer_model_projection.weight";
        Ok(Some(Self {
            embed_tokens_per_layer: weights
                .take_table("model.embed_tokens_per_layer.weight", table)?,
            scale: scale(width),
            per_layer_model_projection: weights
                .take_stored(projection, [layers * width, hidden])?,
            projection_scale: (hidden as f32).powf(-0.5),
            per_layer_projection_norm: norm_weight(
                weights,
                "model.per_layer_projection_norm.weight",
                width,
                config,
            )?,
        }))
    }

    /// `[tokens, layers, P]` of token ids and their embeddings, for some of the layers.
    fn of(
        &self,
        kernels: &Kernels,
        (ids, embedded): (&[i64], &[bf16]),
        layers: Range<usize>,
        eps: f32,
    ) -> Result<Vec<f32>> {
        let weight = &self.per_layer_projection_norm;
        let (set, p) = (kernels.set, weight.len());
        let columns = layers.start * p..layers.end * p;
        let width = columns.len();
        let mut inputs = vec![0.0; ids.len() * width];
        let projection = &self.per_layer_model_projection;
        let product = Product { matrix: projection, rows: columns.clone(), out: &mut inputs };
        multiply(kernels, embedded, &mut [product])?;
        let mut rows = vec![bf16::ZERO; inputs.len()];
        let (a, b) = ((&mut *inputs, width), (&mut *rows, width));
        each_row(kernels, ids.len(), a, b, &|token, inputs, row| {
            self.embed_tokens_per_layer.read(ids[token] as usize, columns.clone(), row);
            for input in &mut *inputs {
                *input *= self.projection_scale;
            }
            for (input, row) in inputs.chunks_exact_mut(p).zip(row.chunks_exact(p)) {
                norm_in_place(set, input, weight, eps);
                scale_add(set, input, row, self.scale, std::f32::consts::FRAC_1_SQRT_2);
            }
        })?;
        Ok(inputs)
    }

    /// Bytes of weights that are read for `layers` of all.
    fn bytes(&self, layers: usize) -> usize {
        let [rows, _] = self.per_layer_model_projection.shape();
        let all = self.per_layer_model_projection.bytes();
        all / rows * layers * self.per_layer_projection_norm.len()
    }
}

/// What a norm multiplies with.
fn norm_weight(weights: &mut Weights, name: &str, len: usize, config: &Config) -> Result<Vec<f32>> {
    let mut weight = weights.take_vector(name, len)?;
    if config.traits.norm_form == NormForm::OnePlus {
        for w in &mut weight {
            *w += 1.0;
        }
    }
    Ok(weight)
}

/// sqrt(width), rounded to the model's element type before it multiplies: 39.25 for E2B's 1536.
fn scale(width: usize) -> f32 {
    bf16::from_f64((width as f64).sqrt()).to_f32()
}
