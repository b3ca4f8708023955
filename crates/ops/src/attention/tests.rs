//! Facts about attention: visible keys, shared key heads, and the kernels of each call.

use graph::{Dim, Element, ValueType};
use program::{Arch, ArenaId, Documents, Machine, Realisation, TensorRef};
use tensor::{Attrs, DType};

use super::library::realisation;
use super::{Attention, AttentionBackward, Extents, Reading};
use crate::evaluate::{Array, Evaluate, apply};
use crate::kernel::{LowerCall, Lowered};
use crate::op::Op;

/// Uniform attention over one-hot values: o[i][j] is 1/n for the n keys j that query i sees.
fn weights(starts: &[i32], window: Option<usize>) -> Vec<Vec<f64>> {
    let attrs = Attrs::new().with("scale", 1.0);
    weights_of(starts, None, window.map_or(attrs.clone(), |window| attrs.with("window", window)))
}

fn weights_of(starts: &[i32], last: Option<&[i32]>, attrs: Attrs) -> Vec<Vec<f64>> {
    let n = starts.len();
    let zeros = Array::Real(vec![0.0; n * n]);
    let one_hot = Array::Real((0..n * n).map(|i| if i / n == i % n { 1.0 } else { 0.0 }).collect());
    let shape = [1, n, 1, n];
    let starts = Array::Int(starts.to_vec());
    let last = last.map(|last| Array::Int(last.to_vec()));
    let rows = [1, n];
    let mut inputs: Vec<(&[usize], &Array<f64>)> =
        vec![(&shape, &zeros), (&shape, &zeros), (&shape, &one_hot), (&rows, &starts)];
    inputs.extend(last.as_ref().map(|last| (&rows[..], last)));
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
fn last_keys_let_queries_see_what_follows() {
    let of = |starts: &[i32], last: &[i32], attrs: Attrs| seen(&weights_of(starts, Some(last), attrs));
    // A prefix of two tokens; the third document's tokens see each other.
    let prefix = of(&[0, 0, 0, 3, 3], &[1, 1, 2, 4, 4], Attrs::new());
    assert_eq!(prefix, [vec![0, 1], vec![0, 1], vec![0, 1, 2], vec![3, 4], vec![3, 4]]);
    // A window counts from the query, whatever follows it.
    let narrow = of(&[0, 0, 0, 0], &[3, 3, 3, 3], Attrs::new().with("window", 2));
    assert_eq!(narrow, [vec![0, 1, 2, 3], vec![0, 1, 2, 3], vec![1, 2, 3], vec![2, 3]]);
    let whole = seen(&weights_of(&[0, 0], None, Attrs::new().with("bidirectional", true)));
    assert_eq!(whole, [vec![0, 1], vec![0, 1]]);
}

#[test]
fn branches_see_the_common_beginning_and_themselves() {
    let of = |starts: &[i32], last: &[i32]| seen(&weights_of(starts, Some(last), Attrs::new().with("branches", true)));
    // Two tokens, branches of one and two after them; then a document of one.
    let rows = of(&[0, 0, 0, 0, 0, 5], &[4, 4, 2, 4, 4, 5]);
    assert_eq!(rows, [vec![0], vec![0, 1], vec![0, 1, 2], vec![0, 1, 3], vec![0, 1, 3, 4], vec![5]]);
}

#[test]
#[should_panic(expected = "sees itself and the beginning of its document")]
fn a_beginning_that_a_branch_does_not_see_is_a_broken_promise() {
    weights_of(&[0, 0, 0], Some(&[1, 2, 2]), Attrs::new().with("branches", true));
}

#[test]
#[should_panic(expected = "query 1 of row 0 sees keys 0..2 of 3, the one before it 0..3")]
fn intervals_that_go_back_are_a_broken_promise() {
    weights_of(&[0, 0, 0], Some(&[2, 1, 2]), Attrs::new());
}

/// Equal scores s, one sink: each of n keys weighs e^s / (n e^s + e^sink).
#[test]
fn a_sink_joins_the_sum_and_a_cap_bends_the_scores() {
    let (ones, shape, sink) = (Array::Real(vec![1.0; 2]), [1, 2, 1, 1], Array::Real(vec![0.7]));
    let starts = Array::Int(vec![0; 2]);
    let attrs = Attrs::new().with("scale", 3.0).with("soft_cap", 2.0);
    let inputs: [(&[usize], &Array<f64>); 5] =
        [(&shape, &ones), (&shape, &ones), (&shape, &ones), (&[1, 2], &starts), (&[1], &sink)];
    let mut out = [(shape.to_vec(), Array::Real(vec![0.0; 2])), (vec![1, 1, 2], Array::Real(vec![0.0; 2]))];
    apply(&Attention, &attrs, &inputs, &mut out);
    let score = 2.0 * (3.0f64 / 2.0).tanh();
    for (i, (o, lse)) in out[0].1.real().iter().zip(out[1].1.real()).enumerate() {
        let seen = (i + 1) as f64 * score.exp();
        assert!((lse - (seen + 0.7f64.exp()).ln()).abs() < 1e-12, "lse {lse}");
        assert!((o - seen / (seen + 0.7f64.exp())).abs() < 1e-12, "o {o}");
    }
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
    assert!(infer(&[2, 5, 2, 8], &attrs.clone().with("window", 0)).unwrap_err().contains("1 or more"));
    assert!(infer(&[2, 5, 2, 8], &attrs.clone().with("soft_cap", 0.0)).unwrap_err().contains("more than 0"));
    let further = |more: &[ValueType], attrs: &Attrs| {
        let first = [float(&[2, 5, 6, 8]), float(&[2, 5, 2, 8]), float(&[2, 5, 2, 16]), starts.clone()];
        Attention.infer(&[&first, more].concat(), attrs)
    };
    // Values of another size give o that size.
    assert_eq!(further(&[], &attrs).unwrap()[0].shape, dims(&[2, 5, 6, 16]));
    let (last, sink) = (starts.clone(), float(&[6]));
    assert!(
        further(&[last.clone(), sink.clone()], &attrs).is_ok() && further(std::slice::from_ref(&sink), &attrs).is_ok()
    );
    assert!(further(&[sink.clone(), last.clone()], &attrs).unwrap_err().contains("last_key [B, T] and then a sink"));
    assert!(further(&[float(&[5])], &attrs).unwrap_err().contains("one number for each head"));
    assert!(further(&[float(&[2, 5])], &attrs).unwrap_err().contains("last_key must be i32"));
    let both = attrs.clone().with("bidirectional", true);
    assert!(further(std::slice::from_ref(&last), &both).unwrap_err().contains("give one"));
    let branches = attrs.clone().with("branches", true);
    assert!(further(std::slice::from_ref(&last), &branches).is_ok());
    assert!(further(&[], &branches).unwrap_err().contains("take `last_query`"));
    assert!(further(&[last], &branches.with("window", 3)).unwrap_err().contains("without a window"));
    assert!(further(&[sink], &both).is_ok());
    let wide = [float(&[2, 5, 6, 520]), float(&[2, 5, 2, 520]), float(&[2, 5, 2, 8]), starts.clone()];
    assert!(Attention.infer(&wide, &both).unwrap_err().contains("1 to 512"));
}

/// A call of both passes that tests bend.
#[derive(Clone)]
struct Call {
    machine: Machine,
    documents: Documents,
    attrs: Attrs,
    /// The tensors q, k, v and document_start.
    forward: [TensorRef; 4],
    lse: TensorRef,
    o: TensorRef,
    gradients: [TensorRef; 3],
}

impl Call {
    /// (B, T, heads, kv_heads, D, DV)
    fn new(machine: &Machine, dtype: DType, [b, t, heads, kv_heads, d, dv]: [usize; 6], documents: Documents) -> Self {
        let tensor = |shape: &[usize], dtype: DType| TensorRef::dense(ArenaId(0), 0, dtype, shape);
        let (q, k, v) = (
            tensor(&[b, t, heads, d], dtype),
            tensor(&[b, t, kv_heads, d], dtype),
            tensor(&[b, t, kv_heads, dv], dtype),
        );
        Call {
            machine: machine.clone(),
            documents,
            attrs: Attrs::new().with("scale", 1.0),
            forward: [q.clone(), k.clone(), v.clone(), tensor(&[b, t], DType::I32)],
            lse: tensor(&[b, heads, t], DType::F32),
            o: tensor(&[b, t, heads, dv], dtype),
            gradients: [q, k, v],
        }
    }

    /// `run` on the lowering calls of the forward and the backward pass.
    fn both<T>(&self, run: impl Fn(&dyn Op, &LowerCall<'_>) -> T) -> [T; 2] {
        let [q, k, v, starts] = self.forward.clone();
        let call = |op: &dyn Op, inputs: &[TensorRef], outputs: &[TensorRef]| {
            let (attrs, machine, documents) = (&self.attrs, &self.machine, self.documents);
            run(op, &LowerCall { inputs, outputs, attrs, machine, documents })
        };
        let backward = [q, k, v, self.o.clone(), self.lse.clone(), self.o.clone(), starts];
        let forward = call(&Attention, &self.forward, &[self.o.clone(), self.lse.clone()]);
        [forward, call(&AttentionBackward, &backward, &self.gradients)]
    }

    /// Returns the kernel variants of the two passes, and checks that what is lowered are those.
    fn realised(&self) -> [Realisation; 2] {
        self.both(|op, call| {
            let of = realisation(call);
            match op.lower(call) {
                Lowered::AttentionForward(_) => assert_eq!(of, Realisation::Library),
                Lowered::Kernels(kernels) => {
                    assert_eq!(kernels.is_empty(), call.machine.arch == Arch::Cpu);
                    assert!(of != Realisation::Library);
                }
                Lowered::Gemm(_) | Lowered::Copy { .. } | Lowered::Exchange { .. } => {
                    panic!("attention is none of these")
                }
            }
            of
        })
    }
}

const PACKED: Documents = Documents::Packed;

fn gpu(arch: &str) -> Machine {
    Machine { arch: arch.parse().unwrap(), ..Machine::h200() }
}

#[test]
fn halves_take_tensor_cores_everywhere_and_full_rows_the_fastest() {
    use Realisation::{Hopper, Library, Portable, Scalar};
    let of = |machine: &Machine, dtype: DType, shape: [usize; 6], documents: Documents| {
        Call::new(machine, dtype, shape, documents).realised()
    };
    let (h200, a100, rtx) = (Machine::h200(), gpu("sm_80"), gpu("sm_89"));
    let heads_of = |d: usize| [2, 600, 4, 2, d, d];
    assert_eq!(of(&Machine::cpu(1 << 30, 2), DType::BF16, heads_of(64), Documents::Rows), [Scalar, Scalar]);
    assert_eq!(of(&h200, DType::BF16, heads_of(64), Documents::Rows), [Library, Hopper]);
    assert_eq!(of(&h200, DType::BF16, [2, 600, 9, 3, 64, 64], Documents::Rows), [Hopper, Hopper]);
    assert_eq!(of(&h200, DType::BF16, heads_of(128), Documents::Rows), [Hopper, Hopper]);
    assert_eq!(of(&h200, DType::F16, heads_of(128), Documents::Rows), [Hopper, Hopper]);
    for machine in [&h200, &a100, &rtx] {
        assert_eq!(of(machine, DType::F32, heads_of(128), Documents::Rows), [Scalar, Scalar]);
        assert_eq!(of(machine, DType::BF16, heads_of(20), PACKED), [Scalar, Scalar]);
        let own = if machine.arch == h200.arch { Hopper } else { Portable };
        for d in [8, 40, 96, 128, 192, 256] {
            assert_eq!(of(machine, DType::BF16, heads_of(d), PACKED), [own, own]);
        }
        assert_eq!(of(machine, DType::BF16, heads_of(512), PACKED), [Portable, Portable]);
        assert_eq!(of(machine, DType::BF16, [1, 9, 2, 2, 192, 128], Documents::Rows), [own, own]);
    }
    assert_eq!(of(&a100, DType::BF16, heads_of(128), Documents::Rows), [Portable, Portable]);
}

#[test]
fn only_a_mask_that_hides_more_than_the_future_leaves_the_library() {
    use Realisation::{Hopper, Library};
    let with = |name: &str, value: serde_json::Value| {
        let call = Call::new(&Machine::h200(), DType::BF16, [2, 64, 4, 2, 64, 64], Documents::Rows);
        Call { attrs: call.attrs.clone().with(name, value), ..call }.realised()[0]
    };
    assert_eq!([with("window", 63.into()), with("window", 64.into())], [Hopper, Library]);
    assert_eq!([with("soft_cap", 30.0.into()), with("bidirectional", true.into())], [Hopper, Hopper]);
}

/// Scratch is linear in tokens: two numbers and an interval for every query and head, f32 sums of dq, and turns.
#[test]
fn scratch_is_linear_in_tokens() {
    for arch in ["sm_80", "sm_90a"] {
        let scratch = |tokens: usize, d: usize| {
            let call = Call::new(&gpu(arch), DType::BF16, [1, tokens, 16, 8, d, d], Documents::Rows);
            call.both(|op, call| op.scratch(call))
        };
        for d in [64, 128, 512] {
            let (short, long) = (scratch(2048, d), scratch(32768, d));
            assert!(long[0] <= 8 << 10, "{long:?}");
            assert!(long[1] <= 17 * short[1] && long[1] <= 32768 * 16 * (4 * d + 17), "{short:?}, {long:?}");
        }
    }
    let packed = Call::new(&Machine::h200(), DType::BF16, [4, 4096, 32, 8, 64, 64], PACKED);
    let bytes = packed.both(|op, call| op.scratch(call));
    assert!(bytes[0] <= 16 && bytes[1] < 4 * 4096 * 32 * (4 * 64 + 10), "{bytes:?}");
}

/// Whole rows and rows of short documents have one way each; where both may be in a batch, kernels of both are there
/// and the rows decide, each for itself.
#[test]
fn packed_rows_that_may_hold_long_documents_get_both_backward_passes() {
    let h200 = Machine::h200();
    let kernels = |tokens: usize, d: usize, documents: Documents, window: Option<usize>| {
        let call = Call::new(&h200, DType::BF16, [2, tokens, 4, 2, d, d], documents);
        let attrs = window.map_or(call.attrs.clone(), |window| call.attrs.clone().with("window", window));
        let [_, backward] = Call { attrs, ..call }.both(|op, call| match op.lower(call) {
            Lowered::Kernels(kernels) => kernels,
            _ => vec![],
        });
        backward
    };
    let names = |tokens, d, documents, window| {
        kernels(tokens, d, documents, window)
            .iter()
            .map(|kernel| &kernel.entry["attention_".len()..])
            .collect::<Vec<_>>()
    };
    assert_eq!(names(4096, 128, Documents::Rows, None), ["statistics", "gradients"]);
    assert_eq!(names(4096, 64, Documents::Rows, Some(512)), ["statistics", "gradient_q", "gradient_kv"]);
    assert_eq!(names(4096, 128, PACKED, None), ["statistics", "gradients", "gradient_q", "gradient_kv"]);
    assert_eq!(names(512, 128, PACKED, None), ["statistics", "gradient_q", "gradient_kv"]);
    assert_eq!(names(4096, 256, PACKED, None), ["statistics", "gradient_q", "gradient_kv"]);
    let long = |d| {
        let defines = kernels(4096, d, PACKED, None).swap_remove(0).defines;
        defines.into_iter().find(|(name, _)| name == "LONG").map(|(_, keys)| keys.parse::<usize>().unwrap())
    };
    assert_eq!([long(128), long(64)], [Some(819), Some(1229)]);
}

/// Two blocks have half of the query heads each where one block for the longest tile of keys would take longer than the
/// mean of all.
#[test]
fn few_key_heads_are_shared_by_two_blocks() {
    let h200 = Machine::h200();
    let shares = |extents: [usize; 6], attrs: Attrs| {
        let call = Call { attrs, ..Call::new(&h200, DType::BF16, extents, Documents::Rows) };
        let [_, backward] = call.both(|op, call| match op.lower(call) {
            Lowered::Kernels(kernels) => kernels,
            _ => vec![],
        });
        let defines = backward.iter().find(|kernel| kernel.entry == "attention_gradients").map(|of| &of.defines);
        let shares = defines.and_then(|of| of.iter().find(|(name, _)| name == "SHARES"));
        shares.map(|(_, count)| count.parse::<usize>().unwrap())
    };
    let causal = Attrs::new().with("scale", 1.0);
    assert_eq!(shares([2, 2048, 32, 4, 128, 128], causal.clone()), Some(2));
    assert_eq!(
        shares([2, 2048, 32, 8, 128, 128], causal.clone()),
        Some(1),
        "as many tiles as all blocks compute in the mean"
    );
    assert_eq!(shares([1, 2048, 9, 3, 64, 64], causal.clone()), Some(1), "three query heads have no halves");
    assert_eq!(shares([2, 4096, 32, 4, 128, 128], causal.clone().with("window", 1024)), Some(1), "tiles are alike");
    assert_eq!(shares([1, 2048, 8, 4, 128, 128], causal.with("bidirectional", true)), Some(2));
}

#[test]
fn layouts_that_tensor_cores_do_not_read_take_the_plain_kernels() {
    use Realisation::{Portable, Scalar};
    let with_v = |v: &dyn Fn(TensorRef) -> TensorRef| {
        let mut call = Call::new(&gpu("sm_80"), DType::BF16, [2, 64, 4, 2, 64, 64], PACKED);
        call.forward[2] = v(call.forward[2].clone());
        call.realised()[0]
    };
    // A slice of a merged buffer of 512 columns is read where it is; one of 516 is not.
    let merged = |width: usize| move |v| TensorRef { offset: 768, strides: vec![64 * width, width, 64, 1], ..v };
    assert_eq!([with_v(&merged(512)), with_v(&merged(516))], [Portable, Scalar]);
    assert_eq!(with_v(&|v| TensorRef { offset: 8, ..v }), Scalar);
    // A stride of an axis with one element says nothing.
    let mut single = Call::new(&Machine::h200(), DType::BF16, [1, 64, 4, 2, 64, 64], PACKED);
    single.forward[0].strides[0] = 1;
    assert_eq!(single.realised(), [Realisation::Hopper; 2]);
}

/// Every size of a head on every class of GPU has a division whose shared memory fits.
#[test]
fn every_head_has_kernels_on_every_gpu() {
    let nvidia = [("sm_80", 163), ("sm_86", 99), ("sm_89", 99), ("sm_90a", 227), ("sm_100a", 227), ("sm_120a", 99)];
    let amd = [("gfx90a", 64), ("gfx942", 64), ("gfx950", 160), ("gfx1100", 64), ("gfx1201", 64)];
    for (arch, limit) in nvidia.into_iter().chain(amd) {
        // Gradients of wider heads have no kernel in 64 KiB; `compiler` refuses them.
        let widest = if limit == 64 { 480 } else { 512 };
        for d in (8..=widest).step_by(8) {
            for dv in [8, d, 128, widest] {
                let call = Call::new(&gpu(arch), DType::F16, [1, 65, 2, 1, d, dv], PACKED);
                let kernels = call.both(|op, call| op.lower(call)).map(|lowered| match lowered {
                    Lowered::Kernels(kernels) => kernels,
                    _ => panic!("f16 is not the library's"),
                });
                assert!((2..=4).contains(&kernels[1].len()));
                for kernel in kernels.iter().flatten() {
                    assert!(kernel.shared_bytes <= limit << 10, "{arch} {d} {dv} {}", kernel.entry);
                    assert!(kernel.block[0] <= 512 && kernel.grid[0] > 0);
                }
            }
        }
    }
}

#[test]
fn pairs_are_counted_with_and_without_window() {
    let e = Extents { batch: 1, tokens: 4, heads: 1, kv_heads: 1, head_dim: 8, value_dim: 16 };
    let pairs = |attrs: Attrs| e.pairs(&Reading::checked(&attrs, 8));
    let window = |keys: usize| Attrs::new().with("window", keys);
    assert_eq!([pairs(Attrs::new()), pairs(window(2)), pairs(window(9))], [10.0, 7.0, 10.0]);
    let whole = window(2).with("bidirectional", true);
    assert_eq!([pairs(Attrs::new().with("bidirectional", true)), pairs(whole)], [16.0, 13.0]);
    assert_eq!(e.flops(&Reading::checked(&Attrs::new(), 8), 1.0, 1.0), 2.0 * (8.0 + 16.0) * 10.0);
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

/// Scores near 100 round lse to 4e-6; keys that are all but the same leave little else of dq.
#[test]
fn a_rounded_lse_does_not_reach_the_gradients() {
    fn query_gradient<T: Evaluate>() -> Vec<f64> {
        let (n, d) = (24, 4);
        let noise = |i: usize| ((i * 7919 + 13) % 1013) as f64 / 500.0 - 1.0;
        let rows = |first: f64, rest: f64, size: f64, seed: usize| {
            let value = |i: usize| if i.is_multiple_of(d) { first } else { rest } + size * noise(i + seed);
            Array::Real((0..n * d).map(|i| T::from_f64(f64::from(value(i) as f32))).collect::<Vec<_>>())
        };
        let (q, k) = (rows(100.0, 0.0, 1.0, 0), rows(1.0, 0.0, 0.01, 500));
        let (v, d_o) = (rows(1.0, 1.0, 1.0, 1000), rows(1.0, 1.0, 0.5, 1500));
        let (shape, lines, starts) = ([1, n, 1, d], [1, 1, n], Array::Int(vec![0; n]));
        let attrs = Attrs::new().with("scale", 1.0);
        let zeros = |len: usize| Array::Real(vec![T::default(); len]);
        let mut forward = [(shape.to_vec(), zeros(n * d)), (lines.to_vec(), zeros(n))];
        let starts: (&[usize], &Array<T>) = (&[1, n], &starts);
        apply(&Attention, &attrs, &[(&shape, &q), (&shape, &k), (&shape, &v), starts], &mut forward);
        let [(_, o), (_, lse)] = &forward;
        let mut backward = [(); 3].map(|()| (shape.to_vec(), zeros(n * d)));
        let inputs = [(&shape[..], &q), (&shape, &k), (&shape, &v), (&shape, o), (&lines, lse), (&shape, &d_o), starts];
        apply(&AttentionBackward, &attrs, &inputs, &mut backward);
        backward[0].1.real().iter().map(|x| x.to_f64()).collect()
    }
    let (found, exact) = (query_gradient::<f32>(), query_gradient::<f64>());
    let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
    let error = norm(&mut found.iter().zip(&exact).map(|(a, b)| a - b)) / norm(&mut exact.iter().copied());
    assert!(error < 3e-4, "relative error {error:e}");
}
