//! The handshake in which both ends of a connection prove that they know the run's token, without sending it: each
//! answers a number that the other drew with a keyed digest of it. The digest covers the address that was reached, so
//! an answer that is passed on to another address is worth nothing. Knows what a token is; not what is sent after the
//! proof.

use std::fs::File;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use blake3::{Hash, Hasher};

use crate::owner::is_own_user;

const MAGIC: [u8; 8] = *b"surogate";

/// Version of the protocol between nodes.
const PROTOCOL: u32 = 2;

/// The timeout of each read and write with a stranger.
const TIMEOUT: Duration = Duration::from_secs(10);

/// The time for which further bytes of a refused stranger are read.
const LAST_WORDS: Duration = Duration::from_millis(200);

/// The longest reason for a refusal, bytes.
const REASON: usize = 1000;

/// The secret that the nodes of a run share: a key that is derived from its text.
#[derive(Clone)]
pub struct Token {
    key: [u8; 32],
    /// The process at the other end must be this user's.
    of_user: bool,
}

impl Token {
    pub fn new(text: &str) -> Token {
        let key = blake3::derive_key("surogate 2026 token of the nodes of a run", text.as_bytes());
        Token { key, of_user: false }
    }

    /// No secret: nodes are processes of one user on one machine, as the system says.
    pub fn of_user() -> Token {
        Token { of_user: true, ..Token::new("") }
    }

    /// Returns the token of the connections that follow from a meeting of nodes: connections of other meetings are
    /// refused.
    pub fn of_meeting(&self, number: &[u8]) -> Token {
        Token { key: *self.digest(&[b"meeting", number]).as_bytes(), of_user: self.of_user }
    }

    /// Errors: a secret is needed, and the other end is another user's.
    fn check_user(&self, stream: &TcpStream) -> Result<(), String> {
        if !self.of_user {
            return Ok(());
        }
        let hint = "to connect processes of several users, give all nodes the same SUROGATE_TOKEN";
        match is_own_user(stream) {
            Ok(true) => Ok(()),
            Ok(false) => Err(format!("it is the process of another user; {hint}")),
            Err(error) => Err(format!("{error}; {hint}")),
        }
    }

    /// Returns the digest of parts with their lengths, so that no two lists of parts have the same input.
    fn digest(&self, parts: &[&[u8]]) -> Hash {
        let mut hasher = Hasher::new_keyed(&self.key);
        for part in parts {
            hasher.update(&(part.len() as u64).to_le_bytes());
            hasher.update(part);
        }
        hasher.finalize()
    }

    fn proof(&self, role: &str, numbers: [&[u8; 32]; 2], node: u32, reached: SocketAddr) -> Hash {
        let reached = SocketAddr::new(reached.ip().to_canonical(), reached.port()).to_string();
        self.digest(&[role.as_bytes(), numbers[0], numbers[1], &node.to_le_bytes(), reached.as_bytes()])
    }
}

/// The reason why a connection is not one between nodes of the run.
#[derive(Debug)]
pub enum Unproven {
    /// One end refuses, with a reason in words.
    Refused(String),
    /// The connection broke off, or nothing came.
    Broken(io::Error),
}

impl From<io::Error> for Unproven {
    fn from(error: io::Error) -> Unproven {
        Unproven::Broken(error)
    }
}

/// Returns a random number that cannot be guessed.
pub fn random() -> io::Result<[u8; 32]> {
    let mut number = [0; 32];
    File::open("/dev/urandom")?.read_exact(&mut number)?;
    Ok(number)
}

