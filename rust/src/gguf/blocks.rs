//! Blocks of a tensor → values: gguf-py's float32 operations in its order, so that the bits are those it gives (`quants.py`).
//!
//! A block is read alone; which blocks a row has and on which thread they are read is the caller's business.

use half::f16;

use super::Type;
use crate::kernels::KBlock;

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
                    *out = d.to_f32() * (f32::from(q) - 128.0);
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
        Type::Q4K | Type::Q5K | Type::Q6K => {
            if let Some(block) = k_block(kind, block) {
                let part = if kind == Type::Q6K { 16 } else { 32 };
                let (d, dmin) = (block.d.to_f32(), block.dmin.to_f32());
                for (index, (out, q)) in
                    out.chunks_exact_mut(part).zip(block.integers.chunks_exact(part)).enumerate()
                {
                    let scale = block.scales[index];
                    for (out, &q) in out.iter_mut().zip(q) {
                        *out = if kind == Type::Q6K {
                            d * f32::from(scale.cast_signed()) * f32::from(signed(q, 32))
                        } else {
                            d * f32::from(scale) * f32::from(q)
                                - dmin * f32::from(block.scales[8 + index])
                        };
                    }
                }
            }
        }
    }
}

/// Factor of a block, and integers plus 128, whose products are its values; `None` for other types and for four bits.
pub(crate) fn integers(kind: Type, block: &[u8]) -> Option<(f16, [u8; 32])> {
    let mut out = [0; 32];
    match kind {
        Type::Q8_0 => {
            for (out, &q) in out.iter_mut().zip(&block[2..]) {
                *out = q ^ 128;
            }
        }
        Type::Q5_0 => {
            let fifth = u32::from(pair(block, 2)) | u32::from(pair(block, 4)) << 16;
            for (i, out) in out.iter_mut().enumerate() {
                let q = block[6 + i % 16] >> (4 * (i / 16)) & 15;
                *out = (q | ((fifth >> i & 1) as u8) << 4) + 112;
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

/// A block of a K type, not yet multiplied; `None` for other types.
pub(crate) fn k_block(kind: Type, block: &[u8]) -> Option<KBlock> {
    let mut integers = [0; MOST];
    let groups = integers.chunks_exact_mut(32).enumerate();
    match kind {
        Type::Q4K | Type::Q5K => {
            let (head, rest) = block.split_at(16);
            let (fifth, quants) = rest.split_at(if kind == Type::Q5K { 32 } else { 0 });
            for (group, out) in groups {
                let low = &quants[group / 2 * 32..];
                for (i, out) in out.iter_mut().enumerate() {
                    let high = fifth.get(i).map_or(0, |bits| bits >> group & 1);
                    *out = low[i] >> (4 * (group % 2)) & 15 | high << 4;
                }
            }
            let d = |at| f16::from_bits(pair(head, at));
            Some(KBlock { d: d(0), dmin: d(2), scales: scales(&head[4..]), integers })
        }
        Type::Q6K => {
            let (low, rest) = block.split_at(128);
            let (high, rest) = rest.split_at(64);
            for (group, out) in groups {
                // Halves of 128 values; in each, low bits of 64 in a nibble, high bits of 32 in a pair of bits.
                let (side, part) = (group / 4, group % 4);
                let low = &low[64 * side + 32 * (part % 2)..];
                let high = &high[32 * side..];
                for (i, out) in out.iter_mut().enumerate() {
                    *out = low[i] >> (4 * (part / 2)) & 15 | (high[i] >> (2 * part) & 3) << 4;
                }
            }
            let scales = *rest.first_chunk()?;
            Some(KBlock { d: f16::from_bits(pair(rest, 16)), dmin: f16::ZERO, scales, integers })
        }
        _ => None,
    }
}

/// Eight factors and eight minima of six bits, of twelve bytes of a `Q4_K` or `Q5_K` block. The first four of each stand in the low
/// bits of bytes 0 to 7; of the others bytes 8 to 11 have the low halves and the top bits of bytes 0 to 7 the rest.
fn scales(packed: &[u8]) -> [u8; 16] {
    std::array::from_fn(|index| {
        let (group, is_minimum) = (index % 8, index / 8);
        if group < 4 {
            return packed[group + 4 * is_minimum] & 63;
        }
        packed[group + 4] >> (4 * is_minimum) & 15 | packed[group - 4 + 4 * is_minimum] >> 2 & 0x30
    })
}
