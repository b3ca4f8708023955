//! Instructions on a real GPU against f64 on the host. Ignored unless requested: `cargo test --release --workspace
//! --test it -- --ignored gpu::` on a machine with a GPU, where a missing GPU or library is a failure.
//! SUROGATE_SITE_PACKAGES names the folders of the pip wheels.

use crate::reference::{Case, Layout, Numbers, offsets, read, relative_error, write};
use gpu::disk_cache::DiskCache;
use gpu::{GpuBackend, GpuSession, Options, Search, devices};
use program::{
    Arg, Arithmetic, Gemm, Instruction, Kernel, KernelCall, KernelId, Launch, LowRank, Program, Scales, Session,
    TensorRef,
};
use std::sync::Arc;
use tensor::{Attrs, DType, HostTensor};

/// Options for the first GPU and its architecture.
fn gpu() -> (Options, String) {
    let roots = std::env::var_os("SUROGATE_SITE_PACKAGES").map(|v| std::env::split_paths(&v).collect());
    let search = Search::from_environment(roots.unwrap_or_default());
    let found = devices(&search).unwrap_or_else(|e| panic!("there is no GPU: {e}"));
    let device = found.first().expect("no GPU is visible");
    let options =
        Options { cache: DiskCache::default(), time_products: false, check_each: true, ..Options::new(search) };
    (options, device.architecture.to_string())
}

fn load(options: &Options, program: Arc<Program>) -> GpuSession {
    GpuBackend::new(options.clone()).load_session(program).unwrap_or_else(|e| panic!("{e}"))
}

fn run(session: &mut GpuSession) {
    session.run(0).and_then(|()| session.synchronize()).unwrap_or_else(|e| panic!("{e}"));
}

#[test]
#[ignore = "needs a GPU"]
fn the_machine_reports_everything_that_is_needed() {
    let (options, _) = gpu();
    let report = gpu::Report::new(&options.search);
    println!("{report}");
    assert!(report.usable(), "{report}");
}

#[test]
#[ignore = "needs a GPU"]
fn kernels_get_their_arguments() {
    let (options, architecture) = gpu();
    let mut layout = Layout::default();
    let (x, y, scratch) =
        (layout.place(DType::F32, &[300]), layout.place(DType::F32, &[300]), layout.place(DType::U8, &[2048]));
    let source = r#"
#include "scale.cuh"
extern "C" __global__ void spread(const float* x, float* scratch, float a, int n, long long shift) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) scratch[i] = scaled(x[i], a) + (float)(shift >> 32);
}
extern "C" __global__ void gather(const float* scratch, float* y, unsigned n) {
  extern __shared__ float block[];
  unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) { block[threadIdx.x] = scratch[i]; y[i] = block[threadIdx.x] + y[i]; }
}
"#;
    let kernel = |entry: &str| Kernel {
        entry: entry.into(),
        source: source.into(),
        headers: vec![(
            "scale.cuh".into(),
            "__device__ float scaled(float x, float a) { return FACTOR * a * x; }".into(),
        )],
        defines: vec![("FACTOR".into(), "2.0f".into())],
    };
    let call = |id, shared_bytes, args| KernelCall {
        kernel: KernelId(id),
        grid: [3, 1, 1],
        block: [128, 1, 1],
        shared_bytes,
        args,
    };
    let launch = Launch {
        op: "test".into(),
        attrs: Attrs::default(),
        inputs: vec![x.clone()],
        outputs: vec![y.clone()],
        scratch: Some(scratch),
        arithmetic: Arithmetic::default(),
        calls: vec![
            call(0, 0, vec![Arg::Input(0), Arg::Scratch(256), Arg::F32(1.5), Arg::I32(300), Arg::I64(7 << 32)]),
            // More shared memory than a kernel gets without asking.
            call(1, 100 << 10, vec![Arg::Scratch(256), Arg::Output(0), Arg::U32(300)]),
        ],
    };
    let program =
        layout.program(architecture, vec![kernel("spread"), kernel("gather")], vec![Instruction::Launch(launch)]);
    let mut session = load(&options, program);
    let values = Numbers::new(1).tensor(DType::F32, &[300]);
    write(&mut session, &x, &values);
    write(&mut session, &y, &HostTensor::from_f32([300], &[0.25; 300]));
    run(&mut session);
    let expected: Vec<f64> = values.to_f64().iter().map(|v| 2.0 * 1.5 * v + 7.0 + 0.25).collect();
    // The device contracts product and sum into one rounding.
    assert!(relative_error(&read(&mut session, &y).to_f64(), &expected) < 1e-7);
}

