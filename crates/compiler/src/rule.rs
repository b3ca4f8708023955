//! The update rule of a parameter: the operation, the numbers of the options that it takes, and the states that persist
//! from step to step. An optimizer may treat its parameters differently. Knows no places in memory.

use graph::{OpId, Parameter};
use ops::id;
use program::scalar;
use tensor::{Attrs, DType, HostTensor};

use crate::options::{OptimizerKind, OptimizerOptions};

/// Tensors with fewer elements keep f32 moments under the 8-bit optimizer.
const SMALLEST_8BIT: usize = 4096;

/// The update of one parameter. In the order of the arenas.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Rule {
    AdamW8bit,
    AdamW,
    /// One matrix after the other (`update/matrices.rs`).
    NorMuon,
    /// Moves biases towards even loads of experts, whatever the optimizer is. The values in the place of gradients are
    /// none.
    EvenBias,
}

/// A tensor that is kept for every parameter.
pub(crate) struct State {
    /// The name that checkpoints have for it.
    pub name: &'static str,
    pub dtype: DType,
    pub per: Per,
}

/// The unit for which a state has one element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Per {
    Element,
    /// A block of 256 elements.
    Block,
    /// A row of a matrix.
    Row,
}

/// The properties by which parameters of one rule differ.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Pace {
    /// True if the weights decay here.
    pub decay: bool,
    /// Factor of the learning rate.
    pub rate: f64,
}

impl Pace {
    /// The attributes of an update with what it takes of these.
    pub fn on(self, attrs: Attrs, optimizer: &OptimizerOptions) -> Attrs {
        let attrs = attrs.with("weight_decay", if self.decay { optimizer.weight_decay } else { 0.0 });
        if self.rate == 1.0 { attrs } else { attrs.with("rate", self.rate) }
    }
}

const fn state(name: &'static str, dtype: DType, per: Per) -> State {
    State { name, dtype, per }
}

impl Rule {
    pub fn of(kind: OptimizerKind, parameter: &Parameter) -> Rule {
        let elements: usize = parameter.shape.iter().product();
        match kind {
            _ if parameter.buffer => Rule::EvenBias,
            OptimizerKind::AdamW8bit if elements >= SMALLEST_8BIT => Rule::AdamW8bit,
            OptimizerKind::NorMuon { .. } if parameter.is_matrix() && !parameter.table => Rule::NorMuon,
            OptimizerKind::AdamW | OptimizerKind::AdamW8bit | OptimizerKind::NorMuon { .. } => Rule::AdamW,
        }
    }

    /// Returns the operation that writes the weights. That of a rule of elements writes the states after them, in their
    /// order.
    pub fn operation(self) -> OpId {
        match self {
            Rule::AdamW8bit => id::ADAMW_8BIT,
            Rule::AdamW => id::ADAMW,
            Rule::NorMuon => id::NORMUON,
            Rule::EvenBias => id::EVEN_BIAS,
        }
    }

    pub fn states(self) -> &'static [State] {
        const ADAMW: &[State] = &[state("first", DType::F32, Per::Element), state("second", DType::F32, Per::Element)];
        const ADAMW_8BIT: &[State] = &[
            state("first", DType::U8, Per::Element),
            state("second", DType::U8, Per::Element),
            state("first_scale", DType::F32, Per::Block),
            state("second_scale", DType::F32, Per::Block),
        ];
        const NORMUON: &[State] = &[state("first", DType::F32, Per::Element), state("rows", DType::F32, Per::Row)];
        match self {
            Rule::AdamW8bit => ADAMW_8BIT,
            Rule::AdamW => ADAMW,
            Rule::NorMuon => NORMUON,
            Rule::EvenBias => &[],
        }
    }

    /// True if matrices are updated, not elements: they are laid out and taken together by their extents.
    pub fn takes_matrices(self) -> bool {
        self == Rule::NorMuon
    }

    /// True if the parameter follows gradients: then they count in the norm, and weights may decay and are rounded.
    pub fn descends(self) -> bool {
        self != Rule::EvenBias
    }

    /// Returns the numbers that the operation of a rule of elements takes from the options.
    pub fn attributes(self, optimizer: &OptimizerOptions) -> Attrs {
        match self {
            Rule::AdamW8bit | Rule::AdamW => Attrs::new()
                .with("beta1", optimizer.beta1)
                .with("beta2", optimizer.beta2)
                .with("epsilon", optimizer.epsilon),
            Rule::EvenBias => Attrs::new().with("rate", optimizer.bias_rate.expect("biases are trained at a rate")),
            Rule::NorMuon => panic!("matrices have an update of their own"),
        }
    }

    /// Returns the step scalars that the operation of a rule of elements takes after the gradient.
    pub fn scalars(self) -> &'static [&'static str] {
        match self {
            Rule::AdamW8bit | Rule::AdamW => &[
                scalar::LEARNING_RATE,
                scalar::BIAS_CORRECTION_1,
                scalar::BIAS_CORRECTION_2,
                scalar::GRADIENT_SCALE,
                scalar::UPDATE_APPLIED,
                scalar::STEP,
            ],
            Rule::EvenBias => &[scalar::UPDATE_APPLIED],
            Rule::NorMuon => panic!("matrices have an update of their own"),
        }
    }

    /// Returns the tables that its operation takes after the scalars.
    pub fn tables(self) -> Vec<HostTensor> {
        match self {
            Rule::AdamW8bit => [true, false].map(code_book).into(),
            Rule::AdamW | Rule::NorMuon | Rule::EvenBias => Vec::new(),
        }
    }
}

/// The code book of the 8-bit states.
fn code_book(signed: bool) -> HostTensor {
    let mut result = [(vec![256], ops::evaluate::Array::<f32>::Real(vec![0.0; 256]))];
    ops::evaluate::apply(ops::get(id::DYNAMIC_MAP), &Attrs::new().with("signed", signed), &[], &mut result);
    HostTensor::from_f32([256], result[0].1.real())
}

#[cfg(test)]
mod tests {
    use ops::examples::instantiate;

    use super::*;

    #[test]
    fn a_rule_of_elements_keeps_what_its_operation_updates() {
        for rule in [Rule::AdamW8bit, Rule::AdamW, Rule::EvenBias] {
            let op = ops::get(rule.operation());
            let call = instantiate(&op.examples()[0], op, DType::BF16, 1);
            let updated: Vec<DType> = call.outputs.iter().skip(1).map(|tensor| tensor.dtype).collect();
            assert_eq!(rule.states().iter().map(|state| state.dtype).collect::<Vec<_>>(), updated, "{rule:?}");
            assert_eq!(call.inputs.len(), 1 + rule.scalars().len() + rule.tables().len(), "{rule:?}");
        }
    }
}
