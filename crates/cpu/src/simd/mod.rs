//! Everything that knows what instructions the processor has. Above this folder a product of matrices, a
//! packed panel or a loop is the same on every machine; below it is `unsafe`, bound to slices here.
//!
//! Which instructions there are decides low bits (stated at each function), the number of threads never.

mod level;
mod matrix;
mod panels;
mod product;
mod tile;

pub use level::Level;
pub use matrix::{Matrix, MatrixMut};
pub use panels::{Unit, pack, units_of};
pub use product::product;
pub use tile::{HEIGHT, Tile, Tiles, WIDTH};
