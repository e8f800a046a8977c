//! Threads for the products of a token: pieces of work claimed one by one, by whoever is free.
//!
//! A static share would wait for the slowest thread, which on a busy machine is one that does not run. So each thread begins
//! with a share of its own, piece after piece, which is how memory is read fastest, and then helps the others with theirs.
//! Between two products a worker looks for the next one for some microseconds, then sleeps.

use std::{
    ops::Range,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread::JoinHandle,
};

use crate::error::{Error, Result};

/// Looks at the counter before a worker sleeps: some 50 microseconds. Miri interprets each of them.
const PATIENCE: usize = if cfg!(miri) { 3 } else { 10_000 };

type Work<'a> = dyn Fn(usize) + Sync + 'a;

/// A counter in a cache line of its own.
#[repr(align(128))]
struct Apart(AtomicUsize);

/// What the caller and its workers share.
struct Shared {
    /// Counts jobs.
    job: AtomicUsize,
    /// Pieces of the job.
    count: AtomicUsize,
    /// Of each thread's share, the next piece.
    next: Vec<Apart>,
    /// Workers that have joined the job and not left it.
    busy: AtomicUsize,
    /// The job while it may be joined; a worker that comes later, because it did not run, is not waited for.
    work: Mutex<Option<&'static Work<'static>>>,
    wake: Condvar,
    sleepers: AtomicUsize,
    ending: AtomicBool,
    /// A worker panicked at the job.
    failed: AtomicBool,
}

/// A caller and its workers. One job at a time.
pub(crate) struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
}

impl Pool {
    /// `threads` in all, the caller's own among them.
    pub(crate) fn new(threads: usize) -> Self {
        let shared = Arc::new(Shared {
            job: AtomicUsize::new(0),
            count: AtomicUsize::new(0),
            next: (0..threads.max(1)).map(|_| Apart(AtomicUsize::new(0))).collect(),
            busy: AtomicUsize::new(0),
            work: Mutex::new(None),
            wake: Condvar::new(),
            sleepers: AtomicUsize::new(0),
            ending: AtomicBool::new(false),
            failed: AtomicBool::new(false),
        });
        let workers = (1..threads)
            .filter_map(|thread| {
                let shared = Arc::clone(&shared);
                // A thread that the system refuses is one that does not help.
                std::thread::Builder::new()
                    .name("kernels".into())
                    .spawn(move || shared.serve(thread))
                    .ok()
            })
            .collect();
        Self { shared, workers }
    }

    /// Threads that work on a job.
    pub(crate) fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `work` with every number below `count`, and returns when all calls have.
    ///
    /// # Errors
    /// `Internal` when a worker panicked.
    #[expect(unsafe_code, reason = "workers outlive the borrow that a job holds")]
    pub(crate) fn run(&self, count: usize, work: &Work<'_>) -> Result<()> {
        if self.workers.is_empty() || count < 2 {
            (0..count).for_each(work);
            return Ok(());
        }
        let shared = &*self.shared;
        // SAFETY: a worker takes `work` and counts itself as busy under the lock, and is done with it when it counts itself
        // out. This function leaves, by whatever way, only after `Finish` has taken `work` back under the
        // lock and seen that nobody is busy.
        let lasting = unsafe { std::mem::transmute::<&Work<'_>, &'static Work<'static>>(work) };
        shared.count.store(count, Ordering::Relaxed);
        for (thread, next) in shared.next.iter().enumerate() {
            next.0.store(shared.share(thread, count).start, Ordering::Relaxed);
        }
        let finish = Finish(shared);
        *shared.lock() = Some(lasting);
        shared.job.fetch_add(1, Ordering::SeqCst);
        if shared.sleepers.load(Ordering::SeqCst) > 0 {
            drop(shared.lock());
            shared.wake.notify_all();
        }
        shared.claim(0, work);
        drop(finish);
        if shared.failed.swap(false, Ordering::Acquire) {
            return Err(Error::Internal("a thread of the kernels panicked".into()));
        }
        Ok(())
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.ending.store(true, Ordering::Release);
        drop(self.shared.lock());
        self.shared.wake.notify_all();
        for worker in self.workers.drain(..) {
            // A worker that panicked has said so already.
            drop(worker.join());
        }
    }
}

/// Lets no worker join the job any more, and waits for those that have.
struct Finish<'a>(&'a Shared);

