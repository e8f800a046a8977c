//! Products with a matrix of either kind, and what is done with their sums on the way out.
//!
//! Work is cut into runs of whole blocks of rows, which threads claim; the tokens of a prompt go past a run in tiles, so that
//! its weights stay in the core's cache.

use std::{ops::Range, sync::Mutex};

use half::bf16;

use super::{
    Bf16Matrix, InstructionSet, Kernels, W4Matrix, W8Matrix, check_len, memory::Shared,
    vector::gelu_times, vector::widened,
};
use crate::error::{Error, Result};

/// Rows of a block: lanes of the widest vector register.
pub(super) const ROWS: usize = 16;

/// Of one token, the sums of a block's rows.
pub(super) type Sums = [f32; ROWS];

/// Tokens of a tile.
const TOKENS: usize = 8;

/// Most tokens that a thread claims at once: a piece of a prompt takes tenths of a millisecond then, and the last one is not long waited
/// for. The pieces of a run follow each other, so that its weights stay in the core's cache.
const STRETCH: usize = 64;

/// Bytes of weights that a thread claims at once: smaller pieces cost more claims than they balance.
const CHUNK_BYTES: usize = 400 << 10;

/// A weight `[rows, columns]` in the form it is stored in.
pub(crate) enum Matrix {
    W4(W4Matrix),
    W8(W8Matrix),
    Bf16(Bf16Matrix),
}

/// Tokens `[tokens, columns]` that a matrix is multiplied with.
pub(super) struct Input<'a> {
    columns: usize,
    narrow: &'a [bf16],
    /// In float32, for instructions that multiply nothing else.
    wide: Vec<f32>,
}

impl<'a> Input<'a> {
    fn new(x: &'a [bf16], columns: usize, set: InstructionSet) -> Result<Self> {
        check_len("whole tokens", x.len(), x.len() / columns * columns)?;
        let wide = match set {
            InstructionSet::Avx512Bf16 => Vec::new(),
            _ => x.iter().map(|&value| widened(value)).collect(),
        };
        Ok(Self { columns, narrow: x, wide })
    }

    fn tokens(&self) -> usize {
        self.narrow.len() / self.columns
    }

    fn stretches(&self) -> usize {
        self.tokens().div_ceil(STRETCH)
    }

    /// Blocks and tokens of a piece: all stretches of a run come before the next run.
    fn piece(&self, runs: Runs, piece: usize) -> (Range<usize>, Range<usize>) {
        let start = piece % self.stretches() * STRETCH;
        (runs.get(piece / self.stretches()), start..(start + STRETCH).min(self.tokens()))
    }

    pub(super) fn narrow(&self, tokens: Range<usize>) -> &[bf16] {
        &self.narrow[tokens.start * self.columns..tokens.end * self.columns]
    }

    pub(super) fn wide(&self, tokens: Range<usize>) -> &[f32] {
        &self.wide[tokens.start * self.columns..tokens.end * self.columns]
    }
}

impl Matrix {
    /// Bytes in memory.
    pub(crate) fn bytes(&self) -> usize {
        match self {
            Self::W4(matrix) => matrix.bytes(),
            Self::W8(matrix) => matrix.bytes(),
            Self::Bf16(matrix) => matrix.bytes(),
        }
    }

    /// Of a value.
    pub(crate) const fn bits(&self) -> usize {
        match self {
            Self::W4(_) => 4,
            Self::W8(_) => 8,
            Self::Bf16(_) => 16,
        }
    }

