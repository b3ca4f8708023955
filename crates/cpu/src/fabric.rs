//! The collectives of ranks that are threads of one process: each publishes its bytes, all wait for one another, each
//! reads the bytes meant for it. Bytes of ranks of other processes come through a [`Wire`]. Moves bytes and never adds.
//! A rank that fails, or does not come in time, ends it for all. Knows neither programs nor what the bytes are.

use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock, Weak};
use std::time::{Duration, Instant};

use program::{BackendError, Movement, ProcessGroup};

/// The exchange between the ranks of this process and those of others.
pub trait Wire: Send + Sync {
    /// Sends the bytes that the ranks of this process publish, and writes those of other ranks to their places: all
    /// their bytes in an all-gather; in an all-to-all, the pieces for the ranks of this process. Groups span all
    /// processes: all ranks, or one of each process. The error is a rank that failed, and why.
    fn swap(
        &self,
        movement: Movement,
        group: ProcessGroup,
        bytes: usize,
        shown: &[RwLock<Vec<u8>>],
    ) -> Result<(), (usize, String)>;
}

/// The state that the ranks of a process share.
pub struct Fabric {
    state: Mutex<State>,
    changed: Condvar,
    /// The bytes that each rank publishes.
    shown: Vec<RwLock<Vec<u8>>>,
    /// The ranks of this process.
    here: Range<usize>,
    /// The connection to the other processes.
    wire: Option<Arc<dyn Wire>>,
    /// The time that a rank waits for the others.
    timeout: Duration,
}

#[derive(Default)]
struct State {
    /// Number of ranks that have come to the present meeting.
    arrived: usize,
    /// Number of meetings that are over.
    met: u64,
    /// The collective and group size that the first rank of the present meeting came for.
    purpose: Option<(Movement, usize)>,
    failure: Option<(usize, String)>,
}

/// One rank's access to the fabric.
#[derive(Clone)]
pub struct RankHandle {
    fabric: Arc<Fabric>,
    pub rank: usize,
}

impl Fabric {
    /// Returns a handle for each of `ranks` ranks, all of this process.
    pub fn handles(ranks: usize, timeout: Duration) -> Vec<RankHandle> {
        Fabric::handles_of(0..ranks, ranks, timeout, None)
    }

    /// Returns handles for the ranks `here` of `ranks`, with a wire to the others.
    pub fn handles_of(
        here: Range<usize>,
        ranks: usize,
        timeout: Duration,
        wire: Option<Arc<dyn Wire>>,
    ) -> Vec<RankHandle> {
        let fabric = Arc::new(Fabric {
            state: Mutex::default(),
            changed: Condvar::new(),
            shown: (0..ranks).map(|_| RwLock::default()).collect(),
            here: here.clone(),
            wire,
            timeout,
        });
        here.map(|rank| RankHandle { fabric: fabric.clone(), rank }).collect()
    }

    /// Ends all ranks because of a failed one, which may be of another process.
    pub fn fail_of(&self, rank: usize, why: String) {
        self.state().failure.get_or_insert((rank, why));
        self.changed.notify_all();
    }

    /// Locks the state. A thread that panics reports it with [`RankHandle::fail`]; the state that it held is still
    /// consistent.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl RankHandle {
    /// Publishes `own` and passes the bytes that come from each rank of a group to `take`, by its number in the group:
    /// all its bytes, or the piece for this rank. Ranks of several processes all call it together.
    pub fn collective(
        &self,
        movement: Movement,
        group: ProcessGroup,
        own: &[u8],
        mut take: impl FnMut(usize, &[u8]),
    ) -> Result<(), BackendError> {
        let Fabric { shown: all, here, wire, .. } = &*self.fabric;
        let bytes = own.len();
        let far = (0..group.size).any(|number| !here.contains(&group.member(self.rank, number)));
        let of_all = group.size * group.stride == all.len() && [1, here.len()].contains(&group.stride);
        assert!(!far || of_all, "a group is of one process, or of all");
        {
            let mut shown = self.fabric.shown[self.rank].write().unwrap_or_else(PoisonError::into_inner);
            shown.clear();
            shown.extend_from_slice(own);
        }
        self.meet((movement, bytes))?;
        if let Some(wire) = wire.as_ref().filter(|_| far) {
            if self.rank == here.start
                && let Err((rank, why)) = wire.swap(movement, group, bytes, all)
            {
                self.fabric.fail_of(rank, why);
            }
            self.meet((movement, bytes))?;
        }
        let piece = bytes / group.size;
        // The number of this rank in its group, and of the first rank of this process.
        let (own, cut) = (group.number(self.rank), group.number(here.start));
        for number in 0..group.size {
            let rank = group.member(self.rank, number);
            let shown = all[rank].read().unwrap_or_else(PoisonError::into_inner);
            match movement {
                Movement::AllGather => take(number, &shown),
                Movement::AllToAllOthers if rank == self.rank => {}
                // Other processes send only the bytes for this one.
                Movement::AllToAll | Movement::AllToAllOthers => {
                    let place = if here.contains(&rank) { own } else { own - cut };
                    take(number, &shown[place * piece..][..piece]);
                }
            }
        }
        self.meet((movement, bytes))
    }

