//! The project's developer tasks: `cargo xtask generate [--check] | tidy | kernels [--vendor nvidia|amd] [--all]
//! [ARCHITECTURE|OPERATION…]`. One file for each; this one dispatches.

mod generate;
mod kernels;
mod notices;
mod stubs;
mod tidy;

use std::path::Path;
use std::process::ExitCode;

const USAGE: &str =
    "usage: cargo xtask generate [--check] | tidy | kernels [--vendor nvidia|amd] [--all] [ARCHITECTURE|OPERATION…]";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask lies in the repository");
    let done = match words.as_slice() {
        ["generate"] => generate::run(root, false),
        ["generate", "--check"] => generate::run(root, true),
        ["kernels", words @ ..] => kernels::run(words),
        ["tidy"] => tidy::run(root),
        _ => {
            eprintln!("{USAGE}");
            return ExitCode::from(2);
        }
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("{message}");
            ExitCode::FAILURE
        }
    }
}
