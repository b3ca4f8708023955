//! Products of few rows with the backend's own kernel: the products of a model that generates token after token.
//! Reading the second factor takes their time, and the library's kernels are made for tiles of many rows. Which
//! products it supports follows from the product alone.

use super::Preparation;
use super::launch::{Arguments, BoundLaunch};
use crate::driver::LaunchShape;
use crate::error::Result;
use crate::kernels::few_rows::{ACCESS, Addends, FewRows, Slice, name_of};
use program::{ArenaKind, Gemm, LowRank, TensorRef};

/// Maximal number of rows. Up to it every number of B is multiplied before the next comes from memory: the arithmetic
/// is not the tensor cores'. With 4 rows it reaches 2.4 TB/s on an H200, and the library is faster.
const MOST_ROWS: usize = 2;

/// Returns the call for a product; `None` where the kernel does not support it.
pub(super) fn call(p: &mut Preparation, gemm: &Gemm) -> Result<Option<BoundLaunch>> {
    let weight = matches!(p.memory.kinds[gemm.b.arena.0 as usize], ArenaKind::Weights | ArenaKind::Adapters);
    let Some(product) = product(gemm, weight) else { return Ok(None) };
    let units = p.engine.device.properties.multiprocessors as usize;
    let division = product.division(units);
    let function = p.engine.own_function(product.kernel(division), "few_rows")?;
    let operands = [&gemm.a, &gemm.b, &gemm.d].into_iter().chain(&gemm.bias);
    let factors = gemm.low_rank.iter().flat_map(|addend| [&addend.t, &addend.b]);
    let arguments =
        operands.chain(factors).fold(Arguments::new(), |arguments, at| arguments.word(p.memory.address(at)));
    let shape = LaunchShape {
        grid: [division.blocks(gemm.n) as u32, 1, 1],
        block: [FewRows::THREADS, 1, 1],
        shared_bytes: 0,
        early: p.early,
    };
    Ok(Some(BoundLaunch::new(function, "few_rows", shape, arguments)))
}

/// Returns a product as the kernel sees it, or `None`. `weight`: no kernel of an entry writes B.
fn product(gemm: &Gemm, weight: bool) -> Option<FewRows> {
    let few = gemm.m <= MOST_ROWS && gemm.n > 1 && gemm.batch == 1 && gemm.scales.is_none();
    if !few || gemm.transpose_a || !gemm.transpose_b {
        return None;
    }
    let operands = [&gemm.a, &gemm.b, &gemm.d];
    let types = operands.map(|at| at.dtype);
    let bias = gemm.bias.as_ref().map(|at| at.dtype);
    if types.into_iter().chain(bias).any(|of| name_of(of).is_none()) {
        return None;
    }
    let [Some(a), Some(b), Some(d)] = operands.map(|at| at.as_matrix().map(|(_, _, row)| row)) else { return None };
    let vector = [8, 4, 2, 1].into_iter().find(|n| {
        let aligned = |at: &TensorRef, row: usize| {
            let bytes = (n * at.dtype.size()).min(ACCESS);
            at.offset.is_multiple_of(bytes) && (row * at.dtype.size()).is_multiple_of(bytes)
        };
        n * gemm.b.dtype.size() <= ACCESS && gemm.k.is_multiple_of(*n) && aligned(&gemm.a, a) && aligned(&gemm.b, b)
    })?;
    let addends = match gemm.low_rank.as_slice() {
        [] => None,
        all => Some(addends(all)?),
    };
    Some(FewRows {
        rows: gemm.m,
        n: gemm.n,
        k: gemm.k,
        types,
        row: [a, b, d],
        vector,
        weight,
        scale: gemm.scale,
        accumulate: gemm.accumulate,
        bias,
        addends,
    })
}

/// Returns the addends as one; `None` where they differ in more than their sizes.
fn addends(all: &[LowRank]) -> Option<Addends> {
    let first = &all[0];
    let kind = |a: &LowRank| (a.t.dtype, a.b.dtype, a.transpose_b, a.scale.to_bits());
    let known = name_of(first.t.dtype).is_some() && name_of(first.b.dtype).is_some();
    if !known || all.iter().any(|a| kind(a) != kind(first)) {
        return None;
    }
    let slice = |a: &LowRank| {
        let ((_, rank, t_row), (_, _, b_row)) = (a.t.as_matrix()?, a.b.as_matrix()?);
        Some(Slice { columns: a.columns, rank, rows: [t_row, b_row] })
    };
    let slices = all.iter().map(slice).collect::<Option<Vec<_>>>()?;
    let types = [first.t.dtype, first.b.dtype];
    Some(Addends { types, across: !first.transpose_b, scale: first.scale, slices })
}

#[cfg(test)]
mod tests {
    use super::*;
    use program::ArenaId;
    use tensor::DType;

    fn dense(shape: [usize; 2]) -> TensorRef {
        TensorRef::dense(ArenaId(0), 0, DType::BF16, shape)
    }

    fn gemm() -> Gemm {
        Gemm {
            batch: 1,
            m: 2,
            n: 32,
            k: 24,
            a: dense([2, 24]),
            b: dense([32, 24]),
            d: dense([2, 32]),
            transpose_a: false,
            transpose_b: true,
            scale: 1.0,
            scales: None,
            bias: Some(TensorRef::dense(ArenaId(0), 0, DType::BF16, [32])),
            accumulate: false,
            batch_invariant: false,
            low_rank: vec![LowRank {
                t: dense([2, 6]),
                b: dense([16, 6]),
                transpose_b: true,
                scale: 2.0,
                columns: (16, 16),
            }],
        }
    }

    #[test]
    fn only_products_of_few_rows_are_taken() {
        let taken = product(&gemm(), true).unwrap();
        assert_eq!((taken.rows, taken.row, taken.vector, taken.bias), (2, [24, 24, 32], 8, Some(DType::BF16)));
        assert_eq!(taken.addends.unwrap().slices, [Slice { columns: (16, 16), rank: 6, rows: [6, 6] }]);
        assert_eq!(product(&Gemm { m: 3, a: dense([3, 24]), d: dense([3, 32]), ..gemm() }, true), None);
        assert_eq!(product(&Gemm { transpose_b: false, b: dense([24, 32]), ..gemm() }, true), None);
        let mut unlike = gemm();
        unlike.low_rank.push(LowRank { scale: 1.0, columns: (0, 16), ..unlike.low_rank[0].clone() });
        assert_eq!(product(&unlike, true), None);
    }

    #[test]
    fn what_is_read_at_once_is_aligned() {
        let vector = |gemm: &Gemm| product(gemm, true).unwrap().vector;
        let odd = |row: usize| TensorRef { strides: vec![row, 1], ..dense([32, 24]) };
        assert_eq!(vector(&Gemm { b: odd(28), ..gemm() }), 4);
        assert_eq!(vector(&Gemm { b: odd(25), ..gemm() }), 1);
        assert_eq!(vector(&Gemm { a: TensorRef { offset: 4, ..gemm().a }, ..gemm() }), 2);
        let f32 = |at: TensorRef| TensorRef { dtype: DType::F32, ..at };
        assert_eq!(vector(&Gemm { b: f32(gemm().b), ..gemm() }), 4);
    }
}
