//! Tests of the option tables: reading, messages and pages.

mod reading;
