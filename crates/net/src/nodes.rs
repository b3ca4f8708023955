//! The connections of a node to all others while a run goes on. A thread for each reads the frames and stores them, so
//! two nodes that send at once never wait for each other, and the end of a node is noticed wherever this one is.
//!
//! Knows frames and who sent them; not what they mean.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError, Weak};
use std::time::{Duration, Instant};

use rustix::net::sockopt;

use crate::frame::{self, BOXES, Channel};
use crate::proof::shown;

/// The time after which a connection on which nothing comes through is given up: the systems at both ends probe each
/// other.
const SILENCE: Duration = Duration::from_secs(20);

/// The pause between two such probes.
const QUESTION: Duration = Duration::from_secs(4);

/// Period of the heartbeats that a node sends.
const BEAT: Duration = Duration::from_secs(5);

/// Maximal length of the reason with which a node ends a run, bytes.
const REASON: usize = 4000;

/// Maximal number of bytes of a frame, and of the frames of a node that wait until they are requested.
const MOST_WAITING: u64 = 16 << 30;

/// Maximal number of frames of a node that wait until they are requested.
const MOST_FRAMES: usize = 1 << 14;

/// Number of bytes of a reason that are read.
const MOST_SAID: usize = 1 << 16;

/// The exit codes of processes of a run that fails.
const CODES: std::ops::RangeInclusive<u8> = 1..=LOST;

/// The exit code of a process whose peer is gone or does not answer: the run can be started again.
pub const LOST: u8 = 6;

/// The node that ended the run, and the reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    pub node: usize,
    pub why: String,
    /// The exit code of its process; [`LOST`] if it is gone.
    pub code: u8,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "node {}: {}", self.node, self.why)
    }
}

type Listener = Box<dyn Fn(&Failure) + Send>;

/// The state that the threads of a node share.
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    /// Callbacks for a failure of the run.
    listeners: Mutex<Vec<Listener>>,
}

#[derive(Default)]
struct State {
    /// Frames that came from each node and were not requested yet.
    boxes: Vec<[VecDeque<Vec<u8>>; BOXES]>,
    /// Time of the last frame from each node.
    heard: Vec<Instant>,
    /// Nodes that have left in order.
    left: Vec<bool>,
    failure: Option<Failure>,
    wish: bool,
}

struct Peer {
    writer: Mutex<TcpStream>,
    address: SocketAddr,
}

/// A node of a run, connected to all others.
pub struct Nodes {
    /// Number of this node, from 0.
    pub node: usize,
    /// Number of nodes of the run.
    pub count: usize,
    /// The time that a node is waited for.
    pub timeout: Duration,
    /// The connections by node; `None` for this node.
    peers: Vec<Option<Peer>>,
    shared: Arc<Shared>,
    /// True while all nodes do the same by themselves, without a command for each part of it.
    together: AtomicBool,
    /// Number of bytes of collectives that it has sent.
    exchanged: AtomicU64,
}

impl Nodes {
    /// Begins to read from all connections, by node; this node's own entry is `None`.
    pub(crate) fn new(node: usize, streams: Vec<Option<TcpStream>>, timeout: Duration) -> io::Result<Arc<Nodes>> {
        let count = streams.len();
        let boxes = (0..count).map(|_| Default::default()).collect();
        let (heard, left) = (vec![Instant::now(); count], vec![false; count]);
        let state = State { boxes, heard, left, ..State::default() };
        let shared =
            Arc::new(Shared { state: Mutex::new(state), changed: Condvar::new(), listeners: Mutex::default() });
        let peer = |(from, stream): (usize, Option<TcpStream>)| {
            stream.map(|stream| Peer::new(from, stream, timeout, shared.clone())).transpose()
        };
        let peers = streams.into_iter().enumerate().map(peer).collect::<io::Result<_>>()?;
        let (together, exchanged) = (AtomicBool::new(node != 0), AtomicU64::new(0));
        let nodes = Arc::new(Nodes { node, count, timeout, peers, shared, together, exchanged });
        let weak = Arc::downgrade(&nodes);
        let pause = BEAT.min(timeout / 4);
        std::thread::Builder::new().name("beat".into()).spawn(move || beat(&weak, pause))?;
        Ok(nodes)
    }

