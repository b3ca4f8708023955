//! Host arithmetic in f64 that the device is compared with, and programs built by hand.

use program::{
    Arch, Arena, ArenaId, ArenaKind, AttentionForward, Cost, Entry, EntryKind, Instruction, Kernel, Machine, Program,
    Provenance, Session, Step, TensorRef,
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
            provenance: Provenance { op: "test".into(), phase: program::Phase::Forward, layer: None, at: None },
            cost: Cost::default(),
        };
        let entry = Entry {
            kind: EntryKind::Forward,
            name: String::new(),
            variant: None,
            steps: instructions.into_iter().map(step).collect(),
            inputs: vec![],
            outputs: vec![],
            stage: Default::default(),
        };
        Arc::new(Program {
            name: "test".into(),
            cluster: program::Cluster::ONE,
            machine: Machine {
                arch: Arch::Cuda(architecture.parse().expect("a driver names architectures")),
                ..Machine::h200()
            },
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
    /// v is in a merged q|k|v buffer.
    pub merged: bool,
    /// Bytes that the pass may use.
    pub scratch: usize,
}

pub struct AttentionTensors {
    pub q: TensorRef,
    pub k: TensorRef,
    pub v: TensorRef,
    pub o: TensorRef,
    pub lse: TensorRef,
    /// The merged result, in the buffer after `v`.
    pub merged: TensorRef,
}

impl Case {
    pub fn scale(&self) -> f32 {
        0.7 / (self.head_dim as f32).sqrt()
    }

    /// The forward pass over a fresh layout.
    pub fn instruction(&self, layout: &mut Layout) -> (AttentionTensors, Instruction) {
        let (b, t, d) = (self.rows, self.length, self.head_dim);
        let (queries, keys) = ([b, t, self.heads, d], [b, t, self.kv_heads, d]);
        let width = (self.heads + 2 * self.kv_heads) * d;
        let (v, merged) = if self.merged {
            let buffer = layout.place(self.dtype, &[b, t, width]);
            let offset = buffer.offset + (self.heads + self.kv_heads) * d * self.dtype.size();
            let strides = vec![t * width, width, d, 1];
            (TensorRef { offset, shape: keys.to_vec(), strides, ..buffer.clone() }, buffer)
        } else {
            let at = layout.place(self.dtype, &keys);
            (at.clone(), at)
        };
        let tensors = AttentionTensors {
            q: layout.place(self.dtype, &queries),
            k: layout.place(self.dtype, &keys),
            v,
            o: layout.place(self.dtype, &queries),
            lse: layout.place(DType::F32, &[b, self.heads, t]),
            merged,
        };
        let instruction = AttentionForward {
            q: tensors.q.clone(),
            k: tensors.k.clone(),
            v: tensors.v.clone(),
            o: tensors.o.clone(),
            lse: tensors.lse.clone(),
            document_start: layout.place(DType::I32, &[b, t]),
            scale: self.scale(),
            scratch: (self.scratch > 0).then(|| layout.place(DType::U8, &[self.scratch])),
        };
        (tensors, Instruction::AttentionForward(instruction))
    }

    /// o and lse in f64.
    pub fn expected(&self, q: &[f64], k: &[f64], v: &[f64]) -> [Vec<f64>; 2] {
        let (t, d, groups) = (self.length, self.head_dim, self.heads / self.kv_heads);
        let dot = |x: &[f64], y: &[f64]| x.iter().zip(y).map(|(a, b)| a * b).sum::<f64>();
        let (mut o, mut lse) = (vec![0.0; q.len()], vec![0.0; self.rows * self.heads * t]);
        for (row, i, head) in
            (0..self.rows * t * self.heads).map(|n| (n / self.heads / t, n / self.heads % t, n % self.heads))
        {
            let at = ((row * t + i) * self.heads + head) * d;
            let key = |j: usize| ((row * t + j) * self.kv_heads + head / groups) * d;
            let score = |j: usize| self.scale() as f64 * dot(&q[at..at + d], &k[key(j)..key(j) + d]);
            let scores: Vec<f64> = (0..=i).map(score).collect();
            let highest = scores.iter().fold(f64::MIN, |a, b| a.max(*b));
            let sum: f64 = scores.iter().map(|s| (s - highest).exp()).sum();
            lse[(row * self.heads + head) * t + i] = highest + sum.ln();
            for (j, s) in scores.iter().enumerate() {
                let p = (s - highest).exp() / sum;
                (0..d).for_each(|c| o[at + c] += p * v[key(j) + c]);
            }
        }
        [o, lse]
    }
}
