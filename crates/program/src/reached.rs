//! What of a machine's ceilings is reached in the middle of a step, by what limits a kernel: the difference between a
//! bound and an estimate.
//!
//! Knows rates and shares; which instruction is limited by what is decided in `estimate.rs`.

use std::borrow::Cow;

/// Matrix products by tiles.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Products {
    /// Seconds of a product beside its work.
    pub launch: f64,
    /// Of the rate of their type, where nothing but products runs for minutes: the power limit lowers the clock. Where
    /// they take a share s of a step, the rate is 1 − s·(1 − hot).
    pub hot: f64,
    /// Of the rate of the largest tiles (128 × 256) what tiles of 128 × 128 reach; those of a half and a quarter of
    /// that reach this share once and twice more times 0.75.
    pub small_tiles: f64,
    /// How much of the last wave of tiles, which fills the device in part, costs as if it filled it: 1 all of it.
    pub wave: f64,
    /// What filling and emptying a tile's pipeline costs, in elements of the axis that is summed over.
    pub depth: f64,
    /// Of the bandwidth, where a product waits for memory.
    pub bandwidth: f64,
}

/// Who computes attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Realisation {
    /// The backend's library.
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

/// What attention reaches at one point: a pass, who computes it, heads up to a size, queries that see so many keys in the
/// mean. Operations are counted over the pairs that are seen: 4 for each element of a head forward, 10 backward.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionRate {
    pub backward: bool,
    pub by: Realisation,
    /// Largest head that the point stands for.
    pub head_dim: usize,
    pub keys: f64,
    /// Of `bf16_flops`.
    pub share: f64,
}

/// Shares of the rates of a machine, and seconds beside them.
#[derive(Clone, Debug, PartialEq)]
pub struct Reached {
    /// Seconds of a kernel beside its work: its place in a replayed graph, filling and emptying the device.
    pub launch: f64,
    /// Seconds of an entry beside its kernels: what the host writes before it, and the start of its graph.
    pub entry: f64,
    pub products: Products,
    /// Element-wise work and everything else that waits for memory, of `bandwidth`.
    pub bandwidth: f64,
    /// Kernels of the project's own that multiply, of the rate of their type.
    pub kernels: f64,
    /// The same where they wait for memory, of `bandwidth`: gradients of adapters.
    pub kernel_bandwidth: f64,
    /// Points of attention, in any order. Between two numbers of keys the rate follows their logarithm.
    pub attention: Cow<'static, [AttentionRate]>,
    /// Low-rank addends of a product take a pass of their own over its result: not on Hopper, whose products take them
    /// along.
    pub addend_pass: bool,
}

const fn at(backward: bool, by: Realisation, head_dim: usize, keys: f64, teraflops: f64) -> AttentionRate {
    AttentionRate { backward, by, head_dim, keys, share: teraflops / 808.0 }
}

const FORWARD: bool = false;
const BACKWARD: bool = true;

