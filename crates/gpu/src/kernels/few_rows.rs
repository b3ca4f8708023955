//! The kernel of products of few rows (skinny GEMM): division of the work, addends, and the definitions of its text.
//! Does not know where operands are.

use super::{NUMBER, OwnKernel};
use tensor::DType;

/// Number of warps of a block: as in `few_rows.cu`.
const WARPS: usize = 8;
/// Number of lanes of a warp.
const LANES: usize = 32;
/// Number of warps for each multiprocessor that keep its memory busy.
const WARPS_PER_UNIT: usize = 16;
/// Number of blocks that are to fit on a multiprocessor, so that the blocks of the next product begin to read while the last
/// of this one end: of one row, and of more, where a thread holds more numbers.
const RESIDENT: [usize; 2] = [4, 2];
/// Packs of a column that a lane reads at once where that makes one or two turns of K, and the most columns then.
const LONG_TURN: usize = 2;
/// Bytes of one memory access.
pub const ACCESS: usize = 16;

/// A product D [rows, n] of A [rows, k] and B [n, k].
#[derive(Clone, Debug, PartialEq)]
pub struct FewRows {
    pub rows: usize,
    pub n: usize,
    pub k: usize,
    /// Types of A, B and D, and elements from one row to the next.
    pub types: [DType; 3],
    pub row: [usize; 3],
    /// Number of elements of B, and of A, that are read at once.
    pub vector: usize,
    /// True if no kernel of an entry writes B.
    pub weight: bool,
    pub scale: f32,
    pub accumulate: bool,
    pub bias: Option<DType>,
    pub addends: Option<Addends>,
}

/// Low-rank addends, alike in all but their sizes.
#[derive(Clone, Debug, PartialEq)]
pub struct Addends {
    /// Element types of the left and the right factor.
    pub types: [DType; 2],
    /// The second factors are [rank, count].
    pub across: bool,
    pub scale: f32,
    pub slices: Vec<Slice>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slice {
    /// First column and number of columns.
    pub columns: (usize, usize),
    pub rank: usize,
    /// Elements from row to row of both factors.
    pub rows: [usize; 2],
}

/// The division of the work over warps and blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Division {
    /// Number of columns of D for each warp.
    pub columns: usize,
    /// Number of parts of K.
    pub parts: usize,
    /// Number of packs of a column that a lane reads at once.
    pub turn: usize,
    /// Number of blocks that are resident on a multiprocessor.
    pub resident: usize,
}

impl Division {
    pub fn blocks(self, n: usize) -> usize {
        n.div_ceil(self.columns * (WARPS / self.parts))
    }
}

impl FewRows {
    pub const THREADS: u32 = (WARPS * LANES) as u32;

    /// Divides the work: short ranges of K, so that many warps read at a time, and the largest number of columns, which
    /// share the reads of A, that leaves enough warps for `units` multiprocessors. Three or more turns of four columns
    /// are slow with four resident blocks. Of 30 shapes of models on an H100, this division takes 1.27 times the time of reading
    /// one row's weights at 3.35 TB/s in the mean; four columns and one pack took 2.3 times, and up to 6.8.
    pub fn division(&self, units: usize) -> Division {
        let steps = self.k.div_ceil(LANES * self.vector);
        let parts = steps.next_power_of_two().min(WARPS);
        let one_row = self.rows == 1;
        let usual = RESIDENT[usize::from(!one_row)];
        let (most, turn, resident) = match steps.div_ceil(WARPS) {
            // Every warp has the same number of packs, at most two.
            ..=2 if steps <= WARPS || steps == 2 * WARPS => (4, 1, usual),
            ..=4 if steps < 4 * WARPS => (2, LONG_TURN, 2),
            ..=4 => (2, 1, 4),
            _ => (if one_row { 1 } else { 2 }, 1, 4),
        };
        let enough = |columns: &usize| self.n.div_ceil(*columns) * parts >= WARPS_PER_UNIT * units;
        let columns = [4, 2].into_iter().filter(|columns| *columns <= most).find(enough).unwrap_or(1);
        Division { columns, parts, turn, resident }
    }

    pub fn kernel(&self, division: Division) -> OwnKernel {
        let numbers = [
            ("ROWS", self.rows),
            ("N", self.n),
            ("K", self.k),
            ("A_ROW", self.row[0]),
            ("B_ROW", self.row[1]),
            ("D_ROW", self.row[2]),
            ("VECTOR", self.vector),
            ("COLUMNS", division.columns),
            ("PARTS", division.parts),
            ("TURN", division.turn),
            ("RESIDENT", division.resident),
            ("WEIGHT", self.weight as usize),
            ("ACCUMULATE", self.accumulate as usize),
            ("HAS_BIAS", self.bias.is_some() as usize),
            ("SLICES", self.addends.as_ref().map_or(0, |addends| addends.slices.len())),
        ];
        let mut defines = numbers.map(|(name, value)| (name, value.to_string())).to_vec();
        let [a, b, d] = self.types;
        let types = [("A_T", Some(a)), ("B_T", Some(b)), ("D_T", Some(d)), ("BIAS_T", self.bias)];
        defines.extend(types.into_iter().filter_map(|(name, of)| Some((name, name_of(of?)?.to_owned()))));
        defines.push(("SCALE", format!("{:e}f", self.scale)));
        if let Some(addends) = &self.addends {
            defines.extend(addends.defines());
        }
        OwnKernel::new("few_rows.cu", include_str!("few_rows.cu"), &[NUMBER, device::DEPENDENT_LAUNCH], &defines)
    }
}

