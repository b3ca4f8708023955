//! The meeting of the nodes: node 0 listens at an address that all know, the others connect to it and send the address
//! where they listen, and when all are there and have the same facts, each connects to those before it. Knows no more
//! of a run than that.

use std::collections::BTreeMap;
use std::io;
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde_json::{Value, json};
use thiserror::Error;

use crate::facts::Facts;
use crate::frame::{self, Channel};
use crate::nodes::Nodes;
use crate::proof::{self, Token, Unproven};

/// Maximal length of a node's introduction, bytes.
const INTRODUCTION: u64 = 1 << 20;

/// Maximal number of introductions at the same time: a further connection takes the place of the oldest. A node introduces
/// itself at once, so strangers who hold connections do not keep it out.
const AT_ONCE: usize = 256;

/// Number of strangers that are named one by one; after them every tenth, hundredth and so on is.
const NAMED: usize = 3;

/// The pause between two attempts to reach node 0.
const PAUSE: Duration = Duration::from_millis(200);

/// The place of a node in a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// Number of the node, from 0.
    pub node: usize,
    pub nodes: usize,
    /// The `host:port` of node 0.
    pub rendezvous: String,
    /// The time that nodes wait for each other.
    pub timeout: Duration,
}

/// The reason why the nodes do not come together.
#[derive(Debug, Error)]
pub enum JoinError {
    /// Facts that the nodes must have in common differ.
    #[error("the nodes do not have the same run:\n  {}", .0.join("\n  "))]
    Differ(Vec<String>),
    /// The end of the run was requested.
    #[error("stopped")]
    Stopped,
    /// A node came and is gone again.
    #[error("{0}")]
    Lost(String),
    #[error("{0}")]
    Failed(String),
}

fn failed(what: impl Into<String>) -> JoinError {
    JoinError::Failed(what.into())
}

fn lost(what: impl Into<String>) -> JoinError {
    JoinError::Lost(what.into())
}

