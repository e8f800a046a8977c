//! Blocks of a tensor → values: gguf-py's float32 operations in its order, so that the bits are those it gives (`quants.py`).
//!
//! A block is read alone; which blocks a row has and on which thread they are read is the caller's business.

use half::f16;

use super::Type;

/// Values of the largest block.
pub(crate) const MOST: usize = 256;

/// The values of one block, as many as its type has, into `out`.
pub(crate) fn dequantize(kind: Type, block: &[u8], out: &mut [f32]) {
    match kind {
        Type::F32 => {
            if let Some(&bytes) = block.first_chunk() {
                out[0] = f32::from_le_bytes(bytes);
            }
        }
        Type::F16 => out[0] = half(block, 0),
        Type::Bf16 => out[0] = f32::from_bits(u32::from(pair(block, 0)) << 16),
        Type::Q8_0 | Type::Q5_0 => {
            if let Some((d, integers)) = integers(kind, block) {
                for (out, q) in out.iter_mut().zip(integers) {
                    *out = d.to_f32() * f32::from(q);
                }
            }
        }
        Type::Q4_0 => {
            let d = half(block, 0);
            let (low, high) = out.split_at_mut(16);
            for ((low, high), &byte) in low.iter_mut().zip(high).zip(&block[2..18]) {
                *low = d * f32::from(signed(byte & 15, 8));
                *high = d * f32::from(signed(byte >> 4, 8));
            }
        }
        Type::Q4K => {
            let (head, quants) = block.split_at(16);
            for (group, out) in out.chunks_exact_mut(32).enumerate() {
                let (d, m) = factors(head, group);
                let shift = 4 * (group % 2);
                for (out, &byte) in out.iter_mut().zip(&quants[group / 2 * 32..]) {
                    *out = d * f32::from(byte >> shift & 15) - m;
                }
            }
        }
        Type::Q5K => {
            let (head, quants) = block.split_at(16);
            let (fifth, quants) = quants.split_at(32);
            for (group, out) in out.chunks_exact_mut(32).enumerate() {
                let (d, m) = factors(head, group);
                let shift = 4 * (group % 2);
                for ((out, &byte), &high) in
                    out.iter_mut().zip(&quants[group / 2 * 32..]).zip(fifth)
                {
                    let q = byte >> shift & 15 | (high >> group & 1) << 4;
                    *out = d * f32::from(q) - m;
                }
            }
        }
        Type::Q6K => {
            let (low, rest) = block.split_at(128);
            let (high, rest) = rest.split_at(64);
            let d = half(rest, 16);
            for (group, out) in out.chunks_exact_mut(32).enumerate() {
                // Halves of 128 values; in each, low bits of 64 in a nibble, high bits of 32 in a pair of bits.
                let (side, part) = (group / 4, group % 4);
                let low = &low[64 * side + 32 * (part % 2)..];
                let high = &high[32 * side..];
                for (i, out) in out.iter_mut().enumerate() {
                    let scale = d * f32::from(rest[2 * group + i / 16].cast_signed());
                    let q = low[i] >> (4 * (part / 2)) & 15 | (high[i] >> (2 * part) & 3) << 4;
                    *out = scale * f32::from(signed(q, 32));
                }
            }
        }
    }
}

/// Factor and integers of a block whose values are their products; `None` for other types and for four bits.
pub(crate) fn integers(kind: Type, block: &[u8]) -> Option<(f16, [i8; 32])> {
    let mut out = [0; 32];
    match kind {
        Type::Q8_0 => {
            for (out, &q) in out.iter_mut().zip(&block[2..]) {
                *out = q.cast_signed();
            }
        }
        Type::Q5_0 => {
            let fifth = u32::from(pair(block, 2)) | u32::from(pair(block, 4)) << 16;
            for (i, out) in out.iter_mut().enumerate() {
                let q = block[6 + i % 16] >> (4 * (i / 16)) & 15;
                *out = signed(q | ((fifth >> i & 1) as u8) << 4, 16);
            }
        }
        _ => return None,
    }
    Some((f16::from_bits(pair(block, 0)), out))
}

/// `value` with its zero at `zero`.
const fn signed(value: u8, zero: i8) -> i8 {
    value.cast_signed() - zero
}

fn pair(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn half(bytes: &[u8], at: usize) -> f32 {
    f16::from_bits(pair(bytes, at)).to_f32()
}

/// Factor and minimum of a group of 32 of a `Q4_K` or `Q5_K` block: two float16, then twelve bytes with eight factors and
/// eight minima of six bits. The first four of each stand in the low bits of bytes 0 to 7; of the others bytes 8 to 11 have the
/// low halves and the top bits of bytes 0 to 7 the rest.
fn factors(head: &[u8], group: usize) -> (f32, f32) {
    let packed = &head[4..16];
    let (d, m) = if group < 4 {
        (packed[group] & 63, packed[group + 4] & 63)
    } else {
        let both = packed[group + 4];
        (both & 15 | packed[group - 4] >> 2 & 0x30, both >> 4 | packed[group] >> 2 & 0x30)
    };
    (half(head, 0) * f32::from(d), half(head, 2) * f32::from(m))
}
