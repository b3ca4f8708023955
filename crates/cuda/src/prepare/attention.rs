//! Attention instructions: on cuDNN where it takes them, on the plain kernels elsewhere.
//!
//! The choice depends on types, shapes and layouts alone, and on what cuDNN answers when it is
//! asked for a plan; it is made here, once, and noted. The log-sum-exp is the backend's own affair:
//! packed documents on cuDNN keep it as [tokens, heads], everything else as [B, heads, T].
#![allow(unsafe_code, reason = "runs plans on addresses that the program describes")]

use super::launch::{Arguments, PreparedCall, pair};
use super::{Memory, Preparation};
use crate::cudnn::Binding;
use crate::cudnn::sdpa::{Gradients, Sdpa, Strides, id};
use crate::driver::{Function, LaunchShape};
use crate::engine::{AttentionId, AttentionPath, Engine, Pass};
use crate::error::{Error, Result};
use crate::kernels::{self, AttentionConstants};
use program::{Attention, AttentionBackward, AttentionForward, Documents, TensorRef};
use tensor::DType;

/// Warps, and so queries or keys, of one block of the plain kernels.
const WARPS: usize = 4;
/// As in `documents.cu`.
const UNITS: usize = 12;
const ALIGNMENT: usize = 256;

/// An attention pass with its plan and the layout of its workspace.
pub(crate) enum PlannedAttention {
    Cudnn(PlannedCudnn),
    Plain(PlannedPlain),
}

/// An attention pass that can be queued.
pub(crate) enum PreparedAttention {
    Cudnn { plan: AttentionId, binding: Binding, documents: Option<PreparedCall> },
    Plain(Vec<PreparedCall>),
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
    match cudnn_plan(p, a, Pass::Forward, &tensors)? {
        Some((sdpa, plan)) => PlannedCudnn::new(p, a, sdpa, plan, &tensors, None).map(PlannedAttention::Cudnn),
        None => plain_forward(p, a).map(PlannedAttention::Plain),
    }
}

pub(super) fn plan_backward(p: &mut Preparation, instruction: &AttentionBackward) -> Result<PlannedAttention> {
    let a = &instruction.shared;
    let forward = [(id::Q, &a.q), (id::K, &a.k), (id::V, &a.v), (id::O, &a.o)];
    let gradients = Gradients {
        d_o: strides(&instruction.d_o),
        d_q: strides(&instruction.d_q),
        d_k: strides(&instruction.d_k),
        d_v: strides(&instruction.d_v),
        deterministic: instruction.deterministic,
    };
    let tensors: Vec<_> = forward
        .into_iter()
        .chain([
            (id::D_O, &instruction.d_o),
            (id::D_Q, &instruction.d_q),
            (id::D_K, &instruction.d_k),
            (id::D_V, &instruction.d_v),
        ])
        .collect();
    let forward_plan = cudnn_plan(p, a, Pass::Forward, &forward)?;
    if forward_plan.is_some()
        && let Some((sdpa, plan)) = cudnn_plan(p, a, Pass::Backward(gradients), &tensors)?
    {
        return PlannedCudnn::new(p, a, sdpa, plan, &tensors, Some(&gradients)).map(PlannedAttention::Cudnn);
    }
    let token_major = forward_plan.is_some_and(|(sdpa, _)| sdpa.ragged);
    plain_backward(p, instruction, token_major).map(PlannedAttention::Plain)
}

fn strides(at: &TensorRef) -> Strides {
    let [row, token, head, _] = at.strides[..] else { panic!("attention works on [B, T, heads, head_dim], not {at}") };
    Strides { row: row as i64, token: token as i64, head: head as i64 }
}

