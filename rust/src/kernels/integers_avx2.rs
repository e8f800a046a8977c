//! Integer weights with AVX2: one instruction multiplies 16 integers of 16 bits by 16 and adds them in pairs to 8 sums.
//!
//! Weights of at most eight bits times tokens of 15 ([`Fixed`], in pairs) make sums far below 2^31, so that nothing can saturate; products
//! of bytes would, in 16 bits, and take as many instructions. The sums are the very integers that [`super::integers_avx512`] has, and what
//! follows is done in the same order, so that results have the same bits. AVX-VNNI would add in the same instruction and gain
//! nothing for one token (docs/log.md).
#![expect(unsafe_code, reason = "instructions that not every machine has")]

use std::arch::x86_64::{
    __m256, __m256i, _mm_loadl_epi64, _mm_packus_epi32, _mm256_add_epi32, _mm256_and_si256,
    _mm256_castsi256_ps, _mm256_castsi256_si128, _mm256_cvtepi8_epi32, _mm256_cvtepi32_ps,
    _mm256_cvtepu8_epi32, _mm256_cvtph_ps, _mm256_extracti128_si256, _mm256_fmadd_ps,
    _mm256_fnmadd_ps, _mm256_load_si256, _mm256_madd_epi16, _mm256_mul_ps, _mm256_or_si256,
    _mm256_set1_epi8, _mm256_set1_epi16, _mm256_set1_epi32, _mm256_set1_ps, _mm256_setzero_ps,
    _mm256_setzero_si256, _mm256_slli_epi32, _mm256_sllv_epi32, _mm256_srli_epi16,
    _mm256_srli_epi32, _mm256_srlv_epi32, _mm256_storeu_ps, _mm256_sub_epi32,
};

use super::{
    fixed::{self, Fixed},
    integers::Record,
    k,
    matrix::{ROWS, Sums},
    prefetch::{AHEAD, prefetch},
    w4, w8,
};

/// Tokens at once: with three or four the compiler runs out of the 16 registers for some forms.
const TOKENS: usize = 2;

/// Rows of a vector.
const LANES: usize = 8;

/// Vectors of a block.
const HALVES: usize = ROWS / LANES;

/// A record's parts as vectors of half its rows each.
pub(super) trait Halves: Record {
    /// As [`Record::bytes`].
    ///
    /// # Safety
    /// The machine has the instructions; there are four times as many columns.
    unsafe fn bytes_vector(&self, four: usize, half: usize) -> __m256i;

    /// As [`Record::factor`], of each row.
    ///
    /// # Safety
    /// The machine has the instructions.
    unsafe fn factors_vector(&self, part: usize, half: usize, is_half: bool) -> __m256;

    /// As [`Record::minimum`], of each row.
    ///
    /// # Safety
    /// As above.
    unsafe fn minima_vector(&self, _part: usize, _half: usize) -> __m256 {
        // SAFETY: as the caller says.
        unsafe { _mm256_setzero_ps() }
    }
}

/// Records of several blocks of rows, `count` each, × tokens `x` → `sums` `[blocks][tokens]`. What is added to a sum in which order is
/// the same for any number of either.
pub(super) fn blocks<R: Halves>(
    (records, is_half): (&[R], bool),
    count: usize,
    x: &[Fixed],
    sums: &mut [Sums],
) {
    let groups = count * R::COLUMNS / fixed::GROUP;
    let tokens = x.len() / groups;
    assert!(x.len() == tokens * groups);
    assert!(records.len() * tokens == sums.len() * count);
    if tokens == 0 {
        return;
    }
    for (records, sums) in records.chunks_exact(count).zip(sums.chunks_exact_mut(tokens)) {
        for (x, sums) in x.chunks(TOKENS * groups).zip(sums.chunks_mut(TOKENS)) {
            let run = if sums.len() == 1 { block::<R, 1> } else { block::<R, TOKENS> };
            // SAFETY: `InstructionSet::available` has seen that the machine has them, and the lengths fit each other.
            unsafe { run((records, is_half), x, sums) };
        }
    }
}

