//! The GGUF format, version 3: one file with metadata, a table of tensors, and their aligned bytes. Our own code for
//! writing and reading back, because the format is a page long and our errors name the tensor.
//!
//! Knows value types, element blocks and which tensors want more bits; no model, and no meaning of any key.

mod blocks;
mod encoding;
mod mix;
mod mxfp4;
mod read;
mod super_blocks;
mod write;

pub use encoding::Encoding;
pub use mix::{Mix, Rules};
pub use read::GgufFile;
pub use write::{GgufTensor, GgufValue, GgufWriter};

pub(crate) const MAGIC: &[u8; 4] = b"GGUF";
pub(crate) const VERSION: u32 = 3;

/// Every tensor begins at a multiple of this, counted from the end of the table.
pub(crate) const ALIGNMENT: usize = 32;

/// The numbers by which the format calls the types of metadata.
pub(crate) mod kind {
    pub const U32: u32 = 4;
    pub const I32: u32 = 5;
    pub const F32: u32 = 6;
    pub const BOOL: u32 = 7;
    pub const TEXT: u32 = 8;
    pub const LIST: u32 = 9;
    pub const U64: u32 = 10;
}
