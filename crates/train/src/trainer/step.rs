//! A training step: accumulation, update, and the asynchronous reading of its results; evaluation. The same calls serve
//! the command line's loop and Python.

use std::time::Instant;

use data::Batch;
use program::{Arch, EntryKind, Reading, Variant, scalar};

use crate::engine::Engine;
use crate::engine::instruments::resident;
use crate::engine::probe;
use crate::error::{Result, TrainError};
use crate::input::feed::tokens_of;
use crate::trainer::Trainer;
use crate::trainer::flushed::Flushed;
use crate::trainer::in_flight::{Fed, Started};
use crate::trainer::metrics::{EvaluationMetrics, RouterMetrics, StepMetrics};
use crate::trainer::progress::Progress;
use crate::trainer::reference::check_batches;
use crate::trainer::schedule::LearningRate;
use crate::trainer::state::Overflow;

/// Suppressed updates in a row after which a run is given up.
const MAX_SUPPRESSED: u64 = 5;
/// The same where each of them halves the loss scale, which may be all that is wrong.
const MAX_SKIPPED: u64 = 50;

/// The scalars that a step computes, in this order.
const RESULTS: [&str; 6] = [
    scalar::LOSS_SUM,
    scalar::WEIGHT_SUM,
    scalar::GRADIENT_NORM,
    scalar::UPDATE_APPLIED,
    scalar::LOSS_SCALE_USED,
    scalar::FP8_CLIPPED,
];

/// The result of an evaluation.
#[derive(Debug)]
pub(crate) enum Evaluation {
    Done(EvaluationMetrics),
    /// Nothing is held out for validation.
    NoData,
    /// A user requested to stop.
    Aborted,
}

/// The result of [`Trainer::advance`].
#[derive(Debug)]
pub(crate) enum Advance {
    /// A further step was started. The results are those of the last step that is known: this one, where the
    /// backend runs at once, or the one before.
    Started(Option<StepMetrics>),
    /// Nothing was started: the results of the step before say that the run has diverged.
    Diverged(StepMetrics),
    /// The data have come to their end; nothing is in flight.
    Ended(Option<StepMetrics>),
}

impl Trainer {
    /// The next micro-batches of the data: fewer than a full step at the end of an epoch, none after the last.
    fn next_batches(&mut self) -> Result<Vec<Batch>> {
        if self.rollouts.is_some() {
            return self.next_samples();
        }
        let accumulation = self.config.micro_steps() as usize;
        let Some(feed) = &mut self.feed else {
            let problems = self.config.check_datasets();
            return Err(TrainError::Config(problems));
        };
        // A part of a pass ends before the data do.
        if self.config.training.fixed_steps().is_none()
            && self.schedule.is_some_and(|of| self.progress.step >= of.total)
        {
            return Ok(Vec::new());
        }
        let batches = feed.next_step(accumulation, self.config.replicas())?;
        self.with_own_answers(batches)
    }

    /// Waits for the data of the next step. False: `stop` said so, and nothing was begun.
    pub(crate) fn wait_for_data(&mut self, stop: &mut dyn FnMut() -> bool) -> bool {
        let batches = self.config.micro_steps() as usize * self.config.replicas();
        self.feed.as_mut().is_none_or(|feed| feed.wait_for_step(batches, stop))
    }

    fn one_per_row(&self) -> bool {
        self.rollouts.is_some() || self.feed.as_ref().is_some_and(|feed| feed.one_per_row)
    }

    /// One step on the next batches of the data; `None` at their end.
    pub fn next_step(&mut self, learning_rate: Option<f64>) -> Result<Option<StepMetrics>> {
        let batches = self.next_batches()?;
        if batches.is_empty() {
            return Ok(None);
        }
        let one_per_row = self.one_per_row();
        self.step_on(batches, one_per_row, learning_rate).map(Some)
    }