/// # Safety
/// The machine has the instructions, and there are `T` tokens of the records' columns and as many sums.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn block<R: Halves, const T: usize>(
    (records, is_half): (&[R], bool),
    x: &[Fixed],
    sums: &mut [Sums],
) {
    let groups = records.len() * R::COLUMNS / fixed::GROUP;
    debug_assert!(x.len() == T * groups && sums.len() == T);
    let mut totals = [[_mm256_setzero_ps(); HALVES]; T];
    for (index, record) in records.iter().enumerate() {
        if T == 1 {
            let ahead = std::ptr::from_ref(record).wrapping_byte_add(AHEAD);
            for line in 0..size_of::<R>() / 64 {
                prefetch(ahead.wrapping_byte_add(64 * line).cast());
            }
        }
        for part in 0..R::COLUMNS / R::SHARING {
            let at = index * R::COLUMNS + part * R::SHARING;
            let (group, within) = (at / fixed::GROUP, at % fixed::GROUP);
            // SAFETY: each token has the group.
            let x: [_; T] =
                std::array::from_fn(|token| unsafe { x.get_unchecked(token * groups + group) });
            let mut products = [[_mm256_setzero_si256(); HALVES]; T];
            for sixteen in 0..R::SHARING / 16 {
                // So few that the compiler unrolls them, and knows all shifts.
                for four in 0..4 {
                    let four = 4 * sixteen + four;
                    let (mut even, mut odd) =
                        ([_mm256_setzero_si256(); HALVES], [_mm256_setzero_si256(); HALVES]);
                    for half in 0..HALVES {
                        // SAFETY: the machine has the instructions, and the record the columns.
                        let bytes =
                            unsafe { record.bytes_vector(part * R::SHARING / 4 + four, half) };
                        even[half] = _mm256_and_si256(bytes, _mm256_set1_epi16(255));
                        odd[half] = _mm256_srli_epi16::<8>(bytes);
                    }
                    for token in 0..T {
                        let [one, two] = &x[token].words;
                        let (one, two) =
                            (each(one[within / 4 + four]), each(two[within / 4 + four]));
                        for half in 0..HALVES {
                            let sum = &mut products[token][half];
                            *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(even[half], one));
                            *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(odd[half], two));
                        }
                    }
                }
            }
            for half in 0..HALVES {
                // SAFETY: the machine has the instructions.
                let factors = unsafe { record.factors_vector(part, half, is_half) };
                for token in 0..T {
                    let x = x[token];
                    let factor = _mm256_set1_ps(x.factor);
                    let sum = if R::SHARING == fixed::GROUP {
                        x.sum
                    } else {
                        x.halves[within / R::SHARING]
                    };
                    let sum = _mm256_set1_epi32(sum);
                    let mut product = products[token][half];
                    if R::ZERO != 0 {
                        let zero = _mm256_set1_epi32(R::ZERO.trailing_zeros() as i32);
                        product = _mm256_sub_epi32(product, _mm256_sllv_epi32(sum, zero));
                    }
                    let product = _mm256_mul_ps(_mm256_cvtepi32_ps(product), factor);
                    let total = &mut totals[token][half];
                    *total = _mm256_fmadd_ps(product, factors, *total);
                    if R::HAS_MINIMA {
                        let sum = _mm256_mul_ps(_mm256_cvtepi32_ps(sum), factor);
                        // SAFETY: the machine has the instructions.
                        let minima = unsafe { record.minima_vector(part, half) };
                        *total = _mm256_fnmadd_ps(minima, sum, *total);
                    }
                }
            }
        }
    }
    for (sums, totals) in sums.iter_mut().zip(totals) {
        for (sums, total) in sums.as_chunks_mut::<LANES>().0.iter_mut().zip(totals) {
            // SAFETY: 32 bytes.
            unsafe { _mm256_storeu_ps(sums.as_mut_ptr(), total) };
        }
    }
}

/// A word in every lane.
#[target_feature(enable = "avx2")]
fn each(word: u32) -> __m256i {
    _mm256_set1_epi32(word.cast_signed())
}

#[target_feature(enable = "avx2")]
fn load(words: &[u32; ROWS], half: usize) -> __m256i {
    let words = &words.as_chunks::<LANES>().0[half];
    // SAFETY: 32 bytes, at a multiple of 32 in every record.
    unsafe { _mm256_load_si256(words.as_ptr().cast()) }
}

