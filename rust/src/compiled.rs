//! Tokens through compiled programs: which one runs next, with what inputs.
//!
//! A program is a recorded step (`captured.rs`) compiled for one shape: a chunk of a prompt, or several
//! decode steps in one launch. Weights and cache stay with the programs on the device; from here go
//! a few numbers, and back come the new ids. Programs appear while others already run.

use crate::{
    aten::Tensor,
    error::{Error, Result},
};

/// What one launch does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Work {
    /// Reads up to `tokens` tokens of one slot's prompt, and chooses the id that follows.
    Prefill { tokens: usize },
    /// Makes `steps` tokens of every slot.
    Decode { steps: usize },
}

/// A compiled program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Program {
    /// Its number among all programs, by which it is launched.
    pub(crate) number: usize,
    pub(crate) work: Work,
    /// Rows of full layers that it reads. A prefill needs all positions before the chunk below it, a decode
    /// its own too.
    pub(crate) read: usize,
}

/// Where programs run, and where weights and cache live.
pub(crate) trait Programs: Send {
    /// Those that can be launched now.
    ///
    /// # Errors
    /// Whatever ended the compilation of a program that is needed.
    fn ready(&self) -> Result<Vec<Program>>;

    /// Runs one; its results, still on the device.
    ///
    /// # Errors
    /// `Aten` when the device fails; the cache is lost then.
    fn launch(&mut self, program: Program, inputs: Vec<Tensor>) -> Result<Vec<Tensor>>;

    /// Makes an empty cache in place of the old one.
    ///
    /// # Errors
    /// `Aten` when the device fails.
    fn reset(&mut self) -> Result<()>;
}

/// Launches since the engine was loaded.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counts {
    pub(crate) launches: u64,
    /// Transfers of results to the host, each of which waits for the device.
    pub(crate) host_reads: u64,
    /// Tokens that decode launches made for the slot in use, those thrown away included.
    pub(crate) tokens: u64,
}

/// One sequence in one slot, run by programs.
pub(crate) struct Compiled {
    programs: Box<dyn Programs>,
    slots: usize,
    like: Tensor,
    counts: Counts,
    /// The last launch failed, and the cache with it.
    lost: bool,
    /// What the last decode launch left on the device: next ids and positions, and the position of the
    /// slot in use. Input of the next launch if that goes on where it ended.
    left: Option<(Tensor, Tensor, usize)>,
}

impl Compiled {
    pub(crate) fn new(programs: Box<dyn Programs>, slots: usize, like: Tensor) -> Self {
        let counts = Counts::default();
        Self { programs, slots, like, counts, lost: false, left: None }
    }

    pub(crate) fn counts(&self) -> Counts {
        self.counts
    }

    /// Reads a whole prompt into `slot` and gives the id that follows it.
    ///
    /// # Errors
    /// `Aten` when the device fails.
    pub(crate) fn prefill(&mut self, slot: usize, ids: &[i64]) -> Result<i64> {
        if self.lost {
            self.programs.reset()?;
            self.lost = false;
        }
        self.left = None;
        let mut start = 0;
        loop {
            let rest = &ids[start..];
            let program = choose_prefill(&self.programs.ready()?, rest.len(), start)?;
            let Work::Prefill { tokens } = program.work else { return Err(no_program("prefill")) };
            let count = rest.len().min(tokens);
            let mut padded = rest[..count].to_vec();
            padded.resize(tokens, 0);
            let number = |n: usize| Tensor::from_i64(&[n as i64], &[1], &self.like);
            let inputs = vec![
                Tensor::from_i64(&padded, &[1, tokens as i64], &self.like)?,
                number(slot)?,
                number(start)?,
                number(count)?,
            ];
            let results = self.launch(program, inputs)?;
            start += count;
            if start == ids.len() {
                let next = self.read(&results[0])?;
                return next.first().copied().ok_or_else(|| no_program("prefill"));
            }
        }
    }

    /// Feeds `id` at `position` of `slot` and gives the ids that follow: at least one, at most `most` if there
    /// is a program that short.
    ///
    /// # Errors
    /// `Aten` when the device fails.
    pub(crate) fn decode(
        &mut self,
        slot: usize,
        (id, position): (i64, usize),
        most: usize,
    ) -> Result<Vec<i64>> {
        let program = choose_decode(&self.programs.ready()?, position, most)?;
        let Work::Decode { steps } = program.work else { return Err(no_program("decode")) };
        let (ids, positions) = match self.left.take() {
            Some((ids, positions, at)) if at == position => (ids, positions),
            _ => {
                let row = |value: i64| {
                    let mut values = vec![0; self.slots];
                    values[slot] = value;
                    Tensor::from_i64(&values, &[self.slots as i64], &self.like)
                };
                (row(id)?, row(position as i64)?)
            }
        };
        let mut results = self.launch(program, vec![ids, positions])?.into_iter();
        let (Some(made), Some(ids), Some(positions)) =
            (results.next(), results.next(), results.next())
        else {
            return Err(Error::Internal("expected three results of a decode program".into()));
        };
        let made = self.read(&made)?; // [steps, slots]
        self.counts.tokens += steps as u64;
        let mut new: Vec<_> = made.chunks(self.slots).map(|row| row[slot]).collect();
        if new.len() <= most {
            self.left = Some((ids, positions, position + steps));
        }
        new.truncate(most);
        Ok(new)
    }

