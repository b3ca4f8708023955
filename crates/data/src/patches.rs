//! The images of a micro-batch: rows of patches for a vision tower, and the places of its results among the tokens.
//!
//! A picture comes as patches in block order: the `group` patches that become one token are neighbors, row by row inside
//! of a block, and blocks go row by row. Knows no file format and no architecture: an architecture says by a [`Form`]
//! what its tower reads.

use rayon::prelude::*;

use crate::batch::{Batch, Patches};
use crate::error::DataError;
use crate::pairs;
use crate::patched_view::PatchedView;

/// Patches are padded to a multiple of this number of groups, so that products have full tiles.
const UNIT: usize = 16;
/// Shapes between a power of two and the next: more waste less memory, and compile more often.
const STEPS: usize = 8;

/// The reading of images by an architecture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Form {
    /// The token that stands for a part of an image.
    pub token: i32,
    /// Bytes of a patch: pixels times channels.
    pub width: usize,
    /// Rows and columns of patches that become one token.
    pub side: usize,
    /// Tokens a side of the windows of attention inside a tower; 0 without windows.
    pub window: usize,
    /// Rows and columns of the tower's table of positions; 0 without one.
    pub table: usize,
    /// True if a picture is stretched over the whole table; else a patch has the entry of its row and column.
    pub stretched: bool,
    /// True if text stands between the rows of an image.
    pub breaks: bool,
    /// The token that tables other than that of tokens read in the place of parts of images.
    pub pad: i32,
}

/// One image, or one view of it, in 8 bits: its patches are made where a batch has them.
#[derive(Clone, Debug, PartialEq)]
pub struct Picture {
    /// Rows and columns of patches.
    pub grid: [usize; 2],
    /// None where only places are wanted: its patches are zeros.
    view: Option<PatchedView>,
}

impl Picture {
    pub(crate) fn of(grid: [usize; 2], view: PatchedView) -> Picture {
        Picture { grid, view: Some(view) }
    }

    /// An image of which only the size is known: its patches are zeros.
    pub fn blank(grid: [usize; 2]) -> Picture {
        Picture { grid, view: None }
    }

    /// The bytes of all patches, of which each has `width`: [rows · columns, width], in block order.
    #[cfg(test)]
    pub(crate) fn bytes(&self, width: usize) -> Vec<u8> {
        let mut bytes = vec![0; width * self.grid[0] * self.grid[1]];
        let view = self.view.as_ref().expect("it has content");
        bytes.chunks_mut(width).enumerate().for_each(|(index, bytes)| view.write(index, bytes));
        bytes
    }
}

impl Form {
    /// Returns the number of patches that make one token.
    pub fn group(&self) -> usize {
        self.side * self.side
    }

    /// Returns the patches of a whole window; 0 without windows.
    pub fn patches_of_window(&self) -> usize {
        self.window * self.window * self.group()
    }

    /// Tokens of a picture; an error unless its grid is made of whole blocks.
    pub fn tokens(&self, grid: [usize; 2]) -> Result<usize, DataError> {
        if grid.iter().any(|n| *n == 0 || n % self.side != 0) {
            let text = format!("an image of {} × {} patches is not made of blocks of {}", grid[0], grid[1], self.side);
            return Err(problem(text));
        }
        Ok(grid[0] * grid[1] / self.group())
    }

    /// Returns P for a number of patches: few shapes are compiled.
    pub fn padded(&self, patches: usize) -> usize {
        let unit = UNIT * self.group();
        let units = patches.div_ceil(unit).max(1);
        let step = (units.next_power_of_two() / 2 / STEPS).max(1);
        units.next_multiple_of(step) * unit
    }

    /// Returns P for a number of patches of prompts, whose images have many sizes: two shapes for each power of two.
    pub fn roomy(&self, patches: usize) -> usize {
        let unit = UNIT * self.group();
        let whole = patches.div_ceil(unit).max(1).next_power_of_two();
        let less = whole / 4 * 3;
        if less * unit >= patches { less * unit } else { whole * unit }
    }

    /// Lays the pictures out for a batch, in the order of the tokens that stand for them. Errors: a picture of another
    /// form, or another number of tokens.
    pub fn lay_out(&self, batch: &Batch, pictures: &[Picture]) -> Result<Patches, DataError> {
        self.lay_out_among(batch, pictures, 0)
    }

