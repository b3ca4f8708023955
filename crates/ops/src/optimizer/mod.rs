//! The update: gradient norm, clipping, and the optimizers. Parameters, gradients and states are flat and updated in
//! place.

mod adamw;
mod adamw_8bit;
mod compressed;
mod dynamic_map;
mod even_bias;
mod gradient_scale;
mod loss_scale;
mod momentum;
mod newton_schulz;
mod normuon;
mod pieces;
mod rule;
mod squares;

pub use adamw::AdamW;
pub use adamw_8bit::AdamW8bit;
pub use compressed::{BLOCK as COMPRESSED_BLOCK, Blocks, Compress, SumCompressed};
pub use dynamic_map::{DynamicMap, dynamic_map};
pub use even_bias::EvenBias;
pub use gradient_scale::GradientScale;
pub use loss_scale::NextLossScale;
pub use momentum::{Momentum, MomentumPart};
pub use newton_schulz::{NewtonSchulzPolynomial, UnitMatrices};
pub use normuon::NorMuon;
pub use pieces::{MaxPieces, SumPieces};
pub use rule::START;
pub use squares::{BlockSquares, TotalSquares, block_count, blocks_of};
