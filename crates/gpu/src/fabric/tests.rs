//! Tests of every transport over an imitated driver and an imitated NCCL: device memory is this process's, queued work
//! runs in the order of its stream, and streams alternate at random. So a missing mark or wait shows as wrong bytes.
#![allow(unsafe_code, reason = "the imitated driver copies between addresses that the tests own")]

use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::time::Duration;

use super::*;
use crate::driver::Watch;
use crate::error::Error;
use crate::library::{Opened, Origin};
use crate::nccl::{Nccl, UniqueId};
use crate::sys::driver as driver_sys;
use crate::sys::nccl as nccl_sys;
use crate::vendor::Vendor;

/// One thing on a stream.
#[derive(Clone)]
enum Queued {
    Copy {
        to: u64,
        from: u64,
        bytes: usize,
    },
    Fill {
        to: u64,
        bytes: usize,
        value: u8,
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
    /// Waits until `streams` streams have come to this number; then the copies are done.
    Meet {
        number: usize,
        streams: usize,
        copies: Vec<(u64, u64, usize)>,
    },
}

/// A call inside a group of NCCL.
struct Call {
    stream: usize,
    rank: usize,
    what: Moved,
}

enum Moved {
    Gather { from: u64, to: u64, bytes: usize },
    Send { from: u64, bytes: usize, peer: usize },
    Receive { to: u64, bytes: usize, peer: usize },
}

#[derive(Default)]
struct World {
    streams: Vec<VecDeque<Queued>>,
    /// Number of records of each event that are queued, and that have run.
    queued: HashMap<usize, u64>,
    passed: HashMap<usize, u64>,
    events: usize,
    calls: Vec<Call>,
    meetings: usize,
    random: u64,
    /// The status that the library returns for a communicator.
    status: u32,
    pinned: HashMap<usize, Vec<u8>>,
}

thread_local! {
    static WORLD: RefCell<World> = RefCell::default();
}

fn world<T>(of: impl FnOnce(&mut World) -> T) -> T {
    WORLD.with_borrow_mut(of)
}

fn put(stream: *mut c_void, queued: Queued) -> u32 {
    world(|world| world.streams[stream as usize - 1].push_back(queued));
    0
}

impl World {
    fn draw(&mut self, below: usize) -> usize {
        self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.random >> 33) as usize % below
    }

    fn is_ready(&self, stream: usize) -> bool {
        match self.streams[stream].front() {
            None => false,
            Some(Queued::Wait { event, time }) => self.passed.get(event).copied().unwrap_or(0) >= *time,
            Some(Queued::Meet { number, streams, .. }) => {
                let here = |queue: &&VecDeque<Queued>| matches!(queue.front(), Some(Queued::Meet { number: of, .. }) if of == number);
                self.streams.iter().filter(here).count() == *streams
            }
            Some(_) => true,
        }
    }

    fn step(&mut self, stream: usize) {
        let move_bytes = |to: u64, from: u64, bytes: usize| {
            // SAFETY: the tests own both ranges.
            unsafe { std::ptr::copy_nonoverlapping(from as *const u8, to as *mut u8, bytes) }
        };
        match self.streams[stream].pop_front().expect("it is ready") {
            Queued::Copy { to, from, bytes } => move_bytes(to, from, bytes),
            // SAFETY: as above.
            Queued::Fill { to, bytes, value } => unsafe { std::ptr::write_bytes(to as *mut u8, value, bytes) },
            Queued::Record { event, time } => {
                self.passed.insert(event, time);
            }
            Queued::Wait { .. } => {}
            Queued::Meet { number, copies, .. } => {
                copies.into_iter().for_each(|(to, from, bytes)| move_bytes(to, from, bytes));
                for other in &mut self.streams {
                    if matches!(other.front(), Some(Queued::Meet { number: of, .. }) if *of == number) {
                        let Some(Queued::Meet { copies, .. }) = other.pop_front() else { unreachable!("just seen") };
                        copies.into_iter().for_each(|(to, from, bytes)| move_bytes(to, from, bytes));
                    }
                }
            }
        }
    }

    /// Runs until nothing is left. Panics where everything waits.
    fn run(&mut self) {
        while self.streams.iter().any(|queue| !queue.is_empty()) {
            let ready: Vec<usize> = (0..self.streams.len()).filter(|stream| self.is_ready(*stream)).collect();
            assert!(!ready.is_empty(), "every stream waits for another one");
            let chosen = ready[self.draw(ready.len())];
            self.step(chosen);
        }
    }
}

