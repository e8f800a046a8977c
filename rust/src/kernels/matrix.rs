//! Products with a matrix of either kind, and what is done with their sums on the way out.
//!
//! Work is cut into runs of whole blocks of rows, which threads claim; the tokens of a prompt go past a run in tiles, so that
//! its weights stay in the core's cache.

use std::{ops::Range, sync::Mutex};

use half::bf16;

use super::{
    Bf16Matrix, InstructionSet, Kernels, Q4KMatrix, Q5KMatrix, Q6KMatrix, W4Matrix, W8Matrix,
    check_len,
    input::{Input, Takes},
    memory::Shared,
    vector::gelu_times,
};
use crate::error::{Error, Result};

/// Rows of a block: lanes of the widest vector register.
pub(super) const ROWS: usize = 16;

/// Of one token, the sums of a block's rows.
pub(super) type Sums = [f32; ROWS];

/// Tokens of a tile.
const TOKENS: usize = 8;

/// Bytes of weights that a thread claims at once: smaller pieces cost more claims than they balance.
const CHUNK_BYTES: usize = 400 << 10;

/// A weight `[rows, columns]` in the form it is stored in.
pub(crate) enum Matrix {
    W4(W4Matrix),
    W8(W8Matrix),
    Q4K(Q4KMatrix),
    Q5K(Q5KMatrix),
    Q6K(Q6KMatrix),
    Bf16(Bf16Matrix),
}

/// The forms of a [`Matrix`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MatrixForm {
    W4,
    W8,
    Q4K,
    Q5K,
    Q6K,
    Bf16,
}

impl MatrixForm {
    /// This form, or bfloat16 where it has no rows of `columns` columns.
    pub(crate) fn or_bf16(self, columns: usize) -> Self {
        let fits = match self {
            Self::W4 => W4Matrix::fits(columns),
            Self::W8 => W8Matrix::fits(columns),
            Self::Q4K => Q4KMatrix::fits(columns),
            Self::Q5K => Q5KMatrix::fits(columns),
            Self::Q6K => Q6KMatrix::fits(columns),
            Self::Bf16 => true,
        };
        if fits { self } else { Self::Bf16 }
    }

    /// Of a value.
    pub(crate) const fn bits(self) -> usize {
        match self {
            Self::W4 | Self::Q4K => 4,
            Self::Q5K => 5,
            Self::Q6K => 6,
            Self::W8 => 8,
            Self::Bf16 => 16,
        }
    }

    /// Bytes of a matrix `[rows, columns]`, whose columns the form has.
    pub(crate) fn bytes(self, shape: [usize; 2]) -> usize {
        match self {
            Self::W4 => W4Matrix::bytes_of(shape),
            Self::W8 => W8Matrix::bytes_of(shape),
            Self::Q4K => Q4KMatrix::bytes_of(shape),
            Self::Q5K => Q5KMatrix::bytes_of(shape),
            Self::Q6K => Q6KMatrix::bytes_of(shape),
            Self::Bf16 => size_of::<bf16>() * shape[0] * shape[1],
        }
    }
}

impl Matrix {
    pub(crate) const fn form(&self) -> MatrixForm {
        match self {
            Self::W4(_) => MatrixForm::W4,
            Self::W8(_) => MatrixForm::W8,
            Self::Q4K(_) => MatrixForm::Q4K,
            Self::Q5K(_) => MatrixForm::Q5K,
            Self::Q6K(_) => MatrixForm::Q6K,
            Self::Bf16(_) => MatrixForm::Bf16,
        }
    }

    /// Bytes in memory.
    pub(crate) fn bytes(&self) -> usize {
        match self {
            Self::W4(matrix) => matrix.bytes(),
            Self::W8(matrix) => matrix.bytes(),
            Self::Q4K(matrix) => matrix.bytes(),
            Self::Q5K(matrix) => matrix.bytes(),
            Self::Q6K(matrix) => matrix.bytes(),
            Self::Bf16(matrix) => matrix.bytes(),
        }
    }

    /// `[rows, columns]`.
    pub(crate) fn shape(&self) -> [usize; 2] {
        match self {
            Self::W4(matrix) => matrix.shape(),
            Self::W8(matrix) => matrix.shape(),
            Self::Q4K(matrix) => matrix.shape(),
            Self::Q5K(matrix) => matrix.shape(),
            Self::Q6K(matrix) => matrix.shape(),
            Self::Bf16(matrix) => matrix.shape(),
        }
    }

    /// In what form it takes tokens in.
    pub(super) const fn takes(&self, set: InstructionSet) -> Takes {
        match self {
            Self::Bf16(_) if set.multiplies_bfloats() => Takes::Narrow,
            Self::Bf16(_) => Takes::Wide,
            _ if set.multiplies().is_some() => Takes::Fixed,
            _ => Takes::Wide,
        }
    }

    fn blocks(&self) -> usize {
        self.shape()[0].div_ceil(ROWS)
    }

