//! Runs every operation's examples on a backend and compares the results with the reference: the proof that a device
//! computes what the CPU computes. Also available to users: `surogate doctor --operations`.

use std::sync::Arc;
use std::time::{Duration, Instant};

use graph::OpId;
use ops::examples::{Instance, instantiate};
use ops::{Class, Example, Op};
use program::{Backend, Documents, Instruction, Machine, Program, Step, library};
use tensor::philox::philox4x32;
use tensor::{DType, HostTensor};

use crate::error::Result;

/// Relative error (‖found − expected‖ ÷ ‖expected‖) up to which f32 results agree: other orders of
/// summation and the device's exponentials, nothing else.
const F32_LIMIT: f64 = 2e-5;
/// The same for results stored in bf16: one rounding apart.
const BF16_LIMIT: f64 = 6e-3;
/// The same for results stored in f16.
const F16_LIMIT: f64 = 2e-3;
/// Limit for products of codes of eight and four bits, whose units keep fewer bits of a sum than f32 has until it is
/// promoted: 8e-5 with 64 terms on an H200.
const CODES_PRODUCT_LIMIT: f64 = 5e-4;
/// The same where the sum may be the fastest one: 5.4e-4 with 1040 terms, 2.6e-3 with 12,288.
const FAST_SUM_LIMIT: f64 = 5e-3;
/// Limit for results in bf16, and in f32 next to them, of kernels that round in between: up to 5.2e-3 on an H200.
const ROUNDED_BETWEEN_LIMIT: f64 = 1e-2;
/// By how much the f32 operands of a reference are disturbed, relatively, to find codes on the border between two: some
/// roundings of f32.
const DISTURBANCE: f64 = 1e-6;
/// Number of disturbances. A value on the border falls to either side in one of them but for one case in 2¹⁶.
const DISTURBANCES: u64 = 16;

/// Time between two reports of progress.
const REPORT_INTERVAL: Duration = Duration::from_secs(5);

/// One result of one example in one precision.
#[derive(Clone, Debug)]
pub struct Row {
    pub op: &'static str,
    pub example: usize,
    /// The element type that stands for the activation type.
    pub dtype: DType,
    pub result: usize,
    /// Relative error; of codes, the share of those that the reference does not give for operands a rounding away.
    pub error: f64,
    pub limit: f64,
}

impl Row {
    /// True if the error is within the limit; false for NaN.
    pub fn passed(&self) -> bool {
        self.error <= self.limit
    }
}

/// The selection of examples that are run; all of them by default.
#[derive(Clone, Debug, Default)]
pub struct Examples {
    /// Only those of which every instruction is a kernel of the operation's own, a copy or a fill: no library is called, so
    /// that a tool that cannot follow libraries comes to the end.
    pub own_kernels: bool,
    /// Only those of these operations, and where an attribute is given those that have it; of all operations if empty.
    pub calls: Vec<Call>,
    /// Only those of operations whose names begin with one of these, unless there is none.
    pub names: Vec<String>,
    /// None is begun after so much time: under a tool that slows a device down.
    pub time: Option<Duration>,
    /// Called at the beginning and then every few seconds, with the number of finished examples and of all.
    pub progress: Option<fn(done: usize, all: usize)>,
}