    /// All nodes but this one.
    pub fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let node = self.node;
        (0..self.count).filter(move |other| *other != node)
    }

    /// Returns the address of a node, for people.
    pub fn address(&self, node: usize) -> Option<SocketAddr> {
        self.peers[node].as_ref().map(|peer| peer.address)
    }

    /// True if all nodes do the same as this one without commands.
    pub fn is_together(&self) -> bool {
        self.together.load(Ordering::Acquire)
    }

    /// Bytes of collectives that this node has sent to all others.
    pub fn exchanged(&self) -> u64 {
        self.exchanged.load(Ordering::Relaxed)
    }

    pub fn set_together(&self, together: bool) {
        self.together.store(together, Ordering::Release);
    }

    /// Sends bytes to a node, given in parts.
    pub fn send(&self, to: usize, channel: Channel, parts: &[&[u8]]) -> Result<(), Failure> {
        self.check()?;
        let peer = self.peers[to].as_ref().expect("a node does not send to itself");
        if channel == Channel::Collective {
            let bytes: usize = parts.iter().map(|part| part.len()).sum();
            self.exchanged.fetch_add(bytes as u64, Ordering::Relaxed);
        }
        let mut writer = peer.writer.lock().unwrap_or_else(PoisonError::into_inner);
        frame::write(&mut *writer, channel, parts).map_err(|error| {
            drop(writer);
            // The last frame of the node may be in flight, and has the better reason.
            self.shared.wait_for_failure();
            self.shared.fail(lost(to, peer.address, &error))
        })
    }

    /// Sends the same bytes to all others.
    pub fn tell(&self, channel: Channel, parts: &[&[u8]]) -> Result<(), Failure> {
        self.others().try_for_each(|node| self.send(node, channel, parts))
    }

    /// Returns the next frame of a node. The error of a timeout names `what` was waited for.
    pub fn receive(&self, from: usize, channel: Channel, what: &str) -> Result<Vec<u8>, Failure> {
        let deadline = Instant::now() + self.timeout;
        self.next(from, channel, Some(deadline), &mut || {})?.ok_or_else(|| {
            let why = format!("it was waited for {} s in {what}", self.timeout.as_secs());
            let failure = self.shared.fail(Failure { node: from, why, code: LOST });
            self.pass_on(&failure);
            failure
        })
    }

    /// Waits for the next command of node 0 without a timeout; meanwhile `idle` is called now and then.
    pub fn next_command(&self, idle: &mut dyn FnMut()) -> Result<Vec<u8>, Failure> {
        Ok(self.next(0, Channel::Command, None, idle)?.expect("there is no deadline"))
    }

    /// Waits for the next reply of a node without a timeout: for work whose time differs between nodes.
    pub fn next_reply(&self, from: usize) -> Result<Vec<u8>, Failure> {
        Ok(self.next(from, Channel::Reply, None, &mut || {})?.expect("there is no deadline"))
    }

    fn next(
        &self,
        from: usize,
        channel: Channel,
        deadline: Option<Instant>,
        idle: &mut dyn FnMut(),
    ) -> Result<Option<Vec<u8>>, Failure> {
        let mut state = self.shared.state();
        loop {
            // Frames that came before the end count.
            if let Some(bytes) = state.boxes[from][channel as usize].pop_front() {
                return Ok(Some(bytes));
            }
            if let Some(failure) = &state.failure {
                return Err(failure.clone());
            }
            if state.left[from] {
                drop(state);
                let why = "it has left the run".into();
                return Err(self.shared.fail(Failure { node: from, why, code: LOST }));
            }
            let silence = state.heard[from].elapsed();
            if silence > self.timeout {
                drop(state);
                return Err(self.silent(from, silence));
            }
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                return Ok(None);
            }
            let pause = Duration::from_millis(50).min(left.unwrap_or(Duration::MAX));
            state = self.shared.changed.wait_timeout(state, pause).unwrap_or_else(PoisonError::into_inner).0;
            drop(state);
            idle();
            state = self.shared.state();
        }
    }

    /// Ends the run for all nodes, with this reason and the exit code of this process.
    pub fn abort(&self, why: &str, code: u8) {
        self.pass_on(&self.shared.fail(Failure { node: self.node, why: why.to_owned(), code }));
    }

    /// Reports a failure to the others, as far as they can be reached.
    fn pass_on(&self, failure: &Failure) {
        let why: String = failure.why.chars().take(REASON / 4).collect();
        let node = (failure.node as u32).to_le_bytes();
        for peer in self.peers.iter().flatten() {
            // A node whose connection is being written to for long learns of it by the end of the connection.
            if let Some(mut writer) = peer.writer_within(Duration::from_millis(500)) {
                let _ = writer.set_write_timeout(Some(Duration::from_secs(1)));
                let _ = frame::write(&mut *writer, Channel::Abort, &[&node, &[failure.code], why.as_bytes()]);
            }
        }
    }

    /// Returns the failure of the run, if it has failed.
    pub fn failure(&self) -> Option<Failure> {
        self.shared.state().failure.clone()
    }

    /// Returns the failure of the run like [`Nodes::failure`]; a node that was silent for longer than the timeout has
    /// failed, too.
    pub fn ended(&self) -> Option<Failure> {
        let state = self.shared.state();
        let silent = |node: &usize| state.heard[*node].elapsed() > self.timeout && !state.left[*node];
        let found = match &state.failure {
            Some(failure) => return Some(failure.clone()),
            None => self.others().find(silent)?,
        };
        let silence = state.heard[found].elapsed();
        drop(state);
        Some(self.silent(found, silence))
    }

    /// Fails the run because of a silent node.
    fn silent(&self, node: usize, silence: Duration) -> Failure {
        let why = format!("nothing was heard of it for {} s: it is stopped, or hangs", silence.as_secs());
        let failure = self.shared.fail(Failure { node, why, code: LOST });
        self.pass_on(&failure);
        failure
    }

    fn check(&self) -> Result<(), Failure> {
        self.failure().map_or(Ok(()), Err)
    }

    /// Registers a callback that runs once when the run fails, on any thread; at once if it has.
    pub fn on_failure(&self, listener: impl Fn(&Failure) + Send + 'static) {
        let mut listeners = self.shared.listeners.lock().unwrap_or_else(PoisonError::into_inner);
        match self.failure() {
            Some(failure) => listener(&failure),
            None => listeners.push(Box::new(listener)),
        }
    }

    /// Reports to node 0 that the end of the run is requested.
    pub fn wish(&self) {
        match self.node {
            0 => self.shared.state().wish = true,
            _ => drop(self.send(0, Channel::Wish, &[])),
        }
    }

    /// True if a node was asked to end the run.
    pub fn wished(&self) -> bool {
        self.shared.state().wish
    }

    /// Leaves in order: the end of this process is no failure any more, and neither is the end of others.
    pub fn leave(&self) {
        let _ = self.tell(Channel::Farewell, &[]);
        self.shared.state().left.fill(true);
    }
}

