//! Keys and values of a GGUF file's header.
//!
//! All of it is checked when the file is opened: types, lengths, UTF-8, that keys are there once. Values stay in the
//! file until they are asked for, so a list costs no memory, however long it says it is.

use std::{collections::BTreeMap, ops::Range, path::PathBuf, sync::Arc};

use serde_json::Number;

use super::cursor::{Checked, Cursor};
use crate::{
    aten::MappedFile,
    error::{Error, Result},
};

/// The format's limit of a key's length.
const MAX_KEY_BYTES: u64 = 65_535;
/// Many times what any file has (some fifty), so that a hostile one cannot fill memory with keys.
const MAX_KEYS: u64 = 1 << 14;
/// Largest list; the largest known has the half million merges of a tokenizer.
const MAX_LIST: u64 = 1 << 22;

/// Types of values, numbered as in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    F32,
    Bool,
    Text,
    List,
    U64,
    I64,
    F64,
}

impl Kind {
    const ALL: [Self; 13] = [
        Self::U8,
        Self::I8,
        Self::U16,
        Self::I16,
        Self::U32,
        Self::I32,
        Self::F32,
        Self::Bool,
        Self::Text,
        Self::List,
        Self::U64,
        Self::I64,
        Self::F64,
    ];

    fn read(cursor: &mut Cursor<'_>) -> Checked<Self> {
        let number = cursor.u32()?;
        Self::ALL
            .get(number as usize)
            .copied()
            .ok_or_else(|| format!("expected a value type from 0 to 12, found {number}"))
    }

    /// Fewest bytes of a value.
    const fn bytes(self) -> u64 {
        match self {
            Self::U8 | Self::I8 | Self::Bool => 1,
            Self::U16 | Self::I16 => 2,
            Self::U32 | Self::I32 | Self::F32 => 4,
            Self::Text | Self::U64 | Self::I64 | Self::F64 => 8,
            Self::List => 12,
        }
    }
}

/// A value of the metadata.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Value<'a> {
    Unsigned(u64),
    Signed(i64),
    Float(f64),
    Bool(bool),
    Text(&'a str),
    List(List<'a>),
}

impl Value<'_> {
    /// For an error's text.
    fn brief(&self) -> String {
        match self {
            Self::Unsigned(number) => number.to_string(),
            Self::Signed(number) => number.to_string(),
            Self::Float(number) => number.to_string(),
            Self::Bool(flag) => flag.to_string(),
            Self::Text(text) => format!("`{}`", super::shortened(text)),
            Self::List(list) => format!("a list of {}", list.len),
        }
    }
}

/// A list of values that are no lists.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct List<'a> {
    kind: Kind,
    len: usize,
    bytes: &'a [u8],
}

impl<'a> List<'a> {
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn iter(&self) -> impl ExactSizeIterator<Item = Value<'a>> + use<'a> {
        let (kind, mut cursor) = (self.kind, Cursor::new(self.bytes));
        // Checked when the file was opened.
        (0..self.len).map(move |_| value(kind, &mut cursor).unwrap_or(Value::Bool(false)))
    }
}

/// A value with its type, the cursor before it; a list's items are checked too.
fn value<'a>(kind: Kind, cursor: &mut Cursor<'a>) -> Checked<Value<'a>> {
    Ok(match kind {
        Kind::U8 => Value::Unsigned(cursor.u8()?.into()),
        Kind::I8 => Value::Signed(cursor.u8()?.cast_signed().into()),
        Kind::U16 => Value::Unsigned(cursor.u16()?.into()),
        Kind::I16 => Value::Signed(cursor.u16()?.cast_signed().into()),
        Kind::U32 => Value::Unsigned(cursor.u32()?.into()),
        Kind::I32 => Value::Signed(cursor.u32()?.cast_signed().into()),
        Kind::U64 => Value::Unsigned(cursor.u64()?),
        Kind::I64 => Value::Signed(cursor.u64()?.cast_signed()),
        Kind::F32 => Value::Float(f32::from_bits(cursor.u32()?).into()),
        Kind::F64 => Value::Float(f64::from_bits(cursor.u64()?)),
        Kind::Bool => match cursor.u8()? {
            0 => Value::Bool(false),
            1 => Value::Bool(true),
            other => return Err(format!("expected 0 or 1 for a boolean, found {other}")),
        },
        Kind::Text => Value::Text(cursor.text(cursor.left())?),
        Kind::List => Value::List(list(cursor)?),
    })
}

fn list<'a>(cursor: &mut Cursor<'a>) -> Checked<List<'a>> {
    let kind = Kind::read(cursor)?;
    if kind == Kind::List {
        return Err("expected a list of numbers, booleans or texts, found a list of lists".into());
    }
    let len = cursor.u64()?;
    let most = MAX_LIST.min(cursor.left() / kind.bytes());
    if len > most {
        return Err(format!("expected a list of at most {most} values here, found {len}"));
    }
    // Only to see its end and its faults.
    let mut seen = cursor.fork();
    for _ in 0..len {
        value(kind, &mut seen)?;
    }
    let bytes = cursor.take((seen.at() - cursor.at()) as u64)?;
    Ok(List { kind, len: len as usize, bytes })
}

