//! The rows of a step: how many each device has, and how many of them it works on at once.

use options::Setting;

use super::{Config, Task};

/// Rows of a micro-step where only `batch_size` is given and no plan has chosen.
const FEW: u32 = 2;

impl Config {
    /// Rows of a step on each device.
    pub fn device_rows(&self) -> u32 {
        self.training.per_device_train_batch_size.saturating_mul(self.training.gradient_accumulation_steps)
    }

    /// Rows that a device works on at once.
    pub fn micro_rows(&self) -> u32 {
        let chosen = || self.micro_batch.as_ref().and_then(|of| of.value.as_u64());
        match self.training.micro_batch_size {
            Setting::Value(rows) => rows,
            Setting::Auto => chosen().map_or(self.training.per_device_train_batch_size, |rows| rows as u32),
        }
    }

    /// Micro-steps of a step on each device.
    pub fn micro_steps(&self) -> u32 {
        self.device_rows() / self.micro_rows()
    }

    /// The numbers of rows that a micro-step may have, ascending.
    pub fn possible_micro_rows(&self) -> Vec<u32> {
        let rows = self.device_rows();
        let pairs = (1..=rows.isqrt()).filter(|part| rows.is_multiple_of(*part)).flat_map(|part| [part, rows / part]);
        let mut all: Vec<u32> = pairs.collect();
        all.sort_unstable();
        all.dedup();
        all
    }

    /// True if the plan may choose the rows of a micro-step.
    pub(crate) fn splits_freely(&self) -> bool {
        self.training.micro_batch_size.is_auto() && self.reason_to_keep_windows().is_none()
    }

    /// The reason for which the rows of a micro-step are those of `per_device_train_batch_size`, if there is one: a loss that
    /// compares them, or answers that are sampled for them.
    fn reason_to_keep_windows(&self) -> Option<String> {
        self.compared_rows().or_else(|| (self.task == Task::Grpo).then(|| "task: grpo".to_owned()))
    }

    /// Divides the rows of `batch_size` over the devices. Returns what is wrong with the numbers of rows: an option, a message and
    /// a hint.
    pub(super) fn divide_rows(&mut self) -> Option<(&'static str, String, String)> {
        if let Some(rows) = self.training.batch_size {
            let replicas = u32::try_from(self.replicas().max(1)).unwrap_or(u32::MAX);
            if !rows.is_multiple_of(replicas) {
                let message =
                    format!("`batch_size: {rows}` is no multiple of {replicas}, the devices with rows of their own");
                let hint = "change `batch_size`, or use another number of GPUs";
                return Some(("batch_size", message, hint.to_owned()));
            }
            let of_device = rows / replicas;
            let few = if of_device.is_multiple_of(FEW) { FEW } else { 1 };
            self.training.per_device_train_batch_size = few;
            self.training.gradient_accumulation_steps = of_device / few;
        }
        self.drop_other_split();
        self.wrong_micro_batch()
    }

    /// Leaves a split that was chosen for another number of rows to the written one.
    pub(crate) fn drop_other_split(&mut self) {
        let rows = self.device_rows();
        self.micro_batch.take_if(|of| of.value.as_u64().is_none_or(|micro| !u64::from(rows).is_multiple_of(micro)));
    }

    /// Returns what is wrong with `micro_batch_size` next to the rows of a step on a device.
    pub(super) fn wrong_micro_batch(&self) -> Option<(&'static str, String, String)> {
        let Setting::Value(micro) = self.training.micro_batch_size else { return None };
        let rows = self.device_rows();
        if !rows.is_multiple_of(micro) {
            let message =
                format!("`micro_batch_size: {micro}` does not divide the {rows} rows of a step on each device");
            let possible: Vec<String> = self.possible_micro_rows().iter().map(u32::to_string).collect();
            let hint = format!("expected one of {}, or `auto`", possible.join(", "));
            return Some(("micro_batch_size", message, hint));
        }
        let window = self.training.per_device_train_batch_size;
        let tied = self.reason_to_keep_windows().filter(|_| micro != window)?;
        let message = format!(
            "`micro_batch_size: {micro}` with `{tied}`, which takes the rows of a micro-batch together: \
             `per_device_train_batch_size` is {window}"
        );
        let hint = "remove `micro_batch_size`; `per_device_train_batch_size` is the number of rows";
        Some(("micro_batch_size", message, hint.to_owned()))
    }

    /// The sentence on a split that the plan chose and that is not the written one.
    pub(crate) fn note_on_split(&self) -> Option<String> {
        let of = self.micro_batch.as_ref().filter(|_| self.training.micro_batch_size.is_auto())?;
        let written = self.training.per_device_train_batch_size;
        let (rows, steps) = (self.micro_rows(), self.micro_steps());
        (rows != written).then(|| {
            format!(
                "{} of {} run as {steps} of {rows}: {}; `micro_batch_size: {written}` keeps them",
                crate::words::count(self.training.gradient_accumulation_steps.into(), "micro-step"),
                crate::words::count(written.into(), "row"),
                of.because,
            )
        })
    }
}
