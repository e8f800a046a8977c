//! A step as a pure function of tensors, for a compiler to record.
//!
//! [`CapturedStep`] holds a step over stand-in tensors (fake ones: shapes without values). A call puts the
//! caller's tensors in their places, runs the same Rust code as every other step, and hands out what came
//! of it, the changed cache included. PyTorch's dispatcher records each operation on the way.

use std::path::PathBuf;

use crate::{
    aten::Tensor,
    checkpoint::Place,
    config::Config,
    error::{Error, Result},
    step::{Chunk, Shape, Step},
    weights::Form,
};

/// Rows in which the last token of a chunk goes through the layers that no other token needs: one row would
/// leave out a TPU's matrix unit.
const KEPT: i64 = 8;

/// What a recorded step does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// One token of every slot. Inputs: ids and positions, `[slots]` each. Results: the next ids and
    /// positions.
    Decode,
    /// A chunk of one slot's prompt. Inputs: ids `[1, tokens]`, slot, start, count, `[1]` each. Result: the id
    /// that follows, `[1]`.
    Prefill,
}

/// A step that can be recorded.
pub(crate) struct CapturedStep {
    step: Step,
    kind: Kind,
    read: usize,
}

impl CapturedStep {
    /// `like` is a fake tensor that names device and element type; weights are not read.
    ///
    /// # Errors
    /// What config.json, or the headers of the weights where there are any, get wrong.
    pub(crate) fn new(
        folders: &[PathBuf],
        like: &Tensor,
        (shape, int8): (Shape, bool),
        (kind, read): (Kind, usize),
    ) -> Result<Self> {
        let places = Place::open_all(folders)?;
        let config = Config::from_places(&places)?;
        let form = Form { shapes_only: true, ..Form::compiled(int8) };
        let step = Step::load(&config, &places, (shape, form), like, &mut |_, _| Ok(()))?;
        Ok(Self { step, kind, read })
    }

    /// The stand-ins that a call replaces: parameters, then state.
    ///
    /// # Errors
    /// `Aten` when a handle cannot be made.
    pub(crate) fn stand_ins(&mut self) -> Result<(Vec<Tensor>, Vec<Tensor>)> {
        self.step.tensors()
    }

    /// Runs the step on `tensors`, parameters, state and inputs in this order: its results, then the new
    /// state.
    ///
    /// # Errors
    /// `Input` when the number of tensors is wrong; `Aten` when an operation fails.
    pub(crate) fn call(&mut self, mut tensors: Vec<Tensor>) -> Result<Vec<Tensor>> {
        let inputs_wanted = if self.kind == Kind::Decode { 2 } else { 4 };
        let places = self.step.parameters_mut().len() + self.step.state_mut().len();
        if tensors.len() != places + inputs_wanted {
            return Err(Error::Input(format!(
                "expected {places} parameters and state tensors and {inputs_wanted} inputs, found {} \
                 tensors",
                tensors.len()
            )));
        }
        let inputs = tensors.split_off(places);
        let own = self.exchange(tensors);
        let results = self.run(&inputs).and_then(|mut results| {
            for tensor in self.step.state_mut() {
                results.push(tensor.alias()?);
            }
            Ok(results)
        });
        self.exchange(own);
        results
    }

    /// Puts `tensors` in the places of parameters and state; gives what was there.
    fn exchange(&mut self, tensors: Vec<Tensor>) -> Vec<Tensor> {
        let mut tensors = tensors.into_iter();
        let mut old = Vec::new();
        // Not one list: both borrow the step.
        for place in self.step.parameters_mut() {
            old.extend(tensors.next().map(|tensor| std::mem::replace(place, tensor)));
        }
        for place in self.step.state_mut() {
            old.extend(tensors.next().map(|tensor| std::mem::replace(place, tensor)));
        }
        old
    }

    fn run(&mut self, inputs: &[Tensor]) -> Result<Vec<Tensor>> {
        match (self.kind, inputs) {
            (Kind::Decode, [ids, positions]) => {
                let logits = self.step.decode(ids, positions, self.read)?;
                let next = self.step.choose(&rows(&logits)?)?;
                Ok(vec![next, positions.add_scalar_i64(1)?])
            }
            (Kind::Prefill, [ids, slot, start, count]) => {
                let chunk = Chunk { ids, slot: Some(slot), start, count };
                let logits = self.step.prefill(&chunk, self.read, Some(KEPT))?;
                Ok(vec![self.step.choose(&rows(&logits)?)?])
            }
            _ => Err(Error::Internal("inputs of another kind of step".into())),
        }
    }
}

/// `[rows, kept, vocab]` → `[rows, vocab]`.
fn rows(logits: &Tensor) -> Result<Tensor> {
    logits.select(1, 0)
}
