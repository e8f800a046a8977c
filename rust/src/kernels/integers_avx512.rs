//! Integer weights with AVX-512 VNNI: one instruction multiplies 64 bytes by 64 and adds them in fours to 16 sums.
//!
//! It takes bytes without a sign and bytes with one, so that a weight is stored from zero on and a token comes in two bytes a value
//! ([`Fixed`]); all is exact until a group's sum meets its factors. Two instructions for 64 weights is what bfloat16 would take as
//! well, but there the integers would have to be made bfloat16 first, and on Intel's cores `vdpbf16ps` is four times as slow
//! (docs/log.md).
#![expect(unsafe_code, reason = "instructions that not every machine has")]

use std::arch::x86_64::{
    __m512, __m512i, _mm_load_si128, _mm512_add_epi32, _mm512_and_si512, _mm512_castsi512_ps,
    _mm512_cvtepi8_epi32, _mm512_cvtepi32_epi16, _mm512_cvtepi32_ps, _mm512_cvtepu8_epi32,
    _mm512_cvtph_ps, _mm512_dpbusd_epi32, _mm512_fmadd_ps, _mm512_fnmadd_ps, _mm512_load_si512,
    _mm512_mul_ps, _mm512_or_si512, _mm512_rorv_epi32, _mm512_set1_epi8, _mm512_set1_epi32,
    _mm512_set1_ps, _mm512_setzero_ps, _mm512_setzero_si512, _mm512_slli_epi32, _mm512_sllv_epi32,
    _mm512_srli_epi32, _mm512_storeu_ps, _mm512_sub_epi32,
};

use super::{
    fixed::{self, Fixed},
    integers::Record,
    k,
    matrix::{ROWS, Sums},
    prefetch::{AHEAD, prefetch},
    w4, w8,
};

/// Most tokens at once: two sums of integers and one of products for each are 24 of the 32 registers.
const TOKENS: usize = 8;

/// A record's parts as vectors.
pub(super) trait Vectors: Record {
    /// As [`Record::bytes`].
    ///
    /// # Safety
    /// The machine has the instructions; there are four times as many columns.
    unsafe fn bytes_vector(&self, four: usize) -> __m512i;

    /// As [`Record::factor`], of each row.
    ///
    /// # Safety
    /// The machine has the instructions.
    unsafe fn factors_vector(&self, part: usize, is_half: bool) -> __m512;

    /// As [`Record::minimum`], of each row.
    ///
    /// # Safety
    /// As above.
    unsafe fn minima_vector(&self, _part: usize) -> __m512 {
        // SAFETY: as the caller says.
        unsafe { _mm512_setzero_ps() }
    }
}

/// Records of several blocks of rows, `count` each, × at most eight tokens `x` → `sums` `[blocks][tokens]`. What is added to a sum
/// in which order is the same for any number of either.
pub(super) fn blocks<R: Vectors>(
    (records, is_half): (&[R], bool),
    count: usize,
    x: &[Fixed],
    sums: &mut [Sums],
) {
    let groups = count * R::COLUMNS / fixed::GROUP;
    let tokens = x.len() / groups;
    assert!(x.len() == tokens * groups && tokens <= TOKENS);
    assert!(records.len() * tokens == sums.len() * count);
    let run = match tokens {
        0 => return,
        1 => block::<R, 1>,
        2 => block::<R, 2>,
        3 => block::<R, 3>,
        4 => block::<R, 4>,
        5 => block::<R, 5>,
        6 => block::<R, 6>,
        7 => block::<R, 7>,
        _ => block::<R, 8>,
    };
    for (records, sums) in records.chunks_exact(count).zip(sums.chunks_exact_mut(tokens)) {
        // SAFETY: `InstructionSet::available` has seen that the machine has them, and the lengths fit each other.
        unsafe { run((records, is_half), x, sums) };
    }
}

