//! Processes a stream of items on several threads, with results in order and a limited number of items in flight.
//!
//! Does not know what the work is.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, Sender, channel};

/// Items that one thread takes at a time.
const CHUNK: usize = 128;

/// Applies `work` to every item and gives item and result to `take`, in order. The calling thread reads the items and
/// takes the results; with up to one worker it works too. Ends at the first error of `take`.
pub(crate) fn in_order<T: Send, R: Send, E>(
    mut items: impl Iterator<Item = T>,
    workers: usize,
    work: &(dyn Fn(&T) -> R + Sync),
    take: &mut dyn FnMut(T, R) -> Result<(), E>,
) -> Result<(), E> {
    if workers <= 1 {
        return items.try_for_each(|item| {
            let result = work(&item);
            take(item, result)
        });
    }
    let (to_do, next_to_do) = channel::<(usize, Vec<T>)>();
    let (done, results) = channel();
    let next_to_do = Mutex::new(next_to_do);
    std::thread::scope(|scope| {
        for _ in 0..workers {
            let (next_to_do, done) = (&next_to_do, done.clone());
            scope.spawn(move || worker(next_to_do, &done, work));
        }
        drop(done);
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
            let (number, outcome) = results.recv().expect("every chunk comes back");
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
    work: &(dyn Fn(&T) -> R + Sync),
) {
    loop {
        let received = next.lock().expect("no worker panics with the lock held").recv();
        let Ok((number, chunk)) = received else { return };
        let pairs = move || chunk.into_iter().map(|item| (work(&item), item)).map(|(r, t)| (t, r)).collect();
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
            let taken: Result<(), ()> = in_order(0..1500u64, workers, &work, &mut |n, square| {
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
        assert_eq!(in_order(0.., 3, &|_| (), &mut take), Err(300));
        assert_eq!(count, 301);
    }

    #[test]
    #[should_panic(expected = "item 700")]
    fn a_panic_of_the_work_is_the_callers() {
        let work = |n: &usize| assert!(*n != 700, "item {n}");
        let _ = in_order(0..5000, 2, &work, &mut |_, ()| Ok::<(), ()>(()));
    }
}
