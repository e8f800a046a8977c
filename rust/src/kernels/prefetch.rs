//! Reading ahead of a stream of weights.
#![expect(unsafe_code, reason = "an instruction that not every machine has")]

use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};

/// How far ahead of a single token's product memory is asked for: the processor's own prefetching ends at every page of 4 KiB, huge
/// or not.
pub(super) const AHEAD: usize = 8192;

/// Asks for the 64 bytes around an address, which may lie beyond what there is.
///
/// Into all caches: past them (`NTA`) is as fast on Zen 5, but on a Xeon half as fast as not to ask at all (docs/log.md).
pub(super) fn prefetch(at: *const i8) {
    // SAFETY: a hint, which reads nothing where there is nothing.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(at) };
}
