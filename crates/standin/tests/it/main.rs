//! Whole training steps of small models on GPUs of each vendor that are not there, against the CPU.

#[path = "../../../compiler/tests/it/support/mod.rs"]
#[allow(dead_code, reason = "the compiler's tests use the rest")]
mod support;

mod faults;
mod reads;
mod steps;
