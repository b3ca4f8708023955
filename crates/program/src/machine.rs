//! The properties of a machine that plans depend on, as a value: a program for a GPU is compiled, planned and costed
//! where there is none.

use crate::efficiency::Efficiency;
use crate::target::Arch;

/// Rates of the link between device and host memory, bytes per second.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Link {
    pub one_way: f64,
    /// The sum of both directions at the same time.
    pub both_ways: f64,
}

/// The origin of a machine's rates.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// Measured on this very device, at that date.
    Calibrated { date: String },
    /// Measured on another device of the same kind.
    Kind,
    /// Ceilings of the maker's data sheet, shares of them as measured on an H200.
    DataSheet,
    /// Measured on another machine altogether, a CPU.
    Other,
}

impl Origin {
    /// The origin as words for people.
    pub fn words(&self) -> String {
        match self {
            Origin::Calibrated { date } => format!("from rates measured on this device, {date}"),
            Origin::Kind => "from rates measured on another device of this kind".to_owned(),
            Origin::DataSheet => {
                "from the data sheet and shares of it as measured on an H200: a guide, no promise".to_owned()
            }
            Origin::Other => "by the rates of another CPU".to_owned(),
        }
    }

    /// True if the ceilings are this machine's, so that a comparison with them is meaningful.
    pub fn has_ceilings(&self) -> bool {
        *self != Origin::Other
    }

    /// Returns a sentence for people about rates of another device, `None` where there are none.
    pub fn borrowed(&self) -> Option<&'static str> {
        match self {
            Origin::Calibrated { .. } => None,
            Origin::Kind => Some("expected times rest on rates of another device of this kind"),
            Origin::DataSheet => Some("expected times rest on the data sheet and on shares of it that an H200 reaches"),
            Origin::Other => Some("expected times rest on rates of another CPU"),
        }
    }
}

/// Products of eight-bit operands against bf16 on an H200, 8192³: 1,382 of 808 TFLOP/s.
pub const FP8: f64 = 1382.0 / 808.0;

/// One device. Rates are ceilings; `origin` says where they come from.
#[derive(Clone, Debug, PartialEq)]
pub struct Machine {
    pub name: String,
    pub arch: Arch,
    /// Size of the device memory in bytes.
    pub memory: usize,
    /// Copy bandwidth (read + write), bytes per second.
    pub bandwidth: f64,
    /// Copies between device and page-locked host memory: one way, and both at once together, bytes per second.
    pub link: Link,
    /// Dense bf16 matrix rate, FLOP/s: the best large product.
    pub bf16_flops: f64,
    /// The same of products of eight-bit operands.
    pub fp8_flops: f64,
    /// The same of four-bit operands with scales of blocks; bf16's where there are no units for them.
    pub fp4_flops: f64,
    /// Rate of f32 products, FLOP/s.
    pub f32_flops: f64,
    /// Number of multiprocessors or cores.
    pub units: usize,
    /// Memory of the driver context, modules and libraries, bytes.
    pub context_bytes: usize,
    pub efficiency: Efficiency,
    pub origin: Origin,
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
            // Quantized factors are multiplied as the f32 numbers that they stand for.
            fp8_flops: cores_at(100e9),
            fp4_flops: cores_at(100e9),
            f32_flops: cores_at(100e9),
            units: cores,
            context_bytes: 0,
            efficiency: Efficiency::ALL,
            origin: Origin::Other,
        }
    }
}
