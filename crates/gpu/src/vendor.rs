//! The makers of GPUs. What differs between their interfaces besides names of functions is asked by this value; tables of
//! functions carry it.

use std::fmt;

/// A maker of GPUs, with the interface that its driver has: CUDA or HIP.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Vendor {
    #[default]
    Nvidia,
    Amd,
}

impl Vendor {
    /// In the order in which an open choice of the device tries them.
    pub const ALL: [Vendor; 2] = [Vendor::Nvidia, Vendor::Amd];

    /// The value of `device` that asks for it.
    pub const fn device(self) -> &'static str {
        match self {
            Vendor::Nvidia => "cuda",
            Vendor::Amd => "rocm",
        }
    }

    /// The library of matrix products in words.
    pub const fn products(self) -> &'static str {
        match self {
            Vendor::Nvidia => "cuBLASLt",
            Vendor::Amd => "hipBLASLt",
        }
    }
}

impl fmt::Display for Vendor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Vendor::Nvidia => "NVIDIA",
            Vendor::Amd => "AMD",
        })
    }
}
