//! Facts about attention: who sees whom, shared key heads, and which calls become what.

use graph::{Dim, Element, ValueType};
use program::{ArenaId, Documents, Machine, TensorRef};
use tensor::{Attrs, DType};

use super::{Attention, AttentionBackward, Extents};
use crate::evaluate::{Array, apply};
use crate::kernel::{LowerCall, Lowered};
use crate::op::Op;

/// Uniform attention over one-hot values: o[i][j] is 1/n for the n keys j that query i sees.
fn weights(starts: &[i32], window: Option<usize>) -> Vec<Vec<f64>> {
    let n = starts.len();
    let zeros = Array::Real(vec![0.0; n * n]);
    let one_hot = Array::Real((0..n * n).map(|i| if i / n == i % n { 1.0 } else { 0.0 }).collect());
    let shape = [1, n, 1, n];
    let starts = Array::Int(starts.to_vec());
    let mut attrs = Attrs::new().with("scale", 1.0);
    if let Some(window) = window {
        attrs = attrs.with("window", window);
    }
    let inputs: [(&[usize], &Array<f64>); 4] =
        [(&shape, &zeros), (&shape, &zeros), (&shape, &one_hot), (&[1, n], &starts)];
    let mut out = [(shape.to_vec(), Array::Real(vec![0.0; n * n])), (vec![1, 1, n], Array::Real(vec![0.0; n]))];
    apply(&Attention, &attrs, &inputs, &mut out);
    for (row, lse) in out[0].1.real().chunks(n).zip(out[1].1.real()) {
        let seen = row.iter().filter(|w| **w > 0.0).count() as f64;
        assert!((lse - seen.ln()).abs() < 1e-12, "lse of equal scores is the log of their number");
    }
    out[0].1.real().chunks(n).map(<[f64]>::to_vec).collect()
}

fn seen(weights: &[Vec<f64>]) -> Vec<Vec<usize>> {
    weights.iter().map(|row| (0..row.len()).filter(|j| row[*j] > 0.0).collect()).collect()
}

#[test]
fn a_query_sees_its_document_up_to_itself() {
    assert_eq!(seen(&weights(&[0, 0, 0], None)), [vec![0], vec![0, 1], vec![0, 1, 2]]);
    assert_eq!(seen(&weights(&[0, 0, 2, 2], None)), [vec![0], vec![0, 1], vec![2], vec![2, 3]]);
}

#[test]
fn a_window_counts_the_query_itself() {
    assert_eq!(seen(&weights(&[0, 0, 0, 0], Some(2))), [vec![0], vec![0, 1], vec![1, 2], vec![2, 3]]);
    assert_eq!(seen(&weights(&[0, 0, 2, 2, 2], Some(2)))[2..], [vec![2], vec![2, 3], vec![3, 4]]);
}

#[test]
fn heads_share_key_heads_in_consecutive_groups() {
    // Four heads, two key heads with values 10 and 20: one token each.
    let (q, k) = (Array::Real(vec![1.0; 4]), Array::Real(vec![1.0; 2]));
    let (v, starts) = (Array::Real(vec![10.0, 20.0]), Array::Int(vec![0]));
    let (one, shared) = ([1, 1, 4, 1], [1, 1, 2, 1]);
    let inputs: [(&[usize], &Array<f64>); 4] = [(&one, &q), (&shared, &k), (&shared, &v), (&[1, 1], &starts)];
    let mut out = [(one.to_vec(), Array::Real(vec![0.0; 4])), (vec![1, 4, 1], Array::Real(vec![0.0; 4]))];
    apply(&Attention, &Attrs::new().with("scale", 0.5), &inputs, &mut out);
    assert_eq!(out[0].1.real(), [10.0, 10.0, 20.0, 20.0]);
}

#[test]
fn shapes_that_do_not_fit_are_refused() {
    let dims = |d: &[usize]| d.iter().map(|n| Dim::Fixed(*n)).collect::<Vec<_>>();
    let float = |d: &[usize]| ValueType::new(Element::Float, dims(d));
    let starts = ValueType::new(Element::I32, dims(&[2, 5]));
    let attrs = Attrs::new().with("scale", 1.0);
    let infer = |kv: &[usize], attrs: &Attrs| {
        Attention.infer(&[float(&[2, 5, 6, 8]), float(kv), float(kv), starts.clone()], attrs)
    };
    assert_eq!(infer(&[2, 5, 2, 8], &attrs).unwrap()[1].to_string(), "f32[2, 6, 5]");
    assert!(infer(&[2, 5, 4, 8], &attrs).unwrap_err().contains("cannot share 4"));
    assert!(infer(&[2, 5, 2, 16], &attrs).unwrap_err().contains("head_dim of q"));
    assert!(infer(&[2, 5, 2, 8], &attrs.with("window", 0)).unwrap_err().contains("1 or more"));
}

