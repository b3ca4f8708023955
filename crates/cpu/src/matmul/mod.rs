//! The Gemm instruction. Two ways to compute it: tiles from packed panels, where the processor has the
//! instructions and both operands have one type; strips through the `gemm` crate everywhere else. Which
//! one is decided when the program is loaded.

mod strips;
mod tiles;

use program::Gemm;

use crate::arena::Memory;
use crate::scratch::Scratch;

/// A product that is ready to run.
pub enum Prepared {
    Strips(strips::Prepared),
    Tiles(tiles::Prepared),
}

impl Prepared {
    pub fn new(gemm: &Gemm) -> Result<Prepared, String> {
        let strips = strips::Prepared::new(gemm)?;
        Ok(match tiles::Prepared::new(gemm) {
            Some(tiles) => Prepared::Tiles(tiles),
            None => Prepared::Strips(strips),
        })
    }

    /// Makes room for copies of operands.
    pub fn reserve(&self, scratch: &mut Scratch) {
        match self {
            Prepared::Strips(strips) => strips.reserve(scratch),
            Prepared::Tiles(tiles) => tiles.reserve(scratch),
        }
    }

    pub fn run(&self, memory: &mut Memory, scratch: &mut Scratch) {
        match self {
            Prepared::Strips(strips) => strips.run(memory, scratch),
            Prepared::Tiles(tiles) => tiles.run(memory, scratch),
        }
    }
}
