//! From options to an engine: which files, element type, layout and runner.

use std::{
    path::PathBuf,
    time::{Duration, Instant},
};

use super::{Engine, Runner, check_range};
use crate::{
    aten::{DType, InferenceMode, Tensor, num_threads},
    checkpoint::Place,
    compiled::{Compiled, Programs},
    config::{Config, KeyValues, LayerPlan, LayerType},
    error::{Error, Result},
    fast::{self, Fast, How},
    kernels::InstructionSet,
    step::{Shape, Step},
    weights::{Form, Sizes, Weights},
};

/// Tokens of a prefill step on devices that compile: one pass of a TPU's 128-row matrix unit.
const DEFAULT_CHUNK: usize = 128;

/// Longest context that is asked of a device; twice the largest published `max_position_embeddings`.
pub(super) const MAX_CONTEXT: usize = 1 << 19;

/// What to load, and how.
pub(crate) struct Options {
    /// Folders and GGUF files; a tensor is taken from the first that has it.
    pub(crate) checkpoint: Vec<PathBuf>,
    /// A one-element tensor that names the device.
    pub(crate) like: Tensor,
    /// Positions the cache holds; at most the checkpoint's `max_position_embeddings` are used.
    pub(crate) context: usize,
    /// Element type to run in; `None` means the checkpoint's.
    pub(crate) dtype: Option<DType>,
    /// Tokens of a prefill step with static shapes; `None`: shapes follow the text (exact mode) on
    /// devices that run eagerly, and chunks have a default size on those that compile.
    pub(crate) chunk: Option<usize>,
    /// What steps that run eagerly compute with.
    pub(crate) form: Form,
    /// Kernels of our own where there are some: for models in bfloat16 on a CPU. `None`: for quantized weights.
    pub(crate) fast: Option<bool>,
    /// The instructions that these use; `None`: the fastest of this machine.
    pub(crate) instructions: Option<InstructionSet>,
}

/// How a device that compiles runs steps: recorded and compiled whole.
pub(crate) struct Compile {
    /// Sequences that a decode launch advances; with one row a TPU's matrix unit would be left out.
    pub(crate) slots: usize,
    /// Most tokens of one launch.
    pub(crate) largest: usize,
    /// Projections as int8.
    pub(crate) int8: bool,
}

/// Takes the context that the cache has, parameters and state, and gives the programs that run on them.
pub(crate) type Bind<'a> =
    dyn FnMut(usize, Vec<Tensor>, Vec<Tensor>) -> Result<Box<dyn Programs>> + 'a;

/// What is loaded.
pub(crate) struct Info {
    pub(crate) full_rings: usize,
    pub(crate) sliding_rings: usize,
    pub(crate) shared_layers: usize,
    pub(crate) context: usize,
    pub(crate) vocab_size: usize,
    pub(crate) eos_token_ids: Vec<i64>,
    pub(crate) dtype: DType,
    pub(crate) device: String,
    pub(crate) sizes: Sizes,
    pub(crate) cache_bytes: u64,
    pub(crate) load: Duration,
    pub(crate) static_shapes: bool,
    pub(crate) weight_format: &'static str,
    pub(crate) slots: usize,
    /// Instructions of fast mode's kernels; `None` elsewhere.
    pub(crate) instructions: Option<InstructionSet>,
}

