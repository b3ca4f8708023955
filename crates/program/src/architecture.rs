//! Architectures of NVIDIA's GPUs, as values that are compared; text only where NVRTC and files have it. What plans ask of
//! any GPU is in `target.rs`; amounts (memory, multiprocessors) belong to the machine.

use std::fmt;
use std::str::FromStr;

/// A compute capability, which is also the target of NVRTC. Later ones are greater.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Architecture {
    pub major: u32,
    pub minor: u32,
}

impl Architecture {
    /// The oldest architecture that kernels are written for.
    pub const OLDEST: Architecture = Architecture { major: 8, minor: 0 };

    /// The oldest architecture whose tensor cores multiply codes of eight bits.
    pub const ADA: Architecture = Architecture { major: 8, minor: 9 };

    /// The architecture with matrix products of warp groups (`wgmma`), which no later one has.
    pub const HOPPER: Architecture = Architecture { major: 9, minor: 0 };

    /// The oldest architecture whose tensor cores multiply four-bit elements.
    pub const BLACKWELL: Architecture = Architecture { major: 10, minor: 0 };

    /// True for Hopper and later architectures of data centers: large shared memory, and a library made for it.
    pub const fn is_large(self) -> bool {
        matches!(self.major, 9 | 10)
    }

    /// Dynamic shared memory that a block may have, bytes.
    pub const fn shared_per_block(self) -> usize {
        match (self.major, self.minor) {
            (8, 0 | 7) => 163 << 10,
            _ if self.is_large() => 227 << 10,
            _ => 99 << 10,
        }
    }

    /// The name without architecture-specific instructions: PTX that the driver translates for later GPUs.
    pub fn virtual_target(self) -> String {
        format!("compute_{}{}", self.major, self.minor)
    }
}

/// The real architecture with its own instructions where there are any: `sm_80`, `sm_90a`, `sm_103a`.
impl fmt::Display for Architecture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sm_{}{}{}", self.major, self.minor, if self.major >= 9 { "a" } else { "" })
    }
}

/// The error of a text that names no architecture, or one that is older than those that kernels are written for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownArchitecture;

impl fmt::Display for UnknownArchitecture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "expected an architecture from {} on, such as {}", Architecture::OLDEST, Architecture::OLDEST)
    }
}

impl FromStr for Architecture {
    type Err = UnknownArchitecture;

    /// `sm_90` and `sm_90a` are the same.
    fn from_str(text: &str) -> Result<Self, UnknownArchitecture> {
        let digits = text.strip_prefix("sm_").map(|rest| rest.strip_suffix('a').unwrap_or(rest)).unwrap_or_default();
        let number = digits.parse::<u32>().ok().filter(|_| digits.bytes().all(|b| b.is_ascii_digit()));
        let found = number.map(|n| Architecture { major: n / 10, minor: n % 10 });
        found.filter(|found| *found >= Architecture::OLDEST).ok_or(UnknownArchitecture)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_carry_the_architecture_specific_suffix_from_hopper_on() {
        for (major, minor, target) in
            [(8, 0, "sm_80"), (8, 9, "sm_89"), (9, 0, "sm_90a"), (10, 3, "sm_103a"), (12, 0, "sm_120a")]
        {
            let architecture = Architecture { major, minor };
            assert_eq!(architecture.to_string(), target);
            assert_eq!(target.parse(), Ok(architecture));
        }
        for wrong in ["80", "sm_75", "sm_", "ampere", "sm_8x", "sm_+80", "cpu", ""] {
            assert!(wrong.parse::<Architecture>().is_err(), "{wrong}");
        }
    }

    /// Compares by number: as text sm_100a is less than sm_90a, and sm_120a begins like sm_12.
    #[test]
    fn later_architectures_are_greater() {
        let all = ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_120a"];
        let all = all.map(|text| text.parse::<Architecture>().unwrap());
        assert!(all.is_sorted());
        assert_eq!(all.map(|of| of.is_large()), [false, false, false, true, true, true, false]);
        assert_eq!(all.map(|of| of.shared_per_block() >> 10), [163, 99, 99, 227, 227, 227, 99]);
    }
}
