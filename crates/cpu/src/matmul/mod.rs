//! The Gemm instruction. There are two implementations: tiles of packed panels, if the processor has the instructions
//! and both operands have the same type, and strips with the `gemm` crate otherwise. Loading decides. Products of a
//! batch run one after the other.

mod strips;
mod tiles;

use program::{Gemm, TensorRef};

use crate::arena::Memory;
use crate::scratch::Scratch;

/// A product that is ready to run.
pub enum GemmPlan {
    Strips(strips::StripGemm),
    Tiles(tiles::TiledGemm),
    Batch(Vec<GemmPlan>),
}

/// One product of a batch.
fn product_of(gemm: &Gemm, index: usize) -> Result<Gemm, String> {
    let part = |at: &TensorRef| {
        if at.shape.len() != 3 || at.shape[0] != gemm.batch {
            return Err(format!("{at} is no batch of {} matrices", gemm.batch));
        }
        let offset = at.offset + index * at.strides[0] * at.dtype.size();
        Ok(TensorRef { offset, shape: at.shape[1..].to_vec(), strides: at.strides[1..].to_vec(), ..at.clone() })
    };
    Ok(Gemm { batch: 1, a: part(&gemm.a)?, b: part(&gemm.b)?, d: part(&gemm.d)?, ..gemm.clone() })
}

impl GemmPlan {
    pub fn new(gemm: &Gemm) -> Result<GemmPlan, String> {
        if gemm.batch != 1 {
            let products = (0..gemm.batch).map(|index| GemmPlan::new(&product_of(gemm, index)?));
            return products.collect::<Result<_, _>>().map(GemmPlan::Batch);
        }
        let strips = strips::StripGemm::new(gemm)?;
        Ok(match tiles::TiledGemm::new(gemm) {
            Some(tiles) => GemmPlan::Tiles(tiles),
            None => GemmPlan::Strips(strips),
        })
    }

    /// Makes room for copies of operands.
    pub fn reserve(&self, scratch: &mut Scratch) {
        match self {
            GemmPlan::Strips(strips) => strips.reserve(scratch),
            GemmPlan::Tiles(tiles) => tiles.reserve(scratch),
            GemmPlan::Batch(products) => products.iter().for_each(|product| product.reserve(scratch)),
        }
    }

    pub fn run(&self, memory: &mut Memory, scratch: &mut Scratch) {
        match self {
            GemmPlan::Strips(strips) => strips.run(memory, scratch),
            GemmPlan::Tiles(tiles) => tiles.run(memory, scratch),
            GemmPlan::Batch(products) => products.iter().for_each(|product| product.run(memory, scratch)),
        }
    }
}
