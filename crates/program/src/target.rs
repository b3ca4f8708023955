//! The target of a program's kernels with the abilities that choices between them depend on. Operations ask for an
//! ability, never for a vendor.

use std::fmt;
use std::str::FromStr;

use crate::architecture::Architecture;
use crate::gfx::Gfx;

/// The instruction set that kernels are written for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Arch {
    Cpu,
    Cuda(Architecture),
    Rocm(Gfx),
}

/// The codes of eight bits that matrix units multiply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Codes {
    /// The codes of the Open Compute Project, as memory holds them.
    Ocp,
    /// Finite ones with another bias (FNUZ): codes in memory are half of their value, and 0x80 is NaN.
    Fnuz,
}

/// Bytes of shared memory that barriers of some warps take on AMD GPUs, rounded up.
const BARRIERS: usize = 256;

impl Arch {
    /// True if programs are lowered to kernels.
    pub const fn is_gpu(self) -> bool {
        !matches!(self, Arch::Cpu)
    }

    /// True if kernels may use the instructions that Hopper alone has: products of warp groups, clusters of blocks and the
    /// copy engine, as its kernels use them.
    pub fn is_hopper(self) -> bool {
        self == Arch::Cuda(Architecture::HOPPER)
    }

    /// Threads of a wave, which run together: 64 where a warp of kernels is one half of a wave. 1 on a CPU.
    pub const fn wave(self) -> usize {
        match self {
            Arch::Cpu => 1,
            Arch::Cuda(_) => 32,
            Arch::Rocm(of) => {
                if of.major == 9 {
                    64
                } else {
                    32
                }
            }
        }
    }

    /// Dynamic shared memory that a block may have, bytes, besides that of barriers (`intrinsics_amd.cuh`); nearly 64 KiB is the
    /// least of all GPUs. 0 on a CPU.
    pub const fn shared_per_block(self) -> usize {
        match self {
            Arch::Cpu => 0,
            Arch::Cuda(of) => of.shared_per_block(),
            Arch::Rocm(Gfx { major: 9, minor: 5, .. }) => (160 << 10) - BARRIERS,
            Arch::Rocm(_) => (64 << 10) - BARRIERS,
        }
    }

    /// True if a kernel may start before the one that it follows has ended (`dependent_launch.cuh`).
    pub fn starts_early(self) -> bool {
        matches!(self, Arch::Cuda(of) if of >= Architecture::HOPPER)
    }

    /// Returns the codes of eight bits that the library multiplies on matrix units; `None` where there are no such units.
    pub fn codes(self) -> Option<Codes> {
        match self {
            Arch::Cpu => None,
            Arch::Cuda(of) => (of >= Architecture::ADA).then_some(Codes::Ocp),
            Arch::Rocm(Gfx::CDNA3) => Some(Codes::Fnuz),
            Arch::Rocm(of) => (of == Gfx::CDNA4 || of.major == 12).then_some(Codes::Ocp),
        }
    }

    /// True if matrix units multiply elements of four bits with scales of blocks, as `nvfp4` has them.
    pub fn has_four_bits(self) -> bool {
        matches!(self, Arch::Cuda(of) if of >= Architecture::BLACKWELL)
    }

    /// The value of `device` that asks for this backend.
    pub const fn device(self) -> &'static str {
        match self {
            Arch::Cpu => "cpu",
            Arch::Cuda(_) => "cuda",
            Arch::Rocm(_) => "rocm",
        }
    }
}

impl fmt::Display for Arch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Arch::Cpu => f.write_str("cpu"),
            Arch::Cuda(architecture) => architecture.fmt(f),
            Arch::Rocm(gfx) => gfx.fmt(f),
        }
    }
}

impl FromStr for Arch {
    type Err = String;

    /// Reads what [`fmt::Display`] writes.
    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "cpu" => Ok(Arch::Cpu),
            _ if text.starts_with("gfx") => text.parse().map(Arch::Rocm).map_err(|expected| format!("{expected}")),
            _ => text.parse().map(Arch::Cuda).map_err(|expected| format!("{expected}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn abilities_follow_from_the_target() {
        let of = |name: &str| name.parse::<Arch>().unwrap();
        let all = ["sm_80", "sm_89", "sm_90a", "sm_100a", "gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201"].map(of);
        use Codes::{Fnuz, Ocp};
        let codes = [None, Some(Ocp), Some(Ocp), Some(Ocp), None, Some(Fnuz), Some(Ocp), None, Some(Ocp)];
        assert_eq!(all.map(Arch::codes), codes);
        assert_eq!(all.map(Arch::wave), [32, 32, 32, 32, 64, 64, 64, 32, 32]);
        assert_eq!(all.map(|arch| arch.shared_per_block() >> 10), [163, 99, 227, 227, 63, 63, 159, 63, 63]);
        assert_eq!(all.map(Arch::has_four_bits), [false, false, false, true, false, false, false, false, false]);
        assert_eq!(all.map(Arch::starts_early), [false, false, true, true, false, false, false, false, false]);
        assert!(all.iter().all(|arch| arch.is_gpu() && arch.to_string().parse() == Ok(*arch)));
        assert_eq!(("cpu".parse(), Arch::Cpu.shared_per_block()), (Ok(Arch::Cpu), 0));
        assert!("sm_75".parse::<Arch>().is_err() && "gfx1030".parse::<Arch>().unwrap_err().contains("gfx942"));
    }
}
