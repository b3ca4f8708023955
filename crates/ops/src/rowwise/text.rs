//! A form as CUDA text. Values are computed in phases, which the means over a row part: operands of a mean come before
//! it, readers after it. A phase is one loop over the packs that a thread holds of the row. Tensors stay in registers
//! in the types of their storage; what a later phase reads of an earlier one and was rounded is kept so, everything
//! else is recomputed from that.
//!
//! No function may be contracted with a neighbour by the device compiler, but where the form is `relaxed`: there it is
//! written contracted. So the bits of a value do not depend on what it was composed with.

use std::collections::BTreeSet;

use program::{ArenaId, TensorRef};
use tensor::DType;

use super::form::{Extent, Form};
use super::kernel::Deal;
use crate::elementwise::{Binary, Counted, Expr, Lines, Unary, collect_operands, device_binary, device_unary};
use crate::kernel::{LowerCall, device_type, row_offset};
use crate::quantise::PARTS;

/// The text, and the operands that it reads in the order of the parameters: then come the results, then the parts of
/// sums over rows, then those of magnitudes.
pub fn text(form: &Form, call: &LowerCall<'_>, deal: &Deal) -> (String, Vec<usize>) {
    let mut read = BTreeSet::new();
    form.results.iter().for_each(|(_, e)| collect_operands(e, &mut read));
    let read: Vec<usize> = read.into_iter().collect();
    (kernel(form, call, deal, &read, &[]), read)
}

/// The text that finds the magnitudes for the powers of a form, and the operands that it reads.
pub fn text_of_magnitudes(form: &Form, amaxes: &Form, call: &LowerCall<'_>, deal: &Deal) -> (String, Vec<usize>) {
    let mut read = BTreeSet::new();
    form.powers().into_iter().for_each(|power| collect_operands(power, &mut read));
    let read: Vec<usize> = read.into_iter().collect();
    let known: Vec<String> = form.powers().iter().map(|power| format!("q{} != 0.0f", factor_of(power))).collect();
    let place = TensorRef::dense(ArenaId(0), 0, DType::F32, [1]);
    let outputs = vec![place; amaxes.results.len()];
    (kernel(amaxes, &LowerCall { outputs: &outputs, ..*call }, deal, &read, &known), read)
}

/// The operand that is a power's factor.
fn factor_of(power: &Expr) -> usize {
    match power {
        Expr::Power(known, ..) => match **known {
            Expr::Input(operand) => operand,
            _ => unreachable!("the form was checked"),
        },
        _ => unreachable!("only powers are collected"),
    }
}

/// One kernel; it ends at once where all of `known` hold.
fn kernel(form: &Form, call: &LowerCall<'_>, deal: &Deal, read: &[usize], known: &[String]) -> String {
    let mut writer = Writer::new(form, call, deal, read);
    let body: Vec<(Lines, Lines)> = (0..=writer.last).map(|phase| writer.phase(phase)).collect();
    let mut lines = Lines::default();
    for (index, (_, expr)) in form.results.iter().enumerate() {
        lines.add(0, format!("// out{index} = {expr}"));
    }
    lines.add(0, "#include \"rows.cuh\"");
    if form.spans_tensor() {
        lines.add(0, "#include \"codes.cuh\"");
    }
    if deal.follows() {
        lines.add(0, "#include \"dependent_launch.cuh\"");
    }
    lines.add(0, format!("extern \"C\" __global__ void __launch_bounds__({})", deal.bounds()));
    lines.add(0, format!("rowwise({}) {{", writer.parameters().join(", ")));
    if deal.follows() {
        lines.add(1, "grid_dependency_synchronize();");
    }
    writer.begin_tensor(&mut lines, known);
    for (place, _) in writer.sums().enumerate() {
        lines.add(1, format!("float t{place}[ITEMS][WIDTH] = {{}};"));
    }
    let rows = if deal.slices > 1 { "ROWS * SLICES" } else { "ROWS" };
    let line = if deal.slices > 1 { "line" } else { "row" };
    // All threads of a block come to the end where it has something to leave.
    let closes = deal.walks || !writer.amaxes.is_empty() || !writer.counts.is_empty();
    if deal.walks {
        let step = "gridDim.x * (THREADS / LANES)";
        lines.add(1, format!("for (u32 {line} = ROW; {line} < {rows}; {line} += {step}) {{"));
    } else {
        lines.add(1, format!("const u32 {line} = ROW;"));
        lines
            .add(1, if closes { format!("if ({line} < {rows}) {{") } else { format!("if ({line} >= {rows}) return;") });
    }
    if deal.slices > 1 {
        lines.add(1, "const u32 row = line / SLICES;");
        lines.add(1, "const int first_pack = line % SLICES * (ITEMS * LANES);");
    }
    writer.begin(&mut lines);
    if deal.walks && !deal.finds {
        writer.prefetch(&mut lines);
    }
    for (single, of_packs) in body {
        lines.0.push_str(&single.0);
        lines.0.push_str(&of_packs.0);
    }
    if closes {
        lines.add(1, "}");
    }
    let count = writer.sums().count();
    (0..count).for_each(|place| leave_sum(&mut lines, place));
    writer.leave_magnitudes(&mut lines);
    writer.leave_counts(&mut lines);
    lines.add(0, "}");
    lines.0
}