/// The metadata of a file.
pub(crate) struct Metadata {
    path: PathBuf,
    map: Arc<MappedFile>,
    /// Where each key's value is.
    places: BTreeMap<String, (Kind, Range<usize>)>,
}

impl Metadata {
    /// Reads `count` keys and values from `cursor`, which goes over the whole of `map`.
    pub(super) fn read(
        (path, map): (PathBuf, Arc<MappedFile>),
        count: u64,
        cursor: &mut Cursor<'_>,
    ) -> Result<Self> {
        let wrong = |reason| Error::Format { file: path.clone(), reason };
        // A key's length, its value's type, and a value of one byte.
        let most = MAX_KEYS.min(cursor.left() / 13);
        if count > most {
            return Err(wrong(format!(
                "expected at most {most} metadata keys here, found {count}"
            )));
        }
        let mut places = BTreeMap::new();
        for index in 0..count {
            let key = cursor
                .text(MAX_KEY_BYTES)
                .map_err(|reason| wrong(format!("metadata key {index}: {reason}")))?;
            let blame =
                |reason| Error::Config { file: path.clone(), key: super::shortened(key), reason };
            let kind = Kind::read(cursor).map_err(blame)?;
            let start = cursor.at();
            value(kind, cursor).map_err(blame)?;
            if places.insert(key.to_owned(), (kind, start..cursor.at())).is_some() {
                return Err(blame("expected the key once, found it twice".into()));
            }
        }
        Ok(Self { path, map, places })
    }

    /// All keys with their values, in alphabetical order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&str, Value<'_>)> {
        self.places.iter().filter_map(|(key, place)| Some((&**key, self.at(place)?)))
    }

    pub(crate) fn get(&self, key: &str) -> Option<Value<'_>> {
        self.at(self.places.get(key)?)
    }

    fn at(&self, (kind, range): &(Kind, Range<usize>)) -> Option<Value<'_>> {
        value(*kind, &mut Cursor::new(&self.map.bytes()[range.clone()])).ok()
    }

    /// The error that blames `key`.
    pub(super) fn wrong(&self, key: &str, reason: String) -> Error {
        Error::Config { file: self.path.clone(), key: key.to_owned(), reason }
    }

    fn expected(&self, key: &str, what: &str, found: &Value<'_>) -> Error {
        self.wrong(key, format!("expected {what}, found {}", found.brief()))
    }

    /// A whole number from 0 on.
    pub(super) fn count(&self, key: &str) -> Result<Option<u64>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match whole(&value) {
            Some(number) => Ok(Some(number)),
            None => Err(self.expected(key, "a whole number from 0 on", &value)),
        }
    }

    /// A whole number from 0 on that must be there.
    pub(super) fn needed(&self, key: &str) -> Result<u64> {
        self.count(key)?
            .ok_or_else(|| self.wrong(key, "expected a whole number, found none".into()))
    }

    /// Whole numbers from 0 on: `layers` of them, or one for all.
    pub(super) fn counts(&self, key: &str, layers: usize) -> Result<Option<Vec<u64>>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let numbers = match &value {
            Value::List(list) if list.len() == layers => {
                list.iter().map(|item| whole(&item)).collect()
            }
            Value::List(_) => None,
            one => whole(one).map(|number| vec![number; layers]),
        };
        match numbers {
            Some(numbers) => Ok(Some(numbers)),
            None => {
                let what = format!("a whole number, or one for each of {layers} layers");
                Err(self.expected(key, &what, &value))
            }
        }
    }

    /// A number, as whoever wrote it in decimals would: a float32 next to 1e-6 is 1e-6.
    pub(super) fn number(&self, key: &str) -> Result<Option<Number>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let number = match value {
            Value::Unsigned(number) => Some(number.into()),
            Value::Signed(number) => Some(number.into()),
            Value::Float(number) => decimal(number),
            _ => None,
        };
        match number {
            Some(number) => Ok(Some(number)),
            None => Err(self.expected(key, "a number", &value)),
        }
    }

    pub(super) fn text(&self, key: &str) -> Result<Option<&str>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Text(text)) => Ok(Some(text)),
            Some(other) => Err(self.expected(key, "a text", &other)),
        }
    }

    pub(super) fn list(&self, key: &str) -> Result<Option<List<'_>>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::List(list)) => Ok(Some(list)),
            Some(other) => Err(self.expected(key, "a list", &other)),
        }
    }
}

/// The value as a whole number from 0 on.
pub(super) fn whole(value: &Value<'_>) -> Option<u64> {
    match *value {
        Value::Unsigned(number) => Some(number),
        Value::Signed(number) => u64::try_from(number).ok(),
        _ => None,
    }
}

/// The shortest decimals that are `number` in float32, if it is one.
fn decimal(number: f64) -> Option<Number> {
    let single = number as f32;
    let exact = f64::from(single).to_bits() == number.to_bits();
    Number::from_f64(if exact { single.to_string().parse().ok()? } else { number })
}