unsafe extern "C" fn fine(_: *mut c_void) -> u32 {
    0
}
unsafe extern "C" fn released(_: c_int) -> u32 {
    0
}
unsafe extern "C" fn error_text(_: u32, _: *mut *const c_char) -> u32 {
    0
}
unsafe extern "C" fn stream_create(to: *mut *mut c_void, _: c_uint) -> u32 {
    let number = world(|world| {
        world.streams.push(VecDeque::new());
        world.streams.len()
    });
    // SAFETY: the caller's local.
    unsafe { *to = number as *mut c_void };
    0
}
unsafe extern "C" fn event_create(to: *mut *mut c_void, _: c_uint) -> u32 {
    let number = world(|world| {
        world.events += 1;
        world.events
    });
    // SAFETY: the caller's local.
    unsafe { *to = number as *mut c_void };
    0
}
unsafe extern "C" fn event_record(event: *mut c_void, stream: *mut c_void) -> u32 {
    let event = event as usize;
    let time = world(|world| {
        let time = world.queued.entry(event).or_default();
        *time += 1;
        *time
    });
    put(stream, Queued::Record { event, time })
}
unsafe extern "C" fn stream_wait(stream: *mut c_void, event: *mut c_void, _: c_uint) -> u32 {
    let event = event as usize;
    let time = world(|world| world.queued.get(&event).copied().unwrap_or(0));
    put(stream, Queued::Wait { event, time })
}
unsafe extern "C" fn between(to: u64, from: u64, bytes: usize, stream: *mut c_void) -> u32 {
    put(stream, Queued::Copy { to, from, bytes })
}
unsafe extern "C" fn to_host(to: *mut c_void, from: u64, bytes: usize, stream: *mut c_void) -> u32 {
    put(stream, Queued::Copy { to: to as u64, from, bytes })
}
unsafe extern "C" fn to_device(to: u64, from: *const c_void, bytes: usize, stream: *mut c_void) -> u32 {
    put(stream, Queued::Copy { to, from: from as u64, bytes })
}
unsafe extern "C" fn fill(to: u64, value: u8, bytes: usize, stream: *mut c_void) -> u32 {
    put(stream, Queued::Fill { to, bytes, value })
}
unsafe extern "C" fn pinned(to: *mut *mut c_void, bytes: usize, _: c_uint) -> u32 {
    let mut memory = vec![0u8; bytes];
    let at = memory.as_mut_ptr();
    world(|world| world.pinned.insert(at as usize, memory));
    // SAFETY: the caller's local.
    unsafe { *to = at.cast() };
    0
}
unsafe extern "C" fn unpinned(at: *mut c_void) -> u32 {
    world(|world| world.pinned.remove(&(at as usize)));
    0
}
unsafe extern "C" fn not_ready(_: *mut c_void) -> u32 {
    driver_sys::ERROR_NOT_READY
}

fn driver() -> driver_sys::DriverTable {
    driver_sys::DriverTable {
        cuGetErrorName: error_text,
        cuGetErrorString: error_text,
        cuCtxSetCurrent: fine,
        cuDevicePrimaryCtxRelease_v2: released,
        cuStreamCreate: stream_create,
        cuStreamDestroy_v2: fine,
        cuStreamWaitEvent: stream_wait,
        cuStreamQuery: not_ready,
        cuEventCreate: event_create,
        cuEventDestroy_v2: fine,
        cuEventRecord: event_record,
        cuMemcpyDtoDAsync_v2: between,
        cuMemcpyDtoHAsync_v2: to_host,
        cuMemcpyHtoDAsync_v2: to_device,
        cuMemsetD8Async: fill,
        cuMemHostAlloc: pinned,
        cuMemFreeHost: unpinned,
        ..driver_sys::DriverTable::unavailable(Vendor::Nvidia)
    }
}

unsafe extern "C" fn nothing() -> u32 {
    0
}
unsafe extern "C" fn join(
    to: *mut nccl_sys::Comm,
    _: c_int,
    _: UniqueId,
    rank: c_int,
    config: *mut nccl_sys::Config,
) -> u32 {
    // SAFETY: the caller's locals.
    unsafe {
        assert_eq!(((*config).size, (*config).blocking), (48, 0));
        *to = (rank as usize + 1) as *mut c_void;
    }
    nccl_sys::IN_PROGRESS
}
unsafe extern "C" fn status(_: nccl_sys::Comm, to: *mut u32) -> u32 {
    // SAFETY: the caller's local.
    unsafe { *to = world(|world| world.status) };
    0
}
unsafe extern "C" fn words(_: u32) -> *const c_char {
    c"remote process exited".as_ptr()
}
unsafe extern "C" fn last(_: nccl_sys::Comm) -> *const c_char {
    c"".as_ptr()
}
fn call(comm: nccl_sys::Comm, stream: *mut c_void, what: Moved) -> u32 {
    world(|world| world.calls.push(Call { stream: stream as usize - 1, rank: comm as usize - 1, what }));
    0
}
unsafe extern "C" fn gather(
    from: *const c_void,
    to: *mut c_void,
    bytes: usize,
    kind: u32,
    comm: nccl_sys::Comm,
    stream: *mut c_void,
) -> u32 {
    assert_eq!(kind, nccl_sys::BYTES);
    call(comm, stream, Moved::Gather { from: from as u64, to: to as u64, bytes })
}
unsafe extern "C" fn send(
    from: *const c_void,
    bytes: usize,
    _: u32,
    peer: c_int,
    comm: nccl_sys::Comm,
    stream: *mut c_void,
) -> u32 {
    call(comm, stream, Moved::Send { from: from as u64, bytes, peer: peer as usize })
}
unsafe extern "C" fn receive(
    to: *mut c_void,
    bytes: usize,
    _: u32,
    peer: c_int,
    comm: nccl_sys::Comm,
    stream: *mut c_void,
) -> u32 {
    call(comm, stream, Moved::Receive { to: to as u64, bytes, peer: peer as usize })
}

