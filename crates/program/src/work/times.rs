//! The time of a piece of work on a machine, from its limits.
//!
//! Knows rates and tiles; not which instruction it is.

use super::{Cause, Extents, Work};
use crate::efficiency::{Hidden, Realisation};
use crate::machine::Machine;
use crate::target::Arch;

/// The seconds of a piece of work, by kind.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Times {
    /// Seconds at the clock of short runs.
    own: f64,
    /// Seconds of arithmetic on matrix units, part of `own`, which the power limit slows down.
    power: f64,
    pub launches: f64,
    pub cause: Cause,
}

/// Mean share of a step that products take, over the steps that the rates were set with.
const USUAL_SHARE: f64 = 0.7;

impl Times {
    /// Seconds in a step of which products take the usual share.
    pub fn seconds(&self) -> f64 {
        self.own + self.launches
    }

    /// Seconds in a step of which products take this share.
    pub fn within(&self, share: f64, machine: &Machine) -> f64 {
        let slowed = self.power * (clock(USUAL_SHARE, machine) / clock(share, machine) - 1.0);
        self.seconds() + slowed
    }
}

/// The remaining share of the clock under the power limit, in a step of which products take this share.
pub fn clock(share: f64, machine: &Machine) -> f64 {
    1.0 - share * (1.0 - machine.efficiency.products.hot)
}

/// Seconds that work is expected to take.
pub fn expected_times(work: &Work, machine: &Machine) -> Times {
    let efficiency = &machine.efficiency;
    let (cost, rate) = (work.cost(), work.rate(machine));
    match work {
        Work::Kernel { launches, blocks, left, .. } => {
            let multiplies = work.multiplies();
            let share = if multiplies { efficiency.kernel_bandwidth } else { efficiency.bandwidth };
            let bytes = cost.bytes + if multiplies { 2.0 * left } else { 0.0 };
            // A block alone draws at most twice its multiprocessor's share of the memory bandwidth.
            let part = blocks.map_or(1.0, |blocks| (2.0 * blocks as f64 / machine.units.max(1) as f64).min(1.0));
            let alone = multiplies || machine.arch == Arch::Cpu;
            let reached_rate = if alone { efficiency.kernels * rate } else { PASS_ARITHMETIC * machine.f32_flops };
            let own = (cost.flops / reached_rate).max(bytes / (share * part * machine.bandwidth));
            Times { own, power: 0.0, launches: *launches as f64 * efficiency.launch, cause: Cause::Memory }
        }
        Work::Product { extents, launches, extra, .. } => {
            let memory = cost.bytes / (efficiency.products.bandwidth * machine.bandwidth);
            let Tiled { arithmetic, moved } = tiles(*extents, rate, memory, machine);
            let power = if arithmetic >= memory { arithmetic } else { 0.0 };
            let own = arithmetic.max(memory) + (extra + moved) / (efficiency.bandwidth * machine.bandwidth);
            let launches =
                efficiency.products.launch + (*launches - 1 + usize::from(moved > 0.0)) as f64 * efficiency.launch;
            Times { own, power, launches, cause: Cause::Products }
        }
        Work::Attention { backward, by, head_dim, of, .. } => {
            let share = efficiency.attention_share(*backward, *by, of.hidden, *head_dim, of.keys);
            // f32 has no matrix units: its kernels' rate is their own, not a share of the type's.
            let scalar = *by == Realisation::Scalar;
            let rate = share * if scalar && machine.arch == Arch::Cpu { rate } else { machine.bf16_flops };
            let memory = cost.bytes / (efficiency.bandwidth * machine.bandwidth);
            // The longest piece is of a row whose queries see half of its keys in the mean.
            let long = efficiency.attention_share(*backward, *by, Hidden::None, *head_dim, of.longest * of.keys / 2.0);
            let hot = if scalar { 1.0 } else { clock(USUAL_SHARE, machine) };
            let arithmetic = of.tail(long / share, machine) * cost.flops / (rate * hot);
            let (own, power) = (arithmetic.max(memory), if scalar || memory > arithmetic { 0.0 } else { arithmetic });
            let kernels = if *backward { BACKWARD_LAUNCHES } else { FORWARD_LAUNCHES };
            let cause = if *by == Realisation::Scalar { Cause::ScalarAttention } else { Cause::Attention };
            Times { own, power, launches: kernels * efficiency.launch, cause }
        }
    }
}

