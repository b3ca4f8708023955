//! Which sequences of a generation have pages, and which of them read tokens in the next step. Sequences whose prompts begin
//! alike share the pages of their beginning.

use super::capacity::PAGE;
use super::generation::Generation;

impl Generation {
    /// The sequences that read tokens next: all with a token each, or one with a part of its prompt. Prompts of which a few
    /// tokens are left are read together where that takes no more steps than one after another.
    pub(super) fn next_rows(&self) -> Vec<usize> {
        let of = |index: &usize| &self.sequences[*index];
        let is_ready =
            |index: &usize| of(index).shared.is_none_or(|(other, tokens)| self.sequences[other].read >= tokens);
        let ready: Vec<usize> = self.running.iter().copied().filter(is_ready).collect();
        let unread: Vec<usize> = ready.iter().copied().filter(|index| of(index).left() > 1).collect();
        let most = unread.iter().map(|index| of(index).left()).max().unwrap_or(0);
        let has_images = unread.iter().any(|index| of(index).images.is_some());
        match unread.first() {
            Some(first) if most > PAGE || most > unread.len() || has_images => {
                let long = unread.iter().find(|index| of(index).left() > PAGE);
                vec![*long.unwrap_or(first)]
            }
            _ => ready,
        }
    }

    /// Begins with waiting sequences, in their order, while there is room.
    pub(super) fn admit(&mut self) {
        while let Some(index) = self.waiting.front().copied().filter(|_| self.running.len() < self.rows) {
            let shared = self.shared_beginning(index);
            let count = self.sequences[index].need().pages();
            let pages =
                shared.map_or(&[][..], |(other, tokens)| &self.sequences[other].pages[..tokens / PAGE]).to_vec();
            let Some(pages) = self.pages.take(count, &pages) else { break };
            let sequence = &mut self.sequences[index];
            (sequence.pages, sequence.shared) = (pages, shared);
            sequence.read = shared.map_or(0, |(_, tokens)| tokens);
            sequence.slot = self.slots.pop().expect("there are as many slots as rows");
            self.waiting.pop_front();
            self.running.push(index);
        }
    }

    /// The running sequence whose prompt has the most tokens in whole pages in common with a prompt, of which one token is
    /// left to read, and how many these are.
    fn shared_beginning(&self, index: usize) -> Option<(usize, usize)> {
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
        let others = self.running.iter().filter(|other| self.sequences[**other].images.is_none());
        // The first of several: it is read first.
        others
            .map(|other| (*other, common(other)))
            .rev()
            .max_by_key(|(_, tokens)| *tokens)
            .filter(|(_, tokens)| *tokens > 0)
    }
}
