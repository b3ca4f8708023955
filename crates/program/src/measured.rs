//! Measured rates of two GPUs: numbers that plans for them rest on.
//!
//! Written from `surogate doctor --calibrate`, 2026-11-22, driver 580.159.04. Knows numbers; what they mean stands in
//! `efficiency.rs`.

use std::borrow::Cow;

use crate::architecture::Architecture;
use crate::efficiency::{AttentionRate, Efficiency, Hidden, Products, Realisation};
use crate::machine::{FP8, Link, Machine, Origin};
use crate::target::Arch;
use Hidden::{Documents, None, Window};
use Realisation::{Hopper, Library, Portable, Scalar};

const FORWARD: bool = false;
const BACKWARD: bool = true;

/// Pass, implementation, hidden keys, head size, mean number of keys that a query sees, TFLOP/s over the pairs that are
/// seen.
type Point = (bool, Realisation, Hidden, usize, f64, f64);

/// `full`: TFLOP/s of `bf16_flops` at the clock of the points.
const fn rates<const N: usize>(points: [Point; N], full: f64) -> [AttentionRate; N] {
    let mut all = [AttentionRate { backward: false, by: Scalar, hidden: None, head_dim: 0, keys: 0.0, share: 0.0 }; N];
    let mut index = 0;
    while index < N {
        let (backward, by, hidden, head_dim, keys, teraflops) = points[index];
        all[index] = AttentionRate { backward, by, hidden, head_dim, keys, share: teraflops / full };
        index += 1;
    }
    all
}

/// The library's and Hopper's kernels on a full device, in a step of which products take seven tenths.
const H200: &[AttentionRate] = &rates(
    [
        (FORWARD, Library, None, 64, 256.5, 237.2),
        (FORWARD, Library, None, 64, 1024.5, 354.7),
        (FORWARD, Library, None, 64, 4096.5, 409.1),
        (FORWARD, Library, None, 64, 16384.5, 448.0),
        (FORWARD, Library, None, 128, 256.5, 345.1),
        (FORWARD, Library, None, 128, 1024.5, 515.6),
        (FORWARD, Library, None, 128, 4096.5, 594.4),
        (FORWARD, Hopper, None, 256, 256.5, 305.2),
        (FORWARD, Hopper, None, 256, 1024.5, 544.8),
        (FORWARD, Hopper, None, 256, 4096.5, 644.8),
        (BACKWARD, Hopper, None, 64, 256.5, 204.6),
        (BACKWARD, Hopper, None, 64, 1024.5, 309.8),
        (BACKWARD, Hopper, None, 64, 4096.5, 359.3),
        (BACKWARD, Hopper, None, 64, 16384.5, 393.5),
        (BACKWARD, Hopper, None, 128, 256.5, 249.1),
        (BACKWARD, Hopper, None, 128, 1024.5, 397.5),
        (BACKWARD, Hopper, None, 128, 4096.5, 536.9),
        (BACKWARD, Hopper, None, 256, 256.5, 224.5),
        (BACKWARD, Hopper, None, 256, 1024.5, 350.8),
        (BACKWARD, Hopper, None, 256, 4096.5, 408.8),
        (FORWARD, Hopper, Window, 64, 252.0, 164.0),
        (FORWARD, Hopper, Window, 64, 3072.2, 403.8),
        (FORWARD, Hopper, Window, 128, 252.0, 284.8),
        (FORWARD, Hopper, Window, 128, 960.1, 471.4),
        (FORWARD, Hopper, Window, 128, 3072.2, 572.0),
        (FORWARD, Hopper, Window, 256, 960.1, 506.5),
        (BACKWARD, Hopper, Window, 64, 252.0, 183.8),
        (BACKWARD, Hopper, Window, 64, 3072.2, 280.1),
        (BACKWARD, Hopper, Window, 128, 252.0, 232.1),
        (BACKWARD, Hopper, Window, 128, 960.1, 370.9),
        (BACKWARD, Hopper, Window, 128, 3072.2, 381.0),
        (BACKWARD, Hopper, Window, 256, 960.1, 328.6),
        (FORWARD, Hopper, Documents, 64, 434.0, 215.2),
        (FORWARD, Hopper, Documents, 64, 945.1, 304.3),
        (FORWARD, Hopper, Documents, 128, 434.0, 333.3),
        (FORWARD, Hopper, Documents, 128, 723.2, 424.6),
        (FORWARD, Hopper, Documents, 128, 2807.6, 554.3),
        (FORWARD, Hopper, Documents, 256, 723.2, 355.0),
        (BACKWARD, Hopper, Documents, 64, 434.0, 192.0),
        (BACKWARD, Hopper, Documents, 64, 945.1, 265.2),
        (BACKWARD, Hopper, Documents, 128, 434.0, 221.3),
        (BACKWARD, Hopper, Documents, 128, 723.2, 267.6),
        (BACKWARD, Hopper, Documents, 128, 2807.6, 338.6),
        (BACKWARD, Hopper, Documents, 256, 723.2, 253.8),
    ],
    // 808 · (1 − 0.7 · (1 − 690 / 808))
    725.4,
);

