//! Metrics of a step, as the console line and as one JSON object of the log.

use serde_json::{Value, json};

use crate::trainer::flushed::Flushed;
use crate::words;

/// Metrics of one optimizer step.
#[derive(Clone, Debug, PartialEq)]
pub struct StepMetrics {
    /// From 0.
    pub step: u64,
    /// Passes over the data after this step; none for batches of the caller's.
    pub epoch: Option<f64>,
    /// Weighted mean of the token losses over all micro-batches, before the update.
    pub loss: f64,
    /// Norm of the averaged gradient, before clipping.
    pub grad_norm: f64,
    pub learning_rate: f64,
    /// Tokens of documents in which something is trained.
    pub tokens: u64,
    pub seconds: f64,
    /// Seconds in which the process waited for batches since the results of the step before; none without data.
    pub data_wait: Option<f64>,
    /// False when the norm was not finite and the weights were left alone.
    pub applied: bool,
    /// The factor of the loss in the backward pass; None if gradients are not stored in f16.
    pub loss_scale: Option<f32>,
    /// Model FLOPs utilisation, from 0 to 1; none where the device's peak is not known.
    pub mfu: Option<f64>,
    /// The same against the measured rate of matrix products; none where it was not measured.
    pub ceiling: Option<f64>,
    /// Bytes in use on the device, by all processes; on the CPU those of this process.
    pub memory: Option<usize>,
    /// Quantisers whose largest magnitude did not fit the scale that earlier steps gave, NaN where a magnitude was not
    /// finite; none where nothing is quantised.
    pub fp8_clipped: Option<f64>,
    /// The tensor of which the largest share of values became 0 in 8 bits; only in the results of the first step, in
    /// which tensors are scaled by their own magnitudes.
    pub fp8_flushed: Option<Flushed>,
    /// Metrics of the routers of a mixture of experts; None without any.
    pub routers: Option<RouterMetrics>,
    /// Metrics of the task, by name.
    pub task: Vec<(String, f64)>,
}

/// The routings of one step, over all layers with experts.
#[derive(Clone, Debug, PartialEq)]
pub struct RouterMetrics {
    /// Each expert's part of all choices: they add up to 1.
    pub load: Vec<f64>,
    /// Mean entropy of the probabilities of a token's experts; the logarithm of their number where they are even.
    pub entropy: f64,
    /// The loss of uneven loads before its coefficient: the number of experts of a token where all is even.
    pub loss: f64,
}

impl RouterMetrics {
    /// From the sums of a step.
    pub(crate) fn of(sums: &[f32]) -> Option<RouterMetrics> {
        let (choices, [routings, entropy, loss]) = sums.split_last_chunk::<3>()?;
        let [all, routings] = [choices.iter().sum::<f32>(), *routings].map(|sum| f64::from(sum).max(1.0));
        Some(RouterMetrics {
            load: choices.iter().map(|count| f64::from(*count) / all).collect(),
            entropy: f64::from(*entropy) / routings,
            loss: f64::from(*loss) / routings,
        })
    }

    /// The load of the busiest expert, in even loads.
    pub fn busiest(&self) -> f64 {
        self.load.iter().copied().fold(0.0, f64::max) * self.load.len() as f64
    }
}

/// One pass over the validation data.
#[derive(Clone, Debug, PartialEq)]
pub struct EvaluationMetrics {
    /// Steps that were done before.
    pub step: u64,
    /// The mean over the trained tokens; None where sampled answers are judged.
    pub loss: Option<f64>,
    /// Tokens that were read, or sampled.
    pub tokens: u64,
    pub seconds: f64,
    /// Metrics of the task, by name.
    pub task: Vec<(String, f64)>,
}

/// The metric that lines show: of pairs the share whose chosen answer has the higher reward, of samples the mean reward.
fn accuracy(task: &[(String, f64)]) -> String {
    let value = |names: &[&str]| task.iter().find(|(name, _)| names.contains(&name.as_str())).map(|(_, value)| *value);
    let share = value(&["rewards/accuracies", "accuracy"]).map(|share| format!(" | Accuracy: {:.1} %", share * 100.0));
    let reward = value(&["reward"]).map(|reward| format!(" | Reward: {reward:.3}"));
    share.or(reward).unwrap_or_default()
}

impl StepMetrics {
    pub fn tokens_per_second(&self) -> f64 {
        self.tokens as f64 / self.seconds.max(1e-9)
    }

    /// `Step 0/1000 | Loss: 2.3456 | Norm: 1.23 | LR: 1.00e-05 | 2.34s | 223891 tok/s`
    pub fn line(&self, total: Option<u64>) -> String {
        let total = total.map(|n| format!("/{n}")).unwrap_or_default();
        let rate = scientific(self.learning_rate);
        let speed = self.tokens_per_second();
        let mfu = self.mfu.map(|mfu| format!(" | MFU: {:.1} %", mfu * 100.0)).unwrap_or_default();
        let epoch = self.epoch.map(|epoch| format!(" | Epoch {epoch:.2}")).unwrap_or_default();
        let gib = |bytes: usize| format!(" | {:.2} GiB", bytes as f64 / (1u64 << 30) as f64);
        let memory = self.memory.map(gib).unwrap_or_default();
        let routers = self.routers.as_ref().map(|of| format!(" | Busiest expert: {:.2}x", of.busiest()));
        let routers = routers.unwrap_or_default();
        let task = accuracy(&self.task);
        let suppressed = match (self.applied, self.loss_scale) {
            (true, _) => String::new(),
            (false, None) => " | update suppressed: the gradient is not finite".to_owned(),
            (false, Some(scale)) => format!(" | update skipped: the gradient overflows at a loss scale of {scale}"),
        };
        format!(
            "Step {}{total} | Loss: {:.4} | Norm: {:.2} | LR: {rate} | {:.2}s | {speed:.0} tok/s{epoch}{mfu}{memory}{routers}{task}{suppressed}",
            self.step, self.loss, self.grad_norm, self.seconds
        )
    }

