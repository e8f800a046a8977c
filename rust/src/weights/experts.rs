//! Experts of a mixture, stored fused, apart or split (gemma4.md 3.1, 5.3) → one stack a layer, or a matrix an expert.
//!
//! Fused: `experts.gate_up_proj` `[experts, 2·width, hidden]`, gates first, and `experts.down_proj`, both without `.weight`. Apart:
//! `experts.gate_proj` and `experts.up_proj` `[experts, width, hidden]`, as some GGUF files have them. Split:
//! `experts.7.gate_proj.weight` and its like, packed or not, as repacks for vLLM have them.

use std::{ops::Range, sync::Arc};

use half::bf16;

use super::{
    Arithmetic, Entry, Weights,
    form::{bytes, quantize},
};
use crate::{
    aten::Tensor,
    error::{Error, Result},
    kernels::{Bf16Matrix, Matrix, Values},
};

/// One of the two stacked weights of a layer's experts.
pub(crate) struct Stack<'a> {
    /// Of the layer: `model.layers.3.`.
    pub(crate) prefix: &'a str,
    /// Name of the fused tensor.
    pub(crate) fused: &'a str,
    /// Names of the projections that it holds of each expert, one above the other.
    pub(crate) parts: &'a [&'a str],
    /// Experts.
    pub(crate) experts: usize,
    /// `[out, in]` of one projection.
    pub(crate) shape: [usize; 2],
}

impl Stack<'_> {
    fn fused_name(&self) -> String {
        format!("{}experts.{}", self.prefix, self.fused)
    }

    fn fused_shape(&self) -> [usize; 3] {
        self.shape_of(self.parts.len())
    }

    /// Of a tensor that holds so many parts of every expert.
    fn shape_of(&self, parts: usize) -> [usize; 3] {
        let [rows, columns] = self.shape;
        [self.experts, parts * rows, columns]
    }

    /// Of one part of all experts.
    fn apart_name(&self, part: &str) -> String {
        format!("{}experts.{part}", self.prefix)
    }

    fn part_name(&self, expert: usize, part: &str) -> String {
        format!("{}experts.{expert}.{part}.weight", self.prefix)
    }

    /// The tensors of the form `stored`.
    fn pieces(&self, stored: Stored) -> Vec<Piece> {
        let whole = self.shape_of(1).to_vec();
        let parts = self.parts.iter().enumerate();
        match stored {
            Stored::Fused => Vec::new(),
            Stored::Apart => parts
                .map(|(part, name)| Piece {
                    name: self.apart_name(name),
                    shape: whole.clone(),
                    expert: None,
                    part,
                })
                .collect(),
            Stored::Split => (0..self.experts)
                .flat_map(|expert| {
                    parts.clone().map(move |(part, name)| Piece {
                        name: self.part_name(expert, name),
                        shape: self.shape.to_vec(),
                        expert: Some(expert),
                        part,
                    })
                })
                .collect(),
        }
    }
}

/// How a stack is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stored {
    /// In one tensor.
    Fused,
    /// In one for each part.
    Apart,
    /// In one for each part of each expert.
    Split,
}

/// A tensor that is a piece of a stack.
struct Piece {
    name: String,
    shape: Vec<usize>,
    /// `None`: of all.
    expert: Option<usize>,
    part: usize,
}

/// A range of other values.
struct Part {
    all: Arc<dyn Values>,
    range: Range<usize>,
}

impl Values for Part {
    fn values(&self) -> &[bf16] {
        &self.all.values()[self.range.clone()]
    }
}

impl Weights {
    /// A stack on the device, in the wanted form: `[experts, out, in]` with all parts among the outputs; for
    /// [`Arithmetic::Compiled`] `[experts, in, out]`, and factors `[experts, 1, out]` where it is int8.
    ///
    /// # Errors
    /// As [`Weights::take`]; `Tensor` when experts are both fused and split, or more than config.json says.
    pub(crate) fn take_experts(&mut self, stack: &Stack<'_>) -> Result<(Tensor, Option<Tensor>)> {
        let weight = match self.stored(stack)? {
            Stored::Fused => self.read(&stack.fused_name(), &stack.fused_shape())?,
            stored => self.join(stack, stored)?,
        };
        let (weight, scale) = match self.form.arithmetic {
            Arithmetic::Exact => (weight.type_as(&self.like)?, None),
            Arithmetic::Compiled => {
                // On the host, so that the device never holds two forms of a weight.
                let weight = weight.to_dtype(self.like.dtype()?)?;
                let (weight, scale) = if self.form.int8 {
                    let (weight, scale) = quantize(&weight)?; // scale: [experts, out, 1]
                    (weight, Some(scale.transpose(1, 2)?.contiguous()?.to_device_of(&self.like)?))
                } else {
                    (weight, None)
                };
                (weight.transpose(1, 2)?.contiguous()?.to_device_of(&self.like)?, scale)
            }
        };
        self.bytes += bytes(&weight)? + scale.as_ref().map_or(Ok(0), bytes)?;
        Ok((weight, scale))
    }