/// # Safety
/// The machine has the instructions, and there are `T` tokens of the records' columns and as many sums.
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
unsafe fn block<R: Vectors, const T: usize>(
    (records, is_half): (&[R], bool),
    x: &[Fixed],
    sums: &mut [Sums],
) {
    let groups = records.len() * R::COLUMNS / fixed::GROUP;
    debug_assert!(x.len() == T * groups && sums.len() == T);
    let zero = _mm512_set1_epi32(R::ZERO.trailing_zeros() as i32);
    let mut totals = [_mm512_setzero_ps(); T];
    for (index, record) in records.iter().enumerate() {
        if T == 1 {
            let ahead = std::ptr::from_ref(record).wrapping_byte_add(AHEAD);
            for line in 0..size_of::<R>() / 64 {
                prefetch(ahead.wrapping_byte_add(64 * line).cast());
            }
        }
        for part in 0..R::COLUMNS / R::SHARING {
            let group = index * (R::COLUMNS / fixed::GROUP) + part * R::SHARING / fixed::GROUP;
            let half = part * R::SHARING % fixed::GROUP / R::SHARING;
            let (mut high, mut low) = ([_mm512_setzero_si512(); T], [_mm512_setzero_si512(); T]);
            for four in 0..R::SHARING / 4 {
                // SAFETY: the machine has the instructions, and the record the columns.
                let bytes = unsafe { record.bytes_vector(part * R::SHARING / 4 + four) };
                let four = half * R::SHARING / 4 + four;
                for token in 0..T {
                    // SAFETY: the token has the group.
                    let x = unsafe { x.get_unchecked(token * groups + group) };
                    high[token] = _mm512_dpbusd_epi32(high[token], bytes, each(x.words[0][four]));
                    low[token] = _mm512_dpbusd_epi32(low[token], bytes, each(x.words[1][four]));
                }
            }
            // SAFETY: the machine has the instructions.
            let factors = unsafe { record.factors_vector(part, is_half) };
            for token in 0..T {
                // SAFETY: the token has the group.
                let x = unsafe { x.get_unchecked(token * groups + group) };
                let factor = _mm512_set1_ps(x.factor);
                let sum = if R::SHARING == fixed::GROUP { x.sum } else { x.halves[half] };
                let sum = _mm512_set1_epi32(sum);
                let mut product = _mm512_add_epi32(_mm512_slli_epi32::<8>(high[token]), low[token]);
                if R::ZERO != 0 {
                    product = _mm512_sub_epi32(product, _mm512_sllv_epi32(sum, zero));
                }
                let product = _mm512_mul_ps(_mm512_cvtepi32_ps(product), factor);
                totals[token] = _mm512_fmadd_ps(product, factors, totals[token]);
                if R::HAS_MINIMA {
                    let sum = _mm512_mul_ps(_mm512_cvtepi32_ps(sum), factor);
                    // SAFETY: the machine has the instructions.
                    let minima = unsafe { record.minima_vector(part) };
                    totals[token] = _mm512_fnmadd_ps(minima, sum, totals[token]);
                }
            }
        }
    }
    for (sums, total) in sums.iter_mut().zip(totals) {
        // SAFETY: 64 bytes.
        unsafe { _mm512_storeu_ps(sums.as_mut_ptr(), total) };
    }
}

/// Four bytes in every lane.
#[target_feature(enable = "avx512f")]
fn each(four: u32) -> __m512i {
    _mm512_set1_epi32(four.cast_signed())
}

#[target_feature(enable = "avx512f")]
fn load(words: &[u32; ROWS]) -> __m512i {
    // SAFETY: 64 bytes, at a multiple of 64 in every record.
    unsafe { _mm512_load_si512(words.as_ptr().cast()) }
}

/// The bits `mask` has of each byte of `words`, once these are turned to the right by `by`.
#[target_feature(enable = "avx512f,avx512bw")]
fn turned(words: &[u32; ROWS], by: usize, mask: i8) -> __m512i {
    let turned = _mm512_rorv_epi32(load(words), _mm512_set1_epi32(by as i32));
    _mm512_and_si512(turned, _mm512_set1_epi8(mask))
}

/// As [`super::integers::half_of`].
#[target_feature(enable = "avx512f")]
fn halves_of(pairs: &[u32; ROWS], is_high: bool, is_half: bool) -> __m512 {
    let pairs = load(pairs);
    match (is_half, is_high) {
        (true, false) => _mm512_cvtph_ps(_mm512_cvtepi32_epi16(pairs)),
        (true, true) => _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(pairs))),
        (false, false) => _mm512_castsi512_ps(_mm512_slli_epi32::<16>(pairs)),
        (false, true) => _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(-65536))),
    }
}

impl Vectors for w4::Record {
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn bytes_vector(&self, four: usize) -> __m512i {
        turned(&self.words[four / 2], 4 * (four % 2), 15)
    }

    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn factors_vector(&self, part: usize, is_half: bool) -> __m512 {
        halves_of(&self.factors, part == 1, is_half)
    }
}

impl Vectors for w8::Record {
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn bytes_vector(&self, four: usize) -> __m512i {
        load(&self.words[four])
    }

    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn factors_vector(&self, part: usize, is_half: bool) -> __m512 {
        halves_of(&self.factors, part == 1, is_half)
    }
}

impl<const HIGH: usize> Vectors for k::Record<HIGH> {
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn bytes_vector(&self, four: usize) -> __m512i {
        let low = turned(&self.low[four / 2], 4 * (four % 2), 15);
        let high = match HIGH {
            k::ONE_BIT => turned(&self.high[four / 8], (four % 8 + 28) % 32, 16),
            k::TWO_BITS => turned(&self.high[four / 4], (2 * (four % 4) + 28) % 32, 48),
            _ => return low,
        };
        _mm512_or_si512(low, high)
    }

    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn factors_vector(&self, part: usize, _is_half: bool) -> __m512 {
        // SAFETY: 16 bytes, at a multiple of 16.
        let scales = unsafe { _mm_load_si128(self.scales[part].as_ptr().cast()) };
        let scales = if HIGH == k::TWO_BITS {
            _mm512_cvtepi8_epi32(scales)
        } else {
            _mm512_cvtepu8_epi32(scales)
        };
        _mm512_mul_ps(halves_of(&self.factors, false, true), _mm512_cvtepi32_ps(scales))
    }

    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn minima_vector(&self, part: usize) -> __m512 {
        // SAFETY: 16 bytes, at a multiple of 16.
        let scales = unsafe { _mm_load_si128(self.scales[part + k::MINIMA].as_ptr().cast()) };
        let scales = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(scales));
        _mm512_mul_ps(halves_of(&self.factors, true, true), scales)
    }
}
