//! One loaded checkpoint that answers prompts: the decode loop, stop rules, cancellation.
//!
//! Token ids in, token ids out. Every call begins a sequence of its own, so nothing of an earlier call,
//! finished, cancelled or failed, can be seen in a later one.

mod load;
mod memory;

use std::time::{Duration, Instant};

pub(crate) use load::Info;
#[cfg(feature = "python")]
pub(crate) use load::{Bind, Compile, Options};
#[cfg(feature = "python")]
pub(crate) use memory::{Format, Question, Runs};

use crate::{
    aten::{DType, InferenceMode, MappedFile, Tensor},
    compiled::{Compiled, Counts},
    error::{Error, Result},
    fast::{Fast, Parts},
    step::Step,
};

/// The slot of the one sequence that is served at a time.
const SLOT: usize = 0;

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

    /// Answers `request` greedily. `on_tokens` gets each batch of new ids, and none between two chunks of a prompt; false ends the
    /// answer.
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
        let Some(id) = self.prefill(request.ids, &mut || on_tokens(&[]))? else {
            let (prefill, decode) = (begun.elapsed(), Duration::ZERO);
            let finish = Finish::Cancelled;
            return Ok(Decoded { ids: Vec::new(), finish, stop_id: None, prefill, decode });
        };
        let mut batch = vec![id];
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

    /// Reads a prompt; the id that follows it, or `None` when `go_on` said no on the way.
    fn prefill(&mut self, ids: &[i64], go_on: &mut dyn FnMut() -> bool) -> Result<Option<i64>> {
        match &mut self.runner {
            Runner::Eager(step) => {
                let logits = step.run(SLOT, ids, 0, false)?;
                one(&step.choose(&logits)?).map(Some)
            }
            Runner::Fast(fast) => {
                let next = fast.next(ids, 0, go_on);
                fast.forget_parts();
                next
            }
            Runner::Compiled(compiled) => compiled.prefill(SLOT, ids).map(Some),
        }
    }

    /// Feeds `id` at `position`; the ids that follow, at least one and at most `most`.
    fn decode_on(&mut self, id: i64, position: usize, most: usize) -> Result<Vec<i64>> {
        match &mut self.runner {
            Runner::Eager(step) => {
                let logits = step.run(SLOT, &[id], position, false)?;
                Ok(vec![one(&step.choose(&logits)?)?])
            }
            Runner::Fast(fast) => {
                Ok(fast.next(&[id], position, &mut || true)?.into_iter().collect())
            }
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
        let mut run = |ids: &[i64], start: usize, all: bool| match &mut self.runner {
            Runner::Eager(step) => step.run(SLOT, ids, start, all)?.to_cpu(),
            Runner::Fast(fast) => host_tensor(&fast.logits(ids, start, all)?, self.info.vocab_size),
            Runner::Compiled(_) => Err(Error::Input(
                "expected an engine whose steps run eagerly, found compiled programs, which give \
                 ids and no logits"
                    .into(),
            )),
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