#[test]
#[ignore = "needs a GPU"]
fn copies_convert_and_cross_layouts_and_zeroing_spares_the_gaps() {
    let (options, architecture) = gpu();
    let mut layout = Layout::default();
    let wide = layout.place(DType::F32, &[4, 6, 40]);
    let slice = TensorRef { offset: wide.offset + 8 * 4, shape: vec![4, 6, 16], ..wide.clone() };
    let narrow = layout.place(DType::BF16, &[4, 6, 16]);
    let transposed = TensorRef { shape: vec![6, 4, 16], strides: vec![16, 96, 1], ..narrow.clone() };
    let turned = layout.place(DType::BF16, &[6, 4, 16]);
    let rounded = layout.place(DType::BF16, &[4, 6, 40]);
    let ids = layout.place(DType::I64, &[9]);
    let ids_copy = layout.place(DType::I64, &[9]);
    let instructions = vec![
        Instruction::Copy { from: slice.clone(), to: narrow.clone() },
        Instruction::Copy { from: transposed.clone(), to: turned.clone() },
        Instruction::Copy { from: ids.clone(), to: ids_copy.clone() },
        Instruction::Copy { from: wide.clone(), to: rounded.clone() },
        Instruction::Zero { at: slice.clone() },
    ];
    let mut session = load(&options, layout.program(architecture, vec![], instructions));
    let values = Numbers::new(2).tensor(DType::F32, &[4, 6, 40]);
    let numbers: Vec<u8> = (0..9i64).flat_map(|i| (i << 40).to_le_bytes()).collect();
    write(&mut session, &wide, &values);
    session.write(&ids, &numbers).unwrap();
    run(&mut session);
    let host = values.to_f32();
    let cut: Vec<f32> = offsets(&slice).iter().map(|i| host[8 + i]).collect();
    let expected = HostTensor::from_f32([4, 6, 16], &cut).cast(DType::BF16);
    assert_eq!(read(&mut session, &narrow), expected);
    assert_eq!(read(&mut session, &rounded), values.cast(DType::BF16));
    let narrow_host = expected.to_f32();
    let swapped: Vec<f32> = offsets(&transposed).iter().map(|i| narrow_host[*i]).collect();
    assert_eq!(read(&mut session, &turned).to_f32(), swapped);
    let mut zeroed = host.clone();
    offsets(&slice).iter().for_each(|i| zeroed[8 + i] = 0.0);
    assert_eq!(read(&mut session, &wide).to_f32(), zeroed);
    assert_eq!(read(&mut session, &ids_copy).bytes, numbers);
}

