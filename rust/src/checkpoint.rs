//! Where a checkpoint lies: folders in Hugging Face's format and GGUF models, which are opened here, once, for all who read them.
//!
//! Which of the two a path is, is decided here. What a config or a tensor means is for `config` and `weights` to say.

use std::path::PathBuf;

use crate::{
    error::Result,
    gguf::{Gguf, files_of},
};

/// One folder or GGUF model of a checkpoint.
pub(crate) struct Place {
    /// As the caller named it.
    pub(crate) path: PathBuf,
    /// `None` for a folder of the other format. A header is checked whole, which a vocabulary makes long.
    pub(crate) gguf: Option<Gguf>,
}

impl Place {
    /// All of `paths`, in their order.
    ///
    /// # Errors
    /// `Io`; what is wrong with a GGUF model's header.
    pub(crate) fn open_all(paths: &[PathBuf]) -> Result<Vec<Self>> {
        let open = |path: &PathBuf| {
            let gguf = files_of(path)?.map(|files| Gguf::open(&files)).transpose()?;
            Ok(Self { path: path.clone(), gguf })
        };
        paths.iter().map(open).collect()
    }

    /// The paths, for an error's text.
    pub(crate) fn names(places: &[Self]) -> String {
        places.iter().map(|place| place.path.display().to_string()).collect::<Vec<_>>().join(", ")
    }
}
