//! Runs of few optimizer steps: a note before they start, with the options that make more of them. Knows counts of rows, and
//! no data.

use crate::config::Config;
use crate::words;

/// The fewest steps of a run that is not warned of.
const ENOUGH: u64 = 20;

/// The numbers that the steps of a run follow from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Steps {
    /// Rows of a micro-batch of each rank.
    pub rows: u32,
    /// The fewest rows of single documents that the loss takes.
    pub least: u32,
    /// Micro-batches of an optimizer step.
    pub accumulation: u32,
    /// Micro-batches that are worked on at once.
    pub replicas: u64,
    /// Rows of one pass over the data.
    pub in_epoch: u64,
    /// Documents of one pass over the data.
    pub documents: u64,
    /// True if rows hold several documents.
    pub is_packed: bool,
    /// Number of passes over the data.
    pub epochs: f64,
    /// True if `batch_size` says how many rows a step has on all ranks.
    pub is_total: bool,
}

/// Changes of [`Steps`] and the options that make them.
struct Change {
    steps: Steps,
    options: Vec<String>,
}

impl Steps {
    /// Returns the steps of a run with these rows and documents in an epoch; none where their number is given.
    pub fn of(config: &Config, in_epoch: u64, documents: u64) -> Option<Steps> {
        let of = &config.training;
        let replicas = config.replicas() as u64;
        let total = of.batch_size.map(|rows| (u64::from(rows) / replicas).max(1) as u32);
        of.fixed_steps().is_none().then(|| Steps {
            rows: total.unwrap_or(of.per_device_train_batch_size),
            least: config.least_documents(),
            accumulation: if total.is_some() { 1 } else { of.gradient_accumulation_steps },
            is_total: total.is_some(),
            replicas,
            in_epoch,
            documents,
            is_packed: config.data.sample_packing,
            epochs: config.run.num_epochs.0,
        })
    }

    fn in_step(&self) -> u64 {
        u64::from(self.rows) * u64::from(self.accumulation) * self.replicas
    }

    fn count(&self) -> u64 {
        (self.in_epoch.div_ceil(self.in_step()) as f64 * self.epochs).ceil() as u64
    }

    fn is_enough(&self) -> bool {
        self.count() >= ENOUGH && self.in_step() <= self.in_epoch
    }

    /// The note that a run of `total` steps gets.
    pub fn note(&self, total: u64) -> Option<String> {
        if total >= ENOUGH && self.in_step() <= self.in_epoch {
            return None;
        }
        let ranks = if self.replicas > 1 { format!(" × {}", self.replicas) } else { String::new() };
        let product = match self.is_total {
            true => "`batch_size`".to_owned(),
            false => format!("{} × {}{ranks}", self.rows, self.accumulation),
        };
        let packed = match self.is_packed && self.documents > self.in_epoch {
            true => format!(", packed with {} documents", self.documents),
            false => String::new(),
        };
        let change = self.least_change();
        Some(format!(
            "the run has only {}: a step takes {} ({product}) and an epoch has {}{packed}; it has {} with {}",
            words::count(total, "optimizer step"),
            words::count(self.in_step(), "row"),
            self.in_epoch,
            words::count(change.steps.count(), "step"),
            change.options.join(" and "),
        ))
    }

    /// The most rows of a step on a rank that divide `rows` and make enough steps; the fewest where none do.
    pub fn most_rows(&self, rows: u32) -> u32 {
        let is_enough = |rows: &u32| Steps { rows: *rows, accumulation: 1, ..*self }.is_enough();
        self.fewer(rows).find(is_enough).or_else(|| self.fewer(rows).last()).unwrap_or(rows)
    }

    /// The divisors of a number of rows that the loss takes, from itself down.
    fn fewer(&self, rows: u32) -> impl Iterator<Item = u32> + use<> {
        let least = if self.is_packed { 1 } else { self.least };
        divisors(rows).filter(move |rows| *rows >= least)
    }

    /// The first change that makes enough steps: fewer micro-batches, then fewer rows, then rows of single documents, then
    /// more epochs.
    fn least_change(&self) -> Change {
        let own = Change { steps: *self, options: Vec::new() };
        let smaller = own.smaller();
        let unpacked = own.unpacked().into_iter().flat_map(|of| std::iter::once(of.same()).chain(of.smaller()));
        let mut all: Vec<Change> = smaller.into_iter().chain(unpacked).collect();
        if let Some(enough) = all.iter().position(|of| of.steps.is_enough()) {
            return all.swap_remove(enough);
        }
        let most = all.into_iter().max_by_key(|of| of.steps.count()).unwrap_or(own);
        let of_epoch = Steps { epochs: 1.0, ..most.steps }.count();
        let epochs = ENOUGH.div_ceil(of_epoch).max(most.steps.epochs.ceil() as u64);
        let mut options = most.options;
        options.push(format!("`num_epochs: {epochs}`"));
        Change { steps: Steps { epochs: epochs as f64, ..most.steps }, options }
    }
}

impl Change {
    fn same(&self) -> Change {
        Change { steps: self.steps, options: self.options.clone() }
    }

    fn with(&self, steps: Steps, option: String) -> Change {
        Change { steps, options: self.options.iter().cloned().chain([option]).collect() }
    }

