//! Processes that find each other.

mod meeting;
