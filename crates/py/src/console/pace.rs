//! The time that a run has taken in this process, and the time that it will take.

use std::time::{Duration, Instant};

/// The beginning of the process's part of a run, and the pace of its steps.
pub struct Pace {
    begun: Instant,
    /// The first step that this process ended: when, and how many were done then.
    first: Option<(Instant, u64)>,
}

impl Pace {
    pub fn begin(now: Instant) -> Pace {
        Pace { begun: now, first: None }
    }

    /// Time gone and left, where `done` of `total` steps are done. The first step of a process takes longer than the others
    /// and says nothing of them.
    pub fn words(&mut self, now: Instant, done: u64, total: u64) -> String {
        let gone = short(now.duration_since(self.begun));
        let (at, before) = *self.first.get_or_insert((now, done));
        match done.saturating_sub(before) {
            0 => format!("{gone} gone"),
            steps => {
                let left = now.duration_since(at).mul_f64(total.saturating_sub(done) as f64 / steps as f64);
                format!("{gone} gone, {} left", short(left))
            }
        }
    }
}

/// `7s`, `3m 20s`, `5h 12m`, `2d 4h`.
fn short(time: Duration) -> String {
    let seconds = time.as_secs_f64().round() as u64;
    let parts = [(seconds / 86_400, "d"), (seconds / 3600 % 24, "h"), (seconds / 60 % 60, "m"), (seconds % 60, "s")];
    let first = parts.iter().position(|(number, _)| *number > 0).unwrap_or(3);
    let shown: Vec<String> = parts[first..].iter().take(2).map(|(number, unit)| format!("{number}{unit}")).collect();
    shown.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_two_units() {
        let of = |seconds: f64| short(Duration::from_secs_f64(seconds));
        assert_eq!(
            [0.2, 7.0, 59.7, 200.0, 18_750.0, 187_300.0].map(of),
            ["0s", "7s", "1m 0s", "3m 20s", "5h 12m", "2d 4h"]
        );
    }

    #[test]
    fn nothing_is_said_of_what_is_left_before_a_step_was_timed() {
        let begun = Instant::now();
        let at = |seconds: u64| begun + Duration::from_secs(seconds);
        let mut pace = Pace::begin(begun);
        assert_eq!(pace.words(at(40), 1, 101), "40s gone");
        assert_eq!(pace.words(at(42), 2, 101), "42s gone, 3m 18s left");
        // What an earlier process did is no part of this one's speed.
        let mut resumed = Pace::begin(begun);
        assert_eq!(resumed.words(at(5), 61, 101), "5s gone");
        assert_eq!(resumed.words(at(15), 71, 101), "15s gone, 30s left");
        assert_eq!(resumed.words(at(45), 101, 101), "45s gone, 0s left");
    }
}
