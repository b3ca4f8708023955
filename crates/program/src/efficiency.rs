//! The efficiency of kernels in the middle of a step: the share of a machine's ceilings that they reach, by what limits
//! them. It is the difference between a bound and an estimate.
//!
//! Knows rates and shares; which instruction is limited by what is decided in `estimate.rs`.

use std::borrow::Cow;

/// The efficiency of matrix products, which are computed in tiles.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Products {
    /// Seconds of a product in addition to its work.
    pub launch: f64,
    /// Share of the rate of their type that remains where nothing but products runs for minutes: the power limit lowers
    /// the clock. Where they take a share s of a step, the rate is 1 − s·(1 − hot).
    pub hot: f64,
    /// Share of the rate of the largest tiles (128 × 256) that tiles of 128 × 128 reach; tiles of a half and a quarter
    /// of that size reach this share times 0.75 once and twice.
    pub small_tiles: f64,
    /// Cost of the idle part of the last wave of tiles, as a share of its cost if it were filled: 1 all of it.
    pub wave: f64,
    /// The cost of filling and emptying a tile's pipeline, in elements of the axis that is summed over.
    pub depth: f64,
    /// Share of the bandwidth that a product reaches where it waits for memory.
    pub bandwidth: f64,
}

/// The implementation of attention, or of products of groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Realisation {
    /// The library of the backend (cuDNN, cuBLASLt).
    Library,
    /// The project's kernels on the matrix units of Hopper.
    Hopper,
    /// The project's kernels on the matrix units of any architecture.
    Portable,
    /// The project's kernels without matrix units.
    Scalar,
}

impl Realisation {
    pub const ALL: [Realisation; 4] =
        [Realisation::Library, Realisation::Hopper, Realisation::Portable, Realisation::Scalar];

    pub const fn name(self) -> &'static str {
        match self {
            Realisation::Library => "library",
            Realisation::Hopper => "hopper",
            Realisation::Portable => "portable",
            Realisation::Scalar => "scalar",
        }
    }
}

/// The reason why keys are hidden from a query, besides the causal mask.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Hidden {
    /// The causal mask alone hides keys.
    None,
    /// A window: every query after the first ones sees the same number of keys.
    Window,
    /// Other documents of the row: some queries see many keys, most see few.
    Documents,
}

impl Hidden {
    pub const ALL: [Hidden; 3] = [Hidden::None, Hidden::Window, Hidden::Documents];

    pub const fn name(self) -> &'static str {
        match self {
            Hidden::None => "none",
            Hidden::Window => "window",
            Hidden::Documents => "documents",
        }
    }
}

/// The rate of attention at one point: pass, implementation, hidden keys, largest head, mean number of keys that a
/// query sees. Operations are counted over the pairs that are seen: 4 for each element of a head forward, 10 backward.
/// The device is full: the time at the end in which a few long pieces of work leave it idle is added separately.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionRate {
    pub backward: bool,
    pub by: Realisation,
    pub hidden: Hidden,
    /// Largest head that the point stands for.
    pub head_dim: usize,
    pub keys: f64,
    /// Share of `bf16_flops`, at the clock of short runs.
    pub share: f64,
}

/// Shares of the rates of a machine, and seconds in addition.
#[derive(Clone, Debug, PartialEq)]
pub struct Efficiency {
    /// Seconds of a kernel in addition to its work: its place in a replayed graph, filling and emptying the device.
    pub launch: f64,
    /// Seconds of an entry in addition to its kernels: the writes of the host before it, and the start of its graph.
    pub entry: f64,
    pub products: Products,
    /// Element-wise work and everything else that waits for memory, of `bandwidth`.
    pub bandwidth: f64,
    /// Share of the rate of their type that the project's own kernels reach where they multiply.
    pub kernels: f64,
    /// Share of `bandwidth` that the same kernels reach where they wait for memory: gradients of adapters.
    pub kernel_bandwidth: f64,
    /// Points of attention, in any order. Between two numbers of keys the rate follows their logarithm.
    pub attention: Cow<'static, [AttentionRate]>,
    /// Low-rank addends of a product take a pass of their own over its result: not on Hopper, whose products take them
    /// along.
    pub addend_pass: bool,
}

const fn even(backward: bool) -> AttentionRate {
    AttentionRate { backward, by: Realisation::Scalar, hidden: Hidden::None, head_dim: 512, keys: 1024.0, share: 1.0 }
}

/// One rate at every point, for machines that have a single one.
const EVEN_ATTENTION: &[AttentionRate] = &[even(false), even(true)];