    /// Returns when all ranks have come for the same purpose.
    fn meet(&self, purpose: (Movement, usize)) -> Result<(), BackendError> {
        let Fabric { here, changed, timeout, .. } = &*self.fabric;
        let mut state = self.fabric.state();
        state.check(self.rank)?;
        let first = *state.purpose.get_or_insert(purpose);
        if first != purpose {
            let words = |(movement, bytes): (Movement, usize)| format!("a {} of {bytes} bytes", movement.name());
            let text = format!("it came to {}, others to {}", words(purpose), words(first));
            return self.end(state, text);
        }
        state.arrived += 1;
        let number = state.met;
        if state.arrived == here.len() {
            *state = State { met: number + 1, failure: state.failure.take(), ..State::default() };
            changed.notify_all();
            return Ok(());
        }
        let deadline = Instant::now() + *timeout;
        while state.met == number {
            state.check(self.rank)?;
            let Some(left) = deadline.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) else {
                let text = format!("it waited {} s for the others in a {}", timeout.as_secs(), purpose.0.name());
                return self.end(state, text);
            };
            state = changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        Ok(())
    }

    /// Ends all ranks because of this one.
    pub fn fail(&self, why: String) {
        let _ = self.end(self.fabric.state(), why);
    }

    /// Returns the shared state, weakly, for users that must not keep it alive.
    pub fn fabric(&self) -> Weak<Fabric> {
        Arc::downgrade(&self.fabric)
    }

    /// Returns an error if a rank has failed.
    pub fn check(&self) -> Result<(), BackendError> {
        self.fabric.state().check(self.rank)
    }

    fn end(&self, mut state: MutexGuard<'_, State>, why: String) -> Result<(), BackendError> {
        state.failure.get_or_insert((self.rank, why));
        self.fabric.changed.notify_all();
        state.check(self.rank)
    }

    /// Number of ranks of all processes.
    pub fn count(&self) -> usize {
        self.fabric.shown.len()
    }

    /// The rank that failed first, and why.
    pub fn failure(&self) -> Option<(usize, String)> {
        self.fabric.state().failure.clone()
    }
}

impl State {
    fn check(&self, rank: usize) -> Result<(), BackendError> {
        match &self.failure {
            None => Ok(()),
            Some((failed, why)) => Err(BackendError::Failed {
                call: format!("rank {rank}"),
                message: format!("rank {failed} failed before: {why}"),
                context: None,
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the bytes that every rank of `ranks` gets from all.
    fn together(ranks: usize, movement: Movement) -> Vec<Vec<Vec<u8>>> {
        let handles = Fabric::handles(ranks, Duration::from_secs(60));
        std::thread::scope(|scope| {
            let run = |handle: RankHandle| {
                let mut got = Vec::new();
                for round in 0..50u8 {
                    got.clear();
                    let own: Vec<u8> = (0..ranks as u8).flat_map(|piece| [handle.rank as u8, piece, round]).collect();
                    handle
                        .collective(movement, ProcessGroup::row(ranks), &own, |_, bytes| got.push(bytes.to_vec()))
                        .unwrap();
                }
                got
            };
            let threads: Vec<_> = handles.into_iter().map(|handle| scope.spawn(move || run(handle))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    #[test]
    fn everyone_gets_what_is_meant_for_it() {
        for ranks in [1, 2, 5] {
            let gathered = together(ranks, Movement::AllGather);
            let exchanged = together(ranks, Movement::AllToAll);
            let of_others = together(ranks, Movement::AllToAllOthers);
            for rank in 0..ranks {
                for from in 0..ranks {
                    let all: Vec<u8> = (0..ranks as u8).flat_map(|piece| [from as u8, piece, 49]).collect();
                    assert_eq!(gathered[rank][from], all);
                    assert_eq!(exchanged[rank][from], [from as u8, rank as u8, 49]);
                }
                let others: Vec<Vec<u8>> =
                    (0..ranks).filter(|from| *from != rank).map(|from| exchanged[rank][from].clone()).collect();
                assert_eq!(of_others[rank], others);
            }
        }
    }

    #[test]
    fn a_rank_that_fails_is_named_by_all_and_no_one_waits_on() {
        let handles = Fabric::handles(3, Duration::from_secs(600));
        let [a, b, failing] = &handles[..] else { unreachable!("three were requested") };
        std::thread::scope(|scope| {
            let waiting = [a, b].map(|handle| {
                scope.spawn(|| handle.collective(Movement::AllGather, ProcessGroup::row(3), &[1], |_, _| {}))
            });
            std::thread::sleep(Duration::from_millis(20));
            failing.fail("no memory".into());
            for waiting in waiting {
                let message = waiting.join().unwrap().unwrap_err().to_string();
                assert!(message.contains("rank 2 failed before: no memory"), "{message}");
            }
        });
        assert_eq!(a.failure(), Some((2, "no memory".to_owned())));
        assert!(failing.collective(Movement::AllGather, ProcessGroup::row(3), &[1], |_, _| {}).is_err(), "it is over");
    }

    #[test]
    fn who_waits_too_long_or_for_something_else_gives_up() {
        let handles = Fabric::handles(2, Duration::from_millis(30));
        let message = handles[1]
            .collective(Movement::AllToAll, ProcessGroup::row(2), &[1, 2], |_, _| {})
            .unwrap_err()
            .to_string();
        assert!(message.contains("rank 1 failed") && message.contains("waited 0 s"), "{message}");
        let handles = Fabric::handles(2, Duration::from_secs(600));
        std::thread::scope(|scope| {
            let first =
                scope.spawn(|| handles[0].collective(Movement::AllGather, ProcessGroup::row(2), &[1], |_, _| {}));
            std::thread::sleep(Duration::from_millis(20));
            let message = handles[1]
                .collective(Movement::AllGather, ProcessGroup::row(2), &[1, 2], |_, _| {})
                .unwrap_err()
                .to_string();
            assert!(message.contains("a gather of 2 bytes, others to a gather of 1 bytes"), "{message}");
            assert!(first.join().unwrap().is_err());
        });
    }
}
