//! Attention of the query heads that share a key and value head, over a cache of its own layout.
//!
//! Positions are attended to in parts of [`PART`], each with its own softmax, which are then joined in order (as in
//! "Online normalizer calculation for softmax", Milakov and Gimelshein, 2018). The parts lie at the same positions for every query, so that a token gets the same
//! bits alone and in a prompt, on any number of threads.

use std::ops::Range;

use half::bf16;

use super::{
    InstructionSet, Kernels,
    attention_lanes::{By, Weights, add_scaled, exponentials, scores_of},
    check_len,
    memory::{Huge, Shared},
    vector::{exp, rounded, widened},
};
use crate::error::{Error, Result};

/// Positions of a part.
pub(super) const PART: usize = 128;

/// Positions whose keys stand next to each other: lanes of the widest vector register.
pub(super) const LANES: usize = 16;

/// Words of positions' keys or values, two neighbours of bfloat16 each.
pub(super) type Words = [u32; LANES];

/// Keys and values of one head of a layer, in rows that positions take in turn.
pub(crate) struct KeyValues {
    rows: usize,
    head_dim: usize,
    /// `[rows / LANES][head_dim / 2][LANES]`: two neighbours of bfloat16 a word, so that a sum of products stays in its lane.
    keys: Huge<Words>,
    /// `[tiles of LANES values][rows / 2][LANES]`: the values of two rows a word, so that a sum over rows stays in its lane too, and
    /// what is read for it lies in one piece.
    values: Huge<Words>,
}

impl KeyValues {
    /// At least `rows` rows; a query must not be more than that behind the newest position, less those it sees.
    ///
    /// # Errors
    /// `Input` when there is no memory for them.
    pub(crate) fn new(rows: usize, head_dim: usize) -> Result<Self> {
        let rows = rows.next_multiple_of(PART);
        Ok(Self {
            rows,
            head_dim,
            keys: Huge::zeroed(rows / LANES * (head_dim / 2))?,
            values: Huge::zeroed(head_dim.div_ceil(LANES) * (rows / 2))?,
        })
    }

    /// Bytes in memory of what [`KeyValues::new`] makes.
    pub(crate) fn bytes_of(rows: usize, head_dim: usize) -> usize {
        let rows = rows.next_multiple_of(PART);
        let words = rows / LANES * (head_dim / 2) + head_dim.div_ceil(LANES) * (rows / 2);
        words * size_of::<Words>()
    }

    /// Bytes in memory, once they are written.
    pub(crate) fn bytes(&self) -> usize {
        size_of_val(&*self.keys) + size_of_val(&*self.values)
    }

    /// Stores what is at `position`: `key` and `value` `[head_dim]`.
    ///
    /// # Errors
    /// `Internal` when they are of another length.
    pub(crate) fn write(&mut self, position: usize, key: &[bf16], value: &[bf16]) -> Result<()> {
        check_len("a key", key.len(), self.head_dim)?;
        check_len("a value", value.len(), self.head_dim)?;
        let row = position % self.rows;
        let pairs = self.head_dim / 2;
        let keys = &mut self.keys[row / LANES * pairs..][..pairs];
        for (words, &[low, high]) in keys.iter_mut().zip(key.as_chunks::<2>().0) {
            words[row % LANES] = u32::from(low.to_bits()) | u32::from(high.to_bits()) << 16;
        }
        let shift = 16 * (row % 2);
        for (tile, value) in value.chunks(LANES).enumerate() {
            let words = &mut self.values[tile * (self.rows / 2) + row / 2];
            for (word, value) in words.iter_mut().zip(value) {
                *word = *word & !(0xffff << shift) | u32::from(value.to_bits()) << shift;
            }
        }
        Ok(())
    }

    fn width(&self) -> usize {
        self.head_dim.next_multiple_of(LANES)
    }
}

