//! Tables of the FlatBuffers encoding, in which Arrow writes its headers: every read is bounds-checked.
//!
//! Knows no Arrow.

/// The error of a damaged header.
pub(super) const DAMAGED: &str = "damaged: a header points outside of itself";

/// A table inside a buffer.
#[derive(Clone, Copy)]
pub(super) struct Table<'a> {
    bytes: &'a [u8],
    at: usize,
}

fn read<const N: usize>(bytes: &[u8], at: usize) -> Result<[u8; N], String> {
    let slice = at.checked_add(N).and_then(|end| bytes.get(at..end)).ok_or(DAMAGED)?;
    Ok(slice.try_into().expect("the slice has N bytes"))
}

/// Follows the offset at `at` to the position that it points to.
fn follow(bytes: &[u8], at: usize) -> Result<usize, String> {
    let offset = u32::from_le_bytes(read(bytes, at)?) as usize;
    at.checked_add(offset).filter(|&to| to < bytes.len()).ok_or_else(|| DAMAGED.to_owned())
}

/// Elements of `size` bytes each that are one after another.
fn elements(bytes: &[u8], at: usize, size: usize) -> Result<(usize, &[u8]), String> {
    let count = u32::from_le_bytes(read(bytes, at)?) as usize;
    let end = count.checked_mul(size).and_then(|length| length.checked_add(at + 4)).ok_or(DAMAGED)?;
    Ok((at + 4, bytes.get(at + 4..end).ok_or(DAMAGED)?))
}

impl<'a> Table<'a> {
    pub(super) fn root(bytes: &'a [u8]) -> Result<Self, String> {
        Ok(Table { bytes, at: follow(bytes, 0)? })
    }

    /// The position of field `n`, if the table has it.
    fn field(&self, n: usize) -> Result<Option<usize>, String> {
        let back = i64::from(i32::from_le_bytes(read(self.bytes, self.at)?));
        let listing = usize::try_from(self.at as i64 - back).map_err(|_| DAMAGED)?;
        let size = usize::from(u16::from_le_bytes(read(self.bytes, listing)?));
        if 4 + 2 * n + 2 > size {
            return Ok(None);
        }
        let offset = usize::from(u16::from_le_bytes(read(self.bytes, listing + 4 + 2 * n)?));
        Ok((offset != 0).then_some(self.at + offset))
    }

    fn scalar<const N: usize>(&self, n: usize) -> Result<Option<[u8; N]>, String> {
        self.field(n)?.map(|at| read(self.bytes, at)).transpose()
    }

    pub(super) fn byte(&self, n: usize) -> Result<u8, String> {
        Ok(self.scalar::<1>(n)?.map_or(0, |[byte]| byte))
    }

    pub(super) fn short(&self, n: usize, default: i16) -> Result<i16, String> {
        Ok(self.scalar(n)?.map_or(default, i16::from_le_bytes))
    }

    pub(super) fn int(&self, n: usize, default: i32) -> Result<i32, String> {
        Ok(self.scalar(n)?.map_or(default, i32::from_le_bytes))
    }

    pub(super) fn long(&self, n: usize) -> Result<i64, String> {
        Ok(self.scalar(n)?.map_or(0, i64::from_le_bytes))
    }

    pub(super) fn has(&self, n: usize) -> Result<bool, String> {
        Ok(self.field(n)?.is_some())
    }

    pub(super) fn table(&self, n: usize) -> Result<Option<Table<'a>>, String> {
        let Some(at) = self.field(n)? else { return Ok(None) };
        Ok(Some(Table { bytes: self.bytes, at: follow(self.bytes, at)? }))
    }

    pub(super) fn text(&self, n: usize) -> Result<&'a str, String> {
        let Some(at) = self.field(n)? else { return Ok("") };
        let (_, bytes) = elements(self.bytes, follow(self.bytes, at)?, 1)?;
        std::str::from_utf8(bytes).map_err(|e| format!("a name is not text: {e}"))
    }

    pub(super) fn tables(&self, n: usize) -> Result<Vec<Table<'a>>, String> {
        let Some(at) = self.field(n)? else { return Ok(Vec::new()) };
        let (begin, bytes) = elements(self.bytes, follow(self.bytes, at)?, 4)?;
        let one = |i| Ok(Table { bytes: self.bytes, at: follow(self.bytes, begin + 4 * i)? });
        (0..bytes.len() / 4).map(one).collect()
    }

    /// A list of `N` whole numbers of 64 bits each.
    pub(super) fn longs<const N: usize>(&self, n: usize) -> Result<Vec<[i64; N]>, String> {
        let Some(at) = self.field(n)? else { return Ok(Vec::new()) };
        let (_, bytes) = elements(self.bytes, follow(self.bytes, at)?, 8 * N)?;
        let long = |bytes: &[u8]| i64::from_le_bytes(bytes.try_into().expect("chunks of eight"));
        Ok(bytes.chunks_exact(8 * N).map(|one| std::array::from_fn(|i| long(&one[8 * i..8 * i + 8]))).collect())
    }
}
