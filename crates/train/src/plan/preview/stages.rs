//! Estimates for the stages of a pipeline: memory and time of each, the step of all from the order of their passes, and
//! the same run with weights sharded instead (ZeRO-3), which is compiled for it.
//!
//! Knows passes, times and bytes; not how layers are dealt.

use std::collections::{BTreeSet, VecDeque};

use options::Setting;
use program::{EntryKind, Machine, STAGE, SendDirection, TensorRef, Turn, Variant, idle_share, schedule};
use serde_json::{Value, json};

use super::{Estimate, Expected, Preview};
use crate::config::Config;
use crate::error::TrainError;
use crate::input::encoded::Encoded;
use crate::model::source::ModelSource;
use crate::words::{size, time};

/// Layers, memory and time of one stage.
#[derive(Clone, Debug, PartialEq)]
struct Stage {
    /// The first and the last layer.
    layers: (String, String),
    memory: usize,
    forward: f64,
    /// The forward pass again and the backward pass.
    backward: f64,
    update: f64,
    /// Bytes that it hands on for a micro-step, both ways.
    handed: usize,
}

/// The same run with sharded weights.
#[derive(Clone, Debug, PartialEq)]
struct Sharded {
    accumulation: usize,
    memory: usize,
    step: f64,
    tokens_per_second: f64,
    exchanged: f64,
    waiting: f64,
}

/// A pipeline, and what it is compared with.
pub struct Stages {
    stages: Vec<Stage>,
    accumulation: usize,
    step: f64,
    pub(super) tokens_per_second: f64,
    /// The reason why it does not fit, if it does not.
    sharded: Result<Sharded, String>,
}

/// Seconds of the passes of a stage.
#[derive(Clone, Copy, Debug, Default)]
struct Pass {
    forward: f64,
    backward: f64,
    /// Seconds of what it hands on, and back.
    on: f64,
    back: f64,
}

impl Stages {
    pub(super) fn new(
        preview: &Preview,
        config: &Config,
        source: &ModelSource,
        machine: &Machine,
        data: Option<&Encoded>,
    ) -> Stages {
        let (program, estimate) = (&preview.program, preview.estimate());
        let of = |stage: usize| preview.expected().stage(stage);
        Stages {
            stages: (0..program.cluster.stages).map(of).collect(),
            accumulation: preview.accumulation,
            step: estimate.step_seconds,
            tokens_per_second: estimate.tokens_per_second,
            sharded: sharded(config, source, machine, data),
        }
    }

    /// A table of the stages, and the comparison.
    pub fn text(&self) -> String {
        let mut text = "\nStages, one on each GPU:\n".to_owned();
        text += &format!(
            "  {:>5}  {:>11}  {:>10}  {:>10}  {:>14}  {:>10}  {:>18}\n",
            "stage", "layers", "memory", "forward", "again+backward", "update", "handed/micro-step"
        );
        for (number, of) in self.stages.iter().enumerate() {
            let layers = format!("{}-{}", of.layers.0, of.layers.1);
            let forward = if number + 1 == self.stages.len() { "-".to_owned() } else { time(of.forward) };
            text += &format!(
                "  {number:>5}  {layers:>11}  {:>10}  {forward:>10}  {:>14}  {:>10}  {:>18}\n",
                size(of.memory),
                time(of.backward),
                time(of.update),
                size(of.handed)
            );
        }
        let (stages, micro_steps) = (self.stages.len(), self.accumulation);
        text += &format!(
            "  {:.0} % of a step a stage waits for others: (S - 1) / (G + S - 1) with {stages} stages and {micro_steps} \
             micro-steps\n  {}\n",
            100.0 * idle_share(stages, micro_steps),
            self.verdict()
        );
        text
    }

