//! Attention instructions as cuDNN plans, with everything that such a plan wants beside the operands.
//!
//! A program asks for the instruction only where cuDNN takes it; what cuDNN refuses after all is an
//! error. The log-sum-exp of packed documents lies as [B, T, heads] between the two passes, that of
//! full rows as [B, heads, T]. Which kernels run otherwise is not known here.
#![allow(unsafe_code, reason = "runs plans on addresses that the program describes")]

use super::launch::{Arguments, PreparedCall};
use super::{Memory, Preparation};
use crate::cudnn::Binding;
use crate::cudnn::sdpa::{Gradients, Sdpa, Strides, id};
use crate::driver::{Function, LaunchShape};
use crate::engine::{AttentionId, Engine, Pass};
use crate::error::{Error, Result};
use crate::kernels;
use program::{Attention, AttentionBackward, AttentionForward, Documents, TensorRef};
use tensor::DType;

/// As in `documents.cu`.
const UNITS: usize = 12;
const ALIGNMENT: usize = 256;

/// An attention pass that can be queued.
pub(crate) struct PreparedAttention {
    plan: AttentionId,
    binding: Binding,
    documents: Option<PreparedCall>,
}

/// Extents of an attention, read off its tensors.
#[derive(Clone, Copy)]
struct Extents {
    rows: usize,
    length: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
}

impl Extents {
    fn of(a: &Attention) -> Extents {
        let [rows, length, heads, head_dim] = a.q.shape[..] else {
            panic!("q is [B, T, heads, head_dim], not {}", a.q)
        };
        let kv_heads = a.k.shape[2];
        assert_eq!(a.k.shape[..], [rows, length, kv_heads, head_dim], "k goes with q {}", a.q);
        assert_eq!((&a.v.shape, &a.o.shape), (&a.k.shape, &a.q.shape), "v goes with k, o goes with q {}", a.q);
        assert!(heads % kv_heads == 0, "{kv_heads} key heads divide {heads} query heads");
        assert!(a.document_start.is_dense() && a.document_start.shape[..] == [rows, length], "one start per token");
        assert!(a.lse.is_dense() && a.lse.len() == rows * heads * length, "one log-sum-exp per query and head");
        Extents { rows, length, heads, kv_heads, head_dim }
    }

    fn tokens(&self) -> usize {
        self.rows * self.length
    }
}

pub(super) fn plan_forward(p: &mut Preparation, instruction: &AttentionForward) -> Result<PlannedAttention> {
    let a = &instruction.shared;
    let tensors = [(id::Q, &a.q), (id::K, &a.k), (id::V, &a.v), (id::O, &a.o)];
    PlannedAttention::new(p, a, Pass::Forward, &tensors)
}

pub(super) fn plan_backward(p: &mut Preparation, instruction: &AttentionBackward) -> Result<PlannedAttention> {
    let a = &instruction.shared;
    let gradients = Gradients {
        d_o: strides(&instruction.d_o),
        d_q: strides(&instruction.d_q),
        d_k: strides(&instruction.d_k),
        d_v: strides(&instruction.d_v),
        deterministic: instruction.deterministic,
    };
    let tensors = [
        (id::Q, &a.q),
        (id::K, &a.k),
        (id::V, &a.v),
        (id::O, &a.o),
        (id::D_O, &instruction.d_o),
        (id::D_Q, &instruction.d_q),
        (id::D_K, &instruction.d_k),
        (id::D_V, &instruction.d_v),
    ];
    PlannedAttention::new(p, a, Pass::Backward(gradients), &tensors)
}

/// The stride of an axis with one element is free; it becomes what a dense tensor has.
fn strides(at: &TensorRef) -> Strides {
    let ([rows, length, heads, head_dim], [row, token, head, _]) = (&at.shape[..], &at.strides[..]) else {
        panic!("attention works on [B, T, heads, head_dim], not {at}")
    };
    let head = if *heads == 1 { *head_dim } else { *head };
    let token = if *length == 1 { heads * head_dim } else { *token };
    let row = if *rows == 1 { length * token } else { *row };
    Strides { row: row as i64, token: token as i64, head: head as i64 }
}

fn describe(a: &Attention) -> Sdpa {
    let e = Extents::of(a);
    let (batch, length, ragged) = match a.documents {
        Documents::Rows => (e.rows, e.length, false),
        Documents::Packed { count, longest } => (count, longest, true),
    };
    Sdpa {
        batch: batch as i64,
        length: length as i64,
        query_heads: e.heads as i64,
        kv_heads: e.kv_heads as i64,
        head_dim: e.head_dim as i64,
        scale: a.scale,
        ragged,
        q: strides(&a.q),
        k: strides(&a.k),
        v: strides(&a.v),
        o: strides(&a.o),
    }
}

