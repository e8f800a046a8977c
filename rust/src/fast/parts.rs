//! Where a step's time goes.

use std::time::{Duration, Instant};

/// What one part of the steps took.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Spent {
    pub(crate) time: Duration,
    /// Bytes of weights that were read.
    pub(crate) bytes: u64,
}

/// Time and bytes by part. A clock is read some 300 times a token, which takes ten microseconds of it.
#[derive(Debug, Default)]
pub(crate) struct Parts {
    spent: Vec<(&'static str, Spent)>,
    last: Option<Instant>,
}

impl Parts {
    /// A part begins.
    pub(super) fn begin(&mut self) {
        self.last = Some(Instant::now());
    }

    /// The part that ends is `name`, and another one begins.
    pub(super) fn end(&mut self, name: &'static str, bytes: usize) {
        let now = Instant::now();
        let time = self.last.replace(now).map_or(Duration::ZERO, |last| now - last);
        let index = self.spent.iter().position(|(other, _)| *other == name).unwrap_or_else(|| {
            self.spent.push((name, Spent::default()));
            self.spent.len() - 1
        });
        let spent = &mut self.spent[index].1;
        spent.time += time;
        spent.bytes += bytes as u64;
    }

    /// By name, in the order in which they first ended.
    pub(crate) fn all(&self) -> &[(&'static str, Spent)] {
        &self.spent
    }
}
