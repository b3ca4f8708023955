//! Free pages of the cache, and the number of sequences that read each of the others. Does not know what they hold.

/// The pages of a cache.
pub struct Pages {
    free: Vec<u32>,
    /// The sequences that have each page.
    owners: Vec<u32>,
}

impl Pages {
    pub fn new(count: usize) -> Pages {
        Pages { free: (0..count as u32).rev().collect(), owners: vec![0; count] }
    }

    /// Takes a number of pages, of which the first are pages of another sequence; all or none.
    pub fn take(&mut self, count: usize, shared: &[u32]) -> Option<Vec<u32>> {
        let own = count - shared.len();
        let rest = (own <= self.free.len()).then(|| self.free.split_off(self.free.len() - own))?;
        let pages = [shared, &rest].concat();
        pages.iter().for_each(|page| self.owners[*page as usize] += 1);
        Some(pages)
    }

    pub fn give_back(&mut self, pages: Vec<u32>) {
        for page in pages {
            let owners = &mut self.owners[page as usize];
            *owners -= 1;
            if *owners == 0 {
                self.free.push(page);
            }
        }
    }
}

/// The pages and slots of a rank that no sequence has, and the sequences that run there.
pub(super) struct Place {
    pub pages: Pages,
    pub slots: Vec<u32>,
    pub running: Vec<usize>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_free_once_its_last_owner_gave_it_back() {
        let mut pages = Pages::new(3);
        let first = pages.take(2, &[]).unwrap();
        assert!(pages.take(2, &[]).is_none());
        let second = pages.take(2, &first[..1]).unwrap();
        assert!(second[0] == first[0] && !first.contains(&second[1]));
        assert!(pages.take(1, &[]).is_none());
        pages.give_back(first.clone());
        let third = pages.take(1, &[]).unwrap();
        assert_eq!(third, first[1..]);
        pages.give_back(second);
        pages.give_back(third);
        let mut all = pages.take(3, &[]).unwrap();
        all.sort_unstable();
        assert_eq!(all, [0, 1, 2]);
    }
}
