//! Where a model's description stands: in JSON files of a folder, or in the metadata of a GGUF file.

use std::path::PathBuf;

use serde_json::{Map, Value};

use super::{Config, schemes_of};
use crate::{
    checkpoint::Place,
    error::{Error, Result},
    gguf::{self, Gguf},
    json::{Keys, read_object},
};

/// The description of one folder or GGUF model.
pub(super) struct Documents<'a> {
    /// The file that errors blame.
    file: PathBuf,
    config: Map<String, Value>,
    generation: Option<(PathBuf, Map<String, Value>)>,
    /// Where the rest is made of its metadata.
    gguf: Option<&'a Gguf>,
}

impl<'a> Documents<'a> {
    /// What `place` has; `None` for a folder that has only weights.
    ///
    /// # Errors
    /// `Io`, `Format`; for a GGUF model what is wrong with its metadata.
    pub(super) fn of(place: &'a Place) -> Result<Option<Self>> {
        if let Some(gguf) = &place.gguf {
            let (config, generation) = gguf::config(gguf)?;
            let file = gguf.files[0].path.clone();
            let generation = Some((file.clone(), generation));
            return Ok(Some(Self { file, config, generation, gguf: Some(gguf) }));
        }
        let path = &place.path;
        let file = path.join("config.json");
        if file.is_file() {
            let config = read_object(&file)?;
            let other = path.join("generation_config.json");
            let generation =
                if other.is_file() { Some((other.clone(), read_object(&other)?)) } else { None };
            return Ok(Some(Self { file, config, generation, gguf: None }));
        }
        Ok(None)
    }

    pub(super) fn root(&self) -> Keys<'_> {
        Keys::new(&self.file, &self.config)
    }

    /// Whether weights are stored in few bits.
    ///
    /// # Errors
    /// As those of `quantization_config`.
    pub(super) fn is_quantized(&self) -> Result<bool> {
        Ok(match self.gguf {
            Some(gguf) => gguf.is_quantized(),
            None => !schemes_of(&self.root())?.is_empty(),
        })
    }

    /// # Errors
    /// `Config` naming the key, `Unsupported` naming the feature.
    pub(super) fn config(&self) -> Result<Config> {
        let generation = self.generation.as_ref().map(|(file, json)| (&**file, json));
        let config = Config::from_json(&self.file, &self.config, generation);
        let mut config = config.map_err(|error| self.in_its_words(error))?;
        config.is_quantized = self.is_quantized()?;
        Ok(config)
    }

    /// An error about a key of a GGUF file has the file's name for it.
    fn in_its_words(&self, error: Error) -> Error {
        match (self.gguf, error) {
            (Some(gguf), Error::Config { file, key, reason }) => {
                let key = gguf::key_of(gguf.metadata(), &key);
                Error::Config { file, key, reason }
            }
            (_, error) => error,
        }
    }
}