/// Number of kernels of attention: the backward pass has the sums of rows and the rounding of dq as well.
const FORWARD_LAUNCHES: f64 = 1.0;
const BACKWARD_LAUNCHES: f64 = 3.0;

/// Share of the f32 rate at which passes over memory compute meanwhile: AdamW with states of one byte, 13 TFLOP/s on an
/// H200.
const PASS_ARITHMETIC: f64 = 0.27;

/// Tiles that products are cut into: rows, columns, and the number of halvings relative to the largest.
const TILES: [(usize, usize, i32); 6] =
    [(128, 256, 0), (256, 128, 0), (128, 128, 1), (64, 128, 2), (128, 64, 2), (64, 64, 3)];

/// Relative rate of a tile of half the size.
const HALVED: f64 = 0.75;

/// Numbers of parts that the sum is cut into where there are too few tiles, none shorter than `SHORTEST_PART`.
const SPLITS: [usize; 6] = [1, 2, 4, 8, 16, 32];
const SHORTEST_PART: usize = 256;

/// A product cut into tiles.
#[derive(Clone, Copy)]
struct Tiled {
    /// Seconds of the tiles' arithmetic.
    arithmetic: f64,
    /// Bytes of the partial sums that are added up afterwards; 0 where there are none.
    moved: f64,
}