/// Attention on an H200, TFLOP/s over the pairs that are seen. Measured in steps: the library's with heads of 128 at 68,
/// 210 and 1024 keys, scalar ones from a whole run with a window; portable ones alone. Hopper's: each alone (2026-11-22,
/// docs/performance.md), times 0.85, which is what a step leaves of that. The others stand for what
/// `doctor --calibrate` measures.
const H200_ATTENTION: &[AttentionRate] = &{
    use Realisation::{Hopper, Library, Portable, Scalar};
    [
        at(FORWARD, Library, 64, 68.0, 40.0),
        at(FORWARD, Library, 64, 1024.0, 300.0),
        at(FORWARD, Library, 64, 4096.0, 390.0),
        at(FORWARD, Library, 128, 68.0, 60.0),
        at(FORWARD, Library, 128, 210.0, 167.0),
        at(FORWARD, Library, 128, 1024.0, 440.0),
        at(FORWARD, Library, 128, 4096.0, 540.0),
        at(BACKWARD, Library, 64, 68.0, 20.0),
        at(BACKWARD, Library, 64, 1024.0, 190.0),
        at(BACKWARD, Library, 64, 4096.0, 260.0),
        at(BACKWARD, Library, 128, 68.0, 30.0),
        at(BACKWARD, Library, 128, 210.0, 85.0),
        at(BACKWARD, Library, 128, 1024.0, 300.0),
        at(BACKWARD, Library, 128, 4096.0, 350.0),
        at(FORWARD, Hopper, 64, 128.0, 130.0),
        at(FORWARD, Hopper, 64, 168.0, 134.0),
        at(FORWARD, Hopper, 64, 1024.0, 355.0),
        at(FORWARD, Hopper, 64, 2048.0, 357.0),
        at(FORWARD, Hopper, 64, 16384.0, 382.0),
        at(BACKWARD, Hopper, 64, 128.0, 113.0),
        at(BACKWARD, Hopper, 64, 168.0, 117.0),
        at(BACKWARD, Hopper, 64, 1024.0, 266.0),
        at(BACKWARD, Hopper, 64, 2048.0, 308.0),
        at(BACKWARD, Hopper, 64, 16384.0, 351.0),
        at(FORWARD, Hopper, 128, 176.0, 198.0),
        at(FORWARD, Hopper, 128, 1024.0, 446.0),
        at(FORWARD, Hopper, 128, 4096.0, 526.0),
        at(BACKWARD, Hopper, 128, 176.0, 138.0),
        at(BACKWARD, Hopper, 128, 1024.0, 340.0),
        at(BACKWARD, Hopper, 128, 4096.0, 393.0),
        at(BACKWARD, Hopper, 128, 16384.0, 450.0),
        at(FORWARD, Hopper, 256, 203.0, 160.0),
        at(FORWARD, Hopper, 256, 900.0, 374.0),
        at(FORWARD, Hopper, 256, 2048.0, 433.0),
        at(BACKWARD, Hopper, 256, 203.0, 105.0),
        at(BACKWARD, Hopper, 256, 900.0, 246.0),
        at(BACKWARD, Hopper, 256, 2048.0, 268.0),
        at(FORWARD, Portable, 64, 168.0, 126.0),
        at(FORWARD, Portable, 64, 1024.0, 272.0),
        at(FORWARD, Portable, 64, 2048.0, 307.0),
        at(FORWARD, Portable, 128, 176.0, 144.0),
        at(FORWARD, Portable, 128, 1024.0, 311.0),
        at(FORWARD, Portable, 128, 4096.0, 346.0),
        at(FORWARD, Portable, 256, 203.0, 127.0),
        at(FORWARD, Portable, 256, 2048.0, 249.0),
        at(FORWARD, Portable, 512, 2048.0, 204.0),
        at(BACKWARD, Portable, 64, 168.0, 113.0),
        at(BACKWARD, Portable, 64, 1024.0, 231.0),
        at(BACKWARD, Portable, 64, 2048.0, 263.0),
        at(BACKWARD, Portable, 128, 176.0, 120.0),
        at(BACKWARD, Portable, 128, 1024.0, 247.0),
        at(BACKWARD, Portable, 128, 4096.0, 275.0),
        at(BACKWARD, Portable, 256, 203.0, 98.0),
        at(BACKWARD, Portable, 256, 2048.0, 202.0),
        at(BACKWARD, Portable, 512, 2048.0, 116.0),
        at(FORWARD, Scalar, 128, 1024.0, 20.0),
        at(BACKWARD, Scalar, 128, 1024.0, 17.0),
    ]
};

/// One rate at every point: where a machine has a single one.
const EVEN_ATTENTION: &[AttentionRate] = &[
    AttentionRate { backward: false, by: Realisation::Scalar, head_dim: 512, keys: 1024.0, share: 1.0 },
    AttentionRate { backward: true, by: Realisation::Scalar, head_dim: 512, keys: 1024.0, share: 1.0 },
];

