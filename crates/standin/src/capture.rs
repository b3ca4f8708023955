//! Captures and graphs: what streams would do, with the order between them. A stream becomes part of a capture by waiting for
//! an event of it, and has to be waited for by the first one before the end.

use std::collections::HashMap;

use crate::status::CAPTURE_ISOLATION;
use crate::world::Work;

/// Number of things of each stream that one knows to come before.
type Known = HashMap<usize, usize>;

struct Member {
    stream: usize,
    works: Vec<Work>,
    known: Known,
}

/// Streams that are being captured.
pub struct Capture {
    /// In the order in which they came; the first began.
    members: Vec<Member>,
    /// The last record of each event: its own number in the graph, and what its stream knew.
    events: HashMap<usize, (usize, Known)>,
    count: usize,
}

/// The captured work of all streams, ready to be replayed.
pub struct Graph {
    streams: Vec<Vec<Work>>,
    events: usize,
}

impl Capture {
    pub fn new(stream: usize) -> Capture {
        Capture { members: vec![Member::new(stream)], events: HashMap::new(), count: 0 }
    }

    pub fn has(&self, stream: usize) -> bool {
        self.members.iter().any(|member| member.stream == stream)
    }

    fn member(&mut self, stream: usize) -> &mut Member {
        self.members.iter_mut().find(|member| member.stream == stream).expect("the caller looked")
    }

    pub fn add(&mut self, stream: usize, work: Work) {
        let member = self.member(stream);
        member.works.push(work);
        let count = member.works.len();
        member.known.insert(stream, count);
    }

    pub fn record(&mut self, event: usize, stream: usize) {
        self.count += 1;
        let number = self.count;
        self.add(stream, Work::Record { event: number, time: 1 });
        let known = self.member(stream).known.clone();
        self.events.insert(event, (number, known));
    }

    /// Adds a wait if the stream or the event is part of the capture; the status then, and else `None`.
    pub fn wait(&mut self, stream: usize, event: usize) -> Option<u32> {
        let Some((number, known)) = self.events.get(&event).cloned() else {
            return self.has(stream).then_some(CAPTURE_ISOLATION);
        };
        if !self.has(stream) {
            self.members.push(Member::new(stream));
        }
        self.add(stream, Work::Wait { event: number, time: 1 });
        let own = &mut self.member(stream).known;
        for (other, count) in known {
            let newest = own.entry(other).or_default();
            *newest = count.max(*newest);
        }
        Some(0)
    }

    /// The graph; `None` where the first stream does not wait for the end of another one.
    pub fn end(self) -> Option<Graph> {
        let known = &self.members[0].known;
        let joined = |member: &Member| known.get(&member.stream).copied().unwrap_or(0) >= member.works.len();
        let joined = self.members.iter().skip(1).all(joined);
        let streams = self.members.into_iter().map(|member| member.works).collect();
        joined.then_some(Graph { streams, events: self.count })
    }

    pub fn began_on(&self, stream: usize) -> bool {
        self.members[0].stream == stream
    }
}

impl Member {
    fn new(stream: usize) -> Member {
        Member { stream, works: Vec::new(), known: Known::new() }
    }
}

impl Graph {
    pub fn streams(&self) -> &[Vec<Work>] {
        &self.streams
    }

    /// Numbers of the events inside.
    pub fn events(&self) -> impl Iterator<Item = usize> {
        1..=self.events
    }

    /// Number of kernels, copies and fills.
    pub fn nodes(&self) -> usize {
        let counts = |work: &&Work| !matches!(work, Work::Record { .. } | Work::Wait { .. });
        self.streams.iter().flatten().filter(counts).count()
    }
}