/// Runs the side that was connected to, and returns the number that the other node has proved.
pub fn accept(stream: &mut TcpStream, token: &Token, nodes: usize) -> Result<usize, Unproven> {
    limited(stream, |stream| {
        let own = random()?;
        if let Err(why) = token.check_user(stream.0) {
            return refuse(stream, why);
        }
        stream.write_all(&[&MAGIC[..], &PROTOCOL.to_le_bytes(), &own].concat())?;
        let mut greeting = [0; 12];
        stream.read_exact(&mut greeting)?;
        if let Err(why) = check_greeting(&greeting) {
            return refuse(stream, why);
        }
        let mut rest = [0; 68];
        stream.read_exact(&mut rest)?;
        let number: [u8; 32] = rest[..32].try_into().expect("32 bytes");
        let node = u32::from_le_bytes(rest[32..36].try_into().expect("four bytes"));
        let answer = Hash::from_bytes(rest[36..].try_into().expect("32 bytes"));
        let reached = stream.0.local_addr()?;
        // The comparison of digests takes the same time for any input.
        if token.proof("joins", [&own, &number], node, reached) != answer {
            return refuse(
                stream,
                format!("the token is not that of the run, or {reached} was reached by another address"),
            );
        }
        if node as usize >= nodes {
            return refuse(stream, format!("there is no node {node} among {nodes}"));
        }
        let proof = token.proof("accepts", [&own, &number], node, reached);
        stream.write_all(&[&[0][..], proof.as_bytes()].concat())?;
        Ok(node as usize)
    })
}

/// Runs the side that connects.
pub fn introduce(stream: &mut TcpStream, token: &Token, node: usize) -> Result<(), Unproven> {
    limited(stream, |stream| {
        let mut greeting = [0; 44];
        stream.read_exact(&mut greeting)?;
        // Before the other end has taken the connection, it seems to be the system's.
        token.check_user(stream.0).map_err(Unproven::Refused)?;
        check_greeting(&greeting[..12]).map_err(Unproven::Refused)?;
        let number: [u8; 32] = greeting[12..].try_into().expect("32 bytes");
        let (own, reached, node) = (random()?, stream.0.peer_addr()?, node as u32);
        let proof = token.proof("joins", [&number, &own], node, reached);
        stream
            .write_all(&[&MAGIC[..], &PROTOCOL.to_le_bytes(), &own, &node.to_le_bytes(), proof.as_bytes()].concat())?;
        let mut verdict = [0];
        stream.read_exact(&mut verdict)?;
        if verdict != [0] {
            let mut reason = Vec::new();
            stream.take(REASON as u64).read_to_end(&mut reason)?;
            return Err(Unproven::Refused(shown(&String::from_utf8_lossy(&reason))));
        }
        let mut answer = [0; 32];
        stream.read_exact(&mut answer)?;
        if token.proof("accepts", [&number, &own], node, reached) != Hash::from_bytes(answer) {
            return Err(Unproven::Refused("it does not know the token of the run".into()));
        }
        Ok(())
    })
}

/// A connection whose reads end at a moment, however slowly bytes come.
pub struct Timed<'a>(pub &'a TcpStream, pub Instant);

impl Read for Timed<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let left = self.1.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        self.0.set_read_timeout(Some(left))?;
        self.0.read(bytes)
    }
}

impl Write for Timed<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