/// `q` `[tokens, heads, head_dim]` at positions from `start` on, over the last `window` positions up to its own each →
/// `out` of the same shape. `cache`: one of each key and value head, which consecutive query heads share.
///
/// # Errors
/// `Internal` when lengths do not say so, or a thread panicked.
#[expect(unsafe_code, reason = "threads write different heads")]
pub(crate) fn attend(
    kernels: &Kernels,
    q: &[bf16],
    heads: usize,
    cache: &[KeyValues],
    (start, window): (usize, usize),
    out: &mut [bf16],
) -> Result<()> {
    let Some(head_dim) = cache.first().map(|one| one.head_dim) else {
        return Err(Error::Internal("expected a cache to attend to, found none".into()));
    };
    let tokens = q.len() / (heads * head_dim);
    check_len("queries", q.len(), tokens * heads * head_dim)?;
    check_len("what is attended to", out.len(), q.len())?;
    check_len("query heads", heads, heads / cache.len() * cache.len())?;
    let group = heads / cache.len();
    let (set, out) = (kernels.set, Shared::new(out));
    let seen = |token: usize| (start + token + 1).saturating_sub(window)..start + token + 1;
    let query = |token: usize, head: usize| {
        let at = (token * heads + head * group) * head_dim;
        (at..at + group * head_dim, Query::new(&q[at..at + group * head_dim], set))
    };
    if tokens == 1 {
        let (seen, mut parts) = (seen(0), Vec::new());
        for head in 0..cache.len() {
            parts.extend(parts_of(seen.clone()).map(|part| (head, part)));
        }
        let width = group * Partial::width(&cache[0]);
        let mut found = vec![0.0; parts.len() * width];
        let shared = Shared::new(&mut found);
        kernels.pool.run(parts.len(), &|piece| {
            let (head, part) = parts[piece].clone();
            // SAFETY: each piece has its own.
            let found = unsafe { shared.part(piece * width..(piece + 1) * width) };
            attend_to_part(
                set,
                &cache[head],
                &query(0, head).1,
                part,
                &mut Partial::of(found, group),
            );
        })?;
        for (head, found) in found.chunks_exact_mut(width * (parts.len() / cache.len())).enumerate()
        {
            let (first, others) = found.split_at_mut(width);
            let mut all = Partial::of(first, group);
            for other in others.chunks_exact_mut(width) {
                join(set, &mut all, &Partial::of(other, group));
            }
            // SAFETY: the one borrow of it.
            all.finish(unsafe { out.part(query(0, head).0) }, head_dim);
        }
        return Ok(());
    }
    kernels.pool.run(tokens * cache.len(), &|piece| {
        let (token, head) = (piece / cache.len(), piece % cache.len());
        let width = group * Partial::width(&cache[head]);
        let (mut all, mut one) = (vec![0.0; width], vec![0.0; width]);
        let (range, query) = query(token, head);
        for (index, part) in parts_of(seen(token)).enumerate() {
            let into = if index == 0 { &mut all } else { &mut one };
            attend_to_part(set, &cache[head], &query, part, &mut Partial::of(into, group));
            if index > 0 {
                join(set, &mut Partial::of(&mut all, group), &Partial::of(&mut one, group));
            }
        }
        // SAFETY: no other piece has this token's head.
        Partial::of(&mut all, group).finish(unsafe { out.part(range) }, head_dim);
    })
}

/// `seen`, cut at multiples of [`PART`].
fn parts_of(seen: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    (seen.start / PART..seen.end.div_ceil(PART))
        .map(move |part| (part * PART).max(seen.start)..((part + 1) * PART).min(seen.end))
}

/// Query heads of one token, `[heads, head_dim]`.
struct Query<'a> {
    narrow: &'a [bf16],
    /// In float32, for instructions that multiply nothing else.
    wide: Vec<f32>,
}

impl<'a> Query<'a> {
    fn new(narrow: &'a [bf16], set: InstructionSet) -> Self {
        let wide = if set.multiplies_bfloats() {
            Vec::new()
        } else {
            narrow.iter().map(|&value| widened(value)).collect()
        };
        Self { narrow, wide }
    }
}