/// The same kernels and conditions on an H100.
const H100: &[AttentionRate] = &rates(
    [
        (FORWARD, Library, None, 64, 256.5, 235.6),
        (FORWARD, Library, None, 64, 1024.5, 352.8),
        (FORWARD, Library, None, 64, 4096.5, 408.7),
        (FORWARD, Library, None, 128, 256.5, 339.5),
        (FORWARD, Library, None, 128, 1024.5, 504.6),
        (FORWARD, Library, None, 128, 4096.5, 584.9),
        (FORWARD, Hopper, None, 256, 256.5, 229.5),
        (FORWARD, Hopper, None, 256, 1024.5, 522.7),
        (FORWARD, Hopper, None, 256, 4096.5, 626.4),
        (BACKWARD, Hopper, None, 64, 256.5, 169.8),
        (BACKWARD, Hopper, None, 64, 1024.5, 264.5),
        (BACKWARD, Hopper, None, 64, 4096.5, 328.4),
        (BACKWARD, Hopper, None, 128, 256.5, 197.4),
        (BACKWARD, Hopper, None, 128, 1024.5, 334.1),
        (BACKWARD, Hopper, None, 128, 4096.5, 481.5),
        (BACKWARD, Hopper, None, 256, 256.5, 182.4),
        (BACKWARD, Hopper, None, 256, 1024.5, 333.5),
        (BACKWARD, Hopper, None, 256, 4096.5, 394.9),
        (FORWARD, Hopper, Window, 64, 252.0, 164.3),
        (FORWARD, Hopper, Window, 64, 3072.2, 401.7),
        (FORWARD, Hopper, Window, 128, 252.0, 277.7),
        (FORWARD, Hopper, Window, 128, 960.1, 464.7),
        (FORWARD, Hopper, Window, 128, 3072.2, 556.1),
        (FORWARD, Hopper, Window, 256, 960.1, 496.4),
        (BACKWARD, Hopper, Window, 64, 252.0, 172.9),
        (BACKWARD, Hopper, Window, 64, 3072.2, 256.0),
        (BACKWARD, Hopper, Window, 128, 252.0, 213.3),
        (BACKWARD, Hopper, Window, 128, 960.1, 331.7),
        (BACKWARD, Hopper, Window, 128, 3072.2, 360.8),
        (BACKWARD, Hopper, Window, 256, 960.1, 311.1),
        (FORWARD, Hopper, Documents, 64, 434.0, 214.1),
        (FORWARD, Hopper, Documents, 64, 945.1, 302.6),
        (FORWARD, Hopper, Documents, 128, 434.0, 328.8),
        (FORWARD, Hopper, Documents, 128, 723.2, 416.9),
        (FORWARD, Hopper, Documents, 128, 2807.6, 538.4),
        (FORWARD, Hopper, Documents, 256, 723.2, 347.7),
        (BACKWARD, Hopper, Documents, 64, 434.0, 187.8),
        (BACKWARD, Hopper, Documents, 64, 945.1, 261.9),
        (BACKWARD, Hopper, Documents, 128, 434.0, 215.4),
        (BACKWARD, Hopper, Documents, 128, 723.2, 258.4),
        (BACKWARD, Hopper, Documents, 128, 2807.6, 333.1),
        (BACKWARD, Hopper, Documents, 256, 723.2, 250.5),
    ],
    // 824.4 · (1 − 0.7 · (1 − 0.846))
    735.5,
);

/// The other kernels on an H200, each alone while the card is cool; the scalar ones from a whole run. No GPU but this
/// one was measured, and these stand in for all.
const OTHERS: &[AttentionRate] = &rates(
    [
        (FORWARD, Hopper, None, 64, 1024.0, 418.0),
        (FORWARD, Hopper, None, 64, 2048.0, 420.0),
        (FORWARD, Hopper, None, 64, 16384.0, 449.0),
        (FORWARD, Hopper, None, 128, 1024.0, 525.0),
        (FORWARD, Hopper, None, 128, 4096.0, 619.0),
        (FORWARD, Portable, None, 64, 168.0, 126.0),
        (FORWARD, Portable, None, 64, 1024.0, 272.0),
        (FORWARD, Portable, None, 64, 2048.0, 307.0),
        (FORWARD, Portable, None, 128, 176.0, 144.0),
        (FORWARD, Portable, None, 128, 1024.0, 311.0),
        (FORWARD, Portable, None, 128, 4096.0, 346.0),
        (FORWARD, Portable, None, 256, 203.0, 127.0),
        (FORWARD, Portable, None, 256, 2048.0, 249.0),
        (FORWARD, Portable, None, 512, 2048.0, 204.0),
        (BACKWARD, Portable, None, 64, 168.0, 113.0),
        (BACKWARD, Portable, None, 64, 1024.0, 231.0),
        (BACKWARD, Portable, None, 64, 2048.0, 263.0),
        (BACKWARD, Portable, None, 128, 176.0, 120.0),
        (BACKWARD, Portable, None, 128, 1024.0, 247.0),
        (BACKWARD, Portable, None, 128, 4096.0, 275.0),
        (BACKWARD, Portable, None, 256, 203.0, 98.0),
        (BACKWARD, Portable, None, 256, 2048.0, 202.0),
        (BACKWARD, Portable, None, 512, 2048.0, 116.0),
        (FORWARD, Scalar, None, 128, 1024.0, 20.0),
        (BACKWARD, Scalar, None, 128, 1024.0, 17.0),
    ],
    808.0,
);

