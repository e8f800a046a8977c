//! Reading JSON objects of a checkpoint so that every complaint names file and key.

use std::{
    ops::RangeInclusive,
    path::{Path, PathBuf},
};

use serde_json::{Map, Value};

use crate::error::{Error, Result};

/// Largest JSON file of a checkpoint that is read; the largest published one (the tensor index of a
/// mixture of experts, split) is a few megabytes.
const MAX_JSON_BYTES: u64 = 64 << 20;

/// The JSON object in `file`.
///
/// # Errors
/// `Io`; `Format` when it is too large, no JSON or no object.
pub(crate) fn read_object(file: &Path) -> Result<Map<String, Value>> {
    let io = |source| Error::Io { path: file.to_owned(), source };
    let format = |reason| Error::Format { file: file.to_owned(), reason };
    let bytes = std::fs::metadata(file).map_err(io)?.len();
    if bytes > MAX_JSON_BYTES {
        return Err(format(format!(
            "expected at most {MAX_JSON_BYTES} bytes of JSON, found {bytes}"
        )));
    }
    let text = std::fs::read(file).map_err(io)?;
    match serde_json::from_slice(&text) {
        Ok(Value::Object(object)) => Ok(object),
        Ok(other) => Err(format(format!("expected a JSON object, found {}", kind(&other)))),
        Err(error) => Err(format(format!("expected JSON, found a fault: {error}"))),
    }
}

/// One JSON object with the file it came from and the path of keys that led to it.
#[derive(Clone)]
pub(crate) struct Keys<'a> {
    file: PathBuf,
    path: String,
    object: &'a Map<String, Value>,
}

impl<'a> Keys<'a> {
    pub(crate) fn new(file: &Path, object: &'a Map<String, Value>) -> Self {
        Self { file: file.to_owned(), path: String::new(), object }
    }

    pub(crate) fn file(&self) -> &Path {
        &self.file
    }

    /// The error that blames `key`.
    pub(crate) fn wrong(&self, key: &str, reason: String) -> Error {
        Error::Config { file: self.file.clone(), key: format!("{}{key}", self.path), reason }
    }

    /// Whether the key is there, null included.
    pub(crate) fn has(&self, key: &str) -> bool {
        self.object.contains_key(key)
    }

    /// Whether the key is there and not null.
    pub(crate) fn is_set(&self, key: &str) -> bool {
        self.get(key).is_some()
    }

    /// A missing key and a null are the same.
    fn get(&self, key: &str) -> Option<&'a Value> {
        self.object.get(key).filter(|value| !value.is_null())
    }

    fn expected(&self, key: &str, what: &str, found: &Value) -> Error {
        let text = found.to_string();
        let text = if text.len() > 80 { kind(found).to_owned() } else { text };
        self.wrong(key, format!("expected {what}, found {text}"))
    }

    /// All keys of the object.
    pub(crate) fn names(&self) -> impl Iterator<Item = &'a str> {
        self.object.keys().map(String::as_str)
    }

    pub(crate) fn object(&self, key: &str) -> Result<Option<Self>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Object(object)) => Ok(Some(Self {
                file: self.file.clone(),
                path: format!("{}{key}.", self.path),
                object,
            })),
            Some(other) => Err(self.expected(key, "an object", other)),
        }
    }

    pub(crate) fn text(&self, key: &str) -> Result<Option<&'a str>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(self.expected(key, "a string", other)),
        }
    }

    pub(crate) fn texts(&self, key: &str) -> Result<Option<Vec<&'a str>>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let list = value.as_array().map(|list| list.iter().map(Value::as_str).collect());
        match list {
            Some(Some(texts)) => Ok(Some(texts)),
            _ => Err(self.expected(key, "a list of strings", value)),
        }
    }

    /// False when absent.
    pub(crate) fn flag(&self, key: &str) -> Result<bool> {
        match self.get(key) {
            None => Ok(false),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(other) => Err(self.expected(key, "true or false", other)),
        }
    }

    fn count(&self, key: &str, range: RangeInclusive<usize>) -> Result<Option<usize>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let count = value.as_u64().and_then(|number| usize::try_from(number).ok());
        match count.filter(|count| range.contains(count)) {
            Some(count) => Ok(Some(count)),
            None => {
                let what = format!("a whole number from {} to {}", range.start(), range.end());
                Err(self.expected(key, &what, value))
            }
        }
    }

    /// A size that must be there: 1 to `max`.
    pub(crate) fn size(&self, key: &str, max: usize) -> Result<usize> {
        self.count(key, 1..=max)?.ok_or_else(|| {
            self.wrong(key, format!("expected a whole number from 1 to {max}, found none"))
        })
    }

    pub(crate) fn size_or(&self, key: &str, default: usize, max: usize) -> Result<usize> {
        Ok(self.count(key, 1..=max)?.unwrap_or(default))
    }

    /// A count that may be zero.
    pub(crate) fn count_or(&self, key: &str, default: usize, max: usize) -> Result<usize> {
        Ok(self.count(key, 0..=max)?.unwrap_or(default))
    }

    pub(crate) fn number(&self, key: &str, range: RangeInclusive<f64>) -> Result<Option<f64>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match value.as_f64().filter(|number| range.contains(number)) {
            Some(number) => Ok(Some(number)),
            None => {
                let what = format!("a number from {} to {}", range.start(), range.end());
                Err(self.expected(key, &what, value))
            }
        }
    }

    pub(crate) fn number_or(
        &self,
        key: &str,
        default: f64,
        range: RangeInclusive<f64>,
    ) -> Result<f64> {
        Ok(self.number(key, range)?.unwrap_or(default))
    }

    /// One token id or a list of them.
    pub(crate) fn ids(&self, key: &str) -> Result<Option<Vec<i64>>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let ids = match value {
            Value::Array(list) => list.iter().map(Value::as_i64).collect(),
            other => other.as_i64().map(|id| vec![id]),
        };
        match ids {
            Some(ids) => Ok(Some(ids)),
            None => Err(self.expected(key, "a token id or a list of them", value)),
        }
    }
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}