    /// One step on batches of the caller's: all of one shape, one for each micro-step of each rank, distributed round-robin.
    pub fn step(&mut self, batches: &[Batch], learning_rate: Option<f64>) -> Result<StepMetrics> {
        self.step_on(batches.to_vec(), false, learning_rate)
    }

    fn step_on(&mut self, batches: Vec<Batch>, one_per_row: bool, learning_rate: Option<f64>) -> Result<StepMetrics> {
        let learning_rate = self.rate(learning_rate)?;
        let begin = Instant::now();
        let fed = self.micro_steps(batches, one_per_row)?;
        self.update(fed, learning_rate, begin)?;
        let mut metrics = self.settle()?.expect("a step was just started");
        self.add_flushed(&mut metrics)?;
        Ok(metrics)
    }

    /// Starts the next step of the data before it reads the results of the one before: the device has work while
    /// the host reads. The update of the next step is only started when the step before is known to be sound.
    pub(crate) fn advance(&mut self) -> Result<Advance> {
        // Answers are sampled from the weights that the step before leaves.
        let samples = self.rollouts.is_some() || self.on_policy.is_some();
        let mut before = if samples { self.settle()? } else { None };
        if let Some(metrics) = before.take_if(|metrics| self.divergence(metrics).is_some()) {
            return Ok(Advance::Diverged(metrics));
        }
        let batches = self.next_batches()?;
        if batches.is_empty() {
            return Ok(Advance::Ended(before.or(self.settle()?)));
        }
        // A student's own answers have shapes of their own.
        if self.overflow == Overflow::Never && self.on_policy.is_none() {
            let note = self.feed.as_ref().and_then(|feed| feed.note_on_overflow(&batches));
            self.overflow = note.map_or(Overflow::Never, Overflow::Unreported);
        }
        let learning_rate = self.rate(None)?;
        let one_per_row = self.one_per_row();
        let begin = Instant::now();
        // Where a shape does not fit together with the states, the session goes in which the results are.
        if before.is_none() && !self.has_shapes(&batches, one_per_row) {
            before = self.settle()?;
        }
        let fed = self.micro_steps(batches, one_per_row)?;
        if before.is_none() {
            before = self.settle()?;
        }
        if let Some(metrics) = before.take_if(|metrics| self.divergence(metrics).is_some()) {
            return Ok(Advance::Diverged(metrics));
        }
        self.update(fed, learning_rate, begin)?;
        let at_once = matches!(&self.in_flight.started, Some(Started { results: Reading::Done(_), .. }));
        Ok(Advance::Started(if at_once { self.settle()? } else { before }))
    }

    /// True if the compiled model takes the batches without compiling.
    fn has_shapes(&self, batches: &[Batch], one_per_row: bool) -> bool {
        let Some(engine) = &self.engine else { return false };
        batches.chunks(engine.replicas()).all(|round| engine.has(engine.variant_of(round, one_per_row)))
    }

    /// Runs forward and backward passes.
    fn micro_steps(&mut self, batches: Vec<Batch>, one_per_row: bool) -> Result<Fed> {
        // Others know of the batches that they have.
        let is_untrained = |batch: &Batch| batch.weight_sum() == 0.0 && batch.remote.is_none_or(|tokens| tokens == 0);
        if batches.iter().all(is_untrained) {
            let text = "no token of the step is trained: every label is -100 or has no token before it";
            return Err(TrainError::Usage(text.into()));
        }
        self.source.check_ids(&batches)?;
        let replicas = self.config.replicas();
        check_rounds(&batches, replicas)?;
        check_batches(self.config.task, &batches)?;
        self.check_windows(&batches)?;
        let batches = self.with_reference(batches, one_per_row)?;
        let first_micro_step = self.progress.micro_step;
        let engine = self.engine_for(&batches[..replicas], one_per_row)?;
        // All shapes first: where one does not fit together with the states, weights move, but not gradients.
        let rounds = batches.chunks(replicas);
        let wanted: Vec<Variant> = rounds.map(|round| engine.variant_of(round, one_per_row)).collect();
        let variants = engine.prepare_all(&wanted)?;
        let last = variants.len() - 1;
        for (index, (round, variant)) in batches.chunks(replicas).zip(variants).enumerate() {
            // Of one round at a time: distributions over a vocabulary are large.
            let taught = self.with_teacher(round, one_per_row)?;
            let engine = self.engine_for(&taught, one_per_row)?;
            engine.number_micro_steps(first_micro_step + (index * replicas) as u64)?;
            engine.run_micro_step(index == 0, index == last, variant, &taught)?;
        }
        Ok(Fed { batches, one_per_row, first_micro_step })
    }

