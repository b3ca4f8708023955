//! Images: from the bytes of a file to pixels, and to the patches that a model's tower reads.
//!
//! Decoding is a library's; sizes, resampling and layouts are those of the model's own processor. Knows no rows, no tokens
//! and no architecture.

mod decode;
mod processor;
mod resize;
mod sizes;
mod thumbnail;

pub use decode::{Limits, Pixels, decode, png, size};
pub use processor::{Kind, PixelLimits, Prepared, Processor};
pub use resize::Filter;
pub use thumbnail::{jpeg, within};
