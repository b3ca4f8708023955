//! Changes of numbers by rounding, when a result has fewer bits than its source. Knows numbers; not why they are
//! rounded.

use rayon::prelude::*;
use tensor::{DType, HostTensor};

/// The differences between values and what they were rounded to, over any number of tensors.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Rounding {
    largest: f64,
    squares: f64,
    whole: f64,
    /// Finite numbers that became infinite by rounding.
    beyond: usize,
}

impl Rounding {
    /// Takes in values and what became of them.
    pub fn add(&mut self, exact: &[f32], rounded: &[f32]) {
        const PART: usize = 1 << 16;
        let parts = exact.par_chunks(PART).zip(rounded.par_chunks(PART));
        let parts: Vec<Rounding> = parts.map(|(exact, rounded)| Rounding::of(exact, rounded)).collect();
        parts.into_iter().for_each(|of| self.join(of));
    }

    /// Some values and what became of them, on one thread.
    pub fn of(exact: &[f32], rounded: &[f32]) -> Rounding {
        let mut of = Rounding::default();
        for (exact, rounded) in exact.iter().zip(rounded) {
            if !exact.is_finite() || !rounded.is_finite() {
                of.beyond += usize::from(exact.is_finite());
                continue;
            }
            let difference = f64::from(exact - rounded).abs();
            of.largest = of.largest.max(difference);
            of.squares += difference.powi(2);
            of.whole += f64::from(*exact).powi(2);
        }
        of
    }

    /// A tensor in another type; what that rounds is taken in.
    pub fn cast(&mut self, tensor: HostTensor, dtype: DType) -> HostTensor {
        if tensor.dtype == dtype {
            return tensor;
        }
        let cast = tensor.cast(dtype);
        self.add(&tensor.to_f32(), &cast.to_f32());
        cast
    }

    /// Takes in what was found elsewhere.
    pub fn join(&mut self, of: Rounding) {
        self.largest = self.largest.max(of.largest);
        self.squares += of.squares;
        self.whole += of.whole;
        self.beyond += of.beyond;
    }

    /// Numbers that are larger than the form holds, and so became infinite.
    pub fn beyond(&self) -> usize {
        self.beyond
    }

    /// A sentence on what was rounded to this form; none where every value is what it was.
    pub fn text(&self, form: &str) -> Option<String> {
        let share = 100.0 * (self.squares / self.whole.max(f64::MIN_POSITIVE)).sqrt();
        let beyond = match self.beyond {
            0 => String::new(),
            n => format!("{n} of them are larger than it holds and became infinite; of the others, "),
        };
        (self.largest > 0.0 || self.beyond > 0).then(|| {
            format!(
                "values were rounded to {form}: {beyond}the largest change is {:.1e}, the root mean square of all {share:.2} % of that \
                 of the values",
                self.largest
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_are_told_and_their_absence_is_not() {
        let mut of = Rounding::default();
        of.add(&[1.0, 2.0], &[1.0, 2.0]);
        assert_eq!(of.text("bf16"), None);
        of.add(&[3.0, -2.0], &[3.5, -2.0]);
        let text = of.text("bf16").unwrap();
        // 0.5 / √(1 + 4 + 9 + 4)
        assert!(text.contains("rounded to bf16") && text.contains("5.0e-1") && text.contains("11.79 %"), "{text}");
        let mut of = Rounding::default();
        of.add(&[1.0, 7e4, f32::INFINITY], &[1.0, f32::INFINITY, f32::INFINITY]);
        let text = of.text("f16").unwrap();
        assert!(text.contains("1 of them are larger than it holds and became infinite"), "{text}");
    }
}