/// Softmax over some positions, not yet divided by its sum.
struct Partial<'a> {
    /// Of each head, the largest score.
    max: &'a mut [f32],
    /// Of each head, the sum of exp(score - max).
    sum: &'a mut [f32],
    /// Of each head, the values by exp(score - max), `[heads, width]`.
    values: &'a mut [f32],
}

impl<'a> Partial<'a> {
    /// Numbers for each head.
    fn width(cache: &KeyValues) -> usize {
        2 + cache.width()
    }

    fn of(numbers: &'a mut [f32], heads: usize) -> Self {
        let (max, rest) = numbers.split_at_mut(heads);
        let (sum, values) = rest.split_at_mut(heads);
        Self { max, sum, values }
    }

    fn finish(&self, out: &mut [bf16], head_dim: usize) {
        let width = self.values.len() / self.sum.len();
        for ((out, values), sum) in
            out.chunks_exact_mut(head_dim).zip(self.values.chunks_exact(width)).zip(&*self.sum)
        {
            for (out, value) in out.iter_mut().zip(values) {
                *out = rounded(value / sum);
            }
        }
    }
}

/// Adds what `other` found to `all`.
fn join(set: InstructionSet, all: &mut Partial<'_>, other: &Partial<'_>) {
    let width = all.values.len() / all.sum.len();
    for head in 0..all.sum.len() {
        let max = all.max[head].max(other.max[head]);
        let (own, others) =
            (exp::<false>(all.max[head] - max), exp::<false>(other.max[head] - max));
        all.max[head] = max;
        all.sum[head] = all.sum[head] * own + other.sum[head] * others;
        let at = head * width..(head + 1) * width;
        add_scaled(set, &mut all.values[at.clone()], own, &other.values[at], others);
    }
}

/// Fills `found` with the softmax of `query` over positions `seen` of one part.
fn attend_to_part(
    set: InstructionSet,
    cache: &KeyValues,
    query: &Query<'_>,
    seen: Range<usize>,
    found: &mut Partial<'_>,
) {
    // As many heads at once as registers hold sums of.
    let most = if set.is_avx512() { 8 } else { 2 };
    let (dim, width, heads) = (cache.head_dim, cache.width(), found.sum.len());
    let mut head = 0;
    while head < heads {
        let some = [8, 4, 2].into_iter().find(|&n| n <= most.min(heads - head)).unwrap_or(1);
        let (heads, dims) = (head..head + some, head * dim..(head + some) * dim);
        let part = Heads {
            queries: By {
                narrow: &query.narrow[dims.clone()],
                wide: query.wide.get(dims).unwrap_or_default(),
                stride: dim,
            },
            max: &mut found.max[heads.clone()],
            sum: &mut found.sum[heads.clone()],
            values: &mut found.values[heads.start * width..heads.end * width],
        };
        match some {
            8 => attend_heads::<8>(set, cache, part, seen.clone()),
            4 => attend_heads::<4>(set, cache, part, seen.clone()),
            2 => attend_heads::<2>(set, cache, part, seen.clone()),
            _ => attend_heads::<1>(set, cache, part, seen.clone()),
        }
        head += some;
    }
}

/// Some of the query heads, and where their part of a [`Partial`] goes.
struct Heads<'a> {
    queries: By<'a>,
    max: &'a mut [f32],
    sum: &'a mut [f32],
    values: &'a mut [f32],
}