    /// An error where a document is longer than those for which the program was compiled without windows of attention: answers
    /// that share a prompt see it whole.
    fn check_windows(&self, batches: &[Batch]) -> Result<()> {
        let Some(most) = self.plan.compile.branches else { return Ok(()) };
        let longer = batches.iter().filter(|batch| batch.seq_len > most);
        let Some(tokens) = longer.map(Batch::longest_document).max().filter(|tokens| *tokens > most) else {
            return Ok(());
        };
        match compiler::branches_obstacle(&self.source.model, &self.plan.compile, tokens)? {
            None => Ok(()),
            Some(why) => Err(TrainError::Usage(format!(
                "a document of a batch has {tokens} tokens, and answers share their prompts in documents of at most {most}: \
                 {why}\n  hint: set `share_prompts: false`, or `sequence_len: {tokens}`"
            ))),
        }
    }

    /// Runs the update and begins to read the step's results. The step before has been read: its update may have
    /// been suppressed, which the bias corrections of this one must know.
    fn update(&mut self, fed: Fed, learning_rate: f64, begin: Instant) -> Result<()> {
        assert!(self.in_flight.started.is_none(), "the results of the step before are read first");
        if self.progress.frozen.is_none() && self.compression_warmup().is_some_and(|of| of <= self.progress.updates) {
            self.progress.frozen = Some(self.progress.updates);
        }
        let Progress { step, updates, frozen, .. } = self.progress;
        let engine = self.engine.as_mut().expect("micro-steps ran in it");
        write_update_scalars(engine, step, updates, frozen, learning_rate)?;
        engine.update(frozen.is_some())?;
        let reported = scalar::REPORTS.into_iter().filter(|name| engine.program().scalar(name).is_some());
        let names: Vec<&str> = RESULTS.into_iter().chain(reported).collect();
        let results = engine.read_scalars(&names)?;
        self.progress.step += 1;
        self.progress.micro_step += fed.batches.len() as u64;
        self.in_flight.started = Some(Started { fed, results, step, learning_rate, begin });
        Ok(())
    }

    /// Updates before first moments are compressed; none where they never are.
    fn compression_warmup(&self) -> Option<u64> {
        let LearningRate { total, warmup, .. } = self.schedule?;
        self.config.sharding.compression_warmup(total, warmup)
    }

