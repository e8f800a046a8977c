//! One function for every row of a matrix or two, on all threads.

use super::{Kernels, check_len, memory::Shared};
use crate::error::Result;

/// Rows that a thread claims at once.
const ROWS: usize = 4;

/// What is done with one row.
type Work<'a, A, B> = dyn Fn(usize, &mut [A], &mut [B]) + Sync + 'a;

/// Calls `work(row, of_a, of_b)` for every row of `a` `[rows, a_width]` and `b` `[rows, b_width]`; `b` may have no columns.
///
/// # Errors
/// `Internal` when one has another number of rows, or a thread panicked.
#[expect(unsafe_code, reason = "threads write different rows")]
pub(crate) fn each_row<A: Send, B: Send>(
    kernels: &Kernels,
    rows: usize,
    (a, a_width): (&mut [A], usize),
    (b, b_width): (&mut [B], usize),
    work: &Work<'_, A, B>,
) -> Result<()> {
    check_len("rows", a.len(), rows * a_width)?;
    check_len("rows", b.len(), rows * b_width)?;
    let (a, b) = (Shared::new(a), Shared::new(b));
    kernels.pool.run(rows.div_ceil(ROWS), &|piece| {
        for row in piece * ROWS..((piece + 1) * ROWS).min(rows) {
            // SAFETY: no other piece has this row.
            let a = unsafe { a.part(row * a_width..(row + 1) * a_width) };
            // SAFETY: as above.
            let b = unsafe { b.part(row * b_width..(row + 1) * b_width) };
            work(row, a, b);
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_is_worked_on_once_with_its_own_number() {
        let kernels = Kernels::new(3, None).unwrap();
        for rows in [0, 1, 9, 40] {
            let (mut a, mut b) = (vec![0; rows * 3], vec![0; rows * 2]);
            each_row(&kernels, rows, (&mut a, 3), (&mut b, 2), &|row, a, b| {
                a.iter_mut().for_each(|a| *a += row);
                b.iter_mut().for_each(|b| *b += 2 * row);
            })
            .unwrap();
            assert_eq!(a, (0..rows * 3).map(|i| i / 3).collect::<Vec<_>>());
            assert_eq!(b, (0..rows * 2).map(|i| i / 2 * 2).collect::<Vec<_>>());
        }
        assert!(each_row(&kernels, 2, (&mut [0; 5], 3), (&mut [(); 0], 0), &|_, _, _| ()).is_err());
    }
}
