//! The line below the progress bar: the loss with a sparkline, throughput, utilization, memory.
//!
//! Knows events of the log and columns, not how anything is drawn.

use std::io::BufRead;

use serde_json::Value;

/// Parts of the course that are remembered: two become one when there are more.
const COURSE: usize = 128;

/// Smallest and largest width of the loss curve, in columns.
const PICTURE: (usize, usize) = (8, 32);

const LEVELS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// The state of a run as its events report it, drawn as a panel.
#[derive(Default)]
pub struct Panel {
    loss: Option<f64>,
    course: Course,
    /// Loss of the last evaluation, or reward.
    evaluation: Option<f64>,
    /// Mean reward of the last step.
    reward: Option<f64>,
    tokens_per_second: Option<f64>,
    mfu: Option<f64>,
    memory: Option<f64>,
}

impl Panel {
    pub fn take(&mut self, event: &Value) {
        let number = |name: &str| event[name].as_f64();
        match event["event"].as_str() {
            Some("step") => {
                self.loss = number("loss");
                self.loss.into_iter().for_each(|loss| self.course.add(loss));
                // Of single steps the speed jumps: a mean of about ten of them.
                let now = number("tokens_per_second");
                let mean = self.tokens_per_second.zip(now).map(|(before, now)| before + (now - before) / 10.0);
                self.tokens_per_second = mean.or(now);
                (self.mfu, self.memory, self.reward) = (number("mfu"), number("memory"), number("reward"));
            }
            Some("evaluation") => self.evaluation = number("loss").or(number("reward")),
            _ => {}
        }
    }

    /// Takes up the losses that earlier processes wrote to the log, of the steps before this one.
    pub fn recall(&mut self, log: impl BufRead, step: u64) {
        for line in log.lines().map_while(Result::ok) {
            let event: Value = serde_json::from_str(&line).unwrap_or_default();
            let is_before = event["event"] == "step" && event["step"].as_u64().is_some_and(|of| of < step);
            event["loss"].as_f64().filter(|_| is_before).into_iter().for_each(|loss| self.course.add(loss));
        }
    }

    /// The line in at most `columns` columns; what finds no place is left out, the last first.
    pub fn line(&self, columns: usize) -> String {
        let Some(loss) = self.loss else { return String::new() };
        let mut parts = vec![format!("loss {loss:.4}")];
        parts.extend(self.reward.map(|reward| format!("reward {reward:.3}")));
        parts.extend(self.tokens_per_second.map(|speed| format!("{speed:.0} tok/s")));
        parts.extend(self.evaluation.map(|loss| format!("eval {loss:.4}")));
        parts.extend(self.memory.map(|bytes| format!("{:.2} GiB", bytes / (1u64 << 30) as f64)));
        parts.extend(self.mfu.map(|mfu| format!("{:.1} % MFU", mfu * 100.0)));
        let length = |parts: &[String]| parts.iter().map(|part| part.chars().count() + 3).sum::<usize>() - 3;
        while parts.len() > 1 && length(&parts) > columns {
            parts.pop();
        }
        let room = columns.saturating_sub(length(&parts) + 1).min(PICTURE.1);
        if room >= PICTURE.0 {
            parts[0] = format!("{} {}", parts[0], self.course.picture(room));
        }
        parts.join(" · ")
    }
}

/// A sentence as lines that are no wider than the terminal, broken between words; later ones are indented.
pub fn wrapped(text: &str, columns: usize) -> Vec<String> {
    const INDENT: &str = "  ";
    let mut lines = vec![String::new()];
    for word in text.split_inclusive(' ') {
        let line = lines.last_mut().expect("there is always a line");
        let is_blank = line.trim().is_empty();
        if !is_blank && line.chars().count() + word.trim_end().chars().count() > columns {
            line.truncate(line.trim_end().len());
            lines.push(format!("{INDENT}{word}"));
        } else {
            line.push_str(word);
        }
    }
    lines
}

/// A line of ` | ` parts without the last ones, where it is longer than the terminal is wide.
pub fn shortened(text: &str, columns: usize) -> &str {
    let mut text = text;
    while text.chars().count() > columns
        && let Some((before, _)) = text.rsplit_once(" | ")
    {
        text = before;
    }
    text
}

/// Values in parts of equal length, each the mean of what falls into it.
struct Course {
    /// (sum, values) of each part.
    parts: Vec<(f64, u32)>,
    /// Values that a full part has.
    length: u32,
}

impl Default for Course {
    fn default() -> Self {
        Course { parts: Vec::new(), length: 1 }
    }
}

