//! What a CPU computes fast mode's steps with: products, attention, norms, each for several instruction sets.
//!
//! Kernels take and give plain slices, and check their lengths at the door. The instruction set is chosen once at run
//! time. All of them multiply bfloat16 values exactly and add up in float32, in an order that is each one's own and
//! that depends on neither the number of tokens nor of threads; where weights are integers, tokens are taken in fixed point and
//! a group's sum is exact.

mod attention;
#[cfg(target_arch = "x86_64")]
mod attention_avx512;
mod attention_lanes;
mod bf16;
#[cfg(target_arch = "x86_64")]
mod bf16_avx512;
#[cfg(target_arch = "x86_64")]
mod bf16_fma_avx512;
mod fixed;
mod input;
mod integers;
#[cfg(target_arch = "x86_64")]
mod integers_avx2;
#[cfg(target_arch = "x86_64")]
mod integers_avx512;
mod k;
mod matrix;
mod memory;
#[cfg(target_arch = "x86_64")]
mod pairs_avx512;
mod pool;
#[cfg(target_arch = "x86_64")]
mod prefetch;
mod rows;
mod vector;
mod w4;
mod w8;

pub(crate) use attention::{KeyValues, attend};
pub(crate) use bf16::{Bf16Matrix, Values};
pub(crate) use k::{KBlock, Q4KMatrix, Q5KMatrix, Q6KMatrix};
pub(crate) use matrix::{Matrix, MatrixForm, Product, best, gated, multiply};
pub(crate) use memory::Huge;
pub(crate) use pool::Pool;
pub(crate) use rows::each_row;
pub(crate) use vector::{
    add_normed, gelu_times, narrow, norm, norm_and_rotate, norm_in_place, scale_add,
};
pub(crate) use w4::{GROUP_SIZE, W4Matrix};
pub(crate) use w8::W8Matrix;

use crate::error::{Error, Result};
use fixed::Form;

/// With what kernels run: the machine's instructions, and its threads.
pub(crate) struct Kernels {
    pub(crate) set: InstructionSet,
    pub(crate) pool: Pool,
}

impl Kernels {
    /// `set`, or the fastest instructions there are, on `threads` threads.
    ///
    /// # Errors
    /// `Input` when this machine lacks `set`.
    pub(crate) fn new(threads: usize, set: Option<InstructionSet>) -> Result<Self> {
        let available = InstructionSet::available();
        let set = match set {
            None => available.last().copied().unwrap_or(InstructionSet::Portable),
            Some(set) if available.contains(&set) => set,
            Some(set) => {
                let names: Vec<_> = available.iter().map(|set| set.name()).collect();
                return Err(Error::Input(format!(
                    "expected instructions that this machine has ({}), found {}",
                    names.join(", "),
                    set.name()
                )));
            }
        };
        Ok(Self { set, pool: Pool::new(threads) })
    }
}

/// Sets of instructions that a kernel is written for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum InstructionSet {
    /// Whatever the compiler makes of plain Rust.
    Portable,
    /// AVX2, FMA and F16C.
    Avx2,
    /// AVX2, FMA and F16C, and AVX-512 F, BW, DQ and VL.
    Avx512,
    /// These, and AVX-512 VNNI, for integers.
    Avx512Vnni,
    /// These, and AVX-512 BF16.
    Avx512Bf16,
}

impl InstructionSet {
    /// All of them, the slowest first.
    pub(crate) const ALL: [Self; 5] =
        [Self::Portable, Self::Avx2, Self::Avx512, Self::Avx512Vnni, Self::Avx512Bf16];

    /// As `Engine(instructions=…)` has it.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Portable => "portable",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
            Self::Avx512Vnni => "avx512_vnni",
            Self::Avx512Bf16 => "avx512_bf16",
        }
    }

    /// Whether it has registers of 512 bits.
    pub(crate) const fn is_avx512(self) -> bool {
        matches!(self, Self::Avx512 | Self::Avx512Vnni | Self::Avx512Bf16)
    }

    /// As what integers its products take tokens in where weights are integers; `None`: as float32.
    const fn multiplies(self) -> Option<Form> {
        match self {
            Self::Portable => None,
            Self::Avx2 | Self::Avx512 => Some(Form::Pairs),
            Self::Avx512Vnni | Self::Avx512Bf16 => Some(Form::Bytes),
        }
    }

    /// Whether it has products of bfloat16.
    pub(crate) const fn multiplies_bfloats(self) -> bool {
        matches!(self, Self::Avx512Bf16)
    }

    /// Those of this machine, the slowest first.
    pub(crate) fn available() -> Vec<Self> {
        Self::ALL.into_iter().filter(|set| set.is_available()).collect()
    }

    #[cfg(target_arch = "x86_64")]
    fn is_available(self) -> bool {
        match self {
            Self::Portable => true,
            Self::Avx2 => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c")
            }
            Self::Avx512 => {
                Self::Avx2.is_available()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
            }
            Self::Avx512Vnni => {
                Self::Avx512.is_available() && is_x86_feature_detected!("avx512vnni")
            }
            Self::Avx512Bf16 => {
                Self::Avx512Vnni.is_available() && is_x86_feature_detected!("avx512bf16")
            }
        }
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn is_available(self) -> bool {
        self == Self::Portable
    }
}

/// Writes a function `name(set, …)` that runs `inner::<FUSED>(…)`, plain Rust marked `#[inline(always)]`, compiled anew for
/// each instruction set. `FUSED` says that a multiplication and an addition are one instruction.
macro_rules! for_each_set {
    ($(#[$doc:meta])* $vis:vis fn $name:ident $(<$of:ident: $bound:path>)? ($($arg:ident: $type:ty),* $(,)?) $(-> $out:ty)? = $inner:ident) => {
        $(#[$doc])*
        #[cfg_attr(target_arch = "x86_64", expect(unsafe_code, reason = "instructions that not every machine has"))]
        $vis fn $name $(<$of: $bound>)? (set: $crate::kernels::InstructionSet, $($arg: $type),*) $(-> $out)? {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            fn avx2 $(<$of: $bound>)? ($($arg: $type),*) $(-> $out)? {
                $inner::<$($of,)? true>($($arg),*)
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,fma")]
            fn avx512 $(<$of: $bound>)? ($($arg: $type),*) $(-> $out)? {
                $inner::<$($of,)? true>($($arg),*)
            }
            match set {
                $crate::kernels::InstructionSet::Portable => $inner::<$($of,)? false>($($arg),*),
                #[cfg(target_arch = "x86_64")]
                // SAFETY: `InstructionSet::available` has seen that the machine has them.
                $crate::kernels::InstructionSet::Avx2 => unsafe { avx2 $(::<$of>)? ($($arg),*) },
                #[cfg(target_arch = "x86_64")]
                // SAFETY: as above.
                _ => unsafe { avx512 $(::<$of>)? ($($arg),*) },
                #[cfg(not(target_arch = "x86_64"))]
                _ => $inner::<$($of,)? false>($($arg),*),
            }
        }
    };
}
use for_each_set;

/// `a · b + c`; without the instruction, a call of `mul_add` would be some fifty times as slow.
#[expect(clippy::inline_always, reason = "compiled anew for the instructions of each caller")]
#[inline(always)]
fn multiply_add<const FUSED: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FUSED { a.mul_add(b, c) } else { a * b + c }
}

/// `Internal` unless `found` is what a kernel wants.
fn check_len(what: &str, found: usize, wanted: usize) -> Result<()> {
    if found == wanted {
        return Ok(());
    }
    Err(Error::Internal(format!("expected {wanted} values for {what}, found {found}")))
}
