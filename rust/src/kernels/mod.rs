//! What ATen has no fast operation for on a CPU: products with four-bit weights.
//!
//! Kernels take and give plain slices. Each exists for several instruction sets, chosen once at run time; all of them
//! multiply exactly and add up in float32, in an order that is each one's own.

mod pool;
mod w4;

pub(crate) use pool::Pool;
pub(crate) use w4::{GROUP_SIZE, W4Matrix};

/// With what kernels run: the machine's instructions, and its threads.
pub(crate) struct Kernels {
    pub(crate) set: InstructionSet,
    pub(crate) pool: Pool,
}

impl Kernels {
    /// The fastest instructions there are, on `threads` threads.
    pub(crate) fn new(threads: usize) -> Self {
        Self { set: InstructionSet::best(), pool: Pool::new(threads) }
    }
}

/// Sets of instructions that a kernel is written for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum InstructionSet {
    /// Whatever the compiler makes of plain Rust.
    Portable,
    /// AVX2 and FMA.
    Avx2,
    /// AVX-512 F and BW.
    Avx512,
    /// These, and AVX-512 BF16.
    Avx512Bf16,
}

impl InstructionSet {
    /// Those of this machine, the slowest first.
    pub(crate) fn available() -> Vec<Self> {
        let mut sets = vec![Self::Portable];
        #[cfg(target_arch = "x86_64")]
        {
            if std::arch::is_x86_feature_detected!("avx2")
                && std::arch::is_x86_feature_detected!("fma")
            {
                sets.push(Self::Avx2);
            }
            if std::arch::is_x86_feature_detected!("avx512f")
                && std::arch::is_x86_feature_detected!("avx512bw")
            {
                sets.push(Self::Avx512);
                if std::arch::is_x86_feature_detected!("avx512bf16") {
                    sets.push(Self::Avx512Bf16);
                }
            }
        }
        sets
    }

    /// The fastest of this machine.
    pub(crate) fn best() -> Self {
        Self::available().pop().unwrap_or(Self::Portable)
    }
}
