//! Catches panics of libraries on input from others: for us, a damaged file is a user error, not a violated invariant.
//!
//! Knows no library. Callers that keep state between calls do not reuse an object that panicked.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};
use std::sync::Once;

thread_local! {
    /// Guards around what this thread does now.
    static INSIDE: Cell<usize> = const { Cell::new(0) };
}

/// Runs the work and returns its result, or the message of its panic, which is not printed.
pub(crate) fn guarded<T>(work: impl FnOnce() -> T) -> Result<T, String> {
    static QUIET: Once = Once::new();
    QUIET.call_once(|| {
        let others = take_hook();
        set_hook(Box::new(move |info| {
            if INSIDE.get() == 0 {
                others(info);
            }
        }));
    });
    INSIDE.set(INSIDE.get() + 1);
    let outcome = catch_unwind(AssertUnwindSafe(work));
    INSIDE.set(INSIDE.get() - 1);
    outcome.map_err(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("it gave no reason").to_owned()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_becomes_its_words() {
        assert_eq!(guarded(|| 7), Ok(7));
        let nested = guarded(|| guarded(|| -> i32 { panic!("inner {}", 1) }).unwrap_err() + " and outer");
        assert_eq!(nested.as_deref(), Ok("inner 1 and outer"));
        assert_eq!(guarded(|| std::panic::panic_any(7u8)).unwrap_err(), "it gave no reason");
        assert_eq!(INSIDE.get(), 0);
    }
}
