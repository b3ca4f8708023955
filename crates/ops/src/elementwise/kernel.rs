//! Expressions as CUDA text: one generated kernel for these operands, shapes and layouts. Each
//! thread takes one access of every operand, computes in f32, rounds on storing.
//!
//! Every function is written so that the device compiler may not contract it with a neighbour: a
//! fused kernel gives the bits of the kernels that it replaces.

use std::collections::BTreeSet;
use std::fmt::Write;

use program::{Arg, TensorRef};
use tensor::DType;

use super::expression::{Binary, Expr, Unary};
use crate::kernel::{KernelSpec, device_type, follows};
use crate::layout::Walk;

const THREADS: usize = 256;

const HEADERS: &[(&str, &str)] =
    &[("types.cuh", include_str!("../cuda/types.cuh")), ("pack.cuh", include_str!("../cuda/pack.cuh")), LOGISTIC];

/// The header of the functions that [`unary`] calls.
pub const LOGISTIC: (&str, &str) = ("logistic.cuh", include_str!("../cuda/logistic.cuh"));

/// The kernel that computes `expressions` of `inputs` into `outputs`.
pub fn kernel(expressions: &[Expr], inputs: &[TensorRef], outputs: &[TensorRef]) -> KernelSpec {
    let mut read = BTreeSet::new();
    expressions.iter().for_each(|e| collect_operands(e, &mut read));
    let operands: Vec<(usize, &TensorRef)> = read.iter().map(|i| (*i, &inputs[*i])).collect();
    let tensors: Vec<&TensorRef> = operands.iter().map(|(_, t)| *t).chain(outputs).collect();
    let walk = Walk::new(&tensors);
    let blocks = blocks(&walk);
    KernelSpec {
        entry: "elementwise",
        source: text(expressions, &operands, outputs, &walk),
        headers: HEADERS.iter().copied().chain(follows(blocks).then_some(device::DEPENDENT_LAUNCH)).collect(),
        defines: Vec::new(),
        grid: [blocks as u32, 1, 1],
        block: [THREADS as u32, 1, 1],
        shared_bytes: 0,
        args: read.into_iter().map(Arg::Input).chain((0..outputs.len()).map(Arg::Output)).collect(),
    }
}

fn blocks(walk: &Walk) -> usize {
    (walk.len() / walk.width).div_ceil(THREADS)
}

/// The operands that an expression reads.
pub fn collect_operands(expr: &Expr, into: &mut BTreeSet<usize>) {
    if let Expr::Input(index) = expr {
        into.insert(*index);
    }
    expr.parts().into_iter().for_each(|part| collect_operands(part, into));
}

fn text(expressions: &[Expr], operands: &[(usize, &TensorRef)], outputs: &[TensorRef], walk: &Walk) -> String {
    let mut lines = Lines(String::new());
    for (index, expression) in expressions.iter().enumerate() {
        lines.add(0, format!("// out{index} = {expression}"));
    }
    lines.add(0, "#include \"types.cuh\"");
    lines.add(0, "#include \"pack.cuh\"");
    lines.add(0, "#include \"logistic.cuh\"");
    if follows(blocks(walk)) {
        lines.add(0, "#include \"dependent_launch.cuh\"");
    }
    let inputs = operands.iter().map(|(i, t)| format!("const {}* in{i}", device_type(t.dtype)));
    let results = outputs.iter().enumerate().map(|(i, t)| format!("{}* out{i}", device_type(t.dtype)));
    let parameters: Vec<String> = inputs.chain(results).collect();
    lines.add(0, format!("extern \"C\" __global__ void __launch_bounds__({THREADS})"));
    lines.add(0, format!("elementwise({}) {{", parameters.join(", ")));
    if follows(blocks(walk)) {
        lines.add(1, "grid_dependency_synchronize();");
    }
    place(&mut lines, walk);
    for (position, (index, _)) in operands.iter().enumerate() {
        let at = offset(walk, position);
        lines.add(1, format!("const auto x{index} = read_pack<{}>(in{index} + {at});", walk.width));
    }
    for (index, output) in outputs.iter().enumerate() {
        lines.add(1, format!("Pack<{}, {}> y{index};", device_type(output.dtype), walk.width));
    }
    lines.add(0, "#pragma unroll");
    lines.add(1, format!("for (int lane = 0; lane < {}; lane++) {{", walk.width));
    let mut names = Vec::new();
    for (index, (expression, output)) in expressions.iter().zip(outputs).enumerate() {
        let value = define(expression, &mut names, &mut lines);
        lines.add(2, format!("y{index}.at[lane] = from_float<{}>({value});", device_type(output.dtype)));
    }
    lines.add(1, "}");
    for index in 0..outputs.len() {
        let at = offset(walk, operands.len() + index);
        lines.add(1, format!("write_pack<{}>(out{index} + {at}, y{index});", walk.width));
    }
    lines.add(0, "}");
    lines.0
}

/// The lines of a text under construction.
#[derive(Default)]
pub struct Lines(pub String);

impl Lines {
    pub fn add(&mut self, indent: usize, line: impl AsRef<str>) {
        writeln!(self.0, "{}{}", "  ".repeat(indent), line.as_ref()).expect("writing to a string succeeds");
    }
}

