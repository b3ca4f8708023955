//! The state of the imitated machine on this thread: streams with queued work, events, and the order in which work runs. Work
//! runs when something waits for it, by random priorities of streams, and nothing is done that need not be.
#![allow(unsafe_code, reason = "work moves bytes between addresses of the imitated memory")]

use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};
use std::ffi::CString;
use std::rc::Rc;

use program::Arch;

use crate::capture::{Capture, Graph};
use crate::groups::{Call, Rank};
use crate::launches::{Launches, Task};
use crate::memory::Memory;
use crate::status::{
    CAPTURE_UNSUPPORTED, ILLEGAL_ADDRESS, INVALID_HANDLE, LAUNCH_FAILED, NOT_READY, OUT_OF_MEMORY, SUCCESS,
};

/// The GPUs that a thread sees.
#[derive(Clone, Debug)]
pub struct Machine {
    pub arch: Arch,
    pub gpus: usize,
    /// Bytes of memory of each.
    pub memory: usize,
    /// True if GPUs reach the memory of each other.
    pub reach: bool,
}

/// A failure of the machine.
#[derive(Clone, Debug, PartialEq)]
pub enum Fault {
    /// GPUs have no more than this number of bytes.
    Memory(usize),
    /// Launches of a kernel are refused.
    Launch(String),
    /// Work fails after this number of queued things has run, and nothing runs any more.
    Lost(usize),
}

/// One thing on a stream.
#[derive(Clone)]
pub enum Work {
    Copy {
        to: u64,
        from: u64,
        bytes: usize,
    },
    /// Bytes that were copied from pageable memory when they were queued.
    Put {
        to: u64,
        bytes: Rc<[u8]>,
    },
    Fill {
        to: u64,
        width: usize,
        value: u32,
        count: usize,
    },
    Record {
        event: usize,
        time: u64,
    },
    /// Waits until an event was recorded `time` times.
    Wait {
        event: usize,
        time: u64,
    },
    Task(Rc<Task>),
}

#[derive(Default)]
pub struct Stream {
    pub device: usize,
    queue: VecDeque<Work>,
    /// The launch before on this stream, by its places among the programs' instructions.
    pub last: Vec<(usize, usize)>,
}

#[derive(Default)]
pub struct Event {
    pub device: usize,
    recorded: u64,
    passed: u64,
}

impl Stream {
    pub fn of(device: usize) -> Stream {
        Stream { device, ..Stream::default() }
    }
}

impl Event {
    pub fn of(device: usize) -> Event {
        Event { device, ..Event::default() }
    }
}

#[derive(Default)]
pub struct World {
    pub machine: Option<Machine>,
    pub memory: Memory,
    /// The device that is current.
    pub current: usize,
    pub streams: HashMap<usize, Stream>,
    pub events: HashMap<usize, Event>,
    pub capture: Option<Capture>,
    pub graphs: HashMap<usize, Rc<Graph>>,
    pub launches: Launches,
    /// The ranks of communicators by their handles, and the calls of the group that is open.
    pub ranks: HashMap<usize, Rank>,
    pub group: Option<Vec<Call>>,
    /// Things that have run, and operations that were computed.
    ran: usize,
    pub computed: usize,
    faults: Vec<Fault>,
    /// The status of every call from now on, after a failure, and what it was.
    failed: Option<u32>,
    pub detail: CString,
    random: u64,
    /// Makes the priorities of streams.
    salt: usize,
    numbers: usize,
}

/// The mean number of works between two draws of priorities.
const REDRAWN: usize = 24;

thread_local! {
    static WORLD: RefCell<World> = RefCell::default();
}

pub fn world<T>(of: impl FnOnce(&mut World) -> T) -> T {
    WORLD.with_borrow_mut(of)
}

pub fn start(machine: Machine, seed: u64) {
    let launches = Launches::default();
    world(|world| *world = World { machine: Some(machine), random: seed, launches, ..World::default() });
}

impl World {
    pub fn machine(&self) -> &Machine {
        self.machine.as_ref().expect("`standin::start` gives this thread a machine")
    }

    pub fn inject(&mut self, fault: Fault) {
        self.faults.push(fault);
    }

    /// A number that no other stream, event, graph or function has.
    pub fn number(&mut self) -> usize {
        self.numbers += 1;
        self.numbers
    }

