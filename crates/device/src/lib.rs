//! CUDA headers that kernels of operations and of the backend share: (name in `#include`, text). No Rust code.

/// A header as kernels are compiled with it.
pub type Header = (&'static str, &'static str);

/// Instructions that CUDA C++ has no function for: what every kernel may include, as each vendor's compiler gives it. No kernel
/// names it among its headers.
pub const INTRINSICS: Header = ("intrinsics.cuh", include_str!("intrinsics_nvidia.cuh"));

/// `INTRINSICS` of AMD GPUs.
pub const INTRINSICS_AMD: Header = ("intrinsics.cuh", include_str!("intrinsics_amd.cuh"));

/// Functions of CUDA C++ that HIP has otherwise or lacks: before every text that is compiled for AMD GPUs.
pub const LANGUAGE_AMD: Header = ("language.cuh", include_str!("language_amd.cuh"));

/// Barriers in shared memory, clusters of two blocks, the copy engine. sm_90 and later.
pub const HANDOFF: Header = ("handoff.cuh", include_str!("handoff.cuh"));

/// Asynchronous products of a warpgroup. sm_90a only.
pub const WGMMA: Header = ("wgmma.cuh", include_str!("wgmma.cuh"));

/// Programmatic dependent launch: a kernel that is compiled with it calls `grid_dependency_synchronize()`.
pub const DEPENDENT_LAUNCH: Header = ("dependent_launch.cuh", include_str!("dependent_launch.cuh"));