/// One Gemm with every optional part, against f64.
fn check_gemm(options: &Options, architecture: &str, dtypes: (DType, DType), transpose: (bool, bool), parts: bool) {
    let (m, n, k, r) = (70, 48, 72, 8);
    let (input, output) = dtypes;
    let mut layout = Layout::default();
    let stored = |t: bool, a: usize, b: usize| if t { [b, a] } else { [a, b] };
    let a = layout.place(input, &stored(transpose.0, m, k));
    let b = layout.place(input, &stored(transpose.1, k, n));
    let whole = layout.place(output, &[m, 3 * n]);
    let d = TensorRef { offset: whole.offset + n * output.size(), shape: vec![m, n], ..whole.clone() };
    let bias = layout.place(output, &[n]);
    let (t, low) = (layout.place(input, &[m, r]), layout.place(input, &[n / 2, r]));
    let low_rank = LowRank { t: t.clone(), b: low.clone(), transpose_b: true, scale: 0.5, columns: (n / 2, n / 2) };
    let gemm = Gemm {
        batch: 1,
        m,
        n,
        k,
        a: a.clone(),
        b: b.clone(),
        d: d.clone(),
        transpose_a: transpose.0,
        transpose_b: transpose.1,
        scale: if parts { 0.75 } else { 1.0 },
        scales: None,
        bias: parts.then(|| bias.clone()),
        accumulate: parts,
        batch_invariant: false,
        low_rank: if parts { vec![low_rank] } else { vec![] },
    };
    let mut session = load(options, layout.program(architecture.into(), vec![], vec![Instruction::Gemm(gemm)]));
    let mut numbers = Numbers::new(3);
    let mut fill = |session: &mut GpuSession, at: &TensorRef| {
        let value = numbers.tensor(at.dtype, &at.shape);
        write(session, at, &value);
        value.to_f64()
    };
    let [av, bv, dv, biasv, tv, lowv] = [&a, &b, &whole, &bias, &t, &low].map(|at| fill(&mut session, at));
    run(&mut session);
    let mut expected = dv.clone();
    for i in 0..m {
        for j in 0..n {
            let at = |t: bool, (rows, columns): (usize, usize), i: usize, j: usize| {
                if t { j * rows + i } else { i * columns + j }
            };
            let mut sum: f64 =
                (0..k).map(|l| av[at(transpose.0, (m, k), i, l)] * bv[at(transpose.1, (k, n), l, j)]).sum();
            if parts {
                sum *= 0.75;
                sum += biasv[j] + dv[i * 3 * n + n + j];
                if j >= n / 2 {
                    sum += 0.5 * (0..r).map(|l| tv[i * r + l] * lowv[(j - n / 2) * r + l]).sum::<f64>();
                }
            }
            expected[i * 3 * n + n + j] = sum;
        }
    }
    let error = relative_error(&read(&mut session, &whole).to_f64(), &expected);
    let limit = if output == DType::BF16 { 4e-3 } else { 2e-6 };
    assert!(error < limit, "{dtypes:?} {transpose:?} parts {parts}: relative error {error:.1e}");
}

#[test]
#[ignore = "needs a GPU"]
fn products_in_every_orientation_and_type() {
    let (options, architecture) = gpu();
    for dtypes in [(DType::F32, DType::F32), (DType::BF16, DType::BF16), (DType::BF16, DType::F32)] {
        for transpose in [(false, false), (false, true), (true, false), (true, true)] {
            for parts in [false, true] {
                // A bias of f32 on bf16 factors exists in no epilogue; nothing lowers to it.
                if !(parts && dtypes == (DType::BF16, DType::F32)) {
                    check_gemm(&options, &architecture, dtypes, transpose, parts);
                }
            }
        }
    }
}

/// A large product and a skinny one; the bits of both results.
fn products(options: &Options, architecture: &str) -> (gpu::Algorithms, Vec<u8>) {
    let mut layout = Layout::default();
    let mut tensor = |shape: [usize; 2]| layout.place(DType::BF16, &shape);
    let [x, w, y, narrow, z] = [[512, 4096], [1024, 4096], [512, 1024], [16, 4096], [512, 16]].map(&mut tensor);
    let gemm = |b: &TensorRef, d: &TensorRef| {
        Instruction::Gemm(Gemm {
            batch: 1,
            m: 512,
            n: d.shape[1],
            k: 4096,
            a: x.clone(),
            b: b.clone(),
            d: d.clone(),
            transpose_a: false,
            transpose_b: true,
            scale: 1.0,
            scales: None,
            bias: None,
            accumulate: true,
            batch_invariant: false,
            low_rank: vec![],
        })
    };
    let instructions = vec![gemm(&w, &y), gemm(&narrow, &z)];
    let mut session = load(options, layout.program(architecture.into(), vec![], instructions));
    assert!(read(&mut session, &y).bytes.iter().all(|b| *b == 0), "arenas are zero after loading");
    let mut numbers = Numbers::new(6);
    for at in [&x, &w, &narrow] {
        write(&mut session, at, &numbers.tensor(at.dtype, &at.shape));
    }
    run(&mut session);
    let bytes = [&y, &z].map(|at| read(&mut session, at).bytes).concat();
    (session.algorithms().clone(), bytes)
}

