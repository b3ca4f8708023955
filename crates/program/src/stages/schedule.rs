//! In which order a stage does the passes of a step's micro-steps: one forward, one backward (1F1B; arXiv 2104.04473,
//! section 2.2). Backward passes keep the order of the micro-steps, so that sums are those of one device.

/// One pass of a stage, by the number of the micro-step in its step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    Forward(usize),
    /// The forward pass again and the backward pass: of the last stage all that it does.
    Backward(usize),
}

/// What a stage does for a step of so many micro-steps. Before its first backward pass it has done as many forward passes as
/// there are stages behind it; from then on they alternate. The last stage has backward passes alone.
pub fn schedule(stage: usize, stages: usize, micro_steps: usize) -> Vec<Turn> {
    let behind = stages - 1 - stage;
    if behind == 0 {
        return (0..micro_steps).map(Turn::Backward).collect();
    }
    let ahead = (0..micro_steps.min(behind)).map(Turn::Forward);
    let both = (0..micro_steps).flat_map(|done| {
        let next = done + behind;
        (next < micro_steps).then_some(Turn::Forward(next)).into_iter().chain([Turn::Backward(done)])
    });
    ahead.chain(both).collect()
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
    fn a_stage_has_no_more_micro_steps_under_way_than_slots() {
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
    fn more_micro_steps_idle_less() {
        assert_eq!([1, 4].map(|micro_steps| idle_share(2, micro_steps)), [0.5, 0.2]);
    }
}
