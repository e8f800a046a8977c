//! Where checkpoints are, as Python says it, and what it asks of a GGUF file without loading it.

use std::path::PathBuf;

use pyo3::{
    prelude::*,
    types::{PyDict, PyList},
};

use super::{CheckpointError, PyValueError, python_error};
use crate::{
    error::Error,
    gguf::{Value, files_of, is_gguf, metadata_of},
};

/// One path or a sequence of them: folders, and GGUF files.
pub(super) fn paths(checkpoint: &Bound<'_, PyAny>) -> PyResult<Vec<PathBuf>> {
    let paths = match checkpoint.extract::<PathBuf>() {
        Ok(path) => vec![path],
        Err(_) => checkpoint.extract::<Vec<PathBuf>>()?,
    };
    if paths.is_empty() {
        return Err(PyValueError::new_err("expected at least one checkpoint folder, found none"));
    }
    let Some(other) = paths.iter().find(|path| !path.is_dir() && !is_gguf(path)) else {
        return Ok(paths);
    };
    let found = if other.exists() { "another file" } else { "none" };
    Err(CheckpointError::new_err(format!(
        "{}: expected a checkpoint folder or a GGUF file, found {found}",
        other.display()
    )))
}

/// Keys and values of a GGUF file, or of the one model in a folder of them.
#[pyfunction]
pub(super) fn gguf_metadata(py: Python<'_>, path: PathBuf) -> PyResult<Bound<'_, PyDict>> {
    let read = || match files_of(&path)? {
        Some(files) => metadata_of(&files),
        None => Err(Error::Format {
            file: path.clone(),
            reason: "expected a GGUF file, or a folder with the files of one model".into(),
        }),
    };
    let metadata = py.detach(read).map_err(python_error)?;
    let all = PyDict::new(py);
    for (key, value) in metadata.iter() {
        all.set_item(key, to_python(py, &value)?)?;
    }
    Ok(all)
}

fn to_python<'py>(py: Python<'py>, value: &Value<'_>) -> PyResult<Bound<'py, PyAny>> {
    Ok(match value {
        Value::Unsigned(number) => number.into_pyobject(py)?.into_any(),
        Value::Signed(number) => number.into_pyobject(py)?.into_any(),
        Value::Float(number) => number.into_pyobject(py)?.into_any(),
        Value::Bool(flag) => flag.into_pyobject(py)?.to_owned().into_any(),
        Value::Text(text) => text.into_pyobject(py)?.into_any(),
        Value::List(list) => {
            let items = list.iter().map(|item| to_python(py, &item));
            let items = items.collect::<PyResult<Vec<_>>>()?;
            PyList::new(py, items)?.into_any()
        }
    })
}