#[test]
#[ignore = "needs a GPU"]
fn timed_products_are_remembered_and_taken_from_a_record() {
    let (options, architecture) = gpu();
    let folder = tempfile::tempdir().unwrap();
    let timed =
        Options { cache: DiskCache::new(Some(folder.path().to_owned())), time_products: true, ..options.clone() };
    let start = std::time::Instant::now();
    let (chosen, bits) = products(&timed, &architecture);
    println!("timed in {:?}: {chosen:#?}", start.elapsed());
    assert_eq!(chosen.len(), 2);
    let start = std::time::Instant::now();
    assert!(products(&timed, &architecture) == (chosen.clone(), bits.clone()), "from the disk");
    println!("remembered in {:?}", start.elapsed());
    // Another choice than the clock's or the cache's: the first suggestion, then its record.
    let (first, first_bits) = products(&options, &architecture);
    let recorded = Options { algorithms: first.clone(), ..timed.clone() };
    assert!(products(&recorded, &architecture) == (first, first_bits), "from the record");
    let record = Options { algorithms: chosen.clone(), ..options.clone() };
    assert!(products(&record, &architecture) == (chosen.clone(), bits), "from the record without a cache");
    let broken = chosen.keys().map(|name| (name.clone(), "0123".to_owned())).collect();
    let broken = Options { algorithms: broken, ..options };
    let outcome = std::panic::catch_unwind(|| products(&broken, &architecture));
    let text = *outcome.expect_err("a record of nonsense was taken").downcast::<String>().unwrap();
    assert!(text.contains("the run's record") && text.contains("instruction 0 of forward"), "{text}");
}

#[test]
#[ignore = "needs a GPU"]
fn stored_attention_plans_give_the_same_bits() {
    let (options, architecture) = gpu();
    let folder = tempfile::tempdir().unwrap();
    let options = Options { cache: DiskCache::new(Some(folder.path().to_owned())), ..options };
    let built = check_attention(&options, &architecture, &base());
    assert!(built == check_attention(&options, &architecture, &base()), "the same bits");
    let plans = std::fs::read_dir(folder.path()).unwrap().filter(|entry| {
        let path = entry.as_ref().unwrap().path();
        path.extension().is_some_and(|kind| kind == "plan")
    });
    assert_eq!(plans.count(), 1);
}

/// The library's forward pass against f64; returns the bytes of o and lse.
fn check_attention(options: &Options, architecture: &str, case: &Case) -> [Vec<u8>; 2] {
    let mut layout = Layout::default();
    let (at, instruction) = case.instruction(&mut layout);
    let mut session = load(options, layout.program(architecture.into(), vec![], vec![instruction]));
    println!("{case:?}\n  notes {:?}, workspace {}", session.notes(), session.workspace_bytes());
    assert_eq!(session.notes().is_empty(), case.scratch > 0, "notes tell of scratch that does not suffice");
    assert_eq!(session.workspace_bytes() == 0, case.scratch > 0, "the workspace holds what the scratch does not");
    let mut numbers = Numbers::new(4);
    let mut fill = |session: &mut GpuSession, at: &TensorRef| {
        let value = numbers.tensor(at.dtype, &at.shape);
        write(session, at, &value);
        value.to_f64()
    };
    let [q, k, v_buffer] = [&at.q, &at.k, &at.merged].map(|at| fill(&mut session, at));
    // Whatever is not written shows as NaN.
    for out in [&at.o, &at.lse] {
        session.write(out, &vec![0xff; out.bytes()]).unwrap();
    }
    run(&mut session);
    let first = (at.v.offset - at.merged.offset) / at.v.dtype.size();
    let v: Vec<f64> = offsets(&at.v).iter().map(|i| v_buffer[first + i]).collect();
    let outs = [&at.o, &at.lse].map(|at| read(&mut session, at));
    for ((name, got), want) in ["o", "lse"].iter().zip(&outs).zip(&case.expected(&q, &k, &v)) {
        let error = relative_error(&got.to_f64(), want);
        println!("  {name}: relative error {error:.1e}");
        assert!(error < 1.5e-2, "{case:?}: {name} has a relative error of {error:.1e}");
    }
    outs.map(|out| out.bytes)
}