    /// Waits for the results of the step that is in flight; none where nothing is.
    pub(crate) fn settle(&mut self) -> Result<Option<StepMetrics>> {
        let Some(Started { fed, results, step, learning_rate, begin }) = self.in_flight.started.take() else {
            return Ok(None);
        };
        let engine = self.engine.as_mut().expect("a step ran in it");
        let values = engine.finish_scalars(results)?;
        let [sum, weight, grad_norm, applied, loss_scale, clipped, ref reports @ ..] = values[..] else {
            panic!("as many results as were requested")
        };
        let routers = engine.program().scalar(scalar::ROUTER_REPORT).map_or(0, program::TensorRef::len);
        let (routers, of_task) = reports.split_at(routers);
        let of_task: Vec<f64> = of_task.iter().map(|sum| f64::from(*sum)).collect();
        let applied = applied != 0.0;
        let loss_scale = engine.scales_loss().then_some(loss_scale);
        let quantised = engine.program().layout.scaling.is_some();
        let memory = engine.session().memory_in_use()?.or_else(resident);
        self.progress.updates += u64::from(applied);
        self.progress.suppressed = if applied { 0 } else { self.progress.suppressed + 1 };
        let now = Instant::now();
        let begin = self.in_flight.read.map_or(begin, |read| read.max(begin));
        let seconds = now.duration_since(begin).as_secs_f64();
        let tokens: u64 = fed.batches.iter().map(tokens_of).sum();
        let (peak, ceiling) = (program::peak(&self.device.machine.name), self.ceiling());
        let flops = if peak.is_some() || ceiling.is_some() { self.flops_of(&fed) } else { None };
        let rate = flops.map(|flops| flops / seconds.max(1e-9));
        let mfu = rate.zip(peak).map(|(rate, peak)| rate / peak);
        let ceiling = rate.zip(ceiling).map(|(rate, ceiling)| rate / ceiling);
        self.in_flight.read = Some(now);
        self.in_flight.last = Some(fed);
        let loss = f64::from(sum) / f64::from(weight);
        let of_task = self.task_metrics(&of_task);
        self.check_exactness(step, &of_task)?;
        let metrics_of_samples = self.metrics_of_samples();
        self.progress.loss = loss.is_finite().then_some(loss);
        let data_wait = self.feed.as_mut().map(|feed| feed.take_waited());
        Ok(Some(StepMetrics {
            step,
            epoch: self.epochs(step + 1),
            loss,
            grad_norm: f64::from(grad_norm),
            learning_rate,
            tokens,
            seconds,
            data_wait,
            applied,
            loss_scale,
            mfu,
            ceiling,
            memory,
            fp8_clipped: quantised.then_some(f64::from(clipped)),
            fp8_flushed: None,
            routers: RouterMetrics::of(routers),
            task: of_task.into_iter().chain(metrics_of_samples).collect(),
        }))
    }

    /// Passes over the data after this many steps; none without data.
    pub(crate) fn epochs(&self, steps: u64) -> Option<f64> {
        let of_prompts = || self.rollouts.as_ref().map(|of| of.epochs(&self.config, steps));
        self.feed.as_ref().map(|feed| feed.epochs(&self.config, steps)).or_else(of_prompts)
    }

    /// The FLOP/s that the device was measured to reach at most on the products of a micro-step, each in its type; None
    /// for a CPU, of which nothing was measured.
    fn ceiling(&self) -> Option<f64> {
        let machine = &self.device.machine;
        let program = self.engine.as_ref()?.program();
        let entry = program.entries.iter().find(|entry| entry.kind == EntryKind::FirstMicroStep)?;
        (machine.arch != Arch::Cpu).then(|| program::products_ceiling(entry, machine))?
    }

    /// The reason why the run cannot continue after a step, in words: a loss that is no number, or gradients that stay
    /// none, whose updates are suppressed, so that nothing can change any more.
    fn divergence(&self, metrics: &StepMetrics) -> Option<String> {
        if !metrics.loss.is_finite() {
            return Some(format!("the loss of step {} is {}", metrics.step, metrics.loss));
        }
        if metrics.fp8_clipped.is_some_and(f64::is_nan) {
            let what = "a value or gradient that is quantised is not finite";
            return Some(format!("{what}, in step {}", metrics.step));
        }
        let last = metrics.step;
        let most = if metrics.loss_scale.is_some() { MAX_SKIPPED } else { MAX_SUPPRESSED };
        let scale = metrics.loss_scale.map(|scale| format!(", the last with a loss scale of {scale:e}"));
        let stuck = self.progress.suppressed >= most;
        stuck.then(|| format!("the gradients of {most} steps up to {last} are not finite{}", scale.unwrap_or_default()))
    }

