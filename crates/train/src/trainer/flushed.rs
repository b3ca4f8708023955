//! Values that became 0 in E4M3 in the first step: reported once, and in no checkpoint.

use serde_json::{Value, json};
use tensor::HostTensor;

use crate::engine::Engine;
use crate::error::Result;

/// The tensor of values of which the largest share became 0 in E4M3 in the first step, when its own magnitude scaled it.
#[derive(Clone, Debug, PartialEq)]
pub struct Flushed {
    /// The quantiser's name: the first linear that reads the tensor, and `.x`.
    pub tensor: String,
    /// The share of its nonzero elements that became 0, over all micro-batches of all GPUs.
    pub share: f64,
}

impl Flushed {
    /// A line on it for the user.
    pub(crate) fn line(&self) -> String {
        let share = match self.share * 100.0 {
            percent if percent < 0.01 => "less than 0.01".to_owned(),
            percent => format!("{percent:.2}"),
        };
        format!(
            "Note: {share} % of the values of {} that are not 0 became 0 in 8 bits, more than of any other tensor",
            self.tensor
        )
    }

    pub(crate) fn to_json(&self) -> Value {
        json!({ "tensor": self.tensor, "share": self.share })
    }

    /// The largest share by the counts of all ranks; None if all values were 0. The first of several equal ones.
    pub(crate) fn of(engine: &mut Engine) -> Result<Option<Flushed>> {
        let program = engine.program().clone();
        let Some(scaling) = &program.layout.scaling else { return Ok(None) };
        let count = scaling.quantisers.len();
        let mut sums = vec![0.0; 2 * count];
        for rank in 0..engine.ranks() {
            let mut counts = HostTensor::zeros(scaling.counts.dtype, scaling.counts.shape.clone());
            engine.session().read_rank(rank, &scaling.counts, &mut counts.bytes)?;
            sums.iter_mut().zip(counts.to_f64()).for_each(|(sum, count)| *sum += count);
        }
        let (nonzero, flushed) = sums.split_at(count);
        let mut most: Option<Flushed> = None;
        for (of, (nonzero, flushed)) in scaling.quantisers.iter().zip(nonzero.iter().zip(flushed)) {
            let share = flushed / nonzero;
            if *nonzero > 0.0 && most.as_ref().is_none_or(|most| share > most.share) {
                most = Some(Flushed { tensor: of.name.clone(), share });
            }
        }
        Ok(most)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_told_in_percent() {
        let line = |share: f64| Flushed { tensor: "a.x".into(), share }.line();
        assert!(line(1.0 / 3.0).starts_with("Note: 33.33 % of the values of a.x "), "{}", line(1.0 / 3.0));
        assert!(line(1e-6).starts_with("Note: less than 0.01 % of the values of a.x "), "{}", line(1e-6));
    }
}