/// True if the other end has closed a connection, even if bytes of it are still to be read.
fn is_gone(stream: &TcpStream) -> bool {
    let mut polled = [PollFd::new(stream, PollFlags::RDHUP)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    matches!(poll(&mut polled, Some(&now)), Ok(1..)) && !polled[0].revents().is_empty()
}

/// Connects to all other nodes. `note` gets progress messages; `stop` is polled during the wait.
pub fn join(
    place: &Place,
    token: &Token,
    facts: &Facts,
    note: &mut dyn FnMut(String),
    stop: &mut dyn FnMut() -> bool,
) -> Result<Arc<Nodes>, JoinError> {
    assert!(place.node < place.nodes, "a node is one of those that there are");
    let deadline = Instant::now() + place.timeout;
    let streams = match place.node {
        0 => lead(place, token, facts, deadline, note, stop)?,
        _ => follow(place, token, facts, deadline, stop)?,
    };
    // A connection that was lost since has lost its node.
    Nodes::new(place.node, streams, place.timeout).map_err(|e| lost(format!("a connection between nodes: {e}")))
}

fn resolve(rendezvous: &str) -> Result<Vec<SocketAddr>, JoinError> {
    let found = rendezvous.to_socket_addrs().map_err(|e| failed(format!("`rendezvous: {rendezvous}`: {e}")))?;
    Ok(found.collect())
}

/// Takes connections and proves them, each in a thread of its own, until the receiver is gone.
fn listen(listener: TcpListener, token: Token, nodes: usize, found: Sender<Result<(usize, TcpStream), String>>) {
    let take = move || {
        let open: Arc<Mutex<BTreeMap<u64, TcpStream>>> = Arc::default();
        for (number, stream) in (0_u64..).zip(listener.incoming()) {
            let Ok(mut stream) = stream else { continue };
            let (token, found, others) = (token.clone(), found.clone(), open.clone());
            // No thread waits any more.
            if found.send(Err(String::new())).is_err() {
                return;
            }
            let Ok(second) = stream.try_clone() else { continue };
            {
                let mut open = open.lock().unwrap_or_else(PoisonError::into_inner);
                open.insert(number, second);
                if open.len() > AT_ONCE
                    && let Some((_, oldest)) = open.pop_first()
                {
                    let _ = oldest.shutdown(Shutdown::Both);
                }
            }
            let prove = move || {
                let from = stream.peer_addr().map_or_else(|_| "an unknown peer".to_owned(), |from| from.to_string());
                let proved = match proof::accept(&mut stream, &token, nodes) {
                    Ok(node) => Ok((node, stream)),
                    Err(Unproven::Refused(why)) => Err(format!("{from} was refused: {why}")),
                    Err(Unproven::Broken(error)) => Err(format!("{from} came and did not introduce itself: {error}")),
                };
                // One that was closed for others is not there any more.
                let is_open = others.lock().unwrap_or_else(PoisonError::into_inner).remove(&number).is_some();
                if proved.is_err() || is_open {
                    let _ = found.send(proved);
                }
            };
            let _ = std::thread::Builder::new().name("introduction".into()).spawn(prove);
        }
    };
    let _ = std::thread::Builder::new().name("rendezvous".into()).spawn(take);
}

/// Waits for connections of nodes that are still `missing`.
fn gather(
    listener: TcpListener,
    token: &Token,
    nodes: usize,
    mut missing: Vec<usize>,
    deadline: Instant,
    note: &mut dyn FnMut(String),
    stop: &mut dyn FnMut() -> bool,
) -> Result<Vec<(usize, TcpStream)>, JoinError> {
    let at = listener.local_addr().map_err(|e| failed(format!("the address of this node: {e}")))?;
    let (sender, receiver) = channel();
    listen(listener, token.clone(), nodes, sender);
    let mut found: Vec<(usize, TcpStream)> = Vec::new();
    let mut strangers = 0_usize;
    while !missing.is_empty() {
        match receiver.recv_timeout(PAUSE) {
            Ok(Ok((node, stream))) => match missing.iter().position(|of| *of == node) {
                Some(index) => {
                    missing.swap_remove(index);
                    found.push((node, stream));
                }
                None => {
                    let text = format!("two processes say that they are node {node}: each needs its own `node_rank`");
                    let _ = say(&stream, &json!({"refused": [text]}));
                    // Bytes that are unread when a connection is closed would discard the answer.
                    let _ = hear(&stream, Duration::from_secs(2));
                    note(text);
                }
            },
            Ok(Err(why)) if why.is_empty() => {}
            Ok(Err(why)) => {
                strangers += 1;
                if strangers <= NAMED {
                    note(why);
                } else if strangers == 10_usize.pow(strangers.ilog10()) {
                    note(format!("{strangers} connections were not those of nodes; the last: {why}"));
                }
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return Err(failed("no thread can be started for the rendezvous")),
        }
        // A node that is started again comes a second time.
        for (node, _) in found.extract_if(.., |(_, stream)| is_gone(stream)) {
            note(format!("Node {node} came and is gone again"));
            missing.push(node);
        }
        if stop() {
            return Err(JoinError::Stopped);
        }
        if Instant::now() > deadline {
            missing.sort_unstable();
            let names: Vec<String> = missing.iter().map(|node| format!("node {node}")).collect();
            let text = "within the time that `distributed.timeout` gives";
            return Err(lost(format!("{} did not come to {at} {text}", names.join(" and "))));
        }
    }
    // The thread that listens ends with the next connection: this one.
    drop(receiver);
    let _ = TcpStream::connect_timeout(&at, Duration::from_secs(1));
    Ok(found)
}

fn say(mut stream: &TcpStream, what: &Value) -> io::Result<()> {
    frame::write(&mut stream, Channel::Hello, &[what.to_string().as_bytes()])
}

/// Reads the introduction of the other end, or its acknowledgement.
fn hear(stream: &TcpStream, timeout: Duration) -> io::Result<Value> {
    let (_, bytes) = frame::read(&mut proof::Timed(stream, Instant::now() + timeout), INTRODUCTION)?;
    serde_json::from_slice(&bytes).map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e))
}