impl Course {
    fn add(&mut self, value: f64) {
        match self.parts.last_mut().filter(|last| last.1 < self.length) {
            Some(last) => *last = (last.0 + value, last.1 + 1),
            None => self.parts.push((value, 1)),
        }
        if self.parts.len() > COURSE {
            let pair = |pair: &[(f64, u32)]| pair.iter().fold((0.0, 0), |sum, part| (sum.0 + part.0, sum.1 + part.1));
            self.parts = self.parts.chunks(2).map(pair).collect();
            self.length *= 2;
        }
    }

    /// The means as bars of eight heights, from the lowest to the highest of them.
    fn picture(&self, columns: usize) -> String {
        let columns = columns.min(self.parts.len());
        let means: Vec<f64> = (0..columns)
            .map(|i| {
                let part = &self.parts[i * self.parts.len() / columns..(i + 1) * self.parts.len() / columns];
                let (sum, values) = part.iter().fold((0.0, 0), |of, part| (of.0 + part.0, of.1 + part.1));
                sum / f64::from(values)
            })
            .collect();
        let low = means.iter().copied().fold(f64::INFINITY, f64::min);
        let high = means.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let level = |mean: f64| (((mean - low) / (high - low).max(1e-12) * 7.0).round() as usize).min(7);
        means.into_iter().map(|mean| LEVELS[level(mean)]).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn after(steps: u32) -> Panel {
        let mut panel = Panel::default();
        for step in 0..steps {
            let loss = 10.0 - f64::from(step) * 9.0 / f64::from(steps);
            panel.take(
                &json!({"event": "step", "loss": loss, "tokens_per_second": 1000.0, "mfu": 0.5, "memory": 1 << 30}),
            );
        }
        panel.take(&json!({"event": "evaluation", "loss": 2.5}));
        panel
    }

    #[test]
    fn a_sentence_is_broken_between_words() {
        assert_eq!(wrapped("as it is", 20), ["as it is"]);
        assert_eq!(wrapped("one two three four", 9), ["one two", "  three", "  four"]);
        assert_eq!(wrapped("   1     2  a/long/path", 12), ["   1     2", "  a/long/path"]);
        assert_eq!(wrapped("", 9), [""]);
    }

    #[test]
    fn the_course_falls_as_the_loss_does_however_long_it_is() {
        for steps in [8, 100, 5000] {
            let line = after(steps).line(80);
            let picture: Vec<char> = line.chars().filter(|c| LEVELS.contains(c)).collect();
            assert!(picture.len() >= 8 && picture.is_sorted_by(|a, b| a >= b), "{line}");
            assert_eq!((picture[0], *picture.last().unwrap()), ('█', '▁'));
        }
    }

    #[test]
    fn the_course_of_a_resumed_run_goes_on() {
        // Steps after the checkpoint are done again, and the last line was not finished.
        let step = |i: u64| json!({"event": "step", "step": i, "loss": 10.0 - i as f64}).to_string() + "\n";
        let lines: String = (0..12).map(step).collect();
        let log = "{\"event\": \"start\"}\n".to_owned() + &lines + "{\"event\": \"st";
        let mut panel = Panel::default();
        panel.recall(log.as_bytes(), 9);
        assert_eq!(panel.line(80), "", "no step of this process yet");
        panel.take(&json!({"event": "step", "step": 9, "loss": 1.0}));
        let picture: String = panel.line(80).chars().filter(|c| LEVELS.contains(c)).collect();
        assert_eq!(picture.chars().count(), 10, "{picture}");
        assert!(picture.starts_with('█') && picture.ends_with('▁'), "{picture}");
    }

    #[test]
    fn it_is_never_wider_than_the_terminal() {
        let panel = after(300);
        for columns in 12..200 {
            assert!(panel.line(columns).chars().count() <= columns.max(11), "{}", panel.line(columns));
        }
        let line = panel.line(80);
        let (begins, ends) =
            (line.starts_with("loss 1.0300 █"), line.ends_with("1000 tok/s · eval 2.5000 · 1.00 GiB · 50.0 % MFU"));
        assert!(begins && ends, "{line}");
        assert!(panel.line(20).starts_with("loss 1.0300 █") && !panel.line(20).contains("tok/s"), "{}", panel.line(20));
        assert_eq!(Panel::default().line(80), "");
    }

    #[test]
    fn lines_lose_their_last_parts_first() {
        assert_eq!(shortened("a | bb | cc", 11), "a | bb | cc");
        assert_eq!(shortened("a | bb | cc", 10), "a | bb");
        assert_eq!(shortened("abcdef", 3), "abcdef");
    }
}