impl Efficiency {
    /// Every ceiling reached in full.
    pub const ALL: Efficiency = Efficiency {
        launch: 0.0,
        entry: 0.0,
        products: Products { launch: 0.0, hot: 1.0, small_tiles: 1.0, wave: 0.0, depth: 0.0, bandwidth: 1.0 },
        bandwidth: 1.0,
        kernels: 1.0,
        kernel_bandwidth: 1.0,
        attention: Cow::Borrowed(EVEN_ATTENTION),
        addend_pass: false,
    };

    /// Returns the rate of attention of a pass as a share of `bf16_flops`. Where an implementation has no point for
    /// heads of this size, the next larger stands in, padded, else the largest; where it has none at all, the slowest
    /// of all.
    pub fn attention_share(&self, backward: bool, by: Realisation, hidden: Hidden, head_dim: usize, keys: f64) -> f64 {
        let pass = || self.attention.iter().filter(move |of| of.backward == backward);
        let realised = || pass().filter(|of| of.by == by);
        // Where this kind of hidden keys was not measured, the points of all other kinds stand in.
        let alike: Vec<&AttentionRate> = realised().filter(|of| of.hidden == hidden).collect();
        let own = if alike.is_empty() { realised().collect() } else { alike };
        if own.is_empty() {
            return pass().map(|of| of.share).min_by(f64::total_cmp).unwrap_or(1.0);
        }
        let sizes = || own.iter().map(|of| of.head_dim);
        let class = sizes().filter(|size| *size >= head_dim).min().or(sizes().max()).expect("there is a point");
        let padded = if head_dim < class { head_dim as f64 / class as f64 } else { 1.0 };
        // A class with small heads as well is slower for them, but not in proportion.
        let padded = if sizes().any(|size| size < head_dim) { padded } else { padded.max(0.5) };
        let mut points: Vec<(f64, f64)> =
            own.iter().filter(|of| of.head_dim == class).map(|of| (of.keys.max(1.0).ln(), of.share)).collect();
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        padded * between(&points, keys.max(1.0).ln())
    }
}

/// Keys that are computed needlessly where a query's range of keys begins and ends within tiles: 102 TFLOP/s at 64 keys
/// where there are 204 at 256 (backward, heads of 64, H200).
const TILE: f64 = 128.0;

/// Returns the value at `x`, the logarithm of a number of keys, on the line through points in ascending order. Below
/// the first point it falls, because the needless work of tiles grows. Above the last it stays, and so does a single
/// point.
fn between(points: &[(f64, f64)], x: f64) -> f64 {
    if let [(_, only)] = points {
        return *only;
    }
    let (first, last) = (points[0], points[points.len() - 1]);
    if x <= first.0 {
        let whole = |x: f64| x.exp() / (x.exp() + TILE);
        return first.1 * whole(x) / whole(first.0);
    }
    if x >= last.0 {
        return last.1;
    }
    let after = points.iter().position(|point| point.0 > x).expect("x lies before the last");
    let ((x0, y0), (x1, y1)) = (points[after - 1], points[after]);
    y0 + (y1 - y0) * (x - x0) / (x1 - x0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attention_follows_keys_and_heads() {
        let of = |by, head_dim, keys| 808.0 * Efficiency::H200.attention_share(false, by, Hidden::None, head_dim, keys);
        let [short, long] = [1024.5, 4096.5].map(|keys| of(Realisation::Library, 128, keys));
        let between = of(Realisation::Library, 128, 2048.0);
        assert!(short < between && between < long, "{short} {between} {long}");
        assert_eq!(of(Realisation::Library, 128, 1e6), long);
        // A quarter of the keys in tiles of the same size: half the rate.
        let first = of(Realisation::Library, 128, 256.5);
        assert!((0.49..0.51).contains(&(of(Realisation::Library, 128, 64.0) / first)));
        // Heads of 96 are padded to 128.
        assert!((of(Realisation::Library, 96, 1024.5) / short - 0.75).abs() < 1e-9);
        assert!(of(Realisation::Scalar, 128, 4096.0) < 25.0);
        // Documents have points of their own; an implementation without them uses its other points.
        let hidden = |by, hidden| Efficiency::H200.attention_share(true, by, hidden, 128, 1000.0);
        assert!(hidden(Realisation::Hopper, Hidden::Documents) < hidden(Realisation::Hopper, Hidden::None));
        assert_eq!(hidden(Realisation::Portable, Hidden::Documents), hidden(Realisation::Portable, Hidden::None));
        assert_eq!(Efficiency::ALL.attention_share(true, Realisation::Hopper, Hidden::Window, 64, 5.0), 1.0);
    }
}
