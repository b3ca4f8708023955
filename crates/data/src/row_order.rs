//! The order of documents in rows, one after another, and the position reached in it. Where the data are in parts, each
//! has an order and rows of its own, and an epoch takes as long as the part with the most rows. Knows lengths; neither
//! tokens nor batches.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::corpus::{Corpus, DocumentSet};
use crate::loader_spec::{Layout, LoaderSpec};
use crate::order::permutation;
use crate::packing::best_fit;
use crate::stream::StreamPlace;

/// Documents that are packed together.
const WINDOW: usize = 8192;

/// Between the seeds of the parts' orders.
const APART: u64 = 0x9E37_79B9_7F4A_7C15;

/// The next row of a part.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Place {
    /// Window of documents inside the epoch's order.
    pub window: u64,
    /// The row's number inside the window.
    pub bin: u64,
}

/// A place in the data: the next row to be taken.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Position {
    pub epoch: u64,
    /// Position in the first part, or the only one.
    #[serde(flatten)]
    pub first: Place,
    /// Positions in the other parts.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub others: Vec<Place>,
    /// Positions reached earlier in the epoch, when the data were in another number of parts: those of all parts.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub before: Vec<Vec<Place>>,
    /// The place in sets that are streamed at which the window begins.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stream: Option<StreamPlace>,
}

impl Position {
    fn places(&self) -> Vec<Place> {
        [&[self.first], &self.others[..]].concat()
    }

    /// The number of parts of the data.
    pub fn parts(&self) -> usize {
        1 + self.others.len()
    }

    /// The largest of its numbers, by which one that no run reaches is known.
    pub fn largest(&self) -> u64 {
        let places = self.places().into_iter().chain(self.before.iter().flatten().copied());
        let of_places = places.map(|place| place.window.max(place.bin));
        of_places.chain(self.stream.as_ref().map(StreamPlace::largest)).fold(self.epoch, u64::max)
    }
}

/// Rows as the members of a set that make them up.
pub(crate) type Rows = Vec<Vec<u32>>;

/// Rows that ranks take at once, all of one epoch.
pub(crate) struct Round {
    /// The documents that they are of.
    pub corpus: Arc<Corpus>,
    /// Rows of every part, by part.
    pub rows: Vec<Rows>,
    /// True if the epoch ends with them.
    pub is_last: bool,
}

/// The rows of the data in their order.
pub(crate) struct RowOrder {
    pub documents: DocumentSet,
    layout: Layout,
    seq_len: usize,
    shuffle: bool,
    seed: u64,
    epochs: Option<u64>,
    parts: usize,
    epoch: u64,
    before: Vec<Vec<Place>>,
    places: Vec<Place>,
    /// The order of an epoch, by part.
    orders: Option<(u64, Vec<Vec<u32>>)>,
    /// The rows of a window of an epoch, by part.
    rows: Vec<Option<(u64, u64, Rows)>>,
}

impl RowOrder {
    /// Goes on at a place, which may be of another number of parts: then what was taken of its epoch is left out.
    pub fn new(documents: DocumentSet, spec: &LoaderSpec, position: Position) -> RowOrder {
        let parts = documents.corpus.parts();
        let mut before = position.before.clone();
        let mut places = position.places();
        if places.len() != parts {
            if places.iter().any(|place| *place != Place::default()) {
                before.push(places);
            }
            places = vec![Place::default(); parts];
        }
        RowOrder {
            layout: spec.layout.clone(),
            seq_len: spec.seq_len,
            shuffle: spec.shuffle,
            seed: spec.seed,
            epochs: spec.epochs,
            parts,
            epoch: position.epoch,
            before,
            places,
            orders: None,
            rows: vec![None; parts],
            documents,
        }
    }

    pub fn position(&self) -> Position {
        Position {
            epoch: self.epoch,
            first: self.places[0],
            others: self.places[1..].to_vec(),
            before: self.before.clone(),
            stream: None,
        }
    }

    /// The next `wanted` rows of every part: documents by their numbers in the corpus. Parts that have come to the
    /// end of the epoch give fewer rows, or none, until all have. `None` after the last epoch.
    pub fn round(&mut self, wanted: usize) -> Option<Round> {
        while !self.is_over() {
            let rows: Vec<Rows> = (0..self.parts).map(|part| self.take(part, wanted)).collect();
            let is_last = (0..self.parts).all(|part| self.is_through(part));
            if is_last {
                self.begin_next_epoch();
            }
            if rows.iter().any(|rows| !rows.is_empty()) {
                return Some(Round { corpus: self.documents.corpus.clone(), rows, is_last });
            }
        }
        None
    }

    /// Rows of every part in an epoch.
    pub fn rows_in_epoch(&mut self, epoch: u64) -> Vec<u64> {
        self.order(epoch);
        let (_, orders) = self.orders.as_ref().expect("just made");
        let rows = |order: &Vec<u32>| order.chunks(WINDOW).map(|window| self.pack(window).len() as u64).sum();
        orders.iter().map(rows).collect()
    }