/// Writes a block's part of a sum over rows: the warps of a block one after the other where each has rows of its own.
fn leave_sum(lines: &mut Lines, place: usize) {
    let text = "\
#if LANES == 32
  {
    __shared__ float total[COLUMNS];
    for (int warp = 0; warp < THREADS / 32; warp++) {
      if (threadIdx.x / 32 == warp)
        FOR_PACKS(n, p)
#pragma unroll
          for (int j = 0; j < WIDTH; j++) {
            float* at = total + p * WIDTH + j;
            *at = warp ? *at + SUMS[n][j] : SUMS[n][j];
          }
      __syncthreads();
    }
    for (int i = threadIdx.x; i < COLUMNS; i += THREADS) PARTIAL[i] = total[i];
  }
#else
  FOR_PACKS(n, p)
#pragma unroll
    for (int j = 0; j < WIDTH; j++) PARTIAL[p * WIDTH + j] = SUMS[n][j];
#endif
";
    let first = if place == 0 { String::new() } else { format!(" + (size_t){place} * gridDim.x * COLUMNS") };
    let partial = format!("(partial + (size_t)blockIdx.x * COLUMNS{first})");
    lines.0.push_str(&text.replace("SUMS", &format!("t{place}")).replace("PARTIAL", &partial));
}

/// The phase in which a value can be computed: one after the last mean in it. Powers are known before the first.
fn phase_of(expr: &Expr) -> usize {
    if matches!(expr, Expr::Power(..)) {
        return 0;
    }
    let parts = expr.parts().into_iter().map(phase_of).max().unwrap_or(0);
    parts + usize::from(matches!(expr, Expr::Mean(_)))
}

/// All means in an expression, each with the phase that sums it.
fn collect_means<'a>(expr: &'a Expr, into: &mut Vec<(&'a Expr, usize)>) {
    if matches!(expr, Expr::Power(..)) {
        return;
    }
    expr.parts().into_iter().for_each(|part| collect_means(part, into));
    if let Expr::Mean(x) = expr
        && !into.iter().any(|(known, _)| *known == expr)
    {
        into.push((expr, phase_of(x)));
    }
}

/// Visits the rounded values in an expression outside of means; goes no further where `visit` returns true.
fn rounded<'a>(expr: &'a Expr, visit: &mut dyn FnMut(DType, &'a Expr) -> bool) {
    match expr {
        Expr::Mean(_) | Expr::Power(..) => {}
        Expr::Unary(Unary::Round(dtype), x) if visit(*dtype, x) => {}
        _ => expr.parts().into_iter().for_each(|part| rounded(part, visit)),
    }
}

/// The factors of a product, from left to right.
fn collect_factors<'a>(expr: &'a Expr, into: &mut Vec<&'a Expr>) {
    match expr {
        Expr::Binary(Binary::Multiply, a, b) => {
            collect_factors(a, into);
            collect_factors(b, into);
        }
        _ => into.push(expr),
    }
}

/// A value that has a name in the text, and whether it was computed as relaxed.
type Named<'a> = (&'a Expr, bool, String);

