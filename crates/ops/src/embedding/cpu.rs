//! CPU references of the table lookup. The gradient of a row is summed by one thread in token order.

use rayon::prelude::*;

use crate::call::Call;
use crate::real::Real;
use crate::vector::add_scaled;

fn row_of(id: i32, rows: usize) -> usize {
    let row = usize::try_from(id).ok().filter(|row| *row < rows);
    row.unwrap_or_else(|| panic!("token id {id} outside of a table of {rows} rows passed the check of the batch"))
}

pub fn forward<T: Real>(call: &mut Call<'_, T>) {
    let (ids, table) = (call.inputs[0].int(), &call.inputs[1]);
    let (rows, columns, table) = (table.rows(), table.columns(), table.real());
    let [y] = call.outputs_mut();
    y.real().par_chunks_mut(columns).zip(ids).for_each(|(y, id)| {
        let row = row_of(*id, rows);
        y.copy_from_slice(&table[row * columns..(row + 1) * columns]);
    });
}

pub fn backward<T: Real>(call: &mut Call<'_, T>) {
    let rows = call.attrs.size("rows").expect("checked by the shape rule");
    let accumulate = call.attrs.flag("accumulate").expect("checked by the shape rule");
    let padding = call.attrs.optional_int("padding_idx").expect("checked by the shape rule");
    let (ids, dy, columns) = (call.inputs[0].int(), call.inputs[1].real(), call.inputs[1].columns());
    let (starts, tokens) = tokens_by_row(ids, rows);
    let [dw] = call.outputs_mut();
    dw.real().par_chunks_mut(columns).enumerate().for_each(|(row, dw)| {
        if !accumulate {
            dw.fill(T::default());
        }
        if padding == Some(row as i64) {
            return;
        }
        for token in &tokens[starts[row]..starts[row + 1]] {
            add_scaled(dw, T::from_f64(1.0), &dy[token * columns..(token + 1) * columns]);
        }
    });
}

/// The tokens of each row in order (a counting sort): those of `row` are at `starts[row]..starts[row + 1]`.
fn tokens_by_row(ids: &[i32], rows: usize) -> (Vec<usize>, Vec<usize>) {
    let mut starts = vec![0; rows + 1];
    for id in ids {
        starts[row_of(*id, rows) + 1] += 1;
    }
    for row in 0..rows {
        starts[row + 1] += starts[row];
    }
    let (mut free, mut tokens) = (starts.clone(), vec![0; ids.len()]);
    for (token, id) in ids.iter().enumerate() {
        let row = *id as usize;
        tokens[free[row]] = token;
        free[row] += 1;
    }
    (starts, tokens)
}
