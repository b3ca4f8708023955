//! What the plan needs to know of a machine, as a value: a program for a GPU is compiled, planned
//! and costed where there is none.

use std::fmt;

/// The instruction set that kernels are written for.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Arch {
    Cpu,
    /// An NVIDIA architecture as NVRTC spells it: `sm_90a`.
    Cuda(String),
}

impl fmt::Display for Arch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Arch::Cpu => f.write_str("cpu"),
            Arch::Cuda(name) => f.write_str(name),
        }
    }
}

/// Rates of the way between device and host memory, bytes per second.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Link {
    pub one_way: f64,
    /// The sum of both directions at the same time.
    pub both_ways: f64,
}

/// What of a machine's ceilings instructions reach in the middle of a step, and what each kernel costs beside its
/// work: the difference between a bound and an estimate. Shares of the rates of [`Machine`]; measured.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Reached {
    /// Seconds of a kernel beside its work: its place in a replayed graph, filling and emptying the device.
    pub launch: f64,
    /// Matrix products, of `bf16_flops` or `f32_flops`.
    pub products: f64,
    /// Products that wait for memory, of `bandwidth`.
    pub product_bandwidth: f64,
    /// Everything else that waits for memory, of `bandwidth`.
    pub bandwidth: f64,
    /// Kernels of the project's own that multiply, of the rate of their type.
    pub kernels: f64,
    /// Attention where a library does it, of the rate of its type.
    pub attention_forward: f64,
    pub attention_backward: f64,
    /// Low-rank addends of a product take a pass of their own over its result: not on Hopper, whose products take them
    /// along.
    pub addend_pass: bool,
}

impl Reached {
    /// The ceilings themselves.
    pub const ALL: Reached = Reached {
        launch: 0.0,
        products: 1.0,
        product_bandwidth: 1.0,
        bandwidth: 1.0,
        kernels: 1.0,
        attention_forward: 1.0,
        attention_backward: 1.0,
        addend_pass: false,
    };

    /// On an H200, 2026-11-20. Set with the instructions of steps of Qwen3-0.6B (full and with adapters) and of
    /// Qwen3-8B with adapters; the steps of Qwen3-1.7B (both) and 4B, which took no part, come out within 4 %. Products
    /// ran at 616 to 800 TFLOP/s between other kernels, attention forward at 440 (cuDNN), backward at 300 (cuDNN,
    /// deterministic) and 320 to 385 (own kernel), streams at 3.97 TB/s.
    pub const H200: Reached = Reached {
        launch: 2.0e-6,
        products: 685.0 / 808.0,
        product_bandwidth: 0.75,
        bandwidth: 0.93,
        kernels: 340.0 / 808.0,
        attention_forward: 440.0 / 808.0,
        attention_backward: 300.0 / 808.0,
        addend_pass: false,
    };
}

/// One device. Rates are measured ceilings, not data-sheet values; see each constructor.
#[derive(Clone, Debug, PartialEq)]
pub struct Machine {
    pub name: String,
    pub arch: Arch,
    /// Device memory, bytes.
    pub memory: usize,
    /// Copy bandwidth (read + write), bytes per second.
    pub bandwidth: f64,
    /// Copies between device and page-locked host memory: one way, and both at once together, bytes per second.
    pub link: Link,
    /// Dense bf16 matrix rate, FLOP/s: the best large product.
    pub bf16_flops: f64,
    /// f32 matrix rate, FLOP/s.
    pub f32_flops: f64,
    /// Multiprocessors or cores.
    pub units: usize,
    /// Memory that the driver context, modules and libraries take, bytes.
    pub context_bytes: usize,
    pub reached: Reached,
}

impl Machine {
    /// The CPU backend. `memory` bytes and `cores` are the caller's reading of the host. Rates of a core as
    /// measured on an AMD EPYC with avx512_bf16: products at 100 GFLOP/s in f32 and 170 in bf16, element-wise
    /// work at 5 GB/s.
    pub fn cpu(memory: usize, cores: usize) -> Self {
        let cores_at = |rate: f64| rate * cores as f64;
        Machine {
            name: "cpu".into(),
            arch: Arch::Cpu,
            memory,
            bandwidth: cores_at(5e9),
            link: Link { one_way: cores_at(5e9), both_ways: cores_at(5e9) },
            bf16_flops: cores_at(170e9),
            f32_flops: cores_at(100e9),
            units: cores,
            context_bytes: 0,
            reached: Reached::ALL,
        }
    }

    /// One NVIDIA H200 (SXM). Copy 4.27 TB/s; bf16 product of 8192³ 808 TFLOP/s while the card is cool, 665 where
    /// nothing else runs for minutes; page-locked host memory 55.5 GB/s each way; measured
    /// 2026-11-20 with driver 580.159 and CUDA 13.0.
    pub fn h200() -> Self {
        Machine {
            name: "h200".into(),
            arch: Arch::Cuda("sm_90a".into()),
            memory: 143_771 << 20,
            bandwidth: 4.27e12,
            link: Link { one_way: 55.5e9, both_ways: 102e9 },
            bf16_flops: 808e12,
            f32_flops: 50e12,
            units: 132,
            context_bytes: 600 << 20,
            reached: Reached::H200,
        }
    }

    /// A machine by the name that `--machine` takes.
    pub fn named(name: &str) -> Option<Self> {
        match name {
            "h200" => Some(Self::h200()),
            _ => None,
        }
    }
}
