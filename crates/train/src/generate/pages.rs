//! Which pages of the cache are free. Does not know what they hold.

/// The pages of a cache.
pub struct Pages {
    free: Vec<u32>,
}

impl Pages {
    pub fn new(count: usize) -> Pages {
        Pages { free: (0..count as u32).rev().collect() }
    }

    /// So many pages, all or none.
    pub fn take(&mut self, count: usize) -> Option<Vec<u32>> {
        (count <= self.free.len()).then(|| self.free.split_off(self.free.len() - count))
    }

    pub fn give_back(&mut self, pages: Vec<u32>) {
        self.free.extend(pages);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_has_one_owner() {
        let mut pages = Pages::new(3);
        let first = pages.take(2).unwrap();
        assert!(pages.take(2).is_none());
        let second = pages.take(1).unwrap();
        assert!(!first.contains(&second[0]));
        pages.give_back(first);
        let mut all = [pages.take(2).unwrap(), second].concat();
        all.sort_unstable();
        assert_eq!(all, [0, 1, 2]);
    }
}
