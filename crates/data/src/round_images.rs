//! The images of a round of batches: read by threads of their own, an image each, while earlier rounds are trained on, and
//! laid out when their round comes. Knows no order of rows.
//!
//! Pixels are decoded again in each epoch, and not kept on disk: those of a megapixel are 3 MB, the file is a part of
//! that. Reading them back would take a disk as fast as the cores decode.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Arc, LazyLock};
use std::thread;

use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::batch::Batch;
use crate::error::DataError;
use crate::image::decode;
use crate::image_source::ImageRef;
use crate::patches::Picture;
use crate::pictures::ImageReader;

/// A batch, or why there is none.
pub(crate) type Made = Result<Batch, DataError>;

type Pictures = Result<Vec<Picture>, DataError>;

/// The threads that read images, one for each core. Others wait for those of rayon, and would wait for images there.
static READERS: LazyLock<ThreadPool> = LazyLock::new(|| {
    let built = ThreadPoolBuilder::new().thread_name(|number| format!("image-{number}")).build();
    built.expect("the system can start threads")
});

/// Images and rounds that are begun ahead, for each thread: one is read, and the next one waits.
const OF_THREAD: usize = 2;
/// Images and rounds that are begun ahead at most: the views of the largest images are some fifty megabytes each.
const MOST_AHEAD: usize = 64;

/// Returns the images, and rounds, that keep all threads at work.
pub(crate) fn most_ahead() -> usize {
    (OF_THREAD * READERS.current_num_threads()).min(MOST_AHEAD)
}

/// A round whose images are being read.
pub(crate) struct Reading {
    /// None where images stay as they are in the rows.
    reader: Option<Arc<ImageReader>>,
    batches: Vec<Made>,
    /// The pictures that are being made, by batch and image.
    pictures: Vec<Vec<Receiver<thread::Result<Pictures>>>>,
}

impl Reading {
    /// Begins to read the images of a round.
    pub fn begin(reader: Option<Arc<ImageReader>>, mut batches: Vec<Made>) -> Reading {
        let mut pictures = Vec::new();
        if let Some(reader) = &reader {
            let begun = |made: &mut Made| {
                let images = made.as_mut().map_or(Vec::new(), |batch| std::mem::take(&mut batch.images));
                images.into_iter().map(|image| spawn(reader.clone(), image)).collect()
            };
            pictures = batches.iter_mut().map(begun).collect();
        }
        Reading { reader, batches, pictures }
    }

    /// Returns the number of its images.
    pub fn images(&self) -> usize {
        self.pictures.iter().map(Vec::len).sum()
    }

    /// Waits for the images, and lays them out; all batches get as many patches.
    pub fn finish(self) -> VecDeque<Made> {
        let Some(reader) = self.reader else { return self.batches.into() };
        let read = |(made, pictures): (Made, Vec<Receiver<thread::Result<Pictures>>>)| {
            let batch = made?;
            let mut all = Vec::new();
            for picture in pictures {
                let read = picture.recv().expect("the thread of an image sends what it read");
                all.extend(read.unwrap_or_else(|panic| resume_unwind(panic))?);
            }
            Ok((batch, all))
        };
        let read: Vec<Result<(Batch, Vec<Picture>), DataError>> =
            self.batches.into_iter().zip(self.pictures).map(read).collect();
        let patches = |pictures: &[Picture]| pictures.iter().map(|of| of.grid[0] * of.grid[1]).sum::<usize>();
        let most = read.iter().flatten().map(|(_, pictures)| patches(pictures)).max().unwrap_or(0);
        let most = reader.room(most);
        let laid_out = |(batch, pictures): (Batch, Vec<Picture>)| {
            let patches = reader.form.lay_out_among(&batch, &pictures, most)?;
            Ok(Batch { patches, ..batch })
        };
        read.into_iter().map(|read| read.and_then(laid_out)).collect()
    }
}

fn spawn(reader: Arc<ImageReader>, image: ImageRef) -> Receiver<thread::Result<Pictures>> {
    let (sender, receiver) = sync_channel(1);
    READERS.spawn_fifo(move || {
        let read = catch_unwind(AssertUnwindSafe(|| pictures(&reader, &image)));
        // Nothing waits for it where the loader has ended.
        let _ = sender.send(read);
    });
    receiver
}

fn pictures(reader: &ImageReader, image: &ImageRef) -> Pictures {
    let refused = |problem: String| DataError::invalid(image.source.name(), problem);
    let bytes = image.read().map_err(refused)?;
    let pixels = decode(&bytes, &reader.limits).map_err(refused)?;
    reader.pictures(pixels).map_err(refused)
}
