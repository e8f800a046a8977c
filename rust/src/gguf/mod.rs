//! GGUF, llama.cpp's format: one file, or several of one set, with metadata and tensors.
//!
//! Files are mapped, and checked before anything is made of them. What their keys and names mean in Hugging Face's words
//! is said here; which of them a model needs is `config`'s and `weights`' business.

mod blocks;
mod config;
mod cursor;
mod files;
mod metadata;
mod names;
mod tensors;
mod types;

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::Arc,
};

pub(crate) use blocks::{MOST, dequantize, integers, k_block};
pub(crate) use config::{config, key_of};
use cursor::Cursor;
pub(crate) use files::files_of;
#[cfg(feature = "python")]
pub(crate) use files::is_gguf;
pub(crate) use metadata::{Metadata, Value};
pub(crate) use names::{ROPE_FREQS, hugging_face_name};
pub(crate) use tensors::TensorInfo;
pub(crate) use types::Type;

use crate::{
    aten::MappedFile,
    error::{Error, Result},
};

const MAGIC: [u8; 4] = *b"GGUF";

/// Bytes to whose multiples tensors are aligned, unless `general.alignment` says otherwise.
const ALIGNMENT: u64 = 32;

/// Largest alignment; a page of memory is 4 KiB.
const MAX_ALIGNMENT: u64 = 1 << 16;

/// One file.
pub(crate) struct File {
    pub(crate) path: PathBuf,
    pub(crate) map: Arc<MappedFile>,
    pub(crate) metadata: Metadata,
    pub(crate) tensors: Vec<TensorInfo>,
}

/// A model: the files of a set in order. The first has the metadata.
pub(crate) struct Gguf {
    pub(crate) files: Vec<File>,
}

impl Gguf {
    /// Opens all `paths` of a set, as [`files_of`] finds them.
    ///
    /// # Errors
    /// `Io`; `Format`, `Config` or `Tensor` naming what is wrong; `Unsupported` for a type that is not read.
    pub(crate) fn open(paths: &[PathBuf]) -> Result<Self> {
        let files = paths.iter().map(|path| File::open(path)).collect::<Result<Vec<_>>>()?;
        let mut seen = BTreeMap::new();
        for file in &files {
            for tensor in &file.tensors {
                if let Some(other) = seen.insert(&*tensor.name, file) {
                    return Err(Error::Tensor {
                        file: file.path.clone(),
                        name: tensor.name.clone(),
                        reason: format!("it is in {} too", other.path.display()),
                    });
                }
            }
        }
        let count = seen.len() as u64;
        let set = Self { files };
        set.check_split(count)?;
        Ok(set)
    }

    /// The metadata of the model.
    pub(crate) fn metadata(&self) -> &Metadata {
        &self.files[0].metadata
    }

    /// `gemma3` or `gemma4`.
    ///
    /// # Errors
    /// `Unsupported` for another one, `Config` for none.
    pub(crate) fn architecture(&self) -> Result<&str> {
        let key = "general.architecture";
        match self.metadata().text(key)? {
            Some(name @ ("gemma3" | "gemma4")) => Ok(name),
            Some(other) => Err(Error::Unsupported {
                file: self.files[0].path.clone(),
                what: format!("architecture `{}` (expected gemma3 or gemma4)", shortened(other)),
            }),
            None => Err(self.metadata().wrong(key, "expected a text, found none".into())),
        }
    }

    /// Whether any weight is stored in fewer bits than a floating-point number has.
    pub(crate) fn is_quantized(&self) -> bool {
        self.files.iter().flat_map(|file| &file.tensors).any(|tensor| tensor.kind.is_quantized())
    }

    /// The tensor `name`, in the file's words.
    pub(crate) fn tensor(&self, name: &str) -> Option<(&File, &TensorInfo)> {
        self.files.iter().find_map(|file| {
            file.tensors.iter().find(|tensor| tensor.name == name).map(|tensor| (file, tensor))
        })
    }

