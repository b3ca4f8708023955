//! The processor's vector instructions, detected once. Does not know who uses them.

use std::sync::LazyLock;

/// Sets of instructions, each with all before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// Instructions of every processor of the architecture.
    Base,
    /// The AVX2 and FMA instructions.
    Avx2,
    /// AVX-512 F, BW, DQ, VL.
    Avx512,
    /// AVX-512 with products of bf16.
    Avx512Bf16,
}

impl Level {
    /// The name under which processors are described.
    pub fn name(self) -> &'static str {
        match self {
            Level::Base => "the base set of instructions",
            Level::Avx2 => "AVX2",
            Level::Avx512 => "AVX-512",
            Level::Avx512Bf16 => "AVX-512 with bf16",
        }
    }
}

static LEVEL: LazyLock<Level> = LazyLock::new(Level::ask);

impl Level {
    /// Returns the level of this processor.
    pub fn here() -> Level {
        *LEVEL
    }

    #[cfg(target_arch = "x86_64")]
    fn ask() -> Level {
        let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
        let avx512 = avx2
            && is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl");
        match (avx2, avx512, is_x86_feature_detected!("avx512bf16")) {
            (_, true, true) => Level::Avx512Bf16,
            (_, true, false) => Level::Avx512,
            (true, false, _) => Level::Avx2,
            _ => Level::Base,
        }
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn ask() -> Level {
        Level::Base
    }
}
