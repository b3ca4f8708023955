//! Host arithmetic in f64 that the device is compared with, and programs built by hand.

use program::{
    Arch, Arena, ArenaId, ArenaKind, Attention, AttentionBackward, AttentionForward, Cost, Documents, Entry, EntryKind,
    Instruction, Kernel, Machine, Program, Provenance, Session, Step, TensorRef,
};
use std::sync::Arc;
use tensor::{DType, HostTensor};

/// Uniform in [-1, 1), the same on every run.
pub struct Numbers(u64);

impl Numbers {
    pub fn new(seed: u64) -> Numbers {
        Numbers(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    pub fn next(&mut self) -> f32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    pub fn tensor(&mut self, dtype: DType, shape: &[usize]) -> HostTensor {
        let values: Vec<f32> = (0..shape.iter().product()).map(|_| self.next()).collect();
        HostTensor::from_f32(shape.to_vec(), &values).cast(dtype)
    }
}

/// Lays tensors out in one arena.
#[derive(Default)]
pub struct Layout {
    bytes: usize,
}

impl Layout {
    pub fn place(&mut self, dtype: DType, shape: &[usize]) -> TensorRef {
        let at = TensorRef::dense(ArenaId(0), self.bytes, dtype, shape.to_vec());
        self.bytes += at.bytes().next_multiple_of(1024);
        at
    }

    /// A program with one entry over this layout.
    pub fn program(self, architecture: String, kernels: Vec<Kernel>, instructions: Vec<Instruction>) -> Arc<Program> {
        let step = |instruction| Step {
            instruction,
            provenance: Provenance { op: "test".into(), phase: "forward", layer: None, at: None },
            cost: Cost::default(),
        };
        let entry = Entry {
            kind: EntryKind::Forward,
            variant: None,
            steps: instructions.into_iter().map(step).collect(),
            inputs: vec![],
            outputs: vec![],
        };
        Arc::new(Program {
            name: "test".into(),
            machine: Machine { arch: Arch::Cuda(architecture), ..Machine::h200() },
            arenas: vec![Arena::on_device(ArenaKind::Activations, self.bytes)],
            layout: program::Layout::default(),
            constants: vec![],
            scalars: vec![],
            kernels,
            entries: vec![entry],
            memory: vec![],
            activations: vec![],
            phases: vec![],
            plan: vec![],
            seed: 0,
        })
    }
}

pub fn write(session: &mut dyn Session, at: &TensorRef, value: &HostTensor) {
    session.write(at, &value.bytes).unwrap_or_else(|e| panic!("{e}"));
}

pub fn read(session: &mut dyn Session, at: &TensorRef) -> HostTensor {
    let mut out = HostTensor::zeros(at.dtype, at.shape.clone());
    session.read(at, &mut out.bytes).unwrap_or_else(|e| panic!("{e}"));
    out
}

/// ‖a − b‖ ÷ ‖b‖; NaN anywhere gives NaN, which is below nothing.
pub fn relative_error(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    let difference: f64 = a.iter().zip(b).map(|(x, y)| (x - y).powi(2)).sum();
    let size: f64 = b.iter().map(|y| y * y).sum();
    (difference / size.max(1e-300)).sqrt()
}

/// The indices of `at`'s elements in the buffer that it is a view of, counted from the view's start.
pub fn offsets(at: &TensorRef) -> Vec<usize> {
    let mut out = vec![0];
    for (n, stride) in at.shape.iter().zip(&at.strides) {
        out = out.iter().flat_map(|base| (0..*n).map(move |i| base + i * stride)).collect();
    }
    out
}

/// An attention to be tested.
#[derive(Clone, Debug)]
pub struct Case {
    pub dtype: DType,
    pub rows: usize,
    pub length: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// Per row, the lengths of its documents; empty: every row is one.
    pub documents: Vec<Vec<usize>>,
    pub deterministic: bool,
    /// v and dv lie in merged q|k|v buffers.
    pub merged: bool,
    /// Bytes that both passes may use.
    pub scratch: usize,
}

pub struct AttentionTensors {
    pub q: TensorRef,
    pub k: TensorRef,
    pub v: TensorRef,
    pub o: TensorRef,
    pub start: TensorRef,
    pub d_o: TensorRef,
    pub gradients: [TensorRef; 3],
    /// The buffers behind v and dv.
    pub merged: [TensorRef; 2],
}

impl Case {
    pub fn scale(&self) -> f32 {
        0.7 / (self.head_dim as f32).sqrt()
    }

    pub fn starts(&self) -> Vec<i32> {
        let whole = vec![vec![self.length]; self.rows];
        let documents = if self.documents.is_empty() { &whole } else { &self.documents };
        let mut starts = vec![];
        for row in documents {
            let mut at = 0;
            for length in row {
                starts.extend(std::iter::repeat_n(at as i32, *length));
                at += length;
            }
            assert_eq!(at, self.length, "the documents of a row fill it");
        }
        starts
    }

    /// Two slots more than there are documents.
    fn plan(&self) -> Documents {
        if self.documents.is_empty() {
            return Documents::Rows;
        }
        let lengths: Vec<usize> = self.documents.iter().flatten().copied().collect();
        Documents::Packed { count: lengths.len() + 2, longest: lengths.into_iter().max().unwrap() }
    }

    /// Forward and backward over a fresh layout.
    pub fn instructions(&self, layout: &mut Layout) -> (AttentionTensors, Vec<Instruction>) {
        let (b, t, d) = (self.rows, self.length, self.head_dim);
        let queries = [b, t, self.heads, d];
        let keys = [b, t, self.kv_heads, d];
        let width = (self.heads + 2 * self.kv_heads) * d;
        let value = |layout: &mut Layout| {
            if !self.merged {
                let at = layout.place(self.dtype, &keys);
                return (at.clone(), at);
            }
            let buffer = layout.place(self.dtype, &[b, t, width]);
            let offset = buffer.offset + (self.heads + self.kv_heads) * d * self.dtype.size();
            let strides = vec![t * width, width, d, 1];
            (TensorRef { offset, shape: keys.to_vec(), strides, ..buffer.clone() }, buffer)
        };
        let (v, v_buffer) = value(layout);
        let (d_v, d_v_buffer) = value(layout);
        let tensors = AttentionTensors {
            q: layout.place(self.dtype, &queries),
            k: layout.place(self.dtype, &keys),
            v,
            o: layout.place(self.dtype, &queries),
            start: layout.place(DType::I32, &[b, t]),
            d_o: layout.place(self.dtype, &queries),
            gradients: [layout.place(self.dtype, &queries), layout.place(self.dtype, &keys), d_v],
            merged: [v_buffer, d_v_buffer],
        };
        let shared = Attention {
            q: tensors.q.clone(),
            k: tensors.k.clone(),
            v: tensors.v.clone(),
            o: tensors.o.clone(),
            lse: layout.place(DType::F32, &[b, self.heads, t]),
            document_start: tensors.start.clone(),
            scale: self.scale(),
            documents: self.plan(),
            scratch: (self.scratch > 0).then(|| layout.place(DType::U8, &[self.scratch])),
        };
        let [d_q, d_k, d_v] = tensors.gradients.clone();
        let backward = AttentionBackward {
            shared: shared.clone(),
            d_o: tensors.d_o.clone(),
            d_q,
            d_k,
            d_v,
            deterministic: self.deterministic,
        };
        let instructions =
            vec![Instruction::AttentionForward(AttentionForward { shared }), Instruction::AttentionBackward(backward)];
        (tensors, instructions)
    }

    /// o, dq, dk, dv in f64.
    pub fn expected(&self, q: &[f64], k: &[f64], v: &[f64], d_o: &[f64]) -> [Vec<f64>; 4] {
        let (t, d, groups) = (self.length, self.head_dim, self.heads / self.kv_heads);
        let starts = self.starts();
        let scale = self.scale() as f64;
        let dot = |x: &[f64], y: &[f64]| x.iter().zip(y).map(|(a, b)| a * b).sum::<f64>();
        let [mut o, mut dq, mut dk, mut dv] =
            [vec![0.0; q.len()], vec![0.0; q.len()], vec![0.0; k.len()], vec![0.0; k.len()]];
        for (token, start) in starts.iter().enumerate() {
            let (row, i) = (token / t, token % t);
            let first = *start as usize;
            for head in 0..self.heads {
                let at = (token * self.heads + head) * d;
                let key = |j: usize| ((row * t + j) * self.kv_heads + head / groups) * d;
                let scores: Vec<f64> =
                    (first..=i).map(|j| scale * dot(&q[at..at + d], &k[key(j)..key(j) + d])).collect();
                let highest = scores.iter().fold(f64::MIN, |a, b| a.max(*b));
                let sum: f64 = scores.iter().map(|s| (s - highest).exp()).sum();
                let weights: Vec<f64> = scores.iter().map(|s| (s - highest).exp() / sum).collect();
                for (j, p) in (first..=i).zip(&weights) {
                    (0..d).for_each(|c| o[at + c] += p * v[key(j) + c]);
                }
                let delta = dot(&d_o[at..at + d], &o[at..at + d]);
                for (j, p) in (first..=i).zip(&weights) {
                    let ds = p * (dot(&d_o[at..at + d], &v[key(j)..key(j) + d]) - delta) * scale;
                    for c in 0..d {
                        dq[at + c] += ds * k[key(j) + c];
                        dk[key(j) + c] += ds * q[at + c];
                        dv[key(j) + c] += p * d_o[at + c];
                    }
                }
            }
        }
        [o, dq, dk, dv]
    }
}
