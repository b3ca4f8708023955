//! The backend's own device code: layout changes, factors of products, low-rank addends, products of few rows and
//! Hopper GEMMs. Operations' kernels come with the program; these implement instructions that carry no kernel.

pub mod few_rows;

use crate::nvrtc::KernelSource;
use tensor::DType;

const NUMBER: (&str, &str) = ("number.cuh", include_str!("number.cuh"));

/// One of the backend's translation units with the definitions that it is compiled under.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct OwnKernel {
    name: &'static str,
    text: &'static str,
    headers: &'static [(&'static str, &'static str)],
    options: Vec<String>,
}

impl OwnKernel {
    fn new(
        name: &'static str,
        text: &'static str,
        headers: &'static [(&'static str, &'static str)],
        defines: &[(&str, String)],
    ) -> OwnKernel {
        OwnKernel { name, text, headers, options: defines.iter().map(|(n, v)| format!("-D{n}={v}")).collect() }
    }

    /// (name, text) of the headers that the source includes.
    pub fn headers(&self) -> &'static [(&'static str, &'static str)] {
        self.headers
    }

    pub fn source(&self) -> KernelSource<'_> {
        KernelSource { name: self.name, text: self.text, headers: self.headers, options: &self.options }
    }
}

/// Storage types of `strided.cu`, as C++ spells them.
pub fn strided(from: &'static str, to: &'static str) -> OwnKernel {
    let defines = [("FROM", from.to_owned()), ("TO", to.to_owned())];
    OwnKernel::new("strided.cu", include_str!("strided.cu"), &[NUMBER], &defines)
}

/// Returns the kernel that computes the factor of a product whose operands have one each.
pub fn factor(scale: f32, beta: f32) -> OwnKernel {
    let defines = [("SCALE", format!("{scale:e}f")), ("BETA", format!("{beta:e}f"))];
    OwnKernel::new("factor.cu", include_str!("factor.cu"), &[], &defines)
}

/// One of several addends onto columns of a matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Addend {
    /// First column and number of columns, a multiple of 32.
    pub columns: (usize, usize),
    /// Elements from row to row of both factors.
    pub t_row: usize,
    pub b_row: usize,
}

/// Addends of one rank and scale onto `rows` rows, `d_row` elements from one to the next. `across`: the
/// second factors are [rank, columns].
pub fn addends(rows: usize, d_row: usize, rank: usize, scale: f32, across: bool, addends: &[Addend]) -> OwnKernel {
    let list = |text: &dyn Fn(usize, &Addend) -> String| {
        addends.iter().enumerate().map(|(s, addend)| text(s, addend)).collect::<Vec<_>>().join(",")
    };
    let defines = [
        ("ROWS", rows.to_string()),
        ("D_ROW", d_row.to_string()),
        ("RANK", rank.to_string()),
        ("SCALE", format!("{scale:e}f")),
        ("B_ACROSS", (across as u32).to_string()),
        ("SLICES", addends.len().to_string()),
        ("FACTORS", list(&|s, _| format!("const unsigned short* t{s}, const unsigned short* b{s}"))),
        ("TS", list(&|s, _| format!("t{s}"))),
        ("BS", list(&|s, _| format!("b{s}"))),
        ("FIRSTS", list(&|_, a| a.columns.0.to_string())),
        ("COUNTS", list(&|_, a| a.columns.1.to_string())),
        ("T_ROWS", list(&|_, a| a.t_row.to_string())),
        ("B_ROWS", list(&|_, a| a.b_row.to_string())),
    ];
    OwnKernel::new("addends.cu", include_str!("addends.cu"), &[], &defines)
}

/// The properties of a product that the code of Hopper's kernel depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HopperProduct {
    /// Columns of a tile: 256, 192, 128 or 64.
    pub wide: usize,
    /// Two blocks share rows, not columns: for products of few rows.
    pub flat: bool,
    /// The second factors are [k, n], not [n, k].
    pub across: bool,
    /// Largest rank of an addend; 0 without addends.
    pub rank: usize,
    /// The addends have a factor.
    pub scaled: bool,
    /// Present if the first two factors are quantized, both along the sum.
    pub codes: Option<HopperCodes>,
}

/// Quantized factors of eight bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HopperCodes {
    pub types: [DType; 2],
    /// The tensor cores' sums are added in f32 every 128 terms.
    pub promoted: bool,
}

impl HopperProduct {
    pub const TALL: usize = 128;
    /// Number of bf16 terms in one step; eight-bit terms are twice as many.
    pub const DEEP: usize = 64;
    /// Maximal number of addends of one product.
    pub const SLICES: usize = 4;
    /// Columns of the narrowest tiles of a product.
    pub const NARROW: usize = 64;
    pub const THREADS: u32 = 384;

    /// Number of steps whose operands are in flight at once: the number that fits in shared memory besides two pieces
    /// of the result for each warpgroup.
    const fn stages(self) -> usize {
        match self.wide {
            Self::NARROW => 8,
            128 => 6,
            _ => 4,
        }
    }

