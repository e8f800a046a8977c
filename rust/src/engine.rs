//! One loaded checkpoint that answers prompts: the decode loop, stop rules, cancellation.
//!
//! Token ids in, token ids out. Every call begins a sequence of its own, so nothing of an earlier call,
//! finished, cancelled or failed, can be seen in a later one.

use std::{
    path::PathBuf,
    time::{Duration, Instant},
};

use crate::{
    aten::{DType, InferenceMode, MappedFile, Tensor, num_threads},
    compiled::{Compiled, Counts, Programs},
    config::{Config, KeyValues, LayerType},
    error::{Error, Result},
    fast::{self, Fast, How, Parts},
    kernels::InstructionSet,
    step::{Shape, Step},
    weights::{Form, Weights},
};

/// The slot of the one sequence that is served at a time.
const SLOT: usize = 0;

/// Tokens of a prefill step on devices that compile: one pass of a TPU's 128-row matrix unit.
const DEFAULT_CHUNK: usize = 128;

/// What to load, and how.
pub(crate) struct Options {
    /// Folders; a tensor is taken from the first that has it.
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

/// A prompt and how far to go on from it.
pub(crate) struct Request<'a> {
    /// The prompt.
    pub(crate) ids: &'a [i64],
    /// Most tokens to make.
    pub(crate) max_new: usize,
    /// Ids that end the answer; `None` means the checkpoint's `eos_token_id`.
    pub(crate) stop: Option<&'a [i64]>,
    /// Tokens handed to the callback at a time.
    pub(crate) read_every: usize,
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Finish {
    /// A stop id came.
    Stop,
    /// `max_new` tokens were made, or the cache is full.
    Length,
    /// The callback said so.
    Cancelled,
}

impl Finish {
    /// OpenAI's and our own words.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::Cancelled => "cancelled",
        }
    }
}

/// An answer.
pub(crate) struct Decoded {
    /// The new ids, without the stop id.
    pub(crate) ids: Vec<i64>,
    pub(crate) finish: Finish,
    /// The stop id that ended it.
    pub(crate) stop_id: Option<i64>,
    /// From the call to the first token.
    pub(crate) prefill: Duration,
    /// From the first token to the last.
    pub(crate) decode: Duration,
}

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
    pub(crate) weight_bytes: u64,
    pub(crate) cache_bytes: u64,
    pub(crate) load: Duration,
    pub(crate) static_shapes: bool,
    pub(crate) weight_format: &'static str,
    pub(crate) slots: usize,
    /// Instructions of fast mode's kernels; `None` elsewhere.
    pub(crate) instructions: Option<InstructionSet>,
}

/// How steps run.
enum Runner {
    /// Each operation as it comes.
    Eager(Box<Step>),
    /// Kernels of our own.
    Fast(Box<Fast>),
    /// Whole steps, compiled.
    Compiled(Compiled),
}

