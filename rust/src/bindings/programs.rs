//! Compiled programs as they cross: Rust asks Python to launch them, and Python asks Rust to run a step while
//! it is recorded.

use pyo3::{prelude::*, types::PyList};

use super::{device_of, paths, python_error};
use crate::{
    aten::Tensor,
    captured::{self, Kind},
    compiled::{Program, Programs, Work},
    engine::Compile,
    error::{Error, Result},
    step::Shape,
};

/// What the programs' Python side says of their shapes.
pub(super) fn compile_options(py: Python<'_>, programs: &Py<PyAny>) -> PyResult<Compile> {
    Ok(Compile {
        slots: programs.getattr(py, "slots")?.extract(py)?,
        largest: programs.getattr(py, "largest")?.extract(py)?,
        int8: programs.getattr(py, "int8")?.extract(py)?,
    })
}

/// Hands parameters and state to the Python side, which has the compiler.
pub(super) fn bind_programs(
    py: Python<'_>,
    programs: &Py<PyAny>,
    context: usize,
    parameters: Vec<Tensor>,
    state: Vec<Tensor>,
) -> Result<PyPrograms> {
    let bound = python_list(py, &parameters).and_then(|parameters| {
        programs.call_method1(py, "bind", (context, parameters, python_list(py, &state)?))
    });
    // Nobody but Python may hold the state when its memory is given to a launch.
    drop(state);
    match bound {
        Ok(_) => Ok(PyPrograms(programs.clone_ref(py))),
        Err(error) => Err(device_error(py, "bind", &error)),
    }
}

/// Programs that Python holds, because TorchTPU's compiler is there (`torchtpu_rs/capture.py`).
pub(super) struct PyPrograms(Py<PyAny>);

impl Programs for PyPrograms {
    fn ready(&self) -> Result<Vec<Program>> {
        Python::attach(|py| {
            let ready = self
                .0
                .call_method0(py, "ready")
                .and_then(|ready| ready.extract::<Vec<(usize, usize, usize, usize)>>(py));
            let ready = ready.map_err(|error| device_error(py, "ready", &error))?;
            let program = |(number, tokens, steps, read)| Program {
                number,
                work: if steps == 0 { Work::Prefill { tokens } } else { Work::Decode { steps } },
                read,
            };
            Ok(ready.into_iter().map(program).collect())
        })
    }

    fn launch(&mut self, program: Program, inputs: Vec<Tensor>) -> Result<Vec<Tensor>> {
        Python::attach(|py| {
            let results = python_list(py, &inputs)
                .and_then(|inputs| self.0.call_method1(py, "launch", (program.number, inputs)))
                .and_then(|results| results.extract::<Vec<Bound<'_, PyAny>>>(py));
            match results {
                Ok(results) => results.iter().map(Tensor::from_python).collect(),
                Err(error) => Err(device_error(py, "launch", &error)),
            }
        })
    }

    fn reset(&mut self) -> Result<()> {
        Python::attach(|py| {
            let reset = self.0.call_method0(py, "reset");
            reset.map(drop).map_err(|error| device_error(py, "reset", &error))
        })
    }
}

/// An exception of the Python side of a launch, in its own words.
fn device_error(py: Python<'_>, op: &'static str, error: &PyErr) -> Error {
    let message = format!("{}: {}", error.get_type(py), error.value(py));
    Error::Aten { op, message }
}

/// A list of tensors that share storage with `tensors`.
fn python_list<'py>(py: Python<'py>, tensors: &[Tensor]) -> PyResult<Bound<'py, PyList>> {
    let tensors: PyResult<Vec<_>> = tensors.iter().map(|tensor| tensor.to_python(py)).collect();
    PyList::new(py, tensors?)
}

/// One step over stand-in tensors, for a tracer to call; see the stub.
#[pyclass(unsendable, module = "torchtpu_rs")]
pub(super) struct Step {
    step: captured::CapturedStep,
}

#[pymethods]
impl Step {
    #[new]
    #[pyo3(
        signature = (checkpoint, like, *, context, slots, spare, read, prefill = false, int8 = false),
        text_signature = "(checkpoint, like, *, context, slots, spare, read, prefill=False, int8=False)"
    )]
    #[expect(clippy::too_many_arguments, reason = "Python's keyword arguments")]
    fn new(
        checkpoint: &Bound<'_, PyAny>,
        like: &Bound<'_, PyAny>,
        context: usize,
        slots: usize,
        spare: usize,
        read: usize,
        prefill: bool,
        int8: bool,
    ) -> PyResult<Self> {
        let kind = if prefill { Kind::Prefill } else { Kind::Decode };
        let shape = Shape { slots, context, chunk: Some(spare) };
        let like = device_of(like)?;
        let folders = paths(checkpoint)?;
        let step = captured::CapturedStep::new(&folders, &like, (shape, int8), (kind, read));
        Ok(Self { step: step.map_err(python_error)? })
    }

    /// The stand-ins: parameters, then state.
    fn stand_ins<'py>(
        &mut self,
        py: Python<'py>,
    ) -> PyResult<(Bound<'py, PyList>, Bound<'py, PyList>)> {
        let (parameters, state) = self.step.stand_ins().map_err(python_error)?;
        Ok((python_list(py, &parameters)?, python_list(py, &state)?))
    }

    /// Runs the step on other tensors in the stand-ins' places. The GIL stays held: each operation
    /// enters the tracer, which is Python.
    #[pyo3(signature = (*tensors))]
    fn __call__<'py>(
        &mut self,
        py: Python<'py>,
        tensors: Vec<Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyList>> {
        let tensors: Result<_> = tensors.iter().map(Tensor::from_python).collect();
        let results = self.step.call(tensors.map_err(python_error)?).map_err(python_error)?;
        python_list(py, &results)
    }
}
