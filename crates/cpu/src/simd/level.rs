//! What the processor can do, asked once, and loops compiled for each answer. Does not know what the
//! loops compute.
#![allow(unsafe_code, reason = "calls of functions whose instructions were found on the processor")]

use std::sync::LazyLock;

/// Sets of instructions, each with all before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// What every processor of the architecture has.
    Base,
    /// AVX2 and FMA.
    Avx2,
    /// AVX-512 F, BW, DQ, VL.
    Avx512,
    /// AVX-512 with products of bf16.
    Avx512Bf16,
}

static LEVEL: LazyLock<Level> = LazyLock::new(Level::ask);

impl Level {
    /// What this processor has.
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

/// A loop for [`vectorised`]. `run` and what it calls must be `#[inline(always)]`, so that it is compiled
/// with the caller's instructions.
///
/// The arithmetic is as written on every processor: `mul_add` is one rounding everywhere, and nothing is
/// reordered. So the bits do not depend on the level.
pub trait Vectorised {
    type Output;

    fn run(self) -> Self::Output;
}

/// Runs the version of a loop that is compiled for this processor.
pub fn vectorised<V: Vectorised>(task: V) -> V::Output {
    #[cfg(target_arch = "x86_64")]
    match Level::here() {
        // SAFETY: the level says that the processor has these instructions.
        Level::Avx512 | Level::Avx512Bf16 => return unsafe { avx512(task) },
        // SAFETY: as above.
        Level::Avx2 => return unsafe { avx2(task) },
        Level::Base => {}
    }
    task.run()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")]
fn avx512<V: Vectorised>(task: V) -> V::Output {
    task.run()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn avx2<V: Vectorised>(task: V) -> V::Output {
    task.run()
}
