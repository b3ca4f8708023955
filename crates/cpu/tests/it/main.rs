//! The CPU backend: attention and small programs.

mod attention;
mod programs;
