//! What a checkpoint will need, asked from Python before anything is loaded.

use pyo3::{exceptions::PyValueError, prelude::*, types::PyDict};

use super::{Number, checkpoint::paths, element_type, python_error};
use crate::engine::{Format, Question, Runs};

/// Bytes that an engine of these options will need, from its description alone; see the stub.
#[pyfunction]
#[pyo3(
    signature = (checkpoint, context = Number(Some(8192)), *, dtype = None, arithmetic = "auto",
        weight_format = None, slots = Number(Some(8)), spare = Number(Some(512))),
    text_signature = "(checkpoint, context=8192, *, dtype=None, arithmetic='auto', weight_format=None, slots=8, spare=512)"
)]
#[expect(clippy::too_many_arguments, reason = "Python's keyword arguments")]
pub(super) fn memory_needed<'py>(
    py: Python<'py>,
    checkpoint: &Bound<'_, PyAny>,
    context: Number,
    dtype: Option<&str>,
    arithmetic: &str,
    weight_format: Option<&str>,
    slots: Number,
    spare: Number,
) -> PyResult<Bound<'py, PyDict>> {
    let dtype = dtype.map(element_type).transpose()?;
    let runs = match arithmetic {
        "auto" => None,
        "exact" => Some(Runs::Exact),
        "fast" => Some(Runs::Fast),
        "compiled" => {
            Some(Runs::Compiled { slots: slots.count("slots")?, largest: spare.count("spare")? })
        }
        _ => {
            return Err(PyValueError::new_err(format!(
                "expected arithmetic auto, exact, fast or compiled, found {arithmetic:?}"
            )));
        }
    };
    let format = match weight_format {
        None => None,
        Some("dense") => Some(Format::Dense),
        Some("int8") => Some(Format::Int8),
        Some("int4") => Some(Format::Int4),
        Some(other) => {
            return Err(PyValueError::new_err(format!(
                "expected weight_format dense, int8 or int4, found {other:?}"
            )));
        }
    };
    let question = Question {
        folders: paths(checkpoint)?,
        context: context.count("context")?,
        dtype,
        runs,
        format,
    };
    let needed = question.answer().map_err(python_error)?;
    let all = PyDict::new(py);
    all.set_item("weight_format", needed.format)?;
    all.set_item("context", needed.context)?;
    all.set_item("weight_bytes", needed.weights)?;
    all.set_item("cache_bytes", needed.cache)?;
    all.set_item("working_bytes", needed.working)?;
    Ok(all)
}