fn base() -> Case {
    Case {
        dtype: DType::BF16,
        rows: 2,
        length: 130,
        heads: 4,
        kv_heads: 2,
        head_dim: 64,
        merged: false,
        scratch: 8 << 10,
    }
}

#[test]
#[ignore = "needs a GPU"]
fn cudnn_attention_over_full_rows() {
    let (options, architecture) = gpu();
    for (heads, kv_heads, head_dim) in [(4, 2, 128), (4, 4, 64), (8, 2, 64), (9, 3, 64), (2, 1, 8)] {
        for merged in [false, true] {
            let case = Case { heads, kv_heads, head_dim, merged, ..base() };
            let first = check_attention(&options, &architecture, &case);
            assert!(first == check_attention(&options, &architecture, &case), "the same bits: {case:?}");
            check_attention(&options, &architecture, &Case { rows: 1, ..case });
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn scratch_that_does_not_suffice_is_made_up_for() {
    let (options, architecture) = gpu();
    let planned = check_attention(&options, &architecture, &base());
    // `check_attention` expects the note and the workspace where there is no scratch.
    assert!(planned == check_attention(&options, &architecture, &Case { scratch: 0, ..base() }), "the same bits");
}

#[test]
#[ignore = "needs a GPU"]
fn attention_that_cudnn_does_not_take_is_refused_with_its_instruction() {
    let (options, architecture) = gpu();
    let refusals = [
        (Case { dtype: DType::F32, ..base() }, "cuDNN reads bf16"),
        (Case { head_dim: 12, ..base() }, "16-byte boundaries"),
    ];
    for (case, reason) in refusals {
        let mut layout = Layout::default();
        let (_, instruction) = case.instruction(&mut layout);
        let program = layout.program(architecture.clone(), vec![], vec![instruction]);
        let refused = GpuBackend::new(options.clone()).load_session(program).err();
        let text = refused.unwrap_or_else(|| panic!("{case:?} was taken")).to_string();
        assert!(text.contains("of forward: test (forward)") && text.contains(reason), "{text}");
    }
}

#[test]
#[ignore = "needs a GPU"]
fn a_replayed_graph_gives_the_bits_of_the_eager_run() {
    let (options, architecture) = gpu();
    let options = Options { check_each: false, graphs: true, ..options };
    let case = Case { merged: true, ..base() };
    let mut layout = Layout::default();
    let (at, instruction) = case.instruction(&mut layout);
    let weight = layout.place(DType::BF16, &[64, 64]);
    let projected = layout.place(DType::BF16, &[case.rows, case.length, case.heads, 64]);
    let product = Instruction::Gemm(Gemm {
        batch: 1,
        m: case.rows * case.length * case.heads,
        n: 64,
        k: 64,
        a: at.o.clone(),
        b: weight.clone(),
        d: projected.clone(),
        transpose_a: false,
        transpose_b: true,
        scale: 1.0,
        scales: None,
        bias: None,
        accumulate: false,
        batch_invariant: false,
        low_rank: vec![],
    });
    let mut session = load(&options, layout.program(architecture, vec![], vec![instruction, product]));
    let mut numbers = Numbers::new(5);
    for tensor in [&at.k, &at.merged, &weight] {
        write(&mut session, tensor, &numbers.tensor(tensor.dtype, &tensor.shape));
    }
    // Other numbers in between: the captured graph follows the batch.
    let batches = [6, 7, 6, 7].map(|seed| Numbers::new(seed).tensor(at.q.dtype, &at.q.shape));
    let mut results = vec![];
    for q in &batches {
        write(&mut session, &at.q, q);
        run(&mut session);
        results.push([&at.o, &projected].map(|out| read(&mut session, out).bytes));
    }
    assert!(results[0] == results[2], "replay against eager");
    assert!(results[1] == results[3], "replay against replay");
    assert!(results[0] != results[1], "the batch matters");
}

/// Line printed by the process that received the message of the failing kernel.
const NAMED: &str = "the failing kernel was named";

#[test]
#[ignore = "needs a GPU"]
fn a_failing_kernel_is_named_with_its_instruction() {
    let (options, architecture) = gpu();
    let layout = Layout::default();
    let kernel = Kernel {
        entry: "fail".into(),
        source: "extern \"C\" __global__ void fail() { __trap(); }".into(),
        headers: vec![],
        defines: vec![],
    };
    let call = KernelCall { kernel: KernelId(0), grid: [1; 3], block: [1; 3], shared_bytes: 0, args: vec![] };
    let launch = Launch {
        op: "test".into(),
        attrs: Attrs::default(),
        inputs: vec![],
        outputs: vec![],
        scratch: None,
        arithmetic: Arithmetic::default(),
        calls: vec![call],
    };
    // In a process of its own: a trap ends the context for every session of the process.
    if std::env::var_os("SUROGATE_TRAP").is_none() {
        let child = std::process::Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "gpu::a_failing_kernel_is_named_with_its_instruction",
                "--include-ignored",
                "--nocapture",
            ])
            .env("SUROGATE_TRAP", "1")
            .output()
            .unwrap();
        let printed = String::from_utf8_lossy(&child.stdout);
        assert!(child.status.success() && printed.contains(NAMED), "{printed}");
        return;
    }
    let mut session = load(&options, layout.program(architecture, vec![kernel], vec![Instruction::Launch(launch)]));
    let text = session.run(0).unwrap_err().to_string();
    assert!(text.contains("instruction 0 of forward: test") && text.contains("cuStreamSynchronize"), "{text}");
    println!("{NAMED}");
}

/// A product with its addends: (m, n, k), the second factors across, the slices with their rank and scale, a bias.
struct Adapted {
    extents: (usize, usize, usize),
    /// The first two factors are codes, A of this type, B always along the sum; and whether that may be the fast one.
    codes: Option<(DType, bool)>,
    across: bool,
    slices: Vec<(usize, usize)>,
    rank: usize,
    scale: f32,
    bias: bool,
    batch_invariant: bool,
}

impl Adapted {
    /// The result with the given choices, its error against f64, and the choices that were made.
    fn run(&self, options: &Options, architecture: &str) -> (Vec<u8>, f64, gpu::Algorithms) {
        let (m, n, k) = self.extents;
        let mut layout = Layout::default();
        let (type_a, type_b) = self.codes.map_or((DType::BF16, DType::BF16), |(a, _)| (a, DType::E4M3));
        let b_across = self.across && self.codes.is_none();
        let stored_as =
            |across: bool, rows: usize, columns: usize| if across { [rows, columns] } else { [columns, rows] };
        let stored = |rows: usize, columns: usize| stored_as(self.across, rows, columns);
        // A and D are slices of wider rows; all T are side by side.
        let wide_a = layout.place(type_a, &[m, k + 16]);
        let b = layout.place(type_b, &stored_as(b_across, k, n));
        let scales = [0.5f32, 0.25].map(|scale| (layout.place(DType::F32, &[1]), scale));
        let mut place = |shape: [usize; 2]| layout.place(DType::BF16, &shape);
        let wide_d = place([m, n + 64]);
        let ts = place([m, self.rank * self.slices.len().max(1)]);
        let us: Vec<TensorRef> = self.slices.iter().map(|(_, count)| place(stored(self.rank, *count))).collect();
        let bias = place([1, n]);
        let a = TensorRef { shape: vec![m, k], ..wide_a.clone() };
        let d = TensorRef { shape: vec![m, n], offset: wide_d.offset + 128, ..wide_d.clone() };
        let low_rank = us.iter().zip(&self.slices).enumerate().map(|(s, (u, columns))| LowRank {
            t: TensorRef { shape: vec![m, self.rank], offset: ts.offset + 2 * s * self.rank, ..ts.clone() },
            b: u.clone(),
            transpose_b: !self.across,
            scale: self.scale,
            columns: *columns,
        });
        let vector = TensorRef { shape: vec![n], strides: vec![1], ..bias.clone() };
        let gemm = Gemm {
            batch: 1,
            m,
            n,
            k,
            a,
            b: b.clone(),
            d,
            transpose_a: false,
            transpose_b: !b_across,
            scale: 1.0,
            scales: self
                .codes
                .map(|(_, fast_sum)| Scales::of_tensors(scales.each_ref().map(|(at, _)| at.clone()), fast_sum)),
            bias: self.bias.then_some(vector),
            accumulate: false,
            batch_invariant: self.batch_invariant,
            low_rank: low_rank.collect(),
        };
        let mut session = load(options, layout.program(architecture.into(), vec![], vec![Instruction::Gemm(gemm)]));
        // Each tensor begins with the same numbers, however many rows it has.
        let mut seed = 8;
        let mut fill = |at: &TensorRef| {
            seed += 1;
            let value = Numbers::new(seed).tensor(at.dtype, &at.shape);
            write(&mut session, at, &value);
            value.to_f64()
        };
        let (av, bv, dv, tv, biasv) = (fill(&wide_a), fill(&b), fill(&wide_d), fill(&ts), fill(&bias));
        let uv: Vec<Vec<f64>> = us.iter().map(&mut fill).collect();
        for (at, scale) in &scales {
            write(&mut session, at, &HostTensor::from_f32([1], &[*scale]));
        }
        let factor: f64 = self.codes.map_or(1.0, |_| scales.iter().map(|(_, scale)| *scale as f64).product());
        run(&mut session);
        let at_of = |across: bool, rows: usize, columns: usize, r: usize, c: usize| {
            if across { r * columns + c } else { c * rows + r }
        };
        let at = |rows: usize, columns: usize, r: usize, c: usize| at_of(self.across, rows, columns, r, c);
        let mut expected = dv;
        for i in 0..m {
            for j in 0..n {
                let mut sum: f64 =
                    (0..k).map(|l| factor * av[i * (k + 16) + l] * bv[at_of(b_across, k, n, l, j)]).sum();
                sum += if self.bias { biasv[j] } else { 0.0 };
                for (s, (first, count)) in self.slices.iter().enumerate().filter(|(_, (f, c))| (*f..f + c).contains(&j))
                {
                    let t = |l: usize| tv[i * self.rank * self.slices.len() + s * self.rank + l];
                    let products = (0..self.rank).map(|l| t(l) * uv[s][at(self.rank, *count, l, j - first)]);
                    sum += self.scale as f64 * products.sum::<f64>();
                }
                expected[i * (n + 64) + 64 + j] = sum;
            }
        }
        let result = read(&mut session, &wide_d);
        let error = relative_error(&result.to_f64(), &expected);
        (result.bytes, error, session.algorithms().clone())
    }
}

#[test]
#[ignore = "needs a GPU"]
fn every_way_to_compute_an_adapted_product_agrees() {
    let (options, architecture) = gpu();
    let timed = Options { time_products: true, ..options.clone() };
    let case = |extents, across, slices: &[(usize, usize)], rank, scale, bias| Adapted {
        extents,
        codes: None,
        across,
        slices: slices.to_vec(),
        rank,
        scale,
        bias,
        batch_invariant: false,
    };
    let cases = [
        case((600, 704, 328), false, &[(8, 120), (192, 512)], 8, 1.5, false),
        case((300, 448, 200), true, &[(64, 192)], 24, 0.75, false),
        case((130, 296, 512), false, &[], 16, 1.0, true),
        case((1, 640, 64), true, &[(0, 64), (64, 64), (128, 64), (576, 64)], 48, 1.0, false),
        case((513, 512, 72), false, &[(0, 256), (256, 128), (384, 128)], 64, 2.0, true),
    ];
    let of_codes = |dtype, fast, case| Adapted { codes: Some((dtype, fast)), ..case };
    let of_codes = [
        of_codes(DType::E4M3, true, case((600, 704, 336), false, &[(8, 120), (192, 512)], 8, 1.5, false)),
        of_codes(DType::E4M3, true, case((130, 304, 512), false, &[], 16, 1.0, true)),
        of_codes(DType::E5M2, true, case((257, 512, 16), true, &[(0, 256), (256, 256)], 64, 2.0, true)),
        of_codes(DType::E5M2, false, case((300, 448, 1040), true, &[(64, 192)], 24, 0.75, false)),
        of_codes(DType::E4M3, false, case((513, 512, 128), false, &[(0, 256), (256, 128), (384, 128)], 64, 2.0, true)),
        of_codes(DType::E5M2, false, case((1, 640, 272), true, &[], 48, 1.0, false)),
    ];
    let cases = cases.into_iter().chain(of_codes);
    for case in cases {
        let (_, _, chosen) = case.run(&timed, &architecture);
        let name = chosen.keys().find(|name| name.starts_with("way of")).cloned();
        if architecture != "sm_90a" {
            assert_eq!(name, None, "only Hopper has a choice");
            continue;
        }
        let name = name.expect("the kernel takes all of these");
        let widest = if case.codes.is_some_and(|(_, fast)| !fast) { "own 192" } else { "own 256" };
        for way in ["library", widest, "own 128"] {
            let mut algorithms = chosen.clone();
            algorithms.retain(|key, _| *key == name);
            algorithms.insert(name.clone(), way.to_owned());
            let forced = Options { algorithms, ..options.clone() };
            let (bits, error, _) = case.run(&forced, &architecture);
            assert!(error < 4e-3, "{name}, {way}: relative error {error:.1e}");
            assert!(case.run(&forced, &architecture).0 == bits, "{name}, {way}: other bits in a second run");
        }
        let wrong = Options { algorithms: [(name.clone(), "own 7".to_owned())].into(), ..options.clone() };
        let refused = std::panic::catch_unwind(|| case.run(&wrong, &architecture).1);
        assert!(refused.is_err(), "a way of another version is refused");
    }
}

#[test]
#[ignore = "needs a GPU"]
fn a_row_of_an_invariant_product_has_the_same_bits_among_any_number_of_rows() {
    let (options, architecture) = gpu();
    // Few columns; tiles of every width; addends that end inside a tile and between two blocks that share rows.
    let of = |n: usize, k: usize, across: bool, slices: &[(usize, usize)], scale: f32, bias: bool| Adapted {
        extents: (600, n, k),
        codes: None,
        across,
        slices: slices.to_vec(),
        rank: 16,
        scale,
        bias,
        batch_invariant: true,
    };
    let cases = [
        of(48, 1032, false, &[], 1.0, false),
        of(8, 40, false, &[], 1.0, true),
        of(64, 4096, false, &[], 1.0, false),
        of(64, 200, false, &[(0, 64)], 2.0, false),
        of(704, 328, false, &[(8, 120), (192, 512)], 1.5, false),
        of(8256, 264, false, &[(0, 4096), (4096, 64), (4160, 4096)], 1.0, true),
        of(40_000, 72, false, &[], 1.0, false),
        of(448, 200, true, &[(64, 192)], 0.75, true),
    ];
    for case in cases {
        let is_thin = case.slices.is_empty() && case.extents.1 <= 64;
        if architecture != "sm_90a" && !is_thin {
            // No other kernel is taken in its place.
            let refused = std::panic::catch_unwind(|| case.run(&options, &architecture).1);
            assert!(refused.is_err(), "{:?}", case.extents);
            continue;
        }
        let rows =
            |m: usize| Adapted { extents: (m, case.extents.1, case.extents.2), slices: case.slices.clone(), ..case };
        let (all, error, _) = rows(600).run(&options, &architecture);
        assert!(error < 4e-3, "{:?}: relative error {error:.1e}", case.extents);
        for m in [1, 7, 16, 64, 65, 128, 129, 256, 300] {
            let (bits, ..) = rows(m).run(&options, &architecture);
            assert!(bits == all[..bits.len()], "{:?}: other bits among {m} rows", case.extents);
        }
    }
}