    /// The same with room for at least `least` patches: those of another rank.
    pub(crate) fn lay_out_among(
        &self,
        batch: &Batch,
        pictures: &[Picture],
        least: usize,
    ) -> Result<Patches, DataError> {
        let sizes = pictures.iter().map(|of| self.tokens(of.grid)).collect::<Result<Vec<usize>, _>>()?;
        let places: Vec<usize> = (0..batch.input_ids.len()).filter(|t| batch.input_ids[*t] == self.token).collect();
        let (wanted, found) = (sizes.iter().sum::<usize>(), places.len());
        if wanted != found {
            let count = pictures.len();
            return Err(problem(format!(
                "{count} images have {wanted} tokens, but {found} tokens {} stand for them",
                self.token
            )));
        }
        let views = || pictures.iter().filter_map(|of| of.view.as_ref());
        if let Some(width) = views().map(PatchedView::width).find(|width| *width != self.width) {
            return Err(problem(format!("a patch of an image has {width} bytes, expected {}", self.width)));
        }
        let values = views().next().map(|of| &of.values);
        if views().any(|of| Some(&of.values) != values) {
            return Err(problem("images of several processors".to_owned()));
        }
        let patches: usize = pictures.iter().map(|of| of.grid[0] * of.grid[1]).sum();
        let mut made = Patches::default();
        let mut order = Vec::with_capacity(patches);
        let mut tokens = places.iter();
        for (number, (picture, size)) in pictures.iter().zip(&sizes).enumerate() {
            let own: Vec<usize> = tokens.by_ref().take(*size).copied().collect();
            self.add(&mut made, &mut order, (number, picture), &own)?;
        }
        self.pad(&mut made, self.padded(patches.max(least)));
        made.values = values.map_or_else(|| vec![0.0; 3 * 256], |of| of.as_flattened().to_vec());
        made.pixels = vec![0; made.count() * self.width];
        made.pixels.par_chunks_mut(self.width).zip(&order).for_each(|(bytes, (number, patch))| {
            if let Some(view) = &pictures[*number].view {
                view.write(*patch, bytes);
            }
        });
        self.place(&mut made, batch, pictures, &sizes, &places)?;
        Ok(made)
    }

    /// Adds the patches of a picture, whose tokens stand at these places. `order` gets the numbers of the picture and of the
    /// patch for each of them.
    fn add(
        &self,
        made: &mut Patches,
        order: &mut Vec<(usize, usize)>,
        (number, picture): (usize, &Picture),
        places: &[usize],
    ) -> Result<(), DataError> {
        let ([rows, columns], group) = (picture.grid, self.group());
        let [block_rows, block_columns] = [rows / self.side, columns / self.side];
        if self.table > 0 && !self.stretched && rows.max(columns) > self.table {
            let size = self.table;
            return Err(problem(format!(
                "an image of {rows} × {columns} patches exceeds the table of {size} × {size}"
            )));
        }
        let first = made.entries.len();
        for window in windows([block_rows, block_columns], self.window) {
            let start = made.entries.len();
            for block in &window {
                made.tokens.push(places[*block] as i32);
                for patch in block * group..(block + 1) * group {
                    order.push((number, patch));
                    let inside = patch % group;
                    let row = block / block_columns * self.side + inside / self.side;
                    let column = block % block_columns * self.side + inside % self.side;
                    made.places.extend([row as i32, column as i32]);
                    made.entries.push((row * self.table + column) as i32);
                }
            }
            let end = made.entries.len();
            made.window[0].extend((start..end).map(|_| start as i32));
            made.window[1].extend((start..end).map(|_| end as i32 - 1));
        }
        let end = made.entries.len();
        made.picture[0].extend((first..end).map(|_| first as i32));
        made.picture[1].extend((first..end).map(|_| end as i32 - 1));
        if self.stretched {
            let places = made.places[2 * first..].chunks(2).map(|at| [at[0] as usize, at[1] as usize]);
            let around = places.flat_map(|at| corners(at, picture.grid, self.table));
            let (corners, weights): (Vec<i32>, Vec<f32>) = around.unzip();
            made.corners.extend(corners);
            made.corner_weights.extend(weights);
        }
        Ok(())
    }

    /// Adds patches of padding up to `count`, each of which sees itself alone.
    fn pad(&self, made: &mut Patches, count: usize) {
        let own = made.entries.len() as i32..count as i32;
        made.places.resize(2 * count, 0);
        made.entries.resize(count, 0);
        made.tokens.resize(count / self.group(), -1);
        for interval in made.picture.iter_mut().chain(&mut made.window) {
            interval.extend(own.clone());
        }
        made.corners.resize(4 * count, 0);
        made.corner_weights.resize(4 * count, 0.0);
    }