    pub fn to_json(&self) -> Value {
        let mut event = json!({
            "event": "step",
            "step": self.step,
            "epoch": self.epoch,
            "loss": self.loss,
            "grad_norm": self.grad_norm,
            "learning_rate": self.learning_rate,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "data_wait_seconds": self.data_wait,
            "tokens_per_second": self.tokens_per_second(),
            "mfu": self.mfu,
            "ceiling": self.ceiling,
            "memory": self.memory,
            "applied": self.applied,
        });
        if let Some(scale) = self.loss_scale {
            event["loss_scale"] = scale.into();
            event["skipped"] = (!self.applied).into();
        }
        if let Some(clipped) = self.fp8_clipped {
            event["fp8_clipped"] = if clipped.is_finite() { json!(clipped as u64) } else { Value::Null };
        }
        if let Some(flushed) = &self.fp8_flushed {
            event["fp8_flushed"] = flushed.to_json();
        }
        if let Some(of) = &self.routers {
            // Six digits: a line has one number for each expert.
            let short = |x: &f64| (x * 1e6).round() / 1e6;
            event["expert_load"] = of.load.iter().map(short).collect::<Vec<f64>>().into();
            event["busiest_expert"] = of.busiest().into();
            event["router_entropy"] = of.entropy.into();
            event["router_loss"] = of.loss.into();
        }
        for (name, value) in &self.task {
            event[name] = (*value).into();
        }
        event
    }
}

impl EvaluationMetrics {
    pub fn line(&self) -> String {
        format!(
            "Evaluation after {}{}{} | {} tokens | {:.2}s",
            words::count(self.step, "step"),
            self.loss.map(|loss| format!(" | Loss: {loss:.4}")).unwrap_or_default(),
            accuracy(&self.task),
            self.tokens,
            self.seconds
        )
    }

    pub fn to_json(&self) -> Value {
        let mut event = json!({
            "event": "evaluation",
            "step": self.step,
            "loss": self.loss,
            "tokens": self.tokens,
            "seconds": self.seconds,
        });
        for (name, value) in &self.task {
            event[name] = (*value).into();
        }
        event
    }
}

/// Two digits after the point and at least two of the exponent: `1.00e-05`.
fn scientific(x: f64) -> String {
    let text = format!("{x:.2e}");
    let (mantissa, exponent) = text.split_once('e').expect("the format has an exponent");
    let exponent: i32 = exponent.parse().expect("the exponent is a whole number");
    format!("{mantissa}e{}{:02}", if exponent < 0 { '-' } else { '+' }, exponent.abs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_console_line_has_its_form() {
        let metrics = StepMetrics {
            step: 0,
            epoch: None,
            loss: 2.34561,
            grad_norm: 1.234,
            learning_rate: 1e-5,
            tokens: 523905,
            seconds: 2.34,
            data_wait: None,
            applied: true,
            loss_scale: None,
            mfu: None,
            ceiling: None,
            memory: None,
            fp8_clipped: None,
            fp8_flushed: None,
            routers: None,
            task: Vec::new(),
        };
        let line = "Step 0/1000 | Loss: 2.3456 | Norm: 1.23 | LR: 1.00e-05 | 2.34s | 223891 tok/s";
        assert_eq!(metrics.line(Some(1000)), line);
        let metrics = StepMetrics { epoch: Some(0.5), mfu: Some(0.4871), memory: Some(3 << 29), ..metrics };
        assert_eq!(metrics.line(Some(1000)), format!("{line} | Epoch 0.50 | MFU: 48.7 % | 1.50 GiB"));
        let routers = RouterMetrics::of(&[3.0, 1.0, 0.0, 4.0, 2.0, 4.0, 6.0]);
        let expected = RouterMetrics { load: vec![0.375, 0.125, 0.0, 0.5], entropy: 1.0, loss: 1.5 };
        let expected = RouterMetrics { entropy: 4.0 / 2.0, loss: 6.0 / 2.0, ..expected };
        assert_eq!(routers, Some(expected));
        let metrics = StepMetrics { routers, ..metrics };
        assert!(metrics.line(None).ends_with("1.50 GiB | Busiest expert: 2.00x"), "{}", metrics.line(None));
        assert_eq!(metrics.to_json()["expert_load"], json!([0.375, 0.125, 0.0, 0.5]));
        assert_eq!(scientific(0.0), "0.00e+00");
        assert_eq!(scientific(0.00255), "2.55e-03");
    }
}
