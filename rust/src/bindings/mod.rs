//! The Python module: what crosses, how errors become Python's, when the GIL is held.
//!
//! With the other files of this folder the one place of pyo3 besides `aten/python.rs`. Every call that can reach ATen releases the GIL and
//! takes it back only for a callback. `rust/PYO3.md` has a row for each crossing.
#![expect(clippy::needless_pass_by_value, reason = "pyo3 hands extracted arguments over by value")]

mod checkpoint;
mod memory;
mod number;
mod programs;

use std::{path::PathBuf, time::Duration};

use checkpoint::{gguf_metadata, paths};
use memory::memory_needed;
use number::{Number, token_ids};
use programs::{Step, bind_programs, compile_options};

use pyo3::{
    create_exception,
    exceptions::{PyOSError, PyRuntimeError, PyValueError},
    prelude::*,
    types::{PyDict, PyList, PyMapping},
};

use crate::{
    aten::{self, DType, InferenceMode, Tensor},
    compiled::Programs,
    engine::{self, Finish, Options, Request},
    error::{Error, Result},
    kernels::InstructionSet,
    weights::Form,
};

create_exception!(
    torchtpu_rs,
    CheckpointError,
    PyValueError,
    "A file of the checkpoint is missing, broken or not supported; the text names file, tensor or key."
);
create_exception!(
    torchtpu_rs,
    ContextFullError,
    PyValueError,
    "The tokens do not fit the engine's cache."
);
create_exception!(
    torchtpu_rs,
    DeviceError,
    PyRuntimeError,
    "PyTorch or the device failed during a call; the engine stays usable."
);

/// No wildcard: a new variant does not compile until it has a class.
fn python_error(error: Error) -> PyErr {
    let text = error.to_string();
    match error {
        Error::Aten { .. } => DeviceError::new_err(text),
        Error::Io { source, .. } if source.kind() != std::io::ErrorKind::NotFound => {
            PyOSError::new_err(text)
        }
        Error::Io { .. }
        | Error::Format { .. }
        | Error::Config { .. }
        | Error::MissingTensor { .. }
        | Error::Tensor { .. }
        | Error::Unsupported { .. } => CheckpointError::new_err(text),
        Error::Input(_) => PyValueError::new_err(text),
        Error::ContextFull { .. } => ContextFullError::new_err(text),
        Error::Internal(_) => PyRuntimeError::new_err(text),
    }
}

/// The answer of `Engine.decode`.
#[pyclass(frozen, module = "torchtpu_rs")]
struct Decoded {
    ids: Vec<i64>,
    finish: Finish,
    stop_id: Option<i64>,
    prompt_tokens: usize,
    prefill: Duration,
    decode: Duration,
}

#[pymethods]
impl Decoded {
    /// The new token ids, without the stop id.
    #[getter]
    fn ids(&self) -> Vec<i64> {
        self.ids.clone()
    }

    /// `stop`, `length` or `cancelled`.
    #[getter]
    fn finish(&self) -> &'static str {
        self.finish.name()
    }

    /// The id that ended the answer when `finish` is `stop`.
    #[getter]
    fn stop_id(&self) -> Option<i64> {
        self.stop_id
    }

    /// Tokens of the prompt.
    #[getter]
    fn prompt_tokens(&self) -> usize {
        self.prompt_tokens
    }

    /// Seconds from the call to the first token.
    #[getter]
    fn prefill_seconds(&self) -> f64 {
        self.prefill.as_secs_f64()
    }

    /// Seconds from the first token to the last.
    #[getter]
    fn decode_seconds(&self) -> f64 {
        self.decode.as_secs_f64()
    }

    fn __repr__(&self) -> String {
        format!(
            "Decoded({} ids, finish={:?}, prefill {:.3} s, decode {:.3} s)",
            self.ids.len(),
            self.finish.name(),
            self.prefill.as_secs_f64(),
            self.decode.as_secs_f64()
        )
    }
}

/// A loaded checkpoint. Only the thread that made it may use it.
#[pyclass(unsendable, module = "torchtpu_rs")]
struct Engine {
    engine: engine::Engine,
    checkpoint: Vec<PathBuf>,
    /// The Python side of compiled programs.
    programs: Option<Py<PyAny>>,
}

