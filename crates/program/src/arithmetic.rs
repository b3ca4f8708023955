//! The arithmetic of an operation, as far as its time follows from it.

use crate::efficiency::Realisation;

/// The arithmetic of an operation's kernels, as the operation declares it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Arithmetic {
    /// Passes, and products where they have many FLOPs for a byte, in the type of the first operand.
    #[default]
    OfOperands,
    /// The same in f32, whatever type the operands have.
    Single,
    /// Products with a matrix for each group of rows; `gradient`: of the matrices, which sums over rows. The second
    /// operand has the matrices or the gradients, the third the groups' offsets, which the device alone knows.
    Grouped { gradient: bool, by: Realisation },
    /// Attention, whose first operands are queries [B, T, heads, D] and keys.
    Attention { backward: bool, by: Realisation },
}