/// Node 0: waits for all, compares, and sends each the addresses of the others.
fn lead(
    place: &Place,
    token: &Token,
    facts: &Facts,
    deadline: Instant,
    note: &mut dyn FnMut(String),
    stop: &mut dyn FnMut() -> bool,
) -> Result<Vec<Option<TcpStream>>, JoinError> {
    let addresses = resolve(&place.rendezvous)?;
    let listener = TcpListener::bind(&addresses[..]).map_err(|error| {
        failed(format!(
            "node 0 cannot listen at `rendezvous: {}`, expected an address of this machine: {error}",
            place.rendezvous
        ))
    })?;
    note(format!("Node 0 of {} waits for the others at {}", place.nodes, place.rendezvous));
    let found = gather(listener, token, place.nodes, (1..place.nodes).collect(), deadline, note, stop)?;
    let mut streams: Vec<Option<TcpStream>> = (0..place.nodes).map(|_| None).collect();
    let (mut differences, mut listens) = (Vec::new(), vec![String::new(); place.nodes]);
    for (node, stream) in found {
        let heard = hear(&stream, Duration::from_secs(10))
            .map_err(|e| lost(format!("node {node} came and did not say what it has: {e}")))?;
        differences.extend(facts.differences(node, &Facts::from_json(&heard["facts"])));
        listens[node] = heard["listens"].as_str().unwrap_or_default().to_owned();
        streams[node] = Some(stream);
    }
    let random = proof::random().map_err(|e| failed(format!("no random number can be had: {e}")))?;
    let roster = match differences.is_empty() {
        true => json!({"listens": listens, "meeting": random.to_vec()}),
        false => json!({"refused": differences}),
    };
    for (node, stream) in streams.iter().enumerate().filter_map(|(node, of)| Some((node, of.as_ref()?))) {
        say(stream, &roster).map_err(|e| lost(format!("node {node} is gone again: {e}")))?;
    }
    if differences.is_empty() { Ok(streams) } else { Err(JoinError::Differ(differences)) }
}

/// Another node: comes to node 0, and connects to those before it.
fn follow(
    place: &Place,
    token: &Token,
    facts: &Facts,
    deadline: Instant,
    stop: &mut dyn FnMut() -> bool,
) -> Result<Vec<Option<TcpStream>>, JoinError> {
    let node_0 = reach(place, token, deadline, stop)?;
    let broken = |e: io::Error| lost(format!("node 0 at {} is gone again: {e}", place.rendezvous));
    let own = node_0.local_addr().map_err(broken)?.ip();
    let listener = TcpListener::bind((own, 0)).map_err(|e| failed(format!("cannot listen at {own}: {e}")))?;
    let listens = listener.local_addr().map_err(broken)?.to_string();
    say(&node_0, &json!({"facts": facts.to_json(), "listens": listens})).map_err(broken)?;
    let roster = await_roster(&node_0, place, deadline, stop)?;
    let meeting: Vec<u8> = serde_json::from_value(roster["meeting"].clone()).unwrap_or_default();
    let token = token.of_meeting(&meeting);
    let mut streams: Vec<Option<TcpStream>> = (0..place.nodes).map(|_| None).collect();
    streams[0] = Some(node_0);
    for (node, slot) in streams.iter_mut().enumerate().take(place.node).skip(1) {
        let at = roster["listens"][node].as_str().unwrap_or_default();
        let address = at.parse::<SocketAddr>().map_err(|_| failed(format!("node {node} is at `{at}`, no address")))?;
        *slot = Some(connect(address, &token, place.node, deadline).map_err(|why| {
            lost(format!("node {node} at {address} cannot be reached from node {}: {why}", place.node))
        })?);
    }
    let later: Vec<usize> = (place.node + 1..place.nodes).collect();
    if !later.is_empty() {
        // Node 0 notices a node that is lost in the meantime, and ends the meeting.
        let mut ended = || stop() || streams[0].as_ref().is_some_and(is_gone);
        let gathered = gather(listener, &token, place.nodes, later, deadline, &mut |_| {}, &mut ended);
        let gathered = match gathered {
            Err(JoinError::Stopped) if !stop() => return Err(lost("the nodes were meeting when one of them was lost")),
            gathered => gathered?,
        };
        for (node, stream) in gathered {
            streams[node] = Some(stream);
        }
    }
    Ok(streams)
}

