//! Bytes on a connection, cut into frames: a channel, a length, the bytes. Knows no meaning of them.

use std::io::{self, Read, Write};

/// The purpose of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Channel {
    /// The bytes of a collective.
    Collective,
    /// A command of node 0.
    Command,
    /// The result of a command.
    Reply,
    /// The introduction of a node when nodes meet.
    Hello,
    /// The end of the run, and the reason.
    Abort,
    /// A request to end the run, made on some node.
    Wish,
    /// The sender leaves: nothing comes after it.
    Farewell,
    /// A sign that the sender is alive.
    Beat,
}

/// Number of channels whose frames wait until they are requested.
pub const BOXES: usize = 3;

const ALL: [Channel; 8] = [
    Channel::Collective,
    Channel::Command,
    Channel::Reply,
    Channel::Hello,
    Channel::Abort,
    Channel::Wish,
    Channel::Farewell,
    Channel::Beat,
];

/// Maximal length of a frame that reports an event of a node, bytes.
const MOST_SAID: u64 = 1 << 16;

/// Length of the header: the channel in one byte, and the length in eight.
const HEADER: usize = 9;

/// Writes one frame, whose bytes are given in parts.
pub fn write(stream: &mut impl Write, channel: Channel, parts: &[&[u8]]) -> io::Result<()> {
    let bytes: usize = parts.iter().map(|part| part.len()).sum();
    let mut header = [0; HEADER];
    header[0] = channel as u8;
    header[1..].copy_from_slice(&(bytes as u64).to_le_bytes());
    stream.write_all(&header)?;
    parts.iter().try_for_each(|part| stream.write_all(part))
}

/// Reads one frame of at most `most` bytes. Memory is allocated as bytes come, not as the header says.
pub fn read(stream: &mut impl Read, most: u64) -> io::Result<(Channel, Vec<u8>)> {
    let mut header = [0; HEADER];
    stream.read_exact(&mut header)?;
    let invalid = |text: String| io::Error::new(io::ErrorKind::InvalidData, text);
    let channel = ALL.get(header[0] as usize).ok_or_else(|| invalid(format!("there is no channel {}", header[0])))?;
    let length = u64::from_le_bytes(header[1..].try_into().expect("eight bytes"));
    let waits = (*channel as usize) < BOXES || *channel == Channel::Hello;
    let most = if waits { most } else { most.min(MOST_SAID) };
    if length > most {
        return Err(invalid(format!("a frame of {length} bytes, expected at most {most}")));
    }
    let mut bytes = Vec::with_capacity(length.min(1 << 20) as usize);
    let read = stream.take(length).read_to_end(&mut bytes)?;
    if read as u64 != length {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok((*channel, bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_comes_back_and_a_false_one_is_refused() {
        for channel in ALL {
            let mut bytes = Vec::new();
            write(&mut bytes, channel, &[b"ab", b"", b"c"]).unwrap();
            assert_eq!(read(&mut &bytes[..], 3).unwrap(), (channel, b"abc".to_vec()));
            assert!(read(&mut &bytes[..], 2).unwrap_err().to_string().contains("3 bytes, expected at most 2"));
            assert!(read(&mut &bytes[..bytes.len() - 1], 3).is_err(), "cut off");
        }
        let long = [&[Channel::Abort as u8][..], &(1u64 << 20).to_le_bytes(), &[0; 1 << 20]].concat();
        assert!(read(&mut &long[..], u64::MAX).unwrap_err().to_string().contains("expected at most 65536"));
        let huge = [&[0u8][..], &u64::MAX.to_le_bytes()].concat();
        assert!(read(&mut &huge[..], u64::MAX).is_err(), "no memory is taken for what does not come");
        assert!(read(&mut &[9u8; 20][..], 1 << 30).unwrap_err().to_string().contains("no channel 9"));
    }
}
