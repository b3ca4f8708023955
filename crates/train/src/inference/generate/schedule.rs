//! Assignment of pages and ranks to the sequences of a generation, and the choice of those that read tokens in the next
//! step. Sequences of one adapter whose prompts begin alike share the pages of their beginning.

use super::capacity::PAGE;
use super::generation::{Generation, Sequence};
use super::pages::Place;

/// The sequences of a step, by rank.
pub(super) struct Turn {
    pub rows: Vec<Vec<usize>>,
    /// Each of them reads one token.
    pub single: bool,
}

/// Sequences that a rank may have more than another because they begin as others there.
const UNEVEN: usize = 16;

impl Generation {
    /// The sequences that read tokens next: on each rank all with a token each, or on each one with a part of its prompt.
    /// Prompts of which a few tokens are left are read together where that takes no more steps than one after another.
    pub(super) fn next_turn(&self) -> Turn {
        let left = |index: &usize| self.sequences[*index].left();
        let is_ready = |index: &usize| {
            let shared = self.sequences[*index].shared;
            shared.is_none_or(|(other, tokens)| self.sequences[other].read >= tokens)
        };
        let ready = |place: &Place| place.running.iter().copied().filter(is_ready).collect::<Vec<usize>>();
        let ready: Vec<Vec<usize>> = self.places.iter().map(ready).collect();
        let unread = |of: &Vec<usize>| of.iter().copied().filter(|index| left(index) > 1).collect::<Vec<usize>>();
        let unread: Vec<Vec<usize>> = ready.iter().map(unread).collect();
        let alone = |of: &Vec<usize>| {
            let most = of.iter().map(left).max().unwrap_or(0);
            let has_images = of.iter().any(|index| self.sequences[*index].images.is_some());
            !of.is_empty() && (most > PAGE || most > of.len() || has_images)
        };
        if !unread.iter().any(alone) {
            return Turn { rows: ready, single: true };
        }
        let one = |of: Vec<usize>| {
            let long = of.iter().copied().find(|index| left(index) > PAGE);
            long.or(of.first().copied()).into_iter().collect()
        };
        Turn { rows: unread.into_iter().map(one).collect(), single: false }
    }

    /// Begins with waiting sequences, in their order, while there is room.
    pub(super) fn admit(&mut self) {
        while let Some(index) = self.waiting.front().copied() {
            let least = self.places.iter().map(|place| place.running.len()).min().unwrap_or(0);
            let has_room = |place: &usize| {
                let running = self.places[*place].running.len();
                running < self.rows && running <= least + UNEVEN
            };
            let shared = |place: usize| self.shared_beginning(index, &self.places[place]);
            let places = (0..self.places.len()).filter(has_room).map(|place| (place, shared(place)));
            let tokens = |of: &(usize, Option<(usize, usize)>)| of.1.map_or(0, |(_, tokens)| tokens);
            // The most in common, then the fewest sequences, then the first.
            let Some((rank, shared)) =
                places.rev().max_by_key(|of| (tokens(of), std::cmp::Reverse(self.places[of.0].running.len())))
            else {
                break;
            };
            let count = self.sequences[index].need().pages();
            let pages =
                shared.map_or(&[][..], |(other, tokens)| &self.sequences[other].pages[..tokens / PAGE]).to_vec();
            let place = &mut self.places[rank];
            let Some(pages) = place.pages.take(count, &pages) else { break };
            let sequence = &mut self.sequences[index];
            (sequence.pages, sequence.shared, sequence.rank) = (pages, shared, rank);
            sequence.read = shared.map_or(0, |(_, tokens)| tokens);
            sequence.slot = place.slots.pop().expect("there are as many slots as rows");
            self.waiting.pop_front();
            place.running.push(index);
        }
    }

    /// Takes the place of a sequence that ended.
    pub(super) fn retire(&mut self, index: usize) {
        let sequence = &mut self.sequences[index];
        let place = &mut self.places[sequence.rank];
        place.pages.give_back(std::mem::take(&mut sequence.pages));
        place.slots.push(sequence.slot);
        place.running.retain(|running| *running != index);
    }

    /// The sequence that runs at a place whose prompt has the most tokens in whole pages in common with a prompt, of which one
    /// token is left to read, and how many these are.
    fn shared_beginning(&self, index: usize, place: &Place) -> Option<(usize, usize)> {
        let sequence = &self.sequences[index];
        if !self.shares || sequence.images.is_some() {
            return None;
        }
        let most = sequence.prompt - 1;
        let common = |other: &usize| {
            let other = &self.sequences[*other];
            let both = sequence.ids[..most].iter().zip(&other.ids[..other.prompt]);
            both.take_while(|(a, b)| a == b).count() / PAGE * PAGE
        };
        let is_alike = |other: &Sequence| other.images.is_none() && other.adapter == sequence.adapter;
        let others = place.running.iter().filter(|other| is_alike(&self.sequences[**other]));
        // The first of several: it is read first.
        let of = others.map(|other| (*other, common(other))).rev().max_by_key(|(_, tokens)| *tokens);
        of.filter(|(_, tokens)| *tokens > 0)
    }
}
