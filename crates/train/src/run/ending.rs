//! The last lines of a run: what it came to, for people.
//!
//! Knows numbers; the command line adds what to do next.

use crate::trainer::best::BestTracker;
use crate::words::{count, time};

/// `Done after 3 min 20 s: 60 steps, evaluation 2.6331, the best 2.6102 after 40 steps`. `seconds` are of this process.
pub fn summary(steps: u64, seconds: f64, tracker: &BestTracker) -> String {
    let mut text = format!("Done after {}: {}", time(seconds), count(steps, "step"));
    if let Some(last) = tracker.last {
        text += &format!(", evaluation {last:.4}");
    }
    if let Some(best) = tracker.best.filter(|best| best.step != steps) {
        text += &format!(", the best {:.4} after {}", best.value, count(best.step, "step"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Criterion;

    #[test]
    fn the_best_evaluation_is_told_where_it_is_not_the_last() {
        let mut tracker = BestTracker::default();
        assert_eq!(summary(1, 2.0, &tracker), "Done after 2.00 s: 1 step");
        tracker.add(2, 2.5, 0.0, Criterion::Loss);
        assert_eq!(summary(2, 2.0, &tracker), "Done after 2.00 s: 2 steps, evaluation 2.5000");
        tracker.add(4, 3.0, 0.0, Criterion::Loss);
        let expected = "Done after 3 min 20 s: 4 steps, evaluation 3.0000, the best 2.5000 after 2 steps";
        assert_eq!(summary(4, 200.0, &tracker), expected);
    }
}
