//! Numbers from Python, beyond 64 bits too: those are wrong values like any other.

use pyo3::{
    exceptions::{PyOverflowError, PyValueError},
    prelude::*,
};

/// An int argument; `None` when it is beyond 64 bits, which is a wrong value like any other.
pub(super) struct Number(pub(super) Option<i64>);

impl<'py> FromPyObject<'_, 'py> for Number {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        match object.extract::<i64>() {
            Ok(number) => Ok(Self(Some(number))),
            Err(error) if error.is_instance_of::<PyOverflowError>(object.py()) => Ok(Self(None)),
            Err(error) => Err(error),
        }
    }
}

impl Number {
    pub(super) fn value(&self, name: &str) -> PyResult<i64> {
        self.0.ok_or_else(|| {
            PyValueError::new_err(format!("expected {name} within 64 bits, found a larger number"))
        })
    }

    /// A count; the engine checks its lower bound, negative ones end here.
    pub(super) fn count(&self, name: &str) -> PyResult<usize> {
        let number = self.value(name)?;
        usize::try_from(number).map_err(|_| {
            PyValueError::new_err(format!("expected {name} at least 1, found {number}"))
        })
    }
}

/// Ids of the argument `name`.
pub(super) fn token_ids(name: &str, ids: &[Number]) -> PyResult<Vec<i64>> {
    ids.iter().map(|id| id.value(name)).collect()
}
