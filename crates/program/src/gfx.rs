//! Architectures of AMD's GPUs: the names that LLVM has for them, as values.

use std::fmt;
use std::str::FromStr;

/// An instruction set such as gfx942: major 9, minor 4, stepping 2. The last two are one hexadecimal digit each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Gfx {
    pub major: u32,
    pub minor: u32,
    pub stepping: u32,
}

impl Gfx {
    /// CDNA 2, 3 and 4, which have waves of 64 threads: MI200, MI300, MI350.
    pub const CDNA2: Gfx = Gfx { major: 9, minor: 0, stepping: 10 };
    pub const CDNA3: Gfx = Gfx { major: 9, minor: 4, stepping: 2 };
    pub const CDNA4: Gfx = Gfx { major: 9, minor: 5, stepping: 0 };

    /// True if kernels are written for it: CDNA 2 to 4, RDNA 3 and RDNA 4.
    const fn is_known(self) -> bool {
        match self.major {
            9 => matches!((self.minor, self.stepping), (0, 10) | (4, 2) | (5, 0)),
            11 => matches!(self.minor, 0 | 5),
            12 => self.minor == 0,
            _ => false,
        }
    }
}

impl fmt::Display for Gfx {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "gfx{}{:x}{:x}", self.major, self.minor, self.stepping)
    }
}

/// The error of a text that names no AMD GPU that kernels are written for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownGfx;

impl fmt::Display for UnknownGfx {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("expected gfx90a, gfx942, gfx950, or one of RDNA 3 and 4, such as gfx1100 and gfx1201")
    }
}

impl FromStr for Gfx {
    type Err = UnknownGfx;

    /// Takes the name with its features, too, as HIP reports it: `gfx942:sramecc+:xnack-`.
    fn from_str(text: &str) -> Result<Self, UnknownGfx> {
        let name = text.split(':').next().unwrap_or_default();
        let digits = name.strip_prefix("gfx").filter(|of| of.is_ascii() && of.len() >= 3).ok_or(UnknownGfx)?;
        let (major, rest) = digits.split_at(digits.len() - 2);
        let plain = major.bytes().all(|b| b.is_ascii_digit());
        let digit = |at: usize| rest[at..=at].chars().next().and_then(|c| c.to_digit(16));
        let found = || Some(Gfx { major: major.parse().ok()?, minor: digit(0)?, stepping: digit(1)? });
        found().filter(|found| plain && found.is_known()).ok_or(UnknownGfx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_llvm() {
        for (name, numbers) in [
            ("gfx90a", (9, 0, 10)),
            ("gfx942", (9, 4, 2)),
            ("gfx950", (9, 5, 0)),
            ("gfx1100", (11, 0, 0)),
            ("gfx1151", (11, 5, 1)),
            ("gfx1201", (12, 0, 1)),
        ] {
            let found: Gfx = name.parse().unwrap();
            assert_eq!((found.major, found.minor, found.stepping), numbers);
            assert_eq!(found.to_string(), name);
        }
        assert_eq!("gfx942:sramecc+:xnack-".parse(), Ok(Gfx::CDNA3));
        for wrong in ["gfx906", "gfx908", "gfx1030", "gfx1250", "gfx", "gfx9", "942", "sm_90", "gfx+42", "gfxé42", ""]
        {
            assert!(wrong.parse::<Gfx>().is_err(), "{wrong}");
        }
    }
}