fn attend_heads<const H: usize>(
    set: InstructionSet,
    cache: &KeyValues,
    heads: Heads<'_>,
    seen: Range<usize>,
) {
    let (row, pairs) = (seen.start % cache.rows, cache.head_dim / 2);
    let first = row / PART * PART;
    let rows = row - first..row - first + seen.len();
    let mut scores = [[0.0; PART]; H];
    let keys = |block| &cache.keys[(first / LANES + block) * pairs..][..pairs];
    // Two blocks at a time; the last of a part may be looked at without being needed.
    for block in (rows.start / LANES..rows.end.div_ceil(LANES)).step_by(2) {
        let block = block.min(PART / LANES - 2);
        let found = scores_of::<H>(set, [keys(block), keys(block + 1)], heads.queries);
        for (index, found) in found.iter().enumerate() {
            for (scores, found) in scores.iter_mut().zip(found) {
                scores[(block + index) * LANES..][..LANES].copy_from_slice(found);
            }
        }
    }
    for ((scores, max), sum) in scores.iter_mut().zip(heads.max).zip(heads.sum) {
        (*max, *sum) = exponentials(set, &mut scores[rows.clone()]);
    }
    let weights = Weights::new(&scores, rows);
    let width = cache.width();
    let values = |tile| &cache.values[tile * (cache.rows / 2) + first / 2..][..PART / 2];
    let mut put = |tile: usize, sums: &[[f32; LANES]; H]| {
        for (out, sums) in heads.values.chunks_exact_mut(width).zip(sums) {
            out[tile * LANES..][..LANES].copy_from_slice(sums);
        }
    };
    let tiles = width / LANES;
    for tile in (0..tiles - tiles % 2).step_by(2) {
        let [one, two] = weights.sum(set, [values(tile), values(tile + 1)]);
        put(tile, &one);
        put(tile + 1, &two);
    }
    if tiles % 2 == 1 {
        let [one] = weights.sum(set, [values(tiles - 1)]);
        put(tiles - 1, &one);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A number for each place, between -1 and 1.
    fn number(of: [usize; 4]) -> f64 {
        let [a, b, c, d] = of;
        let mixed = (a * 7919 + b * 104_729 + c * 1_299_709 + d * 15_485_863) % 10_007;
        bf16::from_f64(mixed as f64 / 5003.5 - 1.0).to_f64()
    }

    struct Case {
        heads: usize,
        kv_heads: usize,
        dim: usize,
        window: usize,
    }

    impl Case {
        fn key(&self, position: usize, head: usize) -> Vec<bf16> {
            (0..self.dim).map(|i| bf16::from_f64(number([1, position, head, i]))).collect()
        }

        fn value(&self, position: usize, head: usize) -> Vec<bf16> {
            (0..self.dim).map(|i| bf16::from_f64(number([2, position, head, i]))).collect()
        }

        fn query(&self, position: usize) -> Vec<bf16> {
            let all = self.heads * self.dim;
            (0..all).map(|i| bf16::from_f64(number([3, position, 0, i]))).collect()
        }

        fn caches(&self, chunk: usize) -> Vec<KeyValues> {
            let rows = self.window.min(1000) + chunk;
            (0..self.kv_heads).map(|_| KeyValues::new(rows, self.dim).unwrap()).collect()
        }

        fn write(&self, caches: &mut [KeyValues], position: usize) {
            for (head, cache) in caches.iter_mut().enumerate() {
                let (key, value) = (self.key(position, head), self.value(position, head));
                cache.write(position, &key, &value).unwrap();
            }
        }

        /// What the query at `position` attends to, in float64.
        fn wanted(&self, position: usize) -> Vec<f64> {
            let q = self.query(position);
            let mut all = Vec::new();
            for head in 0..self.heads {
                let kv_head = head / (self.heads / self.kv_heads);
                let q = &q[head * self.dim..][..self.dim];
                let seen = (position + 1).saturating_sub(self.window)..position + 1;
                let scores: Vec<f64> = seen
                    .clone()
                    .map(|at| {
                        let key = self.key(at, kv_head);
                        q.iter().zip(key).map(|(q, k)| q.to_f64() * k.to_f64()).sum()
                    })
                    .collect();
                let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let weights: Vec<_> = scores.iter().map(|score| (score - max).exp()).collect();
                let sum: f64 = weights.iter().sum();
                for i in 0..self.dim {
                    let value = |at: usize| number([2, at, kv_head, i]);
                    all.push(
                        seen.clone().zip(&weights).map(|(at, w)| w * value(at)).sum::<f64>() / sum,
                    );
                }
            }
            all
        }
    }

    /// Miri interprets the last two.
    const CASES: [Case; 5] = [
        Case { heads: 8, kv_heads: 1, dim: 64, window: usize::MAX },
        Case { heads: 8, kv_heads: 1, dim: 64, window: 150 },
        Case { heads: 6, kv_heads: 2, dim: 16, window: 40 },
        Case { heads: 7, kv_heads: 1, dim: 34, window: usize::MAX },
        Case { heads: 2, kv_heads: 2, dim: 2, window: 1 },
    ];

    #[test]
    fn attention_is_that_of_float64_on_every_instruction_set_before_and_after_rows_are_used_again()
    {
        for set in InstructionSet::available() {
            let kernels = Kernels::new(2, Some(set)).unwrap();
            for case in &CASES[if cfg!(miri) { 3 } else { 0 }..] {
                let mut caches = case.caches(1);
                for position in 0..if cfg!(miri) { 17 } else { 400 } {
                    case.write(&mut caches, position);
                    if ![0, 1, 15, 16, 127, 128, 200, 399].contains(&position) {
                        continue;
                    }
                    let q = case.query(position);
                    let mut out = vec![bf16::NAN; q.len()];
                    let from = (position, case.window);
                    attend(&kernels, &q, case.heads, &caches, from, &mut out).unwrap();
                    for (found, wanted) in out.iter().zip(case.wanted(position)) {
                        // Weights are rounded to bfloat16, and what they sum up to.
                        let bar = wanted.abs() / 128.0 + 2e-3;
                        assert!((found.to_f64() - wanted).abs() < bar, "{set:?} {found} {wanted}");
                    }
                }
            }
        }
    }

    #[test]
    fn a_token_gets_the_same_bits_alone_and_in_a_prompt_with_any_number_of_threads() {
        for set in InstructionSet::available() {
            for case in &CASES[if cfg!(miri) { 3 } else { 0 }..] {
                let tokens = if cfg!(miri) { 9 } else { 180 };
                let mut caches = case.caches(tokens);
                for position in 0..tokens {
                    case.write(&mut caches, position);
                }
                let q: Vec<_> = (0..tokens).flat_map(|position| case.query(position)).collect();
                let run = |q: &[bf16], start: usize, threads: usize| {
                    let kernels = Kernels::new(threads, Some(set)).unwrap();
                    let mut out = vec![bf16::NAN; q.len()];
                    let from = (start, case.window);
                    attend(&kernels, q, case.heads, &caches, from, &mut out).unwrap();
                    out
                };
                let together = run(&q, 0, 3);
                let width = case.heads * case.dim;
                for position in [0, 5, 130, 179].into_iter().filter(|&position| position < tokens) {
                    let alone = run(&q[position * width..][..width], position, 1);
                    assert_eq!(alone, together[position * width..][..width], "{set:?}");
                    assert_eq!(alone, run(&q[position * width..][..width], position, 2));
                }
            }
        }
    }

    #[test]
    fn slices_of_other_lengths_are_refused() {
        let kernels = Kernels::new(1, None).unwrap();
        let mut cache = vec![KeyValues::new(10, 8).unwrap()];
        let (q, mut out) = (vec![bf16::ONE; 16], vec![bf16::ONE; 16]);
        assert!(cache[0].write(0, &q[..8], &q[..7]).is_err());
        assert!(cache[0].write(0, &q[..7], &q[..8]).is_err());
        assert!(attend(&kernels, &q, 2, &cache, (0, 4), &mut out).is_ok());
        assert!(attend(&kernels, &q[..15], 2, &cache, (0, 4), &mut out).is_err());
        assert!(attend(&kernels, &q, 2, &cache, (0, 4), &mut out[..15]).is_err());
        assert!(attend(&kernels, &q, 2, &[], (0, 4), &mut out).is_err());
        cache.push(KeyValues::new(10, 8).unwrap());
        assert!(
            attend(
                &kernels,
                &[q.clone(), q[..8].to_vec()].concat(),
                3,
                &cache,
                (0, 4),
                &mut [bf16::ONE; 24]
            )
            .is_err()
        );
    }
}
