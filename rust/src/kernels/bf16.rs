//! bfloat16 weights as the checkpoint has them, row after row, times bfloat16.

use std::{ops::Range, sync::Arc};

use half::bf16;

use super::{
    InstructionSet, for_each_set,
    input::Input,
    matrix::{ROWS, Sums},
    multiply_add,
    vector::{total, widened},
};

/// Columns that are added up side by side: lanes of the widest register.
const LANES: usize = 16;

/// Rows and tokens that plain Rust multiplies at once, so that each value read is used several times.
const ROWS_AT_ONCE: usize = 4;

/// Where the values of a matrix lie: in a file, or in memory.
pub(crate) trait Values: Send + Sync {
    /// All of them.
    fn values(&self) -> &[bf16];
}

/// A weight `[rows, columns]`; a clone has the same values.
#[derive(Clone)]
pub(crate) struct Bf16Matrix {
    rows: usize,
    columns: usize,
    values: Arc<dyn Values>,
}

impl Bf16Matrix {
    /// `None` when there are not as many values.
    pub(crate) fn new([rows, columns]: [usize; 2], values: Arc<dyn Values>) -> Option<Self> {
        let fits = rows > 0 && columns > 0 && values.values().len() == rows * columns;
        fits.then_some(Self { rows, columns, values })
    }

    /// The values of one row.
    pub(crate) fn row(&self, row: usize) -> &[bf16] {
        &self.values.values()[row * self.columns..(row + 1) * self.columns]
    }

    pub(super) fn bytes(&self) -> usize {
        size_of_val(self.values.values())
    }

    pub(super) fn shape(&self) -> [usize; 2] {
        [self.rows, self.columns]
    }

    /// See [`super::Matrix::sums`].
    pub(super) fn sums(
        &self,
        set: InstructionSet,
        blocks: Range<usize>,
        (input, tokens): (&Input<'_>, Range<usize>),
        sums: &mut [Sums],
    ) {
        let count = tokens.len();
        let last = self.rows.min(blocks.end * ROWS);
        let values = &self.values.values()[blocks.start * ROWS * self.columns..last * self.columns];
        for (values, sums) in values.chunks(ROWS * self.columns).zip(sums.chunks_exact_mut(count)) {
            #[cfg(target_arch = "x86_64")]
            if set.multiplies_bfloats() {
                super::bf16_avx512::block(values, input.narrow(tokens.clone()), self.columns, sums);
                continue;
            }
            #[cfg(target_arch = "x86_64")]
            if set.is_avx512() {
                super::bf16_fma_avx512::block(
                    values,
                    input.wide(tokens.clone()),
                    self.columns,
                    sums,
                );
                continue;
            }
            block(set, values, input.wide(tokens.clone()), self.columns, sums);
        }
    }
}

for_each_set! {
    /// Sums of at most sixteen rows with each token of `x` `[tokens, columns]`.
    fn block(values: &[bf16], x: &[f32], columns: usize, sums: &mut [Sums]) = block_inner
}

#[expect(clippy::inline_always, reason = "compiled anew for the instructions of each caller")]
#[inline(always)]
fn block_inner<const FUSED: bool>(values: &[bf16], x: &[f32], columns: usize, sums: &mut [Sums]) {
    let (several, rest) =
        values.split_at(values.len() / columns / ROWS_AT_ONCE * ROWS_AT_ONCE * columns);
    for (x, sums) in x.chunks_exact(columns).zip(sums) {
        let (out, out_rest) = sums.split_at_mut(several.len() / columns);
        let (out, _) = out.as_chunks_mut::<ROWS_AT_ONCE>();
        for (rows, out) in several.chunks_exact(ROWS_AT_ONCE * columns).zip(out) {
            *out = dot::<FUSED, ROWS_AT_ONCE>(rows, x);
        }
        for (row, out) in rest.chunks_exact(columns).zip(out_rest) {
            [*out] = dot::<FUSED, 1>(row, x);
        }
    }
}

/// `R` rows times one token.
#[expect(clippy::inline_always, reason = "compiled anew for the instructions of each caller")]
#[inline(always)]
fn dot<const FUSED: bool, const R: usize>(rows: &[bf16], x: &[f32]) -> [f32; R] {
    let mut sums = [[0.0; LANES]; R];
    let rows: [_; R] =
        std::array::from_fn(|row| rows[row * x.len()..(row + 1) * x.len()].as_chunks::<LANES>());
    let (x, x_rest) = x.as_chunks::<LANES>();
    for (at, x) in x.iter().enumerate() {
        for (row, sums) in rows.iter().zip(&mut sums) {
            let row = &row.0[at];
            for lane in 0..LANES {
                sums[lane] = multiply_add::<FUSED>(widened(row[lane]), x[lane], sums[lane]);
            }
        }
    }
    for (row, sums) in rows.iter().zip(&mut sums) {
        for ((&weight, &x), sum) in row.1.iter().zip(x_rest).zip(sums) {
            *sum = multiply_add::<FUSED>(widened(weight), x, *sum);
        }
    }
    sums.map(total)
}