impl Reached {
    /// The ceilings themselves.
    pub const ALL: Reached = Reached {
        launch: 0.0,
        entry: 0.0,
        products: Products { launch: 0.0, hot: 1.0, small_tiles: 1.0, wave: 0.0, depth: 0.0, bandwidth: 1.0 },
        bandwidth: 1.0,
        kernels: 1.0,
        kernel_bandwidth: 1.0,
        attention: Cow::Borrowed(EVEN_ATTENTION),
        addend_pass: false,
    };

    /// On an H200. Products: set with the times of all products of steps of Qwen3-0.6B and 4B with adapters, 0.6B and 8B
    /// in full (2026-11-21), which come out within 2.6 %; their rate in a step falls from 734 TFLOP/s where they take
    /// half of it to 710 where they take five sixths. Gradients of adapters: 1.33 to 1.61 TB/s.
    pub const H200: Reached = Reached {
        launch: 2.0e-6,
        entry: 40e-6,
        products: Products {
            launch: 2.5e-6,
            hot: 690.0 / 808.0,
            small_tiles: 0.95,
            wave: 0.5,
            depth: 0.0,
            bandwidth: 0.72,
        },
        bandwidth: 0.93,
        kernels: 340.0 / 808.0,
        kernel_bandwidth: 0.45,
        attention: Cow::Borrowed(H200_ATTENTION),
        addend_pass: false,
    };

    /// What attention of a pass reaches, as a share of `bf16_flops`. Where a realisation has no point for heads of this
    /// size, the next larger stands in, padded, else the largest; where it has none at all, the slowest of all.
    pub fn attention_share(&self, backward: bool, by: Realisation, head_dim: usize, keys: f64) -> f64 {
        let pass = || self.attention.iter().filter(move |of| of.backward == backward);
        let own: Vec<&AttentionRate> = pass().filter(|of| of.by == by).collect();
        if own.is_empty() {
            return pass().map(|of| of.share).min_by(f64::total_cmp).unwrap_or(1.0);
        }
        let sizes = || own.iter().map(|of| of.head_dim);
        let class = sizes().filter(|size| *size >= head_dim).min().or(sizes().max()).expect("there is a point");
        let padded = if head_dim < class { head_dim as f64 / class as f64 } else { 1.0 };
        // A class with small heads beside it is slower for them, but not in proportion.
        let padded = if sizes().any(|size| size < head_dim) { padded } else { padded.max(0.5) };
        let mut points: Vec<(f64, f64)> =
            own.iter().filter(|of| of.head_dim == class).map(|of| (of.keys.max(1.0).ln(), of.share)).collect();
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        padded * between(&points, keys.max(1.0).ln())
    }
}

/// The value at `x` on the line through points in ascending order. Below the first it falls in proportion with
/// exp(x): tiles are computed whole. Above the last it stays, and so does a single point.
fn between(points: &[(f64, f64)], x: f64) -> f64 {
    if let [(_, only)] = points {
        return *only;
    }
    let (first, last) = (points[0], points[points.len() - 1]);
    if x <= first.0 {
        return first.1 * (x - first.0).exp();
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
        let of = |by, head_dim, keys| 808.0 * Reached::H200.attention_share(false, by, head_dim, keys);
        assert!((of(Realisation::Library, 128, 1024.0) - 440.0).abs() < 1e-9);
        let between = of(Realisation::Library, 128, 2048.0);
        assert!(440.0 < between && between < 540.0, "{between}");
        assert_eq!(of(Realisation::Library, 128, 1e6), of(Realisation::Library, 128, 4096.0));
        // Half the keys in tiles as large: half the rate.
        assert!((of(Realisation::Library, 128, 34.0) - 30.0).abs() < 1e-9);
        // Heads of 96 are padded to 128.
        assert!((of(Realisation::Library, 96, 1024.0) - 330.0).abs() < 1e-9);
        assert!(of(Realisation::Scalar, 128, 4096.0) < 25.0);
        assert_eq!(Reached::ALL.attention_share(true, Realisation::Hopper, 64, 5.0), 1.0);
    }
}
