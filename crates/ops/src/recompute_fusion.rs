//! Forward operations that the backward pass may repeat together with a gradient which reads the same operands: one
//! operation for both reads them once. Knows which operations those are; not when something is repeated.

/// `again` and `gradient` at once: `joint` takes the inputs of `gradient` but those that `again` gives, and gives the
/// results of `again`, then those of `gradient`. Its attributes are those of both.
#[derive(Clone, Copy, Debug)]
pub struct RecomputeFusion {
    pub joint: &'static str,
    pub again: &'static str,
    pub gradient: &'static str,
    /// Which inputs of `gradient` are the inputs of `again`, in their order.
    pub shared: &'static [usize],
    /// Which input of `gradient` is which result of `again`, if one is.
    pub made: Option<(usize, usize)>,
}

/// All of them.
pub const RECOMPUTE_FUSIONS: &[RecomputeFusion] = &[
    RecomputeFusion {
        joint: "swiglu_and_backward",
        again: "swiglu",
        gradient: "swiglu_backward",
        shared: &[0, 1],
        made: None,
    },
    RecomputeFusion {
        joint: "rmsnorm_and_backward_add",
        again: "rmsnorm",
        gradient: "rmsnorm_backward_add",
        shared: &[0, 1],
        made: Some((2, 1)),
    },
];

#[cfg(test)]
mod tests {
    use tensor::{Attrs, DType, HostTensor};

    use super::*;
    use crate::Op;
    use crate::examples::{Instance, instantiate};
    use crate::registry::find;

    #[test]
    fn they_give_the_bits_of_both_operations() {
        for fusion in RECOMPUTE_FUSIONS {
            let [joint, again, gradient] = [fusion.joint, fusion.again, fusion.gradient].map(|n| find(n).unwrap());
            for (example, dtype) in joint.examples().iter().flat_map(|e| [DType::F32, DType::BF16].map(|d| (e, d))) {
                let both = instantiate(example, joint, dtype, 17);
                let (of_again, of_gradient) = both.outputs.split_at(both.outputs.len() - results(fusion));
                let run = |op: &'static dyn Op, inputs, outputs: &[HostTensor]| {
                    let known = |name: &String| op.attributes().iter().any(|a| a.name == name);
                    let attrs = both.attrs.0.iter().filter(|(name, _)| known(name));
                    let attrs = Attrs(attrs.map(|(n, v)| (n.clone(), v.clone())).collect());
                    Instance { op, attrs, inputs, outputs: outputs.to_vec() }.expected()
                };
                // The shared operands come first in all of them.
                let made = run(again, both.inputs[..fusion.shared.len()].to_vec(), of_again);
                let mut inputs = both.inputs.clone();
                if let Some((input, result)) = fusion.made {
                    inputs.insert(input, made[result].clone());
                }
                let gradients = run(gradient, inputs, of_gradient);
                assert_eq!(both.expected(), [made, gradients].concat(), "{} in {dtype}", fusion.joint);
            }
        }
    }

    /// How many results the gradient gives: one for each operand that needs one.
    fn results(fusion: &RecomputeFusion) -> usize {
        if fusion.made.is_some() { 1 } else { fusion.shared.len() }
    }
}
