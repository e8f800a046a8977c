//! Experts of a mixture, stored fused or split (gemma4.md 3.1, 5.3) → one stack a layer, or a matrix an expert.
//!
//! Fused: `experts.gate_up_proj` `[experts, 2·width, hidden]`, gates first, and `experts.down_proj`, both without `.weight`. Split:
//! `experts.7.gate_proj.weight` and its like, packed or not, as repacks for vLLM have them.

use std::{ops::Range, sync::Arc};

use half::bf16;

use super::{
    Arithmetic, Weights,
    form::{bytes, quantize},
};
use crate::{
    aten::Tensor,
    error::Result,
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
        let [rows, columns] = self.shape;
        [self.experts, self.parts.len() * rows, columns]
    }

    fn part_name(&self, expert: usize, part: &str) -> String {
        format!("{}experts.{expert}.{part}.weight", self.prefix)
    }
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
        let weight = if self.is_split(stack)? {
            self.join(stack)?
        } else {
            self.read(&stack.fused_name(), &stack.fused_shape())?
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
        let (parts, experts) = (stack.parts, 0..stack.experts);
        if self.is_split(stack)? {
            let mut of = |part: &&str| {
                let mut one =
                    |expert| self.take_stored(&stack.part_name(expert, part), stack.shape);
                experts.clone().map(&mut one).collect()
            };
            return parts.iter().map(&mut of).collect();
        }
        let all = self.stored_values(&stack.fused_name(), &stack.fused_shape())?;
        self.bytes += 2 * all.values().len() as u64;
        let len = stack.shape[0] * stack.shape[1];
        let one = |place: usize| {
            let values = Part { all: Arc::clone(&all), range: place * len..(place + 1) * len };
            Bf16Matrix::new(stack.shape, Arc::new(values))
                .map(Matrix::Bf16)
                .ok_or_else(|| self.missing(&stack.fused_name()))
        };
        let of = |part| experts.clone().map(|expert| one(expert * parts.len() + part)).collect();
        (0..parts.len()).map(of).collect()
    }

    /// Whether each expert of this layer has tensors of its own.
    fn is_split(&self, stack: &Stack<'_>) -> Result<bool> {
        let start = format!("{}experts.", stack.prefix);
        let index = |name: &str| -> Option<usize> {
            name.strip_prefix(&start)?.split_once('.')?.0.parse().ok()
        };
        let mut found = self.entries.iter().filter_map(|(name, entry)| Some((index(name)?, entry)));
        let Some((last, entry)) = found.by_ref().max_by_key(|(index, _)| *index) else {
            return Ok(false);
        };
        if last >= stack.experts {
            let reason = format!(
                "expected experts 0 to {} by config.json (num_experts), found {last}",
                stack.experts - 1
            );
            return Err(self.wrong(entry, reason));
        }
        if self.entries.contains_key(&stack.fused_name()) {
            return Err(self.wrong(
                entry,
                format!("the experts of this layer are here twice, split and as `{}`", stack.fused),
            ));
        }
        Ok(true)
    }

    /// Split experts in one tensor on the host.
    fn join(&mut self, stack: &Stack<'_>) -> Result<Tensor> {
        let sizes = stack.fused_shape().map(|size| size as i64);
        let rows = stack.shape[0] as i64;
        let mut all: Option<Tensor> = None;
        for expert in 0..stack.experts {
            for (index, part) in stack.parts.iter().enumerate() {
                let weight = self.read(&stack.part_name(expert, part), &stack.shape)?;
                let all = match &mut all {
                    Some(all) => all,
                    // Not before the first weight has the size that config.json says.
                    none => none.insert(Tensor::zeros(&sizes, self.like.dtype()?, &weight)?),
                };
                if !self.form.shapes_only {
                    let place =
                        all.select(0, expert as i64)?.narrow(0, index as i64 * rows, rows)?;
                    place.copy_(&weight)?;
                }
            }
        }
        all.ok_or_else(|| self.missing(&stack.fused_name()))
    }
}