#[pymethods]
impl Engine {
    #[new]
    #[pyo3(
        signature = (checkpoint, like, context = Number(Some(8192)), *, dtype = None,
            prefill_chunk = None, arithmetic = "exact", instructions = None, programs = None,
            on_load = None),
        text_signature = "(checkpoint, like, context=8192, *, dtype=None, prefill_chunk=None, arithmetic='exact', instructions=None, programs=None, on_load=None)"
    )]
    #[expect(clippy::too_many_arguments, reason = "Python's keyword arguments")]
    fn new(
        py: Python<'_>,
        checkpoint: &Bound<'_, PyAny>,
        like: &Bound<'_, PyAny>,
        context: Number,
        dtype: Option<&str>,
        prefill_chunk: Option<Number>,
        arithmetic: &str,
        instructions: Option<&str>,
        programs: Option<Py<PyAny>>,
        on_load: Option<Py<PyAny>>,
    ) -> PyResult<Self> {
        let checkpoint = paths(checkpoint)?;
        let options = Options {
            checkpoint: checkpoint.clone(),
            like: device_of(like)?,
            context: context.count("context")?,
            dtype: dtype.map(element_type).transpose()?,
            chunk: prefill_chunk.map(|chunk| chunk.count("prefill_chunk")).transpose()?,
            form: form(arithmetic)?,
            fast: (arithmetic != "auto").then_some(arithmetic == "fast"),
            instructions: instructions.map(instruction_set).transpose()?,
        };
        let mut failed = None;
        let raised = &mut failed;
        let mut report = move |done: usize, all: usize| {
            let Some(on_load) = &on_load else { return Ok(()) };
            Python::attach(|py| on_load.call1(py, (done, all))).map(drop).map_err(|error| {
                *raised = Some(error);
                Error::Input("the load was ended by on_load".into())
            })
        };
        let compile =
            programs.as_ref().map(|programs| compile_options(py, programs)).transpose()?;
        let bound = programs.as_ref().map(|programs| programs.clone_ref(py));
        let mut bind = |context: usize, parameters: Vec<Tensor>, state: Vec<Tensor>| {
            let programs = bound.as_ref().map(|programs| {
                Python::attach(|py| bind_programs(py, programs, context, parameters, state))
            });
            match programs {
                Some(bound) => bound.map(|bound| Box::new(bound) as Box<dyn Programs>),
                None => Err(Error::Internal("programs without options".into())),
            }
        };
        let (bind, report) = (&mut bind, &mut report);
        let loaded = py.detach(move || {
            let compile = compile.map(|compile| (compile, bind as &mut engine::Bind<'_>));
            engine::Engine::load(&options, compile, report)
        });
        match (loaded, failed) {
            (_, Some(error)) => Err(error),
            (Ok(engine), None) => Ok(Self { engine, checkpoint, programs }),
            (Err(error), None) => Err(python_error(error)),
        }
    }

    /// Answers a prompt greedily; see the stub for the rules.
    #[pyo3(
        signature = (ids, max_new, stop = None, read_every = Number(Some(1)), on_tokens = None),
        text_signature = "($self, ids, max_new, stop=None, read_every=1, on_tokens=None)"
    )]
    #[expect(clippy::too_many_arguments, reason = "Python's keyword arguments")]
    fn decode(
        &mut self,
        py: Python<'_>,
        ids: Vec<Number>,
        max_new: Number,
        stop: Option<Vec<Number>>,
        read_every: Number,
        on_tokens: Option<Py<PyAny>>,
    ) -> PyResult<Decoded> {
        let ids = token_ids("ids", &ids)?;
        let stop = stop.map(|stop| token_ids("stop", &stop)).transpose()?;
        let request = Request {
            ids: &ids,
            max_new: max_new.count("max_new")?,
            stop: stop.as_deref(),
            read_every: read_every.count("read_every")?,
        };
        let mut failed = None;
        let mut hand_out = |batch: &[i64]| {
            Python::attach(|py| {
                let answer = py.check_signals().and_then(|()| match &on_tokens {
                    None => Ok(true),
                    Some(callback) => PyList::new(py, batch)
                        .and_then(|list| callback.call1(py, (list,)))
                        .and_then(|answer| answer.is_truthy(py)),
                });
                answer.unwrap_or_else(|error| {
                    failed = Some(error);
                    false
                })
            })
        };
        let engine = &mut self.engine;
        let decoded = py.detach(|| engine.decode(&request, &mut hand_out));
        if let Some(error) = failed {
            return Err(error);
        }
        let decoded = decoded.map_err(python_error)?;
        Ok(Decoded {
            ids: decoded.ids,
            finish: decoded.finish,
            stop_id: decoded.stop_id,
            prompt_tokens: ids.len(),
            prefill: decoded.prefill,
            decode: decoded.decode,
        })
    }

    /// Logits for parity checks; see the stub.
    #[pyo3(signature = (ids, forced = None, *, all = false))]
    fn logits<'py>(
        &mut self,
        py: Python<'py>,
        ids: Vec<Number>,
        forced: Option<Vec<Number>>,
        all: bool,
    ) -> PyResult<Bound<'py, PyAny>> {
        let ids = token_ids("ids", &ids)?;
        let forced = token_ids("forced", &forced.unwrap_or_default())?;
        let engine = &mut self.engine;
        let logits = py.detach(|| engine.logits(&ids, &forced, all)).map_err(python_error)?;
        logits.to_python(py)
    }

    /// Seconds and bytes of weights by part of the step, of the last answer after its first token; see the stub.
    fn parts(&self) -> Vec<(&'static str, f64, u64)> {
        let parts = self.engine.parts().map_or(&[][..], |parts| parts.all());
        parts.iter().map(|(name, spent)| (*name, spent.time.as_secs_f64(), spent.bytes)).collect()
    }

    /// What is loaded and how.
    fn info<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let info = self.engine.info();
        let layout = PyDict::new(py);
        layout.set_item("full_rings", info.full_rings)?;
        layout.set_item("sliding_rings", info.sliding_rings)?;
        layout.set_item("shared_layers", info.shared_layers)?;
        layout.set_item("context", info.context)?;
        let all = PyDict::new(py);
        all.set_item("layout", layout)?;
        all.set_item("device", &info.device)?;
        all.set_item("dtype", info.dtype.name())?;
        all.set_item("weight_format", info.weight_format)?;
        all.set_item("slots", info.slots)?;
        all.set_item("weight_bytes", info.sizes.kept)?;
        all.set_item("stored_bytes", &info.sizes.stored)?;
        all.set_item("cache_bytes", info.cache_bytes)?;
        all.set_item("static_shapes", info.static_shapes)?;
        all.set_item("vocab_size", info.vocab_size)?;
        all.set_item("eos_token_ids", &info.eos_token_ids)?;
        all.set_item("load_seconds", info.load.as_secs_f64())?;
        if let Some(instructions) = info.instructions {
            all.set_item("instructions", instructions.name())?;
        }
        all.set_item("threads", aten::num_threads().map_err(python_error)?)?;
        if let Some(counts) = self.engine.counts() {
            all.set_item("launches", counts.launches)?;
            all.set_item("host_reads", counts.host_reads)?;
            all.set_item("decoded_tokens", counts.tokens)?;
        }
        if let Some(programs) = &self.programs {
            all.update(programs.call_method0(py, "info")?.bind(py).cast::<PyMapping>()?)?;
        }
        let names: Vec<_> = self.checkpoint.iter().map(|f| f.display().to_string()).collect();
        all.set_item("checkpoint", names)?;
        Ok(all)
    }
}

