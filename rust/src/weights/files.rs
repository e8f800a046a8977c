//! Which safetensors files a folder's checkpoint has.

use std::{
    collections::BTreeMap,
    path::{Component, Path},
};

use crate::{
    error::{Error, Result},
    json::{Keys, read_object},
};

/// Which file holds which tensor of a sharded checkpoint.
pub(super) const INDEX_FILE: &str = "model.safetensors.index.json";

/// File names of a folder's checkpoint, each with the tensors the index promises in it.
///
/// With an index only its files count; without one, every `*.safetensors` file does.
pub(super) fn safetensors_files(folder: &Path) -> Result<BTreeMap<String, Vec<String>>> {
    let index = folder.join(INDEX_FILE);
    if index.is_file() {
        return indexed_files(&index);
    }
    let io = |source| Error::Io { path: folder.to_owned(), source };
    let mut files = BTreeMap::new();
    for entry in std::fs::read_dir(folder).map_err(io)? {
        let name = entry.map_err(io)?.file_name().to_string_lossy().into_owned();
        if Path::new(&name).extension().is_some_and(|suffix| suffix == "safetensors") {
            files.insert(name, Vec::new());
        }
    }
    Ok(files)
}

fn indexed_files(index: &Path) -> Result<BTreeMap<String, Vec<String>>> {
    let object = read_object(index)?;
    let top = Keys::new(index, &object);
    let map = top
        .object("weight_map")?
        .ok_or_else(|| top.wrong("weight_map", "expected an object, found none".into()))?;
    let mut files: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for name in map.names() {
        let file = map.text(name)?.unwrap_or_default();
        let mut parts = Path::new(file).components();
        // One plain file name: no folder, no `..`, no absolute path can lead outside.
        if !matches!((parts.next(), parts.next()), (Some(Component::Normal(_)), None)) {
            return Err(map.wrong(
                name,
                format!("expected the name of a file in the same folder, found `{file}`"),
            ));
        }
        files.entry(file.to_owned()).or_default().push(name.to_owned());
    }
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_index_may_name_only_files_of_its_own_folder() {
        let folder = tempfile::tempdir().unwrap();
        let index = folder.path().join(INDEX_FILE);
        for file in ["../secret.safetensors", "/etc/passwd", "a/b.safetensors", "", "..", "."] {
            let json = serde_json::json!({"weight_map": {"model.norm.weight": file}});
            std::fs::write(&index, json.to_string()).unwrap();
            let text = indexed_files(&index).unwrap_err().to_string();
            assert!(text.contains("model.norm.weight") && text.contains("same folder"), "{text}");
        }
    }
}
