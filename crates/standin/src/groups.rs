//! Groups of collective calls: ranks, calls, and the copies that the calls of a group are together.

use std::collections::HashMap;

/// A rank of a communicator.
pub struct Rank {
    pub id: usize,
    pub ranks: usize,
    pub rank: usize,
}

/// A call of an open group, by a rank on a stream.
pub struct Call {
    pub handle: usize,
    pub stream: usize,
    pub what: What,
}

/// A call's addresses, bytes and peer, as NCCL has them.
pub enum What {
    Gather { from: u64, to: u64, bytes: usize },
    Send { from: u64, bytes: usize, peer: usize },
    Receive { to: u64, bytes: usize, peer: usize },
}

/// A copy from the bytes of one stream's call to those of another's.
pub struct Move {
    pub sender: usize,
    pub receiver: usize,
    pub to: u64,
    pub from: u64,
    pub bytes: usize,
}

/// Returns the copies of a group; none where a rank is missing, or a call has no counterpart of its size.
pub fn matched(ranks: &HashMap<usize, Rank>, calls: &[Call]) -> Option<Vec<Move>> {
    let all_joined = ranks.values().all(|of| ranks.values().filter(|other| other.id == of.id).count() == of.ranks);
    let mut moves = Vec::new();
    let mut received = vec![false; calls.len()];
    for call in calls {
        let own = &ranks[&call.handle];
        let of_peer = |other: &Call, peer: usize| {
            let rank = &ranks[&other.handle];
            rank.id == own.id && rank.rank == peer
        };
        match call.what {
            What::Gather { from, bytes, .. } => {
                for receiver in 0..own.ranks {
                    let (other, to) = calls.iter().find_map(|other| match other.what {
                        What::Gather { to, bytes: wanted, .. } if wanted == bytes && of_peer(other, receiver) => {
                            Some((other, to))
                        }
                        _ => None,
                    })?;
                    let to = to + (own.rank * bytes) as u64;
                    moves.push(Move { sender: call.stream, receiver: other.stream, to, from, bytes });
                }
            }
            What::Send { from, bytes, peer } => {
                let (place, to) = calls.iter().enumerate().find_map(|(place, other)| match other.what {
                    What::Receive { to, bytes: wanted, peer: sender } => {
                        let meets = of_peer(other, peer) && sender == own.rank && wanted == bytes && !received[place];
                        meets.then_some((place, to))
                    }
                    _ => None,
                })?;
                received[place] = true;
                moves.push(Move { sender: call.stream, receiver: calls[place].stream, to, from, bytes });
            }
            What::Receive { .. } => {}
        }
    }
    let answered =
        calls.iter().zip(received).all(|(call, received)| received || !matches!(call.what, What::Receive { .. }));
    (all_joined && answered).then_some(moves)
}