    fn draw(&mut self, below: usize) -> usize {
        self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.random >> 33) as usize % below
    }

    /// The stream that goes on. Streams have random priorities, drawn again from time to time, so that one of them can be
    /// far ahead of another: with a new draw at each step, all of them would advance about equally.
    fn choose(&mut self, ready: &[usize]) -> usize {
        if self.draw(REDRAWN) == 0 {
            self.salt = self.draw(1 << 20);
        }
        let priority = |stream: usize| (stream ^ self.salt).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
        ready.iter().copied().max_by_key(|stream| priority(*stream)).expect("a stream is ready")
    }

    /// Fails every call from now on.
    pub fn fail(&mut self, status: u32, detail: String) -> u32 {
        if self.failed.is_none() {
            self.failed = Some(status);
            self.detail = CString::new(detail).unwrap_or_default();
        }
        self.failed.unwrap_or(status)
    }

    /// The status of a call that a failed device answers with its failure, and that a capture does not allow.
    pub fn outside_of_captures(&mut self) -> u32 {
        match self.failed {
            Some(status) => status,
            None if self.capture.is_some() => CAPTURE_UNSUPPORTED,
            None => SUCCESS,
        }
    }

    pub fn allocate(&mut self, bytes: usize, device: Option<usize>) -> Result<u64, u32> {
        let status = self.outside_of_captures();
        if status != SUCCESS {
            return Err(status);
        }
        let limit = self.limit();
        if device.is_some_and(|device| self.memory.used(device) + bytes > limit) {
            return Err(OUT_OF_MEMORY);
        }
        Ok(self.memory.allocate(bytes, device))
    }

    /// Bytes of a GPU's memory.
    pub fn limit(&self) -> usize {
        let limits = self.faults.iter().filter_map(|fault| match fault {
            Fault::Memory(bytes) => Some(*bytes),
            Fault::Launch(_) | Fault::Lost(_) => None,
        });
        limits.min().unwrap_or(self.machine().memory)
    }

    pub fn refuses(&self, kernel: &str) -> bool {
        self.faults.iter().any(|fault| matches!(fault, Fault::Launch(name) if name == kernel))
    }

    /// Queues work on a stream, or puts it into the capture that the stream is part of.
    pub fn put(&mut self, stream: usize, work: Work) -> u32 {
        if let Some(status) = self.failed {
            return status;
        }
        let Some(of) = self.streams.get_mut(&stream) else { return INVALID_HANDLE };
        if of.device != self.current {
            return INVALID_HANDLE;
        }
        match self.capture.as_mut().filter(|capture| capture.has(stream)) {
            Some(capture) => capture.add(stream, work),
            None => of.queue.push_back(work),
        }
        SUCCESS
    }

    pub fn record(&mut self, event: usize, stream: usize) -> u32 {
        let Some(of) = self.streams.get(&stream) else { return INVALID_HANDLE };
        let Some(mark) = self.events.get_mut(&event).filter(|mark| mark.device == of.device) else {
            return INVALID_HANDLE;
        };
        if let Some(capture) = self.capture.as_mut().filter(|capture| capture.has(stream)) {
            capture.record(event, stream);
            return SUCCESS;
        }
        mark.recorded += 1;
        let time = mark.recorded;
        self.put(stream, Work::Record { event, time })
    }

    pub fn wait(&mut self, stream: usize, event: usize) -> u32 {
        let (Some(mark), true) = (self.events.get(&event), self.streams.contains_key(&stream)) else {
            return INVALID_HANDLE;
        };
        let time = mark.recorded;
        if let Some(capture) = &mut self.capture
            && let Some(status) = capture.wait(stream, event)
        {
            return status;
        }
        match self.streams.get_mut(&stream) {
            // A stream of any device may wait for an event of any other.
            Some(of) if self.failed.is_none() => {
                of.queue.push_back(Work::Wait { event, time });
                SUCCESS
            }
            _ => self.failed.unwrap_or(INVALID_HANDLE),
        }
    }

    /// Queues one replay: its streams begin after what is queued on the stream, and later work of the stream waits for them.
    pub fn replay(&mut self, graph: &Graph, stream: usize) -> u32 {
        if self.outside_of_captures() != SUCCESS {
            return self.outside_of_captures();
        }
        let device = self.streams.get(&stream).map_or(0, |stream| stream.device);
        if !self.streams.contains_key(&stream) || device != self.current {
            return INVALID_HANDLE;
        }
        let begin = self.own_event(device);
        let queue = |world: &mut World, stream: usize, work: Work| {
            world.streams.entry(stream).or_default().queue.push_back(work);
        };
        queue(self, stream, Work::Record { event: begin, time: 1 });
        let inner: HashMap<usize, usize> = graph.events().map(|event| (event, self.own_event(device))).collect();
        for works in graph.streams() {
            let (own, end) = (self.number(), self.own_event(device));
            queue(self, own, Work::Wait { event: begin, time: 1 });
            for work in works {
                let work = match work {
                    Work::Record { event, .. } => Work::Record { event: inner[event], time: 1 },
                    Work::Wait { event, .. } => Work::Wait { event: inner[event], time: 1 },
                    other => other.clone(),
                };
                queue(self, own, work);
            }
            queue(self, own, Work::Record { event: end, time: 1 });
            queue(self, stream, Work::Wait { event: end, time: 1 });
        }
        SUCCESS
    }

    /// Returns a new event of a device.
    pub fn own_event(&mut self, device: usize) -> usize {
        let number = self.number();
        self.events.insert(number, Event::of(device));
        number
    }

    fn ready(&self) -> Vec<usize> {
        let is_ready = |stream: &Stream| match stream.queue.front() {
            None => false,
            Some(Work::Wait { event, time }) => self.events.get(event).is_none_or(|event| event.passed >= *time),
            Some(_) => true,
        };
        let mut ready: Vec<usize> =
            self.streams.iter().filter(|(_, stream)| is_ready(stream)).map(|(number, _)| *number).collect();
        ready.sort_unstable();
        ready
    }

    fn step(&mut self, stream: usize) {
        let of = self.streams.get_mut(&stream).expect("it is ready");
        let work = of.queue.pop_front().expect("it is ready");
        self.ran += 1;
        if let Some(after) = self.faults.iter().find_map(|fault| match fault {
            Fault::Lost(after) => Some(*after),
            _ => None,
        }) && self.ran > after
        {
            self.fail(ILLEGAL_ADDRESS, "an illegal memory access was encountered".to_owned());
            return;
        }
        if let Err(why) = self.run(work) {
            self.fail(ILLEGAL_ADDRESS, why);
        }
    }

    fn run(&mut self, work: Work) -> Result<(), String> {
        let inside = |memory: &Memory, at: u64, bytes: usize| match memory.holds(at, bytes) {
            true => Ok(()),
            false => Err(format!("{bytes} bytes at {at:#x} are not allocated")),
        };
        match work {
            Work::Copy { to, from, bytes } => {
                let is_device = |at: u64| self.memory.holds(at, bytes);
                if !is_device(to) && !is_device(from) {
                    return Err(format!("a copy of {bytes} bytes between addresses that are not allocated"));
                }
                // SAFETY: one side is allocated with this size; the other is, or is the host's as the caller promised.
                unsafe { std::ptr::copy(from as *const u8, to as *mut u8, bytes) };
            }
            Work::Put { to, bytes } => {
                inside(&self.memory, to, bytes.len())?;
                // SAFETY: just checked.
                unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to as *mut u8, bytes.len()) };
            }
            Work::Fill { to, width, value, count } => {
                inside(&self.memory, to, width * count)?;
                let bytes: Vec<u8> = value.to_le_bytes()[..width].repeat(count);
                // SAFETY: just checked.
                unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to as *mut u8, bytes.len()) };
            }
            Work::Record { event, time } => {
                if let Some(event) = self.events.get_mut(&event) {
                    event.passed = event.passed.max(time);
                }
            }
            Work::Wait { .. } => {}
            Work::Task(task) => {
                self.computed += 1;
                task.run(&self.memory)?;
            }
        }
        Ok(())
    }

    /// Runs work, of streams at random, until something holds.
    pub fn run_until(&mut self, holds: impl Fn(&World) -> bool) -> u32 {
        let status = self.outside_of_captures();
        if status != SUCCESS {
            return status;
        }
        while !holds(self) {
            let ready = self.ready();
            if ready.is_empty() {
                return self.fail(LAUNCH_FAILED, "every stream waits for another one".to_owned());
            }
            let chosen = self.choose(&ready);
            self.step(chosen);
            if let Some(status) = self.failed {
                return status;
            }
        }
        SUCCESS
    }

    pub fn is_idle(&self) -> bool {
        self.streams.values().all(|stream| stream.queue.is_empty())
    }

    pub fn is_empty(&self, stream: usize) -> bool {
        self.streams.get(&stream).is_none_or(|stream| stream.queue.is_empty())
    }

    pub fn has_passed(&self, event: usize) -> bool {
        self.events.get(&event).is_none_or(|event| event.passed >= event.recorded)
    }

    /// Does a little of the work and says whether something holds.
    pub fn query(&mut self, holds: impl Fn(&World) -> bool) -> u32 {
        let steps = 1 + self.draw(8);
        for _ in 0..steps {
            let ready = self.ready();
            if holds(self) || ready.is_empty() || self.failed.is_some() {
                break;
            }
            let chosen = self.choose(&ready);
            self.step(chosen);
        }
        match self.failed {
            Some(status) => status,
            None if holds(self) => SUCCESS,
            None => NOT_READY,
        }
    }
}