    /// An error that says what went wrong in the step that was read last, and where it began, if anything did.
    pub(crate) fn check_convergence(&mut self, metrics: &StepMetrics) -> Result<()> {
        let Some(what) = self.divergence(metrics) else { return Ok(()) };
        let Some(Fed { batches, one_per_row, first_micro_step }) = self.in_flight.last.take() else {
            return Err(TrainError::Diverged { what });
        };
        let rounds = batches.chunks(self.config.replicas());
        let taught = rounds.map(|round| self.with_teacher(round, one_per_row)).collect::<Result<Vec<_>>>()?;
        let Some(engine) = &mut self.engine else { return Err(TrainError::Diverged { what }) };
        let found = probe::find(engine, &taught.concat(), one_per_row, first_micro_step)?;
        let whence = found.unwrap_or_else(|| "the same batches once more give finite values everywhere".to_owned());
        Err(TrainError::Diverged { what: format!("{what}: {whence}") })
    }

    fn rate(&self, given: Option<f64>) -> Result<f64> {
        match (given, &self.schedule) {
            (Some(rate), _) if (0.0..=f64::from(f32::MAX)).contains(&rate) => Ok(rate),
            (Some(rate), _) => {
                Err(TrainError::Usage(format!("learning_rate is {rate}, expected a number from 0 that f32 holds")))
            }
            (None, Some(schedule)) => Ok(schedule.at(self.progress.step)),
            (None, None) => Err(TrainError::Usage(
                "the schedule needs the number of steps: set `max_steps`, or give each step its learning rate".into(),
            )),
        }
    }

    /// The task's metrics from their sums, in the order in which it declares them.
    fn task_metrics(&self, sums: &[f64]) -> Vec<(String, f64)> {
        let task = self.source.model.tasks.iter().find(|task| task.name == self.config.task.loss());
        let names = task.into_iter().flat_map(|task| &task.metrics);
        let pairs = sums.chunks_exact(2).zip(names).filter(|(sums, _)| sums[1] != 0.0);
        let mut found: Vec<(String, f64)> = pairs.map(|(sums, name)| (name.clone(), sums[0] / sums[1])).collect();
        for [name, of, less] in task.into_iter().flat_map(|task| &task.differences) {
            let value = |name: &String| found.iter().find(|(known, _)| known == name).map(|(_, value)| *value);
            if let (Some(of), Some(less)) = (value(of), value(less)) {
                found.push((name.clone(), of - less));
            }
        }
        found
    }

    /// The loss over all validation data, or the rewards of answers to held-out prompts; `None` where there is none.
    pub fn evaluate(&mut self) -> Result<Option<EvaluationMetrics>> {
        match self.evaluate_unless(&mut || false)? {
            Evaluation::Done(metrics) => Ok(Some(metrics)),
            Evaluation::NoData => Ok(None),
            Evaluation::Aborted => unreachable!("`stops` is always false"),
        }
    }