impl fmt::Debug for Nodes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "node {} of {}", self.node, self.count)
    }
}

impl Drop for Nodes {
    fn drop(&mut self) {
        // Others may see the end of this connection before they receive the failure that caused it.
        if let Some(failure) = self.failure() {
            self.pass_on(&failure);
        }
        self.shared.state().left.fill(true);
        for peer in self.peers.iter().flatten() {
            let _ = peer.writer.lock().unwrap_or_else(PoisonError::into_inner).shutdown(Shutdown::Both);
        }
    }
}

impl Peer {
    fn new(from: usize, stream: TcpStream, timeout: Duration, shared: Arc<Shared>) -> io::Result<Peer> {
        stream.set_nodelay(true)?;
        stream.set_read_timeout(None)?;
        stream.set_write_timeout(Some(timeout))?;
        sockopt::set_socket_keepalive(&stream, true)?;
        sockopt::set_tcp_keepidle(&stream, QUESTION)?;
        sockopt::set_tcp_keepintvl(&stream, QUESTION)?;
        sockopt::set_tcp_keepcnt(&stream, (SILENCE.as_secs() / QUESTION.as_secs()) as u32)?;
        sockopt::set_tcp_user_timeout(&stream, SILENCE.as_millis() as u32)?;
        let address = stream.peer_addr()?;
        let mut reader = stream.try_clone()?;
        std::thread::Builder::new().name(format!("node-{from}")).spawn(move || {
            loop {
                match frame::read(&mut reader, MOST_WAITING) {
                    Ok((channel, bytes)) => shared.take(from, channel, bytes),
                    Err(error) => return drop(shared.end(from, address, &error)),
                }
            }
        })?;
        Ok(Peer { writer: Mutex::new(stream), address })
    }

    /// Locks the connection for writing; `None` if that takes longer than `most`.
    fn writer_within(&self, most: Duration) -> Option<MutexGuard<'_, TcpStream>> {
        let deadline = Instant::now() + most;
        loop {
            match self.writer.try_lock() {
                Ok(writer) => return Some(writer),
                Err(TryLockError::Poisoned(writer)) => return Some(writer.into_inner()),
                Err(TryLockError::WouldBlock) if Instant::now() > deadline => return None,
                Err(TryLockError::WouldBlock) => std::thread::sleep(Duration::from_millis(5)),
            }
        }
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the number of nodes.
    fn count(&self) -> usize {
        self.state().left.len()
    }