/// Bits of each byte of `words` from the lowest in `mask` on, brought there from bit `from` on.
#[target_feature(enable = "avx2")]
fn bits_from(words: __m256i, from: usize, mask: i8) -> __m256i {
    let (from, to) = (from as i32, mask.trailing_zeros() as i32);
    let moved = if from >= to {
        _mm256_srlv_epi32(words, _mm256_set1_epi32(from - to))
    } else {
        _mm256_sllv_epi32(words, _mm256_set1_epi32(to - from))
    };
    _mm256_and_si256(moved, _mm256_set1_epi8(mask))
}

/// As [`super::integers::half_of`].
#[target_feature(enable = "avx2,f16c")]
fn halves_of(pairs: &[u32; ROWS], half: usize, is_high: bool, is_half: bool) -> __m256 {
    let pairs = load(pairs, half);
    let high = _mm256_set1_epi32(-65536);
    if !is_half {
        let bits =
            if is_high { _mm256_and_si256(pairs, high) } else { _mm256_slli_epi32::<16>(pairs) };
        return _mm256_castsi256_ps(bits);
    }
    let low = _mm256_set1_epi32(65535);
    let bits = if is_high { _mm256_srli_epi32::<16>(pairs) } else { _mm256_and_si256(pairs, low) };
    let (first, last) = (_mm256_castsi256_si128(bits), _mm256_extracti128_si256::<1>(bits));
    _mm256_cvtph_ps(_mm_packus_epi32(first, last))
}

impl Halves for w4::Record {
    #[target_feature(enable = "avx2")]
    unsafe fn bytes_vector(&self, four: usize, half: usize) -> __m256i {
        bits_from(load(&self.words[four / 2], half), 4 * (four % 2), 15)
    }

    #[target_feature(enable = "avx2,f16c")]
    unsafe fn factors_vector(&self, part: usize, half: usize, is_half: bool) -> __m256 {
        halves_of(&self.factors, half, part == 1, is_half)
    }
}

impl Halves for w8::Record {
    #[target_feature(enable = "avx2")]
    unsafe fn bytes_vector(&self, four: usize, half: usize) -> __m256i {
        load(&self.words[four], half)
    }

    #[target_feature(enable = "avx2,f16c")]
    unsafe fn factors_vector(&self, part: usize, half: usize, is_half: bool) -> __m256 {
        halves_of(&self.factors, half, part == 1, is_half)
    }
}

impl<const HIGH: usize> Halves for k::Record<HIGH> {
    #[target_feature(enable = "avx2")]
    unsafe fn bytes_vector(&self, four: usize, half: usize) -> __m256i {
        let low = bits_from(load(&self.low[four / 2], half), 4 * (four % 2), 15);
        let high = match HIGH {
            k::ONE_BIT => {
                // In two steps: the first is the same for all fours of sixteen columns.
                let nibble = _mm256_set1_epi32((four / 4 % 2 * 4) as i32);
                let words = _mm256_srlv_epi32(load(&self.high[four / 8], half), nibble);
                bits_from(words, four % 4, 16)
            }
            k::TWO_BITS => bits_from(load(&self.high[four / 4], half), 2 * (four % 4), 48),
            _ => return low,
        };
        _mm256_or_si256(low, high)
    }

    #[target_feature(enable = "avx2,f16c")]
    unsafe fn factors_vector(&self, part: usize, half: usize, _is_half: bool) -> __m256 {
        let scales = &self.scales[part].as_chunks::<LANES>().0[half];
        // SAFETY: eight bytes.
        let scales = unsafe { _mm_loadl_epi64(scales.as_ptr().cast()) };
        let scales = if HIGH == k::TWO_BITS {
            _mm256_cvtepi8_epi32(scales)
        } else {
            _mm256_cvtepu8_epi32(scales)
        };
        _mm256_mul_ps(halves_of(&self.factors, half, false, true), _mm256_cvtepi32_ps(scales))
    }

    #[target_feature(enable = "avx2,f16c")]
    unsafe fn minima_vector(&self, part: usize, half: usize) -> __m256 {
        let scales = &self.scales[part + k::MINIMA].as_chunks::<LANES>().0[half];
        // SAFETY: eight bytes.
        let scales = unsafe { _mm_loadl_epi64(scales.as_ptr().cast()) };
        let scales = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(scales));
        _mm256_mul_ps(halves_of(&self.factors, half, true, true), scales)
    }
}
