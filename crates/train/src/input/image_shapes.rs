//! The shapes in which batches with images are compiled: tokens of a row, and patches that batches have room for. Found by the
//! images of the first batches; no pixel is read.

use data::patches::Form;
use data::{Batch, DocumentSet, Layout, LoaderSpec};

use crate::error::{Result, TrainError};
use crate::input::first_batches::{COUNTED_BATCHES, first_batches};

/// Rounds with a number of patches, as a share of all, from which they get a shape of their own.
const OWN_SHAPE: f64 = 0.25;
/// Shapes that are compiled before the first step, at most.
const MOST_SHAPES: usize = 6;

/// The shapes that a feed asks for, beyond its lengths of rows.
#[derive(Default)]
pub(super) struct ImageShapes {
    /// Patches that batches have room for, ascending; what needs more has its own size.
    pub rooms: Vec<usize>,
    /// Tokens of a row and patches of the shapes that rounds have, ascending, with the largest of both last.
    pub extents: Vec<(usize, usize)>,
}

impl ImageShapes {
    /// Counts the images of the first batches. Ranks take the batches of a round in one shape.
    pub fn of(form: &Form, documents: &DocumentSet, spec: &LoaderSpec) -> Result<ImageShapes> {
        let ranks = spec.share.here.max(1);
        let loader = first_batches(documents, None, spec)?;
        let extents = |batch: Batch| (batch.seq_len, images_of(form, &batch).iter().sum::<usize>());
        let batches = loader.take(COUNTED_BATCHES.next_multiple_of(ranks));
        let batches = batches.map(|batch| Ok(extents(batch.map_err(TrainError::Data)?))).collect::<Result<Vec<_>>>()?;
        let most = |round: &[(usize, usize)]| (round[0].0, round.iter().map(|of| of.1).max().unwrap_or(0));
        let rounds: Vec<(usize, usize)> = batches.chunks(ranks).map(most).collect();
        let longest = match &spec.layout {
            Layout::Padded(lengths) | Layout::Joined(lengths) => lengths.last().copied().unwrap_or(spec.seq_len),
            Layout::Packed => spec.seq_len,
        };
        Ok(ImageShapes::of_rounds(&rounds, longest, |patches| form.padded(patches)))
    }

    /// The same from the tokens of a row and the patches of rounds, where rows have at most `longest` tokens.
    fn of_rounds(rounds: &[(usize, usize)], longest: usize, padded: impl Fn(usize) -> usize) -> ImageShapes {
        let counts: Vec<usize> = rounds.iter().map(|of| of.1).collect();
        let rooms = rooms(&counts, padded);
        let room = |patches: usize| *rooms.iter().find(|room| **room >= patches).expect("the last has room for all");
        let found: Vec<(usize, usize)> = rounds.iter().map(|(tokens, patches)| (*tokens, room(*patches))).collect();
        let mut extents = found.clone();
        extents.sort_unstable();
        extents.dedup();
        // Of many shapes those of most rounds.
        extents.sort_by_key(|of| std::cmp::Reverse(found.iter().filter(|found| *found == of).count()));
        let largest = (longest, *rooms.last().expect("there is one"));
        extents.retain(|of| *of != largest);
        extents.truncate(MOST_SHAPES - 1);
        extents.sort_unstable();
        extents.push(largest);
        ImageShapes { rooms, extents }
    }
}

/// The patches that rounds have room for, ascending: those of the largest, and half of that or next to none if many have no more.
fn rooms(counts: &[usize], padded: impl Fn(usize) -> usize) -> Vec<usize> {
    let most = counts.iter().copied().max().unwrap_or(0);
    let mut rooms: Vec<usize> = Vec::new();
    for room in [0, most.div_ceil(2)].map(&padded) {
        let is_new = |count: &&usize| **count <= room && rooms.last().is_none_or(|smaller| *count > smaller);
        if room < most && counts.iter().filter(is_new).count() as f64 >= OWN_SHAPE * counts.len() as f64 {
            rooms.push(room);
        }
    }
    rooms.push(padded(most));
    rooms
}

/// Returns the patches of each image of a batch: of tokens that lie side by side, or with one between them that ends a row of
/// patches, the same in the whole image.
pub(super) fn images_of(form: &Form, batch: &Batch) -> Vec<usize> {
    let ids = &batch.input_ids;
    let (mut images, mut last, mut end_of_row) = (Vec::new(), None::<usize>, None);
    for at in (0..ids.len()).filter(|at| ids[*at] == form.token) {
        let goes_on = match last.map(|last| at - last) {
            Some(1) => true,
            Some(2) if form.breaks => *end_of_row.get_or_insert(ids[at - 1]) == ids[at - 1],
            _ => false,
        };
        match images.last_mut() {
            Some(image) if goes_on => *image += form.group(),
            _ => {
                images.push(form.group());
                end_of_row = None;
            }
        }
        last = Some(at);
    }
    images
}

#[cfg(test)]
mod tests {
    use super::*;

    fn padded(patches: usize) -> usize {
        patches.max(1).next_multiple_of(64)
    }

    #[test]
    fn shapes_of_images_are_those_that_many_batches_need() {
        let of = |counts: &[usize]| rooms(counts, padded);
        assert_eq!(of(&[]), [64]);
        assert_eq!(of(&[1000, 980, 1000, 960, 400]), [1024]);
        assert_eq!(of(&[1000, 500, 1000, 400]), [512, 1024]);
        assert_eq!(of(&[1000, 0, 0, 900]), [64, 1024]);
        assert_eq!(of(&[1000, 0, 0, 400, 500, 900]), [64, 512, 1024]);
        assert_eq!(of(&[40, 0, 60]), [64]);
    }

    #[test]
    fn only_shapes_that_rounds_have_are_compiled_ahead() {
        let of = |rounds: &[(usize, usize)], longest| ImageShapes::of_rounds(rounds, longest, padded).extents;
        assert_eq!(of(&[], 256), [(256, 64)]);
        let two = [(256, 1000), (128, 300), (256, 400), (128, 500)];
        assert_eq!(of(&two, 256), [(128, 512), (256, 512), (256, 1024)]);
        // The longest rows may get the most patches, and may be none of the first.
        assert_eq!(of(&two, 512), [(128, 512), (256, 512), (256, 1024), (512, 1024)]);
        let many: Vec<(usize, usize)> = (1..20).flat_map(|n| vec![(64 * n, 1000); n]).collect();
        let found = of(&many, 64 * 19);
        assert_eq!((found.len(), found.last(), found[0]), (MOST_SHAPES, Some(&(64 * 19, 1024)), (64 * 14, 1024)));
    }

    #[test]
    fn images_are_distinguished_by_the_tokens_between_them() {
        let form = Form { token: 9, width: 12, side: 2, window: 0, table: 0, stretched: false, breaks: false, pad: 0 };
        let of = |form: &Form, ids: &[i32]| {
            let labels = vec![1; ids.len()];
            images_of(form, &Batch::from_labels(1, ids.len(), ids.to_vec(), &labels, None, None).unwrap())
        };
        let ids = [1, 9, 9, 2, 9, 9, 9, 3, 4, 9];
        assert_eq!(of(&form, &ids), [8, 12, 4]);
        let of_rows = Form { breaks: true, ..form };
        assert_eq!(of(&of_rows, &ids), [20, 4]);
        // Rows end with 2, images with 3.
        assert_eq!(of(&of_rows, &[9, 9, 2, 9, 9, 3, 9, 2, 9, 2, 9, 3]), [16, 12]);
    }
}
