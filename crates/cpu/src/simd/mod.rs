//! Everything that depends on the processor's instruction set. Above this folder, products, packed panels and loops are
//! the same on every machine. `unsafe` code is confined here and works on slices.
//!
//! The instruction set may change low bits (documented at each function); the number of threads never does.

mod level;
mod matrix;
mod panels;
pub mod parts;
mod product;
mod tile;

pub use level::Level;
pub use matrix::{Matrix, MatrixMut};
pub use panels::{Unit, pack, units_of};
pub use product::product;
pub use tile::{CHAIN, HEIGHT, Tile, Tiles, WIDTH};
