//! The backend's own device code: layout changes and document offsets. Operations' kernels come with
//! the program; these realise instructions that carry no kernel.

use crate::nvrtc::KernelSource;

const NUMBER: (&str, &str) = ("number.cuh", include_str!("number.cuh"));

/// One of the backend's translation units with the definitions that it is compiled under.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct OwnKernel {
    name: &'static str,
    text: &'static str,
    headers: &'static [(&'static str, &'static str)],
    options: Vec<String>,
}

impl OwnKernel {
    fn new(
        name: &'static str,
        text: &'static str,
        headers: &'static [(&'static str, &'static str)],
        defines: &[(&str, String)],
    ) -> OwnKernel {
        OwnKernel { name, text, headers, options: defines.iter().map(|(n, v)| format!("-D{n}={v}")).collect() }
    }

    pub fn source(&self) -> KernelSource<'_> {
        KernelSource { name: self.name, text: self.text, headers: self.headers, options: &self.options }
    }
}

/// Storage types of `strided.cu`, as C++ spells them.
pub fn strided(from: &'static str, to: &'static str) -> OwnKernel {
    let defines = [("FROM", from.to_owned()), ("TO", to.to_owned())];
    OwnKernel::new("strided.cu", include_str!("strided.cu"), &[NUMBER], &defines)
}

/// `rows` rows of `length` tokens, at most `slots` documents of at most `longest` tokens, offsets in
/// `units` different units.
pub fn documents(rows: usize, length: usize, slots: usize, longest: usize, units: usize) -> OwnKernel {
    let defines = [("ROWS", rows), ("LENGTH", length), ("SLOTS", slots), ("LONGEST", longest), ("UNITS", units)];
    let defines = defines.map(|(name, value)| (name, value.to_string()));
    OwnKernel::new("documents.cu", include_str!("documents.cu"), &[], &defines)
}

/// Every translation unit in a few typical variants: what a build without a GPU compiles.
pub fn samples() -> Vec<OwnKernel> {
    let mut kernels = vec![documents(2, 64, 16, 40, 3)];
    for (from, to) in [("float", "bf16"), ("bf16", "float"), ("f16", "float"), ("bf16", "bf16"), ("int", "int")] {
        kernels.push(strided(from, to));
    }
    kernels
}