/// The best of all tilings of a product whose operands take `memory` seconds to pass.
fn tiles(of: Extents, rate: f64, memory: f64, machine: &Machine) -> Tiled {
    let products = &machine.efficiency.products;
    let units = machine.units.max(1) as f64;
    let hot = clock(USUAL_SHARE, machine);
    if machine.arch == Arch::Cpu {
        return Tiled { arithmetic: 2.0 * (of.batch * of.m * of.n * of.k) as f64 / (rate * hot), moved: 0.0 };
    }
    let mut best = Tiled { arithmetic: f64::INFINITY, moved: 0.0 };
    let all = |of: Tiled| {
        let sums = if of.moved > 0.0 { of.moved / machine.bandwidth + machine.efficiency.launch } else { 0.0 };
        of.arithmetic.max(memory) + sums
    };
    for (rows, columns, halved) in TILES {
        let share = if halved == 0 { 1.0 } else { products.small_tiles * HALVED.powi(halved - 1) };
        let count = of.batch * of.m.div_ceil(rows) * of.n.div_ceil(columns);
        for parts in SPLITS.into_iter().take_while(|parts| *parts == 1 || of.k / parts >= SHORTEST_PART) {
            let filled = (count * parts) as f64 / units;
            let waves = if filled <= 1.0 { 1.0 } else { filled + products.wave * (filled.ceil() - filled) };
            let depth = of.k as f64 / parts as f64 + products.depth;
            let arithmetic = waves * 2.0 * (rows * columns) as f64 * depth * units / (rate * hot * share);
            let moved = if parts == 1 { 0.0 } else { (parts * of.batch * of.m * of.n * 8) as f64 };
            let found = Tiled { arithmetic, moved };
            if all(found) < all(best) {
                best = found;
            }
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::super::{Arithmetic, Spread};
    use tensor::DType;

    use super::*;
    use crate::instruction::Cost;
    use crate::memory::TensorRef;
    use crate::work::Seen;

    fn seconds(work: Work) -> f64 {
        expected_times(&work, &Machine::h200()).seconds()
    }

    fn product(m: usize, n: usize, k: usize) -> f64 {
        let cost = Cost { flops: 2.0 * (m * n * k) as f64, bytes: 2.0 * (m * k + n * k + m * n) as f64 };
        let extents = Extents { batch: 1, m, n, k };
        seconds(Work::Product { cost, dtype: Some(DType::BF16), extents, launches: 1, extra: 0.0 })
    }

    #[test]
    fn estimates_lie_above_the_bounds() {
        let h200 = Machine::h200();
        let (cost, dtype) = (Cost { flops: 1e12, bytes: 1e9 }, Some(DType::BF16));
        let bound = (cost.flops / h200.bf16_flops).max(cost.bytes / h200.bandwidth);
        assert!(seconds(Work::Kernel { cost, dtype, launches: 1, blocks: None, left: 0.0 }) > bound);
        for (backward, by) in [false, true].into_iter().flat_map(|b| Realisation::ALL.map(|by| (b, by))) {
            for (head_dim, keys) in [(64, 100.0), (128, 1024.0), (512, 1e5)] {
                let of = Spread { hidden: Hidden::None, keys, pieces: 1e4, longest: 2.0, halves: false };
                assert!(seconds(Work::Attention { cost, dtype, backward, by, head_dim, of }) > bound);
            }
        }
        assert!(product(8192, 8192, 8192) > 2.0 * 8192f64.powi(3) / h200.bf16_flops);
    }

    /// Codes of four bits have a rate of their own where there are units for them; a product of few terms waits for memory.
    #[test]
    fn products_of_four_bits_have_the_rate_of_their_units() {
        let gain = |machine: &str, m: usize| {
            let machine = Machine::named(machine).unwrap();
            let (flops, extents) = (2.0 * (m * 8192 * 8192) as f64, Extents { batch: 1, m, n: 8192, k: 8192 });
            let seconds = |dtype: DType, bytes: f64| {
                let cost = Cost { flops, bytes: bytes * 8192.0 * (m + 8192) as f64 + 2.0 * 8192.0 * m as f64 };
                let work = Work::Product { cost, dtype: Some(dtype), extents, launches: 1, extra: 0.0 };
                expected_times(&work, &machine).seconds()
            };
            seconds(DType::BF16, 2.0) / seconds(DType::U8, 0.5625)
        };
        assert!((3.5..4.1).contains(&gain("b200", 16384)), "{}", gain("b200", 16384));
        assert!((7.0..8.1).contains(&gain("rtx5090", 16384)), "{}", gain("rtx5090", 16384));
        assert!((2.0..3.5).contains(&gain("b200", 16)), "{}", gain("b200", 16));
    }

    #[test]
    fn products_are_limited_by_their_tiles() {
        let rate = |m, n, k| 2.0 * (m * n * k) as f64 / product(m, n, k) / 1e12;
        // One tile more than the device has multiprocessors.
        assert!(rate(11 * 128, 12 * 256, 8192) > 1.2 * rate(11 * 128 + 1, 12 * 256, 8192));
        assert!(rate(4096, 6144, 1024) > rate(512, 6144, 1024));
        // A narrow product waits for memory: 33.5 MB at 3.1 TB/s, and a launch.
        assert!((10e-6..15e-6).contains(&product(4096, 16, 4096)), "{}", product(4096, 16, 4096));
        // A deep one with few tiles is cut along its depth.
        assert!(product(256, 256, 1 << 20) < 0.2 * (2.0 * (256 * 256) as f64 * (1u64 << 20) as f64) / (808e12 / 66.0));
    }

    #[test]
    fn products_of_groups_are_those_of_their_tiles() {
        let at = |dtype, shape: &[usize]| TensorRef::dense(crate::ArenaId(0), 0, dtype, shape.to_vec());
        let of = |gradient, left: usize, right: usize, groups: usize, result: TensorRef| {
            let x = at(DType::BF16, &[1, 4096, 8, left]);
            let second = if gradient { at(DType::BF16, &[1, 4096, 8, right]) } else { result.clone() };
            let (inputs, outputs) = ([x, second, at(DType::I32, &[groups + 1])], [result]);
            let bytes = inputs.iter().chain(&outputs).map(TensorRef::bytes).sum::<usize>() as f64;
            let cost = Cost { flops: 2.0 * 4096.0 * 8.0 * (left * right) as f64, bytes };
            let arithmetic = Arithmetic::Grouped { gradient, by: Realisation::Hopper };
            seconds(Work::of_operation(cost, arithmetic, [&inputs, &outputs], Seen::default()))
        };
        let linear = |k: usize, n: usize, groups| of(false, k, n, groups, at(DType::BF16, &[1, 4096, 8, n]));
        // H200, 256 and 1024 rows an expert, of 128 and 32: 394 and 1174 / 4 microseconds.
        assert!((270e-6..420e-6).contains(&linear(2048, 1536, 32)), "{}", linear(2048, 1536, 32));
        // Sixteen columns take the time of a pair's tile.
        assert_eq!(linear(2048, 16, 128), linear(2048, 256, 128));
        // 585 microseconds: the gradients, in f32, are what takes the time.
        let gradient = of(true, 1536, 2048, 128, at(DType::F32, &[128 * 1536, 2048]));
        assert!((450e-6..800e-6).contains(&gradient), "{gradient}");
    }

    #[test]
    fn products_slow_down_where_there_is_nothing_else() {
        let h200 = Machine::h200();
        let extents = Extents { batch: 1, m: 16384, n: 4096, k: 4096 };
        let cost = Cost { flops: 2.0 * (16384.0 * 4096.0 * 4096.0), bytes: 1e8 };
        let times =
            expected_times(&Work::Product { cost, dtype: Some(DType::BF16), extents, launches: 1, extra: 0.0 }, &h200);
        assert!(
            times.within(0.3, &h200) < times.within(0.7, &h200) && times.within(0.7, &h200) < times.within(1.0, &h200)
        );
        assert!((times.within(0.7, &h200) - times.seconds()).abs() < 1e-12);
    }

    #[test]
    fn documents_and_windows_hide_keys() {
        let q = TensorRef::dense(crate::ArenaId(0), 0, DType::BF16, [1, 1023, 2, 64]);
        let full = Cost { flops: 4.0 * 512.0 * q.len() as f64, bytes: 0.0 };
        let found =
            |cost, seen| match Work::attention(cost, [&q, &q], false, Realisation::Library, Seen::of_documents(seen)) {
                Work::Attention { of, cost, .. } => (of, cost.flops / q.len() as f64 / 4.0),
                _ => unreachable!(),
            };
        let keys = |cost, seen| (found(cost, seen).0.hidden, found(cost, seen).0.keys, found(cost, seen).1);
        assert_eq!(keys(full, 1.0), (Hidden::None, 512.0, 512.0));
        assert_eq!(keys(full, 0.25), (Hidden::Documents, 128.0, 128.0));
        let window = Cost { flops: full.flops / 8.0, ..full };
        assert_eq!(keys(window, 0.25), (Hidden::Window, 64.0, 64.0));
        // The last queries see the whole row, those of a window hardly more than the mean.
        assert!((found(full, 1.0).0.longest - 2.0).abs() < 0.01 && found(window, 1.0).0.longest < 1.1);
        assert_eq!(found(full, 1.0).0.pieces, 16.0);
    }

    #[test]
    fn few_long_pieces_of_attention_leave_the_device_idle_at_the_end() {
        let h200 = Machine::h200();
        let spread = |pieces, halves| Spread { hidden: Hidden::None, keys: 4096.0, pieces, longest: 2.0, halves };
        let of = |pieces| spread(pieces, false).tail(1.0, &h200);
        assert!(of(16.0) > 2.0 * of(64.0) * 0.9 && of(264.0) > 1.3 && of(1e5) < 1.01);
        // One piece takes its own time.
        assert_eq!(of(1.0), 264.0);
        // Two blocks do half of a piece each, where it is longer than the mean of each.
        assert_eq!(spread(1.0, true).tail(1.0, &h200), 132.0);
        assert_eq!(spread(300.0, true).tail(1.0, &h200), of(300.0));
    }
}
