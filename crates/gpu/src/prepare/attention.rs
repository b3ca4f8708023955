//! The forward pass of attention over full causal rows as a cuDNN plan.
//!
//! A program uses the instruction only where cuDNN supports it; if cuDNN rejects it after all, that is an error. Does
//! not know which kernels run otherwise.
#![allow(unsafe_code, reason = "runs plans on addresses that the program describes")]

use super::{Memory, Preparation};
use crate::cudnn::Binding;
use crate::cudnn::sdpa::{Sdpa, Strides, id};
use crate::engine::{AttentionId, Engine};
use crate::error::{Error, Result};
use program::{AttentionForward, TensorRef, library};

const ALIGNMENT: u64 = 256;

/// A forward pass that can be queued.
pub(crate) struct BoundAttention {
    plan: AttentionId,
    binding: Binding,
}

/// Returns the strides; an axis with one element gets the stride of a dense tensor.
fn strides(at: &TensorRef) -> Strides {
    let ([rows, length, heads, head_dim], [row, token, head, _]) = (&at.shape[..], &at.strides[..]) else {
        panic!("attention works on [B, T, heads, head_dim], not {at}")
    };
    let head = if *heads == 1 { *head_dim } else { *head };
    let token = if *length == 1 { heads * head_dim } else { *token };
    let row = if *rows == 1 { length * token } else { *row };
    Strides { row: row as i64, token: token as i64, head: head as i64 }
}

fn describe(a: &AttentionForward) -> Sdpa {
    let [rows, length, heads, head_dim] = a.q.shape[..] else { panic!("q is [B, T, heads, head_dim], not {}", a.q) };
    let kv_heads = a.k.shape[2];
    assert_eq!(a.k.shape[..], [rows, length, kv_heads, head_dim], "k goes with q {}", a.q);
    assert_eq!((&a.v.shape, &a.o.shape), (&a.k.shape, &a.q.shape), "v goes with k, o goes with q {}", a.q);
    assert!(heads % kv_heads == 0, "{kv_heads} key heads divide {heads} query heads");
    assert!(a.lse.is_dense() && a.lse.len() == rows * heads * length, "one log-sum-exp per query and head");
    Sdpa {
        batch: rows as i64,
        length: length as i64,
        query_heads: heads as i64,
        kv_heads: kv_heads as i64,
        head_dim: head_dim as i64,
        scale: a.scale,
        q: strides(&a.q),
        k: strides(&a.k),
        v: strides(&a.v),
        o: strides(&a.o),
    }
}

/// Checks types and alignment: cuDNN may misread operands that it does not support instead of rejecting them.
fn check(memory: &Memory, tensors: &[(i64, &TensorRef)]) -> Result<()> {
    for (_, at) in tensors {
        let boundary = library::ALIGNMENT;
        if !library::reads(at) || !memory.address(at).is_multiple_of(boundary as u64) {
            let reason = format!("cuDNN reads bf16 on {boundary}-byte boundaries; this is {at}");
            return Err(Error::Unsupported { what: "attention".into(), reason, context: String::new() });
        }
    }
    Ok(())
}

/// A forward pass before the workspace exists.
pub(crate) struct PlannedAttention {
    plan: AttentionId,
    addresses: Vec<(i64, u64)>,
    /// The program's scratch if it suffices for the plan; `None` where the session's workspace is used.
    scratch: Option<u64>,
    workspace: usize,
}

pub(super) fn plan(p: &mut Preparation, a: &AttentionForward) -> Result<PlannedAttention> {
    let tensors = [(id::Q, &a.q), (id::K, &a.k), (id::V, &a.v), (id::O, &a.o)];
    check(p.memory, &tensors)?;
    let sdpa = describe(a);
    let plan = p.engine.attention(sdpa)?;
    let needed = p.engine.attention_plan(plan).workspace();
    let (address, bytes) = a.scratch.as_ref().map_or((0, 0), |at| (p.memory.address(at), at.bytes()));
    let start = address.next_multiple_of(ALIGNMENT);
    let scratch = (start + needed as u64 <= address + bytes as u64).then_some(start);
    let workspace = if scratch.is_some() { 0 } else { needed };
    if workspace > 0 {
        p.engine.note(format!(
            "attention over {} rows of {} tokens: the program plans {bytes} bytes of scratch, cuDNN's plan wants \
             {needed}; they lie in the session's workspace",
            sdpa.batch, sdpa.length
        ));
    }
    let mut addresses: Vec<(i64, u64)> = tensors.iter().map(|(id, at)| (*id, p.memory.address(at))).collect();
    addresses.push((id::LSE, p.memory.address(&a.lse)));
    Ok(PlannedAttention { plan, addresses, scratch, workspace })
}

impl PlannedAttention {
    /// Bytes needed beyond the instruction's scratch.
    pub fn workspace(&self) -> usize {
        self.workspace
    }

    pub fn bind(self, engine: &Engine, workspace: u64) -> Result<BoundAttention> {
        let plan = engine.attention_plan(self.plan);
        let binding = plan.bind(&self.addresses, self.scratch.unwrap_or(workspace))?;
        Ok(BoundAttention { plan: self.plan, binding })
    }
}

impl BoundAttention {
    pub fn queue(&mut self, engine: &Engine) -> Result<()> {
        // SAFETY: the binding is this plan's; its addresses are in the session's memory.
        unsafe { engine.attention_plan(self.plan).run(engine.cudnn_handle(), &self.binding) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use program::ArenaId;
    use tensor::DType;

    #[test]
    fn axes_with_one_element_get_the_strides_of_a_dense_tensor() {
        let at = |shape: [usize; 4], strides: [usize; 4]| TensorRef {
            strides: strides.to_vec(),
            ..TensorRef::dense(ArenaId(0), 0, DType::BF16, shape)
        };
        let dense = strides(&at([1, 6, 1, 16], [1, 96, 1, 1]));
        assert_eq!(dense, Strides { row: 576, token: 96, head: 16 });
        let one_token = strides(&at([2, 1, 4, 16], [192, 1, 16, 1]));
        assert_eq!(one_token, Strides { row: 192, token: 64, head: 16 });
    }
}