/// Declares `c0`, `c1`, …: the coordinates of the thread's first element.
fn place(lines: &mut Lines, walk: &Walk) {
    let wide = walk.len() > u32::MAX as usize / 2;
    let index = if wide { "u64" } else { "u32" };
    lines.add(1, format!("const {index} first = (({index})blockIdx.x * {THREADS} + threadIdx.x) * {};", walk.width));
    lines.add(1, format!("if (first >= {}ull) return;", walk.len()));
    let mut after = 1;
    for axis in (0..walk.shape.len()).rev() {
        let quotient = if after == 1 { "first".to_owned() } else { format!("first / {after}") };
        let value = if axis == 0 { quotient } else { format!("{quotient} % {}", walk.shape[axis]) };
        lines.add(1, format!("const u64 c{axis} = {value};"));
        after *= walk.shape[axis];
    }
}

fn offset(walk: &Walk, tensor: usize) -> String {
    let terms: Vec<String> = walk.strides[tensor]
        .iter()
        .enumerate()
        .map(|(axis, stride)| if *stride == 1 { format!("c{axis}") } else { format!("c{axis} * {stride}") })
        .collect();
    format!("({})", terms.join(" + "))
}

/// The name of the value of `expr`; equal subexpressions get one name.
fn define<'e>(expr: &'e Expr, names: &mut Vec<&'e Expr>, lines: &mut Lines) -> String {
    if let Some(index) = names.iter().position(|e| *e == expr) {
        return format!("v{index}");
    }
    let value = match expr {
        Expr::Input(index) => format!("to_float(x{index}.at[lane])"),
        Expr::Constant(value) => format!("{:e}f", *value as f32),
        Expr::Unary(function, x) => {
            let x = define(x, names, lines);
            unary(*function, &x)
        }
        Expr::Binary(function, a, b) => {
            let a = define(a, names, lines);
            let b = define(b, names, lines);
            binary(*function, &a, &b)
        }
        Expr::Mean(_) | Expr::Amax(_) | Expr::Power(..) | Expr::Count(..) => {
            unreachable!("an element-wise operation reduces nothing")
        }
    };
    lines.add(2, format!("const float v{} = {value};", names.len()));
    names.push(expr);
    format!("v{}", names.len() - 1)
}

/// A function of a value by its name.
pub fn unary(function: Unary, x: &str) -> String {
    match function {
        Unary::Negate => format!("-{x}"),
        Unary::Exp => format!("expf({x})"),
        Unary::Tanh => format!("tanhf({x})"),
        Unary::Erf => format!("erff({x})"),
        Unary::Relu => format!("{x} < 0.0f ? 0.0f : {x}"),
        Unary::Step => format!("{x} > 0.0f ? 1.0f : 0.0f"),
        Unary::Sigmoid => format!("sigmoid({x})"),
        Unary::Silu => format!("silu({x})"),
        Unary::Softplus => format!("__fadd_rn(fmaxf({x}, 0.0f), log1pf(expf(-fabsf({x}))))"),
        Unary::Log => format!("logf({x})"),
        Unary::ExpMinusOne => format!("expm1f({x})"),
        Unary::Rsqrt => format!("rsqrtf({x})"),
        Unary::Relaxed | Unary::Round(DType::F32) => x.to_owned(),
        Unary::Round(dtype) => format!("to_float(from_float<{}>({x}))", device_type(dtype)),
    }
}

/// A function of two values by their names, kept out of contraction.
pub fn binary(function: Binary, a: &str, b: &str) -> String {
    match function {
        Binary::Add => format!("__fadd_rn({a}, {b})"),
        Binary::Subtract => format!("__fsub_rn({a}, {b})"),
        Binary::Multiply => format!("__fmul_rn({a}, {b})"),
        Binary::Divide => format!("__fdiv_rn({a}, {b})"),
        Binary::Minimum => format!("({b} < {a} ? {b} : {a})"),
        Binary::Maximum => format!("({b} > {a} ? {b} : {a})"),
    }
}

#[cfg(test)]
mod tests {
    use program::ArenaId;

    use super::*;

    #[test]
    fn reads_once_and_only_what_is_used() {
        let x = TensorRef::dense(ArenaId(0), 0, DType::BF16, [4, 64]);
        let y = TensorRef { dtype: DType::F32, strides: vec![96, 1], ..x.clone() };
        let silu = || Expr::Input(2).silu();
        let kernel = kernel(&[silu() + silu().stored_as(DType::BF16)], &[x.clone(), x.clone(), x], &[y]);
        assert_eq!(kernel.args, [Arg::Input(2), Arg::Output(0)]);
        assert_eq!(kernel.grid, [1, 1, 1]);
        assert_eq!(kernel.source.matches("= silu(").count(), 1, "{}", kernel.source);
        assert!(kernel.source.contains("read_pack<8>(in2 + (c0 * 64 + c1))"), "{}", kernel.source);
        assert!(kernel.source.contains("write_pack<8>(out0 + (c0 * 96 + c1), y0)"), "{}", kernel.source);
    }
}