    /// The faster one of both, or the one that fits, and why.
    fn verdict(&self) -> String {
        let of = match &self.sharded {
            Ok(of) => of,
            Err(why) => return format!("`zero_level: 3` on the same GPUs: {why}"),
        };
        let handed = self.stages.iter().map(|of| of.handed).max().unwrap_or(0) * self.accumulation;
        let (own, other) = (self.tokens_per_second, of.tokens_per_second);
        let faster = match own > other {
            true => format!("the pipeline is {:.2} times as fast", own / other),
            false => format!("it is {:.2} times as fast as the pipeline", other / own),
        };
        format!(
            "`zero_level: 3` with `gradient_accumulation_steps: {}` on the same GPUs: {} per step, {other:.0} tokens per \
             second, {} each; {faster}. A GPU gets {} from others per step there, and waits {} for it; a stage hands on {}",
            of.accumulation,
            time(of.step),
            size(of.memory),
            size(of.exchanged as usize),
            time(of.waiting),
            size(handed)
        )
    }

    /// For programs. Bytes and seconds.
    pub fn to_json(&self) -> Value {
        let stage = |of: &Stage| {
            json!({
                "first_layer": of.layers.0, "last_layer": of.layers.1, "memory_bytes": of.memory,
                "forward_seconds": of.forward, "backward_seconds": of.backward, "update_seconds": of.update,
                "handed_bytes": of.handed,
            })
        };
        json!({
            "stages": self.stages.iter().map(stage).collect::<Vec<_>>(),
            "idle_share": idle_share(self.stages.len(), self.accumulation),
            "step_seconds": self.step,
            "verdict": self.verdict(),
            "zero_3": self.sharded.as_ref().ok().map(|of| json!({
                "gradient_accumulation_steps": of.accumulation, "memory_bytes": of.memory, "step_seconds": of.step,
                "tokens_per_second": of.tokens_per_second, "exchanged_bytes": of.exchanged,
                "waiting_seconds": of.waiting,
            })),
        })
    }
}

/// The run with weights sharded over as many GPUs: as many rows in a step, where they can be divided.
fn sharded(
    config: &Config,
    source: &ModelSource,
    machine: &Machine,
    data: Option<&Encoded>,
) -> Result<Sharded, String> {
    let stages = config.sharding.pipeline_parallel_size;
    let mut other = config.clone();
    let accumulation = &mut other.training.gradient_accumulation_steps;
    *accumulation = (*accumulation / stages).max(1);
    other.sharding.pipeline_parallel_size = 1;
    other.drop_other_split();
    if matches!(other.training.micro_batch_size, Setting::Value(rows) if !other.device_rows().is_multiple_of(rows)) {
        other.training.micro_batch_size = Setting::Auto;
    }
    other.sharding.zero_level = Setting::Value(3);
    let preview = Preview::new(&other, source, machine, data).map_err(|error| match error {
        TrainError::Memory(why) => format!("it does not fit: {why}"),
        other => other.to_string(),
    })?;
    let estimate = preview.estimate();
    Ok(Sharded {
        accumulation: other.training.gradient_accumulation_steps as usize,
        memory: preview.memory_bytes(),
        step: estimate.step_seconds,
        tokens_per_second: estimate.tokens_per_second,
        exchanged: estimate.exchanged,
        waiting: estimate.waiting,
    })
}

