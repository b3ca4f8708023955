//! What a run shows while it goes on, and the signals that end it: a line for each step, and on a terminal a bar
//! below them with the time that is left.
//!
//! Knows texts, counts and signals; not what a step is.

use std::io::{IsTerminal, Write, stdout};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use signal_hook::consts::{SIGINT, SIGTERM, SIGUSR1};
use signal_hook::flag;
use train::{Observer, Result, TrainError};

/// Draws of the bar in a second, at most.
const DRAWS: u8 = 10;

/// Lines go to standard output, signals come from the system.
pub struct Console {
    signal: Arc<AtomicUsize>,
    quiet: bool,
    /// On a terminal, from the first step on.
    bar: Option<ProgressBar>,
}

impl Console {
    /// From now on the first SIGINT, SIGTERM or SIGUSR1 is remembered; a second SIGINT ends the process.
    pub fn new(quiet: bool) -> Result<Console> {
        let (signal, stopping) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
        let failed = |error: std::io::Error| TrainError::Failed(format!("cannot watch for signals: {error}"));
        // The order matters: the check of the second signal comes before the mark of the first.
        flag::register_conditional_shutdown(SIGINT, 128 + SIGINT, stopping.clone()).map_err(failed)?;
        flag::register(SIGINT, stopping).map_err(failed)?;
        for number in [SIGINT, SIGTERM, SIGUSR1] {
            flag::register_usize(number, signal.clone(), number as usize).map_err(failed)?;
        }
        Ok(Console { signal, quiet, bar: None })
    }

    pub fn exit_code(&self) -> u8 {
        128 + self.signal.load(Ordering::SeqCst) as u8
    }
}

impl Observer for Console {
    fn line(&mut self, text: &str) {
        match &self.bar {
            _ if self.quiet => {}
            Some(bar) => bar.println(text),
            // A reader that has gone away does not end a run.
            None => {
                let _ = writeln!(stdout(), "{text}").and_then(|()| stdout().flush());
            }
        }
    }

    fn progress(&mut self, done: u64, total: u64) {
        let dumb = std::env::var_os("TERM").is_none_or(|term| term == "dumb");
        if self.quiet || dumb || !stdout().is_terminal() {
            return;
        }
        let bar = self.bar.get_or_insert_with(|| bar(done, total));
        bar.set_position(done);
        if done >= total {
            bar.finish_and_clear();
            self.bar = None;
        }
    }

    fn interrupted(&mut self) -> bool {
        self.signal.load(Ordering::SeqCst) != 0
    }
}

impl Drop for Console {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

fn bar(done: u64, total: u64) -> ProgressBar {
    let colour = std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    let part = if colour { "{wide_bar:.cyan/blue}" } else { "{wide_bar}" };
    let style = ProgressStyle::with_template(&format!("{part} {{pos}}/{{len}} · {{elapsed}} gone, {{eta}} left"));
    let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stdout_with_hz(DRAWS));
    // What was done by earlier processes is not part of this one's speed.
    bar.set_position(done);
    bar.reset_eta();
    bar.with_style(style.expect("the template is our own"))
}
