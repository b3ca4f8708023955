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

/// One device. Rates are measured ceilings, not data-sheet values; see `spec` of each constructor.
#[derive(Clone, Debug, PartialEq)]
pub struct Machine {
    pub name: String,
    pub arch: Arch,
    /// Device memory, bytes.
    pub memory: usize,
    /// Copy bandwidth (read + write), bytes per second.
    pub bandwidth: f64,
    /// Dense bf16 matrix rate, FLOP/s.
    pub bf16_flops: f64,
    /// f32 matrix rate, FLOP/s.
    pub f32_flops: f64,
    /// Multiprocessors or cores.
    pub units: usize,
    /// Memory that the driver context, modules and libraries take, bytes.
    pub context_bytes: usize,
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
            bf16_flops: cores_at(170e9),
            f32_flops: cores_at(100e9),
            units: cores,
            context_bytes: 0,
        }
    }

    /// One NVIDIA H200 (SXM). Copy 4.27 TB/s, bf16 GEMM 665 TFLOP/s sustained, measured 2026-11-20
    /// with driver 580.159 and CUDA 13.0.
    pub fn h200() -> Self {
        Machine {
            name: "h200".into(),
            arch: Arch::Cuda("sm_90a".into()),
            memory: 143_771 << 20,
            bandwidth: 4.27e12,
            bf16_flops: 665e12,
            f32_flops: 50e12,
            units: 132,
            context_bytes: 600 << 20,
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
