//! `torch.Tensor` to [`Tensor`] and back. The only pyo3 code outside `bindings`: it lives here
//! because the pointers it passes to the shim need `unsafe`, which stays in this folder.

use std::ffi::c_void;

use pyo3::{Bound, PyAny, PyResult, Python, exceptions::PyRuntimeError};

use super::{Tensor, check, ffi};
use crate::error::Result;

impl Tensor {
    /// A handle that shares storage with the `torch.Tensor` in `object`.
    ///
    /// # Errors
    /// `Aten` when `object` is no tensor.
    pub(crate) fn from_python(object: &Bound<'_, PyAny>) -> Result<Self> {
        // SAFETY: `object` proves that the GIL is held and keeps the PyObject alive for the call.
        Self::made("from_python", |out| unsafe {
            ffi::tt_from_python(object.as_ptr().cast::<c_void>(), out)
        })
    }

    /// A `torch.Tensor` that shares storage with this handle.
    ///
    /// # Errors
    /// `RuntimeError` when torch cannot wrap the tensor.
    pub(crate) fn to_python<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let mut object: *mut c_void = std::ptr::null_mut();
        // SAFETY: the handle is live, `object` is writable, and `py` proves that the GIL is held.
        let status = unsafe { ffi::tt_to_python(self.raw(), &raw mut object) };
        check("to_python", status).map_err(|error| PyRuntimeError::new_err(error.to_string()))?;
        // SAFETY: on success the shim gave us a new reference to a valid object.
        Ok(unsafe { Bound::from_owned_ptr(py, object.cast()) })
    }
}
