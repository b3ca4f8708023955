//! Texts in UTF-16, as spreadsheets and shells of Windows write them, read as UTF-8. A byte order mark distinguishes them.
//!
//! Knows no formats.

use std::io::{self, BufRead, BufReader, ErrorKind, Read};

/// Bytes that are decoded at once.
const BLOCK: usize = 1 << 16;

/// The same content; as UTF-8, without the mark, where a mark says that it is UTF-16.
pub(super) fn decoded(mut content: Box<dyn BufRead + Send>) -> io::Result<Box<dyn BufRead + Send>> {
    let read: fn([u8; 2]) -> u16 = match content.fill_buf()? {
        [0xff, 0xfe, 0, 0, ..] => {
            return Err(io::Error::new(ErrorKind::InvalidData, "the text is UTF-32, expected UTF-8"));
        }
        [0xff, 0xfe, ..] => u16::from_le_bytes,
        [0xfe, 0xff, ..] => u16::from_be_bytes,
        _ => return Ok(content),
    };
    content.consume(2);
    let decoder = Decoder { content, read, bytes: Vec::new(), high: None, text: Vec::new(), at: 0 };
    Ok(Box::new(BufReader::with_capacity(BLOCK, decoder)))
}

struct Decoder<R> {
    content: R,
    read: fn([u8; 2]) -> u16,
    /// Bytes that were read and not decoded: less than a unit between two reads.
    bytes: Vec<u8>,
    /// The first half of a character whose second is still to come.
    high: Option<u16>,
    /// Decoded text, of which the first `at` bytes were handed on.
    text: Vec<u8>,
    at: usize,
}

impl<R: Read> Decoder<R> {
    /// Decodes a block. False at the end of the content.
    fn decode(&mut self) -> io::Result<bool> {
        let invalid = || io::Error::new(ErrorKind::InvalidData, "the text is not valid UTF-16");
        self.text.clear();
        self.at = 0;
        let count = (&mut self.content).take(BLOCK as u64).read_to_end(&mut self.bytes)?;
        if count == 0 {
            return if self.bytes.is_empty() && self.high.is_none() { Ok(false) } else { Err(invalid()) };
        }
        let (units, rest) = self.bytes.as_chunks();
        let mut units: Vec<u16> =
            self.high.take().into_iter().chain(units.iter().map(|unit| (self.read)(*unit))).collect();
        let rest = rest.to_vec();
        self.bytes = rest;
        self.high = units.pop_if(|unit| (0xd800..0xdc00).contains(unit));
        let mut utf8 = [0; 4];
        for found in char::decode_utf16(units) {
            let found = found.map_err(|_| invalid())?;
            self.text.extend(found.encode_utf8(&mut utf8).as_bytes());
        }
        Ok(true)
    }
}

impl<R: Read> Read for Decoder<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.at == self.text.len() {
            if !self.decode()? {
                return Ok(0);
            }
        }
        let count = buffer.len().min(self.text.len() - self.at);
        buffer[..count].copy_from_slice(&self.text[self.at..][..count]);
        self.at += count;
        Ok(count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(bytes: &[u8], piece: usize) -> io::Result<String> {
        let mut text = String::new();
        decoded(Box::new(BufReader::with_capacity(piece, io::Cursor::new(bytes.to_vec()))))?
            .read_to_string(&mut text)?;
        Ok(text)
    }

    #[test]
    fn both_orders_give_the_text() {
        let text = format!("é😀{}\n", "a你😀".repeat(BLOCK / 3));
        for order in [u16::to_le_bytes, u16::to_be_bytes] {
            let bytes: Vec<u8> = [0xfeff].into_iter().chain(text.encode_utf16()).flat_map(order).collect();
            for piece in [5, 4096] {
                assert!(read(&bytes, piece).unwrap() == text);
            }
            assert!(read(&bytes[..bytes.len() - 1], 4096).unwrap_err().to_string().contains("not valid UTF-16"));
        }
        assert_eq!(read("plain".as_bytes(), 64).unwrap(), "plain");
        assert!(read(&[0xff, 0xfe, 0x3d, 0xd8], 64).is_err(), "half a character");
        assert!(read(&[0xff, 0xfe, 0, 0, 97, 0, 0, 0], 64).unwrap_err().to_string().contains("UTF-32"));
    }
}