impl Expected<'_> {
    /// An entry of a stage.
    fn of_stage(&self, stage: usize, kind: EntryKind, name: &str, variant: Option<Variant>) -> Option<usize> {
        let is_it = |of: &program::Entry| (of.stage.number, of.kind, of.name.as_str()) == (stage, kind, name);
        self.program.entries.iter().position(|of| is_it(of) && (variant.is_none() || of.variant == variant))
    }

    /// A micro-step of a stage: both of its passes.
    fn passes(&self, stage: usize) -> [program::Estimate; 2] {
        [(EntryKind::Forward, STAGE), (EntryKind::NextMicroStep, "")]
            .map(|(kind, name)| self.mean(|variant| self.of_stage(stage, kind, name, Some(variant))))
    }

    /// Bytes that a stage hands on for a micro-step, and back.
    fn handed(&self, stage: usize) -> [usize; 2] {
        let bytes = |of: &[TensorRef]| of.iter().map(TensorRef::bytes).sum::<usize>();
        let variant = self.shapes.variants.last().copied();
        let sent = |kind: EntryKind, name: &str, direction: SendDirection| {
            let entry = self.of_stage(stage, kind, name, variant);
            entry.map_or(0, |entry| bytes(self.program.entries[entry].stage.sent()[direction as usize].1))
        };
        [
            sent(EntryKind::Forward, STAGE, SendDirection::Forward),
            sent(EntryKind::NextMicroStep, "", SendDirection::Backward),
        ]
    }

    fn stage(&self, stage: usize) -> Stage {
        let [forward, backward] = self.passes(stage).map(|of| of.seconds);
        let entries = self.program.entries.iter().filter(|entry| entry.stage.number == stage);
        let layers = entries.flat_map(|entry| &entry.steps).filter_map(|step| step.provenance.layer.as_ref());
        let layers: BTreeSet<(String, usize)> = layers.map(|of| (of.stack.to_string(), of.index)).collect();
        let name = |of: Option<&(String, usize)>| match of {
            Some((stack, index)) if stack.is_empty() => index.to_string(),
            Some((stack, index)) => format!("{stack}.{index}"),
            None => String::new(),
        };
        Stage {
            layers: (name(layers.first()), name(layers.last())),
            memory: self.program.memory_of(stage).iter().map(|line| line.bytes).sum(),
            forward,
            backward,
            update: self.entry(self.of_stage(stage, EntryKind::Update, "", None)).seconds,
            handed: self.handed(stage).iter().sum(),
        }
    }

    /// All stages against one another.
    pub(super) fn of_stages(&self) -> Estimate {
        let stages = self.program.cluster.stages;
        let all: Vec<[program::Estimate; 2]> = (0..stages).map(|stage| self.passes(stage)).collect();
        let updates: Vec<program::Estimate> =
            (0..stages).map(|stage| self.entry(self.of_stage(stage, EntryKind::Update, "", None))).collect();
        let rate = self.program.machine.peer_rate();
        let run = |seconds: &dyn Fn(&program::Estimate) -> f64| {
            let passes: Vec<Pass> = (0..stages)
                .map(|stage| {
                    let [on, back] = self.handed(stage).map(|bytes| bytes as f64 / rate);
                    let [forward, backward] = [0, 1].map(|pass| seconds(&all[stage][pass]));
                    Pass { forward, backward, on, back }
                })
                .collect();
            step_seconds(&passes, self.accumulation) + updates.iter().map(seconds).fold(0.0, f64::max)
        };
        let (step_seconds, ceiling_seconds) = (run(&|of| of.seconds), run(&|of| of.ceiling));
        let micro_steps = self.accumulation as f64;
        let sum = |of: &dyn Fn(&program::Estimate) -> f64| {
            let passes = all.iter().flatten().map(of).sum::<f64>();
            micro_steps * passes + updates.iter().map(of).sum::<f64>()
        };
        let busy = |of: &[program::Estimate; 2]| of[0].seconds + of[1].seconds;
        let slowest = (0..stages).max_by(|a, b| busy(&all[*a]).total_cmp(&busy(&all[*b]))).expect("there are stages");
        let update_seconds = updates.iter().map(|of| of.seconds).fold(0.0, f64::max);
        let received = |stage: usize| {
            let before = if stage > 0 { self.handed(stage - 1)[0] } else { 0 };
            let after = if stage + 1 < stages { self.handed(stage + 1)[1] } else { 0 };
            micro_steps * (before + after) as f64 + updates[stage].exchanged
        };
        let evaluate = (0..stages)
            .map(|stage| self.mean(|variant| self.of_stage(stage, EntryKind::Evaluate, "", Some(variant))).seconds);
        let evaluate: f64 = evaluate.sum();
        let (times, batches) = self.shapes.evaluations;
        Estimate {
            passes_seconds: 0.0,
            micro_step_seconds: busy(&all[slowest]),
            update_seconds,
            step_seconds,
            ceiling_seconds,
            tokens_per_second: self.shapes.tokens * micro_steps / step_seconds,
            step_flops: sum(&|of| of.flops),
            step_bytes: sum(&|of| of.bytes),
            exchanged: (0..stages).map(received).fold(0.0, f64::max),
            between: 0.0,
            waiting: step_seconds - micro_steps * busy(&all[slowest]) - update_seconds,
            run_seconds: self.shapes.steps.map(|steps| steps as f64 * step_seconds),
            evaluation_seconds: (times * batches) as f64 * evaluate,
            above: std::array::from_fn(|cause| {
                let of = |of: &program::Estimate| of.above[cause];
                micro_steps * all[slowest].iter().map(of).sum::<f64>() + of(&updates[slowest])
            }),
            host: None,
        }
    }
}