    /// Evaluates as [`Trainer::evaluate`]; aborts when `stops` returns true, which is called before every batch. It
    /// then counts as not begun.
    pub(crate) fn evaluate_unless(&mut self, stops: &mut dyn FnMut() -> bool) -> Result<Evaluation> {
        if self.rollouts.is_some() {
            return self.evaluate_answers(stops);
        }
        let start = Instant::now();
        let mut loader = match &self.feed {
            Some(feed) => feed.validation()?,
            None => None,
        };
        let Some(loader) = &mut loader else { return Ok(Evaluation::NoData) };
        let (one_per_row, replicas) = (self.one_per_row(), self.config.replicas());
        let (mut sum, mut weight, mut tokens_seen) = (0.0, 0.0, 0);
        let mut reported: Vec<f64> = Vec::new();
        loop {
            if stops() {
                return Ok(Evaluation::Aborted);
            }
            let round = loader.take(replicas).collect::<std::result::Result<Vec<_>, _>>().map_err(TrainError::Data)?;
            if round.is_empty() {
                break;
            }
            check_batches(self.config.task, &round)?;
            let round = self.with_reference(round, one_per_row)?;
            let round = self.with_teacher(round, one_per_row)?;
            let engine = self.engine_for(&round, one_per_row)?;
            let variant = engine.prepare(engine.variant_of(&round, one_per_row))?;
            engine.clear_report(scalar::TASK_REPORT)?;
            engine.set_f32(scalar::LOSS_SUM, 0.0)?;
            engine.set_f32(scalar::WEIGHT_SUM, 0.0)?;
            engine.run(EntryKind::Evaluate, variant, &round)?;
            sum += engine.sum_f32(scalar::LOSS_SUM)?;
            weight += engine.sum_f32(scalar::WEIGHT_SUM)?;
            let sums = engine.sum_report(scalar::TASK_REPORT)?.unwrap_or_default();
            reported.resize(sums.len(), 0.0);
            reported.iter_mut().zip(sums).for_each(|(all, sum)| *all += sum);
            tokens_seen += round.iter().map(tokens_of).sum::<u64>();
        }
        let seconds = start.elapsed().as_secs_f64();
        let step = self.progress.step;
        self.progress.evaluated = Some(step);
        let loss = sum / weight;
        let task = self.task_metrics(&reported);
        self.evaluated.clone_from(&task);
        self.add_evaluation(loss);
        Ok(Evaluation::Done(EvaluationMetrics { step, loss: Some(loss), tokens: tokens_seen, seconds, task }))
    }
}

/// Batches come in rounds, of the same extents.
fn check_rounds(batches: &[Batch], replicas: usize) -> Result<()> {
    if !batches.len().is_multiple_of(replicas) {
        let text = format!("{} micro-batches are no whole number of rounds of {replicas}", batches.len());
        return Err(TrainError::Usage(text));
    }
    let extents = |batch: &Batch| (batch.batch, batch.seq_len);
    match batches.chunks(replicas).position(|round| round.iter().any(|batch| extents(batch) != extents(&round[0]))) {
        None => Ok(()),
        Some(round) => {
            let found: Vec<String> = batches[round * replicas..][..replicas]
                .iter()
                .map(|batch| format!("{} × {}", batch.batch, batch.seq_len))
                .collect();
            let text = format!("the micro-batches of a round have the extents {}, expected one", found.join(", "));
            Err(TrainError::Usage(text))
        }
    }
}

/// Learning rate, bias corrections and step number of an update, of which `updates` were applied before; second moments are
/// those of the first `frozen` of them, if they stay.
fn write_update_scalars(
    engine: &mut Engine,
    step: u64,
    updates: u64,
    frozen: Option<u64>,
    learning_rate: f64,
) -> Result<()> {
    let training = engine.options().training.clone().and_then(|training| training.optimizer);
    let optimizer = training.expect("a trainer has an optimizer");
    let correction = |beta: f64, updates: u64| (1.0 - beta.powi(updates as i32)) as f32;
    engine.set_f32(scalar::LEARNING_RATE, learning_rate as f32)?;
    engine.set_f32(scalar::BIAS_CORRECTION_1, correction(optimizer.beta1, updates + 1))?;
    engine.set_f32(scalar::BIAS_CORRECTION_2, correction(optimizer.beta2, frozen.unwrap_or(updates + 1)))?;
    engine.set_i32(scalar::STEP, step as i32)
}

impl Trainer {
    /// Adds what became 0 to the results of the first step: after it there are histories, and nothing is counted any more.
    /// Reads the memory of all ranks: of several nodes, node 0 does it while the others wait.
    pub(crate) fn add_flushed(&mut self, metrics: &mut StepMetrics) -> Result<()> {
        if metrics.fp8_clipped.is_some() && std::mem::take(&mut self.tells_flushed) {
            metrics.fp8_flushed = Flushed::of(self.engine()?)?;
        }
        Ok(())
    }
}