impl Drop for Finish<'_> {
    fn drop(&mut self) {
        *self.0.lock() = None;
        let mut looks = 0_usize;
        while self.0.busy.load(Ordering::Acquire) > 0 {
            looks += 1;
            // The last pieces may be with a thread that does not run just now.
            if looks > PATIENCE { std::thread::yield_now() } else { std::hint::spin_loop() }
        }
    }
}

/// Takes a worker off the job, also when the work panicked.
struct Leave<'a>(&'a Shared);

impl Drop for Leave<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.failed.store(true, Ordering::Relaxed);
        }
        self.0.busy.fetch_sub(1, Ordering::Release);
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Option<&'static Work<'static>>> {
        self.work.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The pieces with which `thread` begins.
    fn share(&self, thread: usize, count: usize) -> Range<usize> {
        let threads = self.next.len();
        thread * count / threads..(thread + 1) * count / threads
    }

    /// Does `thread`'s pieces, then what is left of the others'.
    fn claim(&self, thread: usize, work: &Work<'_>) {
        let (count, threads) = (self.count.load(Ordering::Relaxed), self.next.len());
        for owner in (thread..threads).chain(0..thread) {
            let end = self.share(owner, count).end;
            loop {
                let piece = self.next[owner].0.fetch_add(1, Ordering::Relaxed);
                if piece >= end {
                    break;
                }
                work(piece);
            }
        }
    }

    /// A worker's life.
    fn serve(&self, thread: usize) {
        let mut seen = 0;
        while let Some(job) = self.wait_for_job(seen) {
            seen = job;
            let joined = {
                let work = self.lock();
                self.busy.fetch_add(usize::from(work.is_some()), Ordering::Relaxed);
                *work
            };
            if let Some(work) = joined {
                let _leave = Leave(self);
                self.claim(thread, work);
            }
        }
    }

    /// The number of a job other than `seen`; `None` when the pool ends.
    fn wait_for_job(&self, seen: usize) -> Option<usize> {
        let there = || Some(self.job.load(Ordering::SeqCst)).filter(|&job| job != seen);
        let ends = || self.ending.load(Ordering::Acquire);
        for _ in 0..PATIENCE {
            if there().is_some() || ends() {
                return there();
            }
            std::hint::spin_loop();
        }
        let mut guard = self.lock();
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        while there().is_none() && !ends() {
            guard = self.wake.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
        there()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_piece_of_every_job_is_done_once() {
        for threads in [1, 2, 5] {
            let pool = Pool::new(threads);
            for count in [0, 1, 2, 3, 100] {
                for _ in 0..if cfg!(miri) { 2 } else { 50 } {
                    let done: Vec<_> = (0..count).map(|_| AtomicUsize::new(0)).collect();
                    pool.run(count, &|piece| {
                        done[piece].fetch_add(1, Ordering::Relaxed);
                    })
                    .unwrap();
                    assert!(done.iter().all(|times| times.load(Ordering::Relaxed) == 1));
                }
            }
        }
    }

    #[test]
    fn workers_that_sleep_wake_up_for_a_job() {
        let pool = Pool::new(3);
        for _ in 0..5 {
            std::thread::sleep(std::time::Duration::from_millis(20));
            let sum = AtomicUsize::new(0);
            pool.run(64, &|piece| {
                sum.fetch_add(piece, Ordering::Relaxed);
            })
            .unwrap();
            assert_eq!(sum.load(Ordering::Relaxed), 64 * 63 / 2);
        }
    }

    #[test]
    fn a_worker_that_panics_fails_its_job_and_no_later_one() {
        let pool = Pool::new(3);
        let caller = std::thread::current().id();
        let (mut failures, panics) = (0, AtomicUsize::new(0));
        for _ in 0..20 {
            let result = pool.run(64, &|piece| {
                std::thread::sleep(std::time::Duration::from_micros(50));
                if piece == 33 && std::thread::current().id() != caller {
                    panics.fetch_add(1, Ordering::Relaxed);
                    panic!("on purpose");
                }
            });
            failures += usize::from(result.is_err());
        }
        assert_eq!(failures, panics.into_inner());
        pool.run(64, &|_| ()).unwrap();
    }
}
