//! Low-rank addends of a GEMM with the backend's own kernel: all slices in one pass over D, where the library would
//! need one GEMM onto D for each. Made for bf16 factors of small rank.

use super::Preparation;
use super::launch::{Arguments, BoundLaunch};
use crate::driver::LaunchShape;
use crate::error::Result;
use crate::kernels::{self, Addend};
use program::{Gemm, LowRank, TensorRef};
use tensor::DType;

/// Columns of a warp, warps of a block, rows of a block: as in `addends.cu`.
const COLUMNS: usize = 32;
const WARPS: usize = 8;
const TALL: usize = 64;
/// Maximal rank. Larger factors do not fit in the registers; the library's products are efficient there.
const MOST_RANK: usize = 64;
/// Bytes of one access to D.
const ACCESS: usize = 16;

/// Returns the kernel for all addends of a product; `None` where it does not support them.
pub(super) fn plan(p: &mut Preparation, gemm: &Gemm) -> Result<Option<BoundLaunch>> {
    let Some(first) = gemm.low_rank.first() else { return Ok(None) };
    let (Some((_, rank, _)), Some((_, _, d_row))) = (first.t.as_matrix(), gemm.d.as_matrix()) else { return Ok(None) };
    let alike = |a: &LowRank| a.scale == first.scale && a.transpose_b == first.transpose_b;
    let Some(addends) = gemm.low_rank.iter().map(|a| addend(a, rank)).collect::<Option<Vec<_>>>() else {
        return Ok(None);
    };
    let d = gemm.d.dtype == DType::BF16 && aligned(&gemm.d, d_row, ACCESS);
    if !d || rank > MOST_RANK || !rank.is_multiple_of(8) || !gemm.low_rank.iter().all(alike) {
        return Ok(None);
    }
    let kernel = kernels::addends(gemm.m, d_row, rank, first.scale, !first.transpose_b, &addends);
    let function = p.engine.own_function(kernel, "addends")?;
    let arguments = gemm.low_rank.iter().fold(Arguments::new().word(p.memory.address(&gemm.d)), |arguments, a| {
        arguments.word(p.memory.address(&a.t)).word(p.memory.address(&a.b))
    });
    let groups: usize = addends.iter().map(|a| a.columns.1 / COLUMNS).sum();
    let shape = LaunchShape {
        grid: [groups.div_ceil(WARPS) as u32, gemm.m.div_ceil(TALL) as u32, 1],
        block: [32 * WARPS as u32, 1, 1],
        shared_bytes: 0,
        early: false,
    };
    Ok(Some(BoundLaunch::new(function, "addends", shape, arguments)))
}

/// Describes an addend; `None` where the kernel does not support it.
fn addend(a: &LowRank, rank: usize) -> Option<Addend> {
    let ((_, t_rank, t_row), (_, _, b_row)) = (a.t.as_matrix()?, a.b.as_matrix()?);
    let types = a.t.dtype == DType::BF16 && a.b.dtype == DType::BF16;
    let pairs = aligned(&a.t, t_row, 4) && aligned(&a.b, b_row, 4);
    let columns = a.columns.0.is_multiple_of(ACCESS / 2) && a.columns.1.is_multiple_of(COLUMNS);
    (types && pairs && columns && t_rank == rank).then_some(Addend { columns: a.columns, t_row, b_row })
}

/// True if every row begins at a multiple of `bytes`.
fn aligned(at: &TensorRef, row: usize, bytes: usize) -> bool {
    at.offset.is_multiple_of(bytes) && (row * at.dtype.size()).is_multiple_of(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use program::ArenaId;

    fn dense(shape: [usize; 2]) -> TensorRef {
        TensorRef::dense(ArenaId(0), 0, DType::BF16, shape)
    }

    #[test]
    fn only_what_the_kernel_reads_is_taken() {
        let good = LowRank { t: dense([6, 16]), b: dense([64, 16]), transpose_b: true, scale: 2.0, columns: (32, 64) };
        assert_eq!(addend(&good, 16), Some(Addend { columns: (32, 64), t_row: 16, b_row: 16 }));
        assert_eq!(addend(&good, 8), None);
        assert_eq!(addend(&LowRank { columns: (4, 64), ..good.clone() }, 16), None);
        assert_eq!(addend(&LowRank { columns: (0, 40), ..good.clone() }, 16), None);
        let odd = TensorRef { offset: 2, ..good.t.clone() };
        assert_eq!(addend(&LowRank { t: odd, ..good.clone() }, 16), None);
        let wide = TensorRef { dtype: DType::F32, ..good.t.clone() };
        assert_eq!(addend(&LowRank { t: wide, ..good }, 16), None);
    }
}
