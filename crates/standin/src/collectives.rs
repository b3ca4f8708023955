//! The imitated library of collectives, NCCL or RCCL, between the ranks of this thread. The calls of a group are queued when
//! it ends: a receiver copies when its sender has come, and the sender goes on when the receiver has its bytes.
#![allow(unsafe_code, reason = "implements a C interface")]

use std::collections::HashMap;
use std::ffi::{c_char, c_int, c_void};

use gpu::Vendor;
use gpu::sys::nccl::{BYTES, Comm, Config, NcclTable, SUCCESS, Status, Stream, UniqueId};

use crate::groups::{Call, Move, Rank, What, matched};
use crate::world::{Work, World, world};

/// The statuses `ncclInvalidArgument` and `ncclInvalidUsage`.
const INVALID_ARGUMENT: Status = 4;
const INVALID_USAGE: Status = 5;

unsafe extern "C" fn version(to: *mut c_int) -> Status {
    // SAFETY: the caller's local.
    unsafe { to.write(22_809) };
    SUCCESS
}

unsafe extern "C" fn unique_id(to: *mut UniqueId) -> Status {
    let mut id = UniqueId([0; UniqueId::BYTES]);
    id.0[..8].copy_from_slice(&world(World::number).to_le_bytes());
    // SAFETY: the caller's local.
    unsafe { to.write(id) };
    SUCCESS
}

unsafe extern "C" fn init(to: *mut Comm, ranks: c_int, id: UniqueId, rank: c_int, _: *mut Config) -> Status {
    let [ranks, rank] = [ranks, rank].map(|of| of as usize);
    let id = usize::from_le_bytes(id.0[..8].try_into().expect("eight bytes"));
    let handle = world(|world| {
        let taken = world.ranks.values().any(|of| of.id == id && of.rank == rank);
        let handle = world.number();
        (rank < ranks && !taken).then(|| world.ranks.insert(handle, Rank { id, ranks, rank })).map(|_| handle)
    });
    let Some(handle) = handle else { return INVALID_ARGUMENT };
    // SAFETY: the caller's place.
    unsafe { to.write(handle as Comm) };
    SUCCESS
}

unsafe extern "C" fn asynchronous(_: Comm, to: *mut Status) -> Status {
    // SAFETY: the caller's local.
    unsafe { to.write(SUCCESS) };
    SUCCESS
}

/// Ends a communicator. The engine calls it from threads of its own, which have no world.
unsafe extern "C" fn end(_: Comm) -> Status {
    SUCCESS
}

unsafe extern "C" fn text_of_status(status: Status) -> *const c_char {
    let text = match status {
        INVALID_ARGUMENT => c"invalid argument",
        INVALID_USAGE => c"invalid usage",
        _ => c"no error",
    };
    text.as_ptr()
}

unsafe extern "C" fn last_error(_: Comm) -> *const c_char {
    c"".as_ptr()
}

unsafe extern "C" fn begin_group() -> Status {
    world(|world| match world.group.replace(Vec::new()) {
        None => SUCCESS,
        Some(_) => INVALID_USAGE,
    })
}

unsafe extern "C" fn end_group() -> Status {
    world(|world| match world.group.take().map(|calls| matched(&world.ranks, &calls)) {
        Some(Some(moves)) => queue(world, &moves),
        _ => INVALID_USAGE,
    })
}

/// Adds a call to the open group. A call outside of one would wait for calls that this thread makes later.
fn add(handle: Comm, kind: u32, stream: Stream, what: What) -> Status {
    let (handle, stream) = (handle as usize, stream as usize);
    world(|world| match &mut world.group {
        _ if kind != BYTES || !world.ranks.contains_key(&handle) => INVALID_ARGUMENT,
        Some(calls) => {
            calls.push(Call { handle, stream, what });
            SUCCESS
        }
        None => INVALID_USAGE,
    })
}

unsafe extern "C" fn all_gather(
    from: *const c_void,
    to: *mut c_void,
    bytes: usize,
    kind: u32,
    of: Comm,
    stream: Stream,
) -> Status {
    add(of, kind, stream, What::Gather { from: from as u64, to: to as u64, bytes })
}

unsafe extern "C" fn send(from: *const c_void, bytes: usize, kind: u32, peer: c_int, of: Comm, on: Stream) -> Status {
    add(of, kind, on, What::Send { from: from as u64, bytes, peer: peer as usize })
}

unsafe extern "C" fn receive(to: *mut c_void, bytes: usize, kind: u32, peer: c_int, of: Comm, on: Stream) -> Status {
    add(of, kind, on, What::Receive { to: to as u64, bytes, peer: peer as usize })
}

/// Queues copies on the streams of the receivers, in the captures that these are part of.
fn queue(world: &mut World, moves: &[Move]) -> Status {
    let mut streams: Vec<usize> = moves.iter().flat_map(|of| [of.sender, of.receiver]).collect();
    streams.sort_unstable();
    streams.dedup();
    let current = world.current;
    let mut marks = HashMap::new();
    let mut status = SUCCESS;
    for stream in &streams {
        world.current = world.streams[stream].device;
        let [come, done] = [(); 2].map(|()| world.own_event(world.current));
        status = status.max(world.record(come, *stream));
        marks.insert(*stream, (come, done));
    }
    let between: Vec<&Move> = moves.iter().filter(|of| of.sender != of.receiver).collect();
    for of in &between {
        status = status.max(world.wait(of.receiver, marks[&of.sender].0));
    }
    for of in moves {
        world.current = world.streams[&of.receiver].device;
        status = status.max(world.put(of.receiver, Work::Copy { to: of.to, from: of.from, bytes: of.bytes }));
    }
    for stream in &streams {
        world.current = world.streams[stream].device;
        status = status.max(world.record(marks[stream].1, *stream));
    }
    for of in &between {
        status = status.max(world.wait(of.sender, marks[&of.receiver].1));
    }
    world.current = current;
    status
}

/// The functions, of the same names for both vendors.
pub fn table(vendor: Vendor) -> NcclTable {
    NcclTable {
        vendor,
        ncclGetVersion: version,
        ncclGetUniqueId: unique_id,
        ncclCommInitRankConfig: init,
        ncclCommGetAsyncError: asynchronous,
        ncclCommFinalize: end,
        ncclCommDestroy: end,
        ncclCommAbort: end,
        ncclGetErrorString: text_of_status,
        ncclGetLastError: last_error,
        ncclGroupStart: begin_group,
        ncclGroupEnd: end_group,
        ncclAllGather: all_gather,
        ncclSend: send,
        ncclRecv: receive,
    }
}
