//! CUDA headers that kernels of operations and of the backend share: (name in `#include`, text). No Rust code.

/// A header as kernels are compiled with it.
pub type Header = (&'static str, &'static str);

/// Barriers in shared memory, clusters of two blocks, the copy engine. sm_90 and later.
pub const HANDOFF: Header = ("handoff.cuh", include_str!("handoff.cuh"));

/// Asynchronous products of a warpgroup. sm_90a only.
pub const WGMMA: Header = ("wgmma.cuh", include_str!("wgmma.cuh"));

/// The order of kernels on a stream, kept by the kernel. A kernel that is compiled with it calls `follow()`.
pub const FOLLOW: Header = ("follow.cuh", include_str!("follow.cuh"));
