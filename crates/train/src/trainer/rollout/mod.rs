//! Answers that a run samples to train on: prompts of the data, answers of the model as it is, rewards, advantages,
//! micro-batches. Samples follow from the seed, the number of the step and the weights, so that a resumed run draws the same.

mod advantages;
mod batches;
mod evaluation;
mod exactness;
mod judge;
mod on_policy;
mod own_answers;
mod prompts;
mod rollouts;
mod round;
mod sample;
mod turns;

pub(crate) use self::on_policy::OnPolicy;
pub(crate) use self::rollouts::{Kept, Rollouts, check_data};