    /// Each part of every expert, `[parts][experts]`, as it is stored where there is a kernel for that, in bfloat16 elsewhere.
    ///
    /// # Errors
    /// As [`Weights::take_experts`].
    pub(crate) fn take_stored_experts(&mut self, stack: &Stack<'_>) -> Result<Vec<Vec<Matrix>>> {
        let parts = stack.parts;
        match self.stored(stack)? {
            Stored::Fused => {
                let all = self.take_stack(&stack.fused_name(), stack, parts.len())?;
                let mut found: Vec<_> = parts.iter().map(|_| Vec::new()).collect();
                // Of an expert, its parts follow each other.
                for (place, matrix) in all.into_iter().enumerate() {
                    found[place % parts.len()].push(matrix);
                }
                Ok(found)
            }
            Stored::Apart => parts
                .iter()
                .map(|part| self.take_stack(&stack.apart_name(part), stack, 1))
                .collect(),
            Stored::Split => {
                let mut of = |part: &&str| {
                    let mut one =
                        |expert| self.take_stored(&stack.part_name(expert, part), stack.shape);
                    (0..stack.experts).map(&mut one).collect()
                };
                parts.iter().map(&mut of).collect()
            }
        }
    }

    /// The matrices of the tensor `name`, which holds so many parts of every expert.
    fn take_stack(&mut self, name: &str, stack: &Stack<'_>, parts: usize) -> Result<Vec<Matrix>> {
        let shape = stack.shape_of(parts);
        if let Some(stored) = self.in_blocks(name, &shape)?
            && let Some(matrices) = self.repack_stack(name, stack.shape, &stored)?
        {
            for matrix in &matrices {
                self.bits = self.bits.min(matrix.form().bits());
                self.bytes += matrix.bytes() as u64;
            }
            return Ok(matrices);
        }
        let all = self.stored_values(name, &shape)?;
        self.bytes += 2 * all.values().len() as u64;
        let len = stack.shape[0] * stack.shape[1];
        let one = |place: usize| {
            let values = Part { all: Arc::clone(&all), range: place * len..(place + 1) * len };
            Bf16Matrix::new(stack.shape, Arc::new(values))
                .map(Matrix::Bf16)
                .ok_or_else(|| self.missing(name))
        };
        (0..stack.experts * parts).map(one).collect()
    }

    /// How this layer has the stack.
    fn stored(&self, stack: &Stack<'_>) -> Result<Stored> {
        if let Some(packed) = self.entries.get(&format!("{}_packed", stack.fused_name())) {
            let what = format!(
                "experts packed in one tensor (`{}`; expected each one's, `{}_packed`)",
                packed.name,
                stack.part_name(0, stack.parts.first().copied().unwrap_or_default())
            );
            return Err(Error::Unsupported { file: self.shards[packed.shard].path.clone(), what });
        }
        let apart = stack.parts.iter().find(|part| {
            let name = stack.apart_name(part);
            name != stack.fused_name() && self.entries.contains_key(&name)
        });
        let here = if self.entries.contains_key(&stack.fused_name()) {
            Some(stack.fused)
        } else {
            apart.copied()
        };
        if let Some(twice) = self.split_entry(stack)? {
            let Some(here) = here else { return Ok(Stored::Split) };
            let reason = format!("the experts of this layer are here twice, split and as `{here}`");
            return Err(self.wrong(twice, reason));
        }
        Ok(if apart.is_some() && here != Some(stack.fused) { Stored::Apart } else { Stored::Fused })
    }

    /// A tensor of one of this layer's experts, if they have tensors of their own.
    fn split_entry(&self, stack: &Stack<'_>) -> Result<Option<&Entry>> {
        let start = format!("{}experts.", stack.prefix);
        let index = |name: &str| -> Option<usize> {
            name.strip_prefix(&start)?.split_once('.')?.0.parse().ok()
        };
        let mut found = self.entries.iter().filter_map(|(name, entry)| Some((index(name)?, entry)));
        let Some((last, entry)) = found.by_ref().max_by_key(|(index, _)| *index) else {
            return Ok(None);
        };
        if last >= stack.experts {
            let reason = format!(
                "expected experts 0 to {} by config.json (num_experts), found {last}",
                stack.experts - 1
            );
            return Err(self.wrong(entry, reason));
        }
        Ok(Some(entry))
    }

    /// All pieces in one tensor on the host.
    fn join(&mut self, stack: &Stack<'_>, stored: Stored) -> Result<Tensor> {
        let sizes = stack.fused_shape().map(|size| size as i64);
        let rows = stack.shape[0] as i64;
        let mut all: Option<Tensor> = None;
        for piece in stack.pieces(stored) {
            let weight = self.read(&piece.name, &piece.shape)?;
            let all = match &mut all {
                Some(all) => all,
                // Not before the first weight has the size that config.json says.
                none => none.insert(Tensor::zeros(&sizes, self.like.dtype()?, &weight)?),
            };
            if !self.form.shapes_only {
                let place = all.narrow(1, piece.part as i64 * rows, rows)?;
                let place = match piece.expert {
                    Some(expert) => place.select(0, expert as i64)?,
                    None => place,
                };
                place.copy_(&weight)?;
            }
        }
        all.ok_or_else(|| self.missing(&stack.fused_name()))
    }
}
