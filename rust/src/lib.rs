//! Gemma 4 in Rust over PyTorch's dispatcher.
//!
//! The crate owns the forward pass, the cache and the decode loop; PyTorch owns tensors, kernels and
//! devices. Data goes one way: `bindings` → `engine` → `step` → `model` → `cache` → `aten` → the shim.
//! `rust/PYO3.md` lists what crosses to Python.
#![cfg_attr(
    not(feature = "python"),
    expect(
        dead_code,
        reason = "the bindings are the crate's one caller; unit tests run without them"
    )
)]

mod aten;
#[cfg(feature = "python")]
mod bindings;
mod cache;
mod captured;
mod checkpoint;
mod compiled;
mod config;
mod engine;
mod error;
mod fast;
mod gguf;
mod json;
mod kernels;
mod model;
mod sampler;
mod step;
mod weights;

#[cfg(feature = "python")]
pub use bindings::_native;

/// Read from the file by `torchtpu_rs/__init__.py` before the module is loaded.
#[used]
static BUILD_MARK: &str =
    concat!("torchtpu_rs built against torch=", env!("TORCHTPU_BUILD_TORCH"), ";");
