//! Nodes on the loopback: they find each other, whoever comes first; strangers and others' tokens are refused and do not
//! disturb; every way in which a node can end is the end of all, with its name.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use net::{Channel, Facts, JoinError, LOST, Nodes, Place, Token, join};

fn rendezvous() -> String {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string()
}

fn place(node: usize, nodes: usize, rendezvous: &str, timeout: f64) -> Place {
    Place { node, nodes, rendezvous: rendezvous.into(), timeout: Duration::from_secs_f64(timeout) }
}

fn come(place: &Place, token: &str, facts: &[(&str, &str)]) -> (Result<Arc<Nodes>, JoinError>, Vec<String>) {
    let facts = Facts(facts.iter().map(|(name, value)| ((*name).into(), (*value).into())).collect());
    let mut notes = Vec::new();
    let joined = join(place, &Token::new(token), &facts, &mut |note| notes.push(note), &mut || false);
    (joined, notes)
}

/// All nodes of a run; node `n` comes `n` times `apart` later than the last one.
fn all(count: usize, timeout: f64, apart: Duration) -> Vec<Arc<Nodes>> {
    let at = rendezvous();
    let node = |node: usize| {
        thread::sleep(apart * (count - 1 - node) as u32);
        come(&place(node, count, &at, timeout), "token", &[("option", "1")]).0.unwrap()
    };
    let node = &node;
    thread::scope(|scope| {
        let threads: Vec<_> = (0..count).map(|number| scope.spawn(move || node(number))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn everyone_hears_everyone_in_order() {
    for (count, apart) in [(2, Duration::ZERO), (4, Duration::from_millis(100))] {
        let nodes = all(count, 20.0, apart);
        thread::scope(|scope| {
            for own in &nodes {
                scope.spawn(move || {
                    // More than the system buffers: a sender does not wait for a reader.
                    let big = vec![own.node as u8; 3 << 20];
                    for round in 0..3u8 {
                        own.tell(Channel::Collective, &[&[round], &big]).unwrap();
                    }
                    for (round, from) in (0..3u8).flat_map(|round| own.others().map(move |from| (round, from))) {
                        let got = own.receive(from, Channel::Collective, "a test").unwrap();
                        assert_eq!((got[0], got[1], got.len()), (round, from as u8, 1 + (3 << 20)));
                    }
                });
            }
        });
        nodes.iter().for_each(|node| node.leave());
        assert!(nodes.iter().all(|node| node.failure().is_none()));
    }
}

#[test]
fn who_ends_without_a_word_ends_all_by_its_name() {
    let mut nodes = all(3, 20.0, Duration::ZERO);
    let (heard, ears) = std::sync::mpsc::channel();
    nodes[0].on_failure(move |failure| heard.send(failure.clone()).unwrap());
    let begun = Instant::now();
    drop(nodes.remove(1));
    for node in &nodes {
        let failure = node.receive(2 - node.node, Channel::Collective, "a test").unwrap_err();
        assert!(failure.node == 1 && failure.why.contains("has ended") && failure.code == LOST, "{failure}");
        assert_eq!(node.send(2 - node.node, Channel::Reply, &[]).unwrap_err(), failure, "it is over");
    }
    assert_eq!(ears.recv_timeout(Duration::from_secs(5)).unwrap().node, 1);
    assert!(begun.elapsed() < Duration::from_secs(5));
}

#[test]
fn the_first_cause_is_told_to_all() {
    let nodes = all(3, 20.0, Duration::ZERO);
    nodes[2].abort("no memory", 3);
    nodes[2].abort("what came of it", 1);
    for node in &nodes {
        let failure = node.receive((node.node + 1) % 3, Channel::Command, "a test").unwrap_err();
        assert_eq!((failure.to_string().as_str(), failure.code), ("node 2: no memory", 3));
    }
}

#[test]
fn a_cause_is_told_to_those_who_are_being_written_to() {
    let (nodes, big) = (all(3, 20.0, Duration::ZERO), vec![7; 96 << 20]);
    thread::scope(|scope| {
        scope.spawn(|| drop(nodes[1].send(0, Channel::Collective, &[&big])));
        // The connection to node 0 is busy for long after this.
        thread::sleep(Duration::from_millis(10));
        nodes[1].abort("its data is not there", 3);
    });
    let begun = Instant::now();
    while nodes[0].failure().is_none() && begun.elapsed() < Duration::from_secs(10) {
        thread::sleep(Duration::from_millis(10));
    }
    let failure = nodes[0].failure().expect("node 0 has received the cause");
    assert_eq!((failure.node, failure.why.as_str(), failure.code), (1, "its data is not there", 3));
}

#[test]
fn who_does_not_answer_is_named_after_the_time_that_is_given() {
    let nodes = all(2, 1.0, Duration::ZERO);
    let failure = nodes[0].receive(1, Channel::Collective, "a gather of 8 bytes").unwrap_err();
    assert_eq!(failure.to_string(), "node 1: it was waited for 1 s in a gather of 8 bytes");
    assert_eq!(nodes[1].next_command(&mut || {}).unwrap_err(), failure, "it is reported");
}

#[test]
fn an_order_is_waited_for_as_long_as_node_0_is_alive() {
    let nodes = all(2, 1.0, Duration::ZERO);
    thread::scope(|scope| {
        let waiting = scope.spawn(|| nodes[1].next_command(&mut || {}));
        thread::sleep(Duration::from_millis(2500));
        nodes[0].tell(Channel::Command, &[b"late"]).unwrap();
        assert_eq!(waiting.join().unwrap().unwrap(), b"late");
    });
}

#[test]
fn who_leaves_in_order_is_no_failure_and_what_it_said_counts() {
    let mut nodes = all(2, 20.0, Duration::ZERO);
    nodes[0].tell(Channel::Command, &[b"last"]).unwrap();
    nodes[0].leave();
    drop(nodes.remove(0));
    thread::sleep(Duration::from_millis(100));
    assert_eq!(nodes[0].next_command(&mut || {}).unwrap(), b"last");
    assert!(nodes[0].failure().is_none());
    let failure = nodes[0].next_command(&mut || {}).unwrap_err();
    assert_eq!(failure.to_string(), "node 0: it has left the run");
}

#[test]
fn a_wish_comes_to_node_0() {
    let nodes = all(2, 20.0, Duration::ZERO);
    assert!(!nodes[0].wished());
    nodes[1].wish();
    let deadline = Instant::now() + Duration::from_secs(5);
    while !nodes[0].wished() && Instant::now() < deadline {
        thread::sleep(Duration::from_millis(5));
    }
    assert!(nodes[0].wished());
}

#[test]
fn strangers_are_refused_and_disturb_nobody() {
    let at = rendezvous();
    thread::scope(|scope| {
        let leader = scope.spawn(|| come(&place(0, 2, &at, 20.0), "token", &[]));
        thread::sleep(Duration::from_millis(300));
        // A scanner that says nothing, one that speaks otherwise, and a node of another run.
        let silent = TcpStream::connect(&at).unwrap();
        let mut browser = TcpStream::connect(&at).unwrap();
        browser.write_all(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n").unwrap();
        // What it says is read to its end before it is noted.
        thread::sleep(Duration::from_millis(600));
        let refused = come(&place(1, 2, &at, 5.0), "another token", &[]).0.unwrap_err().to_string();
        assert!(refused.contains("refuses node 1: the token is not that of the run"), "{refused}");
        // The leader notes a refusal after the other end has closed.
        thread::sleep(Duration::from_secs(1));
        let (follower, _) = come(&place(1, 2, &at, 20.0), "token", &[]);
        let (leader, notes) = leader.join().unwrap();
        assert_eq!((leader.unwrap().count, follower.unwrap().node), (2, 1));
        assert!(notes.iter().any(|note| note.contains("was refused: it is not a node of a run")), "{notes:?}");
        assert!(notes.iter().any(|note| note.contains("was refused: the token")), "{notes:?}");
        let mut answer = Vec::new();
        let _ = browser.read_to_end(&mut answer);
        drop(silent);
    });
}

#[test]
fn connections_that_strangers_hold_do_not_keep_a_node_out() {
    let at = rendezvous();
    let leader = place(0, 2, &at, 30.0);
    thread::scope(|scope| {
        let first = scope.spawn(|| come(&leader, "token", &[]));
        // More than are introduced at a time, each for longer than a node waits here.
        let mut held = Vec::new();
        while held.len() < 400 {
            match TcpStream::connect(&at) {
                Ok(stream) => held.push(stream),
                Err(_) => thread::sleep(Duration::from_millis(20)),
            }
        }
        let begun = Instant::now();
        let (second, _) = come(&place(1, 2, &at, 5.0), "token", &[]);
        assert!(second.is_ok() && begun.elapsed() < Duration::from_secs(5), "{:?}", second.err());
        let (first, notes) = first.join().unwrap();
        assert!(first.is_ok() && notes.len() < 20, "{notes:?}");
    });
}

#[test]
fn nodes_with_other_facts_are_told_what_differs() {
    let at = rendezvous();
    let facts = [("rate", "1"), ("rate", "2"), ("rate", "1")];
    let node = |node: usize| come(&place(node, 3, &at, 20.0), "token", &[facts[node]]).0.unwrap_err().to_string();
    let node = &node;
    let ended = thread::scope(|scope| {
        let threads: Vec<_> = (0..3).map(|number| scope.spawn(move || node(number))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
    });
    for text in ended {
        assert_eq!(text, "the nodes do not have the same run:\n  rate: 1 on node 0, 2 on node 1");
    }
}

#[test]
fn two_of_one_number_are_told_so() {
    let at = rendezvous();
    thread::scope(|scope| {
        let leader = scope.spawn(|| come(&place(0, 3, &at, 3.0), "token", &[]));
        let twins = [0, 1].map(|_| scope.spawn(|| come(&place(1, 3, &at, 3.0), "token", &[])));
        let (leader, notes) = leader.join().unwrap();
        assert!(leader.unwrap_err().to_string().contains("node 2 did not come"));
        assert!(notes.iter().any(|note| note.contains("two processes say that they are node 1")), "{notes:?}");
        let texts = twins.map(|twin| twin.join().unwrap().0.unwrap_err().to_string());
        assert!(texts.iter().any(|text| text.contains("two processes say that they are node 1")), "{texts:?}");
        assert!(texts.iter().any(|text| text.starts_with("node 0 ")), "{texts:?}");
    });
}
