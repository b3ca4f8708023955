//! Processes a stream of items on several threads, with results in order and a limited number of items in flight.
//!
//! Does not know what the work is. Work that takes long on one item asks [`is_over`].

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Items that one thread takes at a time.
const CHUNK: usize = 128;

/// The period at which a caller is asked whether to go on while one item takes long.
const POLL: Duration = Duration::from_millis(50);

thread_local! {
    static OVER: RefCell<Arc<AtomicBool>> = RefCell::default();
}

/// Returns true if no thread waits for the work of this one any more.
pub(crate) fn is_over() -> bool {
    OVER.with_borrow(|over| over.load(Ordering::Relaxed))
}

/// Ends the work of all threads when it is dropped.
struct End(Arc<AtomicBool>);

impl Drop for End {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Applies `work` to every item on at least one thread and gives item and result to `take`, in order. The calling
/// thread reads the items, takes the results and calls `go_on` while it waits. Ends at the first error of either.
pub(crate) fn in_order<T: Send, R: Send, E>(
    mut items: impl Iterator<Item = T>,
    workers: usize,
    go_on: &dyn Fn() -> Result<(), E>,
    work: &(dyn Fn(&T) -> R + Sync),
    take: &mut dyn FnMut(T, R) -> Result<(), E>,
) -> Result<(), E> {
    let workers = workers.max(1);
    let over = Arc::<AtomicBool>::default();
    let (to_do, next_to_do) = channel::<(usize, Vec<T>)>();
    let (done, results) = channel();
    let next_to_do = Mutex::new(next_to_do);
    std::thread::scope(|scope| {
        for _ in 0..workers {
            let (next_to_do, done) = (&next_to_do, done.clone());
            let over = over.clone();
            scope.spawn(move || worker(next_to_do, &done, over, work));
        }
        drop(done);
        let _end = End(over);
        // Dropped on every way out, so that the workers come to an end.
        let to_do = to_do;
        let (mut sent, mut taken, mut ended) = (0, 0, false);
        let mut early = BTreeMap::new();
        loop {
            while !ended && sent - taken < 2 * workers {
                let chunk: Vec<T> = items.by_ref().take(CHUNK).collect();
                ended = chunk.is_empty();
                if !ended {
                    to_do.send((sent, chunk)).expect("workers wait for work until there is none");
                    sent += 1;
                }
            }
            if taken == sent {
                return Ok(());
            }
            let (number, outcome) = loop {
                match results.recv_timeout(POLL) {
                    Ok(received) => break received,
                    Err(RecvTimeoutError::Timeout) => go_on()?,
                    Err(RecvTimeoutError::Disconnected) => panic!("every chunk comes back"),
                }
            };
            early.insert(number, outcome);
            while let Some(outcome) = early.remove(&taken) {
                taken += 1;
                let pairs: Vec<(T, R)> = outcome.unwrap_or_else(|panic| resume_unwind(panic));
                pairs.into_iter().try_for_each(|(item, result)| take(item, result))?;
            }
        }
    })
}

type Outcome<T, R> = (usize, std::thread::Result<Vec<(T, R)>>);

fn worker<T, R>(
    next: &Mutex<Receiver<(usize, Vec<T>)>>,
    done: &Sender<Outcome<T, R>>,
    over: Arc<AtomicBool>,
    work: &(dyn Fn(&T) -> R + Sync),
) {
    OVER.set(over);
    loop {
        let received = next.lock().expect("no worker panics with the lock held").recv();
        let Ok((number, chunk)) = received else { return };
        let left = |_: &T| !is_over();
        let pairs = move || chunk.into_iter().take_while(left).map(|item| (work(&item), item));
        let pairs = move || pairs().map(|(r, t)| (t, r)).collect();
        if done.send((number, catch_unwind(AssertUnwindSafe(pairs)))).is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_come_in_the_order_of_the_items() {
        for workers in [0, 1, 2, 5] {
            let mut seen = Vec::new();
            let work = |n: &u64| {
                std::thread::sleep(std::time::Duration::from_micros(n * 7919 % 50));
                n * n
            };
            let taken: Result<(), ()> = in_order(0..1500u64, workers, &|| Ok(()), &work, &mut |n, square| {
                assert_eq!(square, n * n);
                seen.push(n);
                Ok(())
            });
            assert!(taken.is_ok() && seen.iter().copied().eq(0..1500), "{workers} workers");
        }
    }

    #[test]
    fn an_error_ends_the_work() {
        let mut count = 0;
        let mut take = |n: usize, ()| {
            count += 1;
            if n == 300 { Err(n) } else { Ok(()) }
        };
        assert_eq!(in_order(0.., 3, &|| Ok(()), &|_| (), &mut take), Err(300));
        assert_eq!(count, 301);
    }

    #[test]
    #[should_panic(expected = "item 700")]
    fn a_panic_of_the_work_is_the_callers() {
        let work = |n: &usize| assert!(*n != 700, "item {n}");
        let _ = in_order(0..5000, 2, &|| Ok(()), &work, &mut |_, ()| Ok::<(), ()>(()));
    }

    #[test]
    fn an_item_that_takes_long_is_given_up() {
        for workers in [1, 3] {
            let waits = std::cell::Cell::new(0);
            let go_on = || {
                waits.set(waits.get() + 1);
                if waits.get() == 3 { Err("stop") } else { Ok(()) }
            };
            let work = |_: &i32| while !is_over() {};
            assert_eq!(in_order(0..5, workers, &go_on, &work, &mut |_, ()| Ok(())), Err("stop"));
        }
        assert!(!is_over());
    }
}
