//! The order in which a stage does the passes of a step's micro-steps: one forward, one backward (1F1B; arXiv
//! 2104.04473, section 2.2). Backward passes keep the order of the micro-steps, so that sums are those of one device.

use std::collections::VecDeque;

/// One pass of a stage, by the number of the micro-step in its step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    Forward(usize),
    /// The forward pass again and the backward pass: on the last stage its only pass.
    Backward(usize),
}

/// Returns the passes of a stage for a step of `micro_steps`. Before its first backward pass it does one forward pass
/// for each later stage; from then on they alternate. The last stage has backward passes alone.
pub fn schedule(stage: usize, stages: usize, micro_steps: usize) -> Vec<Turn> {
    let after = stages - 1 - stage;
    if after == 0 {
        return (0..micro_steps).map(Turn::Backward).collect();
    }
    let ahead = (0..micro_steps.min(after)).map(Turn::Forward);
    let both = (0..micro_steps).flat_map(|done| {
        let next = done + after;
        (next < micro_steps).then_some(Turn::Forward(next)).into_iter().chain([Turn::Backward(done)])
    });
    ahead.chain(both).collect()
}

/// Returns the passes of all stages, each after those that it depends on: the sends of its neighbors, and the end of
/// the micro-step whose slot its result goes to. Queued in this order, no pass waits for one that is queued later.
pub fn turns(stages: usize, micro_steps: usize) -> Vec<(usize, Turn)> {
    let mut left: Vec<VecDeque<Turn>> = (0..stages).map(|stage| schedule(stage, stages, micro_steps).into()).collect();
    // Numbers of forward and backward passes that each stage has done.
    let (mut forward, mut backward) = (vec![0; stages], vec![0; stages]);
    let mut order = Vec::new();
    while left.iter().any(|turns| !turns.is_empty()) {
        let before = order.len();
        for stage in (0..stages).rev() {
            let Some(turn) = left[stage].front().copied() else { continue };
            let (Turn::Forward(number) | Turn::Backward(number)) = turn;
            let is_last = stage + 1 == stages;
            let given = stage == 0 || forward[stage - 1] > number;
            let ready = match turn {
                Turn::Forward(_) => given && number < backward[stage + 1] + stages - stage - 1,
                Turn::Backward(_) if is_last => given,
                Turn::Backward(_) => backward[stage + 1] > number,
            };
            if ready {
                let done = if matches!(turn, Turn::Forward(_)) { &mut forward } else { &mut backward };
                done[stage] += 1;
                left[stage].pop_front();
                order.push((stage, turn));
            }
        }
        assert!(order.len() > before, "no stage waits for ever");
    }
    order
}

/// The share of a step in which a stage waits for others, where all passes of all stages take equally long.
pub fn idle_share(stages: usize, micro_steps: usize) -> f64 {
    (stages - 1) as f64 / (micro_steps + stages - 1) as f64
}

#[cfg(test)]
mod tests {
    use super::Turn::{Backward, Forward};
    use super::*;

    #[test]
    fn forward_and_backward_passes_alternate() {
        assert_eq!(schedule(0, 2, 3), [Forward(0), Forward(1), Backward(0), Forward(2), Backward(1), Backward(2)]);
        assert_eq!(schedule(1, 2, 3), [0, 1, 2].map(Backward));
        assert_eq!(schedule(0, 4, 1), [Forward(0), Backward(0)]);
    }

    #[test]
    fn a_stage_has_no_more_micro_steps_in_flight_than_slots() {
        for (stages, micro_steps) in (2..6).flat_map(|stages| (1..9).map(move |micro_steps| (stages, micro_steps))) {
            for stage in 0..stages - 1 {
                let (mut now, mut most, mut done) = (0usize, 0, Vec::new());
                for turn in schedule(stage, stages, micro_steps) {
                    match turn {
                        Forward(_) => now += 1,
                        Backward(number) => {
                            now -= 1;
                            done.push(number);
                        }
                    }
                    most = most.max(now);
                }
                assert_eq!(most, micro_steps.min(stages - stage), "stage {stage} of {stages}, {micro_steps}");
                assert!(now == 0 && done == (0..micro_steps).collect::<Vec<_>>());
            }
        }
    }

    #[test]
    fn one_order_of_all_passes_has_each_behind_what_it_needs() {
        for (stages, micro_steps) in (2..7).flat_map(|stages| (1..12).map(move |micro_steps| (stages, micro_steps))) {
            let order = turns(stages, micro_steps);
            let place = |stage: usize, turn: Turn| order.iter().position(|of| *of == (stage, turn));
            for (at, (stage, turn)) in order.iter().enumerate() {
                let (Forward(number) | Backward(number)) = *turn;
                let ahead = stage.checked_sub(1).map(|before| place(before, Forward(number)));
                let after = (stage + 1 < stages).then(|| place(stage + 1, Backward(number)));
                match turn {
                    Forward(_) => assert!(ahead.is_none_or(|before| before.unwrap() < at)),
                    Backward(_) if stage + 1 == stages => assert!(ahead.is_none_or(|before| before.unwrap() < at)),
                    Backward(_) => assert!(after.unwrap().unwrap() < at),
                }
                // A result goes to a slot that is free.
                let slots = stages - stage - 1;
                if let (Forward(_), Some(had)) = (turn, number.checked_sub(slots)) {
                    assert!(place(stage + 1, Backward(had)).unwrap() < at, "{stages} stages, {turn:?} of {stage}");
                }
            }
            for stage in 0..stages {
                let own: Vec<Turn> = order.iter().filter(|(of, _)| *of == stage).map(|(_, turn)| *turn).collect();
                assert_eq!(own, schedule(stage, stages, micro_steps));
            }
        }
    }

    #[test]
    fn more_micro_steps_idle_less() {
        assert_eq!([1, 4].map(|micro_steps| idle_share(2, micro_steps)), [0.5, 0.2]);
    }
}