/// The sum of an 8x8 product of ones on `like`'s device, as a tensor that is still there: 512.
#[pyfunction]
fn matmul_sum<'py>(py: Python<'py>, like: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    let like = device_of(like)?;
    let sum = py.detach(move || -> Result<Tensor> {
        let _inference = InferenceMode::enter()?;
        let ones = Tensor::ones(&[8, 8], like.dtype()?, &like)?;
        ones.matmul(&ones)?.sum()
    });
    sum.map_err(python_error)?.to_python(py)
}

/// The tensor that names the device.
fn device_of(like: &Bound<'_, PyAny>) -> PyResult<Tensor> {
    let wrong = |found: String| {
        PyValueError::new_err(format!(
            "expected `like` to be a floating-point tensor of one element that names the device, \
             found {found}"
        ))
    };
    let tensor = Tensor::from_python(like).map_err(|error| wrong(error.to_string()))?;
    let sizes = tensor.sizes().map_err(python_error)?;
    if sizes.iter().product::<i64>() != 1 {
        return Err(wrong(format!("shape {sizes:?}")));
    }
    match tensor.dtype() {
        Ok(DType::F32 | DType::Bf16 | DType::F16) => Ok(tensor),
        Ok(other) => Err(wrong(other.name().to_owned())),
        Err(error) => Err(wrong(error.to_string())),
    }
}

fn element_type(name: &str) -> PyResult<DType> {
    [DType::Bf16, DType::F16, DType::F32].into_iter().find(|dtype| dtype.name() == name).ok_or_else(
        || {
            PyValueError::new_err(format!(
                "expected dtype bfloat16, float16 or float32, found {name:?}"
            ))
        },
    )
}

fn form(arithmetic: &str) -> PyResult<Form> {
    match arithmetic {
        // Where there are no kernels of our own, fast is exact.
        "auto" | "exact" | "fast" => Ok(Form::EXACT),
        "compiled" => Ok(Form::compiled(false)),
        "int8" => Ok(Form::compiled(true)),
        _ => Err(PyValueError::new_err(format!(
            "expected arithmetic auto, exact, fast, compiled or int8, found {arithmetic:?}"
        ))),
    }
}

fn instruction_set(name: &str) -> PyResult<InstructionSet> {
    InstructionSet::ALL.into_iter().find(|set| set.name() == name).ok_or_else(|| {
        let names = InstructionSet::ALL.map(InstructionSet::name).join(", ");
        PyValueError::new_err(format!("expected instructions {names}, found {name:?}"))
    })
}

/// The compiled half of the package `torchtpu_rs`.
#[pymodule]
pub mod _native {
    use super::{Bound, PyDict, PyModule, PyResult};
    #[pymodule_export]
    use super::{
        CheckpointError, ContextFullError, Decoded, DeviceError, Engine, Step, gguf_metadata,
        matmul_sum, memory_needed,
    };
    use pyo3::types::{PyDictMethods, PyModuleMethods};

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        let build = PyDict::new(module.py());
        build.set_item("torch", env!("TORCHTPU_BUILD_TORCH"))?;
        build.set_item("rustc", env!("TORCHTPU_BUILD_RUSTC"))?;
        build.set_item("python", env!("TORCHTPU_BUILD_PYTHON"))?;
        build.set_item("crate", env!("CARGO_PKG_VERSION"))?;
        module.add("BUILD", build)?;
        Ok(())
    }
}
