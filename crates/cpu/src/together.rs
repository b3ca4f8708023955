//! Work that several ranks do at the same time, a thread for each. Knows who failed first; not what the work is.

use std::{panic, thread};

use program::BackendError;

use crate::fabric::RankHandle;

/// Runs `run` for every rank handle at the same time, each with an item of `given`. The error is that of the rank that
/// failed first, and names it as a `member`; the others have stopped. The items are dropped when a failure is known:
/// links that end make the neighbors fail too.
pub(crate) fn together<G: Send, T: Send>(
    member: &str,
    handles: &[RankHandle],
    given: impl Iterator<Item = G>,
    run: impl Fn(&mut G) -> Result<T, BackendError> + Sync,
) -> Result<Vec<T>, BackendError> {
    let run = &run;
    let on_rank = |handle: &RankHandle, mut given: G| {
        let result = panic::catch_unwind(panic::AssertUnwindSafe(|| run(&mut given)));
        match &result {
            Ok(Ok(_)) => {}
            Ok(Err(error)) => handle.fail(error.to_string()),
            Err(_) => handle.fail("it panicked".into()),
        }
        drop(given);
        result
    };
    let results: Vec<_> = thread::scope(|scope| {
        let threads: Vec<_> =
            handles.iter().zip(given).map(|(handle, given)| scope.spawn(move || on_rank(handle, given))).collect();
        threads.into_iter().map(|thread| thread.join().expect("a rank's thread catches what it runs")).collect()
    });
    let mut done = Vec::new();
    let mut failed = false;
    for result in results {
        match result {
            Err(payload) => panic::resume_unwind(payload),
            Ok(Ok(value)) => done.push(value),
            Ok(Err(_)) => failed = true,
        }
    }
    match handles[0].failure().filter(|_| failed) {
        Some((number, why)) => Err(BackendError::Failed {
            call: format!("{member} {number} of {}", handles[0].count()),
            message: format!("{why}; the other {member}s were stopped"),
            context: None,
        }),
        None => Ok(done),
    }
}