/// A checkpoint ready to decode.
pub(crate) struct Engine {
    runner: Runner,
    info: Info,
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
        let config = Config::from_folders(&options.checkpoint)?;
        let dtype = match options.dtype.or(config.dtype) {
            Some(dtype) => dtype,
            None => {
                Weights::open(&options.checkpoint, options.like.alias()?, Form::EXACT)?.dtype()?
            }
        };
        let like = options.like.to_dtype(dtype)?;
        let context = options.context.min(config.max_position_embeddings);
        let device = like.device()?;
        let is_fast = options.fast.unwrap_or(!config.schemes.is_empty())
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
        let folders = &options.checkpoint;
        let (runner, weight_bytes, cache_bytes, weight_format) = if is_fast {
            let how = How {
                context,
                chunk: options.chunk.unwrap_or(fast::DEFAULT_CHUNK),
                // As many as PyTorch's operations have.
                threads: usize::try_from(num_threads()?).unwrap_or(1),
                instructions: options.instructions,
            };
            let fast = Fast::load(&config, folders, how, &like, on_layer)?;
            let (weights, cache) = (fast.weight_bytes(), fast.cache_bytes());
            let format = if fast.four_bits() { "int4" } else { dtype.name() };
            (Runner::Fast(Box::new(fast)), weights, cache, format)
        } else {
            let form = match &compile {
                None => options.form,
                Some((compile, _)) => Form::compiled(compile.int8),
            };
            let mut step = Step::load(&config, folders, (shape, form), &like, on_layer)?;
            let (weights, cache) = (step.weight_bytes(), step.cache_bytes());
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
            let owns = |l: &&crate::config::LayerPlan| {
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
            weight_bytes,
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

    /// Launches of compiled programs so far; `None` where steps run eagerly.
    pub(crate) fn counts(&self) -> Option<Counts> {
        match &self.runner {
            Runner::Eager(_) | Runner::Fast(_) => None,
            Runner::Compiled(compiled) => Some(compiled.counts()),
        }
    }

    /// Where the time of the last answer went after its first token; `None` where that is not known.
    pub(crate) fn parts(&self) -> Option<&Parts> {
        match &self.runner {
            Runner::Fast(fast) => Some(fast.parts()),
            Runner::Eager(_) | Runner::Compiled(_) => None,
        }
    }

    /// What is loaded.
    pub(crate) fn info(&self) -> &Info {
        &self.info
    }

    /// Answers `request` greedily. `on_tokens` gets each batch of new ids; false ends the answer.
    ///
    /// # Errors
    /// `Input`, `ContextFull` for a request that cannot be; `Aten` when the device fails. The next call
    /// is served either way.
    pub(crate) fn decode(
        &mut self,
        request: &Request<'_>,
        on_tokens: &mut dyn FnMut(&[i64]) -> bool,
    ) -> Result<Decoded> {
        let eos = self.info.eos_token_ids.clone();
        let stop = request.stop.unwrap_or(&eos);
        self.check(request)?;
        let _inference = InferenceMode::enter()?;

        let begun = Instant::now();
        let mut batch = vec![self.prefill(request.ids)?];
        let first = Instant::now();

        // The prompt's last token gives the first new one, so a full cache still gives one.
        let room = self.info.context - request.ids.len() + 1;
        let most = request.max_new.min(room);
        let mut ids = Vec::new();
        let mut sent = 0;
        let mut stop_id = None;
        let finish = 'answer: loop {
            for &id in &batch {
                if stop.contains(&id) {
                    stop_id = Some(id);
                    break 'answer Finish::Stop;
                }
                ids.push(id);
                if ids.len() == most {
                    break 'answer Finish::Length;
                }
            }
            // A launch makes several tokens; between launches is the time to hand them out.
            if ids.len() - sent >= request.read_every || matches!(self.runner, Runner::Compiled(_))
            {
                let new = &ids[sent..];
                sent = ids.len();
                if !on_tokens(new) {
                    break Finish::Cancelled;
                }
            }
            let wanted = (request.read_every - (ids.len() - sent)).min(most - ids.len());
            let position = request.ids.len() + ids.len() - 1;
            batch = self.decode_on(ids[ids.len() - 1], position, wanted)?;
        };
        let decode = first.elapsed();
        let cancelled = sent < ids.len() && !on_tokens(&ids[sent..]);
        Ok(Decoded {
            ids,
            finish: if cancelled { Finish::Cancelled } else { finish },
            stop_id,
            prefill: first - begun,
            decode,
        })
    }

    /// Reads a prompt; the id that follows it.
    fn prefill(&mut self, ids: &[i64]) -> Result<i64> {
        match &mut self.runner {
            Runner::Eager(step) => {
                let logits = step.run(SLOT, ids, 0, false)?;
                one(&step.choose(&logits)?)
            }
            Runner::Fast(fast) => {
                let next = fast.next(ids, 0);
                fast.forget_parts();
                next
            }
            Runner::Compiled(compiled) => compiled.prefill(SLOT, ids),
        }
    }

    /// Feeds `id` at `position`; the ids that follow, at least one and at most `most`.
    fn decode_on(&mut self, id: i64, position: usize, most: usize) -> Result<Vec<i64>> {
        match &mut self.runner {
            Runner::Eager(step) => {
                let logits = step.run(SLOT, &[id], position, false)?;
                Ok(vec![one(&step.choose(&logits)?)?])
            }
            Runner::Fast(fast) => Ok(vec![fast.next(&[id], position)?]),
            Runner::Compiled(compiled) => compiled.decode(SLOT, (id, position), most),
        }
    }

    /// Logits `[rows, vocab]` on the CPU, in the model's element type (fast mode: float32): of every prompt token, or of the
    /// last one followed by a row for each of `forced`, fed one by one as if the model had chosen it.
    ///
    /// # Errors
    /// As [`Engine::decode`].
    pub(crate) fn logits(&mut self, ids: &[i64], forced: &[i64], all: bool) -> Result<Tensor> {
        let request = Request { ids, max_new: 1, stop: None, read_every: 1 };
        self.check(&request)?;
        self.check_ids("forced", forced)?;
        let tokens = ids.len() + forced.len();
        if tokens > self.info.context {
            return Err(Error::ContextFull { tokens, context: self.info.context });
        }
        let _inference = InferenceMode::enter()?;
        let mut run = |ids: &[i64], start: usize, all: bool| {
            match &mut self.runner {
            Runner::Eager(step) => step.run(SLOT, ids, start, all)?.to_cpu(),
            Runner::Fast(fast) => host_tensor(&fast.logits(ids, start, all)?, self.info.vocab_size),
            Runner::Compiled(_) => Err(Error::Input(
                "expected an engine whose steps run one by one, found compiled programs, which give \
                 ids and no logits"
                    .into(),
            )),
        }
        };
        let mut rows = vec![run(ids, 0, all)?];
        for (offset, &id) in forced.iter().enumerate() {
            rows.push(run(&[id], ids.len() + offset, false)?);
        }
        Tensor::cat(&rows.iter().collect::<Vec<_>>(), 0)
    }

    fn check(&self, request: &Request<'_>) -> Result<()> {
        if request.ids.is_empty() {
            return Err(Error::Input("expected at least one prompt id, found none".into()));
        }
        check_range("max_new", request.max_new, 1..=usize::MAX)?;
        check_range("read_every", request.read_every, 1..=usize::MAX)?;
        self.check_ids("prompt", request.ids)?;
        self.check_ids("stop", request.stop.unwrap_or_default())?;
        if request.ids.len() > self.info.context {
            return Err(Error::ContextFull {
                tokens: request.ids.len(),
                context: self.info.context,
            });
        }
        Ok(())
    }

    fn check_ids(&self, what: &str, ids: &[i64]) -> Result<()> {
        let vocab = self.info.vocab_size;
        match ids.iter().position(|&id| id < 0 || id >= vocab as i64) {
            None => Ok(()),
            Some(index) => Err(Error::Input(format!(
                "expected {what} ids from 0 to {}, found {} at index {index}",
                vocab - 1,
                ids[index]
            ))),
        }
    }
}

/// `values` as a tensor `[…, width]` that is only read.
fn host_tensor(values: &[f32], width: usize) -> Result<Tensor> {
    let bytes: &[u8] = bytemuck::cast_slice(values);
    let memory = MappedFile::in_memory(bytes.len(), |memory| memory.copy_from_slice(bytes))?;
    let shape = [(values.len() / width) as i64, width as i64];
    memory.tensor(0..bytes.len(), &shape, DType::F32)
}

/// The one value of `chosen` `[1]`.
fn one(chosen: &Tensor) -> Result<i64> {
    let values = chosen.read_i64()?;
    values.first().copied().ok_or_else(|| Error::Internal("no logits to choose from".into()))
}

/// Longest context that is asked of a device; twice the largest published `max_position_embeddings`.
const MAX_CONTEXT: usize = 1 << 19;

fn check_range(name: &str, value: usize, range: std::ops::RangeInclusive<usize>) -> Result<()> {
    if range.contains(&value) {
        return Ok(());
    }
    let limits = if *range.end() == usize::MAX {
        format!("at least {}", range.start())
    } else {
        format!("{} to {}", range.start(), range.end())
    };
    Err(Error::Input(format!("expected {name} {limits}, found {value}")))
}