    /// Sums of `blocks` of rows with at most [`TOKENS`] tokens, `[blocks][tokens]`. Rows beyond the last have any sum.
    fn sums(
        &self,
        set: InstructionSet,
        blocks: Range<usize>,
        input: (&Input<'_>, Range<usize>),
        sums: &mut [Sums],
    ) {
        match self {
            Self::W4(matrix) => matrix.sums(set, blocks, input, sums),
            Self::W8(matrix) => matrix.sums(set, blocks, input, sums),
            Self::Q4K(matrix) => matrix.sums(set, blocks, input, sums),
            Self::Q5K(matrix) => matrix.sums(set, blocks, input, sums),
            Self::Q6K(matrix) => matrix.sums(set, blocks, input, sums),
            Self::Bf16(matrix) => matrix.sums(set, blocks, input, sums),
        }
    }

    /// The runs of blocks that `threads` threads claim of some rows.
    fn runs(&self, rows: &Range<usize>, threads: usize) -> Runs {
        let (first, last) = (rows.start / ROWS, rows.end.div_ceil(ROWS));
        let each = CHUNK_BYTES * self.blocks() / self.bytes().max(1);
        let most = (last - first).div_ceil(2 * threads).max(1);
        Runs { first, last, each: each.clamp(1, most) }
    }
}

/// A product that is wanted: of some rows of a matrix, `out` `[tokens, rows]`.
pub(crate) struct Product<'a> {
    pub(crate) matrix: &'a Matrix,
    pub(crate) rows: Range<usize>,
    pub(crate) out: &'a mut [f32],
}

impl<'a> Product<'a> {
    /// Of all rows.
    pub(crate) fn whole(matrix: &'a Matrix, out: &'a mut [f32]) -> Self {
        Self { matrix, rows: 0..matrix.shape()[0], out }
    }
}

/// Blocks cut into runs of `each`, the last one shorter.
#[derive(Clone, Copy)]
struct Runs {
    first: usize,
    last: usize,
    each: usize,
}

impl Runs {
    fn count(self) -> usize {
        (self.last - self.first).div_ceil(self.each)
    }

    /// Blocks and tokens of a piece: all stretches of a run come before the next run.
    fn piece(self, input: &Input<'_>, piece: usize) -> (Range<usize>, Range<usize>) {
        let stretches = input.stretches();
        (self.get(piece / stretches), input.stretch(piece % stretches))
    }

    fn get(self, index: usize) -> Range<usize> {
        let start = self.first + index * self.each;
        start..(start + self.each).min(self.last)
    }
}