/// What a call of this element type and head size becomes on `machine`.
fn lowered(machine: &Machine, dtype: DType, head_dim: usize) -> (Lowered, Lowered) {
    let tensor = |shape: &[usize], dtype: DType| TensorRef::dense(ArenaId(0), 0, dtype, shape);
    let (q, kv) = (tensor(&[2, 64, 4, head_dim], dtype), tensor(&[2, 64, 2, head_dim], dtype));
    let (lse, starts) = (tensor(&[2, 4, 64], DType::F32), tensor(&[2, 64], DType::I32));
    let attrs = Attrs::new().with("scale", 1.0);
    let call = |op: &dyn Op, inputs: &[TensorRef], outputs: &[TensorRef]| {
        let call = LowerCall { inputs, outputs, attrs: &attrs, machine, documents: Documents::Rows };
        assert!(op.scratch(&call) > 0 || machine.name == "cpu" || op.name() == "attention");
        op.lower(&call)
    };
    let forward = [q.clone(), kv.clone(), kv.clone(), starts.clone()];
    let backward = [q.clone(), kv.clone(), kv.clone(), q.clone(), lse.clone(), q.clone(), starts];
    (call(&Attention, &forward, &[q.clone(), lse]), call(&AttentionBackward, &backward, &[q.clone(), kv.clone(), kv]))
}

#[test]
fn the_library_takes_bf16_and_the_kernels_the_rest() {
    let instruction =
        |pair: &(Lowered, Lowered)| matches!(pair, (Lowered::AttentionForward(_), Lowered::AttentionBackward(_)));
    let kernels = |pair: &(Lowered, Lowered)| match pair {
        (Lowered::Kernels(forward), Lowered::Kernels(backward)) => (forward.len(), backward.len()) == (1, 2),
        _ => false,
    };
    let (cpu, gpu) = (Machine::cpu(1 << 30, 2), Machine::h200());
    assert!(instruction(&lowered(&cpu, DType::F32, 20)));
    assert!(instruction(&lowered(&gpu, DType::BF16, 128)));
    assert!(kernels(&lowered(&gpu, DType::F32, 128)));
    assert!(kernels(&lowered(&gpu, DType::BF16, 256)));
    assert!(kernels(&lowered(&gpu, DType::BF16, 20)));
}

#[test]
fn pairs_are_counted_with_and_without_window() {
    let e = Extents { batch: 1, tokens: 4, heads: 1, kv_heads: 1, head_dim: 8 };
    assert_eq!((e.pairs(None), e.pairs(Some(2)), e.pairs(Some(9))), (10.0, 7.0, 10.0));
}

#[test]
fn bits_do_not_depend_on_the_number_of_threads() {
    let (shape, kv) = ([2, 70, 4, 12], [2, 70, 2, 12]);
    let drawn =
        |n: usize, seed: usize| Array::Real((0..n).map(|i| ((i * 7919 + seed) % 1013) as f32 / 500.0 - 1.0).collect());
    let (q, k, v, d_o) = (drawn(6720, 1), drawn(3360, 2), drawn(3360, 3), drawn(6720, 4));
    let starts = Array::Int((0..140).map(|i| if i % 70 < 33 { 0 } else { 33 }).collect());
    let attrs = Attrs::new().with("scale", 0.3);
    let run = || {
        let zeros = |n: usize| Array::Real(vec![0f32; n]);
        let mut forward = [(shape.to_vec(), zeros(6720)), (vec![2, 4, 70], zeros(560))];
        let inputs: [(&[usize], &Array<f32>); 4] = [(&shape, &q), (&kv, &k), (&kv, &v), (&[2, 70], &starts)];
        apply(&Attention, &attrs, &inputs, &mut forward);
        let [(_, o), (_, lse)] = &forward;
        let mut backward = [(shape.to_vec(), zeros(6720)), (kv.to_vec(), zeros(3360)), (kv.to_vec(), zeros(3360))];
        let [q, k, v, starts] = inputs;
        let inputs = [q, k, v, (&shape, o), (&[2, 4, 70], lse), (&shape, &d_o), starts];
        apply(&AttentionBackward, &attrs, &inputs, &mut backward);
        (forward, backward)
    };
    let with = |threads: usize| rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap().install(run);
    let one = with(1);
    assert!(one.1[2].1.real().iter().all(|x| x.is_finite()) && one == with(2) && one == with(3));
}