    fn is_over(&self) -> bool {
        self.epochs.is_some_and(|epochs| self.epoch >= epochs)
    }

    fn begin_next_epoch(&mut self) {
        self.epoch += 1;
        self.places.fill(Place::default());
        self.before.clear();
    }

    fn take(&mut self, part: usize, wanted: usize) -> Rows {
        self.order(self.epoch);
        std::iter::from_fn(|| self.next_row(part)).take(wanted).collect()
    }

    /// Says whether a part, of which rows were just requested, has none left in the present epoch.
    fn is_through(&self, part: usize) -> bool {
        let at = self.places[part];
        let (_, orders) = self.orders.as_ref().expect("the order of the epoch is known");
        let windows = orders[part].len().div_ceil(WINDOW) as u64;
        let is_known = |(epoch, window, _): &&(u64, u64, Rows)| (*epoch, *window) == (self.epoch, at.window);
        let rows = self.rows[part].as_ref().filter(is_known).map_or(u64::MAX, |(_, _, rows)| rows.len() as u64);
        at.window >= windows || (at.window + 1 == windows && at.bin >= rows)
    }

    /// The next row of a part in the present epoch, whose order is known.
    fn next_row(&mut self, part: usize) -> Option<Vec<u32>> {
        loop {
            let at = self.places[part];
            let known = (self.epoch, at.window);
            if self.rows[part].as_ref().is_none_or(|(epoch, window, _)| (*epoch, *window) != known) {
                let (_, orders) = self.orders.as_ref().expect("the order of the epoch is known");
                let window = orders[part].chunks(WINDOW).nth(at.window as usize)?;
                self.rows[part] = Some((known.0, known.1, self.pack(window)));
            }
            let (_, _, rows) = self.rows[part].as_ref().expect("just made");
            if let Some(row) = rows.get(at.bin as usize) {
                self.places[part].bin += 1;
                return Some(row.iter().map(|member| self.documents.members[*member as usize]).collect());
            }
            self.places[part] = Place { window: at.window + 1, bin: 0 };
        }
    }

    /// Sees to it that the order of an epoch is known.
    fn order(&mut self, epoch: u64) {
        if self.orders.as_ref().is_none_or(|(of, _)| *of != epoch) {
            let taken = if epoch == self.epoch { self.taken() } else { Vec::new() };
            let orders = (0..self.parts).map(|part| self.order_of(epoch, (part, self.parts), &taken)).collect();
            self.orders = Some((epoch, orders));
        }
    }

    /// The members of a part, in the order of an epoch, without those that are taken.
    fn order_of(&self, epoch: u64, (part, parts): (usize, usize), taken: &[bool]) -> Vec<u32> {
        let DocumentSet { corpus, members } = &self.documents;
        let is_of = |member: &u32| parts == 1 || corpus.part_of(members[*member as usize], parts) == part;
        let own: Vec<u32> = (0..members.len() as u32).filter(is_of).collect();
        let seed = self.seed.wrapping_add(APART.wrapping_mul(part as u64));
        let mut order = match self.shuffle {
            true => permutation(own.len(), seed, epoch).into_iter().map(|place| own[place as usize]).collect(),
            false => own,
        };
        order.retain(|member| !taken.get(*member as usize).is_some_and(|taken| *taken));
        order
    }

    /// By member: whether it was taken in the present epoch while the data were in other parts.
    fn taken(&self) -> Vec<bool> {
        let mut taken = Vec::new();
        for places in &self.before {
            let mut and_these = taken.clone();
            and_these.resize(self.documents.len(), false);
            for (part, place) in places.iter().enumerate() {
                let order = self.order_of(self.epoch, (part, places.len()), &taken);
                for (window, members) in (0..=place.window).zip(order.chunks(WINDOW)) {
                    let rows = self.pack(members);
                    let count = if window < place.window { rows.len() } else { place.bin as usize };
                    rows.iter().take(count).flatten().for_each(|member| and_these[*member as usize] = true);
                }
            }
            taken = and_these;
        }
        taken
    }

    /// Packs members into rows by the layout.
    fn pack(&self, members: &[u32]) -> Rows {
        let DocumentSet { corpus, members: documents } = &self.documents;
        let length = |member: u32| corpus.length(documents[member as usize] as usize);
        pack(members, &length, &self.layout, self.seq_len)
    }
}

/// Packs members, each of `length` tokens, into rows of `seq_len` tokens by a layout.
pub(crate) fn pack(members: &[u32], length: &dyn Fn(u32) -> usize, layout: &Layout, seq_len: usize) -> Rows {
    match layout {
        Layout::Padded(_) | Layout::Joined(_) => members.iter().map(|member| vec![*member]).collect(),
        Layout::Packed => {
            let lengths: Vec<usize> = members.iter().map(|member| length(*member)).collect();
            let rows = best_fit(&lengths, seq_len);
            rows.into_iter().map(|row| row.into_iter().map(|i| members[i as usize]).collect()).collect()
        }
    }
}