/// The plan of a pass, when cuDNN is to run it.
fn cudnn_plan(
    p: &mut Preparation,
    a: &Attention,
    pass: Pass,
    tensors: &[(i64, &TensorRef)],
) -> Result<Option<(Sdpa, AttentionId)>> {
    if p.engine.attention_path == AttentionPath::Plain || !tensors.iter().all(|(_, at)| suits_cudnn(p.memory, a, at)) {
        return Ok(None);
    }
    let sdpa = describe(a);
    Ok(p.engine.attention(sdpa, pass)?.map(|plan| (sdpa, plan)))
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

/// Type, head size, window, 16-byte alignment, and for packed rows tokens that are evenly spaced
/// over all rows.
fn suits_cudnn(memory: &Memory, a: &Attention, at: &TensorRef) -> bool {
    let [rows, length, _, head_dim] = at.shape[..] else { return false };
    let aligned = memory.address(at).is_multiple_of(16) && at.strides[..3].iter().all(|stride| stride % 8 == 0);
    let even = rows == 1 || a.documents == Documents::Rows || at.strides[0] == length * at.strides[1];
    at.dtype == DType::BF16
        && at.strides[3] == 1
        && head_dim.is_multiple_of(8)
        && head_dim <= 128
        && a.window.is_none_or(|window| window >= length)
        && aligned
        && even
}

/// A layout of the workspace: pieces behind one another.
#[derive(Default)]
struct Pieces {
    bytes: usize,
}

impl Pieces {
    fn take(&mut self, bytes: usize) -> usize {
        let at = self.bytes;
        self.bytes += bytes.next_multiple_of(ALIGNMENT);
        at
    }
}

/// A cuDNN pass before its workspace is bound.
pub(crate) struct PlannedCudnn {
    plan: AttentionId,
    addresses: Vec<(i64, u64)>,
    /// Ids whose memory lies in the workspace, by offset.
    scratch: Vec<(i64, usize)>,
    plan_scratch: usize,
    documents: Option<PlannedDocuments>,
    bytes: usize,
}

/// The kernel that finds the documents, and where its results go.
struct PlannedDocuments {
    function: Function,
    start: u64,
    units: Vec<(i64, usize)>,
    lengths: usize,
    first: usize,
}

impl PlannedCudnn {
    fn new(
        p: &mut Preparation,
        a: &Attention,
        sdpa: Sdpa,
        plan: AttentionId,
        tensors: &[(i64, &TensorRef)],
        gradients: Option<&Gradients>,
    ) -> Result<PlannedCudnn> {
        let e = Extents::of(a);
        let mut pieces = Pieces::default();
        let plan_scratch = pieces.take(p.engine.attention_plan(plan).plan.workspace());
        let mut addresses: Vec<(i64, u64)> = tensors.iter().map(|(id, at)| (*id, p.memory.address(at))).collect();
        addresses.push((id::LSE, p.memory.address(&a.lse)));
        let mut scratch = vec![];
        if let Some(gradients) = gradients {
            let queries = e.tokens() * e.heads;
            scratch.push((id::DELTA, pieces.take(queries * 4)));
            if !gradients.deterministic {
                scratch.push((id::D_Q_SUM, pieces.take(queries * e.head_dim * 4)));
            }
            if sdpa.needs_head_gradients() {
                let groups = e.heads / e.kv_heads;
                for (id, layout) in [(id::D_K_HEADS, gradients.d_k), (id::D_V_HEADS, gradients.d_v)] {
                    scratch.push((id, pieces.take(e.tokens() * layout.token as usize * groups * 2)));
                }
            }
        }
        let documents = match a.documents {
            Documents::Rows => None,
            Documents::Packed { count, longest } => {
                Some(plan_documents(p, a, plan, (count, longest), &mut pieces, &mut scratch)?)
            }
        };
        Ok(PlannedCudnn { plan, addresses, scratch, plan_scratch, documents, bytes: pieces.bytes })
    }

    fn bind(self, engine: &Engine, workspace: u64) -> Result<PreparedAttention> {
        let mut addresses = self.addresses;
        addresses.extend(self.scratch.iter().map(|(id, at)| (*id, workspace + *at as u64)));
        let binding = engine.attention_plan(self.plan).plan.bind(&addresses, workspace + self.plan_scratch as u64)?;
        let documents = self.documents.map(|documents| documents.bind(workspace));
        Ok(PreparedAttention::Cudnn { plan: self.plan, binding, documents })
    }
}

fn plan_documents(
    p: &mut Preparation,
    a: &Attention,
    plan: AttentionId,
    (count, longest): (usize, usize),
    pieces: &mut Pieces,
    scratch: &mut Vec<(i64, usize)>,
) -> Result<PlannedDocuments> {
    let e = Extents::of(a);
    assert!(e.tokens() < 1 << 31, "token indices are 32 bits wide");
    let mut units: Vec<(i64, usize)> = vec![];
    for offsets in &p.engine.attention_plan(plan).offsets {
        let at = match units.iter().find(|(unit, _)| *unit == offsets.unit) {
            Some((_, at)) => *at,
            None => {
                let at = pieces.take((count + 1) * 8);
                units.push((offsets.unit, at));
                at
            }
        };
        scratch.push((offsets.id, at));
    }
    assert!(units.len() <= UNITS, "attention tensors have at most {UNITS} different token strides");
    let lengths = pieces.take(count * 4);
    scratch.extend([(id::QUERY_LENGTHS, lengths), (id::KEY_LENGTHS, lengths)]);
    let kernel = kernels::documents(e.rows, e.length, count, longest, units.len());
    let function = p.engine.own_function(kernel, "documents")?;
    let start = p.memory.address(&a.document_start);
    Ok(PlannedDocuments { function, start, units, lengths, first: pieces.take((count + 1) * 4) })
}

impl PlannedDocuments {
    fn bind(self, workspace: u64) -> PreparedCall {
        let mut outputs = [0; 2 * UNITS + 2];
        for (i, (unit, at)) in self.units.iter().enumerate() {
            outputs[i] = workspace + *at as u64;
            outputs[UNITS + i] = *unit as u64;
        }
        outputs[2 * UNITS] = workspace + self.lengths as u64;
        outputs[2 * UNITS + 1] = workspace + self.first as u64;
        let arguments = Arguments::new().word(self.start).structure(&outputs);
        let shape = LaunchShape { grid: [1; 3], block: [1024, 1, 1], shared_bytes: 0 };
        PreparedCall::new(self.function, "documents", shape, arguments)
    }
}

/// A pass on the plain kernels before its workspace is bound.
pub(crate) struct PlannedPlain {
    /// Function, name, grid; arguments before and behind the address of delta.
    calls: Vec<(Function, &'static str, [u32; 3], Vec<Argument>)>,
    bytes: usize,
}

enum Argument {
    Words(Vec<u64>),
    Delta,
}

fn plain_constants(a: &Attention) -> Result<AttentionConstants> {
    let e = Extents::of(a);
    let refused = |reason: String| Error::Unsupported { what: "attention".into(), reason, context: String::new() };
    let number = match a.q.dtype {
        DType::F32 => "float",
        DType::BF16 => "bf16",
        other => return Err(refused(format!("q, k and v are f32 or bf16, not {other}"))),
    };
    if e.head_dim > 256 {
        return Err(refused(format!("heads have at most 256 elements, not {}", e.head_dim)));
    }
    let window = a.window.unwrap_or(e.length);
    Ok(AttentionConstants { number, head_dim: e.head_dim, groups: e.heads / e.kv_heads, window })
}

/// The `View` struct of `attention.cuh`.
fn view(memory: &Memory, a: &Attention, at: &TensorRef) -> Argument {
    assert_eq!(at.dtype, a.q.dtype, "the tensors of one attention have one type");
    assert!(at.strides[3] == 1 || at.shape[3] == 1, "a head is dense in {at}");
    let s = strides(at);
    Argument::Words(vec![memory.address(at), s.row as u64, s.token as u64, s.head as u64])
}

/// The `Extents` struct of `attention.cuh`.
fn extents(memory: &Memory, a: &Attention, token_major: bool) -> Argument {
    let e = Extents::of(a);
    let (head, token) = if token_major { (1, e.heads) } else { (e.length, 1) };
    Argument::Words(vec![
        pair(e.length as u32, e.heads as u32),
        a.scale.to_bits() as u64,
        memory.address(&a.document_start),
        (e.length * e.heads) as u64,
        head as u64,
        token as u64,
    ])
}

fn grid(e: &Extents, heads: usize) -> [u32; 3] {
    [e.length.div_ceil(WARPS) as u32, heads as u32, e.rows as u32]
}

fn plain_forward(p: &mut Preparation, a: &Attention) -> Result<PlannedPlain> {
    let e = Extents::of(a);
    let m = p.memory;
    let function = p.engine.own_function(kernels::attention_forward(&plain_constants(a)?), "attention_forward")?;
    let arguments = vec![
        view(m, a, &a.q),
        view(m, a, &a.k),
        view(m, a, &a.v),
        view(m, a, &a.o),
        Argument::Words(vec![m.address(&a.lse)]),
        extents(m, a, false),
    ];
    Ok(PlannedPlain { calls: vec![(function, "attention_forward", grid(&e, e.heads), arguments)], bytes: 0 })
}

fn plain_backward(p: &mut Preparation, instruction: &AttentionBackward, token_major: bool) -> Result<PlannedPlain> {
    let a = &instruction.shared;
    let e = Extents::of(a);
    let m = p.memory;
    let kernel = kernels::attention_backward(&plain_constants(a)?);
    let d_q = p.engine.own_function(kernel.clone(), "attention_d_q")?;
    let d_kv = p.engine.own_function(kernel, "attention_d_kv")?;
    let lse = || Argument::Words(vec![m.address(&a.lse)]);
    let [q, k, v] = [&a.q, &a.k, &a.v].map(|at| move || view(m, a, at));
    let d_o = || view(m, a, &instruction.d_o);
    let query_arguments = vec![
        q(),
        k(),
        v(),
        view(m, a, &a.o),
        d_o(),
        view(m, a, &instruction.d_q),
        lse(),
        Argument::Delta,
        extents(m, a, token_major),
    ];
    let key_arguments = vec![
        q(),
        k(),
        v(),
        d_o(),
        view(m, a, &instruction.d_k),
        view(m, a, &instruction.d_v),
        lse(),
        Argument::Delta,
        extents(m, a, token_major),
    ];
    Ok(PlannedPlain {
        calls: vec![
            (d_q, "attention_d_q", grid(&e, e.heads), query_arguments),
            (d_kv, "attention_d_kv", grid(&e, e.kv_heads), key_arguments),
        ],
        bytes: e.tokens() * e.heads * 4,
    })
}

impl PlannedPlain {
    fn bind(self, workspace: u64) -> PreparedAttention {
        let calls = self.calls.into_iter().map(|(function, name, grid, arguments)| {
            let arguments = arguments.into_iter().fold(Arguments::new(), |packed, argument| match argument {
                Argument::Words(words) => packed.structure(&words),
                Argument::Delta => packed.word(workspace),
            });
            let shape = LaunchShape { grid, block: [32 * WARPS as u32, 1, 1], shared_bytes: 0 };
            PreparedCall::new(function, name, shape, arguments)
        });
        PreparedAttention::Plain(calls.collect())
    }
}

impl PlannedAttention {
    pub fn workspace(&self) -> usize {
        match self {
            PlannedAttention::Cudnn(cudnn) => cudnn.bytes,
            PlannedAttention::Plain(plain) => plain.bytes,
        }
    }

    pub fn bind(self, engine: &Engine, workspace: u64) -> Result<PreparedAttention> {
        match self {
            PlannedAttention::Cudnn(cudnn) => cudnn.bind(engine, workspace),
            PlannedAttention::Plain(plain) => Ok(plain.bind(workspace)),
        }
    }
}

impl PreparedAttention {
    pub fn queue(&mut self, engine: &Engine) -> Result<()> {
        match self {
            PreparedAttention::Cudnn { plan, binding, documents } => {
                if let Some(documents) = documents {
                    documents.queue(&engine.stream)?;
                }
                // SAFETY: the binding is this plan's; its addresses lie in the session's memory.
                unsafe { engine.attention_plan(*plan).plan.run(engine.cudnn_handle(), binding) }
            }
            PreparedAttention::Plain(calls) => calls.iter_mut().try_for_each(|call| call.queue(&engine.stream)),
        }
    }
}