/// Products of the same `x` `[tokens, columns]` with several matrices, each into its own `[tokens, rows]`.
///
/// # Errors
/// `Internal` when lengths do not say so, or a thread panicked.
#[expect(unsafe_code, reason = "threads write different columns")]
pub(crate) fn multiply(kernels: &Kernels, x: &[bf16], products: &mut [Product<'_>]) -> Result<()> {
    let Some(first) = products.first() else { return Ok(()) };
    let columns = first.matrix.shape()[1];
    let matrices: Vec<_> = products.iter().map(|product| product.matrix).collect();
    let input = Input::new(kernels, x, columns, &matrices)?;
    let tokens = input.tokens();
    let mut parts = Vec::new();
    let mut pieces = 0;
    for Product { matrix, rows, out } in products {
        let [all, columns] = matrix.shape();
        check_len("columns", columns, input.columns())?;
        check_len("products", out.len(), tokens * rows.len())?;
        check_len("rows", rows.end.min(all), rows.end)?;
        let runs = matrix.runs(rows, kernels.pool.threads());
        parts.push((pieces, runs, *matrix, rows.clone(), Shared::new(out)));
        pieces += runs.count() * input.stretches();
    }
    kernels.pool.run(pieces, &|piece| {
        let Some((first, runs, matrix, rows, out)) = parts.iter().rfind(|part| part.0 <= piece)
        else {
            return;
        };
        let (blocks, tokens) = runs.piece(&input, piece - first);
        each_tile(matrix, kernels.set, blocks, (&input, tokens), |token, row, sums| {
            // The first and the last block may have rows that are not wanted.
            let wanted = row.max(rows.start)..(row + ROWS).min(rows.end);
            let at = token * rows.len() + wanted.start - rows.start;
            // SAFETY: no other piece has these rows.
            let out = unsafe { out.part(at..at + wanted.len()) };
            put(&sums[wanted.start - row..wanted.end - row], out);
        });
    })
}

/// `gelu(gate · x) · (up · x)`, `[tokens, rows]`.
///
/// # Errors
/// As [`multiply`].
#[expect(unsafe_code, reason = "threads write different columns")]
pub(crate) fn gated(
    kernels: &Kernels,
    x: &[bf16],
    (gate, up): (&Matrix, &Matrix),
    out: &mut [bf16],
) -> Result<()> {
    let [rows, columns] = gate.shape();
    let input = Input::new(kernels, x, columns, &[gate, up])?;
    check_len("rows of the second matrix", up.shape()[0], rows)?;
    check_len("columns of the second matrix", up.shape()[1], columns)?;
    check_len("products", out.len(), input.tokens() * rows)?;
    let runs = gate.runs(&(0..rows), kernels.pool.threads());
    let out = Shared::new(out);
    kernels.pool.run(runs.count() * input.stretches(), &|piece| {
        let (blocks, tokens) = runs.piece(&input, piece);
        let mut gates = vec![[0.0; ROWS]; blocks.len() * TOKENS];
        let mut ups = gates.clone();
        let mut both = vec![[bf16::ZERO; ROWS]; gates.len()];
        for (tokens, count) in tiles(tokens) {
            let used = blocks.len() * count;
            let (gates, ups, both) = (&mut gates[..used], &mut ups[..used], &mut both[..used]);
            gate.sums(kernels.set, blocks.clone(), (&input, tokens.clone()), gates);
            up.sums(kernels.set, blocks.clone(), (&input, tokens.clone()), ups);
            // Of the whole tile: a call for each block would take as long as what it does.
            let flat = (gates.as_flattened(), ups.as_flattened(), both.as_flattened_mut());
            gelu_times(kernels.set, flat.0, flat.1, flat.2);
            for (block, both) in blocks.clone().zip(both.chunks_exact(count)) {
                for (token, both) in tokens.clone().zip(both) {
                    let at = token * rows + block * ROWS;
                    let width = ROWS.min(rows - block * ROWS);
                    // SAFETY: no other piece has these rows.
                    put(&both[..width], unsafe { out.part(at..at + width) });
                }
            }
        }
    })
}

/// The `count` rows with the largest products with the one token `x`, the largest first and of equal ones the lowest row first;
/// rows for which `is_allowed` is false are left out.
///
/// # Errors
/// As [`multiply`].
pub(crate) fn best(
    kernels: &Kernels,
    x: &[bf16],
    matrix: &Matrix,
    count: usize,
    is_allowed: &(dyn Fn(usize) -> bool + Sync),
) -> Result<Vec<(usize, f32)>> {
    let [rows, columns] = matrix.shape();
    let input = Input::new(kernels, x, columns, &[matrix])?;
    check_len("tokens", input.tokens(), 1)?;
    let runs = matrix.runs(&(0..rows), kernels.pool.threads());
    let found = Mutex::new(Vec::new());
    kernels.pool.run(runs.count(), &|piece| {
        let mut own: Vec<(usize, f32)> = Vec::with_capacity(count + 1);
        each_tile(matrix, kernels.set, runs.get(piece), (&input, 0..1), |_, row, sums| {
            for (row, &value) in (row..rows).zip(sums) {
                // Rows come in order, so that an equal one stands behind.
                let beaten = own.len() == count && own.last().is_none_or(|last| value <= last.1);
                if !beaten && !value.is_nan() && is_allowed(row) {
                    let at = own.partition_point(|&(_, other)| other >= value);
                    own.insert(at, (row, value));
                    own.truncate(count);
                }
            }
        });
        if let Ok(mut found) = found.lock() {
            found.append(&mut own);
        }
    })?;
    let mut found = found.into_inner().map_err(|_| Error::Internal("a thread panicked".into()))?;
    found.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    found.truncate(count);
    Ok(found)
}

/// Copies a block's values; those of a whole one without a call.
fn put<T: Copy>(values: &[T], out: &mut [T]) {
    match (values.first_chunk::<ROWS>(), out.first_chunk_mut::<ROWS>()) {
        (Some(values), Some(out)) => *out = *values,
        _ => out.copy_from_slice(values),
    }
}

/// The tiles of `tokens` tokens, and how many each has.
fn tiles(tokens: Range<usize>) -> impl Iterator<Item = (Range<usize>, usize)> {
    tokens.clone().step_by(TOKENS).map(move |start| {
        let end = (start + TOKENS).min(tokens.end);
        (start..end, end - start)
    })
}

/// Calls `take(token, first_row, sums)` for each of `tokens` and every block of `blocks`.
fn each_tile(
    matrix: &Matrix,
    set: InstructionSet,
    blocks: Range<usize>,
    (input, tokens): (&Input<'_>, Range<usize>),
    mut take: impl FnMut(usize, usize, &Sums),
) {
    let mut sums = vec![[0.0; ROWS]; blocks.len() * TOKENS.min(tokens.len())];
    for (tokens, count) in tiles(tokens) {
        let sums = &mut sums[..blocks.len() * count];
        matrix.sums(set, blocks.clone(), (input, tokens.clone()), sums);
        for (block, sums) in blocks.clone().zip(sums.chunks_exact(count)) {
            for (token, sums) in tokens.clone().zip(sums) {
                take(token, block * ROWS, sums);
            }
        }
    }
}

#[cfg(test)]
mod tests;