impl Addends {
    fn defines(&self) -> Vec<(&'static str, String)> {
        let slices = self.slices.iter().enumerate();
        let list = |text: &dyn Fn(usize, &Slice) -> String| {
            slices.clone().map(|(s, slice)| text(s, slice)).collect::<Vec<_>>().join(",")
        };
        let [t, u] = self.types.map(|of| name_of(of).expect("types of addends are checked").to_owned());
        vec![
            ("FACTORS", list(&|s, _| format!("const {t}* t{s}, const {u}* u{s}"))),
            ("TUS", list(&|s, _| format!("t{s},u{s}"))),
            ("TS", list(&|s, _| format!("t{s}"))),
            ("US", list(&|s, _| format!("u{s}"))),
            ("FIRSTS", list(&|_, of| of.columns.0.to_string())),
            ("COUNTS", list(&|_, of| of.columns.1.to_string())),
            ("RANKS", list(&|_, of| of.rank.to_string())),
            ("T_ROWS", list(&|_, of| of.rows[0].to_string())),
            ("U_ROWS", list(&|_, of| of.rows[1].to_string())),
            ("U_ACROSS", (self.across as u32).to_string()),
            ("ADDEND_SCALE", format!("{:e}f", self.scale)),
            ("T_T", t),
            ("U_T", u),
        ]
    }
}

/// Returns the name in `number.cuh` of a type that the kernel computes with.
pub const fn name_of(dtype: DType) -> Option<&'static str> {
    match dtype {
        DType::F32 => Some("float"),
        DType::BF16 => Some("bf16"),
        DType::F16 => Some("f16"),
        _ => None,
    }
}

/// Typical variants, for a build without a GPU.
pub fn samples() -> Vec<OwnKernel> {
    let of = |rows, n, k, dtype, vector| FewRows {
        rows,
        n,
        k,
        types: [dtype; 3],
        row: [k, k, n],
        vector,
        weight: true,
        scale: 1.0,
        accumulate: false,
        bias: None,
        addends: None,
    };
    let slice = |first| Slice { columns: (first, 64), rank: 16, rows: [48, 16] };
    let addends =
        |across| Some(Addends { types: [DType::BF16; 2], across, scale: 2.0, slices: vec![slice(0), slice(64)] });
    let all = [
        of(1, 4096, 4096, DType::BF16, 8),
        of(2, 6144, 4096, DType::F16, 8),
        of(1, 19_456, 2560, DType::BF16, 8),
        of(1, 2560, 9728, DType::BF16, 8),
        of(2, 130, 77, DType::F32, 1),
        FewRows { bias: Some(DType::BF16), addends: addends(false), ..of(1, 1024, 1024, DType::BF16, 8) },
        FewRows {
            weight: false,
            accumulate: true,
            scale: 0.5,
            addends: addends(true),
            ..of(2, 151_936, 1024, DType::BF16, 4)
        },
    ];
    all.iter().map(|of| of.kernel(of.division(132))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(rows: usize, n: usize, k: usize) -> FewRows {
        FewRows {
            rows,
            n,
            k,
            types: [DType::BF16; 3],
            row: [k, k, n],
            vector: 8,
            weight: true,
            scale: 1.0,
            accumulate: false,
            bias: None,
            addends: None,
        }
    }

    #[test]
    fn small_products_are_divided_along_the_sum() {
        let large = of(1, 24_576, 4096).division(132);
        assert_eq!(large, Division { columns: 4, parts: 8, turn: 1, resident: 4 });
        let small = of(1, 1024, 1024).division(132);
        assert_eq!(small, Division { columns: 1, parts: 4, turn: 1, resident: 4 });
        // Turns of which the last is half empty are one turn of twice the packs.
        assert_eq!(of(1, 19_456, 2560).division(132), Division { columns: 2, parts: 8, turn: 2, resident: 2 });
        assert_eq!(of(2, 34_816, 5120).division(132), Division { columns: 2, parts: 8, turn: 2, resident: 2 });
        // Many turns hold few columns.
        assert_eq!(of(1, 5120, 17_408).division(132), Division { columns: 1, parts: 8, turn: 1, resident: 4 });
        assert_eq!(of(2, 4096, 12_288).division(132), Division { columns: 2, parts: 8, turn: 1, resident: 4 });
        assert_eq!((large.blocks(24_576), small.blocks(1024)), (6144, 512));
        // A sum of one step has one part.
        assert_eq!(of(2, 100, 40).division(132).parts, 1);
    }
}