    /// Fewer rows in a step, a little at first.
    fn smaller(&self) -> Vec<Change> {
        let of = self.steps;
        let accumulations = divisors(of.accumulation).filter(|part| *part < of.accumulation).map(|accumulation| {
            let steps = Steps { accumulation, ..self.steps };
            self.with(steps, format!("`gradient_accumulation_steps: {accumulation}`"))
        });
        let mut all: Vec<Change> = accumulations.collect();
        let least = all.last().map_or_else(|| self.same(), Change::same);
        all.extend(of.fewer(of.rows).filter(|rows| *rows < of.rows).map(|rows| {
            let steps = Steps { rows, ..least.steps };
            let option = match steps.is_total {
                true => format!("`batch_size: {}`", u64::from(rows) * steps.replicas),
                false => format!("`per_device_train_batch_size: {rows}`"),
            };
            least.with(steps, option)
        }));
        all
    }

    /// Rows of one document each, where packing makes fewer rows.
    fn unpacked(&self) -> Option<Change> {
        let Steps { is_packed, documents, in_epoch, .. } = self.steps;
        let steps = Steps { is_packed: false, in_epoch: documents, ..self.steps };
        (is_packed && documents > in_epoch).then(|| self.with(steps, "`sample_packing: false`".to_owned()))
    }
}

/// The divisors of a number, from itself down to 1.
fn divisors(of: u32) -> impl Iterator<Item = u32> {
    (1..=of).rev().filter(move |part| of.is_multiple_of(*part))
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHATS: Steps = Steps {
        rows: 2,
        least: 1,
        accumulation: 4,
        replicas: 1,
        in_epoch: 5,
        documents: 100,
        is_packed: true,
        epochs: 3.0,
        is_total: false,
    };

    #[test]
    fn a_run_of_many_steps_has_no_note() {
        let many = Steps { in_epoch: 80, ..CHATS };
        assert_eq!((many.count(), many.note(30)), (30, None));
        assert!(many.note(19).is_some());
        // As many steps as epochs, each shorter than it was asked to be.
        let long = Steps { epochs: 40.0, ..CHATS };
        assert!(long.note(40).unwrap().contains("a step takes 8 rows (2 × 4) and an epoch has 5"));
    }

    #[test]
    fn the_note_names_the_least_change_that_makes_enough_steps() {
        let named = |of: Steps| {
            let note = of.note(of.count()).unwrap();
            note.split_once("; ").unwrap().1.to_owned()
        };
        assert_eq!(named(Steps { in_epoch: 40, ..CHATS }), "it has 30 steps with `gradient_accumulation_steps: 2`");
        assert_eq!(named(Steps { in_epoch: 14, ..CHATS }), "it has 21 steps with `gradient_accumulation_steps: 1`");
        let both = "it has 21 steps with `gradient_accumulation_steps: 1` and `per_device_train_batch_size: 1`";
        assert_eq!(named(Steps { in_epoch: 7, ..CHATS }), both);
        assert_eq!(named(CHATS), "it has 39 steps with `sample_packing: false`");
        let last = "it has 20 steps with `gradient_accumulation_steps: 1` and `per_device_train_batch_size: 1` and \
                    `num_epochs: 4`";
        assert_eq!(named(Steps { is_packed: false, ..CHATS }), last);
        let alone = Steps { rows: 1, accumulation: 1, in_epoch: 3, is_packed: false, epochs: 1.0, ..CHATS };
        assert_eq!(named(alone), "it has 21 steps with `num_epochs: 7`");
        let total =
            Steps { rows: 16, accumulation: 1, replicas: 4, in_epoch: 300, is_packed: false, is_total: true, ..CHATS };
        let note = total.note(total.count()).unwrap();
        assert!(note.contains("a step takes 64 rows (`batch_size`)"), "{note}");
        assert_eq!(named(total), "it has 30 steps with `batch_size: 32`");
        let note = Steps { replicas: 4, ..CHATS }.note(3).unwrap();
        assert!(note.contains("only 3 optimizer steps: a step takes 32 rows (2 × 4 × 4)"), "{note}");
    }

    #[test]
    fn fewer_rows_make_enough_steps_where_any_do() {
        assert_eq!(Steps { in_epoch: 14, ..CHATS }.most_rows(8), 2);
        assert_eq!(Steps { in_epoch: 1000, ..CHATS }.most_rows(8), 8);
        assert_eq!(CHATS.most_rows(8), 1);
    }

    #[test]
    fn no_fewer_rows_are_named_than_the_loss_takes() {
        let compares =
            Steps { least: 2, rows: 4, accumulation: 1, in_epoch: 6, is_packed: false, epochs: 1.0, ..CHATS };
        let packed = Steps { is_packed: true, in_epoch: 3, documents: 6, ..compares }.note(1).unwrap();
        assert!(!packed.contains("`sample_packing: false` and `per_device_train_batch_size: 1`"), "{packed}");
        assert_eq!(compares.most_rows(8), 2);
        let note = compares.note(2).unwrap();
        assert!(note.ends_with("with `per_device_train_batch_size: 2` and `num_epochs: 7`"), "{note}");
    }
}