/// Seconds until all stages have done their passes for all micro-steps.
fn step_seconds(stages: &[Pass], micro_steps: usize) -> f64 {
    let count = stages.len();
    let mut turns: Vec<VecDeque<Turn>> = (0..count).map(|stage| schedule(stage, count, micro_steps).into()).collect();
    let mut clocks = vec![0.0f64; count];
    // Times at which a micro-step comes to a stage from the one before, and from the one after.
    let mut on = vec![vec![None; micro_steps]; count];
    let mut back = vec![vec![None; micro_steps]; count];
    on[0].fill(Some(0.0));
    back[count - 1].fill(Some(0.0));
    while turns.iter().any(|of| !of.is_empty()) {
        for stage in 0..count {
            while let Some(turn) = turns[stage].front().copied() {
                let ready = match turn {
                    Turn::Forward(number) => on[stage][number],
                    Turn::Backward(number) => back[stage][number].and_then(|at: f64| {
                        let came: Option<f64> = on[stage][number];
                        came.map(|came| came.max(at))
                    }),
                };
                let Some(ready) = ready else { break };
                turns[stage].pop_front();
                let of = stages[stage];
                match turn {
                    Turn::Forward(number) => {
                        clocks[stage] = clocks[stage].max(ready) + of.forward;
                        on[stage + 1][number] = Some(clocks[stage] + of.on);
                    }
                    Turn::Backward(number) => {
                        clocks[stage] = clocks[stage].max(ready) + of.backward;
                        if stage > 0 {
                            back[stage - 1][number] = Some(clocks[stage] + of.back);
                        }
                    }
                }
            }
        }
    }
    clocks.into_iter().fold(0.0, f64::max)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_stages_idle_as_the_formula_says() {
        for (stages, micro_steps) in [(2, 1), (2, 4), (4, 4), (4, 16), (3, 5)] {
            let last = Pass { forward: 0.0, backward: 3.0, ..Pass::default() };
            let mut all = vec![Pass { forward: 1.0, backward: 2.0, ..last }; stages];
            // The last one does both at once.
            all[stages - 1] = last;
            let (step, busy) = (step_seconds(&all, micro_steps), 3.0 * micro_steps as f64);
            assert!((1.0 - busy / step - idle_share(stages, micro_steps)).abs() < 1e-12, "{stages}, {micro_steps}");
        }
    }

    #[test]
    fn handing_on_takes_its_time_once_behind_one_another() {
        let of = |on: f64, back: f64| {
            let passes =
                [Pass { forward: 1.0, backward: 2.0, on, back }, Pass { backward: 3.0, on, back, ..Pass::default() }];
            step_seconds(&passes, 1)
        };
        assert_eq!((of(0.0, 0.0), of(0.5, 0.25)), (6.0, 6.75));
    }
}
