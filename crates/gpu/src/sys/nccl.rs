//! NCCL (`libnccl.so.2`): communicators, and what they move. No policy.

use super::function_table;
use std::ffi::{c_char, c_int, c_uint, c_void};

pub type Status = u32;
pub type Comm = *mut c_void;
pub type Stream = *mut c_void;

pub const SUCCESS: Status = 0;
pub const IN_PROGRESS: Status = 7;

/// The data type `ncclUint8` of all collectives.
pub const BYTES: u32 = 1;

/// `ncclUniqueId`, which is passed by value.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct UniqueId(pub [u8; UniqueId::BYTES]);

impl UniqueId {
    pub const BYTES: usize = 128;
}

/// `ncclConfig_t` as of 2.18: later versions take the sizes and versions of earlier ones.
#[repr(C)]
pub struct Config {
    pub size: usize,
    pub magic: c_uint,
    pub version: c_uint,
    pub blocking: c_int,
    pub cluster_size: c_int,
    pub least_blocks: c_int,
    pub most_blocks: c_int,
    pub network: *const c_char,
    pub split_share: c_int,
}

impl Config {
    const MAGIC: c_uint = 0xcafe_beef;
    const VERSION: c_uint = 21_800;
    /// The value that leaves a setting to the library.
    const UNSET: c_int = c_int::MIN;

    /// Calls return before they are done, so that each can be given up.
    pub const fn without_blocking() -> Config {
        Config {
            size: size_of::<Config>(),
            magic: Config::MAGIC,
            version: Config::VERSION,
            blocking: 0,
            cluster_size: Config::UNSET,
            least_blocks: Config::UNSET,
            most_blocks: Config::UNSET,
            network: std::ptr::null(),
            split_share: Config::UNSET,
        }
    }
}

function_table! {
    /// Entry points of the library `libnccl`.
    NcclTable:
    ncclGetVersion(*mut c_int) -> Status;
    ncclGetUniqueId(*mut UniqueId) -> Status;
    ncclCommInitRankConfig(*mut Comm, c_int, UniqueId, c_int, *mut Config) -> Status;
    ncclCommGetAsyncError(Comm, *mut Status) -> Status;
    ncclCommFinalize(Comm) -> Status;
    ncclCommDestroy(Comm) -> Status;
    ncclCommAbort(Comm) -> Status;
    ncclGetErrorString(Status) -> *const c_char;
    ncclGetLastError(Comm) -> *const c_char;
    ncclGroupStart() -> Status;
    ncclGroupEnd() -> Status;
    ncclAllGather(*const c_void, *mut c_void, usize, u32, Comm, Stream) -> Status;
    ncclSend(*const c_void, usize, u32, c_int, Comm, Stream) -> Status;
    ncclRecv(*mut c_void, usize, u32, c_int, Comm, Stream) -> Status;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_configuration_has_the_layout_of_the_header() {
        assert_eq!((size_of::<Config>(), std::mem::offset_of!(Config, network)), (48, 32));
        assert_eq!(std::mem::offset_of!(Config, split_share), 40);
        assert_eq!((size_of::<UniqueId>(), align_of::<UniqueId>()), (128, 1));
    }
}