/// Tries to reach node 0 until it answers.
fn reach(
    place: &Place,
    token: &Token,
    deadline: Instant,
    stop: &mut dyn FnMut() -> bool,
) -> Result<TcpStream, JoinError> {
    loop {
        let mut last = String::new();
        // A name may not be known before node 0 is there.
        for address in resolve(&place.rendezvous).unwrap_or_default() {
            let Ok(mut stream) = TcpStream::connect_timeout(&address, Duration::from_secs(5)) else { continue };
            match proof::introduce(&mut stream, token, place.node) {
                Ok(()) => return Ok(stream),
                Err(Unproven::Refused(why)) => {
                    return Err(failed(format!("node 0 at {address} refuses node {}: {why}", place.node)));
                }
                Err(Unproven::Broken(error)) => last = format!(": the last attempt ended with {error}"),
            }
        }
        if stop() {
            return Err(JoinError::Stopped);
        }
        if Instant::now() > deadline {
            let (at, wait) = (&place.rendezvous, place.timeout.as_secs());
            return Err(lost(format!("node 0 cannot be reached at `rendezvous: {at}` for {wait} s{last}")));
        }
        std::thread::sleep(PAUSE);
    }
}

/// Waits for the roster that node 0 sends when all are there, or for its refusal.
fn await_roster(
    node_0: &TcpStream,
    place: &Place,
    deadline: Instant,
    stop: &mut dyn FnMut() -> bool,
) -> Result<Value, JoinError> {
    // Node 0 gives up first, and signals it by closing.
    let deadline = deadline + Duration::from_secs(15);
    let mut first = [0];
    loop {
        node_0.set_read_timeout(Some(PAUSE)).map_err(|e| failed(e.to_string()))?;
        match node_0.peek(&mut first) {
            Ok(0) => return Err(lost(format!("node 0 at {} has given up", place.rendezvous))),
            Ok(_) => break,
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {}
            Err(_) => return Err(lost(format!("node 0 at {} has given up", place.rendezvous))),
        }
        if stop() {
            return Err(JoinError::Stopped);
        }
        if Instant::now() > deadline {
            return Err(lost(format!("node 0 at {} does not continue", place.rendezvous)));
        }
    }
    let roster = hear(node_0, Duration::from_secs(10)).map_err(|e| lost(format!("node 0 is gone again: {e}")))?;
    match serde_json::from_value::<Vec<String>>(roster["refused"].clone()) {
        Ok(differences) => Err(JoinError::Differ(differences)),
        Err(_) => Ok(roster),
    }
}

fn connect(address: SocketAddr, token: &Token, node: usize, deadline: Instant) -> Result<TcpStream, String> {
    let timeout = deadline.saturating_duration_since(Instant::now()).max(Duration::from_secs(1));
    let mut stream = TcpStream::connect_timeout(&address, timeout).map_err(|e| e.to_string())?;
    match proof::introduce(&mut stream, token, node) {
        Ok(()) => Ok(stream),
        Err(Unproven::Refused(why)) => Err(why),
        Err(Unproven::Broken(error)) => Err(error.to_string()),
    }
}
