//! Weights of a conversation's tokens in the loss: a rule for the run, which fields of the data override.
//!
//! Knows roles and texts; where a message is in a rendering is found elsewhere.

use std::collections::BTreeMap;
use std::ops::Range;

use regex::Regex;

use crate::spans::{Message, TrainedSpan};

/// Names that are roles where weights are given by name; every other name is a pattern.
const ROLES: [&str; 5] = ["system", "developer", "user", "assistant", "tool"];

/// The messages of a conversation that are trained, unless they have a weight themselves.
#[derive(Clone, Debug, Default)]
pub enum LossRule {
    /// Every answer of the assistant, with weight 1.
    #[default]
    Answers,
    /// The answers after the last question.
    LastRound,
    /// The whole rendering, prompts and the template's own text too.
    Everything,
    /// Weights of roles (the assistant's is 1 where it is not named), and of what patterns match inside trained text.
    Weights { roles: BTreeMap<String, f32>, patterns: Vec<Pattern> },
}

/// A pattern with the weight of what it matches.
#[derive(Clone, Debug)]
pub struct Pattern {
    pub regex: Regex,
    pub weight: f32,
}

impl LossRule {
    /// Weights by role or pattern. Errors: the name and what is wrong with it or its weight.
    pub fn by_name<'a>(weights: impl IntoIterator<Item = (&'a str, f64)>) -> Result<LossRule, (String, String)> {
        let (mut roles, mut patterns) = (BTreeMap::new(), Vec::new());
        for (name, weight) in weights {
            let wrong = |problem: String| Err((name.to_owned(), problem));
            if !(weight.is_finite() && weight >= 0.0) {
                return wrong(format!("the weight {weight} is not a number from 0"));
            }
            let weight = weight as f32;
            if ROLES.contains(&name) {
                roles.insert(name.to_owned(), weight);
                continue;
            }
            match Regex::new(name) {
                Ok(regex) => patterns.push(Pattern { regex, weight }),
                Err(error) => return wrong(format!("neither a role ({}) nor a pattern: {error}", ROLES.join(", "))),
            }
        }
        Ok(LossRule::Weights { roles, patterns })
    }

    /// The weight of a message by the rule, where the data says nothing.
    fn of_role(&self, role: &str, in_last_round: bool) -> f32 {
        let is_assistant = role == "assistant";
        match self {
            LossRule::Answers => f32::from(is_assistant),
            LossRule::LastRound => f32::from(is_assistant && in_last_round),
            LossRule::Everything => 1.0,
            LossRule::Weights { roles, .. } => roles.get(role).copied().unwrap_or(f32::from(is_assistant)),
        }
    }

    /// The weight of each message.
    pub fn weights(&self, messages: &[Message]) -> Vec<f32> {
        let last = messages.iter().rposition(|message| message.role() == "user");
        let weight = |(i, message): (usize, &Message)| {
            message.weight.unwrap_or_else(|| self.of_role(message.role(), last.is_none_or(|last| i > last)))
        };
        messages.iter().enumerate().map(weight).collect()
    }

    /// Gives the parts of trained text that patterns match their own weight; where several match, the largest.
    pub fn refine(&self, text: &str, spans: Vec<TrainedSpan>) -> Vec<TrainedSpan> {
        let LossRule::Weights { patterns, .. } = self else { return spans };
        if patterns.is_empty() {
            return spans;
        }
        spans.into_iter().flat_map(|span| refined(text, span, patterns)).collect()
    }
}