/// Returns the results of a form that are magnitudes, with the values that each is taken of.
fn magnitudes(form: &Form) -> Vec<(usize, &[Expr])> {
    let mut found = Vec::new();
    for (index, (extent, expr)) in form.results.iter().enumerate() {
        if let (Extent::Tensor, Expr::Amax(all)) = (extent, expr) {
            found.push((index, &all[..]));
        }
    }
    found
}

/// The elements and values that are counted, with a power whose factor is not known.
struct Count<'a> {
    result: usize,
    which: Counted,
    power: &'a Expr,
    all: &'a [Expr],
}

/// The results of a form that are numbers of elements.
fn counts(form: &Form) -> Vec<Count<'_>> {
    let mut found = Vec::new();
    for (result, (_, expr)) in form.results.iter().enumerate() {
        if let Expr::Count(which, power, all) = expr {
            found.push(Count { result, which: *which, power, all });
        }
    }
    found
}

/// The type of an element that is written or kept.
fn stored_type(dtype: DType) -> &'static str {
    match dtype {
        DType::E4M3 => "e4m3",
        DType::E5M2 => "e5m2",
        _ => device_type(dtype),
    }
}

/// The state of a writer of the phases' text.
struct Writer<'a> {
    form: &'a Form,
    call: &'a LowerCall<'a>,
    deal: &'a Deal,
    read: &'a [usize],
    /// The present phase, and the last one.
    phase: usize,
    last: usize,
    /// All means, each with the phase that sums it.
    means: Vec<(&'a Expr, usize)>,
    /// Values that are kept in packs of their storage type: results, and what a later phase reads.
    kept: Vec<(DType, &'a Expr, usize)>,
    /// Powers of two that tensors are scaled with.
    powers: Vec<&'a Expr>,
    /// Results that are magnitudes of the tensor, by the values that they are of.
    amaxes: Vec<(usize, &'a [Expr])>,
    /// Results that are numbers of elements.
    counts: Vec<Count<'a>>,
    /// Operands that are read before the first phase.
    early: BTreeSet<usize>,
    /// Values with one number for the row: known to all later phases.
    single: Vec<Named<'a>>,
    /// Values of the present phase.
    names: Vec<Named<'a>>,
    /// Kept values that the present phase has written.
    written: Vec<usize>,
    count: usize,
    before: Lines,
    inside: Lines,
}

impl<'a> Writer<'a> {
    fn new(form: &'a Form, call: &'a LowerCall<'a>, deal: &'a Deal, read: &'a [usize]) -> Writer<'a> {
        let mut means = Vec::new();
        form.results.iter().for_each(|(_, e)| collect_means(e, &mut means));
        let last = form.results.iter().map(|(_, e)| phase_of(e)).max().unwrap_or(0);
        let mut writer = Writer {
            form,
            call,
            deal,
            read,
            phase: 0,
            last,
            means,
            kept: Vec::new(),
            powers: form.powers(),
            amaxes: magnitudes(form),
            counts: counts(form),
            early: BTreeSet::new(),
            single: Vec::new(),
            names: Vec::new(),
            written: Vec::new(),
            count: 0,
            before: Lines::default(),
            inside: Lines::default(),
        };
        for ((extent, expr), output) in form.results.iter().zip(call.outputs) {
            if *extent == Extent::Element {
                writer.keep(output.dtype, expr);
            }
        }
        writer.find_kept();
        writer.find_early();
        writer
    }

    /// Expressions that a phase computes for every element.
    fn computed(&self) -> Vec<(&'a Expr, usize)> {
        let form: &'a Form = self.form;
        let rows = |extent: &Extent| matches!(extent, Extent::Element | Extent::Column);
        let results = form.results.iter().filter(|(extent, _)| rows(extent)).map(|(_, e)| (e, phase_of(e)));
        let of_counts = self.counts.iter().flat_map(|count| count.all);
        let measured = self.amaxes.iter().flat_map(|(_, all)| all.iter()).chain(of_counts).map(|e| (e, phase_of(e)));
        let inner = |mean: &'a Expr| match mean {
            Expr::Mean(x) => &**x,
            _ => unreachable!("only means are collected"),
        };
        let means = self.means.iter().map(|(mean, phase)| (inner(mean), *phase));
        results.chain(measured).chain(means).chain(self.kept.iter().map(|(_, e, phase)| (*e, *phase))).collect()
    }

    fn keep(&mut self, dtype: DType, expr: &'a Expr) {
        if !self.kept.iter().any(|(d, e, _)| (*d, *e) == (dtype, expr)) {
            self.kept.push((dtype, expr, phase_of(expr)));
        }
    }

    /// Finds the values that are rounded in an earlier phase than they are read in.
    fn find_kept(&mut self) {
        let mut known = usize::MAX;
        while known != self.kept.len() {
            known = self.kept.len();
            for (expr, phase) in self.computed() {
                let mut found = Vec::new();
                rounded(expr, &mut |dtype, inner: &'a Expr| {
                    let earlier = phase_of(inner) < phase && !self.form.is_uniform(inner);
                    if earlier {
                        found.push((dtype, inner));
                    }
                    earlier
                });
                found.into_iter().for_each(|(dtype, inner)| self.keep(dtype, inner));
            }
        }
    }

    /// Rows are requested before the first of them is used; but what only the first phase of several reads, or one
    /// weight with one tensor, is read where it is used. Where sums are kept in registers, weights are read each time.
    fn find_early(&mut self) {
        let tensors = self.read.iter().filter(|i| self.form.operands[**i] == Extent::Element).count();
        for index in self.read.iter().copied() {
            let phases: BTreeSet<usize> = self.phases_that_read(index);
            let several = phases.len() > 1 || self.last == 0 || !phases.contains(&0);
            let early = match self.form.operands[index] {
                Extent::Element => several,
                Extent::Column => !self.deal.walks && (tensors > 1 || phases.len() > 1),
                Extent::Row | Extent::Tensor => false,
            };
            if early {
                self.early.insert(index);
            }
        }
    }

    fn phases_that_read(&self, index: usize) -> BTreeSet<usize> {
        let reads = |expr: &Expr, phase: usize| self.reads_in(expr, index, phase);
        self.computed().into_iter().filter(|(e, phase)| reads(e, *phase)).map(|(_, phase)| phase).collect()
    }

    /// True if a phase needs an operand for an expression, and not only what is kept.
    fn reads_in(&self, expr: &Expr, index: usize, phase: usize) -> bool {
        match expr {
            Expr::Input(i) => *i == index,
            Expr::Mean(_) | Expr::Power(..) => false,
            Expr::Unary(Unary::Round(dtype), x)
                if self.kept.iter().any(|(d, e, p)| (*d, *e) == (*dtype, x) && *p < phase) =>
            {
                false
            }
            _ => expr.parts().into_iter().any(|part| self.reads_in(part, index, phase)),
        }
    }

    fn sums(&self) -> impl Iterator<Item = &'a Expr> + use<'a> {
        let form: &'a Form = self.form;
        form.results.iter().filter(|(extent, _)| *extent == Extent::Column).map(|(_, e)| e)
    }

    fn parameters(&self) -> Vec<String> {
        // Nothing that grid_dependency_synchronize() waits for may be read ahead of it.
        let constant = if self.deal.follows() { "" } else { "__restrict__ " };
        let input = |i: &usize| format!("const {}* {constant}in{i}", device_type(self.call.inputs[*i].dtype));
        let outputs = self.form.results.iter().zip(self.call.outputs).enumerate();
        let outputs = outputs.filter(|(_, ((extent, _), _))| *extent != Extent::Column && !self.deal.finds);
        let output = |(i, (_, t)): (usize, (_, &TensorRef))| format!("{}* __restrict__ out{i}", stored_type(t.dtype));
        let partial = self.form.sums_rows().then(|| "float* __restrict__ partial".to_owned());
        let parts = match self.deal.finds {
            true => Some("u32* __restrict__ parts".to_owned()),
            false => (!self.powers.is_empty()).then(|| format!("const u32* {constant}parts")),
        };
        self.read.iter().map(input).chain(outputs.map(output)).chain(partial).chain(parts).collect()
    }

    /// Writes what is known before the rows are.
    fn begin_tensor(&self, lines: &mut Lines, known: &[String]) {
        for i in self.read.iter().filter(|i| self.form.operands[**i] == Extent::Tensor) {
            lines.add(1, format!("const float q{i} = to_float(*in{i});"));
        }
        if !known.is_empty() {
            lines.add(1, format!("if ({}) return;", known.join(" && ")));
        }
        for (index, power) in self.powers.iter().enumerate() {
            let Expr::Power(_, _, top) = power else { unreachable!("only powers are collected") };
            let (factor, first) = (factor_of(power), index * PARTS);
            lines.add(1, format!("const float w{index} = tensor_power(q{factor}, parts + {first}, {top});"));
        }
        for (place, _) in self.amaxes.iter().enumerate() {
            lines.add(1, format!("float m{place} = 0.0f;"));
        }
        for place in 0..self.counts.len() {
            lines.add(1, format!("u32 c{place} = 0;"));
        }
    }

    /// Adds what a block has counted.
    fn leave_counts(&self, lines: &mut Lines) {
        for (place, count) in self.counts.iter().enumerate() {
            let (factor, result) = (factor_of(count.power), count.result);
            lines.add(1, format!("if (q{factor} == 0.0f) tally<THREADS>(out{result}, c{place});"));
        }
    }

    /// The loops that count elements: of their own, because only the first steps run them.
    fn counting(&mut self, phase: usize) -> Lines {
        let mut lines = Lines::default();
        for place in 0..self.counts.len() {
            let Count { which, power, all, .. } = self.counts[place];
            (self.names, self.inside) = (Vec::new(), Lines::default());
            for expr in all.iter().filter(|e| phase_of(e) == phase) {
                let (value, power) = (self.value(expr, false), self.value(power, false));
                let holds = match which {
                    Counted::Nonzero => format!("{value} != 0.0f"),
                    Counted::Flushed => format!("is_flushed({value}, {power})"),
                };
                self.inside.add(3, format!("c{place} += {holds};"));
            }
            if !self.inside.0.is_empty() {
                lines.add(1, format!("if (q{} == 0.0f) {{", factor_of(power)));
                self.loop_over_packs(phase, &mut lines);
                lines.add(1, "}");
                lines.add(1, "}");
            }
        }
        lines
    }

    /// The largest magnitudes that a block has seen.
    fn leave_magnitudes(&self, lines: &mut Lines) {
        for (place, (result, _)) in self.amaxes.iter().enumerate() {
            if self.deal.finds {
                lines.add(1, format!("const u32 b{place} = block_max_bits<THREADS>(__float_as_uint(m{place}));"));
                let at = place * PARTS;
                lines.add(1, format!("if (threadIdx.x == 0) parts[{at} + blockIdx.x] = b{place};"));
            } else {
                lines.add(1, format!("raise<THREADS>(out{result}, __float_as_uint(m{place}));"));
            }
        }
    }

    /// Places and registers of a row, and what is read of it before the first phase.
    fn begin(&self, lines: &mut Lines) {
        for i in self.read.iter().copied() {
            let tensor = &self.call.inputs[i];
            match self.form.operands[i] {
                Extent::Element => lines.add(1, format!("const auto* const p{i} = in{i} + {};", row_offset(tensor))),
                Extent::Column => lines.add(1, format!("const auto* const p{i} = in{i};")),
                Extent::Row | Extent::Tensor => {}
            }
            if self.early.contains(&i) {
                lines.add(1, format!("Pack<{}, WIDTH> x{i}[ITEMS];", device_type(tensor.dtype)));
            }
        }
        for (id, (dtype, _, _)) in self.kept.iter().enumerate() {
            lines.add(1, format!("Pack<{}, WIDTH> k{id}[ITEMS];", stored_type(*dtype)));
        }
        for i in self.read.iter().filter(|i| self.form.operands[**i] == Extent::Row) {
            lines.add(1, format!("const float q{i} = to_float(in{i}[row]);"));
        }
        if !self.early.is_empty() {
            lines.add(1, "FOR_PACKS(n, p) {");
            for i in &self.early {
                lines.add(2, format!("x{i}[n] = read_pack<WIDTH>(p{i} + p * WIDTH);"));
            }
            lines.add(1, "}");
        }
    }

    /// Requests the rows that come after these: a block that walks would wait for them while it computes nothing.
    fn prefetch(&self, lines: &mut Lines) {
        lines.add(1, "if (const u32 next = row + gridDim.x * (THREADS / LANES); next < ROWS) {");
        lines.add(2, "FOR_PACKS(n, p) {");
        for i in self.early.iter().filter(|i| self.form.operands[**i] == Extent::Element) {
            let at = row_offset(&self.call.inputs[*i]).replace("(row)", "(next)");
            lines.add(3, format!("prefetch_l2(in{i} + {at} + p * WIDTH);"));
        }
        lines.add(2, "}");
        lines.add(1, "}");
    }

    /// Returns the text before a phase's loop, and the loop.
    fn phase(&mut self, phase: usize) -> (Lines, Lines) {
        (self.phase, self.names, self.written) = (phase, Vec::new(), Vec::new());
        (self.before, self.inside) = (Lines::default(), Lines::default());
        let form: &'a Form = self.form;
        for (index, (extent, expr)) in form.results.iter().enumerate() {
            if *extent == Extent::Row && phase_of(expr) == phase {
                let value = self.value(expr, false);
                let stored = device_type(self.call.outputs[index].dtype);
                self.before.add(1, format!("if (LANE == 0) out{index}[row] = from_float<{stored}>({value});"));
            }
        }
        for id in 0..self.kept.len() {
            if self.kept[id].2 == phase {
                self.store(id);
            }
        }
        self.of_tensor(phase);
        let sums: Vec<&'a Expr> = self.sums().collect();
        for (place, expr) in sums.into_iter().enumerate().filter(|(_, e)| phase_of(e) == phase) {
            self.add_up(expr, &format!("t{place}[n][j]"));
        }
        let means: Vec<(usize, &'a Expr)> =
            self.means.iter().enumerate().filter(|(_, (_, p))| *p == phase).map(|(i, (mean, _))| (i, *mean)).collect();
        for (id, mean) in &means {
            let Expr::Mean(x) = mean else { unreachable!("only means are collected") };
            self.add_up(x, &format!("s{id}"));
        }
        for (id, _) in &means {
            self.before.add(1, format!("float s{id} = 0.0f;"));
        }
        let mut after = self.of_packs(phase);
        after.0.push_str(&self.counting(phase).0);
        for (id, _) in &means {
            after.add(1, format!("const float r{id} = row_sum(s{id});"));
        }
        (std::mem::take(&mut self.before), after)
    }

    /// Writes the values that the tensor has one of: scales are written by one thread, magnitudes are collected.
    fn of_tensor(&mut self, phase: usize) {
        let form: &'a Form = self.form;
        let first = if self.deal.slices > 1 { "line == 0 && LANE == 0" } else { "row == 0 && LANE == 0" };
        let single =
            |(extent, e): &(Extent, Expr)| *extent == Extent::Tensor && !matches!(e, Expr::Amax(_) | Expr::Count(..));
        for (index, (_, expr)) in form.results.iter().enumerate().filter(|(_, r)| phase == 0 && single(r)) {
            let value = self.value(expr, false);
            self.before.add(1, format!("if ({first}) *out{index} = {value};"));
        }
        for (place, (_, all)) in self.amaxes.clone().into_iter().enumerate() {
            for expr in all.iter().filter(|e| phase_of(e) == phase) {
                let value = self.value(expr, false);
                self.inside.add(3, format!("m{place} = larger(m{place}, {value});"));
            }
        }
    }

    /// The loop around what was collected.
    fn of_packs(&mut self, phase: usize) -> Lines {
        let mut lines = Lines::default();
        if self.inside.0.is_empty() {
            return lines;
        }
        self.loop_over_packs(phase, &mut lines);
        for (index, ((extent, expr), output)) in self.form.results.iter().zip(self.call.outputs).enumerate() {
            if *extent == Extent::Element && phase_of(expr) == phase {
                let id = self.kept_place(output.dtype, expr).expect("results are kept");
                if output.dtype.small().is_some() {
                    lines.add(2, format!("in_codes(k{id}[n].at, f{id});"));
                }
                lines.add(2, format!("write_pack(out{index} + {} + p * WIDTH, k{id}[n]);", row_offset(output)));
            }
        }
        lines.add(1, "}");
        lines
    }

    /// A loop over packs around what was collected, without its end.
    fn loop_over_packs(&self, phase: usize, lines: &mut Lines) {
        lines.add(1, "FOR_PACKS(n, p) {");
        let of_packs = |i: &usize| matches!(self.form.operands[*i], Extent::Element | Extent::Column);
        for i in self.read.iter().copied().filter(of_packs) {
            if !self.early.contains(&i) && self.phases_that_read(i).contains(&phase) {
                lines.add(2, format!("const auto x{i} = read_pack<WIDTH>(p{i} + p * WIDTH);"));
            }
        }
        for id in (0..self.kept.len()).filter(|id| self.inside.0.contains(&format!("f{id}[j] ="))) {
            lines.add(2, format!("float f{id}[WIDTH];"));
        }
        lines.add(0, "#pragma unroll");
        lines.add(2, "for (int j = 0; j < WIDTH; j++) {");
        lines.0.push_str(&self.inside.0);
        lines.add(2, "}");
    }

    fn kept_place(&self, dtype: DType, expr: &Expr) -> Option<usize> {
        self.kept.iter().position(|(d, e, _)| (*d, *e) == (dtype, expr))
    }

    /// Writes a kept value into its pack, once.
    fn store(&mut self, id: usize) {
        if self.written.contains(&id) {
            return;
        }
        self.written.push(id);
        let (dtype, expr, _) = self.kept[id];
        let value = self.value(expr, false);
        // Two numbers become codes at once, after the loop.
        let line = match dtype.small() {
            Some(_) => format!("f{id}[j] = {value};"),
            None => format!("k{id}[n].at[j] = from_float<{}>({value});", stored_type(dtype)),
        };
        self.inside.add(3, line);
    }

    /// Adds a value to a sum; a product in one step.
    fn add_up(&mut self, expr: &'a Expr, sum: &str) {
        let line = match expr {
            Expr::Binary(Binary::Multiply, a, b) => {
                let (a, b) = (self.value(a, false), self.value(b, false));
                format!("{sum} = fmaf({a}, {b}, {sum});")
            }
            _ => format!("{sum} = __fadd_rn({sum}, {});", self.value(expr, false)),
        };
        self.inside.add(3, line);
    }

    /// The name of a value; equal values get one name.
    fn value(&mut self, expr: &'a Expr, relaxed: bool) -> String {
        match expr {
            Expr::Unary(Unary::Relaxed, x) => return self.value(x, true),
            Expr::Unary(Unary::Round(dtype), x) if !self.form.is_uniform(x) => {
                if let Some(id) = self.kept_place(*dtype, x) {
                    // Kept ones of this phase are written before they are read; those of earlier phases are there.
                    if self.kept[id].2 == self.phase {
                        self.store(id);
                    }
                    return format!("to_float(k{id}[n].at[j])");
                }
            }
            Expr::Input(i) => {
                return match self.form.operands[*i] {
                    Extent::Row | Extent::Tensor => format!("q{i}"),
                    _ if self.early.contains(i) => format!("to_float(x{i}[n].at[j])"),
                    _ => format!("to_float(x{i}.at[j])"),
                };
            }
            Expr::Constant(value) => return format!("{:e}f", *value as f32),
            Expr::Power(..) => {
                let known = self.powers.iter().position(|power| *power == expr);
                return format!("w{}", known.expect("all powers were collected"));
            }
            _ => {}
        }
        // Relaxing makes a difference to sums and products only, and to the sign of one.
        let relaxed = relaxed && matches!(expr, Expr::Binary(..) | Expr::Unary(Unary::Negate, _));
        let known = self.single.iter().chain(&self.names).find(|(e, r, _)| *e == expr && *r == relaxed);
        if let Some((_, _, name)) = known {
            return name.clone();
        }
        let text = self.computation(expr, relaxed);
        self.define(expr, relaxed, text)
    }

    fn define(&mut self, expr: &'a Expr, relaxed: bool, text: String) -> String {
        let name = format!("v{}", self.count);
        self.count += 1;
        let line = format!("const float {name} = {text};");
        if self.form.is_uniform(expr) {
            self.before.add(1, line);
            self.single.push((expr, relaxed, name.clone()));
        } else {
            self.inside.add(3, line);
            self.names.push((expr, relaxed, name.clone()));
        }
        name
    }

    fn computation(&mut self, expr: &'a Expr, relaxed: bool) -> String {
        match expr {
            Expr::Mean(_) => format!("__fmul_rn({}, 1.0f / COLUMNS)", self.row_sum(expr)),
            Expr::Unary(function, x) => {
                // Relaxing stops at the value that it stands around, but for a sign.
                let x = self.value(x, relaxed && *function == Unary::Negate);
                device_unary(*function, &x)
            }
            Expr::Binary(Binary::Multiply, ..) if relaxed => {
                let (a, b) = self.product(expr).expect("a product has factors");
                format!("__fmul_rn({a}, {b})")
            }
            Expr::Binary(function @ (Binary::Add | Binary::Subtract), a, b) if relaxed => {
                self.contracted(*function == Binary::Subtract, a, b)
            }
            Expr::Binary(function, a, b) => {
                let (a, b) = (self.value(a, relaxed), self.value(b, relaxed));
                device_binary(*function, &a, &b)
            }
            Expr::Input(_) | Expr::Constant(_) | Expr::Power(..) => unreachable!("they have names of their own"),
            Expr::Amax(_) | Expr::Count(..) => unreachable!("they are results, or a magnitude in a power"),
        }
    }

    /// a + b or a − b, one of them a product where one is.
    fn contracted(&mut self, subtract: bool, a: &'a Expr, b: &'a Expr) -> String {
        // A mean that elements are compared with has one value, the one that may be stored.
        let of_row = self.form.is_uniform(a) && self.form.is_uniform(b);
        let product = |expr: &Expr| of_row || !matches!(expr, Expr::Mean(_));
        if product(b)
            && let Some((p, q)) = self.product(b)
        {
            let a = self.value(a, true);
            return format!("fmaf({}{p}, {q}, {a})", if subtract { "-" } else { "" });
        }
        if product(a)
            && let Some((p, q)) = self.product(a)
        {
            let b = self.value(b, true);
            return format!("fmaf({p}, {q}, {}{b})", if subtract { "-" } else { "" });
        }
        let (a, b) = (self.value(a, true), self.value(b, true));
        device_binary(if subtract { Binary::Subtract } else { Binary::Add }, &a, &b)
    }

    fn row_sum(&self, mean: &Expr) -> String {
        let id = self.means.iter().position(|(e, _)| *e == mean).expect("all means were collected");
        format!("r{id}")
    }

    /// A product as two factors; a mean is one, too. Factors that are the same for the whole row, if there are several, are multiplied
    /// with one another first.
    fn product(&mut self, expr: &'a Expr) -> Option<(String, String)> {
        if matches!(expr, Expr::Mean(_)) {
            return Some((self.row_sum(expr), "1.0f / COLUMNS".to_owned()));
        }
        let mut factors = Vec::new();
        collect_factors(expr, &mut factors);
        if factors.len() < 2 {
            return None;
        }
        let uniform: Vec<&'a Expr> = factors.iter().copied().filter(|e| self.form.is_uniform(e)).collect();
        if uniform.len() < 2 || uniform.len() == factors.len() {
            let values: Vec<String> = factors.iter().map(|e| self.value(e, true)).collect();
            return Some(self.multiplied(values, uniform.len() == factors.len()));
        }
        let of_row: Vec<String> = uniform.iter().map(|e| self.value(e, true)).collect();
        let (a, b) = self.multiplied(of_row, true);
        let of_row = self.plain(format!("__fmul_rn({a}, {b})"), true);
        let others = factors.iter().copied().filter(|e| !uniform.contains(e)).collect::<Vec<_>>();
        let values: Vec<String> = others.into_iter().map(|e| self.value(e, true)).chain([of_row]).collect();
        Some(self.multiplied(values, false))
    }

    /// Returns the product of all but the last, multiplied from the left, and the last.
    fn multiplied(&mut self, mut values: Vec<String>, single: bool) -> (String, String) {
        let last = values.pop().expect("a product has factors");
        let first = values.into_iter().reduce(|a, b| self.plain(format!("__fmul_rn({a}, {b})"), single));
        (first.expect("a product has two factors"), last)
    }

    /// A value without an expression of its own.
    fn plain(&mut self, text: String, single: bool) -> String {
        let name = format!("v{}", self.count);
        self.count += 1;
        let (lines, indent) = if single { (&mut self.before, 1) } else { (&mut self.inside, 3) };
        lines.add(indent, format!("const float {name} = {text};"));
        name
    }
}
