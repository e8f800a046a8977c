//! A place in a file's bytes that only moves forward, and never beyond the end.

/// A value, or what is wrong with it, without the file's and the key's names, which the caller knows.
pub(super) type Checked<T> = Result<T, String>;

/// Reads little-endian numbers and texts.
pub(super) struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    /// Another cursor at the same place.
    pub(super) fn fork(&self) -> Self {
        Self { bytes: self.bytes, at: self.at }
    }

    /// Bytes read so far.
    pub(super) fn at(&self) -> usize {
        self.at
    }

    pub(super) fn left(&self) -> u64 {
        (self.bytes.len() - self.at) as u64
    }

    /// The next `count` bytes.
    pub(super) fn take(&mut self, count: u64) -> Checked<&'a [u8]> {
        if count > self.left() {
            return Err(format!(
                "expected {count} bytes at byte {}, found {} (is the file cut short?)",
                self.at,
                self.left()
            ));
        }
        let start = self.at;
        self.at += count as usize;
        Ok(&self.bytes[start..self.at])
    }

    fn array<const N: usize>(&mut self) -> Checked<[u8; N]> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N as u64)?);
        Ok(array)
    }

    pub(super) fn u8(&mut self) -> Checked<u8> {
        self.array().map(u8::from_le_bytes)
    }

    pub(super) fn u16(&mut self) -> Checked<u16> {
        self.array().map(u16::from_le_bytes)
    }

    pub(super) fn u32(&mut self) -> Checked<u32> {
        self.array().map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self) -> Checked<u64> {
        self.array().map(u64::from_le_bytes)
    }

    /// A length and as many bytes, at most `most`, of UTF-8.
    pub(super) fn text(&mut self, most: u64) -> Checked<&'a str> {
        let at = self.at;
        let length = self.u64()?;
        if length > most {
            return Err(format!(
                "expected a text of at most {most} bytes at byte {at}, found {length}"
            ));
        }
        std::str::from_utf8(self.take(length)?)
            .map_err(|_| format!("expected UTF-8 at byte {at}, found other bytes"))
    }
}