impl Engine {
    /// Loads a checkpoint; `on_layer(done, all)` is called after each layer and may end the load.
    ///
    /// # Errors
    /// What the checkpoint or the options get wrong, each naming file, key, tensor or argument.
    pub(crate) fn load(
        options: &Options,
        compile: Option<(Compile, &mut Bind<'_>)>,
        on_layer: &mut dyn FnMut(usize, usize) -> Result<()>,
    ) -> Result<Self> {
        let begun = Instant::now();
        let _inference = InferenceMode::enter()?;
        check_range("context", options.context, 1..=MAX_CONTEXT)?;
        if let Some(chunk) = options.chunk {
            check_range("prefill_chunk", chunk, 2..=MAX_CONTEXT)?;
        }
        let places = Place::open_all(&options.checkpoint)?;
        let config = Config::from_places(&places)?;
        let dtype = match options.dtype.or(config.dtype) {
            Some(dtype) => dtype,
            None => Weights::open(&places, options.like.alias()?, Form::EXACT)?.dtype()?,
        };
        let like = options.like.to_dtype(dtype)?;
        let context = options.context.min(config.max_position_embeddings);
        let device = like.device()?;
        let is_fast = options.fast.unwrap_or(config.is_quantized)
            && device == "cpu"
            && dtype == DType::Bf16
            && compile.is_none();
        if options.instructions.is_some() && !is_fast {
            return Err(Error::Input(format!(
                "expected instructions only for fast arithmetic in bfloat16 on cpu, found {} on \
                 {device}",
                dtype.name()
            )));
        }
        let shape = match &compile {
            None => {
                let eager = ["cpu", "cuda"].iter().any(|eager| device.starts_with(eager));
                let chunk = options.chunk.or((!eager).then_some(DEFAULT_CHUNK));
                Shape { slots: 1, context, chunk }
            }
            Some((compile, _)) => {
                Shape { slots: compile.slots, context, chunk: Some(compile.largest) }
            }
        };
        let (runner, sizes, cache_bytes, weight_format) = if is_fast {
            let how = How {
                context,
                chunk: options.chunk.unwrap_or(fast::DEFAULT_CHUNK),
                // As many as PyTorch's operations have.
                threads: usize::try_from(num_threads()?).unwrap_or(1),
                instructions: options.instructions,
            };
            let fast = Fast::load(&config, &places, how, &like, on_layer)?;
            let (weights, cache) = (fast.sizes().clone(), fast.cache_bytes());
            let format = format_of(fast.bits(), dtype);
            (Runner::Fast(Box::new(fast)), weights, cache, format)
        } else {
            let form = match &compile {
                None => options.form,
                Some((compile, _)) => Form::compiled(compile.int8),
            };
            let mut step = Step::load(&config, &places, (shape, form), &like, on_layer)?;
            let (weights, cache) = (step.sizes().clone(), step.cache_bytes());
            let format = if form.int8 { DType::I8.name() } else { dtype.name() };
            let runner = match compile {
                None => Runner::Eager(Box::new(step)),
                Some((compile, bind)) => {
                    let (parameters, state) = step.tensors()?;
                    // A launch may overwrite the state's memory, so nobody else may hold it.
                    drop(step);
                    let programs = bind(context, parameters, state)?;
                    Runner::Compiled(Compiled::new(programs, compile.slots, like.alias()?))
                }
            };
            (runner, weights, cache, format)
        };
        let owners = |layer_type: LayerType| {
            let owns = |l: &&LayerPlan| {
                l.layer_type == layer_type && matches!(l.key_values, KeyValues::Own { .. })
            };
            config.layers.iter().filter(owns).count()
        };
        let info = Info {
            full_rings: owners(LayerType::Full),
            sliding_rings: owners(LayerType::Sliding),
            shared_layers: config.layers.len() - config.first_shared_layer(),
            context,
            vocab_size: config.vocab_size,
            eos_token_ids: config.eos_token_ids,
            dtype,
            device,
            sizes,
            cache_bytes,
            load: begun.elapsed(),
            static_shapes: shape.chunk.is_some() && !is_fast,
            weight_format,
            slots: shape.slots,
            instructions: match &runner {
                Runner::Fast(fast) => Some(fast.instructions()),
                _ => None,
            },
        };
        Ok(Self { runner, info })
    }
}

/// What weights are called whose values have `bits` when they are multiplied.
pub(super) fn format_of(bits: usize, dtype: DType) -> &'static str {
    match bits {
        4 => "int4",
        5 => "int5",
        6 => "int6",
        8 => "int8",
        _ => dtype.name(),
    }
}
