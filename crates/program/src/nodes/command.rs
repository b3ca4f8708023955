//! The commands of the leading process to the others about their ranks' memory, as bytes: reads, writes and runs that
//! are not part of the work that all do by themselves. Knows places in arenas; not who carries them out.

use tensor::DType;

use crate::memory::{ArenaId, TensorRef};

/// One command to another process.
#[derive(Clone, Debug, PartialEq)]
pub enum Command {
    /// Write the bytes that follow to a dense tensor of a rank, or of all ranks of a process.
    Write { rank: Option<usize>, at: TensorRef },
    /// Send a dense tensor of a rank.
    Read { rank: usize, at: TensorRef },
    /// Run an entry by index.
    Run { entry: usize },
    /// Run one instruction of an entry.
    Step { entry: usize, index: usize },
    /// Run an entry while the leading process times its own.
    Profile { entry: usize },
}

const EVERY: u64 = u64::MAX;

impl Command {
    /// Encodes the command; the bytes to be written follow it.
    pub fn to_bytes(&self) -> Vec<u8> {
        let place = |at: &TensorRef| [u64::from(at.arena.0), at.offset as u64, at.bytes() as u64];
        let (tag, numbers) = match self {
            Command::Write { rank, at } => (1, [&[rank.map_or(EVERY, |rank| rank as u64)][..], &place(at)].concat()),
            Command::Read { rank, at } => (2, [&[*rank as u64][..], &place(at)].concat()),
            Command::Run { entry } => (3, vec![*entry as u64]),
            Command::Step { entry, index } => (4, vec![*entry as u64, *index as u64]),
            Command::Profile { entry } => (5, vec![*entry as u64]),
        };
        let numbers = numbers.into_iter().flat_map(u64::to_le_bytes);
        std::iter::once(tag).chain(numbers).collect()
    }

    /// Decodes a command and the bytes to be written; `None` where the bytes are no command.
    pub fn from_bytes(bytes: &[u8]) -> Option<(Command, &[u8])> {
        let (tag, rest) = bytes.split_first()?;
        let count = match tag {
            1 | 2 => 4,
            3 | 5 => 1,
            4 => 2,
            _ => return None,
        };
        let (numbers, rest) = rest.split_at_checked(count * size_of::<u64>())?;
        let numbers: Vec<u64> = numbers.as_chunks().0.iter().map(|bytes| u64::from_le_bytes(*bytes)).collect();
        let number = |index: usize| numbers[index] as usize;
        let at = || TensorRef::dense(ArenaId(numbers[1] as u32), number(2), DType::U8, [number(3)]);
        let command = match tag {
            1 => Command::Write { rank: (numbers[0] != EVERY).then(|| number(0)), at: at() },
            2 => Command::Read { rank: number(0), at: at() },
            3 => Command::Run { entry: number(0) },
            4 => Command::Step { entry: number(0), index: number(1) },
            _ => Command::Profile { entry: number(0) },
        };
        Some((command, rest))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_order_comes_back_and_nothing_else_is_one() {
        let at = TensorRef::dense(ArenaId(3), 256, DType::U8, [12]);
        let commands = [
            Command::Write { rank: Some(7), at: at.clone() },
            Command::Write { rank: None, at: at.clone() },
            Command::Read { rank: 2, at },
            Command::Run { entry: 4 },
            Command::Step { entry: 4, index: 9 },
            Command::Profile { entry: 1 },
        ];
        for command in commands {
            let bytes = [&command.to_bytes()[..], b"suffix"].concat();
            assert_eq!(Command::from_bytes(&bytes), Some((command, &b"suffix"[..])));
            assert_eq!(Command::from_bytes(&bytes[..bytes.len() - 7]), None, "cut off");
        }
        assert_eq!(Command::from_bytes(b"{}"), None);
        assert_eq!(Command::from_bytes(b""), None);
    }
}
