//! Matrix products, and the column sums of bias gradients. All axes except the last are folded into rows.

mod batched;
mod cpu;
mod dropout_linear;
mod linear;
mod low_rank;
mod product;
mod sum;
mod sum_rows;

pub use batched::BatchedMatmul;
pub use dropout_linear::{DropoutLinear, DropoutLinearBackward, dropout_linear_fits};
pub use linear::Linear;
pub use low_rank::{LowRankBackward, MOST_RANK};
pub use product::Matmul;
pub use sum::MatmulSum;
pub use sum_rows::SumRows;