/// What cuDNN cannot read, it may read wrongly instead of refusing it: types, alignment, and for
/// packed rows tokens that are not evenly spaced over all rows.
fn check(memory: &Memory, a: &Attention, tensors: &[(i64, &TensorRef)]) -> Result<()> {
    let refused = |reason: String| Err(Error::Unsupported { what: "attention".into(), reason, context: String::new() });
    let length = a.q.shape[1];
    for (_, at) in tensors {
        let s = strides(at);
        let aligned = memory.address(at).is_multiple_of(16) && [s.row, s.token, s.head].iter().all(|s| s % 8 == 0);
        let even = a.documents == Documents::Rows || s.row == length as i64 * s.token;
        if at.dtype != DType::BF16 || at.strides[3] != 1 || !aligned || !even {
            return refused(format!("cuDNN reads bf16 on 16-byte boundaries, packed rows evenly spaced; this is {at}"));
        }
    }
    Ok(())
}

/// Where a piece of a pass's own memory lies.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Place {
    /// In the instruction's scratch: an address.
    Scratch(u64),
    /// In the session's workspace: bytes from its start.
    Workspace(usize),
}

impl Place {
    fn address(self, workspace: u64) -> u64 {
        match self {
            Place::Scratch(address) => address,
            Place::Workspace(offset) => workspace + offset as u64,
        }
    }
}

/// Hands out the scratch that the program planned, and workspace for what does not fit.
struct Pieces {
    scratch: u64,
    left: usize,
    workspace: usize,
}

impl Pieces {
    /// Of `bytes` of scratch at `address`.
    fn of(address: u64, bytes: usize) -> Pieces {
        let start = address.next_multiple_of(ALIGNMENT as u64);
        Pieces { scratch: start, left: bytes.saturating_sub((start - address) as usize), workspace: 0 }
    }

    fn take(&mut self, bytes: usize) -> Place {
        let bytes = bytes.next_multiple_of(ALIGNMENT);
        if bytes <= self.left {
            let at = Place::Scratch(self.scratch);
            self.scratch += bytes as u64;
            self.left -= bytes;
            return at;
        }
        let at = Place::Workspace(self.workspace);
        self.workspace += bytes;
        at
    }
}

/// An attention pass before the workspace exists.
pub(crate) struct PlannedAttention {
    plan: AttentionId,
    addresses: Vec<(i64, u64)>,
    /// Ids whose memory is the pass's own.
    own: Vec<(i64, Place)>,
    plan_workspace: Place,
    documents: Option<PlannedDocuments>,
    workspace: usize,
}

/// The kernel that finds the documents, and where its results go.
struct PlannedDocuments {
    function: Function,
    start: u64,
    units: Vec<(i64, Place)>,
    lengths: Place,
    first: Place,
}

impl PlannedAttention {
    fn new(p: &mut Preparation, a: &Attention, pass: Pass, tensors: &[(i64, &TensorRef)]) -> Result<Self> {
        check(p.memory, a, tensors)?;
        let sdpa = describe(a);
        let plan = p.engine.attention(sdpa, pass)?;
        let (scratch, scratch_bytes) = a.scratch.as_ref().map_or((0, 0), |at| (p.memory.address(at), at.bytes()));
        let mut pieces = Pieces::of(scratch, scratch_bytes);
        let plan_bytes = p.engine.attention_plan(plan).plan.workspace();
        let plan_workspace = pieces.take(plan_bytes);
        let mut addresses: Vec<(i64, u64)> = tensors.iter().map(|(id, at)| (*id, p.memory.address(at))).collect();
        addresses.push((id::LSE, p.memory.address(&a.lse)));
        let mut own = vec![];
        if let Pass::Backward(gradients) = &pass {
            own = gradient_pieces(&Extents::of(a), &sdpa, gradients, &mut pieces);
        }
        let documents = match a.documents {
            Documents::Rows => None,
            Documents::Packed { count, longest } => {
                Some(plan_documents(p, a, plan, (count, longest), &mut pieces, &mut own)?)
            }
        };
        let workspace = pieces.workspace;
        if workspace > 0 {
            p.engine.note(format!(
                "attention over {} slots of {} tokens: the program plans {scratch_bytes} bytes of scratch, cuDNN's \
                 plan wants {plan_bytes}; {workspace} bytes lie in the session's workspace",
                sdpa.batch, sdpa.length
            ));
        }
        Ok(PlannedAttention { plan, addresses, own, plan_workspace, documents, workspace })
    }