    /// The keys that tell a file's place in its set must fit the files that were found.
    fn check_split(&self, tensors: u64) -> Result<()> {
        let files = self.files.len() as u64;
        for (index, File { metadata, .. }) in self.files.iter().enumerate() {
            let count = metadata.count("split.count")?.filter(|&count| count > 0).unwrap_or(1);
            if count != files {
                return Err(metadata.wrong(
                    "split.count",
                    format!(
                        "expected {files}, the files of this set by their names (…-00001-of-{files:05}.gguf), found {count}"
                    ),
                ));
            }
            let number = metadata.count("split.no")?.unwrap_or(0);
            if number != index as u64 {
                return Err(metadata.wrong(
                    "split.no",
                    format!("expected {index} by the file's name, found {number}"),
                ));
            }
        }
        let metadata = self.metadata();
        match metadata.count("split.tensors.count")? {
            Some(count) if files > 1 && count != tensors => Err(metadata.wrong(
                "split.tensors.count",
                format!("expected the {tensors} tensors of all files, found {count}"),
            )),
            _ => Ok(()),
        }
    }
}

impl File {
    fn open(path: &Path) -> Result<Self> {
        let (map, metadata, tensors, end) = open_metadata(path)?;
        let key = "general.alignment";
        let alignment = metadata.count(key)?.unwrap_or(ALIGNMENT);
        if !alignment.is_power_of_two() || !(8..=MAX_ALIGNMENT).contains(&alignment) {
            return Err(metadata.wrong(
                key,
                format!("expected a power of two from 8 to {MAX_ALIGNMENT}, found {alignment}"),
            ));
        }
        let mut cursor = Cursor::new(map.bytes());
        let blame = |reason| Error::Format { file: path.to_owned(), reason };
        cursor.take(end as u64).map_err(blame)?;
        let tensors = tensors::read(path, tensors, alignment as usize, &mut cursor)?;
        Ok(Self { path: path.to_owned(), map, metadata, tensors })
    }
}

/// The metadata of the model in `paths`, without a look at its tensors.
///
/// # Errors
/// As [`Gguf::open`].
pub(crate) fn metadata_of(paths: &[PathBuf]) -> Result<Metadata> {
    let first = paths.first().ok_or_else(|| Error::Internal("a set of no files".into()))?;
    open_metadata(first).map(|(_, metadata, _, _)| metadata)
}

/// The file with its metadata, how many tensors it has, and where their list begins.
fn open_metadata(path: &Path) -> Result<(Arc<MappedFile>, Metadata, u64, usize)> {
    let format = |reason| Error::Format { file: path.to_owned(), reason };
    // Opening a named pipe would wait for a writer.
    if path.exists() && !path.is_file() {
        return Err(format("expected a file, found something else".into()));
    }
    let map = MappedFile::open(path)?;
    let mut cursor = Cursor::new(map.bytes());
    if cursor.take(4).map_err(format)? != MAGIC {
        return Err(format("expected a GGUF file, which begins with the letters GGUF".into()));
    }
    let version = cursor.u32().map_err(format)?;
    // 3 has 2's layout; what it adds is big-endian files.
    if ![2, 3].contains(&version) {
        let reason = if version.swap_bytes() == 3 {
            "expected little-endian numbers, found a big-endian file".into()
        } else {
            format!("expected GGUF version 2 or 3, found {version}")
        };
        return Err(format(reason));
    }
    let tensors = cursor.u64().map_err(format)?;
    let keys = cursor.u64().map_err(format)?;
    let metadata = Metadata::read((path.to_owned(), Arc::clone(&map)), keys, &mut cursor)?;
    let end = cursor.at();
    Ok((map, metadata, tensors, end))
}

/// A text of the file for an error's text; a hostile one may be a gigabyte.
fn shortened(text: &str) -> String {
    const MOST: usize = 100;
    match text.char_indices().nth(MOST) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests;