/// Runs one side with a limit on its whole time.
fn limited<T>(stream: &TcpStream, side: impl FnOnce(&mut Timed<'_>) -> Result<T, Unproven>) -> Result<T, Unproven> {
    stream.set_write_timeout(Some(TIMEOUT))?;
    let result = side(&mut Timed(stream, Instant::now() + TIMEOUT));
    stream.set_read_timeout(None)?;
    stream.set_write_timeout(None)?;
    result
}

fn refuse<T>(stream: &mut Timed<'_>, why: String) -> Result<T, Unproven> {
    // Its delivery does not matter here. Bytes that came and were not read would discard the reason.
    let _ = stream.write_all(&[&[1], why.as_bytes()].concat());
    let _ = stream.0.shutdown(std::net::Shutdown::Write);
    stream.1 = Instant::now() + LAST_WORDS;
    let _ = stream.take(REASON as u64).read_to_end(&mut Vec::new());
    Err(Unproven::Refused(why))
}

fn check_greeting(bytes: &[u8]) -> Result<(), String> {
    if bytes[..8] != MAGIC {
        return Err("it is not a node of a run".to_owned());
    }
    let version = u32::from_le_bytes(bytes[8..12].try_into().expect("four bytes"));
    if version != PROTOCOL {
        return Err(format!(
            "it speaks version {version} of the protocol between nodes, this program version {PROTOCOL}"
        ));
    }
    Ok(())
}

/// Removes the characters that steer a terminal from a stranger's text.
pub fn shown(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    /// Returns the results of both sides when one connects to the other.
    fn meet(server: &Token, client: &Token, node: usize) -> (Result<usize, Unproven>, Result<(), Unproven>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        std::thread::scope(|scope| {
            let client = scope.spawn(move || introduce(&mut TcpStream::connect(address).unwrap(), client, node));
            let server = accept(&mut listener.accept().unwrap().0, server, 4);
            (server, client.join().unwrap())
        })
    }

    fn reason<T: std::fmt::Debug>(result: Result<T, Unproven>) -> String {
        match result {
            Err(Unproven::Refused(why)) => why,
            other => panic!("expected a refusal: {other:?}"),
        }
    }

    #[test]
    fn who_knows_the_token_is_known() {
        let token = Token::new("one");
        let (server, client) = meet(&token, &token, 3);
        assert_eq!(server.unwrap(), 3);
        client.unwrap();
        let (server, client) = meet(&token, &token, 4);
        assert_eq!(reason(server), "there is no node 4 among 4");
        assert_eq!(reason(client), "there is no node 4 among 4");
    }

    #[test]
    fn another_token_and_another_meeting_are_refused_with_the_reason_on_both_sides() {
        let (one, other) = (Token::new("one"), Token::new("other"));
        for (server, client) in [(&one, &other), (&one.of_meeting(b"1"), &one.of_meeting(b"2"))] {
            let (server, client) = meet(server, client, 1);
            assert!(reason(server).contains("the token is not that of the run"));
            assert!(reason(client).contains("the token is not that of the run"));
        }
    }

    #[test]
    fn strangers_and_other_versions_are_answer_so() {
        let token = Token::new("one");
        let answers = |bytes: &[u8]| {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let mut stranger = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            stranger.write_all(bytes).unwrap();
            let refused = reason(accept(&mut listener.accept().unwrap().0, &token, 4));
            let mut answer = Vec::new();
            let _ = stranger.read_to_end(&mut answer);
            assert!(answer.ends_with(refused.as_bytes()), "{answer:?}");
            refused
        };
        assert_eq!(answers(b"GET / HTTP/1.1\r\n\r\n"), "it is not a node of a run");
        let newer = [&MAGIC[..], &9u32.to_le_bytes()].concat();
        assert!(answers(&newer).contains("it speaks version 9"));
    }

    #[test]
    fn a_stranger_that_sends_slowly_is_not_waited_for() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut slow = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let stream = listener.accept().unwrap().0;
        let began = Instant::now();
        let writer = std::thread::spawn(move || {
            while began.elapsed() < Duration::from_secs(3) && slow.write_all(b"x").is_ok() {
                std::thread::sleep(Duration::from_millis(50));
            }
        });
        let mut timed = Timed(&stream, began + Duration::from_millis(500));
        assert!(timed.read_exact(&mut [0; 1000]).is_err());
        assert!(began.elapsed() < Duration::from_secs(2), "{:?}", began.elapsed());
        drop(stream);
        writer.join().unwrap();
    }

    #[test]
    fn processes_of_one_user_need_no_secret() {
        let (server, client) = meet(&Token::of_user(), &Token::of_user(), 1);
        assert_eq!(server.unwrap(), 1);
        client.unwrap();
        let (server, _) = meet(&Token::of_user(), &Token::new("other"), 1);
        assert!(reason(server).contains("the token is not that of the run"));
    }

    #[test]
    fn an_answer_is_for_one_address() {
        let (token, numbers) = (Token::new("one"), [&[1; 32], &[2; 32]]);
        let proof = |address: &str| token.proof("joins", numbers, 1, address.parse().unwrap());
        assert_eq!(proof("10.0.0.1:80"), proof("[::ffff:10.0.0.1]:80"), "one address in two forms");
        assert_ne!(proof("10.0.0.1:80"), proof("10.0.0.2:80"));
    }

    #[test]
    fn texts_of_others_steer_no_terminal() {
        assert_eq!(shown("a\x1b[2Jb\nc"), "a\u{fffd}[2Jb\u{fffd}c");
    }
}