    /// Bytes beyond the instruction's scratch.
    pub fn workspace(&self) -> usize {
        self.workspace
    }

    pub fn bind(self, engine: &Engine, workspace: u64) -> Result<PreparedAttention> {
        let mut addresses = self.addresses;
        addresses.extend(self.own.iter().map(|(id, at)| (*id, at.address(workspace))));
        let plan = &engine.attention_plan(self.plan).plan;
        let binding = plan.bind(&addresses, self.plan_workspace.address(workspace))?;
        let documents = self.documents.map(|documents| documents.bind(workspace));
        Ok(PreparedAttention { plan: self.plan, binding, documents })
    }
}

/// Memory between the operations of a backward pass.
fn gradient_pieces(e: &Extents, sdpa: &Sdpa, gradients: &Gradients, pieces: &mut Pieces) -> Vec<(i64, Place)> {
    let queries = e.tokens() * e.heads;
    let mut own = vec![(id::DELTA, pieces.take(queries * 4))];
    if !gradients.deterministic {
        own.push((id::D_Q_SUM, pieces.take(queries * e.head_dim * 4)));
    }
    if sdpa.needs_head_gradients() {
        let groups = e.heads / e.kv_heads;
        for (id, layout) in [(id::D_K_HEADS, gradients.d_k), (id::D_V_HEADS, gradients.d_v)] {
            own.push((id, pieces.take(e.tokens() * layout.token as usize * groups * 2)));
        }
    }
    own
}

fn plan_documents(
    p: &mut Preparation,
    a: &Attention,
    plan: AttentionId,
    (count, longest): (usize, usize),
    pieces: &mut Pieces,
    own: &mut Vec<(i64, Place)>,
) -> Result<PlannedDocuments> {
    let e = Extents::of(a);
    assert!(e.tokens() < 1 << 31, "token indices are 32 bits wide");
    let mut units: Vec<(i64, Place)> = vec![];
    for offsets in &p.engine.attention_plan(plan).offsets {
        let at = match units.iter().find(|(unit, _)| *unit == offsets.unit) {
            Some((_, at)) => *at,
            None => {
                let at = pieces.take((count + 1) * 8);
                units.push((offsets.unit, at));
                at
            }
        };
        own.push((offsets.id, at));
    }
    assert!(units.len() <= UNITS, "attention tensors have at most {UNITS} different token strides");
    let lengths = pieces.take(count * 4);
    own.extend([(id::QUERY_LENGTHS, lengths), (id::KEY_LENGTHS, lengths)]);
    let kernel = kernels::documents(e.rows, e.length, count, longest, units.len());
    let function = p.engine.own_function(kernel, "documents")?;
    let start = p.memory.address(&a.document_start);
    Ok(PlannedDocuments { function, start, units, lengths, first: pieces.take((count + 1) * 4) })
}

impl PlannedDocuments {
    fn bind(self, workspace: u64) -> PreparedCall {
        let mut outputs = [0; 2 * UNITS + 2];
        for (i, (unit, at)) in self.units.iter().enumerate() {
            outputs[i] = at.address(workspace);
            outputs[UNITS + i] = *unit as u64;
        }
        outputs[2 * UNITS] = self.lengths.address(workspace);
        outputs[2 * UNITS + 1] = self.first.address(workspace);
        let arguments = Arguments::new().word(self.start).structure(&outputs);
        let shape = LaunchShape { grid: [1; 3], block: [1024, 1, 1], shared_bytes: 0 };
        PreparedCall::new(self.function, "documents", shape, arguments)
    }
}

impl PreparedAttention {
    pub fn queue(&mut self, engine: &Engine) -> Result<()> {
        if let Some(documents) = &mut self.documents {
            documents.queue(&engine.stream)?;
        }
        // SAFETY: the binding is this plan's; its addresses lie in the session's memory.
        unsafe { engine.attention_plan(self.plan).plan.run(engine.cudnn_handle(), &self.binding) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use program::ArenaId;

    #[test]
    fn pieces_fill_the_scratch_before_the_workspace() {
        let mut pieces = Pieces::of(0x1080, 0x480);
        assert_eq!(pieces.take(0x300), Place::Scratch(0x1100));
        assert_eq!(pieces.take(0x101), Place::Workspace(0));
        assert_eq!(pieces.take(1), Place::Scratch(0x1400));
        assert_eq!((pieces.left, pieces.workspace), (0, 0x200));
        assert_eq!(Pieces::of(0, 0).take(4), Place::Workspace(0));
    }

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