/// Does everything of a group when all of its streams have come to it.
unsafe extern "C" fn group_end() -> u32 {
    world(|world| {
        let calls = std::mem::take(&mut world.calls);
        let mut streams: Vec<usize> = calls.iter().map(|call| call.stream).collect();
        streams.dedup();
        let mut copies = Vec::new();
        for call in &calls {
            match call.what {
                Moved::Gather { to, bytes, .. } => {
                    for other in &calls {
                        let Moved::Gather { from, .. } = other.what else { panic!("a gather with something else") };
                        copies.push((to + (other.rank * bytes) as u64, from, bytes));
                    }
                }
                Moved::Receive { to, bytes, peer } => {
                    let of_peer = |other: &&Call| {
                        other.rank == peer && matches!(other.what, Moved::Send { peer, .. } if peer == call.rank)
                    };
                    let mut sent = calls.iter().filter(of_peer);
                    let Some(Call { what: Moved::Send { from, bytes: sent_bytes, .. }, .. }) = sent.next() else {
                        panic!("rank {} receives what {peer} does not send", call.rank)
                    };
                    assert!(sent.next().is_none() && *sent_bytes == bytes);
                    copies.push((to, *from, bytes));
                }
                Moved::Send { .. } => {}
            }
        }
        world.meetings += 1;
        let number = world.meetings;
        let count = streams.len();
        for stream in streams {
            let copies = std::mem::take(&mut copies);
            world.streams[stream].push_back(Queued::Meet { number, streams: count, copies });
        }
    });
    0
}

fn nccl() -> Arc<Nccl> {
    let table = nccl_sys::NcclTable {
        ncclGroupStart: nothing,
        ncclGroupEnd: group_end,
        ncclCommInitRankConfig: join,
        ncclCommGetAsyncError: status,
        ncclCommFinalize: fine,
        ncclCommDestroy: fine,
        ncclCommAbort: fine,
        ncclGetErrorString: words,
        ncclGetLastError: last,
        ncclAllGather: gather,
        ncclSend: send,
        ncclRecv: receive,
        ..nccl_sys::NcclTable::unavailable(Vendor::Nvidia)
    };
    Nccl::new(Opened { table, path: "imitated".into(), origin: Origin::System })
}

fn never() -> Arc<Watch> {
    Arc::new(Watch { timeout: Duration::from_secs(600), ended: Box::new(|| None) })
}

fn fabric(ranks: usize, transport: Transport) -> Fabric {
    let devices: Vec<_> = (0..ranks).map(|rank| Device::imitated(driver(), rank as c_int)).collect();
    let id = UniqueId([7; UniqueId::BYTES]);
    let joined = || Communicators::join(&nccl(), id, ranks, 0..ranks, &devices, &never()).unwrap();
    let nccl = (transport == Transport::Nccl).then(joined);
    Fabric::new(0..ranks, ranks, devices.clone(), [transport; 2], nccl).unwrap()
}

/// Returns the byte that a rank sends at a place.
fn given(rank: usize, place: usize, round: usize) -> u8 {
    (rank * 89 + place / 7 * 5 + place + round * 31) as u8
}