const fn joined<const N: usize>(first: &[AttentionRate], second: &[AttentionRate]) -> [AttentionRate; N] {
    let mut all = [second[0]; N];
    let mut index = 0;
    while index < N {
        all[index] = if index < first.len() { first[index] } else { second[index - first.len()] };
        index += 1;
    }
    all
}

const H200_ATTENTION: &[AttentionRate] = &joined::<{ H200.len() + OTHERS.len() }>(H200, OTHERS);
const H100_ATTENTION: &[AttentionRate] = &joined::<{ H100.len() + OTHERS.len() }>(H100, OTHERS);

impl Efficiency {
    /// Rates of an H200. Products: set with the times of all products of steps of Qwen3-0.6B and 4B with adapters, 0.6B
    /// and 8B in full (2026-11-21), which come out within 2.6 %; their rate in a step falls from 734 TFLOP/s where they
    /// take half of it to 710 where they take five sixths. Products: set with the times of all products of steps of
    /// Qwen3-0.6B and 4B with adapters, 0.6B and 8B in full (2026-11-21), which come out within 2.6 %; their rate in a
    /// step falls from 734 TFLOP/s where they take half of it to 710 where they take five sixths. Probes of single
    /// products give 842 TFLOP/s cool and 711 hot, and the times of steps within 2 % of these, with 3.0 µs besides a
    /// product's work; short steps of small models take less, 2.6.
    pub const H200: Efficiency = Efficiency {
        launch: 2.0e-6,
        entry: 40e-6,
        products: Products {
            launch: 2.6e-6,
            hot: 690.0 / 808.0,
            small_tiles: 0.95,
            wave: 0.5,
            depth: 0.0,
            bandwidth: 0.72,
        },
        bandwidth: 0.93,
        kernels: 0.125,
        kernel_bandwidth: 0.86,
        attention: Cow::Borrowed(H200_ATTENTION),
        addend_pass: false,
    };

    /// Rates of an H100 (SXM, 700 W), as `doctor --calibrate` measured it. Seconds of an entry, which include the
    /// trainer's part, are the H200's.
    pub const H100: Efficiency = Efficiency {
        launch: 1.23e-6,
        entry: 40e-6,
        products: Products { launch: 2.0e-06, hot: 0.846, small_tiles: 0.85, wave: 0.5, depth: 0.0, bandwidth: 0.85 },
        bandwidth: 1.00,
        kernels: 0.12,
        kernel_bandwidth: 1.00,
        attention: Cow::Borrowed(H100_ATTENTION),
        addend_pass: false,
    };
}

impl Machine {
    /// One NVIDIA H200 (SXM). Copy 4.27 TB/s; bf16 product of 8192³ 808 TFLOP/s, of eight bits 1,382, while the card is cool,
    /// 665 where nothing else runs for minutes; page-locked host memory 55.5 GB/s each way; measured 2026-11-20 with driver
    /// 580.159 and CUDA 13.0.
    pub fn h200() -> Self {
        Machine {
            name: "h200".into(),
            arch: Arch::Cuda(Architecture::HOPPER),
            memory: 143_771 << 20,
            bandwidth: 4.27e12,
            link: Link { one_way: 55.5e9, both_ways: 102e9 },
            bf16_flops: 808e12,
            fp8_flops: FP8 * 808e12,
            fp4_flops: 808e12,
            f32_flops: 50e12,
            units: 132,
            context_bytes: 600 << 20,
            efficiency: Efficiency::H200,
            origin: Origin::Kind,
        }
    }

    /// One NVIDIA H100 (SXM, 80 GB). Copy 2.84 TB/s; the best product 824 TFLOP/s while the card is cool, 697 where nothing
    /// else runs; page-locked host memory 48.4 GB/s one way.
    pub fn h100() -> Self {
        Machine {
            name: "h100".into(),
            arch: Arch::Cuda(Architecture::HOPPER),
            memory: 81_559 << 20,
            bandwidth: 2.843e12,
            link: Link { one_way: 48.4e9, both_ways: 91.0e9 },
            bf16_flops: 824.4e12,
            fp8_flops: FP8 * 824.4e12,
            fp4_flops: 824.4e12,
            f32_flops: 50e12,
            units: 132,
            context_bytes: 600 << 20,
            efficiency: Efficiency::H100,
            origin: Origin::Kind,
        }
    }
}
