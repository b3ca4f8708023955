//! Option tables.

mod reading;