    /// `[rows, columns]`.
    pub(crate) fn shape(&self) -> [usize; 2] {
        match self {
            Self::W4(matrix) => matrix.shape(),
            Self::W8(matrix) => matrix.shape(),
            Self::Bf16(matrix) => matrix.shape(),
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
    let input = Input::new(x, first.matrix.shape()[1], kernels.set)?;
    let tokens = input.tokens();
    let mut parts = Vec::new();
    let mut pieces = 0;
    for Product { matrix, rows, out } in products {
        let [all, columns] = matrix.shape();
        check_len("columns", columns, input.columns)?;
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
        let (blocks, tokens) = input.piece(*runs, piece - first);
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
    let input = Input::new(x, columns, kernels.set)?;
    check_len("rows of the second matrix", up.shape()[0], rows)?;
    check_len("columns of the second matrix", up.shape()[1], columns)?;
    check_len("products", out.len(), input.tokens() * rows)?;
    let runs = gate.runs(&(0..rows), kernels.pool.threads());
    let out = Shared::new(out);
    kernels.pool.run(runs.count() * input.stretches(), &|piece| {
        let (blocks, tokens) = input.piece(runs, piece);
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
    let input = Input::new(x, columns, kernels.set)?;
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
mod tests {
    use std::sync::Arc;

    use half::f16;
    use proptest::prelude::*;

    use super::*;
    use crate::kernels::{GROUP_SIZE, Huge, Values};

    impl Values for Vec<bf16> {
        fn values(&self) -> &[bf16] {
            self
        }
    }

    fn q_of(row: usize, column: usize) -> i32 {
        ((row * 7 + column * 5 + row * column) % 16) as i32 - 8
    }

    fn word_of(row: usize, eight: usize) -> u32 {
        (0..8).map(|i| ((q_of(row, 8 * eight + i) + 8) as u32) << (4 * i)).sum()
    }

    fn factor_of(row: usize, group: usize) -> bf16 {
        bf16::from_f32(0.01 + ((row * 3 + group * 11) % 17) as f32 * 0.004)
    }

    /// A matrix from blocks of `Q4_0`, whose factors no bfloat16 has, and its weights.
    fn q4_0([rows, columns]: [usize; 2], kernels: &Kernels) -> (Matrix, Vec<f64>) {
        let factor = |row: usize, group: usize| {
            f16::from_bits(0x1001 + ((row * 31 + group * 57) % 0x1fff) as u16)
        };
        let nibble = |row, column| (q_of(row, column) + 8) as u8;
        let mut blocks = Vec::new();
        for row in 0..rows {
            for group in 0..columns / GROUP_SIZE {
                blocks.extend(factor(row, group).to_le_bytes());
                let at = group * GROUP_SIZE;
                blocks.extend((at..at + 16).map(|i| nibble(row, i) | nibble(row, i + 16) << 4));
            }
        }
        let matrix = W4Matrix::from_q4_0([rows, columns], &blocks, kernels).unwrap().unwrap();
        let weight = |i: usize| {
            let (row, column) = (i / columns, i % columns);
            f64::from(q_of(row, column)) * factor(row, column / GROUP_SIZE).to_f64()
        };
        (Matrix::W4(matrix), (0..rows * columns).map(weight).collect())
    }

    /// A matrix of eight-bit integers, and its weights.
    fn eight_bits([rows, columns]: [usize; 2], kernels: &Kernels) -> (Matrix, Vec<f64>) {
        let factor = |group: usize| f16::from_bits(0x1001 + (group * 57 % 0x1fff) as u16);
        let integer = |index: usize| ((index * 73 + index / 7) % 256) as u8 as i8;
        let group = |index: usize| {
            (factor(index), std::array::from_fn(|i| integer(index * GROUP_SIZE + i)))
        };
        let matrix = W8Matrix::new([rows, columns], &group, kernels).unwrap().unwrap();
        let weight = |i: usize| f64::from(integer(i)) * factor(i / GROUP_SIZE).to_f64();
        (Matrix::W8(matrix), (0..rows * columns).map(weight).collect())
    }

    /// A matrix of each kind, and its weights in float64.
    fn matrices([rows, columns]: [usize; 2]) -> Vec<(Matrix, Vec<f64>)> {
        let values: Vec<_> = (0..rows * columns)
            .map(|i| bf16::from_f32(((i * 29) % 97) as f32 / 40.0 - 1.2))
            .collect();
        let wide = values.iter().map(|value| value.to_f64()).collect();
        let dense = Bf16Matrix::new([rows, columns], Arc::new(values)).unwrap();
        let mut all = vec![(Matrix::Bf16(dense), wide)];
        if W4Matrix::fits(columns) {
            let words: Vec<u8> = (0..rows * columns / 8)
                .flat_map(|i| word_of(i / (columns / 8), i % (columns / 8)).to_le_bytes())
                .collect();
            let groups = columns / GROUP_SIZE;
            let factors: Vec<_> =
                (0..rows * groups).map(|i| factor_of(i / groups, i % groups)).collect();
            let kernels = Kernels::new(2, None).unwrap();
            let packed = W4Matrix::new([rows, columns], &words, &factors, &kernels).unwrap();
            let weight = |i: usize| {
                let (row, column) = (i / columns, i % columns);
                f64::from(q_of(row, column)) * factor_of(row, column / 32).to_f64()
            };
            all.push((Matrix::W4(packed), (0..rows * columns).map(weight).collect()));
            all.push(q4_0([rows, columns], &kernels));
            all.push(eight_bits([rows, columns], &kernels));
        }
        all
    }

    fn tokens(count: usize, columns: usize, seed: usize) -> Vec<bf16> {
        (0..count * columns)
            .map(|i| bf16::from_f32(((i * 37 + seed * 13) % 101) as f32 / 50.0 - 1.0))
            .collect()
    }

    /// Each product in float64, and the sum of its terms' sizes.
    fn products(weights: &[f64], x: &[bf16], columns: usize) -> Vec<(f64, f64)> {
        x.chunks(columns)
            .flat_map(|x| {
                weights.chunks(columns).map(move |row| {
                    let terms = row.iter().zip(x).map(|(w, x)| w * x.to_f64());
                    (terms.clone().sum(), terms.map(f64::abs).sum())
                })
            })
            .collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(if cfg!(miri) { 2 } else { 40 }) })]
        #[test]
        fn products_of_every_kind_of_matrix_on_every_instruction_set_are_those_of_float64(
            rows in 1..if cfg!(miri) { 20 } else { 70_usize },
            columns in prop_oneof![Just(64), Just(192), 1_usize..150],
            count in 1..if cfg!(miri) { 3 } else { 20_usize }, threads in 1_usize..4, seed in 0_usize..1000,
        ) {
            let x = tokens(count, columns, seed);
            for (matrix, weights) in matrices([rows, columns]) {
                let wanted = products(&weights, &x, columns);
                for set in InstructionSet::available() {
                    let kernels = Kernels::new(threads, Some(set)).unwrap();
                    let mut out = vec![f32::NAN; count * rows];
                    multiply(&kernels, &x, &mut [Product::whole(&matrix, &mut out)]).unwrap();
                    for (found, (wanted, size)) in out.iter().zip(&wanted) {
                        prop_assert!((f64::from(*found) - wanted).abs() <= size * 2e-6, "{set:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn a_token_gets_the_same_bits_alone_and_among_others_with_any_number_of_threads() {
        let (rows, count) = if cfg!(miri) { (20, 3) } else { (100, 19) };
        for (matrix, _) in matrices([rows, 128]) {
            let x = tokens(count, 128, 1);
            for set in InstructionSet::available() {
                let run = |x: &[bf16], threads| {
                    let kernels = Kernels::new(threads, Some(set)).unwrap();
                    let mut out = vec![0.0; x.len() / 128 * rows];
                    multiply(&kernels, x, &mut [Product::whole(&matrix, &mut out)]).unwrap();
                    out
                };
                let together = run(&x, 3);
                for (token, x) in x.chunks(128).enumerate() {
                    assert_eq!(run(x, 1), together[token * rows..][..rows], "{set:?}");
                }
            }
        }
    }

    #[test]
    fn some_rows_of_a_product_are_those_of_the_whole() {
        let x = tokens(3, 64, 4);
        for set in InstructionSet::available() {
            let kernels = Kernels::new(2, Some(set)).unwrap();
            for (matrix, _) in matrices([70, 64]) {
                let mut whole = vec![0.0; 3 * 70];
                multiply(&kernels, &x, &mut [Product::whole(&matrix, &mut whole)]).unwrap();
                for rows in [0..70, 16..48, 5..7, 30..70, 64..70, 9..9] {
                    let mut out = vec![f32::NAN; 3 * rows.len()];
                    let product = Product { matrix: &matrix, rows: rows.clone(), out: &mut out };
                    multiply(&kernels, &x, &mut [product]).unwrap();
                    let wanted: Vec<_> =
                        whole.chunks(70).flat_map(|token| token[rows.clone()].to_vec()).collect();
                    assert_eq!(out, wanted, "{set:?} {rows:?}");
                }
                let mut out = vec![0.0; 3 * 10];
                let beyond = Product { matrix: &matrix, rows: 65..75, out: &mut out };
                assert!(multiply(&kernels, &x, &mut [beyond]).is_err());
            }
        }
    }

    #[test]
    fn several_products_are_those_of_each_alone_and_gated_ones_their_gelu() {
        let (rows, count) = if cfg!(miri) { (20, 2) } else { (40, 11) };
        let x = tokens(count, 64, 2);
        for set in InstructionSet::available() {
            let kernels = Kernels::new(3, Some(set)).unwrap();
            for (gate, _) in matrices([rows, 64]) {
                let (up, _) = matrices([rows, 64]).swap_remove(0);
                let alone = |matrix: &Matrix| {
                    let mut out = vec![0.0; count * rows];
                    multiply(&kernels, &x, &mut [Product::whole(matrix, &mut out)]).unwrap();
                    out
                };
                let (mut one, mut two) = (vec![0.0; count * rows], vec![0.0; count * rows]);
                multiply(
                    &kernels,
                    &x,
                    &mut [Product::whole(&gate, &mut one), Product::whole(&up, &mut two)],
                )
                .unwrap();
                assert_eq!((&one, &two), (&alone(&gate), &alone(&up)));
                let (mut wanted, mut found) =
                    (vec![bf16::NAN; count * rows], vec![bf16::NAN; count * rows]);
                gelu_times(set, &one, &two, &mut wanted);
                gated(&kernels, &x, (&gate, &up), &mut found).unwrap();
                // Roundings differ where a vector's lanes do not fill it.
                for (found, wanted) in found.iter().zip(wanted) {
                    let (found, wanted) = (found.to_f32(), wanted.to_f32());
                    assert!((found - wanted).abs() <= wanted.abs() / 128.0, "{found} {wanted}");
                }
            }
        }
    }

    #[test]
    fn the_best_rows_are_those_of_a_sort_without_what_is_not_allowed() {
        let x = tokens(1, 64, 3);
        for set in InstructionSet::available() {
            let kernels = Kernels::new(2, Some(set)).unwrap();
            let rows = if cfg!(miri) { 100 } else { 3000 };
            for (matrix, _) in matrices([rows, 64]) {
                let mut logits = vec![0.0; rows];
                multiply(&kernels, &x, &mut [Product::whole(&matrix, &mut logits)]).unwrap();
                let is_allowed = |row: usize| row % 7 != 3;
                let mut wanted: Vec<_> =
                    logits.into_iter().enumerate().filter(|(row, _)| is_allowed(*row)).collect();
                // A stable sort: of equal ones the lowest row first.
                wanted.sort_by(|a, b| b.1.total_cmp(&a.1));
                for count in [1, 5, 64] {
                    let found = best(&kernels, &x, &matrix, count, &is_allowed).unwrap();
                    assert_eq!(found, wanted[..count]);
                }
                assert_eq!(best(&kernels, &x, &matrix, 3, &|row| row == 2).unwrap().len(), 1);
            }
        }
    }

    #[test]
    fn slices_of_other_lengths_are_refused() {
        let kernels = Kernels::new(1, None).unwrap();
        for (matrix, _) in matrices([16, 64]) {
            let (x, mut out) = (vec![bf16::ONE; 65], vec![0.0; 16]);
            let mut run = |x: &[bf16], width: usize| {
                multiply(&kernels, x, &mut [Product::whole(&matrix, &mut out[..width])]).is_ok()
            };
            assert!(!run(&x, 16) && !run(&x[..64], 15) && !run(&[], 16));
            assert!(run(&x[..64], 16) && run(&[], 0));
            assert!(best(&kernels, &x, &matrix, 1, &|_| true).is_err());
            let mut out = vec![bf16::ZERO; 15];
            assert!(gated(&kernels, &x[..64], (&matrix, &matrix), &mut out).is_err());
        }
        assert!(!W4Matrix::fits(96));
        let short: Arc<dyn Values> = Arc::new(Huge::<bf16>::zeroed(15).unwrap());
        assert!(Bf16Matrix::new([4, 4], short).is_none());
    }

    #[test]
    fn instructions_that_the_machine_lacks_are_refused_by_name() {
        for set in InstructionSet::ALL {
            match Kernels::new(1, Some(set)) {
                Ok(kernels) => assert!(InstructionSet::available().contains(&kernels.set)),
                Err(error) => assert!(error.to_string().contains(set.name()), "{error}"),
            }
        }
    }
}
