//! Rows of packed documents, from one window after another, and the position reached in them.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use super::Stream;
use super::place::StreamPlace;
use super::reader::Window;
use super::windows::Windows;
use crate::corpus::Corpus;
use crate::error::DataError;
use crate::loader_spec::{Layout, LoaderSpec};
use crate::order::permutation;
use crate::row_order::{Place, Position, Round, Rows, pack};

/// A window whose rows are being taken.
struct OpenWindow {
    window: Window,
    rows: Rows,
}

/// The rows of a stream in their order.
pub(crate) struct StreamOrder {
    stream: Arc<Stream>,
    layout: Layout,
    seq_len: usize,
    shuffle: bool,
    seed: u64,
    /// The beginning of the present window, and the rows of it that are taken.
    at: StreamPlace,
    taken: u64,
    present: Option<OpenWindow>,
    windows: Option<Windows>,
    /// Set once no more rows are requested, even while some are waited for.
    pub over: Arc<AtomicBool>,
    /// Ends with the first window.
    is_short: bool,
}

impl StreamOrder {
    /// Goes on at a position. Nothing is read before rows are requested.
    pub fn new(stream: Arc<Stream>, spec: &LoaderSpec, position: &Position) -> StreamOrder {
        let at = position.stream.clone().unwrap_or_else(|| stream.first.begin.clone());
        StreamOrder {
            stream,
            layout: spec.layout.clone(),
            seq_len: spec.seq_len,
            shuffle: spec.shuffle,
            seed: spec.seed,
            at,
            taken: position.first.bin,
            present: None,
            windows: None,
            over: Arc::default(),
            is_short: false,
        }
    }

    /// The rows of the first window alone.
    pub fn beginning(stream: Arc<Stream>, spec: &LoaderSpec) -> StreamOrder {
        StreamOrder { is_short: true, ..StreamOrder::new(stream, spec, &Position::default()) }
    }

    pub fn position(&self) -> Position {
        let epoch = self.at.sets.iter().map(|set| set.epoch).min().unwrap_or(0);
        let first = Place { window: self.at.window, bin: self.taken };
        Position { epoch, first, stream: Some(self.at.clone()), ..Position::default() }
    }

    /// The next `wanted` rows, fewer at the end of a pass over the only set. Errors: the next window cannot be read.
    pub fn round(&mut self, wanted: usize) -> Result<Option<Round>, DataError> {
        let (mut corpus, mut rows, mut is_last) = (Corpus::default(), Rows::new(), false);
        while rows.len() < wanted && !is_last {
            if !self.is_open()? {
                break;
            }
            let open = self.present.as_ref().expect("just opened");
            let base = corpus.len() as u32;
            let left = open.rows.iter().skip(self.taken as usize).take(wanted - rows.len());
            let before = rows.len();
            rows.extend(left.map(|row| row.iter().map(|document| base + document).collect()));
            corpus.extend(&open.window.corpus);
            let taken = (rows.len() - before) as u64;
            let is_through = self.taken + taken >= open.rows.len() as u64;
            let (ends_epoch, end) = (open.window.ends_epoch, open.window.end.clone());
            self.taken += taken;
            if is_through {
                is_last = ends_epoch && !rows.is_empty();
                self.present = None;
                (self.at, self.taken) = (end, 0);
            }
        }
        let round = Round { corpus: Arc::new(corpus), rows: vec![rows], is_last };
        Ok((!round.rows[0].is_empty()).then_some(round))
    }

    /// Opens the window at the place, where none is open. False: only the first was requested, and it is used up.
    fn is_open(&mut self) -> Result<bool, DataError> {
        if self.present.is_some() {
            return Ok(true);
        }
        let stream = self.stream.clone();
        let is_first = self.at == stream.first.begin;
        if !is_first && self.is_short {
            return Ok(false);
        }
        let window = match is_first {
            true => stream.first.clone(),
            false => self.windows_from(self.at.clone()).next()?,
        };
        if is_first && !self.is_short {
            // The next one is read while this one is trained on.
            self.windows_from(window.end.clone());
        }
        let rows = self.pack(&window.corpus, window.begin.window);
        self.present = Some(OpenWindow { window, rows });
        Ok(true)
    }

    /// The windows that are read ahead, which begin at a place.
    fn windows_from(&mut self, at: StreamPlace) -> &mut Windows {
        let (stream, over) = (&self.stream, &self.over);
        self.windows.get_or_insert_with(|| Windows::new(stream.clone(), at, over.clone()))
    }

    fn pack(&self, corpus: &Corpus, number: u64) -> Rows {
        let order = match self.shuffle {
            true => permutation(corpus.len(), self.seed, number),
            false => (0..corpus.len() as u32).collect(),
        };
        pack(&order, &|document| corpus.length(document as usize), &self.layout, self.seq_len)
    }
}
