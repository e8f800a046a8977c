//! Everything that can go wrong, one variant for each rule that can break.
//!
//! Texts are lower-case phrases without a full stop: what was expected, what was found. Which Python
//! class each becomes is `bindings`'s business.

use std::path::PathBuf;

/// `std::result::Result` with this crate's error.
pub(crate) type Result<T> = std::result::Result<T, Error>;

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// ATen threw; the engine's caches may hold half a step, which the next call overwrites.
    #[error("{op}: {message}")]
    Aten {
        /// The ATen operation.
        op: &'static str,
        /// ATen's own text.
        message: String,
    },
    /// A file or folder cannot be read.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// A file of the checkpoint is not what its format asks for.
    #[error("{}: {reason}", file.display())]
    Format {
        /// The file.
        file: PathBuf,
        /// What was expected and found.
        reason: String,
    },
    /// A key of config.json is missing or cannot be.
    #[error("{}: `{key}`: {reason}", file.display())]
    Config {
        /// The config file.
        file: PathBuf,
        /// The key, dotted from the top of the file.
        key: String,
        /// What was expected and found.
        reason: String,
    },
    /// A tensor the model needs is in no file.
    #[error("tensor `{name}` is missing: it is in none of {folders}")]
    MissingTensor {
        /// The tensor's name in a text-only checkpoint.
        name: String,
        /// The folders that were searched.
        folders: String,
    },
    /// A tensor is there but not as config.json says.
    #[error("{}: tensor `{name}`: {reason}", file.display())]
    Tensor {
        /// The file that holds it.
        file: PathBuf,
        /// Its name in that file.
        name: String,
        /// What was expected and found.
        reason: String,
    },
    /// The checkpoint asks for something this version does not do.
    #[error("{}: {what} is not supported by this version", file.display())]
    Unsupported {
        /// The file that asks for it.
        file: PathBuf,
        /// The feature.
        what: String,
    },
    /// An argument of a call breaks its rule.
    #[error("{0}")]
    Input(String),
    /// The tokens do not fit the cache.
    #[error("the prompt has {tokens} tokens, but the cache holds {context} (`context`)")]
    ContextFull {
        /// Tokens asked for.
        tokens: usize,
        /// Positions a slot of the cache holds.
        context: usize,
    },
    /// A promise inside the crate was broken; a bug, never a caller's fault.
    #[error("internal error, please report it: {0}")]
    Internal(String),
}
