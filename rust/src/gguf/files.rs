//! Which GGUF files a path stands for: itself, its set, or those of a folder that has nothing else.

use std::{
    io::Read,
    path::{Path, PathBuf},
};

use super::MAGIC;
use crate::error::{Error, Result};

/// Most files of a set: its names have five digits, and the largest models have some dozens.
const MAX_FILES: usize = 1000;

/// The place of a file in a set, as its name says it: `prefix-00001-of-00003.gguf`.
#[derive(Debug, PartialEq, Eq)]
struct Place<'a> {
    prefix: &'a str,
    number: usize,
    count: usize,
}

impl<'a> Place<'a> {
    fn of(name: &'a str) -> Option<Self> {
        let (rest, count) = name.strip_suffix(".gguf")?.rsplit_once("-of-")?;
        let (prefix, number) = rest.rsplit_once('-')?;
        let digits = |text: &str| {
            let five = text.len() == 5 && text.bytes().all(|byte| byte.is_ascii_digit());
            five.then(|| text.parse::<usize>().ok()).flatten()
        };
        Some(Self { prefix, number: digits(number)?, count: digits(count)? })
    }
}

/// Whether `path` is a file of this format, by its name or by how it begins.
pub(crate) fn is_gguf(path: &Path) -> bool {
    if path.is_dir() || !path.exists() {
        return false;
    }
    if path.extension().is_some_and(|suffix| suffix == "gguf") {
        return true;
    }
    let mut start = [0; MAGIC.len()];
    // Opening a named pipe would wait for a writer.
    path.is_file()
        && std::fs::File::open(path).and_then(|mut file| file.read_exact(&mut start)).is_ok()
        && start == MAGIC
}

/// The GGUF files that `path` stands for, in order; `None` when it is a folder of another kind.
///
/// A file of a set stands for the whole set. A folder with safetensors or a config.json is one of those, whatever else is in it. Files
/// whose name begins with `mmproj` are llama.cpp's projectors for images and sound, which belong to no text model.
///
/// # Errors
/// `Format` for a folder of several models; `Io`.
pub(crate) fn files_of(path: &Path) -> Result<Option<Vec<PathBuf>>> {
    if !path.is_dir() {
        return set_of(path).map(Some);
    }
    if path.join("config.json").exists() {
        return Ok(None);
    }
    let io = |source| Error::Io { path: path.to_owned(), source };
    let mut found = Vec::new();
    for entry in std::fs::read_dir(path).map_err(io)? {
        let name = entry.map_err(io)?.file_name().to_string_lossy().into_owned();
        match Path::new(&name).extension() {
            Some(suffix) if suffix == "safetensors" => return Ok(None),
            Some(suffix) if suffix == "gguf" && !name.starts_with("mmproj") => found.push(name),
            _ => {}
        }
    }
    found.sort();
    let Some(first) = found.first() else { return Ok(None) };
    let set = set_of(&path.join(first))?;
    match found.iter().find(|name| !set.contains(&path.join(name))) {
        None => Ok(Some(set)),
        Some(other) => Err(Error::Format {
            file: path.to_owned(),
            reason: format!(
                "expected one GGUF model, found {first} and {other}: name the file that is meant"
            ),
        }),
    }
}

/// All files of the set that `path` is in.
fn set_of(path: &Path) -> Result<Vec<PathBuf>> {
    let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let Some(place) = Place::of(&name) else { return Ok(vec![path.to_owned()]) };
    if !(1..=MAX_FILES).contains(&place.count) || !(1..=place.count).contains(&place.number) {
        return Err(Error::Format {
            file: path.to_owned(),
            reason: format!(
                "expected a number from 1 to {MAX_FILES} of a set's files, found {} of {}",
                place.number, place.count
            ),
        });
    }
    let file = |number| {
        path.with_file_name(format!("{}-{number:05}-of-{:05}.gguf", place.prefix, place.count))
    };
    Ok((1..=place.count).map(file).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_of_a_set_stands_for_all_of_them() {
        let set = set_of(Path::new("/m/gemma-00002-of-00003.gguf")).unwrap();
        let names = ["00001", "00002", "00003"].map(|n| format!("/m/gemma-{n}-of-00003.gguf"));
        assert_eq!(set, names.map(PathBuf::from));
        for alone in ["gemma.gguf", "gemma-1-of-3.gguf", "a-of-b.gguf", "gemma-00001-of-0000x.gguf"]
        {
            assert_eq!(set_of(Path::new(alone)).unwrap(), [PathBuf::from(alone)]);
        }
        for absurd in ["a-00000-of-00002.gguf", "a-00003-of-00002.gguf", "a-00001-of-99999.gguf"] {
            assert!(set_of(Path::new(absurd)).unwrap_err().to_string().contains(absurd));
        }
    }

    #[test]
    fn a_folder_has_one_model_or_is_of_another_kind() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let write = |name: &str| std::fs::write(path(name), "").unwrap();
        assert_eq!(files_of(folder.path()).unwrap(), None);
        write("mmproj-model.gguf");
        assert_eq!(files_of(folder.path()).unwrap(), None);
        write("b.gguf");
        assert_eq!(files_of(folder.path()).unwrap(), Some(vec![path("b.gguf")]));
        write("a.gguf");
        let text = files_of(folder.path()).unwrap_err().to_string();
        assert!(text.contains("a.gguf and b.gguf"), "{text}");
        write("x.safetensors");
        assert_eq!(files_of(folder.path()).unwrap(), None);
    }
}