/// An operation, and the attribute that its calls have if one is given.
pub type Call = (OpId, Option<&'static str>);

/// The results of running examples.
#[derive(Clone, Debug)]
pub struct Checked {
    pub rows: Vec<Row>,
    /// Examples, in one precision each, for which there was no time.
    pub left_out: usize,
    /// Examples that need units or shared memory that the machine does not have.
    pub not_taken: usize,
}

/// Element types that stand for the activation type.
const DTYPES: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

/// Runs the examples in f32, bf16 and f16 on `backend`: each operation's first one, then each
/// operation's second one, and so on.
pub fn check(backend: &dyn Backend, machine: &Machine, seed: u64, which: &Examples) -> Result<Checked> {
    let begin = Instant::now();
    let is_asked_for = |name: &str| which.names.is_empty() || which.names.iter().any(|begin| name.starts_with(begin));
    let ops = ops::all().iter().filter(|op| !matches!(op.class(), Class::View | Class::Constant));
    let ops = ops.filter(|op| is_asked_for(op.name()));
    let is_called = |op: &dyn Op, example: &Example| {
        let mut calls = which.calls.iter().filter(|(id, _)| *id == op.id());
        which.calls.is_empty() || calls.any(|(_, with)| with.is_none_or(|name| example.attrs.get(name).is_some()))
    };
    let mut queue: Vec<_> = ops.flat_map(|op| op.examples().into_iter().enumerate().map(move |at| (*op, at))).collect();
    queue.retain(|(op, (_, example))| is_called(*op, example));
    queue.sort_by_key(|(_, (index, _))| *index);
    let mut checked = Checked { rows: Vec::new(), left_out: 0, not_taken: 0 };
    let (all, mut reported) = (queue.len(), None::<Instant>);
    for (done, (op, (index, example))) in queue.into_iter().enumerate() {
        if let Some(tell) = which.progress.filter(|_| reported.is_none_or(|at| at.elapsed() >= REPORT_INTERVAL)) {
            tell(done, all);
            reported = Some(Instant::now());
        }
        for dtype in &DTYPES {
            if which.time.is_some_and(|time| begin.elapsed() >= time) {
                checked.left_out += 1;
                continue;
            }
            let instance = instantiate(&example, op, *dtype, seed);
            let program = program(machine, op, &instance);
            let steps = &program.entries[0].steps;
            let calls_library = steps.iter().any(|step| step.instruction.may_call_library());
            if which.own_kernels && calls_library {
                continue;
            }
            if !is_taken(&program) {
                checked.not_taken += 1;
                continue;
            }
            let multiplies_codes = calls_library && multiplies_codes(steps);
            let found = run(backend, program, op, &instance)?;
            let expected = instance.expected();
            let fast = example.attrs.flag("fast_sum") == Ok(true);
            let limit_of_codes = if fast { FAST_SUM_LIMIT } else { CODES_PRODUCT_LIMIT };
            for (result, (found, of)) in found.iter().zip(&expected).enumerate() {
                let (error, limit) = match of.dtype.is_float() {
                    true if op.rounds_between() && *dtype == DType::BF16 => {
                        at_least(difference(found, of), ROUNDED_BETWEEN_LIMIT)
                    }
                    true if multiplies_codes => at_least(difference(found, of), limit_of_codes),
                    true => difference(found, of),
                    false => (codes_without_reason(found, of, result, &instance), 0.0),
                };
                checked.rows.push(Row { op: op.name(), example: index, dtype: *dtype, result, error, limit });
            }
        }
    }
    Ok(checked)
}

/// The division of an attention example's rows by its document_start. Other operations know no documents.
fn documents_of(op: &dyn Op, instance: &Instance) -> Documents {
    let packed = |t: &HostTensor| t.dtype == DType::I32 && t.bytes.iter().any(|b| *b != 0);
    match op.class() == Class::Attention && instance.inputs.iter().any(packed) {
        true => Documents::Packed,
        false => Documents::Rows,
    }
}

/// True if the machine has units for every product, and the shared memory that every kernel asks for.
fn is_taken(program: &Program) -> bool {
    let taken = |instruction: &Instruction| match instruction {
        Instruction::Gemm(gemm) if gemm.has_blocks() => {
            let bias = gemm.bias.as_ref().map(|at| at.dtype);
            library::multiplies_blocks(&program.machine.arch, bias, gemm.d.dtype)
        }
        Instruction::Gemm(gemm) if gemm.scales.is_some() => {
            library::multiplies_codes(&program.machine.arch, gemm.bias.as_ref().map(|at| at.dtype))
        }
        Instruction::Launch(launch) => {
            let limit = program.machine.arch.shared_per_block();
            launch.calls.iter().all(|call| call.shared_bytes as usize <= limit)
        }
        _ => true,
    };
    program.entries.iter().flat_map(|entry| &entry.steps).all(|step| taken(&step.instruction))
}

/// True if a step multiplies codes of eight or four bits.
fn multiplies_codes(steps: &[Step]) -> bool {
    let of = |step: &Step| match &step.instruction {
        Instruction::Gemm(gemm) => gemm.has_blocks() || [&gemm.a, &gemm.b].iter().any(|at| at.dtype.small().is_some()),
        _ => false,
    };
    steps.iter().any(of)
}

fn program(machine: &Machine, op: &'static dyn Op, instance: &Instance) -> Arc<Program> {
    let typed = |list: &[HostTensor]| list.iter().map(|t| (t.dtype, t.shape.clone())).collect::<Vec<_>>();
    let (inputs, outputs) = (typed(&instance.inputs), typed(&instance.outputs));
    let documents = documents_of(op, instance);
    Arc::new(compiler::compile_call(op, &instance.attrs, &inputs, &outputs, machine, documents))
}

fn run(
    backend: &dyn Backend,
    program: Arc<Program>,
    op: &'static dyn Op,
    instance: &Instance,
) -> Result<Vec<HostTensor>> {
    let mut session = backend.load(program.clone())?;
    let entry = &program.entries[0];
    for ((_, at), tensor) in entry.inputs.iter().zip(&instance.inputs) {
        session.write(at, &tensor.bytes)?;
    }
    for ((_, at), tensor) in entry.outputs.iter().zip(&instance.outputs) {
        session.write(at, &poisoned(op, instance, tensor).bytes)?;
    }
    session.run(0)?;
    let mut results = Vec::new();
    for (_, at) in &entry.outputs {
        let mut tensor = HostTensor::zeros(at.dtype, at.shape.clone());
        session.read(at, &mut tensor.bytes)?;
        results.push(tensor);
    }
    Ok(results)
}

/// The initial content of an output: its state if the operation reads it, otherwise NaN, so that an element that is not
/// written is found.
fn poisoned(op: &dyn Op, instance: &Instance, state: &HostTensor) -> HostTensor {
    let records = op.form(instance.inputs.len(), &instance.attrs).is_some_and(|form| form.records());
    let reads_state = records
        || op.class() == Class::Update
        || ["accumulate", "record"].iter().any(|name| instance.attrs.flag(name).unwrap_or(false));
    if reads_state || !state.dtype.is_float() {
        return state.clone();
    }
    HostTensor::from_f32(state.shape.clone(), &vec![f32::NAN; state.len()]).cast(state.dtype)
}

/// The share of whole numbers that differ from the reference and stay different from it when its f32 operands are
/// disturbed by some roundings: a value on the border between two codes may get either.
fn codes_without_reason(found: &HostTensor, expected: &HostTensor, result: usize, instance: &Instance) -> f64 {
    let found = found.to_f64();
    let differing = |of: &HostTensor| -> Vec<bool> { found.iter().zip(of.to_f64()).map(|(a, b)| *a != b).collect() };
    let mut wrong = differing(expected);
    for seed in 0..DISTURBANCES {
        if !wrong.contains(&true) {
            break;
        }
        let again = disturbed(instance, seed).expected();
        wrong.iter_mut().zip(differing(&again[result])).for_each(|(wrong, differs)| *wrong &= differs);
    }
    wrong.iter().filter(|wrong| **wrong).count() as f64 / wrong.len().max(1) as f64
}

/// The same call with f32 operands and states that are a little larger or smaller, each for itself.
fn disturbed(instance: &Instance, seed: u64) -> Instance {
    let change = |(number, tensor): (usize, &HostTensor)| {
        if tensor.dtype != DType::F32 {
            return tensor.clone();
        }
        let mut values = tensor.to_f64();
        for (index, four) in values.chunks_mut(4).enumerate() {
            let words = philox4x32([index as u32, number as u32, seed as u32, 0], [0; 2]);
            for (value, word) in four.iter_mut().zip(words) {
                *value *= 1.0 + DISTURBANCE * (f64::from(word) / f64::from(u32::MAX) * 2.0 - 1.0);
            }
        }
        HostTensor::from_f32(tensor.shape.clone(), &values.iter().map(|x| *x as f32).collect::<Vec<_>>())
    };
    Instance {
        op: instance.op,
        attrs: instance.attrs.clone(),
        inputs: instance.inputs.iter().enumerate().map(change).collect(),
        outputs: instance.outputs.iter().enumerate().map(|(n, t)| change((n + instance.inputs.len(), t))).collect(),
    }
}

fn at_least((error, limit): (f64, f64), least: f64) -> (f64, f64) {
    (error, limit.max(least))
}

fn difference(found: &HostTensor, expected: &HostTensor) -> (f64, f64) {
    let (a, b) = (found.to_f64(), expected.to_f64());
    // Where the reference itself gives infinity or NaN, the device must give the same.
    let same = |a: f64, b: f64| a == b || (a.is_nan() && b.is_nan());
    let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|v| v * v).sum::<f64>().sqrt();
    let deviation = |(a, b): (&f64, &f64)| if !b.is_finite() && same(*a, *b) { 0.0 } else { a - b };
    let size = norm(&mut b.iter().copied().filter(|b| b.is_finite()));
    // Zeros throughout are differences of equals, of which a device leaves the rounding: against what was drawn, whose
    // size is 1.
    let size = if size > 0.0 { size } else { (b.len() as f64).sqrt() };
    let error = norm(&mut a.iter().zip(&b).map(deviation)) / size;
    let limit = match expected.dtype {
        DType::F32 => F32_LIMIT,
        DType::F16 => F16_LIMIT,
        DType::BF16 | DType::F64 | DType::I64 | DType::I32 | DType::U8 => BF16_LIMIT,
        // Codes are equal, or the device rounds in another way.
        DType::E4M3 | DType::E5M2 => 0.0,
    };
    (error, limit)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A code off the border is wrong however near it is; one on the border may be either of two.
    #[test]
    fn codes_differ_only_where_the_reference_is_undecided() {
        let op = ops::get(ops::id::ADAMW_8BIT);
        let instance = instantiate(&op.examples()[0], op, DType::F32, 1);
        let expected = instance.expected();
        let codes = expected.iter().position(|tensor| tensor.dtype == DType::U8).unwrap();
        let unexplained = |found: &HostTensor, of: &Instance| {
            codes_without_reason(found, &of.expected()[codes], codes, of) * found.len() as f64
        };
        assert_eq!(unexplained(&expected[codes], &instance), 0.0);
        let mut off = expected[codes].clone();
        off.bytes[7] ^= 1;
        assert_eq!(unexplained(&off, &instance).round(), 1.0);
        // An operand between the two nearest ones that get different codes.
        let with = |scale: f64| {
            let mut instance = instance.clone();
            let mut gradient: Vec<f32> = instance.inputs[0].to_f64().iter().map(|x| *x as f32).collect();
            gradient[7] *= scale as f32;
            instance.inputs[0] = HostTensor::from_f32(instance.inputs[0].shape.clone(), &gradient);
            instance
        };
        let code = |scale: f64| with(scale).expected()[codes].bytes[7];
        let (mut low, mut high) = (0.5, 1.5);
        assert_ne!(code(low), code(high));
        while high - low > 1e-7 {
            let middle = (low + high) / 2.0;
            if code(middle) == code(low) { low = middle } else { high = middle }
        }
        assert_eq!(unexplained(&with(high).expected()[codes], &with(low)), 0.0);
    }

    #[test]
    fn the_cpu_backend_agrees_with_the_references() {
        let backend = cpu::CpuBackend::new(Some(2)).unwrap();
        let machine = Machine::cpu(1 << 30, 2);
        let checked = |which: Examples| check(&backend, &machine, 1, &which).unwrap();
        let Checked { rows, left_out: 0, not_taken: 0 } = checked(Examples::default()) else {
            panic!("there is time for all")
        };
        assert!(rows.len() > 60, "{} rows", rows.len());
        for row in &rows {
            assert!(row.passed(), "{row:?}");
        }
        let own = checked(Examples { own_kernels: true, ..Examples::default() }).rows;
        let products = |rows: &[Row]| rows.iter().filter(|row| row.op == "linear").count();
        assert!(own.len() > 60 && own.len() < rows.len(), "{} of {} rows call no library", own.len(), rows.len());
        assert_eq!((products(&rows) > 0, products(&own)), (true, 0), "a library may multiply");

        let named = checked(Examples { names: vec!["rmsnorm".into(), "attention".into()], ..Examples::default() }).rows;
        let asked_for = |row: &Row| row.op.starts_with("rmsnorm") || row.op.starts_with("attention");
        assert_eq!(named.len(), rows.iter().filter(|row| asked_for(row)).count());
        assert!(named.iter().any(|row| row.op == "attention_backward") && named[0].example == 0);
        let none = checked(Examples { time: Some(Duration::ZERO), ..Examples::default() });
        assert!(none.rows.is_empty() && none.left_out > 60, "{none:?}");
    }
}