    fn launch(&mut self, program: Program, inputs: Vec<Tensor>) -> Result<Vec<Tensor>> {
        self.counts.launches += 1;
        let results = self.programs.launch(program, inputs);
        self.lost = results.is_err();
        results
    }

    /// Device errors of a launch may show only here.
    fn read(&mut self, result: &Tensor) -> Result<Vec<i64>> {
        self.counts.host_reads += 1;
        let values = result.read_i64();
        self.lost = values.is_err();
        values
    }
}

/// For `rest` more tokens from position `start` on: the smallest chunk that takes them all, else the largest;
/// of these the one that reads the fewest rows.
fn choose_prefill(ready: &[Program], rest: usize, start: usize) -> Result<Program> {
    let fits = ready.iter().filter(|program| program.read >= start);
    let key = |program: &&Program| match program.work {
        Work::Prefill { tokens } if tokens >= rest => Some((0, tokens, program.read)),
        Work::Prefill { tokens } => Some((1, usize::MAX - tokens, program.read)),
        Work::Decode { .. } => None,
    };
    let best = fits.filter(|program| key(program).is_some()).min_by_key(key);
    best.copied().ok_or_else(|| no_program("prefill"))
}

/// For tokens from `position` on: of the programs that read enough rows and make no more than `most` tokens, the
/// one that reads the fewest rows, and of these the one with the most steps. If all make more, the shortest.
fn choose_decode(ready: &[Program], position: usize, most: usize) -> Result<Program> {
    let key = |program: &&Program| match program.work {
        Work::Decode { steps } if program.read < position + steps => None,
        Work::Decode { steps } if steps <= most => Some((0, program.read, usize::MAX - steps)),
        Work::Decode { steps } => Some((1, steps, program.read)),
        Work::Prefill { .. } => None,
    };
    let best = ready.iter().filter(|program| key(program).is_some()).min_by_key(key);
    best.copied().ok_or_else(|| no_program("decode"))
}

fn no_program(work: &str) -> Error {
    Error::Internal(format!("no compiled program for this {work}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn programs() -> Vec<Program> {
        let prefill = [(64, 8224), (512, 8224), (64, 0), (512, 0)];
        let decode = [(8, 8224), (32, 8224), (8, 1024), (32, 1024)];
        let prefill = prefill.map(|(tokens, read)| (Work::Prefill { tokens }, read));
        let decode = decode.map(|(steps, read)| (Work::Decode { steps }, read));
        let all = prefill.into_iter().chain(decode).enumerate();
        all.map(|(number, (work, read))| Program { number, work, read }).collect()
    }

    fn prefill(rest: usize, start: usize) -> (usize, usize) {
        let program = choose_prefill(&programs(), rest, start).unwrap();
        let Work::Prefill { tokens } = program.work else { panic!("{program:?}") };
        (tokens, program.read)
    }

    fn decode(position: usize, most: usize) -> (usize, usize) {
        let program = choose_decode(&programs(), position, most).unwrap();
        let Work::Decode { steps } = program.work else { panic!("{program:?}") };
        (steps, program.read)
    }

    #[test]
    fn a_prompt_takes_the_smallest_chunk_that_holds_it_and_reads_no_empty_rows() {
        assert_eq!(prefill(1, 0), (64, 0));
        assert_eq!(prefill(64, 0), (64, 0));
        assert_eq!(prefill(65, 0), (512, 0));
        assert_eq!(prefill(5000, 0), (512, 0));
        assert_eq!(prefill(10, 512), (64, 8224));
        assert_eq!(prefill(5000, 512), (512, 8224));
    }

    #[test]
    fn decoding_reads_the_shortest_rows_that_hold_every_position() {
        assert_eq!(decode(10, 32), (32, 1024));
        assert_eq!(decode(10, 31), (8, 1024));
        assert_eq!(decode(10, 1), (8, 1024));
        assert_eq!(decode(1024 - 8, 8), (8, 1024));
        assert_eq!(decode(1024 - 8, 32), (8, 1024));
        assert_eq!(decode(1024 - 7, 8), (8, 8224));
        assert_eq!(decode(8191, 1), (8, 8224));
    }

    #[test]
    fn a_program_that_is_not_there_yet_is_replaced_by_a_larger_one() {
        let general: Vec<_> = programs().into_iter().filter(|p| p.number % 4 == 0).collect();
        let program = choose_decode(&general, 3, 32).unwrap();
        assert_eq!((program.work, program.read), (Work::Decode { steps: 8 }, 8224));
        assert_eq!(choose_prefill(&general, 500, 0).unwrap().work, Work::Prefill { tokens: 64 });
    }
}
