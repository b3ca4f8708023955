//! The safetensors format: an 8-byte length, a JSON header, then the tensors' bytes.
//!
//! Own code, because the format is a page long and our errors name the tensor. Knows no model and no parameter names.

mod file;
mod placed;
mod read;
mod stacks;
mod swapped;
mod write;

pub(crate) use file::Raw;
pub use file::SafeTensors;
pub use placed::{PlacedWriter, RawTensor};
pub use read::{TensorView, Weights};
pub use stacks::Stack;
pub use swapped::exchange;
pub use write::{FolderWriter, NamedTensor, TensorInfo, write, write_folder};

use tensor::DType;

/// The header's spelling of an element type.
pub const fn header_name(dtype: DType) -> &'static str {
    match dtype {
        DType::F64 => "F64",
        DType::F32 => "F32",
        DType::BF16 => "BF16",
        DType::F16 => "F16",
        DType::I64 => "I64",
        DType::I32 => "I32",
        DType::U8 => "U8",
        DType::E4M3 => "F8_E4M3",
        DType::E5M2 => "F8_E5M2",
    }
}