    /// Stores or handles a frame that came from a node.
    fn take(&self, from: usize, channel: Channel, bytes: Vec<u8>) {
        let mut state = self.state();
        state.heard[from] = Instant::now();
        match channel {
            Channel::Collective | Channel::Command | Channel::Reply => {
                let waiting = state.boxes[from].iter().map(VecDeque::len).sum::<usize>();
                let held = state.boxes[from].iter().flatten().map(|bytes| bytes.len() as u64);
                if waiting >= MOST_FRAMES || held.sum::<u64>() + bytes.len() as u64 > MOST_WAITING {
                    drop(state);
                    let why = format!("it sends more than this node receives: {waiting} frames are queued");
                    self.fail(Failure { node: from, why, code: LOST });
                    return;
                }
                state.boxes[from][channel as usize].push_back(bytes);
            }
            Channel::Wish => state.wish = true,
            Channel::Farewell => state.left[from] = true,
            Channel::Hello | Channel::Beat => {}
            Channel::Abort => {
                drop(state);
                self.fail(reported(from, self.count(), &bytes));
                return;
            }
        }
        self.changed.notify_all();
    }

    /// Handles the end of a connection.
    fn end(&self, from: usize, address: SocketAddr, error: &io::Error) -> Option<Failure> {
        if self.state().left[from] {
            self.changed.notify_all();
            return None;
        }
        Some(self.fail(lost(from, address, error)))
    }

    /// Records a failure and returns the one that counts: the first.
    fn fail(&self, failure: Failure) -> Failure {
        let mut state = self.state();
        if let Some(first) = &state.failure {
            return first.clone();
        }
        state.failure = Some(failure.clone());
        drop(state);
        self.changed.notify_all();
        let listeners = std::mem::take(&mut *self.listeners.lock().unwrap_or_else(PoisonError::into_inner));
        listeners.iter().for_each(|listener| listener(&failure));
        failure
    }

    /// Gives the reading threads a moment to report a failure.
    fn wait_for_failure(&self) {
        let deadline = Instant::now() + Duration::from_millis(500);
        let mut state = self.state();
        while state.failure.is_none() && Instant::now() < deadline {
            let pause = Duration::from_millis(50);
            state = self.changed.wait_timeout(state, pause).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// Sends heartbeats to all others, as long as this node is alive.
fn beat(nodes: &Weak<Nodes>, pause: Duration) {
    while let Some(nodes) = nodes.upgrade() {
        for peer in nodes.peers.iter().flatten() {
            // A connection that is being written to needs no heartbeat.
            if let Ok(mut writer) = peer.writer.try_lock() {
                let _ = frame::write(&mut *writer, Channel::Beat, &[]);
            }
        }
        drop(nodes);
        std::thread::sleep(pause);
    }
}

/// Parses the failure that node `from` reports. Another process may say anything.
fn reported(from: usize, nodes: usize, bytes: &[u8]) -> Failure {
    let (head, why) = bytes.split_first_chunk::<5>().unwrap_or((&[u8::MAX, u8::MAX, 0, 0, LOST], &[]));
    let node = u32::from_le_bytes(head[..4].try_into().expect("four bytes")) as usize;
    let why: String = String::from_utf8_lossy(&why[..why.len().min(MOST_SAID)]).chars().take(REASON).collect();
    Failure {
        node: if node < nodes { node } else { from },
        why: why.lines().map(shown).collect::<Vec<_>>().join("\n"),
        code: if CODES.contains(&head[4]) { head[4] } else { 1 },
    }
}

fn lost(node: usize, address: SocketAddr, error: &io::Error) -> Failure {
    let why = match error.kind() {
        io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => {
            format!("the connection to it ({address}) has ended: its process was killed, or has crashed")
        }
        io::ErrorKind::TimedOut
        | io::ErrorKind::WouldBlock
        | io::ErrorKind::HostUnreachable
        | io::ErrorKind::NetworkUnreachable => {
            format!("nothing comes through to it ({address}): its machine is down, or the network is cut")
        }
        _ => format!("the connection to it ({address}) is broken: {error}"),
    };
    Failure { node, why, code: LOST }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_node_reports_is_bounded() {
        let bytes = |node: u32, code: u8, why: &[u8]| [&node.to_le_bytes()[..], &[code], why].concat();
        let found = reported(1, 3, &bytes(2, 4, b"no data"));
        assert_eq!(found, Failure { node: 2, why: "no data".into(), code: 4 });
        let found = reported(1, 3, &bytes(u32::MAX, 0, &b"\x1b[2J".repeat(1 << 20)));
        assert!(
            found.node == 1 && found.code == 1 && found.why.chars().count() == REASON && !found.why.contains('\x1b')
        );
        assert_eq!(reported(1, 3, b"").code, LOST);
        assert_eq!(reported(1, 3, &bytes(0, 200, b"a\nb")), Failure { node: 0, why: "a\nb".into(), code: 1 });
    }
}