    /// Bytes of dynamic shared memory, including a kibibyte for alignment.
    pub const fn shared_bytes(self) -> usize {
        self.stages() * 2 * Self::DEEP * (Self::TALL + self.wide) + (32 << 10) + 1024
    }

    pub fn kernel(self) -> OwnKernel {
        let numbers = [
            ("WIDE", self.wide),
            ("ACROSS", self.across as usize),
            ("ADDEND_STEPS", self.rank.div_ceil(16)),
            ("SCALED", self.scaled as usize),
            ("SLICES", Self::SLICES),
            ("STAGES", self.stages()),
            ("FLAT", self.flat as usize),
            ("PROMOTED", self.codes.is_some_and(|codes| codes.promoted) as usize),
        ];
        let mut defines = numbers.map(|(name, value)| (name, value.to_string())).to_vec();
        if let Some(HopperCodes { types: [a, b], .. }) = self.codes {
            defines.push(("CODES_TYPES", format!("\"f32.{a}.{b}\"")));
        }
        OwnKernel::new("product.cu", PRODUCT, &[device::HANDOFF, device::WGMMA], &defines)
    }

    /// Returns the source texts that a timed choice depends on besides the product.
    pub fn text() -> [&'static str; 4] {
        [PRODUCT, device::HANDOFF.1, device::WGMMA.1, device::INTRINSICS.1]
    }

    /// Returns every variant in use, for a build without a GPU.
    pub fn samples() -> Vec<OwnKernel> {
        let of = |codes| {
            move |wide, across, rank, scaled| {
                HopperProduct { wide, flat: wide == Self::NARROW, across, rank, scaled, codes }.kernel()
            }
        };
        let variant = of(None);
        let widths = [256, 128].into_iter();
        let both = widths.flat_map(|wide| [false, true].map(|across| (wide, across)));
        let numbers = both.flat_map(|(w, a)| [variant(w, a, 0, false), variant(w, a, 16, !a), variant(w, a, 48, true)]);
        let forward = of(Some(HopperCodes { types: [DType::E4M3; 2], promoted: false }));
        let backward = of(Some(HopperCodes { types: [DType::E5M2, DType::E4M3], promoted: true }));
        let codes = [(256, 0), (128, 16)].map(|(wide, rank)| forward(wide, false, rank, rank > 0));
        let narrow = [
            variant(Self::NARROW, false, 0, false),
            variant(Self::NARROW, true, 0, false),
            variant(Self::NARROW, false, 48, true),
        ];
        numbers.chain(narrow).chain(codes).chain([128, 192].map(|wide| backward(wide, true, 16, false))).collect()
    }
}

/// A product D [rows, n] of few columns, of A [rows, k] and B [n, k], all of bf16, whose bits do not depend on the number of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Thin {
    pub rows: usize,
    pub n: usize,
    pub k: usize,
    /// Elements from one row of A, B and D to the next.
    pub row: [usize; 3],
    pub has_bias: bool,
}

impl Thin {
    /// Largest number of columns of a product.
    pub const COLUMNS: usize = 64;
    /// Number of rows that a block computes.
    pub const TALL: usize = 16;
    pub const THREADS: u32 = 512;

    pub fn kernel(self) -> OwnKernel {
        let numbers = [
            ("ROWS", self.rows),
            ("N", self.n),
            ("K", self.k),
            ("A_ROW", self.row[0]),
            ("B_ROW", self.row[1]),
            ("D_ROW", self.row[2]),
            ("HAS_BIAS", self.has_bias as usize),
        ];
        let defines = numbers.map(|(name, value)| (name, value.to_string()));
        OwnKernel::new("thin.cu", include_str!("thin.cu"), &[NUMBER, device::DEPENDENT_LAUNCH], &defines)
    }
}

const PRODUCT: &str = include_str!("product.cu");

/// Returns every translation unit for any architecture in a few typical variants: the kernels that a build without a
/// GPU compiles.
pub fn samples() -> Vec<OwnKernel> {
    let mut kernels = vec![];
    for (from, to) in [("float", "bf16"), ("bf16", "float"), ("f16", "float"), ("bf16", "bf16"), ("int", "int")] {
        kernels.push(strided(from, to));
    }
    kernels.push(factor(1.0, 0.0));
    kernels.extend(few_rows::samples());
    let thin = |n, k, has_bias| Thin { rows: 100, n, k, row: [k, k, n], has_bias }.kernel();
    kernels.extend([thin(16, 1024, false), thin(48, 40, false), thin(64, 4096, true), thin(5, 72, true)]);
    let slice = |first, count| Addend { columns: (first, count), t_row: 48, b_row: 16 };
    kernels.push(addends(100, 256, 16, 2.0, false, &[slice(0, 96), slice(128, 64)]));
    kernels.push(addends(100, 64, 40, 1.0, true, &[Addend { columns: (0, 64), t_row: 40, b_row: 64 }]));
    kernels
}
