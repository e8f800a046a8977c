//! Tokens that matrices are multiplied with, in the forms that these take in.

use std::ops::Range;

use half::bf16;

use super::{
    Kernels, Matrix, check_len, each_row,
    fixed::{self, Fixed, fix},
    vector::widened,
};
use crate::error::Result;

/// Most tokens that a thread claims at once: a piece of a prompt takes tenths of a millisecond then, and the last one is not long waited
/// for. The pieces of a run follow each other, so that its weights stay in the core's cache.
const STRETCH: usize = 64;

/// A form of tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Takes {
    /// bfloat16.
    Narrow,
    /// float32, for instructions that multiply nothing else.
    Wide,
    /// Fixed point, for those that multiply integers.
    Fixed,
}

/// Tokens `[tokens, columns]`.
pub(super) struct Input<'a> {
    columns: usize,
    narrow: &'a [bf16],
    wide: Vec<f32>,
    fixed: Vec<Fixed>,
}

impl<'a> Input<'a> {
    /// `x` in the forms that `matrices` take in.
    ///
    /// # Errors
    /// `Internal` when there are no whole tokens, or a thread panicked.
    pub(super) fn new(
        kernels: &Kernels,
        x: &'a [bf16],
        columns: usize,
        matrices: &[&Matrix],
    ) -> Result<Self> {
        let tokens = x.len() / columns;
        check_len("whole tokens", x.len(), tokens * columns)?;
        let takes = |form| matrices.iter().any(|matrix| matrix.takes(kernels.set) == form);
        let (mut wide, mut fixed) = (Vec::new(), Vec::new());
        let of = |token: usize| &x[token * columns..(token + 1) * columns];
        if takes(Takes::Wide) {
            wide.resize(x.len(), 0.0);
            each_row(
                kernels,
                tokens,
                (&mut wide, columns),
                (&mut [(); 0], 0),
                &|token, out, _| {
                    for (out, &x) in out.iter_mut().zip(of(token)) {
                        *out = widened(x);
                    }
                },
            )?;
        }
        if let Some(form) = kernels.set.multiplies()
            && takes(Takes::Fixed)
        {
            // A matrix of integers has whole groups; where there is none, none is read.
            let groups = columns / fixed::GROUP;
            fixed.resize(tokens * groups, Fixed::default());
            each_row(
                kernels,
                tokens,
                (&mut fixed, groups),
                (&mut [(); 0], 0),
                &|token, out, _| {
                    fix(kernels.set, of(token), form, out);
                },
            )?;
        }
        Ok(Self { columns, narrow: x, wide, fixed })
    }

    pub(super) fn columns(&self) -> usize {
        self.columns
    }

    pub(super) fn tokens(&self) -> usize {
        self.narrow.len() / self.columns
    }

    /// Parts of the tokens that a thread claims.
    pub(super) fn stretches(&self) -> usize {
        self.tokens().div_ceil(STRETCH)
    }

    pub(super) fn stretch(&self, index: usize) -> Range<usize> {
        let start = index * STRETCH;
        start..(start + STRETCH).min(self.tokens())
    }

    pub(super) fn narrow(&self, tokens: Range<usize>) -> &[bf16] {
        &self.narrow[tokens.start * self.columns..tokens.end * self.columns]
    }

    pub(super) fn wide(&self, tokens: Range<usize>) -> &[f32] {
        &self.wide[tokens.start * self.columns..tokens.end * self.columns]
    }

    pub(super) fn fixed(&self, tokens: Range<usize>) -> &[Fixed] {
        let groups = self.columns / fixed::GROUP;
        &self.fixed[tokens.start * groups..tokens.end * groups]
    }
}