/// Checks the bytes that all ranks get, while streams run in an order by `seed` and each rank overwrites its input at
/// once.
fn moved(transport: Transport, movement: Movement, ranks: usize, group: ProcessGroup, bytes: usize, seed: u64) {
    world(|world| *world = World { random: seed, ..World::default() });
    let mut fabric = fabric(ranks, transport);
    if fabric.must_grow(movement, bytes) {
        fabric.grow(bytes).unwrap();
    }
    let streams: Vec<Stream> = fabric.devices.iter().map(|device| Stream::new(device).unwrap()).collect();
    let whole = if movement == Movement::AllGather { bytes * group.size } else { bytes };
    for round in 0..3 {
        let shown: Vec<Vec<u8>> =
            (0..ranks).map(|rank| (0..bytes).map(|place| given(rank, place, round)).collect()).collect();
        let (from, to) = (vec![vec![0u8; bytes]; ranks], vec![vec![0u8; whole]; ranks]);
        let lane = |rank: usize| {
            let (from, to): (&Vec<u8>, &Vec<u8>) = (&from[rank], &to[rank]);
            Lane { stream: &streams[rank], from: from.as_ptr() as u64, to: to.as_ptr() as u64, bytes }
        };
        let lanes: Vec<Lane<'_>> = (0..ranks).map(lane).collect();
        // The input is only there when the rank's stream comes to it, and is overwritten after the collective.
        for (lane, shown) in lanes.iter().zip(&shown) {
            lane.stream.copy_between(lane.from, shown.as_ptr() as u64, bytes).unwrap();
        }
        fabric.queue(movement, group, &lanes).unwrap();
        for lane in &lanes {
            // SAFETY: the range is the lane's.
            unsafe { lane.stream.fill(lane.from, 1, 255, bytes).unwrap() };
        }
        world(World::run);
        for (rank, got) in to.iter().enumerate() {
            let of = |peer: usize| match movement {
                Movement::AllGather => shown[group.member(rank, peer)].clone(),
                Movement::AllToAllOthers if group.member(rank, peer) == rank => vec![0; bytes / group.size],
                Movement::AllToAll | Movement::AllToAllOthers => {
                    let piece = bytes / group.size;
                    shown[group.member(rank, peer)][group.number(rank) * piece..][..piece].to_vec()
                }
            };
            let expected: Vec<u8> = (0..group.size).flat_map(of).collect();
            assert_eq!(*got, expected, "rank {rank} of {ranks}, {group:?}, {transport:?}, {movement:?}");
        }
    }
    fabric.end(true).into_iter().for_each(Ending::wait);
}

#[test]
fn every_way_brings_the_same_bytes_in_whatever_order_streams_run() {
    for transport in [Transport::Peers, Transport::Host, Transport::Nccl] {
        for movement in [Movement::AllGather, Movement::AllToAll, Movement::AllToAllOthers] {
            let apart = ProcessGroup { size: 3, stride: 2 };
            let groups = [
                (2, ProcessGroup::row(2)),
                (3, ProcessGroup::row(3)),
                (4, ProcessGroup::row(2)),
                (9, ProcessGroup::row(9)),
                (6, apart),
            ];
            for (ranks, group) in groups {
                for seed in 0..20 {
                    moved(transport, movement, ranks, group, 252, seed);
                    moved(transport, movement, ranks, group, 36 * 256, seed);
                }
            }
        }
    }
}

#[test]
fn the_way_follows_from_the_options_and_from_what_gpus_reach() {
    use Transport::{Host, Nccl, Peers};
    let open = Ways::default();
    assert_eq!(transports(open, 1, true), [Peers, Peers]);
    assert_eq!(transports(open, 1, false), [Host, Host]);
    assert_eq!(transports(open, 2, true), [Nccl, Nccl]);
    let mixed = Ways { gather: Some(false), exchange: Some(true), without_peers: false };
    assert_eq!(transports(mixed, 1, true), [Nccl, Peers]);
    assert_eq!(transports(Ways { without_peers: true, ..mixed }, 1, true), [Nccl, Host]);
}

#[test]
fn a_communicator_that_fails_or_hangs_ends_the_call() {
    world(|world| *world = World { status: 6, ..World::default() });
    let devices = [Device::imitated(driver(), 0)];
    let id = UniqueId([7; UniqueId::BYTES]);
    let join = |watch: &Arc<Watch>| Communicators::join(&nccl(), id, 2, 1..2, &devices, watch).err().unwrap();
    let failed = join(&never());
    assert!(matches!(&failed, Error::Call { code: 6, name, .. } if name == "remote process exited"), "{failed}");
    world(|world| world.status = nccl_sys::IN_PROGRESS);
    let watch = Watch { timeout: Duration::from_millis(20), ended: Box::new(|| None) };
    assert_eq!(join(&Arc::new(watch)).to_string(), "NCCL: it did not answer for 0 s");
    let gone = Watch { timeout: Duration::from_secs(600), ended: Box::new(|| Some("node 1: gone".into())) };
    assert_eq!(join(&Arc::new(gone)).to_string(), "NCCL: node 1: gone");
}

#[test]
fn a_gpu_that_does_not_answer_is_not_waited_for_for_ever() {
    let device = Device::imitated(driver(), 3);
    let watch = Watch { timeout: Duration::from_millis(20), ended: Box::new(|| None) };
    device.watch_with(&Arc::new(watch));
    let stream = Stream::new(&device).unwrap();
    assert_eq!(stream.synchronise().unwrap_err().to_string(), "GPU 3: it did not answer for 0 s");
}
