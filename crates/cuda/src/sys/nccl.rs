//! NCCL (`libnccl.so.2`): its version. No communicator is made yet.

use super::function_table;
use std::ffi::c_int;

pub type Status = u32;

pub const SUCCESS: Status = 0;

function_table! {
    /// Entry points of `libnccl`.
    NcclTable:
    ncclGetVersion(*mut c_int) -> Status;
}