    /// Fills in what tokens read.
    fn place(
        &self,
        made: &mut Patches,
        batch: &Batch,
        pictures: &[Picture],
        sizes: &[usize],
        places: &[usize],
    ) -> Result<(), DataError> {
        let tokens = batch.input_ids.len();
        made.rows = vec![-1; tokens];
        for (row, place) in made.tokens.iter().enumerate().filter(|(_, place)| **place >= 0) {
            made.rows[*place as usize] = row as i32;
        }
        made.text = made.rows.iter().map(|row| if *row < 0 { 1.0 } else { 0.0 }).collect();
        let ids = batch.input_ids.iter().zip(&made.rows);
        made.text_ids = ids.map(|(id, row)| if *row < 0 { *id } else { self.pad }).collect();
        made.last_key = batch.last_keys(&made.rows);
        made.axes = self.axes(batch, pictures, sizes, places)?;
        Ok(())
    }

    /// Time, row and column of each token: text goes on by one on all axes; an image at p has the time p, its rows and
    /// columns count from p, and what follows begins where the longer side ends. An answer that shares the prompt of another goes
    /// on from where that prompt ends.
    fn axes(
        &self,
        batch: &Batch,
        pictures: &[Picture],
        sizes: &[usize],
        places: &[usize],
    ) -> Result<Vec<i32>, DataError> {
        let mut axes = Vec::with_capacity(3 * batch.input_ids.len());
        let (mut next, mut place, mut pictures, mut first) = (0i32, 0, pictures.iter().zip(sizes), None);
        let mut forks = pairs::forks(batch).into_iter().peekable();
        let mut at_fork = 0;
        for t in 0..batch.input_ids.len() {
            at_fork = if forks.peek().is_some_and(|[fork, _]| *fork == t) { next } else { at_fork };
            if forks.next_if(|[_, branch]| *branch == t).is_some() {
                next = at_fork;
            }
            if batch.document_start[t] as usize == t % batch.seq_len {
                if first.is_some() {
                    return Err(problem("an image's tokens go on in another document".to_owned()));
                }
                next = 0;
            }
            if places.get(place) != Some(&t) {
                if first.is_some() && !self.breaks {
                    return Err(problem("text stands between the tokens of one image".to_owned()));
                }
                axes.extend([next; 3]);
                next += 1;
                continue;
            }
            place += 1;
            let (picture, size, done) = match first.take() {
                Some(begun) => begun,
                None => {
                    let (picture, size) = pictures.next().expect("the counts are equal");
                    (picture, *size, 0)
                }
            };
            let [rows, columns] = picture.grid.map(|n| n / self.side);
            axes.extend([next, next + (done / columns) as i32, next + (done % columns) as i32]);
            if done + 1 < size {
                first = Some((picture, size, done + 1));
            } else {
                next += rows.max(columns) as i32;
            }
        }
        Ok(axes)
    }
}

fn problem(problem: String) -> DataError {
    DataError::Invalid { place: "the images of a batch".to_owned(), problem, hint: String::new() }
}

/// The blocks of each window, row by row: squares of `side`, ragged at the right and the lower edge. One for all without
/// windows.
fn windows([rows, columns]: [usize; 2], side: usize) -> Vec<Vec<usize>> {
    if side == 0 {
        return vec![(0..rows * columns).collect()];
    }
    let corners = (0..rows).step_by(side).flat_map(|row| (0..columns).step_by(side).map(move |column| (row, column)));
    let inside = |(top, left): (usize, usize)| {
        let of_row = |row: usize| (left..(left + side).min(columns)).map(move |column| row * columns + column);
        (top..(top + side).min(rows)).flat_map(of_row).collect()
    };
    corners.map(inside).collect()
}

/// The entries of a square table around a place of a grid that is stretched over it, corner on corner, and their weights.
fn corners(place: [usize; 2], grid: [usize; 2], table: usize) -> [(i32, f32); 4] {
    let along = |axis: usize| {
        // As `torch.linspace(0, table − 1, n)` has it: from either end.
        let (last, n) = ((table - 1) as f32, grid[axis]);
        let step = if n > 1 { last / (n - 1) as f32 } else { 0.0 };
        let is_first_half = place[axis] < n.div_ceil(2);
        let at = if is_first_half { step * place[axis] as f32 } else { last - step * (n - 1 - place[axis]) as f32 };
        let below = (at as usize).min(table - 1);
        ([below, (below + 1).min(table - 1)], at - below as f32)
    };
    let ((rows, down), (columns, right)) = (along(0), along(1));
    let of = |row: usize, column: usize, weight: f32| ((rows[row] * table + columns[column]) as i32, weight);
    [
        of(0, 0, (1.0 - down) * (1.0 - right)),
        of(0, 1, (1.0 - down) * right),
        of(1, 0, down * (1.0 - right)),
        of(1, 1, down * right),
    ]
}
