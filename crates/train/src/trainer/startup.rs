//! The time from the command to the first step, by phase.
//!
//! Knows a clock and the age of the process; the callers name the phases.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use serde_json::{Value, json};

/// A phase shorter than this is not worth a word to people.
const WORTH_TELLING: f64 = 0.005;

/// True once a run of this process has begun.
static BEGUN: AtomicBool = AtomicBool::new(false);

/// The completed phases of starting a run.
#[derive(Clone, Debug)]
pub(crate) struct Startup {
    last: Instant,
    phases: Vec<(&'static str, f64)>,
}

impl Startup {
    /// Begins with what the process did before: the interpreter, its modules, options and model. Of several runs of a process
    /// only the first has that before it.
    pub fn begin() -> Startup {
        let is_first = !BEGUN.swap(true, Ordering::Relaxed);
        let before = process_age().filter(|_| is_first).map(|age| ("interpreter, options and model", age));
        Startup { last: Instant::now(), phases: before.into_iter().collect() }
    }

    /// Everything since the last call was this phase.
    pub fn done(&mut self, phase: &'static str) {
        self.split(&[], phase);
    }

    /// The parts, whose seconds are known, and what is left of the time since the last call.
    pub fn split(&mut self, parts: &[(&'static str, f64)], rest: &'static str) {
        let now = Instant::now();
        let left = now.duration_since(self.last).as_secs_f64() - parts.iter().map(|part| part.1).sum::<f64>();
        self.phases.extend_from_slice(parts);
        self.phases.push((rest, left.max(0.0)));
        self.last = now;
    }

    /// `First step after 4.31 s: data 0.40, plan 0.82, …`
    pub fn line(&self) -> String {
        let all: f64 = self.phases.iter().map(|phase| phase.1).sum();
        let reported = self.phases.iter().filter(|phase| phase.1 >= WORTH_TELLING);
        let parts: Vec<String> = reported.map(|(name, seconds)| format!("{name} {seconds:.2}")).collect();
        format!("First step after {all:.2} s: {}", parts.join(", "))
    }

    /// Converts it to an event of the log, with times in seconds.
    pub fn to_json(&self) -> Value {
        let phases: Vec<Value> =
            self.phases.iter().map(|(name, seconds)| json!({"phase": name, "seconds": seconds})).collect();
        json!({"event": "startup", "phases": phases, "seconds": self.phases.iter().map(|phase| phase.1).sum::<f64>()})
    }
}

/// Seconds since this process was started, to a hundredth; none where the system does not report it.
fn process_age() -> Option<f64> {
    let read = |path: &str| std::fs::read_to_string(path).ok();
    let up: f64 = read("/proc/uptime")?.split_whitespace().next()?.parse().ok()?;
    let status = read("/proc/self/stat")?;
    // The name of the process, in brackets, may hold blanks; the time of its start is the 20th field after it.
    let started: f64 = status.rsplit(')').next()?.split_whitespace().nth(19)?.parse().ok()?;
    Some((up - started / TICKS).max(0.0))
}

/// Ticks of the clock in which the kernel reports times, in a second: on Linux for x86-64 always this.
const TICKS: f64 = 100.0;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn phases_add_up_to_the_whole() {
        let mut startup = Startup::begin();
        std::thread::sleep(std::time::Duration::from_millis(30));
        startup.split(&[("kernels", 0.01)], "weights");
        startup.done("first step");
        let text = startup.line();
        assert!(text.starts_with("First step after ") && text.contains(" kernels 0.01, weights 0."), "{text}");
        assert!(!text.contains("first step"), "no time passed: {text}");
        let event = startup.to_json();
        let sum: f64 = event["phases"].as_array().unwrap().iter().map(|of| of["seconds"].as_f64().unwrap()).sum();
        assert!((sum - event["seconds"].as_f64().unwrap()).abs() < 1e-9 && sum >= 0.03);
    }

    #[test]
    fn a_later_run_does_not_count_what_was_before_the_first() {
        Startup::begin();
        let mut later = Startup::begin();
        later.done("data");
        assert_eq!(later.phases.iter().map(|of| of.0).collect::<Vec<_>>(), ["data"]);
    }

    #[test]
    fn this_process_has_an_age() {
        let age = process_age().unwrap();
        assert!((0.0..86_400.0).contains(&age), "{age}");
    }
}
