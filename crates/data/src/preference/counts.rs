//! Counts of preference rows for the data check.
//!
//! Only counts and words; knows neither rows nor terminals.

use serde::{Deserialize, Serialize};

use super::cut::Side;

/// The share of pairs, and of the mean lengths, from which the length of the chosen side is worth a warning.
const MANY: f64 = 0.65;
const FAR: f64 = 1.25;
/// Pairs below which a share says little.
const FEW: usize = 20;

/// Counts of the preferences of a dataset.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PreferenceCounts {
    pub pairs: usize,
    /// Pairs whose sides are the same.
    pub equal: usize,
    /// Pairs whose sides part before the assistant speaks.
    pub other_prompts: usize,
    /// Pairs whose rejected side has the higher score.
    pub inverted: usize,
    /// Answers whose end or beginning is cut off.
    pub cut: usize,
    /// Rows of which a split by common tokens would train others.
    pub other_split: usize,
    /// Trained tokens of either side of all pairs.
    pub chosen_tokens: usize,
    pub rejected_tokens: usize,
    /// Tokens of prompts that the sides of all pairs share, so that they are left out once.
    pub shared_tokens: usize,
    /// Pairs whose chosen or rejected answer is the longer one.
    pub chosen_longer: usize,
    pub rejected_longer: usize,
    /// Answers with a verdict, by what it says of them.
    pub desirable: usize,
    pub undesirable: usize,
}

impl PreferenceCounts {
    pub(crate) fn add(&mut self, other: &PreferenceCounts) {
        self.pairs += other.pairs;
        self.equal += other.equal;
        self.other_prompts += other.other_prompts;
        self.inverted += other.inverted;
        self.cut += other.cut;
        self.other_split += other.other_split;
        self.chosen_tokens += other.chosen_tokens;
        self.rejected_tokens += other.rejected_tokens;
        self.shared_tokens += other.shared_tokens;
        self.chosen_longer += other.chosen_longer;
        self.rejected_longer += other.rejected_longer;
        self.desirable += other.desirable;
        self.undesirable += other.undesirable;
    }

    /// Counts a pair as it is trained.
    pub(super) fn pair(&mut self, sides: &[Side; 2], shared: usize) {
        let [chosen, rejected] = sides.each_ref().map(|side| side.document.trained_tokens());
        self.pairs += 1;
        self.equal += usize::from(sides[0].document.ids == sides[1].document.ids);
        self.chosen_tokens += chosen;
        self.rejected_tokens += rejected;
        self.shared_tokens += shared;
        self.chosen_longer += usize::from(chosen > rejected);
        self.rejected_longer += usize::from(rejected > chosen);
    }

    pub(super) fn answer(&mut self, desirable: bool) {
        *if desirable { &mut self.desirable } else { &mut self.undesirable } += 1;
    }

    fn means(&self) -> [f64; 2] {
        [self.chosen_tokens, self.rejected_tokens].map(|tokens| tokens as f64 / self.pairs.max(1) as f64)
    }

    /// A line each, for the table of the data check.
    pub fn lines(&self) -> Vec<String> {
        let mut lines = Vec::new();
        if self.pairs > 0 {
            let [chosen, rejected] = self.means();
            let longer = 100.0 * self.chosen_longer as f64 / self.pairs as f64;
            let pairs = several(self.pairs, "pair");
            lines.push(format!(
                "{pairs}: {chosen:.0} trained tokens on the chosen side on average, {rejected:.0} on the rejected; the \
                 chosen is longer in {longer:.0} %"
            ));
        }
        if self.desirable + self.undesirable > 0 {
            lines.push(format!("{} desirable, {} undesirable", several(self.desirable, "answer"), self.undesirable));
        }
        if self.shared_tokens > 0 {
            let shared = several(self.shared_tokens, "token");
            lines.push(format!("{shared} of prompts are shared by both sides, and computed once"));
        }
        let of = [
            (self.equal, "with equal sides, of which nothing is learned"),
            (self.other_prompts, "whose sides are answers to different prompts"),
            (self.inverted, "whose rejected side has the higher score"),
        ];
        lines.extend(of.iter().filter(|(n, _)| *n > 0).map(|(n, what)| format!("{} {what}", several(*n, "pair"))));
        if self.cut > 0 {
            lines.push(format!("{} truncated: `max_length` keeps them whole", several(self.cut, "answer")));
        }
        if self.other_split > 0 {
            let rows = several(self.other_split, "row");
            lines.push(format!("{rows} of which `preference_split: trl` trains other tokens"));
        }
        lines
    }

    /// A sentence where the chosen side is mostly the longer one: then length alone distinguishes the sides.
    pub fn length_bias(&self) -> Option<String> {
        let [chosen, rejected] = self.means();
        let share = self.chosen_longer as f64 / self.pairs.max(1) as f64;
        (self.pairs >= FEW && share >= MANY && chosen >= FAR * rejected).then(|| {
            format!(
                "the chosen answer is the longer one in {:.0} % of the pairs ({chosen:.0} tokens on average, the \
                 rejected has {rejected:.0}): a model may learn to write more",
                100.0 * share
            )
        })
    }
}

fn several(count: usize, what: &str) -> String {
    if count == 1 { format!("1 {what}") } else { format!("{count} {what}s") }
}
