//! Operations against recorded values, finite differences and each other.

mod adamw;
mod adamw_8bit;
mod declarations;
mod fusion;
mod golden;
mod gradients;
mod loss_scale;
mod normuon;
mod packed;
mod quantise;
