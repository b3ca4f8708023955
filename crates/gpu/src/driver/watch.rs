//! The limits on a wait for a GPU that does not answer: a timeout, or the failure of another participant. Knows neither
//! GPU nor participant.

use std::fmt;
use std::time::{Duration, Instant};

use crate::error::{Error, Result};

/// Number of polls without a pause between them: most waits are short.
const AT_ONCE: usize = 200;

/// The pause between later polls.
const PAUSE: Duration = Duration::from_micros(50);

/// The timeout of a wait, and the reason that may end it earlier.
pub struct Watch {
    pub timeout: Duration,
    /// Returns the reason why nothing will come any more, if there is one.
    pub ended: Box<dyn Fn() -> Option<String> + Send + Sync>,
}

impl Watch {
    /// Waits until `done` returns true. The error names `what` was waited for.
    pub fn wait(&self, what: impl Fn() -> String, mut done: impl FnMut() -> Result<bool>) -> Result<()> {
        let begin = Instant::now();
        let mut asked = 0;
        while !done()? {
            if let Some(why) = (self.ended)() {
                return Err(Error::Waited { what: what(), why, context: String::new() });
            }
            if begin.elapsed() > self.timeout {
                let why = format!("it did not answer for {} s", self.timeout.as_secs());
                return Err(Error::Waited { what: what(), why, context: String::new() });
            }
            asked += 1;
            if asked > AT_ONCE {
                std::thread::sleep(PAUSE);
            }
        }
        Ok(())
    }

    /// Returns the failure of another participant that is reported within a moment, in place of an error that may
    /// follow from it.
    pub fn root_of(&self, error: Error) -> Error {
        let moment = Watch { timeout: Duration::from_secs(2).min(self.timeout), ended: Box::new(|| None) };
        match moment.wait(String::new, || Ok((self.ended)().is_some())) {
            Ok(()) => Error::Waited {
                what: "the other ranks".into(),
                why: (self.ended)().unwrap_or_default(),
                context: error.to_string(),
            },
            Err(_) => error,
        }
    }
}

impl fmt::Debug for Watch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "at most {} s", self.timeout.as_secs())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn a_wait_ends_when_it_is_done_when_others_fail_and_in_time() {
        let watch = |timeout, ended: fn() -> Option<String>| Watch { timeout, ended: Box::new(ended) };
        let long = Duration::from_secs(600);
        let asked = AtomicUsize::new(0);
        watch(long, || None).wait(String::new, || Ok(asked.fetch_add(1, Ordering::Relaxed) == 300)).unwrap();
        let lost = watch(long, || Some("node 1 is gone".into())).wait(|| "GPU 0".into(), || Ok(false)).unwrap_err();
        assert_eq!(lost.to_string(), "GPU 0: node 1 is gone");
        let late = watch(Duration::from_millis(20), || None).wait(|| "GPU 0".into(), || Ok(false)).unwrap_err();
        assert_eq!(late.to_string(), "GPU 0: it did not answer for 0 s");
    }

    #[test]
    fn the_failure_of_another_is_told_in_place_of_what_came_of_it() {
        let of = |ended: fn() -> Option<String>| Watch { timeout: Duration::from_millis(20), ended: Box::new(ended) };
        let error =
            || Error::Unsupported { what: "a call".into(), reason: "remote error".into(), context: String::new() };
        let message = of(|| Some("node 1 is gone".into())).root_of(error()).to_string();
        assert!(
            message.starts_with("the other ranks: node 1 is gone") && message.contains("remote error"),
            "{message}"
        );
        assert_eq!(of(|| None).root_of(error()).to_string(), error().to_string());
    }
}
