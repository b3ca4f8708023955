//! Matrices with exchanged axes: those of experts, which some files hold as [inputs, outputs] and others as [outputs, inputs].

use crate::error::DataError;
use crate::part_file::PartFile;

/// Fills `bytes` with those from byte `begin` on of matrices [rows, columns] of elements of `size` bytes, which the file holds
/// one after another from byte `start` on as [columns, rows]. Reads each matrix that the bytes touch once.
pub(super) fn read(
    file: &PartFile,
    start: usize,
    [rows, columns]: [usize; 2],
    size: usize,
    begin: usize,
    bytes: &mut [u8],
) -> Result<(), DataError> {
    let length = rows * columns * size;
    let (mut held, mut turned, mut done) = (vec![0; length], vec![0; length], 0);
    while done < bytes.len() {
        let (matrix, offset) = ((begin + done) / length, (begin + done) % length);
        file.read(start + matrix * length, &mut held)?;
        exchange(&held, &mut turned, columns, size);
        let count = (length - offset).min(bytes.len() - done);
        bytes[done..done + count].copy_from_slice(&turned[offset..offset + count]);
        done += count;
    }
    Ok(())
}

/// Writes a matrix [rows, columns] of elements of `size` bytes as [columns, rows].
pub fn exchange(from: &[u8], to: &mut [u8], rows: usize, size: usize) {
    let columns = from.len() / rows / size;
    for (row, elements) in from.chunks_exact(columns * size).enumerate() {
        for (column, element) in elements.chunks_exact(size).enumerate() {
            to[(column * rows + row) * size..][..size].copy_from_slice(element);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{NamedTensor, Weights, write};
    use super::*;
    use std::collections::BTreeMap;
    use tensor::{DType, HostTensor};

    fn folder(dtype: DType, shape: &[usize], bytes: &[u8]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        let tensor = HostTensor::new(dtype, shape, bytes.to_vec());
        write(&folder.path().join("model.safetensors"), &[NamedTensor::new("m.down", &tensor)], &BTreeMap::new())
            .unwrap();
        folder
    }

    #[test]
    fn matrices_are_read_with_exchanged_axes_from_any_byte_on() {
        let held: Vec<u8> = (0..2 * 3 * 4u16).flat_map(u16::to_le_bytes).collect();
        let folder = folder(DType::BF16, &[2, 3, 4], &held);
        let wanted = [2, 4, 3];
        let weights = Weights::open(folder.path()).unwrap().swapped(|name| (name == "m.down").then_some(&wanted));
        let view = weights.get("m.down").unwrap();
        assert_eq!((view.shape, weights.swapped_in_file("m.down")), (&wanted[..], Some(vec![2, 3, 4])));
        let element = |matrix: u16, row: u16, column: u16| (matrix * 12 + column * 4 + row).to_le_bytes();
        let all: Vec<u8> = (0..24u16).flat_map(|i| element(i / 12, i % 12 / 3, i % 3)).collect();
        assert_eq!(view.bytes().unwrap(), all);
        for (begin, end) in [(0, 2), (5, 31), (22, 48), (24, 30)] {
            let mut part = vec![0; end - begin];
            view.read(begin, &mut part).unwrap();
            assert_eq!(part, all[begin..end], "{begin}..{end}");
        }
        let mut back = vec![0; 24];
        exchange(&all[..24], &mut back, 4, 2);
        assert_eq!(back, held[..24]);
    }

    #[test]
    fn other_shapes_stay_as_they_are() {
        let folder = folder(DType::U8, &[1, 2, 3], &[0; 6]);
        for wanted in [[1, 2, 3], [1, 3, 3], [2, 3, 2]] {
            let weights = Weights::open(folder.path()).unwrap().swapped(|_| Some(&wanted));
            assert_eq!(
                (weights.get("m.down").unwrap().shape, weights.swapped_in_file("m.down")),
                (&[1, 2, 3][..], None)
            );
        }
    }
}