fn refined(text: &str, span: TrainedSpan, patterns: &[Pattern]) -> Vec<TrainedSpan> {
    let mut matches: Vec<(Range<usize>, f32)> = Vec::new();
    for pattern in patterns {
        let found = pattern.regex.find_iter(&text[span.range.clone()]);
        matches.extend(found.map(|m| (span.range.start + m.start()..span.range.start + m.end(), pattern.weight)));
    }
    let mut borders: Vec<usize> = matches.iter().flat_map(|(range, _)| [range.start, range.end]).collect();
    borders.extend([span.range.start, span.range.end]);
    borders.sort_unstable();
    borders.dedup();
    matches.sort_by_key(|(range, _)| range.start);
    let mut coming = matches.into_iter().peekable();
    // Matches around the border: one for each pattern at most, besides empty ones.
    let mut around: Vec<(Range<usize>, f32)> = Vec::new();
    let mut weight_at = |at: usize| {
        around.retain(|(range, _)| range.end > at);
        around.extend(std::iter::from_fn(|| coming.next_if(|(range, _)| range.start <= at)));
        around.iter().filter(|(range, _)| range.contains(&at)).map(|(_, weight)| *weight).reduce(f32::max)
    };
    let part =
        |pair: &[usize]| TrainedSpan { range: pair[0]..pair[1], weight: weight_at(pair[0]).unwrap_or(span.weight) };
    borders.windows(2).map(part).collect()
}

/// The whole text with weight 1, but for the given parts, which ascend and do not overlap.
pub(crate) fn around(text: &str, parts: Vec<TrainedSpan>) -> Vec<TrainedSpan> {
    let mut spans = Vec::new();
    let mut at = 0;
    for part in parts {
        spans.push(TrainedSpan { range: at..part.range.start, weight: 1.0 });
        at = part.range.end;
        spans.push(part);
    }
    spans.push(TrainedSpan { range: at..text.len(), weight: 1.0 });
    spans
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_cut_spans() {
        let rule = LossRule::by_name([("[0-9]+", 2.0), ("2x", 0.5), ("user", 0.25)]).unwrap();
        let spans = rule.refine("a 12x b", vec![TrainedSpan { range: 2..7, weight: 1.0 }]);
        let reported: Vec<_> = spans.iter().map(|span| (span.range.clone(), span.weight)).collect();
        assert_eq!(reported, [(2..3, 2.0), (3..4, 2.0), (4..5, 0.5), (5..7, 1.0)]);
        let talk = [Message::new("user", "q"), Message::new("assistant", "a"), Message::new("tool", "t")];
        assert_eq!(rule.weights(&talk), [0.25, 1.0, 0.0]);
    }

    /// With the square of the matches, this takes a minute.
    #[test]
    fn many_matches_take_time_with_their_number() {
        let rule = LossRule::by_name([("[0-9]+", 2.0), ("1 2", 0.5)]).unwrap();
        let text = "1 2 ".repeat(200_000);
        let spans = rule.refine(&text, vec![TrainedSpan { range: 0..text.len(), weight: 1.0 }]);
        assert_eq!(spans.len(), 800_000);
        assert_eq!([0, 1, 2, 3].map(|i| spans[i].weight), [2.0, 0.5, 2.0, 1.0]);
    }

    #[test]
    fn the_last_round_is_what_follows_the_last_question() {
        let roles = ["user", "assistant", "user", "assistant", "tool", "assistant"];
        let talk = roles.map(|role| Message::new(role, "x"));
        assert_eq!(LossRule::LastRound.weights(&talk), [0.0, 0.0, 0.0, 1.0, 0.0, 1.0]);
        let own = [talk[0].clone(), Message { weight: Some(0.5), ..talk[1].clone() }, talk[2].clone()];
        assert_eq!(LossRule::LastRound.weights(&own), [0.0, 0.5, 0.0]);
        assert_eq!(LossRule::Answers.weights(&talk), [0.0, 1.0, 0.0, 1.0, 0.0, 1.0]);
    }

    #[test]
    fn wrong_weights_are_named() {
        assert!(LossRule::by_name([("assistant", -1.0)]).unwrap_err().1.contains("-1 is not a number from 0"));
        assert_eq!(LossRule::by_name([("(", 1.0)]).unwrap_err().0, "(");
    }
}
